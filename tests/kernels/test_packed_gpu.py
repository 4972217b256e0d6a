"""Packed documents, few queries in parts, caps and sinks by `jax_fa4.attention` on a GPU, against float64.

Beside `test_attention_gpu.py`, which has the dense calls.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fa4
from jax_fa4 import arguments
from tests.kernels.forward_checks import compare, draw
from tests.kernels.gradient_checks import check_gradients
from tests.kernels.test_attention_gpu import check, cotangents, needs_kernels, poison, value_and_gradients

__all__ = ["needs_kernels"]  # a fixture of every test here

pytestmark = pytest.mark.gpu
LAST: dict[str, Any] = {"is_causal": True, "causal_alignment": "bottom_right"}


def ids_of(kind: str, length: int) -> np.ndarray:
    """Ids of two rows: packed with padding at the end, in any order, or with holes between documents."""
    rng = np.random.default_rng(length)
    ids = np.sort(rng.integers(0, 6, (2, length)), axis=-1).astype(np.int32)
    if kind == "packed":
        ids[1, length - 77 :] = -1
    elif kind == "any order":
        ids = rng.integers(-1, 5, (2, length)).astype(np.int32)
    else:
        ids[ids % 2 == 1] = -1
    return ids


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kind", ["packed", "any order", "holes"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_values_and_gradients_by_a_plan(head_dim: int, kind: str, deterministic: bool) -> None:
    """The plan is an argument of the program, with the tables of both passes."""
    ids, options = ids_of(kind, 900), {"is_causal": True, "deterministic": deterministic}
    tensors = draw(head_dim, (2, 900, 4, head_dim), 900, 2, "bfloat16")
    call = arguments.read_call(*tensors, segment_ids=ids, **options)
    upstream = cotangents(call)
    plan = jax_fa4.plan_segments(jnp.asarray(ids), is_causal=True, heads=(4, 2), head_dim=head_dim)
    function = jax.jit(lambda plan, *one: value_and_gradients(*one, segment_ids=plan, **options))
    poison(jax.eval_shape(function, plan, *tensors, *upstream))
    (out, lse), gradients = function(plan, *tensors, *upstream)
    compare(call, out, lse)
    check_gradients(gradients, call, *upstream)


def test_new_ids_in_a_compiled_program() -> None:
    """One program, ids of five kinds one after another."""
    tensors = draw(3, (2, 700, 4, 64), 700, 2, "bfloat16")
    upstream = cotangents(arguments.read_call(*tensors, is_causal=True))
    function = jax.jit(lambda ids, *one: value_and_gradients(*one, segment_ids=ids, is_causal=True))
    kinds = [ids_of(kind, 700) for kind in ("packed", "any order", "holes")]
    for ids in (*kinds, np.zeros((2, 700), np.int32), np.full((2, 700), -1, np.int32)):
        (out, lse), _ = function(jnp.asarray(ids), *tensors, *upstream)
        compare(arguments.read_call(*tensors, segment_ids=ids, is_causal=True), out, lse)
    assert function._cache_size() == 1


@pytest.mark.parametrize("is_traced", [False, True])
@pytest.mark.parametrize("parts", [None, 1, 3, 16])
@pytest.mark.parametrize(("length", "heads", "head_dim"), [(1, (16, 2), 128), (7, (4, 4), 64), (16, (8, 1), 128)])
def test_few_queries_in_parts(length: int, heads: tuple[int, int], head_dim: int, parts: Any, is_traced: bool) -> None:
    """Against a cache of uneven length, of which batch rows have filled shares; NaN in the rest."""
    query, key, value = draw(length, (3, length, heads[0], head_dim), 3001, heads[1], "bfloat16")
    filled = np.array([3001, 1700, 20])
    is_empty = jnp.asarray(np.arange(3001)[None] >= filled[:, None])[:, :, None, None]
    key, value = (jnp.where(is_empty, jnp.nan, one) for one in (key, value))
    lengths = jnp.asarray(filled) if is_traced else filled
    for options in ({"key_value_seq_lengths": lengths}, LAST):
        tensors = (query, key, value) if options is not LAST else draw(1, query.shape, 3001, heads[1], "bfloat16")
        function = jax.jit(
            lambda *one, options=options: jax_fa4.attention(*one, return_residual=True, key_splits=parts, **options)
        )
        poison(jax.eval_shape(function, *tensors))
        known = {"key_value_seq_lengths": filled} if options is not LAST else LAST
        compare(arguments.read_call(*tensors, **known), *function(*tensors))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("options", [{"logits_soft_cap": 5.0}, {"sinks": [-3.0, 0.0, 2.0, 6.0]}], ids=["cap", "sinks"])
def test_caps_and_sinks(head_dim: int, options: dict[str, Any]) -> None:
    options = {**options, "is_causal": True}
    if "sinks" in options:
        options["sinks"] = jnp.asarray(options["sinks"])
    tensors = draw(8, (2, 500, 4, head_dim), 500, 4, "bfloat16", 2.0)
    if "fa4" not in jax_fa4.explain(*tensors, **options).implementation:
        pytest.skip("these kernels are not in the wheel, and nvidia-cutlass-dsl is not there to build them")
    check(tensors, **options)


def test_a_quarter_of_a_million_tokens_take_linear_memory() -> None:
    """Forward and backward of one row with traced ids; its last document is what it is alone."""
    shapes = {"query": 4, "key": 2, "value": 2}
    last = 3000

    def run(query: jax.Array, key: jax.Array, value: jax.Array, ids: jax.Array) -> Any:
        out, pull = jax.vjp(
            lambda *one: jax_fa4.attention(*one, segment_ids=ids, is_causal=True, implementation="fa4"),
            *(query, key, value),
        )
        return out, pull(out)

    taken = {}
    for length in (1 << 17, 1 << 18):
        seeds = jax.random.split(jax.random.key(length), 3)
        tensors = [
            jax.random.normal(seed, (1, length, heads, 128), jnp.bfloat16)
            for seed, heads in zip(seeds, shapes.values(), strict=True)
        ]
        ids = jnp.asarray((np.arange(length) - length + last) // last)[None]
        compiled = jax.jit(run).lower(*tensors, ids - ids.min()).compile()
        taken[length] = compiled.memory_analysis().temp_size_in_bytes / tensors[0].nbytes
        out, gradients = compiled(*tensors, ids - ids.min())
    print({length: f"{times:.2f} times the queries' bytes" for length, times in taken.items()})
    assert taken[1 << 18] <= 1.01 * taken[1 << 17]
    assert taken[1 << 18] < 8
    alone = [one[:, -last:] for one in tensors]
    np.testing.assert_array_equal(np.isfinite(np.asarray(out, np.float32)), True)
    expected, pull = jax.vjp(lambda *one: jax_fa4.attention(*one, is_causal=True, implementation="fa4"), *alone)
    for mine, theirs in zip((out, *gradients), (expected, *pull(expected)), strict=True):
        mine, theirs = (np.asarray(one, np.float64) for one in (mine[:, -last:], theirs))
        np.testing.assert_allclose(mine, theirs, rtol=2.0**-6, atol=2.0**-7 * np.abs(theirs).max())
