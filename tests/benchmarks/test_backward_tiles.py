"""The benchmark of the Hopper backward's tiles, on the emulated GPU at sizes that take seconds."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console

from benchmarks import backward_tiles, cases
from jax_fa4.ffi import launch
from jax_fa4.kernels import build
from jax_fa4.kernels.hopper.backward_plans import BACKWARD_TILES, backward_plan
from jax_fa4.kernels.plan import KernelPlan

TINY = backward_tiles.Settings(lengths=(100,), tokens=100, hidden=128, turns=1, turn_ms=0.1)


@pytest.fixture
def driver() -> str:
    try:
        return launch.emulated_driver((9, 0))
    except FileNotFoundError:
        pytest.skip("the emulator is not built")


def test_every_variant_is_a_plan_of_its_own() -> None:
    assert backward_tiles.VARIANTS.keys() == BACKWARD_TILES.keys()
    for head_dim in BACKWARD_TILES:
        tiles = backward_tiles.tiles_of(head_dim)
        plans = {backward_plan("bfloat16", head_dim, "window", tiles=one).key for one in tiles.values()}
        assert len(plans) == len(tiles) > 1


def test_without_the_compiler_the_default_is_left(
    driver: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(backward_tiles.bundle, "compiler_version", lambda: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    figures = backward_tiles.run(TINY, tmp_path / "figures.json", driver)
    assert [one["tiles"] for one in figures] == ["default"] * 6
    assert {one["case"] for one in figures} == {"d128 full 100", "d128 causal 100"}
    assert len(json.loads((tmp_path / "figures.json").read_text())["figures"]) == 6
    printed = capsys.readouterr().out
    assert "80 ahead is left out" in printed
    assert "d128 full 100, whole, default" in printed


def test_building_asks_for_every_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[KernelPlan] = []
    monkeypatch.setattr(backward_tiles.bundle, "find", found.append)
    backward_tiles.build(TINY, Console(quiet=True))
    kernels = {(plan.kernel, plan.options) for plan in found}
    # Dense and causal calls take the same kernels; all of 80 queries share a postprocess, and all others one.
    names = [name for name, _ in kernels]
    asked = {name: names.count(name) for name in names}
    assert asked == {"preprocess": 1, "backward": 6, "postprocess": 1, "postprocess_turned": 1}


@pytest.mark.skipif(build.compiler_version() is None, reason="the wheel has the default's kernels alone")
def test_all_variants_give_the_same_gradients(driver: str) -> None:
    case = next(cases.dense_cases((128,), (100,), 100, 128))
    call, rest = backward_tiles.call_of(case, driver)
    found = {
        name: jax.device_get(backward_tiles.starts(call, tiles, rest, driver)["whole"]()[:3])
        for name, tiles in backward_tiles.tiles_of(128).items()
    }
    assert {"default", "80 in turn", "80 ahead", "64 in turn"} <= found.keys()
    for gradients in found.values():
        for one, other in zip(gradients, found["default"], strict=True):
            one, other = (np.asarray(array, np.float32) for array in (one, other))
            assert np.abs(one - other).max() <= 2.0**-7 * np.abs(other).max()  # two roundings of bfloat16
