"""`make bench`: every CPU benchmark in a process of its own, their figures as JSON, and a picture of the ratios."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from absl import app, flags

BENCHMARKS = ("planning", "blockwise_cpu", "emulator")

FOLDER = flags.DEFINE_string("folder", "out/bench", "Where JSON files and the picture go.")
ONLY = flags.DEFINE_multi_enum("only", list(BENCHMARKS), BENCHMARKS, "Which to run; may be repeated.")


def draw_ratios(rows: list[dict[str, Any]], path: Path) -> None:
    """A bar per comparison: how many times the baseline's time, or memory, is ours; logarithmic."""
    figure, axes = plt.subplots(figsize=(9, 0.6 + 0.32 * len(rows)), layout="constrained")
    ratios = [row["ratio"] for row in rows]
    bars = axes.barh([row["case"] for row in rows], ratios, color=["C0" if ratio >= 1 else "C3" for ratio in ratios])
    axes.bar_label(bars, [f"{ratio:.1f}x" for ratio in ratios], padding=4, fontsize=9)
    axes.axvline(1, color="0.3", linewidth=1)
    axes.set(xscale="log", xlabel="jax.nn / jax_fa4: right of 1, jax_fa4 takes less")
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(arguments: list[str]) -> None:
    """Run the benchmarks one after the other."""
    if len(arguments) > 1:
        raise app.UsageError(f"unexpected arguments {arguments[1:]}; `python -m benchmarks.NAME --help` has the sizes")
    folder = Path(FOLDER.value)
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for name in BENCHMARKS:
        if name in ONLY.value:
            out = folder / f"{name}.json"
            subprocess.run([sys.executable, "-m", f"benchmarks.{name}", f"--out={out}"], check=True)
            rows += json.loads(out.read_text()).get("rows", [])
    if rows:
        draw_ratios(rows, folder / "ratios.png")
    print(f"figures and picture: {folder}/")


if __name__ == "__main__":
    app.run(main)
