"""The benchmark of attention, on the CPU at sizes that take seconds; kernels run on the emulated GPU."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import jax_fa4
from benchmarks import attention, candidates, cases

TINY = {
    "head_dims": (64,),
    "lengths": (32, 64),
    "tokens": 64,
    "hidden": 64,
    "medians": (20,),
    "packed_rows": 2,
    "packed_length": 64,
    "overhead_length": 16,
    "short_lengths": (40,),
    "decode_batch": 1,
    "decode_queries": (2,),
    "decode_keys": 50,
    "turns": 1,
    "turn_ms": 0.1,
}


def test_figures_tables_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = attention.Settings(kinds=("dense", "packed", "overhead"), implementation="blockwise", **TINY)
    out, plot = tmp_path / "attention.json", tmp_path / "attention.png"
    figures = attention.run(settings, out, plot)
    # Four dense cases, one packed and the host's, both passes; traced ids and ids left out in the packed one alone.
    assert len(figures) == (4 * 2 + 4 + 2) * 2
    assert all(one.milliseconds > 0 for one in figures)
    assert [one.tflops is None for one in figures].count(True) == 4
    stored = json.loads(out.read_text())
    assert len(stored["figures"]) == len(figures)
    assert stored["settings"]["lengths"] == [32, 64]
    assert plot.stat().st_size > 5_000
    printed = capsys.readouterr().out
    assert "times as fast as jax.nn" in printed
    assert max(map(len, printed.splitlines())) <= 120


def test_orders_run_the_kernel(hopper_on_the_cpu: None) -> None:
    settings = attention.Settings(kinds=("orders",), passes=("forward",), **TINY)
    figures = list(attention.measure(settings, Console(quiet=True)))
    assert [one.candidate for one in figures] == ["plain", "reversed", "first_first", "last_first", "longest_first"] * 2
    settings = attention.Settings(kinds=("short", "decode"), passes=("forward",), **TINY)
    figures = list(attention.measure(settings, Console(quiet=True)))
    assert [one.candidate for one in figures[:6]] == ["usual tiles", "short tiles", "jax.nn"] * 2
    assert len(figures) == 6 + 5


@pytest.fixture
def hopper_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels that the benchmark calls directly run on the emulated GPU."""
    import functools

    from jax_fa4.ffi import launch

    try:
        driver = launch.emulated_driver((9, 0))
    except FileNotFoundError:
        pytest.skip("the emulator is not built")
    monkeypatch.setattr(candidates, "hopper_forward", functools.partial(candidates.hopper_forward, driver=driver))


def test_ours_is_right_in_the_emulator() -> None:
    """What is timed is attention: the benchmark's own packed case, on kernels and in plain JAX."""
    case = cases.packed_case(20, 1, 64, 1, 64)
    with jax_fa4.target("sm_90"):
        try:
            ours = candidates.ours("emulated")(case, "forward")()
        except NotImplementedError as error:
            pytest.skip(str(error))
    np.testing.assert_allclose(
        np.asarray(ours, np.float32), np.asarray(candidates.of_jax_nn(case, "forward")(), np.float32), atol=0.02
    )


def test_flop_and_documents() -> None:
    assert cases.Case(2, 100, 3, 3, 64).flop("forward") == 4 * 2 * 3 * 100**2 * 64
    case = cases.packed_case(30, 3, 200, 2, 64)
    assert case.documents is not None
    assert [sum(row) for row in case.documents] == [200] * 3
    assert case.segment_ids is not None
    assert case.segment_ids.shape == (3, 200)
    pairs = sum(length**2 for row in case.documents for length in row) / 2
    assert case.flop("forward+backward") == 3.5 * 4 * pairs * 64 * 2


def test_a_library_that_fails_is_reported_and_the_others_measured(capsys: pytest.CaptureFixture[str]) -> None:
    def broken(case: cases.Case, passes: str) -> candidates.Start:
        raise RuntimeError("no such kernel")

    chosen = {"broken": broken, "jax.nn": candidates.of_jax_nn}
    starts = attention.started(chosen, cases.Case(1, 8, 1, 1, 8), "forward", Console())
    assert list(starts) == ["jax.nn"]
    assert "no such kernel" in capsys.readouterr().out
