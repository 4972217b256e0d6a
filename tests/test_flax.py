"""jax_fa4.flax: what linen and nnx pass arrives, and a swapped model computes what it did before."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import jax_fa4
import jax_fa4.flax
from tests.inputs import IMPLEMENTATIONS, assert_close, draw

WIDTH, HEADS, LENGTH = 16, 4, 9
CAUSAL = np.tril(np.ones((1, 1, LENGTH, LENGTH), np.float32))  # Flax's masks are float32
IDS = jnp.array([[0] * 4 + [1] * 5, [2] * 3 + [0] * 4 + [-1] * 2])
LIBRARIES = ["linen", "nnx"]


def inputs(*leading, length=LENGTH, seed=0):
    return jax.random.normal(jax.random.key(seed), (*leading, length, WIDTH))


def module_of(library, **options):
    """A function of inputs, mask and further arguments of the call, with an attention module's fixed parameters."""
    if library == "linen":
        module = linen.MultiHeadDotProductAttention(HEADS, **options)
        variables = linen.MultiHeadDotProductAttention(HEADS).init(jax.random.key(1), inputs(2))
        return lambda x, **call: module.apply(variables, x, **call)
    module = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=nnx.Rngs(1), **options)
    return lambda x, **call: module(x, **call)


def both(library, x, make=jax_fa4.flax.attention_fn, **options):
    """The outputs of one module with our attention function and with Flax's own."""
    call = options.pop("call", {})
    ours = module_of(library, attention_fn=make(), **options)(x, **call)
    return ours, module_of(library, **options)(x, **call)


def probe(seen):
    """An attention function that notes what it is called with, with the signature of ours."""
    real = jax_fa4.flax.attention_fn()

    @functools.wraps(real)
    def attend(*arguments, **named):
        seen.update(inspect.signature(real).bind(*arguments, **named).arguments)
        return real(*arguments, **named)

    return attend


def test_every_parameter_of_both_libraries_has_a_name():
    """Measured, flax 0.12: linen drops what it finds no name for, so a function of **kwargs loses the mask."""
    ours = inspect.signature(jax_fa4.flax.attention_fn()).parameters
    for theirs in (linen.dot_product_attention, nnx.dot_product_attention):
        assert set(inspect.signature(theirs).parameters) <= set(ours)
    assert all(one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for one in ours.values())


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_mask_arrives(library):
    """The same: the output of a causal model does not change when the future does."""
    seen = {}
    run = module_of(library, attention_fn=probe(seen))
    x = inputs(2)
    out = run(x, mask=CAUSAL)
    assert seen["mask"] is CAUSAL
    assert_close(run(x.at[:, 5:].add(3.0), mask=CAUSAL)[:, :5], out[:, :5])
    assert float(jnp.abs(run(x.at[:, 5:].add(3.0))[:, :5] - run(x)[:, :5]).max()) > 1e-2


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("library", LIBRARIES)
def test_values_and_gradients_equal_flax_own(library, implementation):
    x = inputs(2)
    make = functools.partial(jax_fa4.flax.attention_fn, implementation=implementation)

    def loss(run, x):
        return jnp.sum(jnp.sin(run(x, mask=CAUSAL)))

    ours, theirs = (
        jax.jit(jax.value_and_grad(functools.partial(loss, module_of(library, **options))))(x)
        for options in ({"attention_fn": make()}, {})
    )
    jax.tree.map(assert_close, ours, theirs)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (2, 1, 3)], ids=str)
def test_extra_batch_dimensions(library, leading):
    """Measured, flax 0.12: nnx's own function fails on a mask whose inner batch dimension is 1, so linen judges."""
    x = inputs(*leading)
    mask = np.tril(np.ones((*(1 for _ in leading), 1, LENGTH, LENGTH), np.float32))
    ours = module_of(library, attention_fn=jax_fa4.flax.attention_fn())(x, mask=mask)
    assert ours.shape == x.shape
    rows = jax.vmap(functools.partial(module_of(library), mask=mask.reshape(1, LENGTH, LENGTH)))(
        x.reshape(-1, LENGTH, WIDTH)
    )
    assert_close(ours, rows.reshape(x.shape))


def test_grouped_heads():
    """google/flax #5177, #5198: 6 query heads over 3 worked in jax.nn and failed in nnx; 6 over 4 is refused."""
    attend = jax_fa4.flax.attention_fn(is_causal=True)
    operands = draw(0, query_heads=6, kv_heads=3)
    expected = jax.nn.dot_product_attention(*operands, is_causal=True)
    assert_close(attend(*operands), expected)
    rng = jax.random.key(0)
    dropped = attend(*operands, dropout_rng=rng, dropout_rate=1e-9)  # takes the dense way, drops nothing
    assert_close(dropped, expected)
    with pytest.raises(ValueError, match="query has 6 heads and key has 4"):
        attend(operands[0], *draw(0, kv_heads=4)[1:])


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("broadcast", [True, False])
def test_dropout_draws_what_flax_draws(library, broadcast):
    x = inputs(2)
    if library == "linen":
        call = {"mask": CAUSAL, "deterministic": False, "dropout_rng": jax.random.key(7)}
        ours, theirs = both(library, x, call=call, dropout_rate=0.4, broadcast_dropout=broadcast)
    else:
        rngs = [nnx.Rngs(3), nnx.Rngs(3)]
        options = {"dropout_rate": 0.4, "broadcast_dropout": broadcast, "deterministic": False}
        ours = module_of(library, attention_fn=jax_fa4.flax.attention_fn(), **options)(x, mask=CAUSAL, rngs=rngs[0])
        theirs = module_of(library, **options)(x, mask=CAUSAL, rngs=rngs[1])
    assert_close(ours, theirs)
    undropped = module_of(library)(x, mask=CAUSAL)
    assert float(jnp.abs(ours - undropped).max()) > 1e-2


@pytest.mark.parametrize("library", LIBRARIES)
def test_weights_are_sown(library):
    x = inputs(2)
    mask = {"mask": CAUSAL}
    if library == "linen":
        variables = linen.MultiHeadDotProductAttention(HEADS).init(jax.random.key(1), x)
        runs = [
            linen.MultiHeadDotProductAttention(HEADS, **options).apply(
                variables, x, sow_weights=True, mutable=["intermediates"], **mask
            )
            for options in ({"attention_fn": jax_fa4.flax.attention_fn()}, {})
        ]
        (ours, kept), (theirs, their_kept) = runs
        kept, their_kept = (tree["intermediates"]["attention_weights"][0] for tree in (kept, their_kept))
    else:
        modules = [
            nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=nnx.Rngs(1), **options)
            for options in ({"attention_fn": jax_fa4.flax.attention_fn()}, {})
        ]
        ours, theirs = (module(x, sow_weights=True, **mask) for module in modules)
        kept, their_kept = (jax.tree.leaves(module.attention_weights)[0] for module in modules)
    assert_close(ours, theirs)
    assert_close(kept, their_kept)
    assert not np.any(np.triu(kept[0, 0], 1))


def test_custom_einsums_are_used():
    calls = []

    def counting(*arguments):
        calls.append(arguments[0])
        return jnp.einsum(*arguments)

    options = {"qk_attn_weights_einsum_cls": lambda: counting, "attn_weights_value_einsum_cls": lambda: counting}
    ours, theirs = both("linen", inputs(2), call={"mask": CAUSAL}, **options)
    assert_close(ours, theirs)
    assert len(calls) == 4


def test_other_options_on_the_dense_way():
    """A soft cap, a window and segments hold as well where dropout or weights are asked for."""
    query, key, value = draw(1, query_length=LENGTH, key_length=LENGTH, query_heads=4, kv_heads=2)
    options = {"is_causal": True, "local_window_size": (3, 0), "logits_soft_cap": 2.0}
    attend = jax_fa4.flax.attention_fn(**options)
    value = value.at[1, -2:].set(jnp.nan)  # padding
    expected = jax_fa4.attention(query, key, value, segment_ids=IDS, **options)
    for further in ({"precision": "highest"}, {"dropout_rate": 1e-9, "dropout_rng": jax.random.key(0)}, {}):
        with jax_fa4.flax.segment_ids(IDS):
            assert_close(attend(query, key, value, **further), expected)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("way", ["context", "mask"])
def test_segments_stay_apart(library, way):
    """google/praxis #30, AI-Hypercomputer/maxtext #4476: ids that an inner interface has no argument for were lost."""
    x = inputs(2)
    run = module_of(library, attention_fn=jax_fa4.flax.attention_fn(is_causal=True))

    def loss(x, ids):
        if way == "mask":
            return jnp.sum(run(x, mask=jax_fa4.flax.SegmentMask(ids))[0, 4:])
        with jax_fa4.flax.segment_ids(ids):
            return jnp.sum(run(x)[0, 4:])

    grad = jax.jit(jax.grad(loss))(x, IDS)
    assert not np.any(grad[0, :4])
    assert np.all(np.any(grad[0, 4:], axis=-1))


def test_segments_reach_scanned_and_rematerialised_layers():
    class Layer(linen.Module):
        @linen.compact
        def __call__(self, x, _):
            return linen.MultiHeadDotProductAttention(HEADS, attention_fn=jax_fa4.flax.attention_fn())(x), None

    stack = linen.scan(linen.remat(Layer), variable_axes={"params": 0}, split_rngs={"params": True}, length=2)()
    x = inputs(2)
    variables = stack.init(jax.random.key(0), x, None)

    def loss(x, ids):
        with jax_fa4.flax.segment_ids(ids):
            return jnp.sum(stack.apply(variables, x, None)[0][0, 4:])

    assert not np.any(jax.jit(jax.grad(loss))(x, IDS)[0, :4])


def test_segments_that_nobody_reads_are_an_error():
    x = inputs(2)
    flax_own = module_of("linen")
    with pytest.raises(RuntimeError, match="no attention of jax_fa4"), jax_fa4.flax.segment_ids(IDS):
        flax_own(x)
    ours = jax.jit(module_of("linen", attention_fn=jax_fa4.flax.attention_fn()))
    ours(x)
    traced_before = pytest.raises(RuntimeError, match=r"inside of the function that jax\.jit traces")
    with traced_before, jax_fa4.flax.segment_ids(IDS):
        ours(x)
    with pytest.raises(ValueError, match="give them once"), jax_fa4.flax.segment_ids(IDS):
        module_of("linen", attention_fn=jax_fa4.flax.attention_fn())(x, mask=jax_fa4.flax.SegmentMask(IDS))


@pytest.mark.parametrize("library", LIBRARIES)
def test_decoding_from_a_cache(library):
    """One query at a time equals the whole sequence at once; the mask of the cache is the causality."""
    x = inputs(2)
    attend = jax_fa4.flax.attention_fn(is_causal=True)
    steps = []
    if library == "linen":
        module = linen.MultiHeadDotProductAttention(HEADS, decode=True, attention_fn=attend)
        variables = module.init(jax.random.key(1), x)
        cache, params = variables["cache"], variables["params"]
        step = jax.jit(lambda cache, x: module.apply({"params": params, "cache": cache}, x, mutable=["cache"]))
        for i in range(LENGTH):
            out, updated = step(cache, x[:, i : i + 1])
            cache = updated["cache"]
            steps.append(out)
        whole = linen.MultiHeadDotProductAttention(HEADS).apply({"params": params}, x, mask=CAUSAL)
    else:
        module = nnx.MultiHeadAttention(HEADS, WIDTH, decode=True, rngs=nnx.Rngs(1), attention_fn=attend)
        module.init_cache(x.shape)
        steps = [module(x[:, i : i + 1]) for i in range(LENGTH)]
        whole = module_of("nnx")(x, mask=CAUSAL)
    assert_close(jnp.concatenate(steps, axis=1), whole)


def test_a_redundant_mask_is_left_out_and_checked():
    x = inputs(2)
    attend = jax_fa4.flax.attention_fn(is_causal=True, mask_is_redundant=True)
    run = module_of("linen", attention_fn=attend)
    causal = module_of("linen")(x, mask=CAUSAL)
    assert_close(run(x, mask=CAUSAL), causal)
    assert_close(jax.jit(lambda x, mask: run(x, mask=mask))(x, np.zeros_like(CAUSAL)), causal)  # the caller's promise
    with pytest.raises(ValueError, match="mask rules out pairs"):
        run(x, mask=np.tril(CAUSAL, -1) + np.eye(LENGTH, dtype=np.float32) * (np.arange(LENGTH) != 4))


def test_what_cannot_be_honoured_is_refused():
    attend = jax_fa4.flax.attention_fn(is_causal=True)
    query, key, value = draw(0, query_length=4, key_length=6)
    with pytest.raises(ValueError, match="query has length 4 and key 6"):
        attend(query, key, value)
    aligned = jax_fa4.flax.attention_fn(is_causal=True, causal_alignment="bottom_right")
    want = jax_fa4.attention(query, key, value, is_causal=True, causal_alignment="bottom_right")
    assert_close(aligned(query, key, value), want)
    windowed = jax_fa4.flax.attention_fn(local_window_size=(2, 0))
    with pytest.raises(ValueError, match="local_window_size is"):
        windowed(query[:, :1], key, value, mask=np.ones((1, 1, 1, 6), bool))


def test_dtypes_are_promoted_as_flax_does():
    query, key, value = draw(0)
    out = jax_fa4.flax.attention_fn()(query, key.astype(jnp.bfloat16), value, dtype=jnp.bfloat16)
    assert out.dtype == jnp.bfloat16
    assert jax_fa4.flax.attention_fn()(query, key.astype(jnp.bfloat16), value).dtype == jnp.float32


class Decoder(linen.Module):
    """A model that says nothing of attention functions."""

    @linen.compact
    def __call__(self, tokens):
        x = linen.Embed(32, WIDTH)(tokens)
        for _ in range(2):
            x = x + linen.SelfAttention(HEADS)(linen.LayerNorm()(x), linen.make_causal_mask(tokens))
            x = x + linen.Dense(WIDTH)(linen.gelu(linen.Dense(2 * WIDTH)(linen.LayerNorm()(x))))
        return linen.Dense(32)(x)


def test_swap_into_a_linen_model():
    tokens = jax.random.randint(jax.random.key(0), (2, LENGTH), 0, 32)
    model = Decoder()
    variables = model.init(jax.random.key(1), tokens)
    seen = {}

    def loss(variables, swap):
        if not swap:
            return jnp.mean(model.apply(variables, tokens) ** 2)
        with jax_fa4.flax.swapped_linen_attention(probe(seen)):
            return jnp.mean(model.apply(variables, tokens) ** 2)

    grads = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    jax.tree.map(assert_close, grads(variables, True), grads(variables, False))
    assert seen["mask"].dtype == jnp.float32
    with pytest.raises(RuntimeError, match="nothing was swapped"), jax_fa4.flax.swapped_linen_attention(probe(seen)):
        grads(variables, False)


def test_swap_into_an_nnx_model():
    class Model(nnx.Module):
        def __init__(self, rngs):
            make = functools.partial(nnx.MultiHeadAttention, HEADS, WIDTH, decode=False)
            self.layers = nnx.List([make(rngs=rngs) for _ in range(2)])

        def __call__(self, x):
            for layer in self.layers:
                x = x + layer(x, is_causal=True)
            return x

    model = Model(nnx.Rngs(0))
    x = inputs(2)
    before = model(x)
    assert jax_fa4.flax.swap_nnx_attention(model, jax_fa4.flax.attention_fn()) == 2
    assert_close(nnx.jit(lambda model, x: model(x))(model, x), before)
    with pytest.raises(ValueError, match="nothing was swapped"):
        jax_fa4.flax.swap_nnx_attention(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), jax_fa4.flax.attention_fn())
