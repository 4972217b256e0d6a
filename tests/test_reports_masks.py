"""Public bug reports about masks, windows and lengths in other attention libraries, each as a test of ours.

Every test names the report. Each runs on every implementation that works without a GPU.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fa4
from tests.inputs import IMPLEMENTATIONS, assert_close, attention, draw, visible_pairs

WINDOWS = [(3, 0), (3, 2), (None, 0), (0, 0), (2, None), (0, 3)]


def sensitivity(call, query, key, value):
    """For every (query row, key row): whether the output of the first depends on the key or value of the second."""
    jacobian = jax.jit(jax.jacrev(lambda k, v: jnp.sum(call(query, k, v), axis=(0, 2, 3)), argnums=(0, 1)))
    grads = jacobian(key, value)
    total = sum(np.abs(np.asarray(g)).sum(axis=(1, 3, 4)) for g in grads)
    return total > 0


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
def test_window_never_sees_the_future(implementation, is_causal, window):
    """jax-ml/jax #39576: a left window without is_causal saw every later key."""
    query, key, value = draw(0, batch=1, query_length=9, key_length=9, query_heads=1, kv_heads=1, head_dim=4)

    def call(q, k, v):
        return attention(q, k, v, is_causal=is_causal, local_window_size=window, implementation=implementation)

    expected = visible_pairs(9, 9, is_causal=is_causal, window=window)
    np.testing.assert_array_equal(sensitivity(call, query, key, value), expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_minus_one_is_none_on_each_side_by_itself(implementation):
    """NVIDIA/TransformerEngine #3528 (all zeros) and fa4-jax 0.1.0 (full attention): (-1, 0) must mean causal."""
    query, key, value = draw(1, batch=2, query_length=17, key_length=17)

    def run(window, is_causal=False):
        return attention(
            query, key, value, local_window_size=window, is_causal=is_causal, implementation=implementation
        )

    causal = attention(query, key, value, is_causal=True, implementation=implementation)
    full = attention(query, key, value, implementation=implementation)
    for window in [(-1, 0), (None, 0)]:
        assert_close(run(window), causal)
        assert_close(run(window, is_causal=True), causal)
    for window in [(-1, -1), (None, None), (None, -1)]:
        assert_close(run(window), full)
    assert_close(run((2, -1)), run((2, None)))
    assert float(jnp.abs(causal).max()) > 0


@pytest.mark.parametrize("window", [-2, (-2, 0), (0, -3), (-5, None)])
def test_other_negative_windows_are_refused(window):
    """A literal negative offset silently emptied the band elsewhere."""
    query, key, value = draw(1)
    with pytest.raises(ValueError, match="local_window_size"):
        attention(query, key, value, local_window_size=window)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_window_works_alone_and_with_unequal_lengths(implementation):
    """jax-ml/jax #32300: the window was ignored when no mask was given and T != S."""
    query, key, value = draw(2, batch=1, query_length=20, key_length=33, query_heads=2, kv_heads=2)
    outputs = {}
    for window in [1, 8, (2, 5)]:
        outputs[window] = attention(query, key, value, local_window_size=window, implementation=implementation)
        pair = (window, window) if isinstance(window, int) else window
        mask = visible_pairs(20, 33, window=pair)[None, None]
        assert_close(outputs[window], attention(query, key, value, mask=mask, implementation="reference"))
    assert float(jnp.abs(outputs[1] - outputs[8]).max()) > 1e-3


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("length", [1, 5, 16, 70])
def test_window_counts_exclude_self(implementation, length):
    """Dao-AILab/flash-attention #1366, #1133, #2199: off by one; window (S-1, 0) must equal causal."""
    query, key, value = draw(3, batch=1, query_length=length, key_length=length)
    windowed = attention(query, key, value, local_window_size=(length - 1, 0), implementation=implementation)
    assert_close(windowed, attention(query, key, value, is_causal=True, implementation=implementation))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("window", [(2, 0), (0, 0), (1, 3), (0, 2)])
def test_visible_keys_per_row_are_counted(implementation, window):
    """zml/zml PR #763: with T > S a window leaves rows that see nothing. With equal scores the LSE counts the keys."""
    query = jnp.zeros((1, 12, 1, 4))
    key = jnp.zeros((1, 7, 1, 4))
    value = jnp.ones((1, 7, 1, 4))
    out, lse = attention(
        query, key, value, local_window_size=window, return_residual=True, implementation=implementation
    )
    count = visible_pairs(12, 7, window=window).sum(axis=1)
    np.testing.assert_allclose(np.exp(np.asarray(lse)[0, :, 0]), count, rtol=1e-5)
    np.testing.assert_allclose(np.asarray(out)[0, :, 0, 0], (count > 0).astype(np.float32), rtol=1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
@pytest.mark.parametrize(("query_length", "key_length"), [(2, 5), (5, 2), (1, 7), (7, 1)])
def test_causal_alignment_with_unequal_lengths(implementation, alignment, query_length, key_length):
    """Dao-AILab/flash-attention #1778, #402; pytorch/pytorch #108108; onnx/onnx PR #8068: T != S, values and grads."""
    query, key, value = draw(4, batch=1, query_length=query_length, key_length=key_length)
    mask = visible_pairs(query_length, key_length, is_causal=True, bottom_right=alignment == "bottom_right")

    def value_and_grads(**options):
        def loss(q, k, v):
            return jnp.sum(jnp.sin(jax_fa4.attention(q, k, v, **options)))

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(query, key, value)

    ours = value_and_grads(is_causal=True, causal_alignment=alignment, implementation=implementation)
    jax.tree.map(assert_close, ours, value_and_grads(mask=mask[None, None], implementation="reference"))


def test_top_left_is_the_convention_of_jax_nn():
    """The entry that bears jax.nn's name keeps jax.nn's alignment."""
    query, key, value = draw(5, batch=2, query_length=4, key_length=9)
    expected = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    assert_close(attention(query, key, value, is_causal=True), expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("given", ["query", "key", "both"])
def test_each_length_works_without_the_other(implementation, given):
    """jax-ml/jax #23349: key lengths were ignored unless query lengths were given too."""
    query, key, value = draw(6, batch=3, query_length=12, key_length=10)
    query_lengths = jnp.array([12, 5, 0]) if given != "key" else None
    key_lengths = jnp.array([4, 10, 7]) if given != "query" else None

    def call(k):
        return attention(
            query,
            k,
            value,
            query_seq_lengths=query_lengths,
            key_value_seq_lengths=key_lengths,
            implementation=implementation,
        )

    out = np.asarray(call(key))
    if key_lengths is not None:
        padded = np.arange(10)[None, :, None, None] >= np.asarray(key_lengths)[:, None, None, None]
        np.testing.assert_array_equal(out, np.asarray(call(jnp.where(padded, 7.0, key))))
    else:
        assert np.abs(out - np.asarray(call(key.at[:, -1].add(3.0))))[0].max() > 0
    if query_lengths is not None:
        for row, length in enumerate([12, 5, 0]):
            assert not out[row, length:].any()
            assert length == 0 or np.abs(out[row, :length]).max() > 0


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("concrete", [True, False])
@pytest.mark.parametrize("ids", [[1, 1, 1, 2, 2], [0, 1, 0, 1, 0], [3, 3, -1, 0, 0], [2, -1, 2, -1, 2]])
def test_packed_documents_do_not_leak(implementation, concrete, ids):
    """AI-Hypercomputer/maxtext #4476: segment ids never reached the kernel. Leaks are measured by gradients."""
    ids = np.array([ids], np.int32)
    query, key, value = draw(7, batch=1, query_length=5, key_length=5, query_heads=1, kv_heads=1)
    given = ids if concrete else jnp.asarray(ids)

    def call(q, k, v):
        return attention(q, k, v, segment_ids=given, implementation=implementation)

    expected = (ids[0][:, None] == ids[0][None, :]) & (ids[0][:, None] >= 0)
    np.testing.assert_array_equal(sensitivity(call, query, key, value), expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_segment_ids_change_the_result(implementation):
    """google/praxis #30: ids were dropped when an inner signature changed; unknown keywords must raise."""
    query, key, value = draw(8, batch=1, query_length=6, key_length=6)
    ids = jnp.array([[0, 0, 0, 1, 1, 1]])
    plain = attention(query, key, value, implementation=implementation)
    packed = attention(query, key, value, segment_ids=ids, implementation=implementation)
    assert float(jnp.abs(plain - packed).max()) > 1e-3
    with pytest.raises(TypeError, match="segmentids"):
        attention(query, key, value, segmentids=ids)


FEATURES = {
    "causal": {"is_causal": True},
    "bottom_right": {"is_causal": True, "causal_alignment": "bottom_right"},
    "window": {"local_window_size": (3, 4)},
    "query_lengths": {"query_seq_lengths": jnp.array([7, 11])},
    "key_lengths": {"key_value_seq_lengths": jnp.array([13, 6])},
    "segments": {"segment_ids": (jnp.arange(11)[None].repeat(2, 0) // 4, jnp.arange(13)[None].repeat(2, 0) // 5)},
    "softcap": {"logits_soft_cap": 1.5},
    "scale": {"scale": 0.3},
    "sinks": {"sinks": jnp.array([0.5, -1.0, 2.0, 0.0])},
    "bias": {"bias": jnp.sin(jnp.arange(4 * 11 * 13.0)).reshape(1, 4, 11, 13)},
    "mask": {"mask": (jnp.arange(11 * 13).reshape(1, 1, 11, 13) % 3) > 0},
}
PAIRS = [(name,) for name in FEATURES] + list(itertools.combinations(FEATURES, 2))


@pytest.mark.parametrize("names", PAIRS, ids="-".join)
def test_no_path_forgets_an_argument(names):
    """keras-team/keras #23038: a fallback forgot the mask. Every feature alone and in pairs, values and gradients."""
    query, key, value = draw(9, batch=2, query_length=11, key_length=13, query_heads=4, kv_heads=2)
    options = {key: item for name in names for key, item in FEATURES[name].items()}

    def loss(q, k, v, implementation):
        out, lse = attention(q, k, v, **options, return_residual=True, implementation=implementation)
        return jnp.sum(jnp.cos(out)) + jnp.sum(jnp.where(jnp.isfinite(lse), jnp.sin(lse), 0.0))

    results = [
        jax.jit(jax.value_and_grad(functools.partial(loss, implementation=name), argnums=(0, 1, 2)))(query, key, value)
        for name in ("blockwise", "reference")
    ]
    jax.tree.map(assert_close, *results)
    plain = jnp.sum(jnp.cos(attention(query, key, value, implementation="reference")))
    assert abs(float(results[0][0]) - float(plain)) > 1e-4


PATTERNS = list(itertools.product([False, True], repeat=4))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda p: "".join("x" if full else "1" for full in p))
def test_every_broadcast_pattern_of_mask_and_bias(implementation, pattern):
    """jax-ml/jax #28974: a mask of shape (B, 1, 1, S) was refused. All sixteen patterns, with the bias's gradient."""
    query, key, value = draw(10, batch=2, query_length=6, key_length=7, query_heads=4, kv_heads=2)
    full = (2, 4, 6, 7)
    shape = tuple(size if keep else 1 for size, keep in zip(full, pattern, strict=True))
    rng = np.random.default_rng(11)
    mask = jnp.asarray(rng.random(shape) > 0.3)
    bias = jnp.asarray(rng.normal(size=shape), jnp.float32)

    def loss(bias, mask, implementation):
        out = attention(query, key, value, bias, mask, implementation=implementation)
        return jnp.sum(jnp.sin(out))

    grad = jax.jit(jax.grad(functools.partial(loss, implementation=implementation)))(bias, mask)
    dense = jax.jit(jax.grad(functools.partial(loss, implementation="reference")))(
        jnp.broadcast_to(bias, full), jnp.broadcast_to(mask, full)
    )
    summed = jnp.sum(dense, axis=tuple(axis for axis, keep in enumerate(pattern) if not keep), keepdims=True)
    assert grad.shape == shape
    assert_close(grad, summed)
    out = attention(query, key, value, bias, mask, implementation=implementation)
    expanded = attention(
        query, key, value, jnp.broadcast_to(bias, full), jnp.broadcast_to(mask, full), implementation="reference"
    )
    assert_close(out, expanded)


@pytest.mark.parametrize("lengths", list(itertools.product([1, 64, 130, 257], repeat=2)))
def test_query_and_key_lengths_are_never_swapped(lengths):
    """jax-ml/jax #24491: the key loop used the query length."""
    query_length, key_length = lengths
    query, key, value = draw(12, batch=1, query_length=query_length, key_length=key_length, query_heads=2, kv_heads=1)
    for options in ({}, {"is_causal": True}, {"is_causal": True, "causal_alignment": "bottom_right"}):
        assert_close(
            attention(query, key, value, implementation="blockwise", **options),
            attention(query, key, value, implementation="reference", **options),
        )


@pytest.mark.parametrize("length", [1, 7, 63, 65, 127, 129, 1023])
def test_any_length_and_the_same_bits_each_time(length):
    """jax-ml/jax #23819, NVIDIA/cudnn-frontend #160: lengths that are no nice multiple, with gradients, repeated."""
    query, key, value = draw(13, batch=1, query_length=length, key_length=length, query_heads=1, kv_heads=1)

    @jax.jit
    def step(q, k, v):
        def loss(q, k, v):
            return jnp.sum(jnp.sin(attention(q, k, v, is_causal=True, implementation="blockwise")))

        return jax.value_and_grad(loss, argnums=(0, 1, 2))(q, k, v)

    first = jax.tree.map(np.asarray, step(query, key, value))
    for _ in range(3):
        jax.tree.map(np.testing.assert_array_equal, first, jax.tree.map(np.asarray, step(query, key, value)))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(first))
