"""Pictures of a schedule: which tiles of the scores exist and in what order, and what each multiprocessor does when.

    python -m jax_fa4.schedule.plot --out docs/pictures

draws the pictures of the documentation. Needs matplotlib (the extra `plot`), which is imported when a picture is drawn.
"""

import argparse
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from jax_fa4.cost import ARCHITECTURES, Architecture
from jax_fa4.problem import NO_CONSTANTS, AttentionOperands, AttentionProblem, HostArray, MaskConstants
from jax_fa4.schedule.order import Column, Policy, WorkTable, forward_table
from jax_fa4.schedule.simulate import Simulation, simulate
from jax_fa4.schedule.tiles import MaskRule, TileClass, classify, query_intervals

COLOURS = {TileClass.SKIP: "#edf0f4", TileClass.PARTIAL: "#f0a13c", TileClass.FULL: "#2f6db5"}
LABELS = {TileClass.SKIP: "skipped", TileClass.PARTIAL: "partial (element mask)", TileClass.FULL: "full (no mask)"}
IDLE, BOUND, TEXT = "#f7d9d9", "#b3261e", "#333b46"
LENGTH_COLOURS = "YlGnBu"  # light for short, dark for long: the idle red stands out against all of it
MOST_GRID_LINES = 40  # tiles along a side that can still be told apart by lines
MOST_RANKS = 24  # row tiles that leave room for a number each
PICTURE_DPI = 110
COMPARED_POLICIES = (Policy.PLAIN, Policy.REVERSED, Policy.LONGEST_FIRST)


def _matplotlib() -> Any:
    try:
        import matplotlib
        import matplotlib.collections
        import matplotlib.colors
        import matplotlib.figure
        import matplotlib.patches
        import matplotlib.ticker
    except ImportError as error:
        raise ImportError("Pictures need matplotlib. Install it with pip install 'jax_fa4[plot]'.") from error
    return matplotlib


def new_figure(width: float, height: float) -> Any:
    """A matplotlib figure of so many inches that belongs to no window and no global state."""
    return _matplotlib().figure.Figure(figsize=(width, height), layout="constrained", dpi=PICTURE_DPI)


def draw_tile_map(
    axes: Any,
    classes: np.ndarray,
    row_tile: int,
    column_tile: int,
    ranks: np.ndarray | None = None,
    legend: bool = True,
) -> None:
    """Draws the class of every tile, and beside each row tile its place in the order.

    Args:
      axes: matplotlib axes to draw on.
      classes: (row_tiles, column_tiles) of `TileClass`.
      row_tile: rows of a tile.
      column_tile: columns of a tile.
      ranks: (row_tiles,) the place of each row tile in the order, from 0; None draws none.
      legend: whether to explain the colours, with the share of each class.
    """
    matplotlib = _matplotlib()
    row_tiles, column_tiles = classes.shape
    palette = np.array([matplotlib.colors.to_rgb(COLOURS[kind]) for kind in TileClass])
    extent = (0, column_tiles * column_tile, row_tiles * row_tile, 0)
    axes.imshow(palette[classes], extent=extent, aspect="auto", interpolation="antialiased")
    if max(row_tiles, column_tiles) <= MOST_GRID_LINES:
        axes.hlines(np.arange(1, row_tiles) * row_tile, 0, extent[1], color="white", linewidth=0.6)
        axes.vlines(np.arange(1, column_tiles) * column_tile, 0, extent[2], color="white", linewidth=0.6)
    _style(axes, "key", "query")
    if ranks is not None:
        _draw_ranks(axes, ranks, row_tile, extent)
    if legend:
        shares = np.bincount(classes.ravel(), minlength=len(TileClass)) / max(classes.size, 1)
        handles = [
            matplotlib.patches.Patch(color=COLOURS[kind], label=f"{LABELS[kind]}, {_percent(shares[kind])}")
            for kind in (TileClass.FULL, TileClass.PARTIAL, TileClass.SKIP)
        ]
        axes.legend(handles=handles, loc="upper right", frameon=True, framealpha=0.9, fontsize=8, edgecolor="none")


def _draw_ranks(axes: Any, ranks: np.ndarray, row_tile: int, extent: tuple[float, float, float, float]) -> None:
    """A strip beside the map: dark for row tiles handed out first, numbered where there is room."""
    strip = axes.inset_axes((1.015, 0, 0.045, 1))
    strip.imshow(
        ranks[:, None], cmap=LENGTH_COLOURS + "_r", extent=(0, 1, extent[2], 0), aspect="auto", interpolation="nearest"
    )
    strip.set_xticks([])
    strip.set_yticks([])
    strip.set_title("order", fontsize=8, color=TEXT)
    for spine in strip.spines.values():
        spine.set_visible(False)
    if len(ranks) <= MOST_RANKS:
        for tile, rank in enumerate(ranks):
            shade = "white" if rank < len(ranks) / 2 else TEXT
            strip.text(0.5, (tile + 0.5) * row_tile, f"{rank + 1}", ha="center", va="center", fontsize=7, color=shade)


def draw_gantt(axes: Any, run: Simulation, lengths: np.ndarray, *, until: int | None = None, title: str = "") -> Any:
    """Draws what each multiprocessor runs when: each item a bar, darker the longer it is; idle time is red.

    Args:
      axes: matplotlib axes to draw on.
      run: the simulated schedule.
      lengths: (n,) column tiles of each item, which choose its colour.
      until: clock at which the picture ends; the run's own end by default.
      title: what to call the order; its distance from the lower bound is added.

    Returns:
      The collection of bars, for a colour bar.
    """
    matplotlib = _matplotlib()
    until = run.makespan if until is None else until
    scale, unit = (1e-6, "million") if until > 2e6 else (1e-3, "thousand")
    left, right = run.start * scale, run.end * scale
    corners = np.stack([left, right, right, left], axis=1)
    heights = run.slot[:, None] + np.array([0, 0, 1, 1])
    axes.set_facecolor(IDLE)
    bars = matplotlib.collections.PolyCollection(
        np.stack([corners, heights], axis=2),
        array=np.asarray(lengths, float),
        cmap=LENGTH_COLOURS,
        norm=matplotlib.colors.PowerNorm(0.5, vmin=0, vmax=max(np.max(lengths, initial=0), 1)),
        linewidth=0,
        antialiased=False,  # neighbouring bars would show a seam
        rasterized=True,
    )
    axes.add_collection(bars)
    axes.axvline(run.lower_bound * scale, color=BOUND, linewidth=1.2, linestyle="--")
    is_late = run.lower_bound > 0.85 * until
    axes.annotate(
        "lower bound",
        (run.lower_bound * scale, 0.97),
        xycoords=axes.get_xaxis_transform(),
        xytext=(-4 if is_late else 4, 0),
        textcoords="offset points",
        ha="right" if is_late else "left",
        va="top",
        fontsize=7.5,
        color=BOUND,
        bbox={"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 1.5},
    )
    axes.set_xlim(0, max(until, 1) * scale * 1.01)
    axes.set_ylim(run.slots, 0)
    _style(axes, f"{unit} clocks (simulated)", "multiprocessor")
    beyond = run.makespan / run.lower_bound - 1 if run.lower_bound else 0.0
    prefix = f"{title}: " if title else ""
    axes.set_title(
        f"{prefix}{beyond:.1%} over the lower bound, {1 - run.balance:.1%} idle", loc="left", fontsize=9, color=TEXT
    )
    return bars


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.01 or share == 0 else f"{share:.1%}"


def _style(axes: Any, x_label: str, y_label: str) -> None:
    axes.set_xlabel(x_label, fontsize=9, color=TEXT)
    axes.set_ylabel(y_label, fontsize=9, color=TEXT)
    axes.tick_params(labelsize=8, colors=TEXT, length=2)
    for spine in axes.spines.values():
        spine.set_visible(False)


def item_lengths(table: WorkTable) -> np.ndarray:
    """(n,) column tiles that each item visits."""
    items = np.asarray(table.items)
    return items[:, Column.END] - items[:, Column.BEGIN]


def tile_ranks(table: WorkTable, batch: int = 0, head: int = 0) -> np.ndarray:
    """(row_tiles,) the place of each row tile among those of one batch row and head."""
    items = np.asarray(table.items)
    tiles = items[(items[:, Column.BATCH] == batch) & (items[:, Column.HEAD] == head), Column.TILE]
    ranks = np.empty(len(tiles), np.int64)
    ranks[tiles] = np.arange(len(tiles))
    return ranks


def schedule_figure(
    problem: AttentionProblem, arch: Architecture, *, query_tile: int = 256, key_tile: int = 128, batch: int = 0
) -> Any:
    """One picture of a forward pass: the tile map of a batch row with its order, and the whole call on a GPU.

    Args:
      problem: a call whose ids and lengths, if any, are constants.
      arch: the GPU to simulate.
      query_tile: query rows of an item.
      key_tile: keys of a block.
      batch: the batch row to map.

    Returns:
      A matplotlib Figure; `savefig` writes it.
    """
    intervals = query_intervals(problem.mask, problem.mask_operands(AttentionOperands()))
    classes = classify(intervals, query_tile, key_tile, problem.key_length)
    table = forward_table(problem, AttentionOperands(), query_tile, key_tile, arch)
    figure = new_figure(11, 4.6)
    tile_axes, gantt_axes = figure.subplots(1, 2, width_ratios=(1, 1.25))
    draw_tile_map(tile_axes, classes[batch % len(classes)], query_tile, key_tile, tile_ranks(table, batch))
    tile_axes.set_title(f"tiles of {query_tile} x {key_tile}, batch row {batch}", loc="left", fontsize=9, color=TEXT)
    bars = draw_gantt(gantt_axes, simulate(table.clocks, arch.sms), item_lengths(table), title=arch.board)
    _colour_bar(figure, bars, gantt_axes)
    return figure


def orders_figure(problem: AttentionProblem, arch: Architecture, *, query_tile: int = 256, key_tile: int = 128) -> Any:
    """The forward pass of a call in the orders to compare, one above the other on one clock; see `schedule_figure`."""
    figure = new_figure(8, 6.6)
    axes = figure.subplots(len(COMPARED_POLICIES), 1, sharex=True)
    tables = {
        policy: forward_table(problem, AttentionOperands(), query_tile, key_tile, arch, policy=policy)
        for policy in COMPARED_POLICIES
    }
    runs = {policy: simulate(table.clocks, arch.sms) for policy, table in tables.items()}
    until = max(run.makespan for run in runs.values())
    for row, (policy, table) in zip(axes, tables.items(), strict=True):
        title = policy.value.replace("_", " ")
        bars = draw_gantt(row, runs[policy], item_lengths(table), until=until, title=title)
    for row in axes[:-1]:
        row.set_xlabel("")
    _colour_bar(figure, bars, list(axes))
    return figure


def _colour_bar(figure: Any, bars: Any, axes: Any) -> None:
    whole = _matplotlib().ticker.MaxNLocator(integer=True, min_n_ticks=1)
    bar = figure.colorbar(bars, ax=axes, pad=0.01, fraction=0.03, aspect=35, ticks=whole)
    bar.set_label("key tiles of an item", fontsize=8, color=TEXT)
    bar.ax.tick_params(labelsize=7, colors=TEXT, length=2)
    bar.outline.set_visible(False)


def packed_problem(lengths: Sequence[int], *, heads: int = 4, head_dim: int = 128) -> AttentionProblem:
    """One row of documents of the given lengths, causal, bfloat16."""
    ids = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)[None]
    constants = MaskConstants(HostArray(ids), HostArray(ids)) if len(lengths) > 1 else NO_CONSTANTS
    return AttentionProblem(
        batch=1,
        query_length=ids.size,
        key_length=ids.size,
        query_heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        value_dim=head_dim,
        dtype="bfloat16",
        mask=MaskRule(ids.size, ids.size, is_causal=True),
        scale=None,
        has_segment_ids=len(lengths) > 1,
        constants=constants,
    )


def example_figures(arch: Architecture) -> dict[str, Any]:
    """The pictures of the documentation, by file name."""
    tokens = 131072
    giant, short = 30000, 100
    count = (tokens - giant) // short
    return {
        "schedule.png": schedule_figure(packed_problem([1100, 300, 2600, 450, 3300, 442], heads=16), arch),
        "orders.png": orders_figure(packed_problem([giant, *[short] * count, tokens - giant - short * count]), arch),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Draws the pictures of the documentation into a folder."""
    parser = argparse.ArgumentParser(prog="python -m jax_fa4.schedule.plot", description="Draws schedules.")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder to write the pictures to")
    parser.add_argument("--arch", choices=[*ARCHITECTURES], default="sm_100", help="GPU to simulate")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    for name, figure in example_figures(ARCHITECTURES[options.arch]).items():
        figure.savefig(options.out / name)
        print(options.out / name)


if __name__ == "__main__":
    main()
