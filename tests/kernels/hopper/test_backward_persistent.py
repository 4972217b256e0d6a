"""The Hopper backward by persistent blocks on the emulated GPU: a few blocks, each with several items, some empty.

What an item computes is tested in test_backward_emulated.py; here, that items do not disturb each other.
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
from jax_fa4.kernels.hopper.backward_plans import BACKWARD_TILES, CAPPED_TILES, BackwardTiles, backward_plan
from tests.kernels.forward_checks import draw
from tests.kernels.hopper.test_backward_emulated import check, gradients

pytestmark = [
    pytest.mark.usefixtures("hopper"),
    pytest.mark.skipif(build.compiler_version() is None, reason="the wheel has no kernels of persistent blocks"),
]


@pytest.fixture(autouse=True)
def persistent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call's backward is of persistent blocks, three of them."""
    for table in (BACKWARD_TILES, CAPPED_TILES):
        for head_dim, tiles in table.items():
            monkeypatch.setitem(table, head_dim, dataclasses.replace(tiles, persistent=True))
    few = dataclasses.replace(cost.ARCHITECTURES["sm_90"], sms=3)
    monkeypatch.setattr(hopper_backward, "ARCHITECTURES", {**cost.ARCHITECTURES, "sm_90": few})


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_several_items_a_block(dtype: str, head_dim: int) -> None:
    """12 items of three key tiles each way of the diagonal; of 1 to 4 steps at 64 queries a step."""
    check(draw(head_dim, (2, 200, 2, head_dim), 300, 2, dtype), is_causal=True)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (70, 900), (600, 130), (130, 513)])
def test_items_without_steps(queries: int, keys: int, deterministic: bool) -> None:
    """Keys beyond the diagonal are seen by no query: their gradients are zeros, written where those of others were."""
    tensors = draw(1, (1, queries, 4, 64), keys, 2, "bfloat16")
    check(tensors, is_causal=True, causal_alignment="top_left", deterministic=deterministic)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("concrete", [True, False], ids=["known", "traced"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_packed_segments(head_dim: int, concrete: bool, deterministic: bool) -> None:
    """Items of a table; padding that holds NaN, a key tile of which nobody sees anything."""
    ids = np.sort(np.random.default_rng(5).integers(0, 6, (2, 420)), axis=-1).astype(np.int32)
    ids[0, 200:] = -1
    tensors = tuple(one.at[0, 200:].set(jnp.nan) for one in draw(5, (2, 420, 2, head_dim), 420, 1, "bfloat16"))
    check(tensors, is_causal=True, segment_ids=ids if concrete else jnp.asarray(ids), deterministic=deterministic)


def test_heads_of_a_group_in_items_of_their_own() -> None:
    """Too few items for the blocks: the query heads of a KV head are split, and items write float32 parts."""
    check(draw(2, (1, 200, 4, 64), 100, 1, "bfloat16"), is_causal=True)


def test_scattered_ids_caps_and_sinks() -> None:
    rng = np.random.default_rng(6)
    ids = tuple(rng.integers(-1, 4, (2, length)).astype(np.int32) for length in (150, 430))
    check(draw(6, (2, 150, 2, 64), 430, 2, "bfloat16"), segment_ids=ids, local_window_size=(100, 40))
    tensors = draw(8, (2, 100, 4, 64), 350, 2, "bfloat16", 4.0)
    check(tensors, logits_soft_cap=5.0, sinks=jnp.asarray([-3.0, 0.0, 9.0, 60.0]))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("completion", ["random", "eager", "lazy"])
@pytest.mark.parametrize("seed", [1, 2])
def test_every_order_of_events_gives_the_same_bits(completion: str, seed: int, head_dim: int) -> None:
    """Which block does which item depends on it, and nothing else may."""
    tensors = draw(10, (1, 385, 2, head_dim), 400, 1, "bfloat16")
    cotangents = jnp.ones((1, 385, 2, head_dim), jnp.bfloat16), jnp.ones((1, 385, 2), jnp.float32)
    options: dict[str, Any] = {"is_causal": True, "deterministic": True}
    emulator.set_options(seed=0, completion="random")
    expected = gradients(tensors, cotangents, **options)
    emulator.set_options(seed=seed, completion=completion)
    for one, other in zip(gradients(tensors, cotangents, **options), expected, strict=True):
        np.testing.assert_array_equal(np.asarray(one).view(np.uint16), np.asarray(other).view(np.uint16))


def test_plans_say_what_is_there_only_for_persistent_blocks() -> None:
    plan = backward_plan("bfloat16", 128, "window")
    assert str(plan.grid[0]) == "workers"
    assert {"item_known", "item_taken"} <= {event.name for event in plan.events}
    assert "counter" in plan.results
    plan = backward_plan("bfloat16", 128, "window", tiles=BackwardTiles(64, 3, 3))
    assert not {"item_known", "item_taken"} & {event.name for event in plan.events}
    assert "counter" not in plan.results
