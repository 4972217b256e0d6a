"""The Blackwell forward in the emulator against float64, with the race checks on.

No Blackwell GPU has run it. The sample here takes seconds; the grid, every option with every head dimension under
several seeds and orders of completion, is marked slow.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jax_fa4 import arguments, emulator
from jax_fa4.ffi.blackwell_forward import blackwell_forward
from tests.kernels.forward_checks import compare, draw, in_float64

pytest.importorskip("cutlass", reason="not all of these kernels are in the wheel; nvidia-cutlass-dsl builds them")


def check(driver: str, tensors: Any, seed: int = 0, completion: str = "random", **options: Any) -> None:
    emulator.set_options(seed=seed, completion=completion)
    call = arguments.read_call(*tensors, **options)
    compare(call, *blackwell_forward(call.problem, call.operands, driver=driver))


@pytest.mark.parametrize("completion", ["random", "eager", "lazy"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_pipeline_under_every_order(blackwell: str, head_dim: int, completion: str) -> None:
    tensors = draw(1, (1, 512, 2, head_dim), 640, 1, "bfloat16", 1.0)
    for seed in range(3):
        check(blackwell, tensors, seed, completion, is_causal=True, causal_alignment="bottom_right")


@pytest.mark.parametrize(
    ("query_length", "key_length", "is_causal"), [(1, 1, False), (129, 1000, True), (600, 129, True), (256, 256, False)]
)
def test_shapes(blackwell: str, query_length: int, key_length: int, is_causal: bool) -> None:
    tensors = draw(2, (2, query_length, 2, 128), key_length, 1, "bfloat16", 1.0)
    check(blackwell, tensors, is_causal=is_causal, causal_alignment="bottom_right")


@pytest.mark.parametrize("spread", [0.0, 30.0, 1000.0])
def test_scores_of_every_size(blackwell: str, spread: float) -> None:
    check(blackwell, draw(3, (1, 300, 1, 128), 500, 1, "bfloat16", spread))


def test_lengths_hide_nan(blackwell: str) -> None:
    query, key, value = draw(7, (2, 400, 2, 128), 400, 2, "bfloat16", 1.0)
    poisoned = key.at[1, 150:].set(jnp.nan), value.at[1, 150:].set(jnp.nan)
    options = {"key_value_seq_lengths": np.array([400, 150]), "query_seq_lengths": np.array([0, 399])}
    call = arguments.read_call(query, *poisoned, **options)
    out, lse = blackwell_forward(call.problem, call.operands, driver=blackwell)
    exact, exact_lse = in_float64(arguments.read_call(query, key, value, **options))
    assert np.abs(np.asarray(out, np.float64) - exact).max() < 2e-2
    np.testing.assert_array_equal(np.asarray(lse) > -np.inf, exact_lse > -np.inf)


@pytest.mark.parametrize("is_sorted", [True, False])
def test_segments(blackwell: str, is_sorted: bool) -> None:
    ids = np.random.default_rng(6).integers(0, 4, (2, 300)).astype(np.int32)
    ids = np.sort(ids, axis=-1) if is_sorted else ids
    check(blackwell, draw(6, (2, 300, 2, 128), 300, 1, "bfloat16", 1.0), segment_ids=ids, is_causal=is_sorted)


def test_repeated_calls_are_bitwise_equal(blackwell: str) -> None:
    call = arguments.read_call(*draw(9, (1, 300, 2, 128), 600, 1, "bfloat16", 1.0), is_causal=False)
    results = []
    for seed in range(3):
        emulator.set_options(seed=seed)
        out, lse = blackwell_forward(call.problem, call.operands, driver=blackwell)
        results.append((np.asarray(out).tobytes(), np.asarray(lse).tobytes()))
    assert len(set(results)) == 1
