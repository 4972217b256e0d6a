"""blockwise against the dense reference in float64, on problems of many small tiles; its memory; the tiles it skips."""

import functools
import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fa4
from jax_fa4.arguments import read_call
from jax_fa4.blockwise import blockwise, tiling
from jax_fa4.dispatch import Target
from tests import oracle

B, T, S, N, K, D, DV = 2, 21, 27, 4, 2, 3, 5


@pytest.fixture(scope="module", autouse=True)
def small_tiles():
    """Tiles of eight rows: two dozen tokens then have several tiles of every class, the last of them hanging over."""
    with pytest.MonkeyPatch.context() as patch:
        jax.clear_caches()  # calls are kept by problem, whatever the tiles were
        patch.setattr(tiling, "TILE_LIMIT", 8)
        yield
    jax.clear_caches()


def sorted_ids(seed, rows, length, documents=3):
    return np.sort(np.random.default_rng(seed).integers(-1, documents, (rows, length)), axis=1).astype(np.int32)


def mixed_ids(seed, rows, length, documents=3):
    return np.random.default_rng(seed).integers(-1, documents, (rows, length)).astype(np.int32)


# Each option by itself; a shape stands for random numbers (float) of that shape, or booleans for `mask`.
OPTIONS = {
    "causal": {"is_causal": True},
    "bottom_right": {"is_causal": True, "causal_alignment": "bottom_right"},
    "window": {"local_window_size": (9, 4)},
    "window_left": {"local_window_size": (2, None)},
    "window_zero": {"local_window_size": 0, "causal_alignment": "bottom_right"},
    "query_lengths": {"query_seq_lengths": np.array([17, 0])},
    "key_lengths": {"key_value_seq_lengths": np.array([27, 6])},
    "ids": {"segment_ids": (sorted_ids(0, B, T), sorted_ids(1, B, S))},
    "ids_mixed": {"segment_ids": (mixed_ids(2, B, T), mixed_ids(3, B, S))},
    "soft_cap": {"logits_soft_cap": 0.7},
    "sinks": {"sinks": (N,)},
    "scale": {"scale": 0.3},
    "scale_traced": {"scale": ()},
    "bias": {"bias": (B, N, T, S)},
    "mask": {"mask": (B, N, T, S)},
}
PATTERNS = [
    tuple(n if full else 1 for n, full in zip((B, N, T, S), pattern, strict=True))
    for pattern in itertools.product((True, False), repeat=4)
]


def merged(names):
    """The options of several names together."""
    return {key: value for name in names for key, value in OPTIONS[name].items()}


def go_together(one, other):
    """Whether two names say nothing about the same option."""
    return not OPTIONS[one].keys() & OPTIONS[other].keys()


def covering_sets(seed=0):
    """Random sets of options in which every pair of names that go together occurs at least once."""
    rng, sets = random.Random(seed), []
    left = {pair for pair in itertools.combinations(OPTIONS, 2) if go_together(*pair)}

    def candidate():
        chosen = []
        for name in rng.sample(list(OPTIONS), len(OPTIONS)):
            if rng.random() < 0.8 and all(go_together(name, other) for other in chosen):
                chosen.append(name)
        return tuple(name for name in OPTIONS if name in chosen)

    while left:
        best = max(
            (candidate() for _ in range(200)), key=lambda names: len(left & set(itertools.combinations(names, 2)))
        )
        left -= set(itertools.combinations(best, 2))
        sets.append(best)
    return sets


def draw(options, dtype, seed=0, shape=(B, T, S, N, K, D, DV)):
    """Float operands (differentiated), the other options, and cotangents of output and log-sum-exp."""
    b, t, s, n, k, d, dv = shape
    rng = np.random.default_rng(seed)
    shapes = {"query": (b, t, n, d), "key": (b, s, k, d), "value": (b, s, k, dv)}
    shapes |= {x: y for x, y in options.items() if x in ("bias", "sinks", "scale") and isinstance(y, tuple)}
    accumulated = jnp.float64 if dtype == jnp.float64 else jnp.float32
    floats = {
        name: jnp.asarray(rng.normal(size=x), dtype if name in ("query", "key", "value") else accumulated)
        for name, x in shapes.items()
    }
    fixed = {name: x for name, x in options.items() if name not in floats}
    if "mask" in fixed:
        fixed["mask"] = jnp.asarray(rng.random(fixed["mask"]) < 0.6)
    return (
        floats,
        fixed,
        (jnp.asarray(rng.normal(size=(b, t, n, dv)), dtype), jnp.asarray(rng.normal(size=(b, t, n)), accumulated)),
    )


def run(floats, fixed, grads, implementation="blockwise", trace_ids=False):
    """Output, log-sum-exp, and the gradients of the floats."""
    integers = {
        x: fixed[x] for x in ("segment_ids", "query_seq_lengths", "key_value_seq_lengths") if trace_ids and x in fixed
    }
    rest = {name: x for name, x in fixed.items() if name not in integers}

    # Compiling is most of a test's time; unoptimised code does the same arithmetic.
    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def both(floats, integers, grads):
        def call(floats):
            return jax_fa4.attention(**floats, **rest, **integers, return_residual=True, implementation=implementation)

        results, pull = jax.vjp(call, floats)
        return results, pull(grads)[0]

    return both(floats, jax.tree.map(jnp.asarray, integers), grads)


def assert_close(got, want, atol):
    """Equal within `atol` of the largest finite value, infinities in the same places."""

    def one(path, a, b):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        size = np.abs(b, where=np.isfinite(b), out=np.zeros_like(b)).max(initial=1.0)
        np.testing.assert_allclose(a, b, rtol=0, atol=atol * size, err_msg=jax.tree_util.keystr(path))

    jax.tree_util.tree_map_with_path(one, got, want)


def check_float64(options, seed=0, **how):
    with jax.enable_x64(True):
        drawn = draw(options, jnp.float64, seed)
        assert_close(run(*drawn, **how), run(*drawn, implementation="reference"), 1e-12)


@pytest.mark.parametrize("name", OPTIONS)
def test_each_option(name):
    check_float64(OPTIONS[name])


@pytest.mark.parametrize("names", covering_sets(), ids=lambda names: "-".join(names))
def test_every_pair_of_options(names):
    check_float64(merged(names), seed=1)


@pytest.mark.parametrize(
    "names", [("ids", "causal"), ("ids_mixed", "window"), ("query_lengths", "key_lengths", "sinks")]
)
def test_ids_and_lengths_that_are_traced(names):
    check_float64(merged(names), seed=2, trace_ids=True)


@pytest.mark.parametrize("shape", PATTERNS, ids=str)
def test_every_broadcast_of_bias_and_mask(shape):
    """The bias is broadcast as the pattern says, the mask the other way round."""
    other = tuple(n if one == 1 else 1 for one, n in zip(shape, (B, N, T, S), strict=True))
    check_float64({"bias": shape, "mask": other, "is_causal": True}, seed=3)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((1, 1, 40, 2, 1, 4, 4), {}),
        ((3, 40, 1, 2, 2, 4, 2), {"is_causal": True}),
        ((2, 8, 16, 6, 2, 4, 4), {"is_causal": True, "causal_alignment": "bottom_right"}),
        ((1, 9, 17, 3, 1, 1, 1), {"local_window_size": (3, 3)}),
        ((4, 7, 7, 2, 2, 4, 4), {"segment_ids": sorted_ids(5, 4, 7)}),
        ((2, 33, 33, 4, 4, 8, 8), {"is_causal": True, "segment_ids": mixed_ids(6, 2, 33, 5)}),
    ],
)
def test_odd_sizes(shape, options):
    with jax.enable_x64(True):
        drawn = draw(options, jnp.float64, 4, shape)
        assert_close(run(*drawn), run(*drawn, implementation="reference"), 1e-12)


def test_tiles_of_full_size(monkeypatch):
    """Tiles as they are in use, with groups of heads that do not all fit together."""
    monkeypatch.setattr(tiling, "TILE_LIMIT", 256)
    monkeypatch.setattr(tiling, "GROUP_BYTES", 2 * 4 * 256 * 256)
    jax.clear_caches()
    options = {"is_causal": True, "segment_ids": sorted_ids(7, 2, 601, 4), "bias": (1, 8, 1, 601), "sinks": (8,)}
    drawn = draw(options, jnp.float32, 5, (2, 601, 601, 8, 4, 16, 16))
    with jax.default_matmul_precision("highest"):
        assert_close(run(*drawn), run(*drawn, implementation="reference"), 2e-5)
    jax.clear_caches()


@pytest.mark.parametrize(("dtype", "atol"), [(jnp.float32, 1e-5), (jnp.bfloat16, 2e-2), (jnp.float16, 3e-3)])
def test_dtypes_against_the_oracle(dtype, atol):
    """Half precision costs the rounding of the results, since sums are float32."""
    names = ("causal", "ids", "soft_cap", "sinks", "scale_traced", "bias")
    floats, fixed, grads = draw(merged(names), dtype, 6)
    (out, lse), cotangents = run(floats, fixed, grads)
    assert (out.dtype, lse.dtype) == (dtype, jnp.float32)
    assert {name: x.dtype for name, x in cotangents.items()} == {name: x.dtype for name, x in floats.items()}
    exact = {name: np.asarray(x, np.float64) for name, x in floats.items()}
    answer = oracle.attention(
        **exact, is_causal=True, ids=fixed["segment_ids"], cap=0.7, grad_out=np.asarray(grads[0], np.float64),
        grad_lse=np.asarray(grads[1], np.float64),
    )  # fmt: skip
    want = (answer.out, answer.lse), {name: np.asarray(getattr(answer, name)) for name in cotangents}
    assert_close(((out, lse), cotangents), want, atol)


def poisoned(drawn, poison):
    """The same call with `poison` in every row that takes part in nothing."""
    floats, fixed, grads = drawn
    ids, key_ids = fixed["segment_ids"]
    sees = (ids[:, :, None] == key_ids[:, None, :]) & (ids >= 0)[:, :, None]
    if "mask" in fixed:
        sees = sees[:, None] & np.asarray(fixed["mask"])
        by_query, by_key = sees.any(3).swapaxes(1, 2), sees.any(2).reshape(B, K, N // K, S).any(2).swapaxes(1, 2)
    else:
        by_query, by_key = sees.any(2)[:, :, None], sees.any(1)[:, :, None]
    assert not by_query.all()
    assert not by_key.all()
    rows = {"query": by_query, "key": by_key, "value": by_key}
    floats = floats | {name: jnp.where(seen[..., None], floats[name], poison) for name, seen in rows.items()}
    return floats, fixed, (jnp.where(by_query[..., None], grads[0], poison), jnp.where(by_query, grads[1], poison))


@pytest.mark.parametrize("trace_ids", [False, True])
@pytest.mark.parametrize("names", [("ids",), ("ids_mixed", "soft_cap"), ("ids_mixed", "mask", "bias")])
def test_what_nobody_sees_never_matters(names, trace_ids):
    options = merged(names)
    options["segment_ids"][1][:, 5] = 99  # a key in the middle that no query has the id of
    drawn = draw(options, jnp.float32, 7)
    plain = run(*drawn, trace_ids=trace_ids)
    for poison in (np.nan, np.inf):
        jax.tree.map(np.testing.assert_array_equal, run(*poisoned(drawn, poison), trace_ids=trace_ids), plain)


@pytest.mark.parametrize("trace_ids", [False, True])
@pytest.mark.parametrize("by_ids", [False, True])
def test_tiles_that_the_mask_rules_out_are_not_read(by_ids, trace_ids):
    """NaN in values and cotangents of tiles that others see: computed with, they would make their zeros NaN."""
    length, half = 32, 16
    options = {"is_causal": True}
    if by_ids:
        options = {"segment_ids": np.repeat(np.arange(2, dtype=np.int32), half)[None].repeat(2, 0)}
    floats, fixed, grads = draw(options, jnp.float32, 8, (2, length, length, 2, 2, 4, 4))
    late = jnp.arange(length)[None, :, None, None] >= half
    plain = run(floats, fixed, grads, trace_ids=trace_ids)
    bad_values = run(floats | {"value": jnp.where(late, jnp.nan, floats["value"])}, fixed, grads, trace_ids=trace_ids)
    np.testing.assert_array_equal(bad_values[0][0][:, :half], plain[0][0][:, :half])
    assert bool(jnp.isnan(bad_values[0][0][:, half:]).all())
    bad_grads = run(floats, fixed, (jnp.where(late, grads[0], jnp.nan), grads[1]), trace_ids=trace_ids)
    for name in ("key", "value"):
        np.testing.assert_array_equal(bad_grads[1][name][:, half:], plain[1][name][:, half:])


def arrays_of(jaxpr):
    """Every array that any equation makes, those of inner loops and calls included."""
    for equation in jaxpr.eqns:
        yield from (variable.aval for variable in equation.outvars)
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from arrays_of(inner)


def arrays_of_gradient(floats, fixed, grads):
    def loss(floats):
        out, lse = jax_fa4.attention(**floats, **fixed, return_residual=True, implementation="blockwise")
        return (out * grads[0]).sum() + (lse * grads[1]).sum()

    return [aval for aval in arrays_of(jax.make_jaxpr(jax.grad(loss))(floats).jaxpr) if hasattr(aval, "shape")]


@pytest.mark.parametrize("names", [("causal",), ("window", "sinks", "soft_cap", "scale_traced")])
def test_no_array_of_queries_times_keys(names):
    length = 512
    options = merged(names) | {
        "bias": (1, 2, 1, length),
        "mask": (1, 1, length, 1),
        "segment_ids": sorted_ids(9, 1, length),
    }
    options = {name: (2,) if name == "sinks" else x for name, x in options.items()}
    arrays = arrays_of_gradient(*draw(options, jnp.float32, 9, (1, length, length, 2, 1, 4, 4)))
    assert len(arrays) > 500  # the loops' bodies were looked into
    assert max(aval.size for aval in arrays) < length * length // 16


def test_a_dense_bias_has_the_only_large_arrays():
    length = 512
    shape = (1, 1, length, length)
    drawn = draw({"bias": shape, "is_causal": True}, jnp.float32, 10, (1, length, length, 2, 1, 4, 4))
    large = {aval.shape for aval in arrays_of_gradient(*drawn) if aval.size >= length * length // 16}
    assert large == {shape}


def test_heads_that_share_a_key_head_do_not_repeat_it():
    keys, heads = 2048, 16
    arrays = arrays_of_gradient(*draw({}, jnp.float32, 11, (1, 8, keys, heads, 1, 4, 4)))
    assert max(aval.size for aval in arrays) < heads * keys * 4 // 2


def test_the_program_does_not_grow_with_the_documents():
    """Ids known when traced become tables, not copies of the loop's body."""
    sizes = []
    for documents in (2, 100):
        ids = np.sort(np.arange(1024, dtype=np.int32) % documents)[None]
        drawn = draw({"segment_ids": ids, "is_causal": True}, jnp.float32, 12, (1, 1024, 1024, 1, 1, 4, 4))
        sizes.append(len(arrays_of_gradient(*drawn)))
    assert sizes[1] < 1.1 * sizes[0]


def test_inside_shard_map():
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("rows")
    floats, _, _ = draw({}, jnp.float32, 13)
    arrays = [floats[name] for name in ("query", "key", "value")]

    def attend(*arrays):
        return jax_fa4.attention(*arrays, is_causal=True, implementation="blockwise")

    mapped = jax.shard_map(attend, mesh=mesh, in_specs=spec, out_specs=spec)
    grads = [jax.jit(jax.grad(lambda *x, f=f: (f(*x) ** 2).sum(), (0, 1, 2)))(*arrays) for f in (mapped, attend)]
    assert_close(*grads, 1e-6)


def described(**options):
    floats, fixed, _ = draw(options, jnp.float32, 14, (1, 32, 32, 2, 2, 4, 4))
    return dict(blockwise.describe(read_call(**floats, **fixed).problem, Target("cpu")))


def test_describe_counts_tiles():
    assert described(is_causal=True)["tiles visited"] == "10 of 16, 60% without an element mask"
    ids = np.repeat(np.arange(4, dtype=np.int32), 8)[None]
    assert described(segment_ids=ids)["tiles visited"] == "4 of 16, 100% without an element mask"
    assert described(segment_ids=jnp.asarray(ids))["tiles visited"] == "at most 16: known when the call runs"
    assert described(is_causal=True)["tile"] == "8 queries x 8 keys"
    assert described(is_causal=True)["workspace bytes"].endswith("(forward)")
