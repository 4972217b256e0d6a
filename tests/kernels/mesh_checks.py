"""Kernels over the devices of a mesh, emulated or not: values and gradients against float64, and where results lie."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fa4
from jax_fa4 import arguments
from jax_fa4.ffi.launch import TARGET
from tests.kernels.forward_checks import compare, draw
from tests.kernels.gradient_checks import check_gradients
from tests.programs import BYTES, collectives

AXIS = "devices"
WHOLE, BATCH, SEQUENCE, HEADS = P(), P(AXIS), P(None, AXIS), P(None, None, AXIS)
IDS = np.repeat([[0, 1, 2, 7, -1], [3, 0, 5, 5, 9]], 64, axis=1).astype(np.int32)

# What is split, shapes (B, T, N, D), keys and KV heads, options, and the kinds of transfers that a pass may have.
JIT_CASES: dict[str, tuple[P, tuple[int, int, int, int], int, int, dict[str, Any], set[str]]] = {
    "batch": (BATCH, (2, 200, 2, 64), 200, 2, {"is_causal": True}, set()),
    "batch_and_known_ids": (BATCH, (2, 320, 2, 64), 320, 1, {"segment_ids": IDS, "is_causal": True}, set()),
    "heads": (HEADS, (1, 200, 4, 64), 200, 2, {"is_causal": True}, set()),
    "fewer_kv_heads_than_devices": (HEADS, (1, 200, 4, 64), 200, 1, {"is_causal": True}, {"all-reduce"}),
    "sequence": (SEQUENCE, (1, 512, 2, 64), 512, 1, {"is_causal": True}, {"collective-permute"}),
    "sequence_without_a_mask": (SEQUENCE, (1, 256, 2, 64), 256, 2, {}, {"collective-permute"}),
    "sequence_and_traced_ids": (
        SEQUENCE, (2, 320, 2, 64), 320, 2, {"segment_ids": jnp.asarray(IDS), "is_causal": True},
        {"collective-permute"}),
}  # fmt: skip
RING_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "causal_contiguous": ("contiguous", {"is_causal": True}),
    "causal_zigzag": ("zigzag", {"is_causal": True}),
    "window_zigzag": ("zigzag", {"is_causal": True, "local_window_size": (150, 0)}),
    "lengths_contiguous": ("contiguous", {"key_value_seq_lengths": np.array([310, 90])}),
    "ids_zigzag": ("zigzag", {"segment_ids": IDS, "is_causal": True}),
}


def mesh_of(devices: int) -> Mesh:
    """The first devices along one axis that the compiler splits along."""
    return Mesh(np.array(jax.devices()[:devices]), (AXIS,), axis_types=(AxisType.Auto,))


def placed(mesh: Mesh, array: jax.Array, spec: P) -> jax.Array:
    """Split as `spec` says where that divides evenly, else whole on every device."""
    divides = all(axis is None or n % mesh.size == 0 for axis, n in zip(spec, array.shape, strict=False))
    return jax.device_put(array, NamedSharding(mesh, spec if divides else P()))


def cotangent(call: arguments.Call) -> jax.Array:
    """Gaussian, of the output."""
    problem = call.problem
    shape = problem.batch, problem.query_length, problem.query_heads, problem.value_dim
    return jnp.asarray(np.random.default_rng(11).standard_normal(shape), problem.dtype)


def check_under_jit(
    case: str, devices: int, implementation: str | None, odd: str = "", elsewhere: P = WHOLE, dtype: str = "bfloat16"
) -> None:
    """A case under plain jit; the operand named `odd` lies `elsewhere` than the others, and is all that is moved."""
    spec, shape, key_length, kv_heads, options, kinds = JIT_CASES[case]
    tensors, mesh = draw(1, shape, key_length, kv_heads, dtype), mesh_of(devices)
    call = arguments.read_call(*tensors, **options)
    grad_out = cotangent(call)

    @jax.jit
    def run(query: jax.Array, key: jax.Array, value: jax.Array, grad_out: jax.Array) -> Any:
        results, pull = jax.vjp(
            lambda *x: jax_fa4.attention(*x, implementation=implementation, return_residual=True, **options),
            query, key, value,
        )  # fmt: skip
        return results, pull((grad_out, jnp.zeros_like(results[1])))

    names = ("query", "key", "value", "grad_out")
    given = [
        placed(mesh, x, elsewhere if name == odd else spec) for name, x in zip(names, (*tensors, grad_out), strict=True)
    ]
    program = run.lower(*given).compile()
    text = program.as_text()
    assert TARGET in text
    moved = collectives(text)
    if not odd:
        assert set(moved) == kinds
    elif elsewhere != WHOLE:
        (transfer,) = (one for kind in set(moved) - kinds for one in moved[kind])
        (dtype,) = transfer.dtypes  # on CPU devices XLA sends bfloat16 as float32
        assert transfer.bytes // BYTES[dtype] == dict(zip(names, given, strict=True))[odd].size // devices
    (out, lse), gradients = program(*given)
    compare(call, out, lse)
    check_gradients(gradients, call, grad_out, jnp.zeros_like(lse))
    if not odd:
        for result, like in ((out, given[0]), *zip(gradients, given[:3], strict=True)):
            assert result.sharding.is_equivalent_to(like.sharding, result.ndim), (result.sharding, like.sharding)


def check_ring(case: str, devices: int, implementation: str | None, dtype: str = "bfloat16") -> None:
    """A case of `ring_attention` inside `jax.shard_map`, put back into the order of the sequence."""
    layout, options = RING_CASES[case]
    tensors = draw(2, (2, 320, 2, 64), 320, 1, dtype)
    call = arguments.read_call(*tensors, **options)
    grad_out = cotangent(call)
    order = jax_fa4.zigzag_order(320, devices) if layout == "zigzag" else np.arange(320)
    ids = jnp.asarray(options.get("segment_ids", np.zeros((2, 320), np.int32)))[:, order]
    others = {name: x for name, x in options.items() if name != "segment_ids"}

    def local(query: jax.Array, key: jax.Array, value: jax.Array, ids: jax.Array) -> Any:
        return jax_fa4.ring_attention(
            query, key, value, axis_name=AXIS, layout=layout, implementation=implementation, return_residual=True,
            segment_ids=ids if "segment_ids" in options else None, **others,
        )  # fmt: skip

    mapped = jax.shard_map(local, mesh=mesh_of(devices), in_specs=SEQUENCE, out_specs=SEQUENCE)

    @jax.jit
    def run(query: jax.Array, key: jax.Array, value: jax.Array, grad_out: jax.Array) -> Any:
        results, pull = jax.vjp(lambda *x: mapped(*x, ids), query, key, value)
        return results, pull((grad_out, jnp.zeros_like(results[1])))

    (out, lse), gradients = jax.tree.map(
        lambda x: x[:, np.argsort(order)], run(*(x[:, order] for x in (*tensors, grad_out)))
    )
    compare(call, out, lse)
    check_gradients(gradients, call, grad_out, jnp.zeros_like(lse))
