"""The forward pass: per query tile, running maximum, sum and output over its key tiles (FlashAttention, alg. 1)."""

from typing import Any

import jax.numpy as jnp

from jax_fa4.blockwise.scores import Scores
from jax_fa4.blockwise.seen import seen_rows, zero_unseen
from jax_fa4.blockwise.tiling import (
    Tiling,
    batched,
    each,
    geometry,
    put_tile,
    tile_at,
    tile_table,
    visit,
)
from jax_fa4.problem import AttentionOperands, AttentionProblem
from jax_fa4.splitting import with_plain_queries
from jax_fa4.varying import varying_zeros

Array = Any


def scale_of(problem: AttentionProblem, operands: AttentionOperands) -> Array:
    """The factor on the logits, () in the accumulation dtype."""
    scale = operands.scale if problem.scale is None else problem.scale
    return jnp.asarray(scale, problem.accumulation_dtype)


def finite_or_zero(log_value: Array) -> Array:
    """A maximum or log-sum-exp with 0 for -inf, so that exp(-inf - it) is 0 and not NaN."""
    return jnp.where(log_value == -jnp.inf, jnp.zeros_like(log_value), log_value)


def _sinks_of_group(sinks: Array, tiling: Tiling, group: Any) -> Array:
    """(N,) to (units, lanes): the sink of each query head beside each of its queries."""
    rows, heads, _, members, queries = tiling.parts
    by_head = tile_at(sinks.reshape(1, tiling.head_groups, heads, members), 0, group % tiling.head_groups)
    return jnp.broadcast_to(by_head[None, :, :, None], (rows, heads, members, queries)).reshape(
        tiling.units, tiling.lanes
    )


def forward(problem: AttentionProblem, operands: AttentionOperands) -> tuple[Array, Array]:
    """Output and log-sum-exp of a call that is not empty.

    Args:
      problem: the call.
      operands: its arrays.

    Returns:
      out (B, T, N, Dv) in the problem's dtype; lse (B, T, N) in the accumulation dtype.
    """
    problem, operands = with_plain_queries(problem, operands)
    shape = geometry(problem, operands)
    tiling, dtype = shape.tiling, jnp.dtype(problem.accumulation_dtype)
    scores = Scores.of(problem, operands, shape)
    seen = seen_rows(problem, operands, shape, scores)
    table = tile_table(problem, shape, by_key=False)
    scale = scale_of(problem, operands)
    # Masked scores are replaced, so only values of keys that nobody sees can reach the output (0 * NaN).
    queries = tiling.to_tiles(operands.query.astype(dtype), tiling.query_tile)
    keys = tiling.to_tiles(operands.key.astype(dtype), tiling.key_tile)
    values = tiling.to_tiles(zero_unseen(operands.value.astype(dtype), seen.key), tiling.key_tile, swapped=True)

    def row_tile(group: Any, query_index: Any, state: tuple[Array, Array]) -> tuple[Array, Array]:
        out, lse = state
        query = tile_at(queries, group, query_index) * scale

        def step(key_index: Any, carry: tuple[Array, Array, Array], is_full: bool) -> tuple[Array, Array, Array]:
            highest, total, weighted = carry
            logits, _ = scores.tile(query, tile_at(keys, group, key_index), group, query_index, key_index)
            if not is_full:
                logits = jnp.where(scores.visible(group, query_index, key_index), logits, -jnp.inf)
            logits = logits.reshape(tiling.units, tiling.key_tile, tiling.lanes)
            new_highest = jnp.maximum(highest, logits.max(axis=1))
            reference = finite_or_zero(new_highest)
            probs = jnp.exp(logits - reference[:, None])
            shrink = jnp.exp(highest - reference)
            added = batched(tile_at(values, group, key_index), probs, 1)
            return new_highest, total * shrink + probs.sum(axis=1), weighted * shrink[:, None] + added

        highest = varying_zeros((tiling.units, tiling.lanes), dtype, operands)
        total = highest
        if operands.sinks is None:
            highest = highest - jnp.inf
        else:
            highest = highest + _sinks_of_group(operands.sinks.astype(dtype), tiling, group)
            total = total + 1
        weighted = varying_zeros((tiling.units, problem.value_dim, tiling.lanes), dtype, operands)
        highest, total, weighted = visit(table, group, query_index, tiling.key_tiles, step, (highest, total, weighted))
        is_empty = total == 0
        weighted = weighted / jnp.where(is_empty, 1, total)[:, None]
        lse_tile = jnp.where(is_empty, -jnp.inf, highest + jnp.log(total))
        return put_tile(out, weighted, group, query_index), put_tile(lse, lse_tile, group, query_index)

    tiles = (tiling.groups, tiling.query_tiles, tiling.units)
    out = varying_zeros((*tiles, problem.value_dim, tiling.lanes), problem.dtype, operands)
    lse = varying_zeros((*tiles, tiling.lanes), dtype, operands)
    out, lse = each(tiling.groups, tiling.query_tiles, row_tile, (out, lse))
    return (
        tiling.from_tiles(out, tiling.query_tile, problem.query_length, swapped=True),
        tiling.from_tiles(lse[..., None], tiling.query_tile, problem.query_length)[..., 0],
    )
