"""Long causal sequences over the GPUs of one host against one of them, and whether transfers hide behind computation.

    python -m benchmarks.ring_gpu --lengths=65536 --out=out/ring.json
    python -m benchmarks.ring_gpu --cpu_devices=2 --lengths=256 --heads=2 --kv_heads=2 --head_dim=16    # to try it out

Candidates take turns in one process: `one device`; `zigzag` and `contiguous`, `ring_attention` inside `jax.shard_map`;
`jit`, `attention` under plain jit with a sharded sequence (zigzag inside, exchanged on the way in and out); `heads`,
heads split, which moves nothing and shows what splitting alone gives. A contiguous causal share cannot give more than
1.33 times on two devices: the second has three quarters of the pairs.

Of each program it is also said what its schedule has between the start and the end of each transfer, and, from a
profile, for how much of the transfers' time a kernel that computes was running on the same device.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import json
import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

import jax_fa4
from benchmarks.attention import define_flags, interleaved_seconds, settings_of_flags
from benchmarks.cases import PASSES
from jax_fa4.ffi.launch import TARGET

AXIS = "sequence"
CANDIDATES = ("one device", "zigzag", "contiguous", "jit", "heads")
WITH_OPTIONS = " with options"  # the end of a candidate's name: compiled with --compiler_options
Span = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Settings:
    """Sizes; the defaults are those of docs/performance.md."""

    lengths: tuple[int, ...] = (65536,)
    heads: int = 16
    kv_heads: int = 16
    head_dim: int = 128
    dtype: str = "bfloat16"
    devices: int = 2
    candidates: tuple[str, ...] = CANDIDATES
    passes: tuple[str, ...] = PASSES
    implementation: str | None = None
    compiler_options: tuple[str, ...] = ()  # name=value of XLA, for candidates such as "zigzag with options"
    turns: int = 7
    turn_ms: float = 60.0
    profiled_calls: int = 3  # 0: no profile
    cpu_devices: int = 0  # instead of GPUs
    texts: str = ""  # folder for the compiled programs; empty: not kept


@dataclasses.dataclass(frozen=True)
class Figure:
    """One candidate at one length and pass."""

    length: int
    passes: str
    candidate: str
    milliseconds: float
    ratio: float | None  # to one device
    tflops_per_device: float
    temporary_megabytes: float
    schedule: tuple[str, ...]  # of each transfer
    transfer_milliseconds: float | None
    hidden_milliseconds: float | None


@dataclasses.dataclass(frozen=True)
class Program:
    """A candidate, traced for what it is called with, and compiled."""

    lowered: Any
    options: dict[str, bool | str]
    arguments: tuple[Any, ...]

    @functools.cached_property
    def compiled(self) -> Any:
        """The executable."""
        return self.lowered.compile(compiler_options=self.options)

    def __call__(self) -> Any:
        """The results, which may not be there yet."""
        return self.compiled(*self.arguments)


def both_passes(attend: Callable[..., jax.Array]) -> Callable[..., Any]:
    """Output and gradients of query, key and value under a cotangent."""

    def run(query: jax.Array, key: jax.Array, value: jax.Array, grad_out: jax.Array) -> Any:
        out, pull = jax.vjp(attend, query, key, value)
        return out, pull(grad_out)

    return run


def operands(settings: Settings, length: int) -> list[jax.Array]:
    """Query, key, value and cotangent, Gaussian, (1, length, heads, head_dim), on the first device."""
    heads = (settings.heads, settings.kv_heads, settings.kv_heads, settings.heads)
    seeds = jax.random.split(jax.random.key(0), 4)
    return [
        jax.random.normal(seed, (1, length, one, settings.head_dim), settings.dtype)
        for seed, one in zip(seeds, heads, strict=True)
    ]


def program(settings: Settings, mesh: Mesh, candidate: str, passes: str, tensors: Sequence[jax.Array]) -> Program:
    """A candidate with its operands placed as it wants them."""
    options = dict(map(read_option, settings.compiler_options)) if candidate.endswith(WITH_OPTIONS) else {}
    candidate = candidate.removesuffix(WITH_OPTIONS)
    length = tensors[0].shape[1]
    attend: Callable[..., jax.Array] = functools.partial(
        jax_fa4.attention, is_causal=True, implementation=settings.implementation
    )
    spec = {"one device": None, "heads": P(None, None, AXIS)}.get(candidate, P(None, AXIS))
    if candidate == "zigzag":
        order = jax_fa4.zigzag_order(length, settings.devices)
        tensors = [jnp.take(x, order, axis=1) for x in tensors]
    if spec is not None:
        tensors = [jax.device_put(x, NamedSharding(mesh, spec)) for x in tensors]
    if candidate in ("zigzag", "contiguous"):
        local = functools.partial(
            jax_fa4.ring_attention,
            axis_name=AXIS,
            layout=candidate,
            is_causal=True,
            implementation=settings.implementation,
        )
        attend = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)
    tensors = tensors[: 3 if passes == "forward" else 4]
    run = jax.jit(attend if passes == "forward" else both_passes(attend))
    return Program(run.lower(*tensors), options, tuple(tensors))


def read_option(text: str) -> tuple[str, bool | str]:
    """An option of XLA from name=value."""
    name, _, value = text.partition("=")
    return name, {"true": True, "false": False}.get(value, value)


def schedule_of(text: str) -> list[str]:
    """For each transfer of a compiled program, in order: what lies between its start and its end."""
    found = []
    lines = text.splitlines()
    for number, line in enumerate(lines):
        started = re.match(r"\s*(?:ROOT )?%?([\w.-]+) = .*? (\S*(?:permute|gather|reduce|to-all)\S*)-start\(", line)
        if started is None:
            continue
        rest = lines[number + 1 :]
        done = re.compile(rf"-done\(.*%?{re.escape(started[1])}\b")
        end = next((place for place, one in enumerate(rest) if done.search(one)), 0)
        kernels = sum(TARGET in one for one in rest[:end])
        branches = sum(" conditional(" in one for one in rest[:end])
        found.append(f"{started[2]}: {kernels} kernels, {branches} branches")
    return found


def union(spans: Iterable[Span]) -> list[Span]:
    """The same time as spans that do not overlap, in order."""
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
    return merged


def common(first: Iterable[Span], second: Iterable[Span]) -> float:
    """For how long both go on."""
    seconds = union(second)
    return sum(
        max(0.0, min(end, other_end) - max(begin, other_begin))
        for begin, end in union(first)
        for other_begin, other_end in seconds
    )


def profiled(run: Program, calls: int) -> tuple[float, float] | None:
    """Milliseconds a call of transfers, and of these beside kernels that compute; of the device that waits the longest.

    None where the profiler sees no transfers.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready([run() for _ in range(calls)])
        files = list(Path(folder).rglob("*.xplane.pb"))
        planes = [plane for one in files for plane in jax.profiler.ProfileData.from_file(str(one)).planes]
    figures = []
    for plane in planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        events = [event for line in plane.lines if line.name.startswith("Stream") for event in line.events]
        spans = [(re.search("nccl|SendRecv|P2P", event.name), event) for event in events]
        transfers, others = (
            [(event.start_ns, event.start_ns + event.duration_ns) for is_transfer, event in spans if test(is_transfer)]
            for test in (bool, lambda one: not one)
        )
        total = sum(end - begin for begin, end in union(transfers))
        figures.append((total / calls / 1e6, common(transfers, others) / calls / 1e6))
    figures = [one for one in figures if one[0] > 0]
    return max(figures, key=lambda one: one[0] - one[1]) if figures else None


def measure(settings: Settings, console: Console) -> list[Figure]:
    """Every figure, printed as it comes."""
    mesh = Mesh(np.array(jax.devices()[: settings.devices]), (AXIS,), axis_types=(AxisType.Auto,))
    figures = []
    for length in settings.lengths:
        tensors = operands(settings, length)
        for passes in settings.passes:
            programs = {one: program(settings, mesh, one, passes, tensors) for one in settings.candidates}
            with concurrent.futures.ThreadPoolExecutor() as pool:
                list(pool.map(lambda one: one.compiled, programs.values()))
            for one in programs.values():
                jax.block_until_ready(one())
            # XLA's CPU devices may wait for each other forever where several programs with transfers are under way.
            turn_ms = 0.0 if settings.cpu_devices else settings.turn_ms
            seconds = interleaved_seconds(programs, settings.turns, turn_ms / 1e3)
            flop = 2 * length**2 * settings.head_dim * settings.heads * (1 if passes == "forward" else 3.5)
            for name, one in programs.items():
                devices = 1 if name == "one device" else settings.devices
                text, profile = one.compiled.as_text(), None
                if settings.texts:
                    Path(settings.texts).mkdir(parents=True, exist_ok=True)
                    (Path(settings.texts) / f"{length} {passes} {name}.txt").write_text(text)
                if devices > 1 and settings.profiled_calls and not settings.cpu_devices:
                    profile = profiled(one, settings.profiled_calls)
                figure = Figure(
                    length,
                    passes,
                    name,
                    seconds[name] * 1e3,
                    seconds["one device"] / seconds[name] if "one device" in seconds else None,
                    flop / seconds[name] / devices / 1e12,
                    one.compiled.memory_analysis().temp_size_in_bytes / 1e6,
                    tuple(schedule_of(text)),
                    *(profile or (None, None)),
                )
                figures.append(figure)
                show(figure, console)
    return figures


def show(figure: Figure, console: Console) -> None:
    """One figure, in a line for times and one for transfers."""
    ratio = "" if figure.ratio is None else f"{figure.ratio:.2f} times one device, "
    console.print(
        f"{figure.length} {figure.passes}, {figure.candidate}: {figure.milliseconds:.2f} ms, {ratio}"
        f"{figure.tflops_per_device:.0f} TFLOP/s a device, {figure.temporary_megabytes:.0f} MB of temporaries",
        soft_wrap=True,
    )
    profile = ""
    if figure.transfer_milliseconds is not None:
        profile = f"{figure.transfer_milliseconds:.2f} ms of transfers, {figure.hidden_milliseconds:.2f} ms hidden; "
    if figure.schedule:
        console.print(f"    {profile}" + "; ".join(figure.schedule), soft_wrap=True)


def run(settings: Settings, out: Path | None = None) -> list[Figure]:
    """Measures, prints, and writes JSON."""
    console = Console(highlight=False, markup=False)
    shape = jax.ShapeDtypeStruct((1, settings.lengths[0], settings.heads, settings.head_dim), settings.dtype)
    chosen = jax_fa4.explain(shape, shape, shape, is_causal=True, implementation=settings.implementation)
    console.print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}, implementation {chosen.implementation}")
    figures = measure(settings, console)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        facts: dict[str, Any] = {"jax": jax.__version__, "device": jax.devices()[0].device_kind}
        facts |= {"settings": dataclasses.asdict(settings), "figures": [dataclasses.asdict(one) for one in figures]}
        out.write_text(json.dumps(facts, indent=1) + "\n")
    return figures


def main(arguments: list[str]) -> None:
    """Measure what the flags say."""
    if len(arguments) > 1:
        raise app.UsageError(f"unexpected arguments {arguments[1:]}")
    settings = settings_of_flags(Settings)
    if settings.cpu_devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", settings.cpu_devices)
    if len(jax.devices()) < settings.devices:
        raise app.UsageError(f"devices is {settings.devices}, and there are {len(jax.devices())}; see --cpu_devices.")
    run(settings, Path(flags.FLAGS.out) if flags.FLAGS.out else None)


if __name__ == "__main__":
    define_flags(Settings)
    app.run(main)
