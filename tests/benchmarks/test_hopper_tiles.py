"""The benchmark of the Hopper kernels' tiles, on the emulated GPU at sizes that take seconds."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console

from benchmarks import cases, hopper_tiles
from jax_fa4.ffi import launch
from jax_fa4.kernels import build
from jax_fa4.kernels.hopper.backward_plans import BACKWARD_TILES, backward_plan
from jax_fa4.kernels.hopper.plans import forward_plan
from jax_fa4.kernels.plan import KernelPlan

TINY = hopper_tiles.Settings(
    head_dims=(128,),
    lengths=(100,),
    medians=(50,),
    packed_rows=1,
    packed_length=100,
    tokens=100,
    hidden=128,
    turns=1,
    turn_ms=0.1,
)


@pytest.fixture
def driver() -> str:
    try:
        return launch.emulated_driver((9, 0))
    except FileNotFoundError:
        pytest.skip("the emulator is not built")


def test_every_variant_is_a_plan_of_its_own() -> None:
    assert hopper_tiles.VARIANTS.keys() == BACKWARD_TILES.keys()
    for head_dim in BACKWARD_TILES:
        tiles = hopper_tiles.tiles_of(head_dim)
        plans = {backward_plan("bfloat16", head_dim, "window", tiles=one).key for one in tiles.values()}
        assert len(plans) == len(tiles) > 1
        forward = hopper_tiles.forward_tiles_of(head_dim)
        plans = {forward_plan("bfloat16", head_dim, "causal", tiles=one).key for one in forward.values()}
        assert len(plans) == len(forward) > 1


def test_without_the_compiler_the_default_is_left(
    driver: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hopper_tiles.bundle, "compiler_version", lambda: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    figures = hopper_tiles.run(TINY, tmp_path / "figures.json", driver)
    # Of each case the forward, whole backward, pre- and postprocess: with the tiles that the wheel has kernels of.
    forward, backward = ["default", "one item a block", "short"], ["default", "64 ahead, persistent"] * 3
    assert [one["tiles"] for one in figures] == (forward + backward) * 3
    names = {one["case"] for one in figures}
    assert {"d128 full 100", "d128 causal 100"} < names
    assert len(names) == 3
    assert len(json.loads((tmp_path / "figures.json").read_text())["figures"]) == 27
    printed = capsys.readouterr().out
    assert "80 ahead is left out" in printed
    assert "pip install 'jax_fa4[build]'" in printed
    assert "forward, short, persistent is left out" in printed
    assert "d128 full 100, whole, default" in printed


def test_building_asks_for_every_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[KernelPlan] = []
    monkeypatch.setattr(hopper_tiles.bundle, "find", found.append)
    hopper_tiles.build(TINY, Console(quiet=True))
    kernels = {(plan.kernel, plan.options) for plan in found}
    # Dense and causal calls take the same kernels, packed ones others; all of 80 queries share a postprocess, and all
    # others one.
    names = [name for name, _ in kernels]
    asked = {name: names.count(name) for name in names}
    assert asked == {"forward": 8, "preprocess": 1, "backward": 12, "postprocess": 1, "postprocess_turned": 1}


@pytest.mark.skipif(build.compiler_version() is None, reason="the wheel has the default's kernels alone")
def test_all_variants_give_the_same_gradients(driver: str) -> None:
    case = next(cases.dense_cases((128,), (100,), 100, 128))
    call, rest = hopper_tiles.call_of(case, driver)
    found = {
        name: jax.device_get(hopper_tiles.starts(call, tiles, rest, driver)["whole"]()[:3])
        for name, tiles in hopper_tiles.tiles_of(128).items()
    }
    assert {"default", "80 in turn", "80 ahead", "64 in turn"} <= found.keys()
    for gradients in found.values():
        for one, other in zip(gradients, found["default"], strict=True):
            one, other = (np.asarray(array, np.float32) for array in (one, other))
            assert np.abs(one - other).max() <= 2.0**-7 * np.abs(other).max()  # two roundings of bfloat16
