"""What the forward kernels' tests of every architecture share: operands, float64, the comparison.

Plain JAX is `reference` in the same dtype, on the CPU; a kernel may have twice its error plus one rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_fa4 import arguments
from jax_fa4.reference import reference, visible_pairs

ROUNDING = {"bfloat16": 2.0**-9, "float16": 2.0**-12}  # half the distance of neighbours, relative


def draw(
    seed: int,
    shape: tuple[int, int, int, int],
    key_length: int,
    kv_heads: int,
    dtype: str,
    spread: float,
    value_dim: int | None = None,
) -> Any:
    """Query of that shape (batch, length, heads, head_dim), key and value; `spread` widens the scores."""
    batch, query_length, heads, head_dim = shape
    rng = np.random.default_rng(seed)
    query = rng.standard_normal((batch, query_length, heads, head_dim)) * spread
    key, value = (rng.standard_normal((batch, key_length, kv_heads, dim)) for dim in (head_dim, value_dim or head_dim))
    return tuple(jnp.asarray(one, dtype) for one in (query, key, value))


def on_cpu(call: arguments.Call, function: Callable[..., Any]) -> Any:
    """`function(problem, operands)` on the CPU, where compiling it takes no search for the fastest products."""
    with jax.default_device(jax.devices("cpu")[0]):
        moved = jax.tree.map(lambda one: jnp.asarray(np.asarray(one)), call.operands)
        return jax.tree.map(np.asarray, function(call.problem, moved))


def in_float64(call: arguments.Call) -> tuple[np.ndarray, np.ndarray]:
    """Output and log-sum-exp of the same rounded operands, in NumPy."""
    problem = call.problem
    query, key, value = (np.asarray(one.astype(jnp.float32), np.float64) for one in call.operands[:3])
    query, key, value = (np.moveaxis(one, 2, 1) for one in (query, key, value))
    key, value = (np.repeat(one, problem.group_size, axis=1) for one in (key, value))
    scores = query @ np.swapaxes(key, -1, -2) * problem.scale
    if problem.logits_soft_cap is not None:
        scores = problem.logits_soft_cap * np.tanh(scores / problem.logits_soft_cap)
    scores = np.where(on_cpu(call, visible_pairs), scores, -np.inf)
    sinks = np.full(problem.query_heads, -np.inf)
    if problem.has_sinks:
        sinks = np.asarray(call.operands.sinks, np.float64)
    highest = np.maximum(scores.max(-1), sinks[:, None])[..., None]
    highest = np.where(highest == -np.inf, 0, highest)
    powers = np.exp(scores - highest)
    total = powers.sum(-1, keepdims=True) + np.exp(sinks[:, None, None] - highest)
    out = powers @ value / np.where(total == 0, 1, total)
    with np.errstate(divide="ignore"):
        lse = (highest + np.log(total))[..., 0]
    return np.moveaxis(out, 1, 2), np.moveaxis(lse, 1, 2)


def compare(call: arguments.Call, out: jax.Array, lse: jax.Array) -> None:
    """Assert that a kernel's results are as near to float64 as the rule says.

    The log-sum-exp's scores are sums of D exact products in float32, and grow with the operands; a share of the
    exponentials may have the polynomial's error, at most 1e-5 of the sum.
    """
    exact, exact_lse = in_float64(call)
    plain, _ = on_cpu(call, reference.forward)
    ours, theirs = (np.abs(np.asarray(one.astype(np.float32), np.float64) - exact) for one in (out, plain))
    rounding = ROUNDING[call.problem.dtype]
    assert np.isfinite(ours).all()
    # Per row: the largest error of a row of ours against twice the largest of any row of plain JAX with such values.
    scale = np.abs(exact).max(-1)
    assert (ours.max(-1) <= 2 * theirs.max() + rounding * scale + 1e-30).all()
    # On the whole, in the root mean square.
    assert np.sqrt((ours**2).mean()) <= 2 * np.sqrt((theirs**2).mean()) + rounding * np.sqrt((exact**2).mean())
    has_seen = exact_lse > -np.inf
    np.testing.assert_array_equal(np.asarray(lse) > -np.inf, has_seen)
    np.testing.assert_allclose(np.asarray(lse)[has_seen], exact_lse[has_seen], rtol=2e-6, atol=2e-5)
