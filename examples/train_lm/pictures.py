"""The two pictures of the demonstration: how the loss fell, and which tiles of the score matrix a row needs."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

from examples.train_lm.training import History


def draw_losses(history: History, entropy: float, path: Path) -> None:
    """Bits per byte by step: every training batch, the held-out evaluations, and what no context could reach."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    steps = range(1, len(history.training) + 1)
    axes.plot(steps, history.training, color="0.75", linewidth=1, label="training batch")
    axes.plot(*zip(*history.held_out.items(), strict=True), "o-", color="C0", label="held out")
    axes.axhline(entropy, color="C3", linestyle="--", label="no context (unigram entropy)")
    axes.set(xlabel="step", ylabel="bits per byte", ylim=(0, None), xlim=(0, len(history.training)))
    axes.set_title("A byte-level transformer on the sources of Python's standard library")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
