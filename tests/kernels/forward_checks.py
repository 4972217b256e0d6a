"""What the kernels' tests of every architecture share: inputs, attention in float64, and the rule for errors.

A kernel's error is at most twice that of plain JAX in the same dtype (scores and softmax in float32, probabilities
rounded to the dtype, their product with the values rounded again) plus one rounding of the result.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_fa4 import arguments
from jax_fa4.reference import visible_pairs

ROUNDING = {"bfloat16": 2.0**-9, "float16": 2.0**-12}  # half the distance of neighbours, relative


def draw(
    seed: int,
    shape: tuple[int, int, int, int],
    key_length: int,
    kv_heads: int,
    dtype: str,
    spread: float = 1.0,
    value_dim: int | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Query (B, T, N, D) of Gaussian entries times `spread`, Gaussian key and value."""
    batch, _, _, head_dim = shape
    rng = np.random.default_rng(seed)
    query = rng.standard_normal(shape) * spread
    key = rng.standard_normal((batch, key_length, kv_heads, head_dim))
    value = rng.standard_normal((batch, key_length, kv_heads, value_dim or head_dim))
    return tuple(jnp.asarray(one, dtype) for one in (query, key, value))  # type: ignore[return-value]


def drawn_options(options: dict[str, Any], seed: int, lengths: tuple[int, int], heads: int) -> dict[str, Any]:
    """A grid's options, in which `segments` stands for ids of two rows, sorted or not, and `sinks` for one a head."""
    drawn = dict(options)
    if "segments" in drawn:
        rng = np.random.default_rng(seed)
        ids = [rng.integers(0, 5, (2, length)).astype(np.int32) for length in lengths]
        ids = [np.sort(one, axis=-1) for one in ids] if drawn.pop("segments") else ids
        drawn["segment_ids"] = tuple(ids)
    if drawn.pop("sinks", False):
        drawn["sinks"] = jnp.asarray(np.linspace(-3.0, 9.0, heads))
    return drawn


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """float64 of the values rounded to a 16-bit dtype, by way of float32 as JAX does."""
    return values.astype(np.float32).astype(jnp.dtype(dtype)).astype(np.float64)


def seen_pairs(call: arguments.Call) -> np.ndarray:
    """Which query sees which key, (B or 1, N or 1, T, S), computed on the CPU."""
    with jax.default_device(jax.devices("cpu")[0]):
        masks = call.operands._replace(query=None, key=None, value=None, sinks=None)
        masks = jax.tree.map(lambda one: jnp.asarray(np.asarray(one)), masks)
        return np.asarray(jax.jit(visible_pairs, static_argnums=0)(call.problem, masks))


class Softmax(NamedTuple):
    """The parts of a call in float64, heads before rows, keys and values repeated for each query head."""

    query: np.ndarray  # (B, N, T, D)
    key: np.ndarray  # (B, N, S, D)
    value: np.ndarray  # (B, N, S, Dv)
    slope: np.ndarray | float  # derivative of the capped scores by the raw ones, (B, N, T, S)
    probs: np.ndarray  # (B, N, T, S)
    lse: np.ndarray  # (B, N, T)


def softmax_in_float64(call: arguments.Call) -> Softmax:
    """Softmax of a call's rounded operands; rows and keys that take part in nothing count as zeros."""
    problem, visible = call.problem, seen_pairs(call)
    query, key, value = (np.asarray(one.astype(jnp.float32), np.float64) for one in call.operands[:3])
    query, key, value = (np.moveaxis(one, 2, 1) for one in (query, key, value))
    is_key_seen = visible.any((1, 2))[:, None, :, None]
    key, value = (np.where(is_key_seen, one, 0).repeat(problem.group_size, axis=1) for one in (key, value))
    query = np.where(visible.any(-1)[..., None], query, 0)
    scores, slope, cap = query @ np.swapaxes(key, -1, -2) * problem.scale, 1.0, problem.logits_soft_cap
    if cap is not None:
        scores = cap * np.tanh(scores / cap)
        slope = 1 - (scores / cap) ** 2
    scores = np.where(visible, scores, -np.inf)
    sinks = np.full(problem.query_heads, -np.inf)
    if problem.has_sinks:
        sinks = np.asarray(call.operands.sinks, np.float64)
    highest = np.maximum(scores.max(-1, initial=-np.inf), sinks[:, None])[..., None]
    highest = np.where(highest == -np.inf, 0, highest)
    powers = np.exp(scores - highest)
    total = powers.sum(-1, keepdims=True) + np.exp(sinks[:, None, None] - highest)
    with np.errstate(divide="ignore"):
        lse = (highest + np.log(total))[..., 0]
    return Softmax(query, key, value, slope, powers / np.where(total == 0, 1, total), lse)


def in_float64(call: arguments.Call) -> tuple[np.ndarray, np.ndarray]:
    """Output (B, T, N, Dv) and log-sum-exp (B, T, N)."""
    parts = softmax_in_float64(call)
    return np.moveaxis(parts.probs @ parts.value, 1, 2), np.moveaxis(parts.lse, 1, 2)


def in_plain_jax(call: arguments.Call) -> np.ndarray:
    """The output (B, T, N, Dv) of plain JAX in the call's dtype, as float64."""
    parts, dtype = softmax_in_float64(call), call.problem.dtype
    return np.moveaxis(rounded(rounded(parts.probs, dtype) @ parts.value, dtype), 1, 2)


def check_close(ours: Any, exact: np.ndarray, plain: np.ndarray, dtype: str) -> None:
    """The rule, by row against the worst row of the head, and in the root mean square of the head; (B, T, N, D)."""
    ours = np.asarray(ours.astype(jnp.float32), np.float64)
    assert np.isfinite(ours).all()
    errors, allowed = np.abs(ours - exact), np.abs(plain - exact)
    rounding, size = ROUNDING[dtype], np.abs(exact)
    of_row = 2 * allowed.max((1, 3), initial=0)[:, None, :] + rounding * size.max(-1, initial=0)
    assert (errors.max(-1, initial=0) <= of_row + 1e-30).all(), (errors.max(-1) - of_row).max()
    if 0 not in errors.shape:
        squares = [np.sqrt((one**2).mean((1, 3))) for one in (errors, allowed, size)]
        assert (squares[0] <= 2 * squares[1] + rounding * squares[2] + 1e-30).all()


def compare(call: arguments.Call, out: Any, lse: Any, power_error: float = 0.0) -> None:
    """Assert that a kernel's output and log-sum-exp are as near to float64 as the rule says.

    The log-sum-exp's scores are sums of D exact products in float32, and grow with the operands. `power_error` is the
    relative error that a kernel's exponentials may have, which is the sum's too where one of them makes up most of it.
    """
    exact, exact_lse = in_float64(call)
    check_close(out, exact, in_plain_jax(call), call.problem.dtype)
    has_seen = exact_lse > -np.inf
    np.testing.assert_array_equal(np.asarray(lse) > -np.inf, has_seen)
    np.testing.assert_allclose(np.asarray(lse)[has_seen], exact_lse[has_seen], rtol=2e-6, atol=2e-5 + power_error)
    assert not np.asarray(out.astype(jnp.float32))[np.broadcast_to(~seen_rows(call), out.shape[:3])].any()


def seen_rows(call: arguments.Call) -> np.ndarray:
    """Which query rows see a key, (B or 1, T, N or 1)."""
    return np.moveaxis(seen_pairs(call).any(-1), 1, 2)
