"""The Hopper forward on a GPU against cuDNN through jax.nn: dense, causal and packed, taking turns in one process.

    python -m benchmarks.hopper_forward_gpu [--out FILE] [--lengths 2048,8192,16384] [--head_dims 128,64]

FLOP are 4 * B * N * T * S * D, half of it for causal masks, and for packed rows what the documents' own causal
triangles hold. Dense cases have 16k tokens and a hidden size of 2048; packed ones 4 rows of 8192 tokens, 16 heads of
128, causal, documents of log-normal lengths, whose ids are known when the call is traced ("ids") or not ("traced ids").
cuDNN gets the same mask as a dense one ("cudnn, mask").
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from jax_fa4 import arguments
from jax_fa4.ffi.hopper_forward import hopper_forward

TOKENS, HIDDEN = 16384, 2048
PACKED_ROWS, PACKED_LENGTH, PACKED_HEADS = 4, 8192, 16

flags.DEFINE_string("out", None, "JSON file for the figures")
flags.DEFINE_list("lengths", ["2048", "8192", "16384"], "lengths of the dense cases")
flags.DEFINE_list("head_dims", ["128", "64"], "head dimensions of the dense cases")
flags.DEFINE_list("medians", ["600", "4000"], "median document lengths of the packed cases")
flags.DEFINE_integer("repeats", 7, "turns of each candidate")
FLAGS = flags.FLAGS

Function = Callable[..., Any]


def interleaved_seconds(candidates: dict[str, Function], tensors: tuple[jax.Array, ...]) -> dict[str, float]:
    """Median seconds of a call of each, in turns of about 30 ms."""
    calls = {}
    for name, function in candidates.items():
        jax.block_until_ready(function(*tensors))
        start = time.perf_counter()
        jax.block_until_ready(function(*tensors))
        calls[name] = max(3, int(0.03 / (time.perf_counter() - start)))
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(FLAGS.repeats):
        for name, function in candidates.items():
            start = time.perf_counter()
            for _ in range(calls[name]):
                result = function(*tensors)
            jax.block_until_ready(result)
            seconds[name].append((time.perf_counter() - start) / calls[name])
    return {name: float(np.median(times)) for name, times in seconds.items()}


def ours(**options: Any) -> Function:
    """The kernel's output for query, key, value."""

    def function(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        call = arguments.read_call(query, key, value, **options)
        return hopper_forward(call.problem, call.operands)[0]

    return jax.jit(function)


def cudnn(**options: Any) -> Function:
    """jax.nn on cuDNN."""
    return jax.jit(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, implementation="cudnn", **options))


def random_tensors(batch: int, length: int, heads: int, head_dim: int) -> tuple[jax.Array, ...]:
    """Query, key and value."""
    shape = (batch, length, heads, head_dim)
    return tuple(jax.random.normal(key, shape, jnp.bfloat16) for key in jax.random.split(jax.random.key(0), 3))


def dense_case(head_dim: int, length: int, is_causal: bool) -> tuple[str, float, dict[str, float]]:
    """Name, FLOP and seconds of one dense case."""
    batch, heads = TOKENS // length, HIDDEN // head_dim
    candidates = {"jax_fa4": ours(is_causal=is_causal), "cudnn": cudnn(is_causal=is_causal)}
    flop = 4 * batch * heads * length**2 * head_dim / (2 if is_causal else 1)
    name = f"d{head_dim} {'causal' if is_causal else 'full'} {length}"
    return name, flop, interleaved_seconds(candidates, random_tensors(batch, length, heads, head_dim))


def documents(median: int) -> list[list[int]]:
    """Document lengths of each packed row."""
    rng, rows = np.random.default_rng(0), []
    for _ in range(PACKED_ROWS):
        left, lengths = PACKED_LENGTH, []
        while left:
            lengths.append(int(min(left, max(16, rng.lognormal(np.log(median), 1.0)))))
            left -= lengths[-1]
        rows.append(lengths)
    return rows


def packed_case(median: int) -> tuple[str, float, dict[str, float]]:
    """Name, FLOP and seconds of one packed case."""
    rows, head_dim = documents(median), HIDDEN // PACKED_HEADS
    ids = np.stack([np.repeat(np.arange(len(lengths)), lengths) for lengths in rows]).astype(np.int32)
    traced_ids = jnp.asarray(ids)
    mask = (traced_ids[:, None, :, None] == traced_ids[:, None, None, :]).block_until_ready()
    candidates = {
        "jax_fa4, ids": ours(is_causal=True, segment_ids=ids),
        "jax_fa4, traced ids": ours(is_causal=True, segment_ids=traced_ids),
        "jax_fa4, dense causal": ours(is_causal=True),
        "cudnn, mask": cudnn(is_causal=True, mask=mask),
        "cudnn, dense causal": cudnn(is_causal=True),
    }
    flop = sum(2.0 * length**2 * head_dim * PACKED_HEADS for lengths in rows for length in lengths)
    tensors = random_tensors(PACKED_ROWS, PACKED_LENGTH, PACKED_HEADS, head_dim)
    return f"packed, median {median}", flop, interleaved_seconds(candidates, tensors)


def main(argv: list[str]) -> None:
    """Run every case and print a line for each candidate."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    print(jax.__version__, jax.devices()[0].device_kind)
    rows = []
    cases: list[Callable[[], tuple[str, float, dict[str, float]]]] = [
        lambda d=int(d), s=int(s), c=causal: dense_case(d, s, c)  # type: ignore[misc]
        for d in FLAGS.head_dims
        for causal in (False, True)
        for s in FLAGS.lengths
    ]
    cases += [lambda m=int(m): packed_case(m) for m in FLAGS.medians]  # type: ignore[misc]
    for case in cases:
        name, flop, seconds = case()
        for candidate, time_taken in seconds.items():
            tflops = flop / time_taken / 1e12
            rows.append({"case": name, "candidate": candidate, "ms": time_taken * 1e3, "tflops": tflops})
            print(f"{name:24s} {candidate:24s} {time_taken * 1e3:8.3f} ms {tflops:7.1f} TFLOP/s", flush=True)
    if FLAGS.out:
        Path(FLAGS.out).write_text(json.dumps({"rows": rows}, indent=1))


if __name__ == "__main__":
    app.run(main)
