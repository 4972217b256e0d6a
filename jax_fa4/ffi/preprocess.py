"""The backward's preprocess as a JAX function, and the same as a formula."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from jax_fa4.cost import ARCHITECTURES as GPUS
from jax_fa4.ffi.launch import CUDA_DRIVER, LaunchError, device_architecture, even_section, launch
from jax_fa4.kernels.plan import ARCHITECTURES, DTYPES
from jax_fa4.kernels.plans import preprocess_plan

ROW_MULTIPLE = 128
"""Rows are padded to a multiple of this where the kernels that read the results name no row tile of their own."""


class Preprocessed(NamedTuple):
    """What the backward kernels read; R is the query length padded to whole tiles of rows.

    lse_log2: (B, N, R) float32, the log-sum-exp times log2(e); 0 for rows that saw no key, +inf for padding rows.
    delta: (B, N, R) float32, row sums of out * grad_out, minus grad_lse; 0 for both.
    accumulator: (B, N, R, accumulator_width) float32, zeros.
    """

    lse_log2: jax.Array
    delta: jax.Array
    accumulator: jax.Array


def padded_length(query_length: int, row_multiple: int = ROW_MULTIPLE) -> int:
    """Rows of the results of `preprocess`."""
    return -(-query_length // row_multiple) * row_multiple


def sections(architecture: str, accumulator_shape: tuple[int, ...]) -> dict[str, int]:
    """How pre- and postprocess walk the heads of all batch rows: the integers of their plans that say so.

    A section is what the L2 cache holds of the sums with as much again of what is read or written with them, which are
    the queries and output gradients in the backward: so its sections are about the same. Where L2 holds not one head,
    rows of all heads go together.
    """
    batch, heads, rows, width = accumulator_shape
    head_bytes = 2 * DTYPES["float32"] * rows * width
    gpu = GPUS["sm_{}{}".format(*ARCHITECTURES[architecture].capability)]
    section = even_section(batch * heads, gpu.section_l2_bytes // max(head_bytes, 1))
    return {"section_heads": section, "sections": batch * heads // max(section, 1)}


def preprocess(
    out: jax.Array,
    grad_out: jax.Array,
    lse: jax.Array,
    grad_lse: jax.Array,
    *,
    accumulator_width: int,
    row_tile: int = ROW_MULTIPLE,
    architecture: str | None = None,
    driver: str = CUDA_DRIVER,
) -> Preprocessed:
    """Runs the kernel: delta = sum(out * grad_out) - grad_lse in float32, the LSE to log2, a zeroed accumulator.

    out, grad_out: (B, T, N, D), bfloat16, float16 or float32, both of one dtype; lse, grad_lse: (B, T, N) float32; T
    >= 1. row_tile: results have whole tiles of so many rows, and of as many as the kernel itself takes. architecture:
    one of `ARCHITECTURES`; None: the default device's. Source: FlashAttention-2, algorithm 2, line 4. Raises
    LaunchError on shapes, dtypes or devices that it does not take, PlanError on a D that is no multiple of 16 bytes,
    KernelUnavailableError where no binary is at hand.
    """
    _check(out, grad_out, lse, grad_lse)
    if architecture is None:
        found = device_architecture()
        if found is None:
            raise LaunchError(
                f"preprocess: the default device is {jax.devices()[0].device_kind}, for which there is no kernel; "
                f"there are kernels for {', '.join(ARCHITECTURES)}. Choose implementation='blockwise'."
            )
        architecture = found.name
    plan = preprocess_plan(architecture, out.dtype.name, out.shape[-1], accumulator_width)

    @custom_vmap
    def call(out: jax.Array, grad_out: jax.Array, lse: jax.Array, grad_lse: jax.Array) -> Preprocessed:
        batch, query_length, heads, _ = out.shape
        rows = padded_length(query_length, math.lcm(row_tile, int(plan.option("rows"))))
        accumulator = jax.ShapeDtypeStruct((batch, heads, rows, accumulator_width), jnp.float32)
        integers = {"heads": heads, "query_length": query_length, "padded_length": rows}
        floats = jax.ShapeDtypeStruct((batch, heads, rows), jnp.float32)
        results = launch(
            plan,
            {"out": out, "grad_out": grad_out, "lse": lse, "grad_lse": grad_lse},
            {"lse_log2": floats, "delta": floats, "accumulator": accumulator},
            integers | sections(plan.architecture, accumulator.shape),
            driver=driver,
        )
        return Preprocessed(**results)

    @call.def_vmap
    def fold(axis_size: int, in_batched: list[bool], *operands: jax.Array) -> tuple[Preprocessed, Any]:
        """Makes the mapped axis part of the batch."""
        folded = []
        for operand, is_batched in zip(operands, in_batched, strict=True):
            whole = operand if is_batched else jnp.broadcast_to(operand, (axis_size, *operand.shape))
            folded.append(whole.reshape(-1, *whole.shape[2:]))
        results = call(*folded)
        unfolded = Preprocessed(*(one.reshape(axis_size, -1, *one.shape[1:]) for one in results))
        return unfolded, Preprocessed(True, True, True)  # type: ignore[arg-type]

    return call(out, grad_out, lse, grad_lse)


def preprocess_formula(
    out: jax.Array, grad_out: jax.Array, lse: jax.Array, grad_lse: jax.Array, *, accumulator_width: int
) -> Preprocessed:
    """`preprocess` in plain JAX, for any device: what the kernel is checked against."""
    batch, query_length, heads, _ = out.shape
    padding = ((0, 0), (0, 0), (0, padded_length(query_length) - query_length))
    saw_nothing = lse == -jnp.inf
    delta = jnp.sum(out.astype(jnp.float32) * grad_out.astype(jnp.float32), axis=-1) - grad_lse
    delta = jnp.where(saw_nothing, 0.0, delta).transpose(0, 2, 1)
    lse_log2 = jnp.where(saw_nothing, 0.0, lse * math.log2(math.e)).transpose(0, 2, 1)
    return Preprocessed(
        lse_log2=jnp.pad(lse_log2, padding, constant_values=jnp.inf),
        delta=jnp.pad(delta, padding),
        accumulator=jnp.zeros((batch, heads, padded_length(query_length), accumulator_width), jnp.float32),
    )


def _check(out: jax.Array, grad_out: jax.Array, lse: jax.Array, grad_lse: jax.Array) -> None:
    if out.ndim != 4 or out.shape[1] == 0:
        raise LaunchError(f"preprocess: out has shape {out.shape}; it takes (B, T, N, D) with T >= 1.")
    if grad_out.shape != out.shape or grad_out.dtype != out.dtype:
        raise LaunchError(
            f"preprocess: grad_out is {grad_out.dtype}{grad_out.shape}; it takes out's {out.dtype}{out.shape}."
        )
    for name, operand in (("lse", lse), ("grad_lse", grad_lse)):
        if operand.shape != out.shape[:3] or operand.dtype != jnp.float32:
            raise LaunchError(f"preprocess: {name} is {operand.dtype}{operand.shape}; it takes float32{out.shape[:3]}.")
