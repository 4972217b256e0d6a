"""The entry point: a drop-in for jax.nn, and its options on `blockwise` against the brute-force oracle."""

import inspect
import itertools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fa4
from tests import oracle
from tests.test_reference import CASES, B, D, K, N, S, T, check

SOME = (
    "ids_causal",
    "both_lengths",
    "soft_cap",
    "scale_traced",
    "bias_broadcast_capped",
    "sinks_empty_rows",
    "everything",
)


@pytest.mark.parametrize("name", SOME)
def test_blockwise_equals_the_oracle(name):
    check(CASES[name], jnp.float32, 2e-5, implementation="blockwise")


def test_every_parameter_of_jax_nn_is_there_in_the_same_place():
    ours = inspect.signature(jax_fa4.attention).parameters
    theirs = inspect.signature(jax.nn.dot_product_attention).parameters
    positional = [name for name, p in theirs.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [name for name, p in ours.items() if p.kind is p.POSITIONAL_OR_KEYWORD] == positional
    for name, parameter in theirs.items():
        assert ours[name].default == parameter.default


def draw(*shapes, seed=0, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    return tuple(jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)


QKV = ((B, T, N, D), (B, S, K, D), (B, S, K, D))
DROP_IN = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"local_window_size": (2, 1)},
    "lengths": {"query_seq_lengths": jnp.array([6, 6]), "key_value_seq_lengths": jnp.array([5, 3])},
    "scale": {"scale": 0.2},
}


@pytest.mark.parametrize("options", DROP_IN.values(), ids=DROP_IN)
def test_the_same_as_jax_nn(options):
    arguments = (*draw(*QKV), *draw((1, N, T, S)), jnp.asarray(np.random.default_rng(1).random((B, 1, T, S)) < 0.9))
    want = jax.nn.dot_product_attention(*arguments, **options)
    for implementation in ("reference", None):
        got = jax_fa4.attention(*arguments, **options, implementation=implementation)
        np.testing.assert_allclose(got, want, atol=2e-6)


def test_any_number_of_leading_dimensions():
    query, key, value, bias, sinks = draw((2, 3, T, N, D), (2, 3, S, K, D), (2, 3, S, K, 2), (3, 1, T, S), (N,))
    lengths = np.arange(6).reshape(2, 3)
    ids = (jnp.arange(36).reshape(2, 3, T) % 3, np.arange(42).reshape(2, 3, S) % 3)
    options = {"sinks": sinks, "return_residual": True}
    out, lse = jax_fa4.attention(query, key, value, bias, key_value_seq_lengths=lengths, segment_ids=ids, **options)
    assert out.shape == (2, 3, T, N, 2)
    assert lse.shape == (2, 3, T, N)
    for i, j in np.ndindex(2, 3):
        alone = jax_fa4.attention(
            query[i, j], key[i, j], value[i, j], bias[j], key_value_seq_lengths=jnp.asarray(lengths[i, j]),
            segment_ids=(ids[0][i, j], jnp.asarray(ids[1][i, j])), **options,
        )  # fmt: skip
        np.testing.assert_allclose(out[i, j], alone[0], atol=1e-6)
        np.testing.assert_allclose(lse[i, j], alone[1], atol=1e-6)


@pytest.mark.parametrize(
    "pattern", list(itertools.product((True, False), repeat=4)), ids=lambda p: "".join("1B"[x] for x in p)
)
def test_all_sixteen_broadcasts_of_bias_and_mask(pattern):
    """Values, and the gradient of the bias summed over what it was broadcast to. jax-ml/jax #28974."""
    shape = tuple(size if keep else 1 for size, keep in zip((B, N, T, S), pattern, strict=True))
    query, key, value, bias, grad_out = draw(*QKV, shape, (B, T, N, D))
    mask = np.random.default_rng(5).random(shape) < 0.8

    @jax.jit
    def both(bias):
        out, pull = jax.vjp(lambda bias: jax_fa4.attention(query, key, value, bias, mask), bias)
        return out, pull(grad_out)[0]

    out, grad_bias = both(bias)
    want = oracle.attention(query, key, value, bias=bias, mask=mask, grad_out=np.asarray(grad_out))
    np.testing.assert_allclose(out, want.out, atol=1e-5)
    np.testing.assert_allclose(grad_bias, want.bias, atol=2e-5)


@pytest.mark.parametrize("implementation", ["reference", "blockwise"])
@pytest.mark.parametrize("sizes", [s for s in itertools.product((0, 2), repeat=4) if 0 in s], ids=str)
def test_empty_calls(implementation, sizes):
    """B, T, S or N of 0: empty or zero results, zero gradients; the log-sum-exp of no keys is -inf, or the sink."""
    batch, queries, keys, heads = sizes
    query, key, value = (jnp.ones((batch, length, heads, 3)) for length in (queries, keys, keys))
    sinks = jnp.arange(heads, dtype=jnp.float32)
    options = {"is_causal": True, "return_residual": True, "implementation": implementation}

    def total(query, key, value, sinks):
        out, lse = jax_fa4.attention(query, key, value, sinks=sinks, **options)
        return jnp.sum(out) + jnp.sum(lse), (out, lse)

    (_, (out, lse)), grads = jax.value_and_grad(total, (0, 1, 2, 3), has_aux=True)(query, key, value, sinks)
    assert out.shape == (batch, queries, heads, 3)
    assert not np.any(out)
    assert all(not np.any(grad) for grad in grads[:3])
    if keys == 0:
        np.testing.assert_array_equal(lse, np.broadcast_to(sinks, (batch, queries, heads)))
        np.testing.assert_array_equal(grads[3], np.full(heads, batch * queries))
        assert np.all(np.isneginf(jax_fa4.attention(query, key, value, **options)[1]))


@pytest.mark.parametrize("implementation", ["reference", "blockwise"])
def test_dtypes_of_results(implementation):
    for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
        query, key, value, bias = draw(*QKV, (N, T, S), dtype=dtype)
        for bias_dtype in (jnp.float32, jnp.bfloat16):
            out, lse = jax_fa4.attention(
                query, key, value, bias.astype(bias_dtype), return_residual=True, implementation=implementation
            )
            assert (out.dtype, lse.dtype) == (dtype, jnp.float32)
    with jax.enable_x64(True):
        query, key, value = draw(*QKV, dtype=jnp.float64)
        out, lse = jax_fa4.attention(query, key, value, return_residual=True, implementation=implementation)
        assert (out.dtype, lse.dtype) == (jnp.float64, jnp.float64)
        np.testing.assert_allclose(out, oracle.attention(query, key, value).out, atol=1e-13)


def test_shards_merge_through_the_residual():
    """Two halves of the keys, merged by their log-sum-exps, are the whole: values, and gradients through both."""
    query, key, value = draw(*QKV)

    def whole(query, key, value):
        return jnp.sum(jnp.sin(jax_fa4.attention(query, key, value)))

    def merged(query, key, value):
        halves = [
            jax_fa4.attention(query, key[:, part], value[:, part], return_residual=True)
            for part in (slice(None, 3), slice(3, None))
        ]
        total = jnp.logaddexp(halves[0][1], halves[1][1])
        return jnp.sum(jnp.sin(sum(out * jnp.exp(lse - total)[..., None] for out, lse in halves)))

    results = [jax.jit(jax.value_and_grad(f, (0, 1, 2)))(query, key, value) for f in (whole, merged)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), *results)


def test_scale_of_every_kind_is_the_same():
    query, key, value = draw(*QKV)
    want = jax_fa4.attention(query, key, value, scale=0.25)
    for scale in (np.float32(0.25), np.array(0.25), jnp.float32(0.25), jnp.bfloat16(0.25)):
        np.testing.assert_allclose(jax_fa4.attention(query, key, value, scale=scale), want, atol=1e-6)
    traced = jax.jit(lambda scale: jax_fa4.attention(query, key, value, scale=scale))
    np.testing.assert_allclose(traced(0.25), want, atol=1e-6)


def test_new_traced_ids_never_compile_again(caplog):
    query, key, value = draw((B, T, N, D), (B, T, K, D), (B, T, K, D))
    ids = [jnp.full((B, T), i).at[:, :i].set(0) for i in range(4)]
    lengths = [jnp.array([i, T]) for i in range(4)]
    jax_fa4.attention(query, key, value, segment_ids=ids[0], key_value_seq_lengths=lengths[0])
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        for some_ids, some_lengths in zip(ids[1:], lengths[1:], strict=True):
            jax_fa4.attention(query, key, value, segment_ids=some_ids, key_value_seq_lengths=some_lengths)
    assert "Compiling" not in caplog.text


def test_known_and_traced_ids_give_the_same():
    query, key, value = draw(*QKV)
    for name in ("ids_causal", "both_lengths"):
        options = CASES[name]
        traced = jax.tree.map(jnp.asarray, {k: v for k, v in options.items() if k != "is_causal"})
        known = jax_fa4.attention(query, key, value, **options)
        np.testing.assert_allclose(jax_fa4.attention(query, key, value, **{**options, **traced}), known, atol=1e-6)


def test_shapes_and_export_without_running():
    query, key, value = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in QKV)
    out = jax.eval_shape(jax_fa4.attention, query, key, value)
    assert (out.shape, out.dtype) == ((B, T, N, D), jnp.bfloat16)
    exported = jax.export.export(jax.jit(jax.grad(lambda *x: jnp.sum(jax_fa4.attention(*x).astype(jnp.float32)))))
    assert exported(query, key, value).call(*draw(*QKV, dtype=jnp.bfloat16)).shape == (B, T, N, D)


def test_donated_operands():
    query, key, value = draw(*QKV)
    want = jax_fa4.attention(query, key, value)
    run = jax.jit(jax_fa4.attention, donate_argnums=0)
    np.testing.assert_allclose(run(query + 0, key, value), want, atol=1e-6)


@pytest.mark.parametrize("implementation", ["blockwise", "reference"])
@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize(
    "configured",
    [
        lambda: jax.numpy_rank_promotion("raise"),
        lambda: jax.numpy_dtype_promotion("strict"),
        lambda: jax.disable_jit(),
        lambda: jax.debug_nans(True),
    ],
    ids=["rank_promotion", "dtype_promotion", "disable_jit", "debug_nans"],
)
def test_configurations_that_look_for_faults(implementation, planned, configured):
    """What a caller switches on to find faults of their own."""
    query, key, value = draw((B, T, N, D), (B, T, K, D), (B, T, K, D))
    ids, sinks = jnp.sort(jnp.arange(B * T).reshape(B, T) % 3 - 1), jnp.ones(N)

    def loss(query, sinks):
        plan = jax_fa4.plan_segments(ids, is_causal=True) if planned else ids
        lengths = {} if planned else {"key_value_seq_lengths": jnp.full(B, T - 1)}
        options = {
            "is_causal": True,
            "logits_soft_cap": 9.0,
            "sinks": sinks,
            "implementation": implementation,
            **lengths,
        }
        return jnp.sum(jax_fa4.attention(query, key, value, segment_ids=plan, **options) ** 2)

    def gradients():
        alone = jax.grad(loss, (0, 1))(query, sinks)
        return alone, jax.vmap(jax.jit(jax.grad(loss)), in_axes=(0, None))(query[None], sinks)

    want = gradients()
    with configured():
        found = gradients()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, want)


def test_sizes_that_are_symbols_are_refused():
    (batch,) = jax.export.symbolic_shape("b")
    query = jax.ShapeDtypeStruct((batch, T, N, D), jnp.float32)
    with pytest.raises(ValueError, match=r"query has shape \(b, .* a size is a symbol\. .* export a program for each"):
        jax.export.export(jax.jit(lambda one: jax_fa4.attention(one, one, one)))(query)
