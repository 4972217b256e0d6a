"""How each library's attention is called in the benchmark: ours, and others where they are installed.

A candidate makes, for a case and a pass, a function without arguments that starts one call and gives something to wait
for. Operands are Gaussian and the same in every library; the backward takes a Gaussian cotangent.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import unittest.mock
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

import jax_fa4
from benchmarks.cases import Case
from jax_fa4 import arguments
from jax_fa4.ffi.hopper_forward import hopper_forward
from jax_fa4.kernels.hopper.plans import FORWARD_TILES, SHORT_TILES
from jax_fa4.schedule.order import Policy

Start = Callable[[], Any]
Candidate = Callable[[Case, str], Start]
DTYPE = "bfloat16"


class NotMeasuredError(Exception):
    """The candidate does not take the case."""


@functools.lru_cache(maxsize=1)
def operands(case: Case) -> tuple[jax.Array, ...]:
    """Query, key, value and the output's cotangent."""
    seeds = jax.random.split(jax.random.key(0), 4)
    heads = (case.heads, case.kv_heads, case.kv_heads, case.heads)
    queries = case.queries or case.length
    lengths = (queries, case.length, case.length, queries)
    shapes = [(case.batch, *one, case.head_dim) for one in zip(lengths, heads, strict=True)]
    return tuple(jax.random.normal(seed, shape, DTYPE) for seed, shape in zip(seeds, shapes, strict=True))


def start_in_jax(attend: Callable[..., jax.Array], case: Case, passes: str, *others: Any) -> Start:
    """A jitted call of the pass; `others` are further arguments of the program."""
    tensors = operands(case)
    if passes == "forward":
        return functools.partial(jax.jit(attend), *tensors[:3], *others)

    def both(query: jax.Array, key: jax.Array, value: jax.Array, grad_out: jax.Array, *others: Any) -> Any:
        out, pull = jax.vjp(lambda *one: attend(*one, *others), query, key, value)
        return out, pull(grad_out)

    return functools.partial(jax.jit(both), *tensors, *others)


def ours(implementation: str | None, traced_ids: bool = False, dense: bool = False) -> Candidate:
    """`jax_fa4.attention`; with `dense`, packed rows are taken for one document each: what leaving ids out costs."""

    def candidate(case: Case, passes: str) -> Start:
        if case.documents is None and (traced_ids or dense):
            raise NotMeasuredError("it is for packed rows")
        known = None if dense else case.segment_ids
        # An argument: XLA would fold a constant's planning.
        others = (jnp.asarray(known),) if traced_ids else ()

        def attend(query: jax.Array, key: jax.Array, value: jax.Array, ids: Any = known) -> jax.Array:
            return jax_fa4.attention(
                *(query, key, value), segment_ids=ids, is_causal=case.is_causal, implementation=implementation
            )

        return start_in_jax(attend, case, passes, *others)

    return candidate


def hopper_with(**choices: Any) -> Candidate:
    """The Hopper forward with other choices than its own: order of the work table, tiles, packing of groups.

    Tiles "usual" and "short" are those of the plans for the case's head dimension.
    """
    tables = {"usual": FORWARD_TILES, "short": SHORT_TILES}

    def candidate(case: Case, passes: str) -> Start:
        if passes != "forward":
            raise NotMeasuredError("it is a forward")
        given = dict(choices)
        if "tiles" in given:
            given["tiles"] = tables[given["tiles"]][case.head_dim]

        def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            call = arguments.read_call(query, key, value, segment_ids=case.segment_ids, is_causal=case.is_causal)
            return hopper_forward(call.problem, call.operands, **given)[0]

        return start_in_jax(attend, case, passes)

    return candidate


def of_jax_nn(case: Case, passes: str) -> Start:
    """`jax.nn.dot_product_attention`: cuDNN on a GPU, XLA elsewhere; packed rows by a dense mask."""
    ids = case.segment_ids
    mask = None if ids is None else jnp.asarray(ids[:, None, :, None] == ids[:, None, None, :])
    backend = "cudnn" if jax.default_backend() == "gpu" else "xla"
    attend = functools.partial(
        jax.nn.dot_product_attention, mask=mask, is_causal=case.is_causal, implementation=backend
    )
    return start_in_jax(attend, case, passes)


def of_flash_attn3_jax(case: Case, passes: str) -> Start:
    """flash_attn3_jax; it takes no documents."""
    if case.documents is not None:
        raise NotMeasuredError("it takes no segment ids")
    from flash_attn3_jax import flash_mha

    return start_in_jax(functools.partial(flash_mha, is_causal=case.is_causal), case, passes)


def of_tokamax(case: Case, passes: str) -> Start:
    """tokamax on Mosaic GPU; packed rows by a dense mask."""
    # It imports a profiler, which it needs for tuning only.
    for name in ("xprof", "xprof.cli", "xprof.cli.tools", "xprof.cli.tools.get_kernel_stats_tool", "xprof.convert"):
        sys.modules.setdefault(name, unittest.mock.MagicMock())
    import tokamax

    ids = case.segment_ids
    mask = None if ids is None else jnp.asarray(ids[:, None, :, None] == ids[:, None, None, :])
    attend = functools.partial(
        tokamax.dot_product_attention, mask=mask, is_causal=case.is_causal, implementation="mosaic"
    )
    return start_in_jax(attend, case, passes)


def of_flash_attention_4(case: Case, passes: str) -> Start:
    """Official FlashAttention-4 in PyTorch; packed rows by its varlen function."""
    import torch
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    query, key, value, grad_out = (
        torch.from_dlpack(one).clone().requires_grad_(index < 3) for index, one in enumerate(operands(case))
    )
    if case.documents is None:
        call = functools.partial(flash_attn_func, query, key, value, causal=case.is_causal)
    else:
        lengths = [length for row in case.documents for length in row]
        offsets = torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)
        flat = [one.detach().reshape(-1, *one.shape[2:]).requires_grad_() for one in (query, key, value)]
        query, key, value = flat
        grad_out = grad_out.reshape(-1, *grad_out.shape[2:])
        sizes = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
        sizes |= {"max_seqlen_q": max(lengths), "max_seqlen_k": max(lengths)}
        call = functools.partial(flash_attn_varlen_func, query, key, value, causal=case.is_causal, **sizes)

    def start() -> Any:
        if passes == "forward":
            with torch.no_grad():
                return call()
        out = call()
        out = out[0] if isinstance(out, tuple) else out
        return torch.autograd.grad(out, (query, key, value), grad_out)

    return start


def all_candidates(implementation: str | None = None) -> dict[str, Candidate]:
    """Ours first, then the others."""
    return {
        "jax_fa4": ours(implementation),
        "jax_fa4, traced ids": ours(implementation, traced_ids=True),
        "jax_fa4, ids left out": ours(implementation, dense=True),
        "jax.nn": of_jax_nn,
        "flash_attn3_jax": of_flash_attn3_jax,
        "tokamax": of_tokamax,
        "FlashAttention-4": of_flash_attention_4,
    }


def hopper_candidates(kind: str) -> dict[str, Candidate]:
    """The Hopper forward: its table in each order; both tiles, for short sequences; with and without packed groups."""
    if kind == "orders":
        return {policy.value: hopper_with(policy=policy) for policy in Policy}
    if kind == "short":
        return {f"{name} tiles": hopper_with(tiles=name) for name in ("usual", "short")} | {"jax.nn": of_jax_nn}
    choices = {"packed": True, "not packed": False}
    decode = {
        f"{name}, {tiles} tiles": hopper_with(packed=packed, tiles=tiles)
        for name, packed in choices.items()
        for tiles in ("usual", "short")
    }
    return decode | {"jax.nn": of_jax_nn}


NEEDS: Mapping[str, tuple[str, ...]] = {
    "flash_attn3_jax": ("flash_attn3_jax",),
    "tokamax": ("tokamax",),
    "FlashAttention-4": ("torch", "flash_attn"),
}


def installed(name: str) -> bool:
    """Whether the modules that a candidate needs are there."""
    return all(importlib.util.find_spec(module) is not None for module in NEEDS.get(name, ()))


def wait(result: Any) -> None:
    """Until a call is done."""
    if jax.tree.leaves(result) and all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(result)):
        jax.block_until_ready(result)
    else:
        sys.modules["torch"].cuda.synchronize()
