"""The backward pass: per key tile, probabilities and their gradients are recomputed for every query tile that sees it.

With p = exp(score - lse) and delta = rowsum(out * grad_out) - grad_lse, the gradient of a score is
p * (grad_out . value - delta) (FlashAttention, algorithm 4; the cotangent of the log-sum-exp joins delta, as
d lse / d score = p). Key and value gradients of a tile are carried through its query tiles; query gradients are added
to one array in place.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp

from jax_fa4.blockwise.forward import finite_or_zero, scale_of
from jax_fa4.blockwise.scores import Scores, TileOfBias
from jax_fa4.blockwise.seen import seen_rows, zero_unseen
from jax_fa4.blockwise.tiling import (
    TileTable,
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
from jax_fa4.varying import varying_zeros

Array = Any


class _Rows(NamedTuple):
    """Tile-major inputs in the accumulation dtype, zeros where unseen; lse and delta without a last axis."""

    query: Array
    key: Array
    value: Array
    grad_out: Array
    lse: Array
    delta: Array


class _Sums(NamedTuple):
    """What is added to across the whole pass: tile-major query gradients, the bias's gradient, the scale's."""

    query: Array
    bias: Array | None
    scale: Array | None


class _Pass(NamedTuple):
    """One backward pass."""

    tiling: Tiling
    scores: Scores
    table: TileTable
    rows: _Rows
    scale: Array
    operands: AttentionOperands

    def key_tile(self, group: Any, key_index: Any, state: tuple[_Sums, Array, Array]) -> tuple[_Sums, Array, Array]:
        """All query tiles that see one key tile."""
        sums, grad_keys, grad_values = state
        key, value = tile_at(self.rows.key, group, key_index), tile_at(self.rows.value, group, key_index)
        scaled_key = key * self.scale

        def step(query_index: Any, carry: tuple[_Sums, Array, Array], is_full: bool) -> tuple[_Sums, Array, Array]:
            sums, grad_key, grad_value = carry
            query, grad_out = (tile_at(rows, group, query_index) for rows in (self.rows.query, self.rows.grad_out))
            probs, grad_scores, grad_logits = self._tile(
                query, scaled_key, value, grad_out, (group, query_index, key_index), is_full
            )
            grad_query = batched(scaled_key.swapaxes(1, 2), grad_logits, 1) + tile_at(sums.query, group, query_index)
            grad_bias = sums.bias
            if grad_bias is not None:
                place = TileOfBias(self.tiling, grad_bias.shape, group, query_index, key_index)
                grad_bias = place.add(grad_bias, grad_scores.reshape(self.tiling.parts))
            sums = sums._replace(query=put_tile(sums.query, grad_query, group, query_index), bias=grad_bias)
            return sums, grad_key + batched(grad_logits, query, 1), grad_value + batched(probs, grad_out, 1)

        zero_key, zero_value = (varying_zeros(rows.shape, rows.dtype, self.operands) for rows in (key, value))
        carry = (sums, zero_key, zero_value)
        sums, grad_key, grad_value = visit(self.table, group, key_index, self.tiling.query_tiles, step, carry)
        if sums.scale is not None:
            sums = sums._replace(scale=sums.scale + (grad_key * key).sum())
        grad_key = grad_key * self.scale
        return (
            sums,
            put_tile(grad_keys, grad_key, group, key_index),
            put_tile(grad_values, grad_value, group, key_index),
        )

    def _tile(
        self, query: Array, scaled_key: Array, value: Array, grad_out: Array, place: tuple[Any, Any, Any], is_full: bool
    ) -> tuple[Array, Array, Array]:
        """(probs, gradient of the scores, gradient of scale * q.k), each (units, key_tile, lanes)."""
        group, query_index, key_index = place
        whole = (self.tiling.units, self.tiling.key_tile, self.tiling.lanes)
        scores, slope = self.scores.tile(query, scaled_key, group, query_index, key_index)
        lse, delta = (tile_at(rows, group, query_index) for rows in (self.rows.lse, self.rows.delta))
        probs = jnp.exp(scores.reshape(whole) - lse[:, None])
        if not is_full:
            visible = self.scores.visible(group, query_index, key_index)
            probs = jnp.where(visible, probs.reshape(self.tiling.parts), 0).reshape(whole)
        grad_scores = probs * (batched(value, grad_out, 2) - delta[:, None])
        grad_logits = grad_scores if slope is None else grad_scores * slope.reshape(whole)
        return probs, grad_scores, grad_logits


def backward(
    problem: AttentionProblem, operands: AttentionOperands, out: Array, lse: Array, grad_out: Array, grad_lse: Array
) -> AttentionOperands:
    """Cotangents of a call that is not empty.

    Args:
      problem: the call.
      operands: its arrays.
      out: (B, T, N, Dv), the forward's.
      lse: (B, T, N), the forward's.
      grad_out: (B, T, N, Dv).
      grad_lse: (B, T, N), zeros where the log-sum-exp is not used.

    Returns:
      Cotangents of query, key, value, bias and scale in their shapes and dtypes; None elsewhere.
    """
    shape = geometry(problem, operands)
    tiling, dtype = shape.tiling, jnp.dtype(problem.accumulation_dtype)
    scores = Scores.of(problem, operands, shape)
    seen = seen_rows(problem, operands, shape, scores)
    query, out, grad_out = (zero_unseen(rows.astype(dtype), seen.query) for rows in (operands.query, out, grad_out))
    key, value = (zero_unseen(rows.astype(dtype), seen.key) for rows in (operands.key, operands.value))
    delta = (out * grad_out).sum(axis=-1) - grad_lse

    def statistic(rows: Array) -> Array:
        return tiling.to_tiles(rows[..., None], tiling.query_tile)[..., 0]

    rows = _Rows(
        query=tiling.to_tiles(query, tiling.query_tile),
        key=tiling.to_tiles(key, tiling.key_tile),
        value=tiling.to_tiles(value, tiling.key_tile),
        grad_out=tiling.to_tiles(grad_out, tiling.query_tile),
        lse=statistic(finite_or_zero(lse)),
        delta=statistic(zero_unseen(delta, seen.query)),
    )
    table = tile_table(problem, shape, by_key=True)
    one_pass = _Pass(tiling, scores, table, rows, scale_of(problem, operands), operands)
    query_shape = (tiling.groups, tiling.query_tiles, tiling.units, problem.head_dim, tiling.lanes)
    sums = _Sums(
        query=varying_zeros(query_shape, dtype, operands),
        bias=None if operands.bias is None else varying_zeros(operands.bias.shape, dtype, operands),
        scale=None if operands.scale is None else varying_zeros((), dtype, operands),
    )
    grad_key, grad_value = (varying_zeros(of.shape, problem.dtype, operands) for of in (rows.key, rows.value))
    carry = (sums, grad_key, grad_value)
    sums, grad_key, grad_value = each(tiling.groups, tiling.key_tiles, one_pass.key_tile, carry)
    grad_query = tiling.from_tiles(sums.query, tiling.query_tile, problem.query_length, swapped=True)
    return AttentionOperands(
        query=grad_query.astype(operands.query.dtype),
        key=tiling.from_tiles(grad_key, tiling.key_tile, problem.key_length),
        value=tiling.from_tiles(grad_value, tiling.key_tile, problem.key_length),
        bias=None if sums.bias is None else sums.bias.astype(operands.bias.dtype),
        scale=None if sums.scale is None else sums.scale.astype(operands.scale.dtype),
    )
