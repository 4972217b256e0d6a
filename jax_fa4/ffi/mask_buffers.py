"""What kernels read of a mask from memory, and tensors without what nobody sees: the same for every architecture."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_fa4.ffi.launch import CUDA_DRIVER, launch
from jax_fa4.kernels.planning_plans import hide_rows_plan
from jax_fa4.problem import AttentionOperands, AttentionProblem
from jax_fa4.schedule.order import WorkTable, earlier_items, later_items
from jax_fa4.schedule.tiles import Intervals, tile_bounds

VECTOR_BYTES = 16


def zero_unseen(is_seen: Any, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Rows of (B, rows, ...) arrays that take no part, which may be NaN, replaced by zeros; is_seen (B or 1, rows)."""
    if not isinstance(is_seen, jax.Array) and is_seen.all():
        return arrays
    seen = jnp.asarray(is_seen)
    return tuple(jnp.where(seen.reshape(seen.shape + (1,) * (one.ndim - 2)), one, 0) for one in arrays)


def hide_unseen(
    rows: Intervals,
    others: Intervals,
    tile_rows: int,
    tiles: int,
    *tensors: jax.Array,
    architecture: str,
    driver: str = CUDA_DRIVER,
) -> tuple[tuple[jax.Array, ...], jax.Array | np.ndarray]:
    """Tensors to read in place of others where these have rows that take no part, which may be NaN.

    Args:
      rows: what each row of the tensors sees, or is seen by.
      others: the reverse, in rows.
      tile_rows: rows of a tile, at most 256.
      tiles: how many tiles of each batch row are asked for, from the first.
      tensors: one or two (B, rows, heads, dim), whole vectors of 16 bytes a row.
      architecture: one of `jax_fa4.kernels.plan.ARCHITECTURES`.
      driver: the driver library that launches the kernel.

    Returns:
      For each tensor one of its shape, which holds something only where the flags, int32 (B, tiles), are 1: zeros in
      place of rows that take no part.
    """
    batch = tensors[0].shape[0]
    if not isinstance(rows.lo, jax.Array) and (rows.lo < rows.hi).all():
        return tensors, np.zeros((batch, tiles), np.int32)
    lo, hi, other_lo, other_hi = rows.lo, rows.hi, others.lo, others.hi
    integers = {
        **{"length": lo.shape[1], "others": other_lo.shape[1], "tile_rows": tile_rows, "tiles": tiles, "batch": batch},
        "interval_stride": lo.shape[1] if lo.shape[0] > 1 else 0,
        "other_stride": other_lo.shape[1] if other_lo.shape[0] > 1 else 0,
    }
    operands = {"lo": lo, "hi": hi, "other_lo": other_lo, "other_hi": other_hi}
    results = {"flags": jax.ShapeDtypeStruct((batch, tiles), jnp.int32)}
    for number, tensor in enumerate(tensors):
        integers[f"vectors_{number}"] = tensor.shape[2] * tensor.shape[3] * tensor.dtype.itemsize // VECTOR_BYTES
        operands[f"tensor_{number}"] = tensor
        results[f"hidden_{number}"] = jax.ShapeDtypeStruct(tensor.shape, tensor.dtype)
    found = launch(hide_rows_plan(architecture, len(tensors)), operands, results, integers, driver=driver)
    return tuple(found[f"hidden_{number}"] for number in range(len(tensors))), found["flags"]


def whole_ids(problem: AttentionProblem, operands: AttentionOperands) -> tuple[jax.Array, jax.Array]:
    """Segment ids of queries (B, T) and keys (B, S), one row for each batch row."""
    known = problem.mask_operands(operands)
    query_ids, key_ids = jnp.asarray(known.query_ids), jnp.asarray(known.key_ids)
    return (
        jnp.broadcast_to(query_ids, (problem.batch, problem.query_length)),
        jnp.broadcast_to(key_ids, (problem.batch, problem.key_length)),
    )


def backward_mask_buffers(
    problem: AttentionProblem,
    operands: AttentionOperands,
    table: WorkTable,
    key_tile: int,
    query_tile: int,
    rows: int,
    *,
    last_first: bool = True,
) -> dict[str, Any]:
    """A backward kernel's operands for masks from memory: items of `key_tile` keys, steps of `query_tile` queries, of
    which there are `rows` with padding.

    Where gradients are deterministic, an item adds after those of later keys, or not `last_first` those of earlier.
    """
    _, seen = problem.intervals(operands)
    found: dict[str, Any] = {"item_table": table.items, "lo": seen.lo, "hi": seen.hi}
    if problem.deterministic:
        bounds = tile_bounds(seen, key_tile, query_tile, problem.query_length)
        before = later_items if last_first else earlier_items
        found["ranks"] = before(bounds, rows // query_tile)
    if problem.has_segment_ids:
        found["query_ids"], found["key_ids"] = whole_ids(problem, operands)
    return found
