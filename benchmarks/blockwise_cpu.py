"""`blockwise` against `jax.nn.dot_product_attention` on the CPU: time of forward and backward, and memory.

Both run in one process, in turn, so that whatever else the machine does meets both; a figure is a median, a ratio is
jax.nn's median over ours. The baseline of the packed case is given the same mask, dense. Memory is the size of XLA's
temporary buffers for the compiled forward and backward pass, which nothing has to run for.

    python -m benchmarks.blockwise_cpu --cases=causal --cases=packed --repeats=5 --out=out/blockwise_cpu.json
"""

import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import jax_fa4

CASES = ("causal", "packed", "small", "memory")
HEADS, HEAD_DIM = 8, 64
SMALL = ((1, 128), (8, 128), (1, 512))  # batch, length
SMALL_REPEATS = 31


class Row(NamedTuple):
    """One comparison: seconds or bytes."""

    case: str
    unit: str
    baseline: float
    ours: float

    @property
    def ratio(self) -> float:
        """How many times the baseline's figure is ours."""
        return self.baseline / self.ours


def inputs(batch: int, length: int, seed: int) -> list[jax.Array]:
    """Query, key, value and the output's cotangent, (batch, length, HEADS, HEAD_DIM) float32."""
    keys = jax.random.split(jax.random.key(seed), 4)
    return [jax.random.normal(key, (batch, length, HEADS, HEAD_DIM)) for key in keys]


def document_ids(length: int, documents: int, seed: int, even: bool) -> np.ndarray:
    """Segment ids (1, length): documents of equal or of random lengths."""
    if even:
        starts = np.arange(1, documents) * length // documents
    else:
        starts = np.sort(np.random.default_rng(seed).choice(np.arange(1, length), documents - 1, replace=False))
    return np.searchsorted(starts, np.arange(length), side="right")[None].astype(np.int32)


def forward_and_backward(attend: Callable[..., jax.Array]) -> Any:
    """(query, key, value, cotangent, *rest) to the output and the three gradients, jitted."""

    @jax.jit
    def run(query: jax.Array, key: jax.Array, value: jax.Array, grad_out: jax.Array, *rest: jax.Array) -> Any:
        out, pull = jax.vjp(lambda *qkv: attend(*qkv, *rest), query, key, value)
        return out, pull(grad_out)

    return run


def dense(query: jax.Array, key: jax.Array, value: jax.Array, ids: jax.Array | None = None) -> jax.Array:
    """The baseline; ids become a dense mask."""
    mask = None if ids is None else (ids[:, :, None] == ids[:, None, :])[:, None]
    return jax.nn.dot_product_attention(query, key, value, mask=mask, is_causal=True, implementation="xla")


def ours(query: jax.Array, key: jax.Array, value: jax.Array, ids: jax.Array | np.ndarray | None = None) -> jax.Array:
    """`blockwise`; NumPy ids are known when the call is traced, JAX's are not."""
    return jax_fa4.attention(query, key, value, is_causal=True, segment_ids=ids, implementation="blockwise")


# A call shorter than this runs once untimed in each turn first. The dense peer leaves 11 GB of temporaries at 8192
# tokens; the call that came right after it measured twice what it takes alone (1.10 s against 0.45 s for its twin),
# while that memory went back to the system.
SETTLE_BELOW_SECONDS = 5.0


def medians(calls: dict[str, Callable[[], Any]], repeats: int, advance: Callable[[], None]) -> dict[str, float]:
    """Median seconds of each call; they take turns, after one run of each that compiles."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats + 1):
        for name, call in calls.items():
            if repeat and min(seconds[name]) < SETTLE_BELOW_SECONDS:
                jax.block_until_ready(call())
            started = time.perf_counter()
            jax.block_until_ready(call())
            seconds[name].append(time.perf_counter() - started)
            advance()
    return {name: float(np.median(times[1:])) for name, times in seconds.items()}


def time_causal(batch: int, length: int, repeats: int, seed: int, advance: Callable[[], None]) -> list[Row]:
    """Forward alone, and forward with backward."""
    arrays = inputs(batch, length, seed)
    calls: dict[str, Callable[[], Any]] = {}
    for side, attend in (("dense", dense), ("ours", ours)):
        calls[f"{side} forward"] = functools.partial(jax.jit(attend), *arrays[:3])
        calls[f"{side} forward+backward"] = functools.partial(forward_and_backward(attend), *arrays)
    times = medians(calls, repeats, advance)
    names = ("forward", "forward+backward")
    label = f"causal {length}" + (f", batch {batch}" if batch > 1 else "")
    return [Row(f"{label}, {name}", "s", times[f"dense {name}"], times[f"ours {name}"]) for name in names]


def time_packed(
    length: int, documents: int, even: bool, repeats: int, seed: int, advance: Callable[[], None]
) -> list[Row]:
    """Forward with backward, ids known when traced and not."""
    arrays, ids = inputs(1, length, seed), document_ids(length, documents, seed, even)
    traced = jnp.asarray(ids)
    baseline, of_traced = forward_and_backward(dense), forward_and_backward(ours)
    of_concrete = forward_and_backward(functools.partial(ours, ids=ids))
    calls: dict[str, Callable[[], Any]] = {
        "dense": functools.partial(baseline, *arrays, traced),
        "concrete": functools.partial(of_concrete, *arrays),
        "traced": functools.partial(of_traced, *arrays, traced),
    }
    times = medians(calls, repeats, advance)
    kind = "equal" if even else "random"
    label = f"packed {length}, {documents} documents of {kind} lengths"
    return [Row(f"{label}, {name} ids", "s", times["dense"], times[name]) for name in ("concrete", "traced")]


def temporary_bytes(attend: Callable[..., jax.Array], length: int) -> float:
    """XLA's temporary buffers of the compiled forward and backward pass."""
    shape = jax.ShapeDtypeStruct((1, length, HEADS, HEAD_DIM), jnp.float32)
    compiled = forward_and_backward(attend).lower(shape, shape, shape, shape).compile()
    return float(compiled.memory_analysis().temp_size_in_bytes)


def measure_memory(length: int, advance: Callable[[], None]) -> list[Row]:
    """Temporary bytes of a causal forward and backward pass."""
    figures = []
    for attend in (dense, ours):
        figures.append(temporary_bytes(attend, length))
        advance()
    return [Row(f"causal {length}, temporary memory", "bytes", figures[0], figures[1])]


def measure(
    cases: list[str],
    lengths: dict[str, int],
    documents: int,
    repeats: int,
    seed: int,
    advance: Callable[[], None],
) -> list[Row]:
    """All rows of the cases asked for; `advance` is called after each run."""
    rows = []
    if "causal" in cases:
        rows += time_causal(1, lengths["causal"], repeats, seed, advance)
    if "packed" in cases:
        for even in (True, False):
            rows += time_packed(lengths["packed"], documents, even, repeats, seed, advance)
    if "small" in cases:
        for batch, length in SMALL:
            rows += time_causal(batch, length, SMALL_REPEATS, seed, advance)
    if "memory" in cases:
        rows += measure_memory(lengths["memory"], advance)
    return rows


def steps(cases: list[str], repeats: int) -> int:
    """How often `measure` calls `advance`."""
    of_case = {"causal": 4 * (repeats + 1), "packed": 6 * (repeats + 1), "memory": 2}
    of_case["small"] = 4 * len(SMALL) * (SMALL_REPEATS + 1)
    return sum(of_case[case] for case in set(cases))


def show(rows: list[Row]) -> None:
    """A table on the terminal."""
    table = Table(title="blockwise against jax.nn.dot_product_attention, CPU, float32, 8 heads of 64")
    for name in ("case", "jax.nn", "blockwise", "ratio"):
        table.add_column(name, justify="left" if name == "case" else "right")
    for row in rows:
        values = [
            f"{x * 1e3:,.2f} ms" if row.unit == "s" else f"{x / 2**20:,.1f} MiB" for x in (row.baseline, row.ours)
        ]
        table.add_row(row.case, *values, f"{row.ratio:.2f}x")
    Console().print(table)


def define_flags() -> None:
    """Flags of the program; not defined on import, so that a test can import several benchmarks."""
    flags.DEFINE_multi_enum("cases", list(CASES), CASES, "What to measure; may be repeated.")
    flags.DEFINE_integer("repeats", 3, "Runs of each function; the figure is their median.", lower_bound=1)
    flags.DEFINE_integer("causal_length", 4096, "Queries and keys of the causal case.", lower_bound=1)
    flags.DEFINE_integer("packed_length", 8192, "Tokens of the packed case.", lower_bound=1)
    flags.DEFINE_integer("documents", 16, "Documents of the packed case.", lower_bound=1)
    flags.DEFINE_integer("memory_length", 16384, "Queries and keys of the memory case.", lower_bound=1)
    flags.DEFINE_integer("seed", 0, "Seed of the inputs and of the documents' lengths.")
    flags.DEFINE_string("out", None, "File to write the figures to, as JSON.")


def main(arguments: list[str]) -> None:
    """Measure what the flags ask for, print it, and write it."""
    if len(arguments) > 1:
        raise app.UsageError(f"unexpected arguments {arguments[1:]}; sizes are flags, such as --causal_length=1024")
    given = flags.FLAGS
    lengths = {"causal": given.causal_length, "packed": given.packed_length, "memory": given.memory_length}
    with Progress() as progress:
        task = progress.add_task("measuring", total=steps(given.cases, given.repeats))
        rows = measure(given.cases, lengths, given.documents, given.repeats, given.seed, lambda: progress.advance(task))
    show(rows)
    if given.out:
        Path(given.out).parent.mkdir(parents=True, exist_ok=True)
        figures = [{**row._asdict(), "ratio": row.ratio} for row in rows]
        Path(given.out).write_text(json.dumps({"benchmark": "blockwise_cpu", "rows": figures}, indent=1) + "\n")


if __name__ == "__main__":
    define_flags()
    app.run(main)
