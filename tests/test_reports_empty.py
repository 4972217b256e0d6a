"""Public bug reports about empty rows, zero lengths and NaN in what must not be read, each as a test of ours."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.inputs import IMPLEMENTATIONS, assert_close, attention, draw

POISONS = [np.nan, np.inf, -np.inf]


def out_lse_grads(call, query, key, value):
    """Output, LSE and the gradients of a loss that uses both, as NumPy arrays."""

    def loss(q, k, v):
        out, lse = call(q, k, v)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.where(jnp.isfinite(lse), jnp.cos(lse), 0.0))

    grads = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(query, key, value)
    return jax.tree.map(np.asarray, (*call(query, key, value), *grads))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_row_that_sees_nothing(implementation):
    """jax.nn's xla path returns mean(V) there: right is output 0, LSE -inf and exactly zero gradients."""
    query, key, value = draw(0, batch=1, query_length=6, key_length=6)
    mask = np.ones((1, 1, 6, 6), bool)
    mask[0, 0, 3] = False

    def call(q, k, v):
        return attention(q, k, v, mask=mask, return_residual=True, implementation=implementation)

    out, lse, grad_query, grad_key, grad_value = out_lse_grads(call, query, key, value)
    assert not out[0, 3].any()
    assert np.isneginf(lse[0, 3]).all()
    assert not grad_query[0, 3].any()
    assert all(np.isfinite(g).all() for g in (grad_query, grad_key, grad_value))
    assert np.isfinite(lse[0, [0, 1, 2, 4, 5]]).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "options",
    [
        {"key_value_seq_lengths": np.array([0, 0])},
        {"query_seq_lengths": np.array([0, 0])},
        {"segment_ids": (np.zeros((2, 8), np.int32), np.ones((2, 8), np.int32))},
        {"segment_ids": np.full((2, 8), -1, np.int32)},
        {"mask": np.zeros((2, 1, 8, 8), bool)},
    ],
    ids=["key_lengths", "query_lengths", "disjoint_ids", "padding_ids", "mask"],
)
@pytest.mark.parametrize("traced", [False, True])
def test_all_rows_see_nothing(implementation, options, traced):
    """Every row empty: all zeros, LSE -inf, every gradient exactly zero, concrete or traced."""
    query, key, value = draw(1)
    if traced:
        options = jax.tree.map(jnp.asarray, options)

    def call(q, k, v):
        return attention(q, k, v, **options, return_residual=True, implementation=implementation)

    out, lse, *grads = out_lse_grads(call, query, key, value)
    assert not out.any()
    assert np.isneginf(lse).all()
    assert not any(grad.any() for grad in grads)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_an_empty_side_leaves_a_merge_unchanged(implementation):
    """flashinfer-ai/flashinfer #4452: finite LSE for empty rows gave garbage its weight when shards were merged."""
    query, key, value = draw(2, batch=1, query_length=5, key_length=8)
    whole, whole_lse = attention(query, key, value, return_residual=True, implementation=implementation)
    parts = []
    for shard in range(4):
        lengths = np.array([8 if shard == 2 else 0])
        parts.append(
            attention(
                query, key, value, key_value_seq_lengths=lengths, return_residual=True, implementation=implementation
            )
        )
    lse = jax.nn.logsumexp(jnp.stack([part[1] for part in parts]), axis=0)
    merged = sum(jnp.exp(part[1] - lse)[..., None] * part[0] for part in parts)
    assert_close(merged, whole)
    assert_close(lse, whole_lse)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("by", ["lengths", "segments"])
def test_poison_in_padding_changes_nothing(implementation, poison, traced, by):
    """Dao-AILab/flash-attention #2374: 0 * NaN in unused V rows. Lengths 32, 64, 96, 48 of 128, d 64; all operands."""
    lengths = np.array([32, 64, 96, 48], np.int32)
    query, key, value = draw(3, batch=4, query_length=128, key_length=128, query_heads=2, kv_heads=1, head_dim=16)
    used = np.arange(128)[None, :] < lengths[:, None]
    if by == "lengths":
        options = {"query_seq_lengths": lengths, "key_value_seq_lengths": lengths}
    else:
        options = {"segment_ids": np.where(used, np.arange(128)[None] // 20, -1).astype(np.int32)}
    if traced:
        options = jax.tree.map(jnp.asarray, options)
    weights = jax.random.normal(jax.random.key(4), (4, 128, 2, 16))

    def results(q, k, v, w):
        def call(q, k, v):
            return attention(q, k, v, **options, return_residual=True, implementation=implementation)

        (out, lse), pull = jax.vjp(call, q, k, v)
        return out, lse, *pull((w, jnp.where(used[..., None], jnp.ones_like(lse), poison)))

    results = jax.jit(results)
    clean = results(query, key, value, jnp.where(used[..., None, None], weights, 0.0))
    clean = jax.tree.map(lambda x: jnp.where(jnp.isnan(x), 0.0, x), clean)
    poisoned = [jnp.where(used[..., None, None], x, poison) for x in (query, key, value, weights)]
    for ours, expected in zip(results(*poisoned), clean, strict=True):
        assert np.isfinite(np.asarray(ours)[used]).all()
        padded = np.asarray(ours)[~used]
        assert not padded[np.isfinite(padded)].any()
        assert not np.isnan(padded).any()
        np.testing.assert_allclose(np.asarray(ours)[used], np.asarray(expected)[used], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_tokens_after_the_last_document(implementation):
    """Dao-AILab/flash-attention #1228, pytorch/pytorch #176793: 946 tokens, documents end at 944: the tail is zero."""
    offsets = [0, 144, 432, 944]
    ids = np.full((1, 946), -1, np.int32)
    for document, (begin, end) in enumerate(itertools.pairwise(offsets)):
        ids[0, begin:end] = document
    query, key, value = draw(5, batch=1, query_length=946, key_length=946, query_heads=1, kv_heads=1)

    def call(q, k, v):
        return attention(q, k, v, segment_ids=ids, return_residual=True, implementation=implementation)

    out, lse, *grads = out_lse_grads(call, query, key, value)
    assert not out[:, 944:].any()
    assert np.isneginf(lse[:, 944:]).all()
    for grad in grads:
        assert np.isfinite(grad).all()
        assert not grad[:, 944:].any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_padding_between_documents(implementation):
    """Dao-AILab/flash-attention #1990: holes between documents, with non-zero values in them."""
    ids = np.array([[0, 0, 0, -1, -1, 1, 1, -1, 2, 2, 2, 2]], np.int32)
    kept = ids[0] >= 0
    query, key, value = draw(6, batch=1, query_length=12, key_length=12)

    def call_with(ids):
        return lambda q, k, v: attention(
            q, k, v, segment_ids=ids, is_causal=True, return_residual=True, implementation=implementation
        )

    holes = out_lse_grads(call_with(ids), query, key, value)
    packed = out_lse_grads(call_with(ids[:, kept]), query[:, kept], key[:, kept], value[:, kept])
    for with_holes, without in zip(holes, packed, strict=True):
        np.testing.assert_allclose(with_holes[:, kept], without, atol=2e-5, rtol=2e-5)
    for index in (0, 2, 3, 4):
        assert not holes[index][:, ~kept].any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_documents_with_queries_or_keys_alone(implementation, head_dim):
    """Dao-AILab/flash-attention #2562, #1713: all four of (no query, no key) per document."""
    query_ids = np.array([[1] * 12 + [2] * 8 + [7] * 4], np.int32)
    key_ids = np.array([[0] * 5 + [1] * 7 + [3] * 4], np.int32)
    query, key, value = draw(7, batch=1, query_length=24, key_length=16, query_heads=1, kv_heads=1, head_dim=head_dim)

    def call(q, k, v):
        return attention(q, k, v, segment_ids=(query_ids, key_ids), return_residual=True, implementation=implementation)

    out, lse, grad_query, grad_key, grad_value = out_lse_grads(call, query, key, value)
    assert np.isfinite(lse[:, :12]).all()
    assert np.isneginf(lse[:, 12:]).all()
    assert not out[:, 12:].any()
    assert not grad_query[:, 12:].any()
    for grad in (grad_key, grad_value):
        assert not grad[:, :5].any()
        assert not grad[:, 12:].any()
        assert np.abs(grad[:, 5:12]).max() > 0


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "sizes", [(0, 4, 4), (2, 0, 4), (2, 4, 0), (2, 0, 0), (0, 0, 0)], ids=lambda s: "B{}-T{}-S{}".format(*s)
)
@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True}, {"sinks": jnp.array([0.3, -0.2])}, {"local_window_size": 2}], ids=str
)
def test_everything_empty(implementation, sizes, options):
    """Batch, T or S of zero gives the right empty or zero result, forward and backward."""
    batch, query_length, key_length = sizes
    query, key, value = draw(8, batch=batch, query_length=query_length, key_length=key_length, value_dim=5)

    def call(q, k, v):
        return attention(q, k, v, **options, return_residual=True, implementation=implementation)

    out, lse, *grads = out_lse_grads(call, query, key, value)
    assert out.shape == (batch, query_length, 2, 5)
    assert not out.any()
    if "sinks" in options:
        np.testing.assert_allclose(lse, np.broadcast_to(options["sinks"], lse.shape))
    else:
        assert np.isneginf(lse).all()
    for grad, operand in zip(grads, (query, key, value), strict=True):
        assert grad.shape == operand.shape
        assert not grad.any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["key_value_seq_lengths", "query_seq_lengths", "segment_ids", "mask"])
@pytest.mark.parametrize("wrap", [np.asarray, jnp.asarray])
def test_no_batch_beside_a_mask(implementation, name, wrap):
    """One head, so that a mask of all heads and a mask of each have one shape."""
    tensors = draw(8, batch=0, query_length=4, key_length=4, query_heads=1, kv_heads=1)
    arrays = {"segment_ids": np.zeros((0, 4), np.int32), "mask": np.zeros((0, 1, 4, 4), bool)}
    options = {name: wrap(arrays.get(name, np.zeros(0, np.int32))), "implementation": implementation}
    grads = jax.grad(lambda *one: attention(*one, **options).sum(), argnums=(0, 1, 2))(*tensors)
    assert [grad.shape for grad in grads] == [one.shape for one in tensors]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", ["large", "constant", "outlier", "rising"])
def test_scores_that_are_not_gaussian(implementation, kind):
    """Scores of 1e4, equal scores, outliers and row maxima that rise tile by tile, against float64 softmax."""
    rng = np.random.default_rng(9)
    query, key, value = (np.asarray(x, np.float64) for x in draw(9, batch=1, query_length=70, key_length=300))
    if kind == "large":
        query, key = query * 60, key * 60
    elif kind == "constant":
        query, key = np.ones_like(query), np.ones_like(key)
    elif kind == "outlier":
        key[0, rng.integers(0, 300, 4)] *= 100
    else:
        key = np.broadcast_to(np.linspace(0, 40, 300)[None, :, None, None], key.shape).copy()
        query = np.abs(query) + 0.1
    query32, key32, value32 = (jnp.asarray(x, jnp.float32) for x in (query, key, value))
    query, key, value = (np.asarray(x, np.float64) for x in (query32, key32, value32))
    scores = np.einsum("btnd,bsnd->bnts", query, key) / np.sqrt(query.shape[-1])
    probs = np.exp(scores - scores.max(-1, keepdims=True))
    probs /= probs.sum(-1, keepdims=True)
    expected = np.einsum("bnts,bsnd->btnd", probs, value)
    out = attention(query32, key32, value32, implementation=implementation)
    # A score of 1e4 carries a float32 rounding of about 1e4 * 2^-23, which exp turns into relative error.
    tolerance = max(2e-5, 4 * float(np.abs(scores).max()) * 2.0**-23)
    np.testing.assert_allclose(np.asarray(out), expected, atol=tolerance * 4, rtol=tolerance)
