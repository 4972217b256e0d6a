"""The Hopper kernels whose blocks do one item after the other, on a GPU: calls of more items than multiprocessors.

Against float64, forward and gradients, by the public function inside jit. What few items are is the other tests'.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fa4
from jax_fa4 import arguments
from jax_fa4.ffi import hopper_backward, hopper_forward
from tests.kernels.forward_checks import draw
from tests.kernels.hopper import test_backward_emulated as emulated

HEADS = 40


def shapes(head_dim: int, dtype: str = "bfloat16", queries: int = 700, keys: int = 650, kv_heads: int = HEADS) -> Any:
    return (3, (2, queries, HEADS, head_dim), keys, kv_heads, dtype)


def are_persistent(tensors: Any, **options: Any) -> tuple[bool, bool]:
    """Whether the forward and the backward of a call are of persistent blocks."""
    problem = arguments.read_call(*tensors[:3], **options).problem
    return hopper_forward.tiles_of(problem).persistent, hopper_backward.tiles_of(problem).persistent


def check(tensors: Any, **options: Any) -> None:
    assert are_persistent(tensors, **options) == (True, True)
    emulated.check(tensors, "fa4", **options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_dense_causal_and_window(hopper_gpu: None, head_dim: int, dtype: str) -> None:
    tensors = draw(*shapes(head_dim, dtype))
    check(tensors)
    check(tensors, is_causal=True, causal_alignment="bottom_right")
    check(tensors, is_causal=True, causal_alignment="top_left", local_window_size=(90, None))
    check(tensors, local_window_size=(100, 57))


@pytest.mark.gpu
@pytest.mark.parametrize("concrete", [True, False], ids=["known", "traced"])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_segments(hopper_gpu: None, head_dim: int, concrete: bool) -> None:
    """Packed in one row, in any order and with padding in the other."""
    ids = np.random.default_rng(5).integers(-1, 7, (2, 700)).astype(np.int32)
    ids[0] = np.sort(np.abs(ids[0]))
    tensors = draw(*shapes(head_dim, keys=700))
    check(tensors, is_causal=True, segment_ids=ids if concrete else jnp.asarray(ids))
    check(tensors, segment_ids=ids if concrete else jnp.asarray(ids))


@pytest.mark.gpu
def test_items_without_steps_and_grouped_heads(hopper_gpu: None) -> None:
    check(draw(*shapes(128, queries=1000, keys=300)), is_causal=True, causal_alignment="bottom_right")
    check(draw(*shapes(128, queries=300, keys=1000)), is_causal=True, causal_alignment="top_left")
    check(draw(*shapes(64, queries=640, keys=900, kv_heads=20)), is_causal=True, causal_alignment="bottom_right")


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_hundred_forwards_are_bitwise_equal(hopper_gpu: None, head_dim: int) -> None:
    """Whichever block takes an item."""
    query, key, value = draw(*shapes(head_dim))[:3]
    attend = jax.jit(lambda *tensors: jax_fa4.attention(*tensors, is_causal=True, implementation="fa4"))
    expected = np.asarray(attend(query, key, value)).view(np.uint16)
    for _ in range(100):
        np.testing.assert_array_equal(np.asarray(attend(query, key, value)).view(np.uint16), expected)


def test_which_calls_have_persistent_blocks() -> None:
    def of(shape: tuple[int, int, int, int], **options: Any) -> tuple[bool, bool]:
        tensor = jnp.zeros(shape, jnp.bfloat16)
        return are_persistent((tensor,) * 3, **options)

    assert of((2, 700, HEADS, 8)) == (True, True)
    assert of((1, 700, 4, 8)) == (False, False), "no more items than multiprocessors"
    assert of((2, 700, HEADS, 8), deterministic=True) == (True, False)
    assert of((1, 5000, 8, 8)) == (True, False), "long items"
    assert of((1, 5000, 8, 8), local_window_size=(500, 0)) == (True, True), "a window makes them short"
    assert of((1, 5000, 8, 8), segment_ids=np.zeros((1, 5000), np.int32)) == (True, True)
