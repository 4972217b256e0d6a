"""The benchmark of rings, on CPU devices at sizes that take seconds, and what it reads off programs and profiles."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import pytest

from benchmarks import ring_gpu


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs the CPU devices of conftest.py")
def test_figures_on_cpu_devices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ring_gpu.Settings(
        lengths=(32,), heads=2, kv_heads=1, head_dim=8, implementation="blockwise", turns=1, cpu_devices=2,
        passes=("forward",), candidates=("one device", "zigzag", "jit"), texts=str(tmp_path / "texts"),
    )  # fmt: skip
    figures = ring_gpu.run(settings, tmp_path / "ring.json")
    assert [one.candidate for one in figures] == ["one device", "zigzag", "jit"]
    assert figures[0].ratio == 1
    assert all(one.milliseconds > 0 for one in figures)
    assert len(json.loads((tmp_path / "ring.json").read_text())["figures"]) == 3
    assert "collective-permute" in (tmp_path / "texts" / "32 forward zigzag.txt").read_text()
    assert "32 forward, zigzag" in capsys.readouterr().out


def test_what_a_schedule_has_between_start_and_end() -> None:
    text = """
  %a.1 = ((bf16[8]{0}), bf16[8]{0}) collective-permute-start(%x), channel_id=1
  %k = (bf16[8]{0}) custom-call(%x), custom_call_target="jax_fa4_launch"
  %a.12 = ((bf16[8]{0}), bf16[8]{0}) collective-permute-start(%y), channel_id=1
  %c = (bf16[8]{0}) conditional(%p, %x, %y), branch_computations={%one, %two}
  %b = bf16[8]{0} collective-permute-done(%a.12)
  %d = bf16[8]{0} collective-permute-done(%a.1)
"""
    assert ring_gpu.schedule_of(text) == [
        "collective-permute: 1 kernels, 1 branches",
        "collective-permute: 0 kernels, 1 branches",
    ]


def test_time_that_spans_have_in_common() -> None:
    assert ring_gpu.union([(5, 6), (0, 2), (1, 3)]) == [(0, 3), (5, 6)]
    assert ring_gpu.common([(0, 2), (1, 4)], [(3, 10), (3.5, 5)]) == 1
    assert ring_gpu.common([(0, 1)], []) == 0
