"""The tiles of the Hopper kernels against each other, on a GPU: whole jitted calls, in turns in one process.

    python -m benchmarks.hopper_tiles --out=out/hopper_tiles.json
    python -m benchmarks.hopper_tiles --build          where the compiler is and no GPU: kernels into the cache

The wheel has the kernels of the default tiles alone; others are built, or lie in the cache (`bundle.cache_folder`),
which may be carried to a machine without the compiler. What is not at hand is said and left out.

A figure is the median over turns: of the forward; of preprocess, backward and postprocess by one call, and of each of
the first and the last by a call of its own. Dense, causal, and causal with documents of log-normal lengths, known when
traced. Ratios are those of the default's time to a variant's: above 1 the variant is faster.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags
from rich.console import Console

from benchmarks.attention import define_flags, interleaved_seconds, plain_console, report, settings_of_flags
from benchmarks.candidates import operands
from benchmarks.cases import Case, dense_cases, packed_case
from jax_fa4.arguments import Call, read_call
from jax_fa4.ffi import hopper_backward as backward
from jax_fa4.ffi import hopper_forward as forward
from jax_fa4.ffi.launch import CUDA_DRIVER
from jax_fa4.ffi.postprocess import postprocess
from jax_fa4.ffi.preprocess import ROW_MULTIPLE, preprocess
from jax_fa4.kernels import bundle
from jax_fa4.kernels.hopper.backward_plans import (
    BACKWARD_TILES,
    BackwardTiles,
    sum_columns,
    sum_parts,
    turned_rows,
)
from jax_fa4.kernels.hopper.plans import ARCHITECTURE, FORWARD_TILES, SHORT_TILES, SINGLE_TILES, Tiles, padded_head_dim
from jax_fa4.kernels.plan import KernelPlan

DEFAULT = "default"
PASSES = ("forward", "backward")
FORWARD_VARIANTS: dict[int, dict[str, Tiles]] = {
    head_dim: {
        "one item a block": SINGLE_TILES[head_dim],
        "short": SHORT_TILES[head_dim],
        "short, persistent": dataclasses.replace(SHORT_TILES[head_dim], persistent=True),
    }
    for head_dim in FORWARD_TILES
}
VARIANTS: dict[int, dict[str, BackwardTiles]] = {
    64: {
        "64 ahead": BackwardTiles(64, 3, 3),
        "128 in turn, persistent": BackwardTiles(128, 2, 2, ahead=False, turned_scores=False, persistent=True),
    },
    96: {
        "64 in turn": BackwardTiles(64, 3, 3, ahead=False, turned_scores=False),
        "64 ahead, persistent": BackwardTiles(64, 3, 3, persistent=True),
    },
    128: {
        "80 in turn": BackwardTiles(80, 2, 2, ahead=False, turned_scores=False),
        "80 in turn, persistent": BackwardTiles(80, 2, 2, ahead=False, turned_scores=False, persistent=True),
        "80 ahead": BackwardTiles(80, 3, 2, grad_score_stages=1),
        "64 ahead, persistent": BackwardTiles(64, 3, 3, persistent=True),
        "64 in turn": BackwardTiles(64, 3, 3, ahead=False, turned_scores=False),
    },
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """Sizes; the defaults are those of docs/performance.md."""

    passes: tuple[str, ...] = PASSES
    head_dims: tuple[int, ...] = (128, 64)
    lengths: tuple[int, ...] = (2048, 8192, 16384)
    medians: tuple[int, ...] = (600, 4000)  # of packed rows
    packed_rows: int = 4
    packed_length: int = 8192
    variants: tuple[str, ...] = ()  # empty: all of a head dimension
    tokens: int = 16384
    hidden: int = 2048
    turns: int = 9
    turn_ms: float = 30.0


def tiles_of(head_dim: int, names: tuple[str, ...] = ()) -> dict[str, BackwardTiles]:
    """The backward's default first, then the variants, or those named."""
    padded = padded_head_dim(head_dim)
    others = {name: tiles for name, tiles in VARIANTS[padded].items() if not names or name in names}
    return {DEFAULT: BACKWARD_TILES[padded]} | others


def forward_tiles_of(head_dim: int, names: tuple[str, ...] = ()) -> dict[str, Tiles]:
    """The forward's default first, then the variants, or those named."""
    padded = padded_head_dim(head_dim)
    others = {name: tiles for name, tiles in FORWARD_VARIANTS[padded].items() if not names or name in names}
    return {DEFAULT: FORWARD_TILES[padded]} | others


def variants_of(call: Call, of_pass: str, names: tuple[str, ...] = ()) -> dict[str, tuple[Any, tuple[KernelPlan, ...]]]:
    """The tiles of a pass by name, and the plans of the kernels that each takes."""
    problem = call.problem
    if of_pass == "backward":
        chosen = tiles_of(problem.head_dim, names)
        return {name: (tiles, backward.plans_of(problem, tiles)) for name, tiles in chosen.items()}
    return {
        name: (tiles, (forward.plan_of(problem, tiles),))
        for name, tiles in forward_tiles_of(problem.head_dim, names).items()
    }


def available(call: Call, of_pass: str, names: tuple[str, ...], console: Console) -> dict[str, Any]:
    """The tiles whose kernels are at hand."""
    found = {}
    for name, (tiles, plans) in variants_of(call, of_pass, names).items():
        if (reason := next(filter(None, map(bundle.why_unavailable, plans)), None)) is None:
            found[name] = tiles
        else:
            console.print(f"{of_pass}, {name} is left out: {reason}", soft_wrap=True)
    return found


def forward_starts(call: Call, tiles: Tiles, driver: str) -> dict[str, Callable[[], Any]]:
    """A jitted call."""
    run = functools.partial(forward.hopper_forward, call.problem, tiles=tiles, driver=driver)
    return {"forward": functools.partial(jax.jit(run), call.operands)}


def starts(call: Call, tiles: BackwardTiles, rest: tuple[jax.Array, ...], driver: str) -> dict[str, Callable[[], Any]]:
    """A jitted call of all three kernels, of the first and of the last; `rest` as `hopper_backward` takes it."""
    problem = call.problem
    where: dict[str, Any] = {"architecture": ARCHITECTURE, "driver": driver}
    width = sum_columns(padded_head_dim(problem.head_dim))
    row_tile = turned_rows(tiles) or ROW_MULTIPLE

    def after(sums: jax.Array) -> jax.Array:
        options: dict[str, Any] = {"fragment_parts": sum_parts(tiles), "turned_rows": turned_rows(tiles)}
        options |= {"query_length": problem.query_length, "head_dim": problem.head_dim, "dtype": problem.dtype}
        return postprocess(sums, scale=float(problem.scale or 0.0), **options, **where)

    whole = jax.jit(functools.partial(backward.hopper_backward, problem, tiles=tiles, driver=driver))
    before = jax.jit(functools.partial(preprocess, accumulator_width=width, row_tile=row_tile, **where))
    sums = before(*_of_preprocess(rest)).accumulator
    return {
        "whole": functools.partial(whole, call.operands, *rest),
        "preprocess": functools.partial(before, *_of_preprocess(rest)),
        "postprocess": functools.partial(jax.jit(after), sums),
    }


def _of_preprocess(rest: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    out, lse, grad_out, grad_lse = rest
    return out, grad_out, lse, grad_lse


def call_of(case: Case, driver: str) -> tuple[Call, tuple[jax.Array, ...]]:
    """A call, and its output, log-sum-exp and their cotangents."""
    query, key, value, grad_out = operands(case)
    call = read_call(query, key, value, is_causal=case.is_causal, segment_ids=case.segment_ids)
    out, lse = jax.jit(functools.partial(forward.hopper_forward, call.problem, driver=driver))(call.operands)
    return call, (out, lse, grad_out, jnp.zeros_like(lse))


def cases_of(settings: Settings) -> Iterator[Case]:
    """Every case."""
    yield from dense_cases(settings.head_dims, settings.lengths, settings.tokens, settings.hidden)
    for head_dim in settings.head_dims:
        for median in settings.medians:
            heads = max(settings.hidden // head_dim, 1)
            yield packed_case(median, settings.packed_rows, settings.packed_length, heads, head_dim)


def measure(settings: Settings, console: Console, driver: str = CUDA_DRIVER) -> Iterator[dict[str, Any]]:
    """Every figure, as it is known."""
    for case in cases_of(settings):
        call, rest = call_of(case, driver)
        for of_pass in settings.passes:
            made = {}
            for name, tiles in available(call, of_pass, settings.variants, console).items():
                is_forward = of_pass == "forward"
                made[name] = forward_starts(call, tiles, driver) if is_forward else starts(call, tiles, rest, driver)
            flop = case.flop("forward") * (1.0 if of_pass == "forward" else 2.5)
            yield from figures_of(case, flop, made, settings)


def figures_of(
    case: Case, flop: float, made: dict[str, dict[str, Callable[[], Any]]], settings: Settings
) -> Iterator[dict[str, Any]]:
    """The figures of every part of a pass."""
    for part in made[DEFAULT]:
        timed = {name: parts[part] for name, parts in made.items()}
        for start in timed.values():
            jax.block_until_ready(start())  # compiles
        seconds = interleaved_seconds(timed, settings.turns, settings.turn_ms / 1e3)
        for name, one in seconds.items():
            yield {
                **{"case": f"d{case.head_dim} {case.name}" if case.documents else case.name, "part": part},
                **{"tiles": name, "ms": one * 1e3},
                "tflops": flop / one / 1e12 if part in ("forward", "whole") else None,
                "ratio": seconds[DEFAULT] / one,
            }


def build(settings: Settings, console: Console) -> None:
    """Kernels of every variant into the cache, dense, causal and packed."""
    tiny = dataclasses.replace(settings, lengths=(128,), tokens=128, packed_rows=1, packed_length=1024)
    for case in cases_of(tiny):
        call = read_call(*operands(case)[:3], is_causal=case.is_causal, segment_ids=case.segment_ids)
        for of_pass in settings.passes:
            for name, (_, plans) in variants_of(call, of_pass, settings.variants).items():
                for plan in plans:
                    bundle.find(plan)
                    console.print(f"{case.name}, {name}: {plan.key}", soft_wrap=True)
    console.print(f"what the wheel does not have is in {bundle.cache_folder()}", soft_wrap=True)


def run(settings: Settings, out: Path | None = None, driver: str = CUDA_DRIVER) -> list[dict[str, Any]]:
    """Measures, prints each figure as it comes, and writes JSON after every figure."""

    def text_of(one: dict[str, Any]) -> str:
        speed = "" if one["tflops"] is None else f", {one['tflops']:.0f} TFLOP/s"
        return f"{one['case']}, {one['part']}, {one['tiles']}: {one['ms']:.4f} ms{speed}, {one['ratio']:.3f}"

    return report(measure(settings, plain_console(), driver), text_of, settings, out)


def main(argv: list[str]) -> None:
    """Measure what the flags say."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    settings = settings_of_flags(Settings)
    if flags.FLAGS.build:
        build(settings, plain_console())
    else:
        run(settings, Path(flags.FLAGS.out) if flags.FLAGS.out else None)


if __name__ == "__main__":
    define_flags(Settings)
    flags.DEFINE_bool("build", False, "Build what is missing into the cache, and measure nothing.")
    app.run(main)
