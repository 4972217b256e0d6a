"""The Hopper backward with 80 queries a step on the emulated GPU against float64: every mask, at small sizes.

The emulator reports what nothing orders, reads of what nobody wrote, and copies left at exit; a report fails the call.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jax_fa4 import cost, emulator
from jax_fa4.ffi import hopper_backward
from jax_fa4.kernels import build
from jax_fa4.kernels.hopper.backward_plans import BackwardTiles
from tests.kernels.forward_checks import draw
from tests.kernels.hopper.test_backward_emulated import check, gradients

pytestmark = [
    pytest.mark.usefixtures("hopper"),
    pytest.mark.skipif(
        build.compiler_version() is None, reason="the wheel has no such kernels; the compiler makes them"
    ),
]
TILES = {
    "in turn": BackwardTiles(80, 2, 2, ahead=False, turned_scores=False),
    "ahead": BackwardTiles(80, 3, 2, grad_score_stages=1),
}


@pytest.fixture(params=TILES, autouse=True)
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls take these tiles."""
    monkeypatch.setattr(hopper_backward, "tiles_of", lambda problem: TILES[request.param])


@pytest.mark.parametrize("lengths", [(1, 1), (79, 129), (80, 128), (81, 77), (160, 256), (241, 131)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_lengths(lengths: tuple[int, int], is_causal: bool) -> None:
    tensors = draw(sum(lengths), (1, lengths[0], 2, 128), lengths[1], 2, "bfloat16")
    check(tensors, is_causal=is_causal, causal_alignment="bottom_right")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_grouped_heads_over_several_tiles(dtype: str) -> None:
    check(draw(1, (2, 200, 4, 128), 300, 2, dtype), is_causal=True)


@pytest.mark.parametrize(("head_dim", "value_dim"), [(104, 104), (72, 128), (128, 8)])
def test_dims_that_are_padded(head_dim: int, value_dim: int) -> None:
    check(draw(2, (1, 100, 2, head_dim), 150, 1, "bfloat16", value_dim=value_dim))


@pytest.mark.parametrize("window", [(0, 0), (100, 57), (5, None), (None, 9)], ids=str)
def test_windows(window: tuple[int | None, int | None]) -> None:
    check(draw(4, (1, 210, 2, 128), 260, 1, "bfloat16"), local_window_size=window)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("concrete", [True, False], ids=["known", "traced"])
def test_packed_segments(concrete: bool, deterministic: bool) -> None:
    """Documents with padding at the end, whose rows hold NaN."""
    ids = np.sort(np.random.default_rng(5).integers(0, 6, (2, 260)), axis=-1).astype(np.int32)
    ids[0, 200:] = -1
    tensors = tuple(one.at[0, 200:].set(jnp.nan) for one in draw(5, (2, 260, 2, 128), 260, 1, "bfloat16"))
    check(tensors, is_causal=True, segment_ids=ids if concrete else jnp.asarray(ids), deterministic=deterministic)


@pytest.mark.parametrize("deterministic", [False, True])
def test_segments_in_any_order(deterministic: bool) -> None:
    """Interleaved documents, other ids for queries than for keys, padding between; a window on top."""
    rng = np.random.default_rng(6)
    ids = tuple(rng.integers(-1, 4, (2, length)).astype(np.int32) for length in (150, 230))
    ids[0][0], ids[1][0] = np.sort(ids[0][0]), np.sort(ids[1][0])
    tensors = draw(6, (2, 150, 2, 128), 230, 2, "bfloat16")
    check(tensors, segment_ids=ids, local_window_size=(100, 40), deterministic=deterministic)


def test_lengths_hide_what_lies_behind_them() -> None:
    query, key, value = draw(7, (3, 100, 2, 128), 150, 1, "bfloat16")
    key_lengths, query_lengths = np.array([150, 0, 77]), np.array([0, 100, 99])
    for row in range(3):
        key = key.at[row, key_lengths[row] :].set(jnp.nan)
        value = value.at[row, key_lengths[row] :].set(jnp.inf)
        query = query.at[row, query_lengths[row] :].set(jnp.nan)
    check((query, key, value), is_causal=True, key_value_seq_lengths=key_lengths, query_seq_lengths=query_lengths)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}], ids=str)
def test_ordered_sums(options: dict[str, Any]) -> None:
    """Items wait for each other in the order that their ranks say; one that was wrong would wait for ever."""
    check(draw(9, (1, 330, 4, 128), 400, 2, "bfloat16"), deterministic=True, **options)


@pytest.mark.parametrize("options", [{"is_causal": True}, {"deterministic": True}], ids=str)
def test_persistent_blocks(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Three blocks with several items each."""
    tiles = dataclasses.replace(TILES["in turn"], persistent=True)
    monkeypatch.setattr(hopper_backward, "tiles_of", lambda problem: tiles)
    few = dataclasses.replace(cost.ARCHITECTURES["sm_90"], sms=3)
    monkeypatch.setattr(hopper_backward, "ARCHITECTURES", {**cost.ARCHITECTURES, "sm_90": few})
    check(draw(11, (2, 200, 2, 128), 300, 2, "bfloat16"), **options)


@pytest.mark.parametrize("spread", [0.0, 30.0])
def test_scores_of_every_size(spread: float) -> None:
    check(draw(3, (1, 130, 2, 128), 200, 2, "bfloat16", spread))


@pytest.mark.parametrize(("completion", "seed"), [("random", 1), ("random", 2), ("eager", 1), ("lazy", 1)])
def test_every_order_of_events_gives_the_same_bits(completion: str, seed: int) -> None:
    """Copies and products complete at other moments, warps run in other orders: nothing may depend on it."""
    tensors = draw(10, (1, 385, 2, 128), 300, 1, "bfloat16")
    cotangents = jnp.ones((1, 385, 2, 128), jnp.bfloat16), jnp.ones((1, 385, 2), jnp.float32)
    options = {"is_causal": True, "deterministic": True}
    emulator.set_options(seed=0, completion="random")
    expected = gradients(tensors, cotangents, **options)
    emulator.set_options(seed=seed, completion=completion)
    for one, other in zip(gradients(tensors, cotangents, **options), expected, strict=True):
        np.testing.assert_array_equal(np.asarray(one).view(np.uint16), np.asarray(other).view(np.uint16))
