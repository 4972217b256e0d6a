"""The swap into published models, where they are installed, and its packed batches."""

import numpy as np
import pytest

from examples import swap_flax


def test_packed_batches_count_positions_within_documents():
    tokens, segments, positions = swap_flax.packed_batches(2)
    assert tokens.shape == segments.shape == positions.shape
    assert np.all((tokens > 0) == (segments > 0))
    starts = (positions == 0) & (segments > 0)
    assert np.all(starts.sum(axis=-1) == segments.max(axis=-1))


def test_vitax_has_equal_losses():
    pytest.importorskip("vitax", reason="pip install --no-deps vitax; pip install 'transformers<5'")
    before, after = swap_flax.train_vitax(3)
    np.testing.assert_allclose(after, before, atol=swap_flax.ALLOWED_DIFFERENCE)
