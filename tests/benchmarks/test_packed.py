"""The benchmark of packed rows, on the CPU at sizes that take seconds."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import packed

TINY = packed.Settings(
    passes=("forward",),
    implementation="blockwise",
    rows=2,
    row_length=64,
    heads=2,
    head_dim=16,
    cache=64,
    copied_bytes=4096,
    decode_heads=4,
    decode_kv_heads=2,
    parts=(1, 4),
    planned_tokens=(64,),
    lengths=("standard library", "the Pile", "20"),
    candidates=("jax_fa4, plan", "jax_fa4", "jax.nn"),
    turns=1,
    turn_ms=0.1,
)


def test_every_figure_and_the_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, plot = tmp_path / "packed.json", tmp_path / "packed.png"
    figures = packed.run(TINY, out, plot)
    assert len(figures) == 3 * 4 + 6 + 2
    assert all(one.get("ms", one.get("terabytes_per_second")) > 0 for one in figures)
    assert len(json.loads(out.read_text())["figures"]) == len(figures)
    assert plot.stat().st_size > 5_000
    assert "fails" not in capsys.readouterr().out


def test_the_pile_is_as_published() -> None:
    """Its total, its mean document and shares by size agree with the same table's last row."""
    effective, mean = np.array(list(packed.PILE.values())).T
    assert abs(effective.sum() - 1254.20) < 0.1
    assert abs(effective.sum() / (effective / mean).sum() - 5.91) < 0.05
    assert next(iter(packed.PILE)) == "Pile-CC"


def test_lengths_are_of_real_files() -> None:
    lengths = list(itertools.islice(packed.lengths_of_the_standard_library(np.random.default_rng(0)), 500))
    assert min(lengths) >= 1
    assert 500 < np.median(lengths) < 20_000
    case = packed.training_case("standard library", packed.Settings())
    assert all(sum(row) == 8192 for row in case.documents or ())
