"""The two pictures of the demonstration: how the loss fell, and which tiles of the score matrix a row needs."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import jax
import matplotlib.pyplot as plt

import jax_fa4
from examples.train_lm.data import Rows
from examples.train_lm.model import ModelConfig
from examples.train_lm.training import History
from jax_fa4.cost import ARCHITECTURES
from jax_fa4.schedule.plot import schedule_figure


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


def draw_tiles(rows: Rows, config: ModelConfig, path: Path, architecture: str = "sm_100") -> None:
    """The tiles of a row of several documents, and the schedule of a batch of 64 such rows on a GPU (simulated)."""
    segment_ids = rows.shared().segment_ids[:64]
    query, key = (
        jax.ShapeDtypeStruct((*segment_ids.shape, heads, config.head_dim), "bfloat16")
        for heads in (config.query_heads, config.kv_heads)
    )
    problem = jax_fa4.explain(query, key, key, segment_ids=segment_ids, is_causal=True).problem
    figure = schedule_figure(problem, ARCHITECTURES[architecture], query_tile=128, key_tile=128)
    figure.savefig(path)
