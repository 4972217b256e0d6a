"""The Hopper forward on a GPU against float64, inside jit: twice the error of plain JAX plus one rounding.

Buffers are poisoned before each call, so that what is not written shows.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fa4 import arguments
from jax_fa4.ffi.hopper_forward import hopper_forward
from tests.kernels.forward_checks import compare, draw

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper_gpu")]


def check(tensors: Any, **options: Any) -> None:
    call = arguments.read_call(*tensors, **options)
    jnp.full(call.operands.query.shape, jnp.nan, call.operands.query.dtype).block_until_ready().delete()
    out, lse = jax.jit(lambda operands: hopper_forward(call.problem, operands))(call.operands)
    compare(call, out, lse)


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
    query = query.at[1, 399:].set(jnp.inf).at[0].set(jnp.nan)
    poisoned = key.at[1, 150:].set(jnp.nan), value.at[1, 150:].set(jnp.nan)
    lengths = {"key_value_seq_lengths": np.array([400, 150]), "query_seq_lengths": np.array([0, 399])}
    check((query, *poisoned), **lengths)


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
