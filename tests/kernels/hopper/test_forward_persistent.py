"""The Hopper forward by persistent blocks on the emulated GPU: two blocks, each with several items, some empty.

What an item computes is tested in test_forward_emulated.py; here, that items do not disturb each other.
"""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fa4
from docs import build_sass
from jax_fa4 import cost, emulator
from jax_fa4.ffi import hopper_forward
from jax_fa4.kernels import build, bundle
from jax_fa4.kernels.hopper.backward_plans import BACKWARD_TILES, backward_plan
from jax_fa4.kernels.hopper.plans import FORWARD_TILES, SHORT_TILES, Mask, Tiles, forward_plan
from tests.kernels.forward_checks import draw
from tests.kernels.hopper.test_forward_emulated import check

pytestmark = [
    pytest.mark.usefixtures("hopper"),
    pytest.mark.skipif(build.compiler_version() is None, reason="the wheel has no kernels of persistent blocks"),
]


@pytest.fixture(autouse=True)
def persistent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call's forward is of persistent blocks, two of them."""
    for table in (FORWARD_TILES, SHORT_TILES):
        for head_dim, tiles in table.items():
            monkeypatch.setitem(table, head_dim, dataclasses.replace(tiles, persistent=True))
    monkeypatch.setattr(hopper_forward, "HOPPER", dataclasses.replace(cost.ARCHITECTURES["sm_90"], sms=2))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_several_items_a_block(dtype: str, head_dim: int) -> None:
    """12 items of 192 queries, of one to six steps."""
    check(draw(head_dim, (2, 500, 2, head_dim), 500, 1, dtype), is_causal=True)
    assert emulator.statistics()[-1]["grid"] == [2, 1, 1]


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (600, 1), (513, 70), (70, 900)])
@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
def test_items_without_steps(queries: int, keys: int, alignment: str) -> None:
    """Queries before the first key see nothing: their outputs are zeros, written where those of others were."""
    check(draw(1, (2, queries, 2, 64), keys, 2, "bfloat16"), is_causal=True, causal_alignment=alignment)


@pytest.mark.parametrize("concrete", [True, False], ids=["known", "traced"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_packed_segments(head_dim: int, concrete: bool) -> None:
    """Items of a table; padding that holds NaN."""
    ids = np.sort(np.random.default_rng(5).integers(0, 6, (2, 520)), axis=-1).astype(np.int32)
    ids[0, 230:] = -1
    tensors = tuple(one.at[0, 230:].set(jnp.nan) for one in draw(5, (2, 520, 2, head_dim), 520, 1, "bfloat16"))
    check(tensors, is_causal=True, segment_ids=ids if concrete else jnp.asarray(ids))


def test_scattered_ids_caps_and_sinks() -> None:
    rng = np.random.default_rng(6)
    ids = tuple(rng.integers(-1, 4, (2, length)).astype(np.int32) for length in (450, 230))
    check(draw(6, (2, 450, 2, 64), 230, 2, "bfloat16"), segment_ids=ids, local_window_size=(100, 40))
    tensors = draw(8, (2, 400, 4, 64), 150, 2, "bfloat16", 4.0)
    check(tensors, logits_soft_cap=5.0, sinks=jnp.asarray([-3.0, 0.0, 9.0, 60.0]))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("completion", ["random", "eager", "lazy"])
@pytest.mark.parametrize("seed", [1, 2])
def test_every_order_of_events_gives_the_same_bits(completion: str, seed: int, head_dim: int) -> None:
    """Which block does which item depends on it, and nothing else may."""
    tensors = draw(10, (1, 580, 2, head_dim), 600, 1, "bfloat16")
    run = jax.jit(lambda *one: jax_fa4.attention(*one, is_causal=True, implementation="emulated"))
    emulator.set_options(seed=0, completion="random")
    expected = np.asarray(run(*tensors)).view(np.uint16)
    emulator.set_options(seed=seed, completion=completion)
    np.testing.assert_array_equal(np.asarray(run(*tensors)).view(np.uint16), expected)


def test_plans_say_what_is_there_only_for_persistent_blocks() -> None:
    plan = forward_plan("bfloat16", 128, "causal", tiles=Tiles(3, 80, 3, persistent=True))
    assert str(plan.grid[0]) == "workers"
    assert {"item_known", "item_taken"} <= {event.name for event in plan.events}
    assert "counter" in plan.results
    assert plan.shared_offsets["staged_out"] != plan.shared_offsets["query"]
    plan = forward_plan("bfloat16", 128, "causal", tiles=Tiles(3, 80, 3))
    assert not {"item_known", "item_taken"} & {event.name for event in plan.events}
    assert "counter" not in plan.results
    assert plan.shared_offsets["staged_out"] == plan.shared_offsets["query"]


@pytest.mark.parametrize("head_dim", FORWARD_TILES)
@pytest.mark.parametrize("is_persistent", [False, True])
@pytest.mark.parametrize("mask", ["window", "ids"])
def test_products_are_not_serialised(mask: Mask, is_persistent: bool, head_dim: int, tmp_path: Path) -> None:
    """Where ptxas does not see that warps stay together, or has too few registers, it waits after every product."""
    disassembler = build_sass.tool("nvdisasm")
    if disassembler is None:
        pytest.skip("needs nvdisasm: pip install nvidia-cuda-nvdisasm")
    forward, backward = (
        dataclasses.replace(table[head_dim], persistent=is_persistent) for table in (FORWARD_TILES, BACKWARD_TILES)
    )
    file = tmp_path / "kernel.cubin"
    for plan in (
        forward_plan("bfloat16", head_dim, mask, tiles=forward),
        backward_plan("bfloat16", head_dim, mask, tiles=backward),
    ):
        file.write_bytes(bundle.find(plan).cubin)
        text = subprocess.run([disassembler, "-c", file], check=True, capture_output=True, text=True).stdout
        products, begun = text.count("HGMMA."), text.count("WARPGROUP.ARRIVE")
        assert products > 2 * begun > 0, (plan.key, products, begun)
