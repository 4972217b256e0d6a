"""The dense reference against the brute-force oracle: every option, values and gradients, in float64 and float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fa4
from tests import oracle

B, T, S, N, K, D, DV = 2, 6, 7, 4, 2, 3, 5
IDS = (np.array([[0, 0, 1, 3, 1, -1], [5, 5, 5, 2, 2, 2]]), np.array([[1, 0, 0, 3, -1, 1, 9], [2, 2, 5, 5, 5, 7, 5]]))

CASES = {
    "plain": {},
    "causal": {"is_causal": True},
    "causal_bottom_right": {"is_causal": True, "causal_alignment": "bottom_right"},
    "window": {"local_window_size": (2, 1)},
    "window_int": {"local_window_size": 1},
    "window_left_open": {"local_window_size": (None, 0)},
    "window_right_open": {"local_window_size": (1, -1)},
    "window_zero": {"local_window_size": 0},
    "window_causal": {"local_window_size": (2, 3), "is_causal": True},
    "window_bottom_right": {"local_window_size": (1, 2), "causal_alignment": "bottom_right"},
    "ids": {"segment_ids": IDS},
    "ids_causal": {"segment_ids": IDS, "is_causal": True},
    "query_lengths": {"query_seq_lengths": np.array([4, 0])},
    "key_lengths": {"key_value_seq_lengths": np.array([7, 3])},
    "both_lengths": {"query_seq_lengths": np.array([6, 2]), "key_value_seq_lengths": np.array([0, 5])},
    "soft_cap": {"logits_soft_cap": 0.7, "is_causal": True},
    "scale": {"scale": 0.3},
    "scale_zero": {"scale": 0.0},
    "scale_traced": {"scale": jnp.float32(-1.3)},
    "bias": {"bias": (B, N, T, S)},
    "bias_broadcast_capped": {"bias": (1, N, 1, S), "logits_soft_cap": 1.5},
    "mask": {"mask": (B, 1, T, S)},
    "sinks": {"sinks": (N,), "is_causal": True},
    "sinks_empty_rows": {"sinks": (N,), "segment_ids": IDS, "query_seq_lengths": np.array([5, 0])},
    "everything": {
        "bias": (1, 1, T, S), "mask": (B, N, 1, S), "sinks": (N,), "segment_ids": IDS, "is_causal": True,
        "local_window_size": (4, None), "key_value_seq_lengths": np.array([7, 6]), "logits_soft_cap": 2.0,
        "scale": jnp.float32(0.9), "causal_alignment": "bottom_right",
    },
}  # fmt: skip


def draw(case, dtype, seed=0):
    """Operands of a case; shapes in it become arrays."""
    rng = np.random.default_rng(seed)
    shapes = {"query": (B, T, N, D), "key": (B, S, K, D), "value": (B, S, K, DV)}
    arrays = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    grads = rng.normal(size=(B, T, N, DV)), rng.normal(size=(B, T, N))
    options = dict(case)
    for name in ("bias", "sinks"):
        if name in options:
            options[name] = jnp.asarray(rng.normal(size=options[name]), dtype)
    if "mask" in options:
        options["mask"] = rng.random(options["mask"]) < 0.6
    return {name: jnp.asarray(x, dtype) for name, x in arrays.items()}, options, grads


def ask_oracle(arrays, options, grads):
    names = {
        "query_seq_lengths": "query_lengths", "key_value_seq_lengths": "key_lengths", "segment_ids": "ids",
        "logits_soft_cap": "cap",
    }  # fmt: skip
    given = {names.get(name, name): value for name, value in options.items()}
    given["bottom_right"] = given.pop("causal_alignment", "top_left") == "bottom_right"
    window = given.pop("local_window_size", None)
    given["window"] = (window, window) if isinstance(window, int) or window is None else window
    # A row without keys or sinks has lse -inf; its cotangent is none of its gradients' business.
    return oracle.attention(**arrays, **given, grad_out=grads[0], grad_lse=grads[1])


def run(arrays, options, grads, implementation):
    """Output, log-sum-exp and the gradients of a case."""
    floats = {name: options[name] for name in ("bias", "sinks", "scale") if isinstance(options.get(name), jax.Array)}
    fixed = {name: value for name, value in options.items() if name not in floats}

    def call(floats):
        return jax_fa4.attention(**floats, **fixed, return_residual=True, implementation=implementation)

    @jax.jit
    def both(floats):
        results, pull = jax.vjp(call, floats)
        return results, pull(tuple(jnp.asarray(g, x.dtype) for g, x in zip(grads, results, strict=True)))[0]

    return both({**arrays, **floats})


def check(case, dtype, atol, implementation="reference"):
    arrays, options, grads = draw(case, dtype)
    (out, lse), cotangents = run(arrays, options, grads, implementation)
    expected = ask_oracle(arrays, options, grads)
    np.testing.assert_allclose(np.asarray(out, np.float64), expected.out, atol=atol)
    np.testing.assert_allclose(np.asarray(lse, np.float64), expected.lse, atol=atol)
    for name, cotangent in cotangents.items():
        want = np.asarray(getattr(expected, name))
        np.testing.assert_allclose(np.asarray(cotangent, np.float64), want, atol=atol * 4, err_msg=name)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_float64_equals_the_oracle(case):
    with jax.enable_x64(True):
        case = {name: x.astype(jnp.float64) if isinstance(x, jax.Array) else x for name, x in case.items()}
        check(case, jnp.float64, 1e-12)


@pytest.mark.parametrize("name", ["plain", "sinks_empty_rows", "everything"])
def test_float32_equals_the_oracle(name):
    check(CASES[name], jnp.float32, 1e-5)


@pytest.mark.parametrize("implementation", ["reference", "blockwise"])
def test_huge_scores_choose_one_key(implementation):
    """Scores of 1e10, of which one rounding, 1024, is more than exp bears: all operations must see the same scores."""
    rng = np.random.default_rng(0)
    query, key, value = (rng.normal(size=size).astype(np.float32) for size in ((1, 40, 2, 64), *2 * ((1, 50, 1, 64),)))
    out = jax_fa4.attention(query, key, value, scale=1e8, implementation=implementation)
    np.testing.assert_allclose(out, value[:, np.argmax(query[0] @ key[0, :, 0].T, axis=-1)][..., 0, :], atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_rounds_once(dtype):
    """Arithmetic is float32: the output differs from the oracle by its own rounding alone."""
    arrays, options, grads = draw(CASES["everything"], dtype)
    (out, lse), _ = run(arrays, options, grads, "reference")
    expected = ask_oracle(arrays, options, grads)
    assert out.dtype == dtype
    assert lse.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(out, np.float64), expected.out, rtol=float(jnp.finfo(dtype).eps), atol=1e-6)
    np.testing.assert_allclose(np.asarray(lse, np.float64), expected.lse, atol=1e-5)


def test_derivatives_of_every_order_exist():
    """jvp against reverse mode, and the Hessian against differences of gradients, with empty rows in the batch."""
    with jax.enable_x64(True):
        arrays, options, _ = draw(CASES["sinks_empty_rows"] | {"sinks": (N,)}, jnp.float64)
        options.pop("sinks")

        def f(query):
            out, lse = jax_fa4.attention(
                query, arrays["key"], arrays["value"], **options, return_residual=True, implementation="reference"
            )
            return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.where(lse == -jnp.inf, 0, lse) ** 2)

        query = arrays["query"]
        direction = jnp.cos(jnp.arange(query.size, dtype=query.dtype)).reshape(query.shape)
        gradient = jax.jit(jax.grad(f))
        _, slope = jax.jit(lambda x: jax.jvp(f, (x,), (direction,)))(query)
        np.testing.assert_allclose(slope, jnp.sum(gradient(query) * direction), rtol=1e-12)
        _, curve = jax.jit(lambda x: jax.jvp(gradient, (x,), (direction,)))(query)
        step = 1e-5
        ahead, behind = (gradient(query + sign * step * direction) for sign in (1, -1))
        np.testing.assert_allclose(curve, (ahead - behind) / (2 * step), atol=1e-8)
        assert bool(jnp.isfinite(curve).all())
        reverse = jax.jit(jax.grad(lambda x: jnp.sum(gradient(x) * direction)))(query)
        np.testing.assert_allclose(reverse, curve, atol=1e-12)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_what_is_never_seen_never_matters(poison):
    """NaN and inf in rows that take part in nothing, and in the cotangents of empty rows."""
    arrays, options, grads = draw(CASES["ids"] | {"query_seq_lengths": np.array([4, 6])}, jnp.float32)
    sees = np.array([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]], bool)
    seen = np.array([[1, 1, 1, 1, 0, 1, 0], [1, 1, 1, 1, 1, 0, 1]], bool)
    plain = run(arrays, options, grads, "reference")
    query, key, value = arrays["query"], arrays["key"], arrays["value"]
    poisoned = {
        "query": jnp.where(sees[..., None, None], query, poison),
        "key": jnp.where(seen[..., None, None], key, poison),
        "value": jnp.where(seen[..., None, None], value, poison),
    }
    grads = tuple(np.where(sees.reshape(B, T, *(1,) * (g.ndim - 2)), g, poison) for g in grads)
    with_poison = run(poisoned, options, grads, "reference")
    jax.tree.map(np.testing.assert_array_equal, with_poison, plain)
    for name, rows in (("query", sees), ("key", seen), ("value", seen)):
        assert not np.any(np.asarray(with_poison[1][name])[~rows])


def test_bias_of_minus_infinity_hides_a_pair():
    arrays, _, grads = draw({}, jnp.float32)
    mask = np.random.default_rng(3).random((B, 1, T, S)) < 0.5
    mask[:, :, 2] = False
    hidden = run(arrays, {"bias": jnp.where(mask, 0.0, -jnp.inf)}, grads, "reference")
    masked = run(arrays, {"mask": mask}, grads, "reference")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), hidden[0], masked[0])
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(hidden[1]))
