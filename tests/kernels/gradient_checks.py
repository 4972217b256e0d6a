"""Gradients of attention in float64 from their formulas, and a kernel's against them by the rule of forward_checks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_fa4 import arguments
from tests.kernels.forward_checks import check_close, rounded, seen_rows, softmax_in_float64


def gradients_in_float64(
    call: arguments.Call, grad_out: jax.Array, grad_lse: jax.Array
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Cotangents of query, key and value in the operands' shapes: exact, and as plain JAX has them.

    The latter rounds the output, probabilities and score gradients to the dtype between the products.
    """
    parts, problem = softmax_in_float64(call), call.problem
    upstream, upstream_lse = (
        np.moveaxis(np.asarray(one.astype(jnp.float32), np.float64), 2, 1) for one in (grad_out, grad_lse)
    )
    is_seen = np.moveaxis(seen_rows(call), 2, 1)
    upstream = np.where(is_seen[..., None], upstream, 0)
    upstream_lse = np.where(is_seen, upstream_lse, 0)[..., None]

    def transposed(matrix: np.ndarray) -> np.ndarray:
        return np.swapaxes(matrix, -1, -2)

    def of_group(of_heads: np.ndarray) -> np.ndarray:
        shape = (problem.batch, problem.kv_heads, problem.group_size, *of_heads.shape[2:])
        return of_heads.reshape(shape).sum(2)

    def gradients(rounding: Any) -> list[np.ndarray]:
        delta = (upstream * rounding(rounding(parts.probs) @ parts.value)).sum(-1, keepdims=True) - upstream_lse
        of_scores = rounding(parts.probs * (upstream @ transposed(parts.value) - delta) * parts.slope)
        found = (
            of_scores @ parts.key * problem.scale,
            of_group(transposed(of_scores) @ parts.query * problem.scale),
            of_group(transposed(rounding(parts.probs)) @ upstream),
        )
        return [np.moveaxis(rounding(one), 1, 2) for one in found]

    exact, plain = gradients(lambda one: one), gradients(lambda one: rounded(one, problem.dtype))
    return {name: pair for name, *pair in zip(("query", "key", "value"), exact, plain, strict=True)}  # type: ignore[misc]


def check_gradients(
    gradients: Any, call: arguments.Call, grad_out: jax.Array, grad_lse: jax.Array, dtype: str | None = None
) -> None:
    """Cotangents of query, key and value against float64."""
    expected = gradients_in_float64(call, grad_out, grad_lse)
    for ours, (exact, plain) in zip(gradients, expected.values(), strict=True):
        check_close(ours, exact, plain, dtype or call.problem.dtype)
