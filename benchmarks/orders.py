"""The Hopper forward's orders of work, measured, beside what the simulation says of them.

    python -m benchmarks.orders --out=out/orders.json

Causal rows: dense, packed with log-normal documents, and skewed: one long document among short ones, documents all
alike, rows of padding alone. 16 query heads over as many KV heads, over 2, and over 1. Every order is a work table:
plain and last tile first; in sections that fit in L2, tiles in either order, and longest first. A figure is a median
over turns, its time as a ratio to plain order's beside the same ratio of the simulated clocks.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from benchmarks.attention import define_flags, interleaved_seconds, report, settings_of_flags
from benchmarks.cases import packed_case
from jax_fa4.arguments import Call, read_call
from jax_fa4.ffi.hopper_forward import HOPPER, forward_call, hopper_forward
from jax_fa4.schedule.order import Policy
from jax_fa4.schedule.simulate import simulate


@dataclasses.dataclass(frozen=True)
class Settings:
    """Sizes; the defaults are those of docs/performance.md."""

    kinds: tuple[str, ...] = (
        "dense",
        "600",
        "4000",
        "one long",
        "equal",
        "padding",
    )  # a number: log-normal, its median
    heads: int = 16
    kv_heads: tuple[int, ...] = (16, 2, 1)
    head_dim: int = 128
    tokens: int = 32768
    rows: int = 4
    turns: int = 7
    turn_ms: float = 20.0


def segment_ids(kind: str, settings: Settings) -> np.ndarray | None:
    """Ids of a kind of rows, (batch, length); None for dense ones."""
    tokens, length = settings.tokens, settings.tokens // settings.rows
    if kind == "dense":
        return None
    if kind == "one long":
        long = tokens * 15 // 16
        return np.concatenate([np.zeros(long), 1 + np.arange(tokens - long) // 100])[None].astype(np.int32)
    if kind == "equal":
        return np.broadcast_to(np.arange(length) // max(length // 8, 1), (settings.rows, length)).astype(np.int32)
    if kind == "padding":
        ids = np.full((settings.rows, length), -1, np.int32)
        ids[0], ids[1, : length // 3] = 0, 0
        return ids
    return packed_case(int(kind), settings.rows, length, settings.heads, settings.head_dim).segment_ids


def call_of(kind: str, kv_heads: int, settings: Settings) -> Call:
    """One causal call."""
    ids = segment_ids(kind, settings)
    rows, length = (settings.rows, settings.tokens // settings.rows) if ids is None else ids.shape
    heads = (settings.heads, kv_heads, kv_heads)
    seeds = jax.random.split(jax.random.key(0), 3)
    tensors = (
        jax.random.normal(seed, (rows, length, one, settings.head_dim), jnp.bfloat16)
        for seed, one in zip(seeds, heads, strict=True)
    )
    return read_call(*tensors, segment_ids=ids, is_causal=True)


def measure(settings: Settings) -> Iterator[dict[str, Any]]:
    """Every figure, as it is known."""
    for kind in settings.kinds:
        for kv_heads in settings.kv_heads:
            call = call_of(kind, kv_heads, settings)
            starts = {}
            for policy in Policy:
                function = jax.jit(functools.partial(hopper_forward, call.problem, policy=policy))
                starts[policy.value] = functools.partial(function, call.operands)
                jax.block_until_ready(starts[policy.value]())
            seconds = interleaved_seconds(starts, settings.turns, settings.turn_ms / 1e3)
            clocks = {policy.value: simulated(call, policy) for policy in Policy}
            for policy in Policy:
                name = policy.value
                yield {
                    **{"kind": kind, "kv_heads": kv_heads, "order": name, "ms": seconds[name] * 1e3},
                    "of_plain": seconds[name] / seconds["plain"],
                    "simulated_of_plain": clocks[name] / clocks["plain"],
                }


def simulated(call: Call, policy: Policy) -> int:
    """Clocks of the call's table on the multiprocessors of an H200."""
    table = forward_call(call.problem, policy=policy).table(call.operands)
    return simulate(np.asarray(table.clocks), HOPPER.sms).makespan


def run(settings: Settings, out: Path | None = None) -> list[dict[str, Any]]:
    """Measures, prints each figure as it comes, and writes JSON after every figure."""

    def text_of(one: dict[str, Any]) -> str:
        return (
            f"{one['kind']}, {settings.heads} heads over {one['kv_heads']}, {one['order']}: {one['ms']:.3f} ms, "
            f"{one['of_plain']:.3f} of plain; simulated {one['simulated_of_plain']:.3f}"
        )

    return report(measure(settings), text_of, settings, out)


def main(argv: list[str]) -> None:
    """Measure what the flags say."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    run(settings_of_flags(Settings), Path(flags.FLAGS.out) if flags.FLAGS.out else None)


if __name__ == "__main__":
    define_flags(Settings)
    app.run(main)
