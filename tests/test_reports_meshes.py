"""Public bug reports about meshes and about choosing a kernel, each as a test of ours, on eight CPU devices."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fa4
from tests.inputs import IMPLEMENTATIONS, assert_close, draw

pytestmark = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs the eight CPU devices that conftest.py asks for")


def mesh_of(*shape):
    names = ("data", "model")[: len(shape)]
    return Mesh(np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape), names)


def value_and_grads(implementation, **options):
    def run(q, k, v):
        return jnp.sum(jnp.sin(jax_fa4.attention(q, k, v, is_causal=True, implementation=implementation, **options)))

    return jax.jit(jax.value_and_grad(run, argnums=(0, 1, 2)))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_replicated_cotangent(implementation):
    """jax-ml/jax #25986, NVIDIA/TransformerEngine PR #3516: grad of sum(out) under a sharded batch."""
    operands = draw(0, batch=4, query_length=16, key_length=16)
    mesh = mesh_of(4)
    sharded = [jax.device_put(x, NamedSharding(mesh, P("data"))) for x in operands]
    grad = jax.jit(
        jax.grad(
            lambda q, k, v: jnp.sum(jax_fa4.attention(q, k, v, is_causal=True, implementation=implementation)),
            argnums=(0, 1, 2),
        )
    )
    jax.tree.map(assert_close, grad(*sharded), grad(*operands))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("heads", [(8, 4), (4, 4), (8, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("axis", ["data", "model"])
def test_operands_that_disagree_on_their_sharding(implementation, heads, axis):
    """flash-attn3-jax 0.2.3 paired queries with wrong KV heads: its sharding rule had the factors reversed."""
    query_heads, kv_heads = heads
    operands = draw(1, batch=4, query_length=8, key_length=8, query_heads=query_heads, kv_heads=kv_heads)
    operands = (operands[0], *(x + jnp.arange(kv_heads)[None, None, :, None] for x in operands[1:]))
    mesh = mesh_of(2, 4)
    expected = value_and_grads(implementation)(*operands)
    for split in itertools.product([False, True], repeat=3):
        placed = []
        for x, is_split in zip(operands, split, strict=True):
            spec = P("data") if axis == "data" else P(None, None, "model")
            divides = axis == "data" or x.shape[2] % 4 == 0
            placed.append(jax.device_put(x, NamedSharding(mesh, spec if is_split and divides else P())))
        jax.tree.map(assert_close, value_and_grads(implementation)(*placed), expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_sequence_sharding_is_never_silently_local(implementation):
    """NVIDIA/TransformerEngine #1930: packing with a split sequence. The result must equal one device's."""
    operands = draw(2, batch=2, query_length=16, key_length=16)
    ids = jnp.array([[0] * 5 + [1] * 8 + [-1] * 3, [0] * 16])
    mesh = mesh_of(4)
    sharded = [jax.device_put(x, NamedSharding(mesh, P(None, "data"))) for x in operands]
    expected = value_and_grads(implementation, segment_ids=ids)(*operands)
    jax.tree.map(assert_close, value_and_grads(implementation, segment_ids=ids)(*sharded), expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_shard_map(implementation):
    """erfanzar/EasyDeL #149 and jax-ml/jax PR #36539: plain jit just works (above), and so does jax.shard_map."""
    operands = draw(3, batch=4, query_length=8, key_length=8, query_heads=4, kv_heads=2)
    mesh = mesh_of(2, 2)
    spec = P("data", None, "model")
    mapped = jax.jit(
        jax.shard_map(
            lambda q, k, v: jax_fa4.attention(q, k, v, is_causal=True, implementation=implementation),
            mesh=mesh,
            in_specs=(spec, spec, spec),
            out_specs=spec,
        )
    )
    assert_close(mapped(*operands), jax_fa4.attention(*operands, is_causal=True, implementation=implementation))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_explicit_axes_keep_their_sharding(implementation):
    """jax-ml/jax PR #36539, #33505: on Explicit axes the output's type keeps batch and heads; gradients too."""
    operands = draw(4, batch=4, query_length=8, key_length=8, query_heads=4, kv_heads=2)
    expected = value_and_grads(implementation)(*operands)
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    spec = P("data", None, "model", None)
    with jax.set_mesh(mesh):
        sharded = [jax.device_put(x, NamedSharding(mesh, spec)) for x in operands]
        out, lse = jax.jit(
            lambda q, k, v: jax_fa4.attention(q, k, v, return_residual=True, implementation=implementation)
        )(*sharded)
        assert jax.typeof(out).sharding.spec == spec
        assert jax.typeof(lse).sharding.spec == P("data", None, "model")
        value, grads = value_and_grads(implementation)(*sharded)
        assert [jax.typeof(grad).sharding.spec for grad in grads] == [spec] * 3
        jax.tree.map(assert_close, (value, grads), expected)
