"""The decoder in the manner of MaxText computes with jax_fa4's operator what it does with a dense mask."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples import swap_maxtext


def test_losses_are_equal_and_fall():
    before, after = (swap_maxtext.train(kind, 4) for kind in (swap_maxtext.DenseOp, swap_maxtext.Fa4Op))
    np.testing.assert_allclose(after, before, atol=swap_maxtext.ALLOWED_DIFFERENCE)
    assert after[-1] < after[0]


def test_decoding_is_refused_with_the_remedy():
    x = jnp.zeros((1, 1, 2, 8))
    with pytest.raises(ValueError, match=r"model_mode is 'autoregressive'.*'dot_product'"):
        swap_maxtext.Fa4Op().apply_attention(x, x, x, None, None, swap_maxtext.MODEL_MODE_AUTOREGRESSIVE)


def test_neither_operator_leaks_between_documents():
    """Another document's tokens do not move the output of the first."""
    draw = jax.random.split(jax.random.key(0), 3)
    query, key, value = (jax.random.normal(one, (1, 12, heads, 8)) for one, heads in zip(draw, (4, 2, 2), strict=True))
    ids = jnp.repeat(jnp.array([[1, 2]]), 6, axis=1)
    for kind in (swap_maxtext.DenseOp, swap_maxtext.Fa4Op):
        out = kind().apply_attention(query, key, value, ids, None, swap_maxtext.MODEL_MODE_TRAIN)[0]
        other = kind().apply_attention(
            query, key.at[:, :6].add(1), value.at[:, :6].add(1), ids, None, swap_maxtext.MODEL_MODE_TRAIN
        )[0]
        np.testing.assert_array_equal(other[:, 6:], out[:, 6:])
