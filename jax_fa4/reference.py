"""Dense attention in plain JAX: slow, quadratic in memory, and right; what everything else is held against.

Computes in float32, or float64 for float64 operands, and is differentiated by JAX itself, so that every transformation
and every order of derivative works. The mask is built pair by pair from its definition, not from the intervals of
`jax_fa4.schedule.tiles`, so that the two can be compared.
"""

import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jax_fa4.problem import AttentionOperands, AttentionProblem

if TYPE_CHECKING:
    from jax_fa4.dispatch import Target


def visible_pairs(problem: AttentionProblem, operands: AttentionOperands) -> jax.Array:
    """Which query sees which key, (B or 1, N or 1, T, S) bool."""
    rule, data = problem.mask, problem.mask_operands(operands)
    query_index = jnp.arange(rule.query_length)[:, None]
    key_index = jnp.arange(rule.key_length)[None, :]
    left, right = (None if side is None else min(side, rule.query_length + rule.key_length) for side in rule.band)
    distance = key_index - query_index - rule.diagonal_offset
    visible = jnp.ones((1, 1, rule.query_length, rule.key_length), bool)
    if left is not None:
        visible &= distance >= -left
    if right is not None:
        visible &= distance <= right
    if data.query_lengths is not None:
        visible &= query_index < jnp.asarray(data.query_lengths)[:, None, None, None]
    if data.key_lengths is not None:
        visible &= key_index < jnp.asarray(data.key_lengths)[:, None, None, None]
    if data.query_ids is not None:
        query_ids = jnp.asarray(data.query_ids)[:, None, :, None]
        visible &= (query_ids == jnp.asarray(data.key_ids)[:, None, None, :]) & (query_ids >= 0)
    if operands.mask is not None:
        visible &= operands.mask
    return visible


class Reference:
    """Dense attention; takes every problem on every device."""

    name = "reference"

    def why_not(self, problem: AttentionProblem, target: "Target") -> str | None:
        """None: it takes every problem, unless told to split keys."""
        if problem.key_splits not in (None, 1):
            return f"it does not split keys (key_splits is {problem.key_splits}); leave key_splits out."
        return None

    def describe(self, problem: AttentionProblem, target: "Target") -> list[tuple[str, str]]:
        """What `explain` says about a call."""
        scores = problem.batch * problem.query_heads * problem.query_length * problem.key_length
        size = scores * (8 if problem.accumulation_dtype == "float64" else 4)
        return [
            ("tiles", "none: one dense array of scores"),
            ("workspace", f"{size:,} bytes for each array of scores, some of which differentiation keeps"),
            ("gradients", "by JAX, of any order, forward and reverse"),
        ]

    def forward(self, problem: AttentionProblem, operands: AttentionOperands) -> tuple[jax.Array, jax.Array]:
        """The output (B, T, N, Dv) in the problem's dtype and the log-sum-exp (B, T, N) in its accumulation dtype.

        out = softmax(softcap(scale * q.k) + bias) . v over the visible keys, with exp(sink) in the denominator.
        """
        wide = problem.accumulation_dtype
        visible = visible_pairs(problem, operands)
        sees = jnp.swapaxes(jnp.any(visible, axis=3), 1, 2)[..., None]  # (B or 1, T, N or 1, 1)
        query = jnp.where(sees, operands.query, 0).astype(wide)
        key, value = _seen_rows(problem, operands, visible)
        scores = _scores(problem, operands, query, key)
        scores = jnp.where(visible, scores, -jnp.inf)
        row_max = jnp.max(scores, axis=-1, initial=-math.inf)
        if operands.sinks is not None:
            sinks = operands.sinks.astype(wide)[None, :, None]
            row_max = jnp.maximum(row_max, sinks)
        row_max = jax.lax.stop_gradient(jnp.where(row_max == -jnp.inf, 0.0, row_max))
        probs = jnp.exp(scores - row_max[..., None])
        row_sum = jnp.sum(probs, axis=-1)
        if operands.sinks is not None:
            row_sum = row_sum + jnp.exp(sinks - row_max)
        # The divisor and the logarithm's argument are made harmless before they are used, so that derivatives of every
        # order of an empty row are 0, never 0 * inf.
        is_empty = row_sum == 0
        row_sum = jnp.where(is_empty, 1.0, row_sum)
        lse = jnp.where(is_empty, -jnp.inf, jnp.log(row_sum) + row_max)
        probs = probs / row_sum[..., None]
        probs = probs.reshape(problem.batch, problem.kv_heads, problem.group_size, *probs.shape[2:])
        out = jnp.einsum("bkgts,bskd->btkgd", probs, value, precision=jax.lax.Precision.HIGHEST)
        out = out.reshape(problem.batch, problem.query_length, problem.query_heads, problem.value_dim)
        out = jnp.where(sees, out, 0)  # and so the cotangent of a row that sees nothing stops here, whatever it holds
        return out.astype(problem.dtype), jnp.swapaxes(lse, 1, 2)


def _seen_rows(
    problem: AttentionProblem, operands: AttentionOperands, visible: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Key and value in the wide dtype, zeros in rows that no query sees: NaN there must not matter."""
    seen = jnp.any(visible, axis=2)  # (B or 1, N or 1, S)
    if seen.shape[1] == problem.query_heads and problem.kv_heads:
        groups = seen.reshape(seen.shape[0], problem.kv_heads, problem.group_size, problem.key_length)
        seen = jnp.any(groups, axis=2)
    seen = jnp.swapaxes(seen, 1, 2)[..., None]  # (B or 1, S, K or 1, 1)
    key, value = (jnp.where(seen, rows, 0) for rows in (operands.key, operands.value))
    return key.astype(problem.accumulation_dtype), value.astype(problem.accumulation_dtype)


def _scores(problem: AttentionProblem, operands: AttentionOperands, query: jax.Array, key: jax.Array) -> jax.Array:
    """softcap(scale * q.k) + bias, (B, N, T, S).

    The queries carry the scale. A product with it behind would be rounded otherwise where XLA makes one operation of
    it and of the maximum's subtraction, and differ by more than exp bears where scores are huge.
    """
    query = query * (operands.scale if problem.scale is None else problem.scale)
    grouped = query.reshape(*query.shape[:2], problem.kv_heads, problem.group_size, problem.head_dim)
    scores = jnp.einsum("btkgd,bskd->bkgts", grouped, key, precision=jax.lax.Precision.HIGHEST)
    scores = scores.reshape(problem.batch, problem.query_heads, problem.query_length, problem.key_length)
    if problem.logits_soft_cap is not None:
        scores = problem.logits_soft_cap * jnp.tanh(scores / problem.logits_soft_cap)
    if operands.bias is not None:
        scores = scores + operands.bias.astype(problem.accumulation_dtype)
    return scores


reference = Reference()
