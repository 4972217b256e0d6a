"""The benchmarks run together and leave figures and a picture."""

import importlib.util
import json

from absl import flags
from absl.testing import flagsaver

from benchmarks import run


def test_figures_and_picture(tmp_path, monkeypatch):
    calls = []

    def fake(command, check):
        assert check
        name, out = command[2], command[3].removeprefix("--out=")
        calls.append(name)
        rows = [{"case": "causal", "unit": "s", "baseline": 3.0, "ours": 1.0, "ratio": 3.0}]
        with open(out, "w") as file:
            json.dump({"benchmark": name, **({"rows": rows} if name.endswith("cpu") else {})}, file)

    monkeypatch.setattr(run.subprocess, "run", fake)
    with flagsaver.flagsaver():
        flags.FLAGS(["run", f"--folder={tmp_path}"])
        run.main(["run"])
    assert calls == [f"benchmarks.{name}" for name in run.BENCHMARKS]
    assert (tmp_path / "ratios.png").stat().st_size > 5_000


def test_every_benchmark_is_there():
    assert all(importlib.util.find_spec(f"benchmarks.{name}") for name in run.BENCHMARKS)
