"""How long planning one call takes: arguments, choice of implementation, and both schedules, on the host.

The call has many packed documents whose ids are known when it is traced, so everything is made while tracing. A
fresh plan is one for ids never seen before; a repeated plan is for the same ids in a new array, and finds the schedule
kept. Figures are processor time of the one thread that plans.

    python -m benchmarks.planning --tokens=131072 --documents=500
"""

import json
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import app, flags

from jax_fa4 import dispatch
from jax_fa4.arguments import read_call
from jax_fa4.cost import ARCHITECTURES
from jax_fa4.problem import AttentionOperands, AttentionProblem
from jax_fa4.schedule.order import WorkTable, backward_table, forward_table

ROW_TILE, COLUMN_TILE = 128, 128


def packed_ids(tokens: int, documents: int, seed: int) -> np.ndarray:
    """Segment ids (1, tokens) of that many documents of random lengths, each at least one token long."""
    starts = np.sort(np.random.default_rng(seed).choice(tokens - 1, documents - 1, replace=False)) + 1
    ids = np.zeros((1, tokens), np.int32)
    ids[0, starts] = 1
    return np.cumsum(ids, axis=1, dtype=np.int32)


def plan(segment_ids: np.ndarray, heads: int, architecture: str) -> tuple[str, WorkTable, WorkTable]:
    """Everything that is decided when a call is traced: the implementation, and the schedules of both passes."""
    operand = jax.ShapeDtypeStruct((*segment_ids.shape, heads, 128), "bfloat16")
    problems: list[AttentionProblem] = []

    def read(query: jax.Array, key: jax.Array, value: jax.Array) -> None:
        problems.append(read_call(query, key, value, segment_ids=segment_ids, is_causal=True).problem)

    jax.eval_shape(read, operand, operand, operand)
    target = dispatch.read_target(architecture)
    chosen = dispatch.run(dispatch.read_names(None), problems[0], target, lambda chosen, _: chosen.name)
    arguments = (problems[0], AttentionOperands(), ROW_TILE, COLUMN_TILE, ARCHITECTURES[architecture])
    return chosen, forward_table(*arguments), backward_table(*arguments)


def seconds_to_plan(segment_ids: np.ndarray, heads: int, architecture: str) -> float:
    """Processor time of one plan: it keeps one core busy, and the machine's other work does not count."""
    started = time.process_time()
    plan(segment_ids, heads, architecture)
    return time.process_time() - started


def measure(tokens: int, documents: int, heads: int, architecture: str, repeats: int, seed: int) -> dict[str, float]:
    """Median milliseconds of a fresh and of a repeated plan; the first of all is left out, as it imports modules."""
    fresh, repeated = [], []
    for repeat in range(repeats + 1):
        ids = packed_ids(tokens, documents, seed + repeat)
        fresh.append(seconds_to_plan(ids, heads, architecture))
        repeated.append(seconds_to_plan(ids.copy(), heads, architecture))
    return {
        "fresh_milliseconds": 1e3 * float(np.median(fresh[1:])),
        "repeated_milliseconds": 1e3 * float(np.median(repeated[1:])),
    }


def define_flags() -> None:
    """Flags of the program; not defined on import, so that a test can import several benchmarks."""
    flags.DEFINE_integer("tokens", 131072, "Tokens in the one packed row.", lower_bound=1)
    flags.DEFINE_integer("documents", 500, "Documents in it.", lower_bound=1)
    flags.DEFINE_integer("heads", 8, "Query heads.", lower_bound=1)
    flags.DEFINE_integer("repeats", 9, "Plans to time of each kind.", lower_bound=1)
    flags.DEFINE_integer("seed", 0, "Seed of the documents' lengths.")
    flags.DEFINE_enum("architecture", "sm_100", [*ARCHITECTURES], "GPU to make the schedules for.")
    flags.DEFINE_string("out", None, "File to write the figures to, as JSON.")


def main(arguments: list[str]) -> None:
    """Measure with the sizes of the flags, print, and write the figures."""
    if len(arguments) > 1:
        raise app.UsageError(f"unexpected arguments {arguments[1:]}; sizes are flags, such as --tokens=4096")
    names = ("tokens", "documents", "heads", "architecture")
    sizes: dict[str, Any] = {name: flags.FLAGS[name].value for name in names}
    figures = measure(**sizes, repeats=flags.FLAGS.repeats, seed=flags.FLAGS.seed)
    print("planning", ", ".join(f"{name} {value}" for name, value in sizes.items()))
    for name, value in figures.items():
        kind, unit = name.split("_")
        print(f"  {kind:10s}{value:8.2f} {unit}")
    if flags.FLAGS.out:
        path = Path(flags.FLAGS.out)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"benchmark": "planning", **sizes, **figures}, indent=1) + "\n")


if __name__ == "__main__":
    define_flags()
    app.run(main)
