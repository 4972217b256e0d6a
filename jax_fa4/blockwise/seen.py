"""Rows that nobody sees, and their replacement by zeros: whatever lies there, NaN and inf too, then changes nothing."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jax_fa4.blockwise.scores import Scores
from jax_fa4.blockwise.tiling import (
    Geometry,
    each,
    put_tile,
    tile_at,
    tile_table,
    visit,
)
from jax_fa4.problem import AttentionOperands, AttentionProblem
from jax_fa4.varying import varying_zeros

Array = Any


class Seen(NamedTuple):
    """Which rows take part: queries that see a key, (B or 1, T, N or 1), keys that a query sees, (B or 1, S, K or 1).

    None: all of them, known as the call is traced.
    """

    query: Array | None
    key: Array | None


def seen_rows(problem: AttentionProblem, operands: AttentionOperands, shape: Geometry, scores: Scores) -> Seen:
    """Finds the rows that take part, from the intervals, or a tile at a time where there is a general mask."""
    if problem.has_mask:
        return _seen_through_mask(problem, operands, shape, scores)
    by_interval = [intervals.lo < intervals.hi for intervals in (shape.queries, shape.keys)]
    known = [isinstance(seen, np.ndarray) and bool(seen.all()) for seen in by_interval]
    return Seen(*(None if all_seen else seen[:, :, None] for seen, all_seen in zip(by_interval, known, strict=True)))


def _seen_through_mask(problem: AttentionProblem, operands: AttentionOperands, shape: Geometry, scores: Scores) -> Seen:
    tiling = shape.tiling
    table = tile_table(problem, shape, by_key=False)

    def row_tile(group: Any, query_index: Any, state: tuple[Array, Array]) -> tuple[Array, Array]:
        query_seen, key_seen = state

        def step(key_index: Any, carry: tuple[Array, Array], is_full: bool) -> tuple[Array, Array]:
            sees_any, key_seen = carry
            visible = jnp.broadcast_to(scores.visible(group, query_index, key_index), tiling.parts)
            seen_here = visible.any(axis=(3, 4)).reshape(tiling.units, tiling.key_tile)
            seen_here |= tile_at(key_seen, group, key_index)
            sees_any |= visible.any(axis=2).reshape(tiling.units, tiling.lanes)
            return sees_any, put_tile(key_seen, seen_here, group, key_index)

        carry = (varying_zeros((tiling.units, tiling.lanes), bool, operands), key_seen)
        sees_any, key_seen = visit(table, group, query_index, tiling.key_tiles, step, carry)
        return put_tile(query_seen, sees_any, group, query_index), key_seen

    query_seen = varying_zeros((tiling.groups, tiling.query_tiles, tiling.units, tiling.lanes), bool, operands)
    key_seen = varying_zeros((tiling.groups, tiling.key_tiles, tiling.units, tiling.key_tile), bool, operands)
    query_seen, key_seen = each(tiling.groups, tiling.query_tiles, row_tile, (query_seen, key_seen))
    return Seen(
        tiling.from_tiles(query_seen[..., None], tiling.query_tile, problem.query_length)[..., 0],
        tiling.from_tiles(key_seen[..., None], tiling.key_tile, problem.key_length)[..., 0],
    )


def zero_unseen(array: Array, seen: Array | None) -> Array:
    """(B, length, heads, D) or (B, length, heads) with zeros in the rows that take no part."""
    if seen is None:
        return array
    return jnp.where(seen if array.ndim == 3 else jnp.asarray(seen)[..., None], array, jnp.zeros((), array.dtype))
