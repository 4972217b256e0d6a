"""Attention against the other libraries that are installed, on JAX's device: same shapes, one process, in turns.

    python -m benchmarks.attention --kinds=dense,packed --out=out/attention.json --plot=out/attention.png

`dense`: full and causal calls of 16k tokens, hidden size 2048; `packed`: 4 rows of 8192 tokens, 16 heads, causal,
filled with documents of log-normal lengths; `overhead`: how long the host takes to issue a jitted call of 512 tokens.
Choices inside the Hopper forward: `orders`, its work table in plain order, reversed, and longest first; `short`, either
of its tiles; `decode`, heads of a group packed into a tile or not.

A figure is the median over turns; a turn of a candidate is as many calls as take about --turn_ms. TFLOP/s count 4 D for
each visible pair, half for causal ones, and 2.5 times as much for the backward.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from absl import app, flags
from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.candidates import (
    Candidate,
    NotMeasuredError,
    Start,
    all_candidates,
    hopper_candidates,
    installed,
    wait,
)
from benchmarks.cases import PASSES, Case, dense_cases, packed_case

One = TypeVar("One")  # a figure

KINDS = ("dense", "packed", "orders", "short", "decode", "overhead")
OF_HOPPER = ("orders", "short", "decode")  # choices inside the Hopper forward


@dataclasses.dataclass(frozen=True)
class Settings:
    """Sizes; the defaults are those of docs/performance.md."""

    kinds: tuple[str, ...] = KINDS
    passes: tuple[str, ...] = PASSES
    candidates: tuple[str, ...] = ()  # empty: all that are installed
    implementation: str | None = None
    head_dims: tuple[int, ...] = (128, 64)
    lengths: tuple[int, ...] = (2048, 8192, 16384)
    tokens: int = 16384
    hidden: int = 2048
    medians: tuple[int, ...] = (600, 4000)
    packed_rows: int = 4
    packed_length: int = 8192
    overhead_length: int = 512
    short_lengths: tuple[int, ...] = (64, 128, 192, 256, 384, 512, 640, 1024)
    decode_batch: int = 32
    decode_queries: tuple[int, ...] = (1, 8)
    decode_keys: int = 8192
    turns: int = 7
    turn_ms: float = 30.0


@dataclasses.dataclass(frozen=True)
class Figure:
    """One candidate in one case and pass."""

    case: str
    passes: str
    candidate: str
    milliseconds: float
    tflops: float | None  # None: a host's time


class Ratios(NamedTuple):
    """Geometric mean and least of the ratios of some cases, and how many these are."""

    mean: float
    least: float
    cases: int


def interleaved_seconds(starts: Mapping[str, Start], turns: int, turn_seconds: float) -> dict[str, float]:
    """Median seconds of one call of each, in turns.

    Each turn has an order of its own, drawn from a fixed seed: a GPU near its power limit is slower after a candidate
    that takes more, so that whoever always followed the same one would be ahead or behind by a few percent.
    """
    orders = random.Random(0)
    calls = {name: max(1, int(turn_seconds / one)) for name, one in seconds_of_a_call(starts, turn_seconds).items()}
    seconds: dict[str, list[float]] = {name: [] for name in starts}
    for _ in range(turns):
        for name in orders.sample(list(starts), len(starts)):
            start = starts[name]
            wait(start())  # untimed: what the candidate before left in caches and clocks
            begin = time.perf_counter()
            for _ in range(calls[name]):
                result = start()
            wait(result)
            seconds[name].append((time.perf_counter() - begin) / calls[name])
    return {name: float(np.median(times)) for name, times in seconds.items()}


def seconds_of_a_call(starts: Mapping[str, Start], warm_up_seconds: float) -> dict[str, float]:
    """The shortest of a few calls of each, by a device that is no longer idle: one that was is slower at first, and
    whoever is measured then would have fewer calls a turn, and more of what a turn costs in each."""
    begin = time.perf_counter()
    for start in itertools.cycle(starts.values()):
        wait(start())
        if time.perf_counter() - begin > warm_up_seconds:
            break
    shortest = dict.fromkeys(starts, math.inf)
    for name, start in [*starts.items()] * 3:
        begin = time.perf_counter()
        wait(start())
        shortest[name] = min(shortest[name], time.perf_counter() - begin)
    return {name: max(seconds, 1e-6) for name, seconds in shortest.items()}


def host_seconds(starts: Mapping[str, Start], turns: int, calls: int = 100) -> dict[str, float]:
    """Median seconds for which one call holds the host; the device is idle before each turn."""
    seconds: dict[str, list[float]] = {name: [] for name in starts}
    for _ in range(turns):
        for name, start in starts.items():
            begin = time.perf_counter()
            results = [start() for _ in range(calls)]
            seconds[name].append((time.perf_counter() - begin) / calls)
            wait(results[-1])
    return {name: float(np.median(times)) for name, times in seconds.items()}


def started(candidates: Mapping[str, Candidate], case: Case, passes: str, console: Console) -> dict[str, Start]:
    """The candidates that take a case, each called twice, so that it is compiled and has its memory."""
    starts = {}
    for name, candidate in candidates.items():
        try:
            start = candidate(case, passes)
            for _ in range(2):
                wait(start())
            starts[name] = start
        except NotMeasuredError:
            continue
        except Exception as error:  # a library may fail in any way; the others are still measured
            console.print(f"{name} fails in {case.name}, {passes}: {type(error).__name__}: {str(error)[:300]}")
    return starts


def cases_of(settings: Settings, kind: str) -> list[Case]:
    """The cases of a kind."""
    heads = max(settings.hidden // 128, 1)
    head_dim = min(128, settings.hidden)
    if kind == "packed":
        rows, length = settings.packed_rows, settings.packed_length
        return [packed_case(median, rows, length, heads, head_dim) for median in settings.medians]
    if kind == "overhead":
        return [Case(1, settings.overhead_length, heads, heads, head_dim, True)]
    if kind == "short":
        return list(dense_cases((head_dim,), settings.short_lengths, settings.tokens, settings.hidden))
    if kind == "decode":
        shape = settings.decode_batch, settings.decode_keys, 2 * heads, max(heads // 2, 1), head_dim
        return [Case(*shape, queries=queries) for queries in settings.decode_queries]
    cases = list(dense_cases(settings.head_dims, settings.lengths, settings.tokens, settings.hidden))
    return cases if kind == "dense" else [case for case in cases if case.is_causal]


def measure(settings: Settings, console: Console) -> Iterator[Figure]:
    """Every figure, as it is known."""
    chosen = {
        name: candidate
        for name, candidate in all_candidates(settings.implementation).items()
        if installed(name) and (not settings.candidates or name in settings.candidates)
    }
    for kind in settings.kinds:
        candidates = hopper_candidates(kind) if kind in OF_HOPPER else chosen
        for case in cases_of(settings, kind):
            for passes in settings.passes:
                starts = started(candidates, case, passes, console)
                if kind == "overhead":
                    for name, seconds in host_seconds(starts, settings.turns).items():
                        yield Figure(f"host, {case.name}", passes, name, seconds * 1e3, None)
                    continue
                timed = interleaved_seconds(starts, settings.turns, settings.turn_ms / 1e3)
                label = f"{kind}, {case.name}" if kind in OF_HOPPER else case.name
                for name, seconds in timed.items():
                    yield Figure(label, passes, name, seconds * 1e3, case.flop(passes) / seconds / 1e12)


def geometric_means(figures: Sequence[Figure], ours: str = "jax_fa4") -> dict[tuple[str, str], Ratios]:
    """For each pass and other candidate: how many times its time is ours."""
    mine = {(one.case, one.passes): one.milliseconds for one in figures if one.candidate == ours}
    ratios: dict[tuple[str, str], list[float]] = {}
    for one in figures:
        if one.candidate != ours and one.tflops is not None and (one.case, one.passes) in mine:
            ratio = one.milliseconds / mine[one.case, one.passes]
            ratios.setdefault((one.passes, one.candidate), []).append(ratio)
    return {
        key: Ratios(math.exp(sum(map(math.log, values)) / len(values)), min(values), len(values))
        for key, values in ratios.items()
    }


def show(figures: Sequence[Figure], console: Console) -> None:
    """A table for each pass, TFLOP/s where there are any, else microseconds; then the ratios."""
    for passes in dict.fromkeys(one.passes for one in figures):
        rows = [one for one in figures if one.passes == passes]
        names = list(dict.fromkeys(one.candidate for one in rows))
        table = Table(title=f"{passes}, TFLOP/s (us of the host)", title_justify="left")
        table.add_column("case", overflow="fold")
        for name in names:
            table.add_column(name, justify="right", overflow="fold")
        for case in dict.fromkeys(one.case for one in rows):
            found = {one.candidate: one for one in rows if one.case == case}
            best = min(found.values(), key=lambda one: one.milliseconds).candidate
            cells: list[Text] = []
            for name in names:
                if name not in found:
                    cells.append(Text())
                    continue
                one = found[name]
                text = f"({one.milliseconds * 1e3:.0f})" if one.tflops is None else f"{one.tflops:.3g}"
                cells.append(Text(text, style="bold" if name == best else ""))
            table.add_row(case, *cells)
        console.print(table)
    for (passes, name), (mean, least, count) in geometric_means(figures).items():
        console.print(f"{passes}: {mean:.3f} times as fast as {name} (geometric mean of {count}, lowest {least:.3f})")


def draw(figures: Sequence[Figure], path: Path) -> None:
    """TFLOP/s as bars, a panel for each pass."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figures = [one for one in figures if one.tflops is not None]
    panels = list(dict.fromkeys(one.passes for one in figures))
    figure, axes = plt.subplots(len(panels), 1, figsize=(12, 4.2 * len(panels)), layout="constrained", squeeze=False)
    for axis, passes in zip(axes[:, 0], panels, strict=True):
        rows = [one for one in figures if one.passes == passes]
        cases = list(dict.fromkeys(one.case for one in rows))
        names = list(dict.fromkeys(one.candidate for one in rows))
        width = 0.85 / len(names)
        for index, name in enumerate(names):
            heights = {one.case: one.tflops for one in rows if one.candidate == name}
            places = [place + (index - (len(names) - 1) / 2) * width for place in range(len(cases))]
            axis.bar(places, [heights.get(case, 0.0) for case in cases], width, label=name)
        axis.set_xticks(range(len(cases)), cases, rotation=25, ha="right", fontsize=8)
        axis.set(title=passes, ylabel="TFLOP/s")
        axis.legend(fontsize=8, ncols=4)
        axis.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def run(settings: Settings, out: Path | None = None, plot: Path | None = None) -> list[Figure]:
    """Measures, prints each figure as it comes and the tables at the end, writes JSON after every figure, and draws."""

    def text_of(one: Figure) -> str:
        speed = "" if one.tflops is None else f"{one.tflops:7.1f} TFLOP/s"
        return f"{f'{one.case}, {one.passes}, {one.candidate}':54s} {one.milliseconds:8.4f} ms {speed}"

    console = plain_console()
    figures = report(measure(settings, console), text_of, settings, out)
    show(figures, console)
    if plot is not None:
        draw(figures, plot)
    return figures


def plain_console() -> Console:
    """One that prints messages as they are: brackets, as of pip's extras, are no markup."""
    return Console(markup=False)


def report(figures: Iterable[One], text_of: Callable[[One], str], settings: Any, out: Path | None) -> list[One]:
    """Prints each figure, a dictionary or dataclass, as it comes, and writes all so far as JSON, with the dataclass of
    settings."""
    console = plain_console()
    device = jax.devices()[0].device_kind
    console.print(f"jax {jax.__version__} on {device}")
    facts = {"jax": jax.__version__, "device": device, "settings": dataclasses.asdict(settings)}
    found = []
    for one in figures:
        found.append(one)
        console.print(text_of(one), soft_wrap=True)
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps({**facts, "figures": found}, indent=1, default=dataclasses.asdict)
            out.write_text(text + "\n")
    return found


def define_flags(settings: Any) -> None:
    """A flag for each setting of a dataclass, and for the files."""
    for field in dataclasses.fields(settings):
        default: Any = field.default
        if isinstance(default, tuple):
            flags.DEFINE_list(field.name, [str(one) for one in default], f"Default: {default}.")
        elif isinstance(default, float):
            flags.DEFINE_float(field.name, default, f"Default: {default}.")
        elif isinstance(default, int):
            flags.DEFINE_integer(field.name, default, f"Default: {default}.")
        else:
            flags.DEFINE_string(field.name, default, "Default: the automatic choice.")
    flags.DEFINE_string("out", None, "JSON file for the figures.")
    flags.DEFINE_string("plot", None, "PNG file for the picture.")


def settings_of_flags(settings: Any) -> Any:
    """The dataclass with what the flags say."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(settings):
        value, default = getattr(flags.FLAGS, field.name), field.default
        if isinstance(default, tuple):
            kind = type(default[0]) if default else str
            value = tuple(kind(one) for one in value)
        values[field.name] = value
    return settings(**values)


def main(argv: list[str]) -> None:
    """Measure what the flags say."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    paths = (Path(one) if one else None for one in (flags.FLAGS.out, flags.FLAGS.plot))
    run(settings_of_flags(Settings), *paths)


if __name__ == "__main__":
    define_flags(Settings)
    app.run(main)
