"""A sample of calls, forward and backward at small shapes, to run under a tool that watches the GPU.

    compute-sanitizer --tool=memcheck python -m tests.kernels.sanitized_sample
    python -m tests.kernels.sanitized_sample --target=sm_90 causal packed     on the emulated GPU

Each call's name is printed when its results are there and finite where they must be.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_fa4


@dataclass(frozen=True)
class Sample:
    """One call.

    Attributes:
        query, key: (batch, length, heads); values have the key's sizes.
        head_dim: of queries, keys and values.
        options: arguments of `attention`.
        ids: segment ids, a row for all of the batch; known when traced, or arguments of the compiled function.
        has_backward: whether gradients are asked for too.
    """

    query: tuple[int, int, int]
    key: tuple[int, int, int]
    head_dim: int = 64
    dtype: str = "bfloat16"
    options: dict[str, Any] = field(default_factory=dict)
    ids: tuple[int, ...] | None = None
    are_ids_traced: bool = False
    has_backward: bool = True


DOCUMENTS = (0,) * 70 + (1,) * 130 + (2,) * 33
PADDED = (-1,) * 5 + (0,) * 60 + (-1,) * 40 + (1,) * 100 + (-1,) * 28
SCATTERED = tuple((7 * place) % 5 for place in range(233))
CALLS = {
    "causal": Sample((2, 200, 2), (2, 200, 2), 128, options={"is_causal": True}),
    "float16": Sample((1, 130, 2), (1, 190, 2), 96, "float16"),
    "window": Sample((1, 233, 2), (1, 233, 1), options={"local_window_size": (50, 20)}),
    "deterministic": Sample((1, 233, 4), (1, 233, 2), options={"is_causal": True, "deterministic": True}),
    "sinks": Sample((1, 150, 2), (1, 150, 2), options={"is_causal": True, "sinks": (0.5, -1.0)}),
    "packed": Sample((1, 233, 2), (1, 233, 2), 128, options={"is_causal": True}, ids=DOCUMENTS),
    "packed, traced": Sample((1, 233, 2), (1, 233, 2), ids=DOCUMENTS, are_ids_traced=True),
    "padding, traced": Sample((2, 233, 2), (2, 233, 2), ids=PADDED, are_ids_traced=True),
    "scattered, traced": Sample((1, 233, 2), (1, 233, 2), 128, ids=SCATTERED, are_ids_traced=True),
    "many items": Sample((1, 233, 70), (1, 233, 70), options={"is_causal": True}),
    "many packed items": Sample((1, 233, 70), (1, 233, 70), 128, options={"is_causal": True}, ids=DOCUMENTS),
    "few queries in parts": Sample((2, 1, 8), (2, 700, 2), 128, options={"key_splits": 4}, has_backward=False),
}


def finite_results(sample: Sample, implementation: str) -> bool:
    """Runs a call; whether everything that rows with keys gave is finite."""
    draws = iter(jax.random.split(jax.random.key(0), 4))
    shapes = [(*size, sample.head_dim) for size in (sample.query, sample.key, sample.key, sample.query)]
    query, key, value, grad_out = (jax.random.normal(next(draws), shape, sample.dtype) for shape in shapes)
    options: dict[str, Any] = sample.options | {"implementation": implementation}
    if "sinks" in options:
        options["sinks"] = jnp.asarray(options["sinks"], jnp.float32)
    ids = None if sample.ids is None else np.broadcast_to(np.array(sample.ids, np.int32), sample.query[:2])

    def attend(ids: Any, *tensors: jax.Array) -> jax.Array:
        known = {} if ids is None else {"segment_ids": ids}
        return jax_fa4.attention(*tensors, **known, **options)

    def run(ids: Any, *tensors: jax.Array) -> Any:
        if not sample.has_backward:
            return attend(ids, *tensors)
        out, pull = jax.vjp(lambda *three: attend(ids, *three), *tensors)
        return out, pull(grad_out)

    if sample.are_ids_traced:
        results = jax.jit(run)(jnp.asarray(ids), query, key, value)
    else:
        results = jax.jit(lambda *tensors: run(ids, *tensors))(query, key, value)
    return all(bool(jnp.isfinite(one).all()) for one in jax.tree.leaves(results))


def run(names: list[str], implementation: str) -> Iterator[tuple[str, bool]]:
    """Each call of those names, and whether its results are finite."""
    for name in names:
        yield name, finite_results(CALLS[name], implementation)


def main() -> None:
    """The commands of this module's text."""
    parser = argparse.ArgumentParser(description="Runs a sample of calls.")
    parser.add_argument("names", nargs="*", metavar="name", help=f"of {', '.join(CALLS)}; none: all")
    parser.add_argument("--target", help="emulate this GPU, such as sm_90; default: run on the GPU")
    options = parser.parse_args()
    if unknown := set(options.names) - set(CALLS):
        parser.error(f"name is {sorted(unknown)[0]!r}; it takes {', '.join(CALLS)}.")
    is_emulated = options.target is not None
    with jax_fa4.target(options.target) if is_emulated else contextlib.nullcontext():
        for name, is_finite in run(options.names or list(CALLS), "emulated" if is_emulated else "fa4"):
            print(name, "ran" if is_finite else "gave NaN or infinity", flush=True)
            if not is_finite:
                raise SystemExit(1)


if __name__ == "__main__":
    main()
