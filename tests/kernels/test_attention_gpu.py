"""`jax_fa4.attention` on a GPU whose kernels have a backward: values and gradients, and what only silicon can show.

Reports of failures elsewhere that need a GPU are among them, named as in tests/test_reports_*.py.
"""

from __future__ import annotations

import ctypes
import os
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fa4
from jax_fa4 import arguments
from jax_fa4.ffi import hopper_forward, launch
from jax_fa4.kernels import bundle
from tests.kernels.forward_checks import compare, draw, seen_rows
from tests.kernels.gradient_checks import check_gradients

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def needs_kernels() -> None:
    shape = jax.ShapeDtypeStruct((1, 64, 1, 64), jnp.bfloat16)
    if jax_fa4.explain(shape, shape, shape).implementation != "fa4":
        pytest.skip("the default device has no attention kernels with a backward")


def value_and_gradients(*operands: jax.Array, **options: Any) -> Any:
    """Output, log-sum-exp, and gradients of three tensors under two cotangents."""
    results, pull = jax.vjp(
        lambda *tensors: jax_fa4.attention(*tensors, return_residual=True, **options), *operands[:3]
    )
    return results, pull(tuple(operands[3:]))


def cotangents(call: arguments.Call) -> tuple[jax.Array, jax.Array]:
    """Gaussian; NaN for rows that see nothing."""
    problem, rng = call.problem, np.random.default_rng(11)
    shape = problem.batch, problem.query_length, problem.query_heads
    has_seen = np.broadcast_to(seen_rows(call), shape)
    grad_out = np.where(has_seen[..., None], rng.standard_normal((*shape, problem.value_dim)), np.nan)
    return jnp.asarray(grad_out, problem.dtype), jnp.asarray(
        np.where(has_seen, rng.standard_normal(shape), np.nan), "float32"
    )


def poison(like: Any) -> None:
    """Frees buffers of the results' sizes full of NaN, for the allocator to hand out next."""
    for one in jax.tree.leaves(like):
        jnp.full(one.shape, jnp.nan, one.dtype).block_until_ready().delete()


def check(tensors: Any, **options: Any) -> Any:
    """Values and gradients against float64, NaN in memory that must be written."""
    call = arguments.read_call(*tensors, **options)
    upstream = cotangents(call)
    function = jax.jit(lambda *one: value_and_gradients(*one, **options))
    poison(jax.eval_shape(function, *tensors, *upstream))
    (out, lse), gradients = function(*tensors, *upstream)
    compare(call, out, lse)
    check_gradients(gradients, call, *upstream)
    return (out, lse), gradients


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("deterministic", [False, True])
def test_values_and_gradients(dtype: str, head_dim: int, deterministic: bool) -> None:
    check(draw(head_dim, (2, 700, 4, head_dim), 900, 2, dtype), is_causal=True, deterministic=deterministic)


@pytest.mark.parametrize("query_length", [1, 64, 130, 512])
@pytest.mark.parametrize("key_length", [1, 64, 130, 2048])
def test_lengths_differ_in_either_direction(query_length: int, key_length: int) -> None:
    """jax-ml/jax #24491: the key loop used the query length. NVIDIA/cudnn-frontend #160: NaN at uneven lengths."""
    check(draw(1, (2, query_length, 4, 64), key_length, 1, "bfloat16"), is_causal=True, causal_alignment="bottom_right")


@pytest.mark.parametrize("length", [1, 7, 63, 65, 127, 129, 2047])
def test_uneven_lengths_ten_times_bitwise_equal(length: int) -> None:
    """jax-ml/jax #23819: reads past the end; the first call NaN, later ones not the same."""
    tensors = draw(length, (1, length, 2, 128), length, 2, "bfloat16")
    grad = cotangents(arguments.read_call(*tensors))
    function = jax.jit(lambda *one: value_and_gradients(*one, deterministic=True))
    first = jax.tree.map(np.asarray, function(*tensors, *grad))
    for _ in range(9):
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, function(*tensors, *grad)), first)
    compare(arguments.read_call(*tensors), *first[0])


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("is_traced", [False, True])
def test_packed_documents(head_dim: int, is_traced: bool) -> None:
    ids = np.sort(np.random.default_rng(2).integers(0, 6, (2, 1000)), axis=-1).astype(np.int32)
    check(
        draw(2, (2, 1000, 4, head_dim), 1000, 2, "bfloat16"),
        segment_ids=jnp.asarray(ids) if is_traced else ids,
        is_causal=True,
    )


def test_ids_in_any_order_and_holes_of_padding() -> None:
    """Dao-AILab/flash-attention #1990: padding between documents, forward right and backward wrong."""
    rng = np.random.default_rng(3)
    ids = rng.integers(-1, 4, (2, 500)).astype(np.int32)
    ids[0] = np.repeat([0, -1, 1, -1, 2], 100)
    tensors = draw(3, (2, 500, 2, 64), 500, 2, "bfloat16")
    hole = jnp.asarray(ids[0] < 0)
    tensors = tuple(one.at[0].set(jnp.where(hole[:, None, None], jnp.nan, one[0])) for one in tensors)
    _, gradients = check(tensors, segment_ids=ids)
    for gradient in gradients:
        assert not np.asarray(gradient, np.float32)[0][np.asarray(hole)].any()


def test_tokens_behind_the_last_document() -> None:
    """Dao-AILab/flash-attention #1228, pytorch/pytorch #176793: outputs and gradients there were never written."""
    ids = np.repeat([0, 1, 2, -1], [144, 288, 512, 2])[None].astype(np.int32)
    (out, _), gradients = check(draw(4, (1, 946, 2, 128), 946, 2, "bfloat16"), segment_ids=ids, is_causal=True)
    for one in (out, *gradients):
        assert not np.asarray(one, np.float32)[:, 944:].any()


def test_documents_without_queries_or_without_keys() -> None:
    """Dao-AILab/flash-attention #2562, #1713: gradients of keys that no query has are 0; nothing hangs."""
    query_ids, key_ids = np.repeat([0, 1, 3], [300, 200, 400]), np.repeat([1, 2, 3], [250, 350, 500])
    ids = tuple(one[None].astype(np.int32) for one in (query_ids, key_ids))
    (out, _), gradients = check(draw(5, (1, 900, 2, 64), 1100, 1, "bfloat16"), segment_ids=ids)
    assert not np.asarray(out, np.float32)[:, :300].any()
    assert not np.asarray(gradients[1], np.float32)[:, 250:600].any()


def test_values_that_are_never_seen_may_hold_anything() -> None:
    """Dao-AILab/flash-attention #2374: NaN in unused values, lengths of 32 to 96 of 128."""
    lengths = np.array([32, 64, 96, 48])
    query, key, value = draw(6, (4, 128, 2, 64), 128, 2, "bfloat16")
    hidden = jnp.asarray(np.arange(128)[None] >= lengths[:, None])[:, :, None, None]
    key, value = jnp.where(hidden, jnp.inf, key), jnp.where(hidden, jnp.nan, value)
    query = jnp.where(hidden, jnp.nan, query)
    check((query, key, value), key_value_seq_lengths=lengths, query_seq_lengths=lengths)


@pytest.mark.parametrize("window", [(0, 0), (100, 0), (100, 57), (5, None)], ids=str)
def test_windows(window: Any) -> None:
    check(draw(7, (1, 700, 2, 128), 650, 1, "bfloat16"), local_window_size=window)


@pytest.mark.parametrize("documents", [False, True])
def test_a_hundred_runs_are_bitwise_equal(documents: bool) -> None:
    """Dao-AILab/flash-attention #1596, #2510, #1893: with GQA, causal, packed, while another call keeps the GPU."""
    tensors = draw(8, (2, 1500, 8, 128), 1500, 2, "bfloat16")
    ids = np.sort(np.random.default_rng(8).integers(0, 5, (2, 1500)), axis=-1) if documents else None
    grad = cotangents(arguments.read_call(*tensors))
    function = jax.jit(lambda *one: value_and_gradients(*one, is_causal=True, segment_ids=ids, deterministic=True))
    load = jax.jit(lambda x: x @ x)
    first = jax.tree.map(np.asarray, function(*tensors, *grad))
    square = jnp.ones((2048, 2048), jnp.bfloat16)
    for run in range(99):
        if run % 3 == 0:
            square = load(square) * 0
        results = function(*tensors, *grad)
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, results), first)


def test_vmap_of_gradients() -> None:
    tensors = draw(9, (6, 200, 4, 64), 200, 2, "bfloat16")
    upstream = cotangents(arguments.read_call(*tensors, is_causal=True))
    mapped = [one.reshape(3, 2, *one.shape[1:]) for one in (*tensors, *upstream)]
    function = jax.jit(jax.vmap(lambda *one: value_and_gradients(*one, is_causal=True)))
    (out, lse), gradients = jax.tree.map(lambda one: one.reshape(6, *one.shape[2:]), function(*mapped))
    call = arguments.read_call(*tensors, is_causal=True)
    compare(call, out, lse)
    check_gradients(gradients, call, *upstream)


def test_eight_threads_at_first_use() -> None:
    """marin-community/marin #7421: loading while others launch. Every thread has a kernel that nobody has loaded."""
    barrier, failures = threading.Barrier(8), []

    def work(thread: int) -> None:
        try:
            dtype = ("bfloat16", "float16")[thread % 2]
            tensors = draw(thread, (1, 100 + thread, 2, (64, 96, 128, 72)[thread // 2]), 90, 1, dtype)
            barrier.wait()
            check(tensors, local_window_size=(40, 40))
        except BaseException as error:
            barrier.abort()
            failures.append(error)

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


@pytest.mark.skipif("command_buffer=" not in os.environ.get("XLA_FLAGS", ""), reason="XLA_FLAGS force none")
def test_replayed_from_a_command_buffer() -> None:
    """NVIDIA/TransformerEngine PR #1313, openxla/xla #14889: the 1st, 2nd and 10th call, with buffers that move."""
    function = jax.jit(lambda *one: value_and_gradients(*one, is_causal=True, deterministic=True))
    kept = []
    for seed in range(10):
        tensors = draw(seed, (1, 300, 2, 64), 300, 2, "bfloat16")
        upstream = cotangents(arguments.read_call(*tensors))
        kept.append((tensors, upstream, function(*tensors, *upstream)))
    for tensors, upstream, (results, gradients) in (kept[0], kept[1], kept[9]):
        call = arguments.read_call(*tensors, is_causal=True)
        compare(call, *results)
        check_gradients(gradients, call, *upstream)


def test_two_streams_at_once() -> None:
    """The same kernel on two streams, fifty launches each in turns, over buffers of their own."""
    driver = ctypes.CDLL("libcuda.so.1")
    calls = []
    for seed in range(2):
        call = arguments.read_call(*draw(20 + seed, (2, 1000, 4, 128), 1000, 4, "bfloat16"), is_causal=True)
        expected = jax.jit(lambda operands, call=call: hopper_forward.hopper_forward(call.problem, operands))(
            call.operands
        )
        forward, plan = hopper_forward.forward_call(call.problem), hopper_forward.plan_of(call.problem)
        buffers, integers = forward.arguments(call.operands)
        results = [jnp.zeros(one.shape, one.dtype) for one in forward.results().values()]
        floats = hopper_forward.softmax_floats(call.problem)
        stream = ctypes.c_void_p()
        assert driver.cuStreamCreate(ctypes.byref(stream), 1) == 0
        jax.block_until_ready((buffers, results, expected))
        native_call = (
            launch.CUDA_DRIVER,
            launch.register(bundle.find(plan)),
            0,
            [buffers[name].unsafe_buffer_pointer() for name in plan.operands],
            [one.unsafe_buffer_pointer() for one in results],
            list(launch.call_integers(plan, integers)),
            [floats[name] for name in plan.floats],
            stream.value,
        )
        calls.append((native_call, results, expected, buffers))
    module = launch.native()
    module.load(*calls[0][0][:3])
    for _ in range(50):
        for native_call, *_ in calls:
            module.launch(*native_call)
    assert driver.cuCtxSynchronize() == 0
    for _, results, expected, _ in calls:
        for ours, theirs in zip(results, expected, strict=True):
            np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


def test_more_than_two_to_the_31_elements() -> None:
    """Queries, keys and values of 2.2e9 elements each: the last batch row is what it is alone, gradients too."""
    batch, shape = 66, (8192, 32, 128)
    limit = jax.devices()[0].memory_stats()["bytes_limit"]
    if limit < 100e9:
        pytest.skip(f"needs 100 GB, and the device gives {limit / 1e9:.0f}")
    row = [jax.random.normal(seed, (1, *shape), jnp.bfloat16) for seed in jax.random.split(jax.random.key(0), 4)]
    function = jax.jit(
        lambda *one: jax.vjp(lambda *qkv: jax_fa4.attention(*qkv, is_causal=True, deterministic=True), *one[:3])[1](
            one[3]
        )
    )
    forward = jax.jit(lambda *one: jax_fa4.attention(*one, is_causal=True))
    expected = jax.tree.map(np.asarray, (forward(*row[:3]), *function(*row)))
    many = [jnp.concatenate([jnp.zeros((batch - 1, *shape), jnp.bfloat16), one]) for one in row]
    assert many[0].size > 2**31
    out = forward(*many[:3])[-1:]
    np.testing.assert_array_equal(np.asarray(out), expected[0])
    for ours, theirs in zip(function(*many), expected[1:], strict=True):
        np.testing.assert_array_equal(np.asarray(ours[-1:]), theirs)
