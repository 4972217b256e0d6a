"""The Hopper forward on a GPU against float64, inside jit: twice the error of plain JAX plus one rounding.

Plain JAX is `reference` in the same dtype, on the CPU. Buffers are poisoned before each call, so that what is not
written shows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fa4 import arguments
from jax_fa4.ffi import launch
from jax_fa4.ffi.hopper_forward import hopper_forward
from jax_fa4.reference import reference, visible_pairs

pytestmark = pytest.mark.gpu

ROUNDING = {"bfloat16": 2.0**-9, "float16": 2.0**-12}  # half the distance of neighbours, relative


@pytest.fixture(autouse=True)
def needs_hopper() -> None:
    architecture = launch.device_architecture()
    if architecture is None or architecture.name != "sm_90a":
        pytest.skip("the default device is no Hopper GPU")


def draw(seed: int, shape: tuple[int, int, int, int], key_length: int, kv_heads: int, dtype: str, spread: float) -> Any:
    batch, query_length, heads, head_dim = shape
    rng = np.random.default_rng(seed)
    query = rng.standard_normal((batch, query_length, heads, head_dim)) * spread
    key, value = (rng.standard_normal((batch, key_length, kv_heads, head_dim)) for _ in range(2))
    return tuple(jnp.asarray(one, dtype) for one in (query, key, value))


def on_cpu(call: arguments.Call, function: Callable[..., Any]) -> Any:
    """`function(problem, operands)` on the CPU, where compiling it takes no search for the fastest products."""
    with jax.default_device(jax.devices("cpu")[0]):
        moved = jax.tree.map(lambda one: jnp.asarray(np.asarray(one)), call.operands)
        return jax.tree.map(np.asarray, function(call.problem, moved))


def in_float64(call: arguments.Call) -> tuple[np.ndarray, np.ndarray]:
    """Output and log-sum-exp of the same rounded operands, in NumPy."""
    problem = call.problem
    query, key, value = (np.asarray(one.astype(jnp.float32), np.float64) for one in call.operands[:3])
    query, key, value = (np.moveaxis(one, 2, 1) for one in (query, key, value))
    key, value = (np.repeat(one, problem.group_size, axis=1) for one in (key, value))
    scores = query @ np.swapaxes(key, -1, -2) * problem.scale
    if problem.logits_soft_cap is not None:
        scores = problem.logits_soft_cap * np.tanh(scores / problem.logits_soft_cap)
    scores = np.where(on_cpu(call, visible_pairs), scores, -np.inf)
    sinks = np.full(problem.query_heads, -np.inf)
    if problem.has_sinks:
        sinks = np.asarray(call.operands.sinks, np.float64)
    highest = np.maximum(scores.max(-1), sinks[:, None])[..., None]
    highest = np.where(highest == -np.inf, 0, highest)
    powers = np.exp(scores - highest)
    total = powers.sum(-1, keepdims=True) + np.exp(sinks[:, None, None] - highest)
    out = powers @ value / np.where(total == 0, 1, total)
    with np.errstate(divide="ignore"):
        lse = (highest + np.log(total))[..., 0]
    return np.moveaxis(out, 1, 2), np.moveaxis(lse, 1, 2)


def check(tensors: Any, **options: Any) -> None:
    call = arguments.read_call(*tensors, **options)
    exact, exact_lse = in_float64(call)
    plain, _ = on_cpu(call, reference.forward)
    jnp.full(plain.shape, jnp.nan, plain.dtype).block_until_ready().delete()
    out, lse = jax.jit(lambda operands: hopper_forward(call.problem, operands))(call.operands)
    ours, theirs = (np.abs(np.asarray(one.astype(np.float32), np.float64) - exact) for one in (out, plain))
    rounding = ROUNDING[call.problem.dtype]
    assert np.isfinite(ours).all()
    # Per row: the largest error of a row of ours against twice the largest of any row of plain JAX with such values.
    scale = np.abs(exact).max(-1)
    assert (ours.max(-1) <= 2 * theirs.max() + rounding * scale + 1e-30).all()
    # On the whole, in the root mean square.
    assert np.sqrt((ours**2).mean()) <= 2 * np.sqrt((theirs**2).mean()) + rounding * np.sqrt((exact**2).mean())
    has_seen = exact_lse > -np.inf
    np.testing.assert_array_equal(np.asarray(lse) > -np.inf, has_seen)
    # Scores are sums of D exact products in float32.
    np.testing.assert_allclose(np.asarray(lse)[has_seen], exact_lse[has_seen], rtol=2e-6, atol=2e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize(
    ("query_length", "key_length", "is_causal"),
    [(1, 1, False), (129, 1000, True), (1000, 129, True), (769, 769, True), (300, 500, False)],
)
def test_shapes(dtype: str, head_dim: int, query_length: int, key_length: int, is_causal: bool) -> None:
    tensors = draw(1, (2, query_length, 4, head_dim), key_length, 2, dtype, 1.0)
    check(tensors, is_causal=is_causal, causal_alignment="bottom_right")


@pytest.mark.parametrize("head_dim", [8, 40, 72, 104])
def test_head_dims_between(head_dim: int) -> None:
    check(draw(2, (2, 300, 3, head_dim), 300, 1, "bfloat16", 1.0), is_causal=True)


@pytest.mark.parametrize("spread", [0.0, 30.0, 1000.0])
def test_scores_of_every_size(spread: float) -> None:
    check(draw(3, (1, 500, 2, 128), 700, 2, "bfloat16", spread))


@pytest.mark.parametrize("window", [(0, 0), (100, 0), (100, 57), (5, None), (300, 300)])
def test_windows(window: tuple[int | None, int | None]) -> None:
    check(draw(4, (2, 700, 2, 128), 650, 1, "bfloat16", 1.0), local_window_size=window)


@pytest.mark.parametrize("concrete", [True, False])
@pytest.mark.parametrize("is_causal", [True, False])
def test_packed_segments(concrete: bool, is_causal: bool) -> None:
    ids = np.sort(np.random.default_rng(5).integers(0, 7, (3, 900)), axis=-1).astype(np.int32)
    check(
        draw(5, (3, 900, 4, 128), 900, 2, "bfloat16", 1.0),
        is_causal=is_causal,
        segment_ids=ids if concrete else jnp.asarray(ids),
    )


@pytest.mark.parametrize("concrete", [True, False])
def test_segments_in_any_order(concrete: bool) -> None:
    rng = np.random.default_rng(6)
    ids = rng.integers(0, 4, (2, 500)).astype(np.int32)
    ids[0] = np.sort(ids[0])
    check(draw(6, (2, 500, 2, 64), 500, 2, "bfloat16", 1.0), segment_ids=ids if concrete else jnp.asarray(ids))


def test_lengths_hide_nan() -> None:
    query, key, value = draw(7, (2, 400, 2, 128), 400, 2, "bfloat16", 1.0)
    poisoned = key.at[1, 150:].set(jnp.nan), value.at[1, 150:].set(jnp.nan)
    options = {"key_value_seq_lengths": np.array([400, 150]), "query_seq_lengths": np.array([0, 399])}
    call = arguments.read_call(query, *poisoned, **options)
    out, lse = jax.jit(lambda operands: hopper_forward(call.problem, operands))(call.operands)
    exact, exact_lse = in_float64(arguments.read_call(query, key, value, **options))
    assert np.abs(np.asarray(out, np.float64) - exact).max() < 2e-2
    np.testing.assert_array_equal(np.asarray(lse) > -np.inf, exact_lse > -np.inf)


def test_soft_cap_and_sinks() -> None:
    pytest.importorskip("cutlass", reason="these kernels are not in the wheel; nvidia-cutlass-dsl builds them")
    tensors = draw(8, (2, 500, 4, 128), 500, 2, "bfloat16", 4.0)
    check(tensors, is_causal=True, logits_soft_cap=5.0)
    check(tensors, is_causal=True, sinks=jnp.asarray([-3.0, 0.0, 9.0, 60.0]))


def test_repeated_calls_are_bitwise_equal() -> None:
    tensors = draw(9, (1, 3000, 8, 128), 3000, 8, "bfloat16", 1.0)
    call = arguments.read_call(*tensors, is_causal=True)
    function = jax.jit(lambda operands: hopper_forward(call.problem, operands))
    first = [np.asarray(one).view(np.uint8) for one in function(call.operands)]
    for _ in range(20):
        for one, expected in zip(function(call.operands), first, strict=True):
            np.testing.assert_array_equal(np.asarray(one).view(np.uint8), expected)
