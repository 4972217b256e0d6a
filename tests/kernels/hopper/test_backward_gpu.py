"""The Hopper backward on a GPU against float64, by the public function inside jit."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.forward_checks import draw
from tests.kernels.hopper import test_backward_emulated as emulated

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper_gpu")]


def check(tensors: Any, **options: Any) -> None:
    emulated.check(tensors, "fa4", **options)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("lengths", [(1, 1), (129, 1000), (1000, 129), (769, 769)], ids=str)
def test_shapes(dtype: str, head_dim: int, lengths: tuple[int, int]) -> None:
    tensors = draw(1, (2, lengths[0], 4, head_dim), lengths[1], 2, dtype)
    check(tensors, is_causal=True, causal_alignment="bottom_right")
    check(tensors)


@pytest.mark.parametrize("window", [(0, 0), (100, 57), (5, None), (None, 40)], ids=str)
def test_windows(window: tuple[int | None, int | None]) -> None:
    check(draw(4, (2, 700, 2, 128), 650, 1, "bfloat16"), local_window_size=window)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("concrete", [True, False], ids=["known", "traced"])
def test_segments(concrete: bool, deterministic: bool) -> None:
    """Packed in one row, in any order in the other."""
    ids = np.random.default_rng(5).integers(0, 7, (2, 900)).astype(np.int32)
    ids[0] = np.sort(ids[0])
    tensors = draw(5, (2, 900, 4, 64), 900, 2, "bfloat16")
    given = ids if concrete else jnp.asarray(ids)
    check(tensors, is_causal=True, segment_ids=given, deterministic=deterministic)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_ordered_sums_give_the_same_bits_a_hundred_times(head_dim: int, is_causal: bool) -> None:
    tensors = draw(9, (2, 2000, 8, head_dim), 2000, 8, "bfloat16")
    cotangents = tensors[0], jnp.ones(tensors[0].shape[:3], jnp.float32)
    options = {"is_causal": is_causal, "deterministic": True}
    expected = [np.asarray(one).view(np.uint16) for one in emulated.gradients(tensors, cotangents, "fa4", **options)]
    for _ in range(100):
        for one, other in zip(emulated.gradients(tensors, cotangents, "fa4", **options), expected, strict=True):
            np.testing.assert_array_equal(np.asarray(one).view(np.uint16), other)
