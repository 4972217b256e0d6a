"""Derivatives and batching around an implementation that has its own backward pass.

The implementation here computes densely and keeps a record of what it is asked, so that folding, residuals and targets
can be seen; values are compared with the plain-JAX reference under the same transformation.
"""

import functools
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import PartitionSpec

import jax_fa4
from jax_fa4 import dispatch
from jax_fa4.reference import reference

B, T, S, N, K, D, DV = 2, 4, 5, 4, 2, 3, 6
NAMES = ("query", "key", "value", "bias", "sinks", "scale")


class Recorder:
    """Dense attention with a backward pass of its own."""

    name = "recorder"

    def __init__(self):
        self.calls = []

    def why_not(self, problem, target):
        return None

    def describe(self, problem, target):
        return []

    def forward(self, problem, operands):
        self.calls.append(("forward", problem.batch, str(dispatch.current_target())))
        return reference.forward(problem, operands)

    def backward(self, problem, operands, out, lse, grad_out, grad_lse):
        self.calls.append(("backward", problem.batch, str(dispatch.current_target())))
        given = {name: getattr(operands, name) for name in NAMES if getattr(operands, name) is not None}
        _, pull = jax.vjp(lambda given: reference.forward(problem, operands._replace(**given)), given)
        zeros = type(operands)()
        return zeros._replace(**pull((grad_out, grad_lse))[0])


@pytest.fixture
def recorder(monkeypatch):
    module = types.ModuleType("recording_implementation")
    module.recorder = Recorder()
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(dispatch.MODULES, "recorder", module.__name__)
    dispatch.why_not.cache_clear()
    return module.recorder


def draw(seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((B, T, N, D), (B, S, K, D), (B, S, K, DV), (1, N, T, S), (N,), ())
    return tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)


IDS = (jnp.array([[0, 0, 1, -1], [2, 2, 7, 0]]), jnp.array([[0, 1, 1, 0, -1], [0, 2, 2, 2, 5]]))


def loss(implementation, query, key, value, bias=None, sinks=None, scale=None, ids=IDS, **options):
    out, lse = jax_fa4.attention(
        query, key, value, bias, sinks=sinks, scale=scale, segment_ids=ids, return_residual=True,
        implementation=implementation, **options,
    )  # fmt: skip
    return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.where(lse == -jnp.inf, 0, jnp.cos(lse)))


def close(actual, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=3e-5, rtol=1e-4), actual, expected)


def stack(x, axis):
    return x if axis is None else jnp.stack([x, x * 0.5, -x], axis=axis)


# Axes of query, key, value, bias, sinks, scale, and of the ids; with what the recorder is then asked.
FOLDED, IN_TURN = B * 3, B
MAPPED = {
    "query": ((0, None, None, None, None), None, FOLDED, FOLDED),
    "key_and_value": ((None, 1, 2, None, None), None, FOLDED, FOLDED),
    "bias": ((None, None, None, -1, None), None, FOLDED, FOLDED),
    "ids": ((None, None, None, None, None), 0, FOLDED, FOLDED),
    "sinks": ((None, None, None, None, 1), None, IN_TURN, IN_TURN),
    "shared_scale": ((0, None, None, None, None, None), None, FOLDED, IN_TURN),
    "scale": ((None, None, None, None, None, 0), None, IN_TURN, IN_TURN),
    "everything": ((1, 0, 3, 2, 0, 0), 1, IN_TURN, IN_TURN),
}


@pytest.mark.parametrize(("axes", "ids_axis", "forward", "backward"), MAPPED.values(), ids=MAPPED)
def test_vmap_of_gradients_is_per_example(recorder, axes, ids_axis, forward, backward):
    """Also where an argument is shared: each example has its own gradient of the bias, the sinks and the scale."""
    arguments = [stack(x, axis) for x, axis in zip(draw(), axes, strict=False)]
    ids = IDS if ids_axis is None else tuple(jnp.stack([x, x[::-1], x * 0], axis=ids_axis) for x in IDS)

    def both(implementation, *arguments):
        *floats, ids = arguments
        return jax.value_and_grad(lambda *floats: loss(implementation, *floats, ids=ids), tuple(range(len(floats))))(
            *floats
        )

    def run(implementation):
        mapped = jax.vmap(functools.partial(both, implementation), in_axes=(*axes, ids_axis))
        return jax.jit(mapped)(*arguments, ids)

    close(run("recorder"), run("reference"))
    largest = {kind: max(batch for k, batch, _ in recorder.calls if k == kind) for kind in ("forward", "backward")}
    assert largest == {"forward": forward, "backward": backward}


def test_gradient_of_vmap_sums_over_examples(recorder):
    query, *shared = draw()[:5]
    queries = stack(query, 0)

    def total(implementation, queries, *shared):
        return jnp.sum(jax.vmap(functools.partial(loss, implementation), (0, None, None, None, None))(queries, *shared))

    grads = [
        jax.jit(jax.grad(functools.partial(total, name), tuple(range(5))))(queries, *shared)
        for name in ("recorder", "reference")
    ]
    close(*grads)
    assert recorder.calls[-1][:2] == ("backward", FOLDED)


def test_nested_vmap_folds_twice(recorder):
    query, key, value, bias, sinks, _ = draw()
    queries, keys = jnp.stack([query, -query, query * 2]), jnp.stack([key, key + 1], axis=1)

    def run(implementation):
        grad = jax.grad(functools.partial(loss, implementation), (0, 1, 2, 3, 4))
        inner = jax.vmap(grad, in_axes=(0, None, None, None, None))
        outer = jax.vmap(inner, in_axes=(None, 1, None, None, None), axis_name="outer")
        return jax.jit(outer)(queries, keys, value, bias, sinks)

    close(run("recorder"), run("reference"))
    assert recorder.calls[-1][:2] == ("backward", B * 6)


def test_constants_are_copied_when_mapped(recorder):
    ids = tuple(np.asarray(x) for x in IDS)
    lengths = np.array([3, 5])
    queries, key, value = stack(draw()[0], 0), *draw()[1:3]

    def run(implementation):
        grad = jax.grad(functools.partial(loss, implementation, ids=ids, key_value_seq_lengths=lengths, is_causal=True))
        return jax.jit(jax.vmap(grad, (0, None, None)))(queries, key, value)

    close(run("recorder"), run("reference"))


def test_jacrev_equals_the_reference(recorder):
    query, key, value, bias, sinks, _ = draw()

    def run(implementation):
        def call(query, bias, sinks):
            return jax_fa4.attention(query, key, value, bias, sinks=sinks, implementation=implementation)[0, :2, 0]

        return jax.jit(jax.jacrev(call, (0, 1, 2)))(query, bias, sinks)

    close(run("recorder"), run("reference"))


def test_vmap_over_no_examples(recorder):
    query, key, value = draw()[:3]
    run = jax.vmap(jax.grad(functools.partial(loss, "recorder")), in_axes=(0, None, None))
    assert run(jnp.zeros((0, *query.shape)), key, value).shape == (0, *query.shape)


def count_products(jaxpr):
    """Matrix products in a program, inner functions counted at each use."""
    count = 0
    for equation in jaxpr.eqns:
        count += equation.primitive.name == "dot_general"
        for leaf in jax.tree.leaves(list(equation.params.values())):
            if isinstance(leaf, Jaxpr | ClosedJaxpr):
                count += count_products(leaf.jaxpr if isinstance(leaf, ClosedJaxpr) else leaf)
    return count


def test_checkpoint_keeps_the_named_residuals(recorder):
    """`save_only_these_names("context")` spares the second forward pass, of two matrix products."""
    query, key, value = draw()[:3]
    call = functools.partial(loss, "recorder", key=key, value=value)
    saved = jax.checkpoint(call, policy=jax.checkpoint_policies.save_only_these_names("context"))
    want = jax.jit(jax.grad(functools.partial(loss, "reference")))(query, key, value)
    products = {}
    for name, function in (("saved", saved), ("remade", jax.checkpoint(call)), ("plain", call)):
        close(jax.jit(jax.grad(function))(query), want)
        products[name] = count_products(jax.make_jaxpr(jax.grad(function))(query).jaxpr)
    assert products["saved"] == products["plain"]
    assert products["remade"] == products["plain"] + 2


def test_scan_of_checkpointed_layers(recorder):
    query, key, value = draw()[:3]
    value = value[..., :D]

    def run(implementation):
        @jax.checkpoint
        def layer(x, weight):
            out = jax_fa4.attention(x * weight, key, value, implementation=implementation)
            return x + out, jnp.sum(out)

        def total(x, weights):
            x, sums = jax.lax.scan(layer, x, weights)
            return jnp.sum(jnp.sin(x)) + jnp.sum(sums**2)

        return jax.jit(jax.grad(total, (0, 1)))(query, jnp.arange(1.0, 4.0))

    close(run("recorder"), run("reference"))


FORWARD_MODE = {
    "jvp": lambda f, x: jax.jvp(f, (x,), (x,)),
    "jit_of_jvp": lambda f, x: jax.jit(lambda x: jax.jvp(f, (x,), (x,)))(x),
    "jvp_of_jit": lambda f, x: jax.jvp(jax.jit(f), (x,), (x,)),
    "jacfwd": lambda f, x: jax.jacfwd(f)(x),
    "linearize": lambda f, x: jax.linearize(f, x)[1](x),
    "vmap_of_jvp": lambda f, x: jax.vmap(lambda t: jax.jvp(f, (x,), (t,)))(x[None]),
    "jvp_of_scan": lambda f, x: jax.jvp(
        lambda x: jax.lax.scan(lambda c, _: (c * f(c), None), x, length=2)[0], (x,), (x,)
    ),
    "hessian": lambda f, x: jax.hessian(f)(x),
    "gradient_of_gradient": lambda f, x: jax.grad(lambda x: jnp.sum(jax.grad(f)(x)))(x),
    "jvp_of_gradient": lambda f, x: jax.jvp(jax.grad(f), (x,), (x,)),
}


@pytest.mark.parametrize("transform", FORWARD_MODE.values(), ids=FORWARD_MODE)
def test_other_derivatives_name_the_remedy(recorder, transform):
    query, key, value = draw()[:3]
    with pytest.raises(TypeError, match=r"'recorder'.*pass implementation='reference'"):
        transform(lambda x: loss("recorder", x, key, value), query)
    transform(lambda x: loss("reference", x, key, value), query)


def test_a_constant_tangent_beside_a_real_one_is_no_forward_mode(recorder):
    """Reverse mode may meet tangents that are known zeros, here from a custom rule of the caller's."""

    @jax.custom_jvp
    def cut(x):
        return x

    cut.defjvp(lambda primals, tangents: (primals[0], jnp.zeros_like(primals[0])))
    query, key, value = draw()[:3]
    grads = jax.grad(lambda q, k: loss("recorder", q, cut(k), value), (0, 1))(query, key)
    close(grads[0], jax.grad(functools.partial(loss, "reference"))(query, key, value))
    assert not np.any(grads[1])


def test_backward_sees_the_target_of_its_forward(recorder):
    query, key, value = draw()[:3]
    with jax_fa4.target("sm_100"):
        _, pull = jax.vjp(functools.partial(loss, "recorder"), query, key, value)
    with jax_fa4.target("sm_90"):
        pull(jnp.float32(1))
    assert {call[0] for call in recorder.calls} == {"forward", "backward"}
    assert {call[2] for call in recorder.calls} == {"cuda sm_100"}


def test_integers_have_float0_and_floats_their_own_dtype(recorder):
    query, key, value, bias, sinks, scale = draw()
    bias, sinks = bias.astype(jnp.bfloat16), sinks.astype(jnp.float16)
    mask = jnp.ones((T, S), bool)
    lengths = jnp.array([3, 5])

    def call(query, bias, sinks, scale, ids, lengths, mask):
        return jax_fa4.attention(
            query, key, value, bias, mask, sinks=sinks, scale=scale, segment_ids=ids, key_value_seq_lengths=lengths,
            implementation="recorder",
        )  # fmt: skip

    out, pull = jax.vjp(call, query, bias, sinks, scale, IDS, lengths, mask)
    *floats, ids, length_grad, mask_grad = pull(jnp.ones_like(out))
    assert [x.dtype for x in floats] == [jnp.float32, jnp.bfloat16, jnp.float16, jnp.float32]
    assert [x.shape for x in floats] == [query.shape, bias.shape, sinks.shape, ()]
    assert {x.dtype for x in (*ids, length_grad, mask_grad)} == {jax.dtypes.float0}


def test_sinks_gradient_ignores_the_cotangents_of_unseen_rows(recorder):
    query, key, value, _, sinks, _ = draw()
    out, pull = jax.vjp(
        lambda sinks: jax_fa4.attention(query, key, value, sinks=sinks, segment_ids=IDS, implementation="recorder"),
        sinks,
    )
    grad = jnp.ones_like(out)
    poisoned = grad.at[0, 3].set(jnp.nan)  # the query of id -1
    np.testing.assert_array_equal(pull(poisoned)[0], pull(grad)[0])
    assert bool(jnp.isfinite(pull(grad)[0]).all())


def test_under_shard_map(recorder):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec("data")
    query, key, value = draw()[:3]
    sharded = jax.shard_map(
        lambda *x: jax_fa4.attention(*x, implementation="recorder"), mesh=mesh, in_specs=spec, out_specs=spec
    )
    plain = functools.partial(jax_fa4.attention, implementation="reference")
    grads = [
        jax.jit(jax.grad(lambda *x, f=f: jnp.sum(jnp.sin(f(*x))), (0, 1, 2)))(query, key, value)
        for f in (sharded, plain)
    ]
    close(*grads)
