"""Packed rows with the document lengths of real data, few queries against a long cache, and what planning takes.

    python -m benchmarks.packed --kinds=training,decode,planning --out=out/packed.json --plot=out/packed.png

`training`: causal rows filled with documents, ours by a plan, by traced ids and by known ids against the libraries of
`benchmarks.attention`. Lengths: of the Python standard library's files; of the Pile, by the sizes its paper publishes;
log-normal ones. Tokens per second, and TFLOP/s of visible pairs as a share of ours on dense causal rows, which take
their turns with the others: a GPU at its power limit is slower after work that heats it.
`decode`: one query, keys in parts, against the rates at which a large array is copied, a large array is read, and the
keys are. `planning`: ids to plan, on the device.

A figure is the median over turns. The picture is of the schedule of each training case, simulated on an H200.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from rich.console import Console

import jax_fa4
from benchmarks.attention import (
    define_flags,
    interleaved_seconds,
    plain_console,
    report,
    settings_of_flags,
    started,
)
from benchmarks.candidates import (
    Candidate,
    NotMeasuredError,
    Start,
    all_candidates,
    installed,
    start_in_jax,
)
from benchmarks.cases import PASSES, Case, packed_case

KINDS = ("training", "decode", "planning")
BYTES_PER_TOKEN = 4  # of English text and code, about
DENSE = "jax_fa4, dense causal rows"
COPY, READ = "copy of a large array", "read of a large array"

# The Pile (arXiv 2101.00027, table 1): effective size in GiB, and the mean size of a document in KiB, by component.
PILE = {
    "Pile-CC": (227.12, 4.33),
    "PubMed Central": (180.55, 30.55),
    "Books3": (151.44, 538.36),
    "OpenWebText2": (125.54, 3.85),
    "ArXiv": (112.42, 46.61),
    "Github": (95.16, 5.25),
    "FreeLaw": (76.73, 15.06),
    "Stack Exchange": (64.39, 2.16),
    "USPTO Backgrounds": (45.81, 4.08),
    "PubMed Abstracts": (38.53, 1.30),
    "Gutenberg (PG-19)": (27.19, 398.73),
    "OpenSubtitles": (19.47, 30.48),
    "Wikipedia (en)": (19.13, 1.11),
    "DM Mathematics": (15.49, 8.00),
    "Ubuntu IRC": (11.03, 545.48),
    "BookCorpus2": (9.45, 369.87),
    "EuroParl": (9.17, 68.87),
    "HackerNews": (7.80, 4.92),
    "YoutubeSubtitles": (7.47, 22.55),
    "PhilPapers": (4.76, 73.37),
    "NIH ExPorter": (3.79, 2.11),
    "Enron Emails": (1.76, 1.78),
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """Sizes; the defaults are those of docs/performance.md."""

    kinds: tuple[str, ...] = KINDS
    passes: tuple[str, ...] = PASSES
    lengths: tuple[str, ...] = ("standard library", "the Pile", "600", "4000")  # a number: log-normal of that median
    candidates: tuple[str, ...] = ()  # empty: all that are installed
    implementation: str | None = None
    rows: int = 4
    row_length: int = 8192
    heads: int = 16
    head_dim: int = 128
    cache: int = 32768
    decode_heads: int = 64
    decode_kv_heads: int = 8
    parts: tuple[int, ...] = (1, 8, 16, 32)
    copied_bytes: int = 1 << 32  # far more than a cache holds: copying and reading them tells the memory's rates
    planned_tokens: tuple[int, ...] = (8192, 32768)
    turns: int = 7
    turn_ms: float = 30.0


def lengths_of_the_standard_library(rng: np.random.Generator) -> Iterator[int]:
    """Tokens of Python's own files, in random order, again and again."""
    folder = Path(sysconfig.get_path("stdlib"))
    sizes = sorted(path.stat().st_size for path in folder.glob("*.py")) or [BYTES_PER_TOKEN]
    while True:
        yield from (max(int(size) // BYTES_PER_TOKEN, 1) for size in rng.permutation(sizes))


def lengths_of_the_pile(rng: np.random.Generator) -> Iterator[int]:
    """Tokens of documents of the Pile: a component as often as it has documents, each of the component's mean size."""
    effective, mean = np.array(list(PILE.values())).T
    share = (effective / mean) / (effective / mean).sum()
    while True:
        yield max(int(rng.choice(mean, p=share) * 1024 / BYTES_PER_TOKEN), 1)


def training_case(kind: str, settings: Settings) -> Case:
    """Rows filled with documents; the last of a row is cut."""
    if kind.isdigit():
        return packed_case(int(kind), settings.rows, settings.row_length, settings.heads, settings.head_dim)
    lengths = {"standard library": lengths_of_the_standard_library, "the Pile": lengths_of_the_pile}[kind]
    source, documents = lengths(np.random.default_rng(0)), []
    for _ in range(settings.rows):
        left, row = settings.row_length, []
        while left:
            row.append(min(left, next(source)))
            left -= row[-1]
        documents.append(tuple(row))
    heads = settings.heads
    return Case(settings.rows, settings.row_length, heads, heads, settings.head_dim, True, tuple(documents))


def by_plan(implementation: str | None) -> Candidate:
    """`jax_fa4.attention` with traced ids that were planned before: a layer's share is not counted."""

    def candidate(case: Case, passes: str) -> Start:
        if case.documents is None:
            raise NotMeasuredError("it is for packed rows")
        shape: dict[str, Any] = {"heads": (case.heads, case.kv_heads), "head_dim": case.head_dim}
        options: dict[str, Any] = {"is_causal": True, "implementation": implementation}
        plan = jax_fa4.plan_segments(jnp.asarray(case.segment_ids), **shape, **options)

        def attend(query: jax.Array, key: jax.Array, value: jax.Array, plan: jax_fa4.SegmentPlan) -> jax.Array:
            return jax_fa4.attention(query, key, value, segment_ids=plan, **options)

        return start_in_jax(attend, case, passes, plan)

    return candidate


def of_cudnn_packed(case: Case, passes: str) -> Start:
    """cuDNN's packed form, by offsets of documents; JAX has it in a private module only."""
    from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention

    if case.documents is None or jax.default_backend() != "gpu":
        raise NotMeasuredError("it is for packed rows on a GPU")
    most = max(map(len, case.documents))
    sizes = np.zeros((case.batch, most), np.int32)
    offsets = np.zeros((case.batch, most + 1), np.int32)
    for row, documents in enumerate(case.documents):
        sizes[row, : len(documents)] = documents
        offsets[row, 1:] = case.length
        offsets[row, 1 : len(documents) + 1] = np.cumsum(documents)
    lengths, places = jnp.asarray(sizes), jnp.asarray(offsets)

    def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> Any:
        return dot_product_attention(
            *(query, key, value),
            q_seqlen=lengths,
            kv_seqlen=lengths,
            q_offsets=places,
            kv_offsets=places,
            mask_type=MaskType.CAUSAL,
            scale=case.head_dim**-0.5,
        )

    return start_in_jax(attend, case, passes)


def training(settings: Settings, console: Console) -> Iterator[dict[str, Any]]:
    """Every candidate on rows of every kind of lengths, and ours on dense causal rows."""
    candidates = {
        "jax_fa4, plan": by_plan(settings.implementation),
        **all_candidates(settings.implementation),
        "cuDNN, packed": of_cudnn_packed,
    }
    chosen = {
        name: candidate
        for name, candidate in candidates.items()
        if installed(name) and (not settings.candidates or name in settings.candidates)
    }
    dense_case = Case(
        settings.rows, settings.row_length, settings.heads, settings.heads, settings.head_dim, is_causal=True
    )
    ours = {DENSE: all_candidates(settings.implementation)["jax_fa4"]}
    for passes in settings.passes:
        dense_start = started(ours, dense_case, passes, console)
        for kind in settings.lengths:
            case = training_case(kind, settings)
            starts = started(chosen, case, passes, console) | dense_start
            timed = interleaved_seconds(starts, settings.turns, settings.turn_ms / 1e3)
            cases = dict.fromkeys(timed, case) | {DENSE: dense_case}
            found = {name: rates(cases[name], passes, seconds) for name, seconds in timed.items()}
            for name, one in found.items():
                one["of_dense"] = one["tflops"] / found[DENSE]["tflops"]
                yield {"case": f"{kind}, {case.name}", "passes": passes, "candidate": name, **one}


def rates(case: Case, passes: str, seconds: float) -> dict[str, float]:
    """Milliseconds, tokens per second and TFLOP/s of visible pairs."""
    tokens = case.batch * case.length / seconds
    return {"ms": seconds * 1e3, "tokens_per_second": tokens, "tflops": case.flop(passes) / seconds / 1e12}


CHAIN = 10  # calls in one program, each waiting for the one before, so that the host's time is hidden


def chained(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """`CHAIN` calls of a function on what the last one gave and the same further operands, in one program."""

    def run(first: jax.Array, *others: jax.Array) -> jax.Array:
        for _ in range(CHAIN):
            first = function(first, *others)
        return first

    return jax.jit(run)


def decode(settings: Settings, console: Console) -> Iterator[dict[str, Any]]:
    """One query against a cache, its keys in some numbers of parts; and a plain read of as many bytes."""
    head_dim = settings.head_dim
    seeds = jax.random.split(jax.random.key(0), 3)
    query = jax.random.normal(seeds[0], (1, 1, settings.decode_heads, head_dim), jnp.bfloat16)
    shape = (1, settings.cache, settings.decode_kv_heads, head_dim)
    key, value = (jax.random.normal(seed, shape, jnp.bfloat16) for seed in seeds[1:])

    def attend(query: jax.Array, key: jax.Array, value: jax.Array, *, parts: int | None) -> jax.Array:
        return jax_fa4.attention(
            *(query, key, value),
            is_causal=True,
            causal_alignment="bottom_right",
            key_splits=parts,
            implementation=settings.implementation,
        )

    def read(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        """A sum over keys and values that depends on the query, so that it is done anew in each turn."""
        total = (key + query[0, 0, 0, 0]).sum(dtype=jnp.float32) + (value + query[0, 0, 0, 0]).sum(dtype=jnp.float32)
        return query + (total * 1e-9).astype(query.dtype)

    functions = {"read by XLA": read} | {
        f"{'chosen' if parts is None else parts} parts": functools.partial(attend, parts=parts)
        for parts in (None, *settings.parts)
    }
    tensors = query, key, value
    starts = {name: functools.partial(chained(function), *tensors) for name, function in functions.items()}
    large = jnp.ones(settings.copied_bytes // 2, jnp.bfloat16)
    starts[COPY] = functools.partial(jax.jit(jnp.copy), large)
    starts[READ] = functools.partial(jax.jit(functools.partial(jnp.sum, dtype=jnp.float32)), large)
    seconds = interleaved_seconds(started_twice(starts, console), settings.turns, settings.turn_ms / 1e3)
    moved = 2 * key.nbytes
    memory = {name: times * large.nbytes / seconds.pop(name) / 1e12 for name, times in ((COPY, 2), (READ, 1))}
    for name, rate in memory.items():
        yield {"case": "decode", "candidate": name, "terabytes_per_second": rate}
    for name, taken in seconds.items():
        taken /= CHAIN
        rate = moved / taken / 1e12
        yield {
            "case": "decode",
            "candidate": name,
            "ms": taken * 1e3,
            "terabytes_per_second": rate,
            "of_copy": rate / memory[COPY],
            "of_read": rate / memory[READ],
        }


def started_twice(starts: Mapping[str, Start], console: Console) -> dict[str, Start]:
    """Those that run, each called twice."""
    found = {}
    for name, start in starts.items():
        try:
            for _ in range(2):
                jax.block_until_ready(start())
            found[name] = start
        except Exception as error:  # others are still measured
            console.print(f"{name} fails: {type(error).__name__}: {str(error)[:300]}")
    return found


def planning(settings: Settings, console: Console) -> Iterator[dict[str, Any]]:
    """Ids to plan on the device, one row of so many tokens, with and without work tables."""
    for tokens in settings.planned_tokens:
        case = training_case("600", dataclasses.replace(settings, rows=1, row_length=tokens))
        ids = jnp.asarray(case.segment_ids)
        tables = {"heads": settings.heads, "head_dim": settings.head_dim, "implementation": settings.implementation}

        def next_ids(ids: jax.Array, options: Mapping[str, Any]) -> jax.Array:
            """The same ids, after all of a plan is known."""
            plan = jax_fa4.plan_segments(ids, is_causal=True, **options)
            # The barrier keeps the whole plan alive, of which one number each is read.
            leaves = jax.lax.optimization_barrier(jax.tree.leaves(plan))
            known = [leaf.ravel()[0].astype(jnp.int32) for leaf in leaves]
            return ids + jnp.minimum(functools.reduce(jnp.minimum, known) + 2, 0)

        starts = {
            name: functools.partial(chained(functools.partial(next_ids, options=options)), ids)
            for name, options in {"intervals": {}, "intervals and tables": tables}.items()
        }
        timed = interleaved_seconds(started_twice(starts, console), settings.turns, settings.turn_ms / 1e3)
        for name, seconds in timed.items():
            yield {"case": f"planning {tokens} tokens", "candidate": name, "ms": seconds / CHAIN * 1e3}


def draw(settings: Settings, path: Path) -> None:
    """The schedule of each training case's forward, simulated on an H200, one below the other; idle time is red."""
    from jax_fa4 import arguments
    from jax_fa4.cost import ARCHITECTURES
    from jax_fa4.problem import AttentionOperands, AttentionProblem
    from jax_fa4.schedule import plot
    from jax_fa4.schedule.order import forward_table
    from jax_fa4.schedule.simulate import simulate

    hopper = ARCHITECTURES["sm_90"]
    figure = plot.new_figure(9, 2.4 * len(settings.lengths))
    axes = figure.subplots(len(settings.lengths), 1, squeeze=False)[:, 0]
    for one, kind in zip(axes, settings.lengths, strict=True):
        case = training_case(kind, settings)
        shape = jax.ShapeDtypeStruct((case.batch, case.length, case.heads, case.head_dim), jnp.bfloat16)
        ids = case.segment_ids
        problems: list[AttentionProblem] = []

        def read(*tensors: Any, ids: Any = ids, problems: Any = problems) -> None:
            problems.append(arguments.read_call(*tensors, segment_ids=ids, is_causal=True).problem)

        jax.eval_shape(read, shape, shape, shape)
        table = forward_table(problems[0], AttentionOperands(), 192, 80, hopper)
        title = f"{kind}, {case.name}"
        plot.draw_gantt(one, simulate(table.clocks, hopper.sms), plot.item_lengths(table), title=title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


MEASURES = {"training": training, "decode": decode, "planning": planning}


def run(settings: Settings, out: Path | None = None, plot: Path | None = None) -> list[dict[str, Any]]:
    """Measures, prints each figure as it comes, writes JSON after every figure, and draws."""

    def text_of(one: dict[str, Any]) -> str:
        label = ", ".join(str(one[name]) for name in ("case", "passes", "candidate") if name in one)
        numbers = (f"{value:.4g} {name}" for name, value in one.items() if isinstance(value, float))
        return f"{label}: {', '.join(numbers)}"

    console = plain_console()
    measured = itertools.chain.from_iterable(MEASURES[kind](settings, console) for kind in settings.kinds)
    figures = report(measured, text_of, settings, out)
    if plot is not None:
        draw(settings, plot)
    return figures


def main(argv: list[str]) -> None:
    """Measure what the flags say."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    paths = (Path(one) if one else None for one in (flags.FLAGS.out, flags.FLAGS.plot))
    run(settings_of_flags(Settings), *paths)


if __name__ == "__main__":
    define_flags(Settings)
    app.run(main)
