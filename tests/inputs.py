"""Inputs, comparisons and a brute-force visibility that the wide tests share."""

import jax
import jax.numpy as jnp
import numpy as np

import jax_fa4
from tests import oracle

IMPLEMENTATIONS = ["reference", "blockwise"]


def attention(query, key, value, bias=None, mask=None, **options):
    """`jax_fa4.attention` under jit, so that a test compiles once instead of operation by operation.

    What is a NumPy array in `options` stays one, hence known when the call is traced.
    """
    call = jax.jit(lambda *operands: jax_fa4.attention(*operands, **options))
    return call(query, key, value, bias, mask)


def draw(
    seed,
    *,
    batch=2,
    query_length=8,
    key_length=8,
    query_heads=2,
    kv_heads=2,
    head_dim=8,
    value_dim=None,
    dtype=jnp.float32,
):
    """Query, key and value of Gaussian entries, in the layout (B, length, heads, dim)."""
    keys = jax.random.split(jax.random.key(seed), 3)
    shapes = (
        (batch, query_length, query_heads, head_dim),
        (batch, key_length, kv_heads, head_dim),
        (batch, key_length, kv_heads, head_dim if value_dim is None else value_dim),
    )
    return tuple(jax.random.normal(k, shape, dtype) for k, shape in zip(keys, shapes, strict=True))


def assert_close(actual, expected, atol=2e-5, rtol=2e-5):
    """Equal within float32 rounding of sums of a few hundred terms; NaN and infinities must agree in place."""
    assert actual.shape == expected.shape
    np.testing.assert_allclose(np.asarray(actual, np.float64), np.asarray(expected, np.float64), atol=atol, rtol=rtol)


def visible_pairs(query_length, key_length, *, is_causal=False, bottom_right=False, window=(None, None)):
    """Boolean (T, S): which key each query sees, pair by pair, straight from the definitions."""
    rules = {"is_causal": is_causal, "bottom_right": bottom_right, "window": window}
    others = dict.fromkeys(("query_lengths", "key_lengths", "ids", "mask"))
    pairs = np.zeros((query_length, key_length), bool)
    for i, j in np.ndindex(pairs.shape):
        pairs[i, j] = oracle.sees(0, 0, i, j, lengths=pairs.shape, **rules, **others)
    return pairs
