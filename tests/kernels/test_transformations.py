"""JAX's transformations around the kernels on an emulated GPU: as plain calls, the forward kernel where it is due."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr

import jax_fa4
from jax_fa4 import arguments
from jax_fa4.ffi import hopper_backward, hopper_forward
from jax_fa4.ffi.launch import TARGET
from jax_fa4.kernels import bundle
from tests.kernels.forward_checks import draw

pytestmark = pytest.mark.usefixtures("hopper")
SHAPE = (1, 80, 2, 64)


@pytest.fixture
def tensors() -> tuple[jax.Array, jax.Array, jax.Array]:
    return draw(5, SHAPE, 80, 1, "bfloat16")


def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    return jax_fa4.attention(query, key, value, is_causal=True, implementation="emulated")


def loss(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    return jnp.sum(jnp.sin(attend(query, key, value).astype(jnp.float32)))


def launches(jaxpr: Jaxpr) -> Iterator[str]:
    """The content hash of each kernel that a traced program launches; those of inner programs at each use."""
    for equation in jaxpr.eqns:
        if equation.params.get("target_name") == TARGET:
            yield dict(equation.params["attributes"])["kernel"]
        for leaf in jax.tree.leaves(list(equation.params.values())):
            if isinstance(leaf, Jaxpr | ClosedJaxpr):
                yield from launches(leaf.jaxpr if isinstance(leaf, ClosedJaxpr) else leaf)


def test_a_policy_saves_what_spares_the_second_forward_kernel(tensors: Any) -> None:
    """Output and log-sum-exp are named `context`: the forward kernel is in the gradient's program once, else twice."""
    problem = arguments.read_call(*tensors, is_causal=True).problem
    forward = bundle.find(hopper_forward.plan_of(problem)).content_hash
    backward = bundle.find(hopper_backward.plan_of(problem)).content_hash
    policy = jax.checkpoint_policies.save_only_these_names("context")
    functions = {"plain": loss, "saved": jax.checkpoint(loss, policy=policy), "remade": jax.checkpoint(loss)}
    gradients = {}
    for name, function in functions.items():
        run = jax.grad(function, (0, 1, 2))
        counts = Counter(launches(jax.make_jaxpr(run)(*tensors).jaxpr))
        assert (counts[forward], counts[backward]) == ((2, 1) if name == "remade" else (1, 1)), name
        gradients[name] = jax.jit(run)(*tensors)
    for name in ("saved", "remade"):
        jax.tree.map(np.testing.assert_array_equal, gradients[name], gradients["plain"])


def test_eval_shape_launches_nothing(tensors: Any) -> None:
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tensors)
    out = jax.eval_shape(attend, *shapes)
    grads = jax.eval_shape(jax.grad(loss, (0, 1, 2)), *shapes)
    assert [(x.shape, x.dtype) for x in (out, *grads)] == [(x.shape, x.dtype) for x in (tensors[0], *tensors)]


def test_scan_over_layers(tensors: Any) -> None:
    """Of checkpointed layers, against layers written out."""
    query, key, value = tensors
    weights = jnp.asarray([1.0, 0.5], jnp.bfloat16)

    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names("context"))
    def layer(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
        return x + attend(x * weight, key, value), None

    def scanned(x: jax.Array, weights: jax.Array) -> jax.Array:
        return jnp.sum(jax.lax.scan(layer, x, weights)[0].astype(jnp.float32) ** 2)

    def written_out(x: jax.Array, weights: jax.Array) -> jax.Array:
        for weight in weights:
            x, _ = layer(x, weight)
        return jnp.sum(x.astype(jnp.float32) ** 2)

    got, want = (jax.jit(jax.grad(one, (0, 1)))(query, weights) for one in (scanned, written_out))
    # The same kernels on the same inputs; what XLA fuses around them rounds to bfloat16 at other places.
    for one, other in zip(got, want, strict=True):
        one, other = (np.asarray(x, np.float32) for x in (one, other))
        np.testing.assert_allclose(one, other, rtol=2.0**-6, atol=2.0**-6 * np.abs(other).max())


def test_a_donated_query(tensors: Any) -> None:
    query, key, value = tensors
    want = jax.jit(attend)(query, key, value)
    given = query + 0
    got = jax.jit(attend, donate_argnums=0)(given, key, value)
    assert given.is_deleted()
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


def test_nested_vmap_of_gradients_is_per_example(tensors: Any) -> None:
    """Two axes, of which each operand has another subset, in one launch."""
    query, key, value = tensors
    queries = jnp.stack([jnp.stack([query, query * 2]), jnp.stack([-query, query[:, ::-1]])])  # both axes
    keys = jnp.stack([key, key[:, ::-1]])  # the outer
    run = jax.grad(loss, (0, 1, 2))
    mapped = jax.vmap(jax.vmap(run, in_axes=(0, None, None)), in_axes=(0, 0, None))
    assert len(list(launches(jax.make_jaxpr(mapped)(queries, keys, value).jaxpr))) == 4  # forward, and three backward
    got = jax.jit(mapped)(queries, keys, value)
    alone = jax.jit(run)
    for i in range(2):
        for j in range(2):
            for one, other in zip(got, alone(queries[i, j], keys[i], value), strict=True):
                np.testing.assert_array_equal(np.asarray(one[i, j], np.float32), np.asarray(other, np.float32))
