"""The backward's postprocess as a JAX function, and the same as a formula."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_fa4.ffi.launch import CUDA_DRIVER, LaunchError, launch
from jax_fa4.ffi.preprocess import ROW_MULTIPLE, sections
from jax_fa4.kernels.plans import postprocess_plan


def postprocess(
    accumulator: jax.Array,
    *,
    query_length: int,
    head_dim: int,
    dtype: str,
    scale: float,
    architecture: str,
    fragment_parts: int = 0,
    turned_rows: int = 0,
    driver: str = CUDA_DRIVER,
) -> jax.Array:
    """Runs the kernel: the sums of the query gradients, scaled and rounded.

    accumulator: (B, N, R, W) float32, R the padded query length and W at least head_dim, as `preprocess` makes it and
    a backward kernel adds to it; fragment_parts, turned_rows: in which order, as `postprocess_plan` takes them. Returns
    (B, query_length, N, head_dim) in dtype. architecture: one of `ARCHITECTURES`. Raises LaunchError on another shape,
    PlanError on a head_dim that is no multiple of 16 bytes, KernelUnavailableError where no binary is at hand.
    """
    batch, heads, rows, width = accumulator.shape
    tile = turned_rows or ROW_MULTIPLE
    if rows < query_length or rows % tile or accumulator.dtype != jnp.float32:
        raise LaunchError(
            f"postprocess: accumulator is {accumulator.dtype}{accumulator.shape}; it takes float32 with whole tiles of "
            f"{tile} rows for query_length {query_length}."
        )
    integers = {"heads": heads, "query_length": query_length, "padded_length": rows}
    results = launch(
        postprocess_plan(architecture, dtype, head_dim, width, fragment_parts, turned_rows),
        {"accumulator": accumulator},
        {"grad_query": jax.ShapeDtypeStruct((batch, query_length, heads, head_dim), dtype)},
        integers | sections(architecture, accumulator.shape),
        {"scale": scale},
        driver=driver,
    )
    return results["grad_query"]


def postprocess_formula(
    accumulator: jax.Array, *, query_length: int, head_dim: int, dtype: str, scale: float
) -> jax.Array:
    """`postprocess` in plain JAX, for any device: what the kernel is checked against."""
    sums = accumulator[:, :, :query_length, :head_dim] * jnp.float32(scale)
    return sums.transpose(0, 2, 1, 3).astype(dtype)
