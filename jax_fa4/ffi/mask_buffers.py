"""What kernels read of a mask from memory, and tensors without what nobody sees: the same for every architecture."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_fa4.ffi.preprocess import padded_length
from jax_fa4.problem import AttentionOperands, AttentionProblem
from jax_fa4.schedule.order import WorkTable, later_items
from jax_fa4.schedule.tiles import tile_bounds


def zero_unseen(is_seen: Any, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Rows of (B, rows, ...) arrays that take no part, which may be NaN, replaced by zeros; is_seen (B or 1, rows)."""
    if not isinstance(is_seen, jax.Array) and is_seen.all():
        return arrays
    seen = jnp.asarray(is_seen)
    return tuple(jnp.where(seen.reshape(seen.shape + (1,) * (one.ndim - 2)), one, 0) for one in arrays)


def whole_ids(problem: AttentionProblem, operands: AttentionOperands) -> tuple[jax.Array, jax.Array]:
    """Segment ids of queries (B, T) and keys (B, S), one row for each batch row."""
    known = problem.mask_operands(operands)
    query_ids, key_ids = jnp.asarray(known.query_ids), jnp.asarray(known.key_ids)
    return (
        jnp.broadcast_to(query_ids, (problem.batch, problem.query_length)),
        jnp.broadcast_to(key_ids, (problem.batch, problem.key_length)),
    )


def backward_mask_buffers(
    problem: AttentionProblem, operands: AttentionOperands, table: WorkTable, key_tile: int, query_tile: int
) -> dict[str, Any]:
    """A backward kernel's operands for masks from memory: items of `key_tile` keys, steps of `query_tile` queries."""
    _, rows = problem.intervals(operands)
    found = {"item_table": jnp.asarray(table.items), "lo": jnp.asarray(rows.lo), "hi": jnp.asarray(rows.hi)}
    if problem.deterministic:
        bounds = tile_bounds(rows, key_tile, query_tile, problem.query_length)
        found["ranks"] = jnp.asarray(later_items(bounds, padded_length(problem.query_length) // query_tile))
    if problem.has_segment_ids:
        found["query_ids"], found["key_ids"] = whole_ids(problem, operands)
    return found
