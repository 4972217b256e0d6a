"""The Blackwell forward on the emulated GPU against float64, with the checks of order on. No silicon has run it.

The sample here takes seconds. The grid, every option with every head dimension under several seeds and orders of
completion, is marked slow.
"""

from __future__ import annotations

import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jax_fa4
from jax_fa4 import arguments, emulator
from jax_fa4.ffi import blackwell_forward
from tests.kernels.forward_checks import compare, draw, drawn_options

pytest.importorskip("cutlass", reason="not all of these kernels are in the wheel; nvidia-cutlass-dsl builds them")
pytestmark = pytest.mark.usefixtures("blackwell")


POLYNOMIAL_ERROR = 8.6e-5  # of degree 3 (docs/exp2_polynomials.py), which computes a share of the exponentials


def attend(tensors: Any, **options: Any) -> Any:
    """The public function on the emulated GPU."""
    return jax_fa4.attention(*tensors, return_residual=True, implementation="emulated", **options)


def check(tensors: Any, seed: int = 0, completion: str = "random", **options: Any) -> None:
    emulator.set_options(seed=seed, completion=completion)
    out, lse = attend(tensors, **options)
    compare(arguments.read_call(*tensors, **options), out, lse, POLYNOMIAL_ERROR)


@pytest.mark.parametrize("completion", ["random", "eager", "lazy"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("is_causal", [True, False])
def test_pipeline_under_every_order(head_dim: int, is_causal: bool, completion: str) -> None:
    """Causal: a CTA for two tiles of queries; dense with head_dim 128: a pair for four."""
    tensors = draw(1, (1, 300, 2, head_dim), 640, 1, "bfloat16")
    for seed in range(2):
        check(tensors, seed, completion, is_causal=is_causal, causal_alignment="bottom_right")


@pytest.mark.parametrize(("query_length", "key_length"), [(1, 1), (129, 300), (600, 129)])
def test_lengths_that_divide_nothing(query_length: int, key_length: int) -> None:
    tensors = draw(2, (2, query_length, 2, 128), key_length, 1, "bfloat16")
    check(tensors, is_causal=True, causal_alignment="bottom_right")


@pytest.mark.parametrize("spread", [0.0, 1000.0])
def test_scores_of_every_size(spread: float) -> None:
    check(draw(3, (1, 300, 1, 128), 300, 1, "bfloat16", spread), is_causal=True)


@pytest.mark.parametrize("rise", [7.9, 8.1])
def test_maxima_that_rise_by_about_the_slack(rise: float) -> None:
    """Each tile of keys raises the row's maximum by `rise` powers of two: the lazy rescaling's two cases."""
    query, key, value = draw(4, (1, 130, 1, 64), 512, 1, "bfloat16")
    unit = jnp.zeros(64).at[0].set(1.0)
    query = jnp.broadcast_to(unit, query.shape).astype(query.dtype)
    heights = jnp.arange(4).repeat(128)[None, :, None, None] * rise / np.log2(np.e) * 8.0
    check((query, (0.1 * key).at[..., :1].set(heights.astype(key.dtype)), value))


def test_lengths_hide_nan() -> None:
    query, key, value = draw(7, (2, 300, 2, 128), 300, 2, "bfloat16")
    options = {"key_value_seq_lengths": np.array([300, 150]), "query_seq_lengths": np.array([0, 299])}
    clean = arguments.read_call(query, key, value, **options)
    poisoned = query, key.at[1, 150:].set(jnp.nan), value.at[1, 150:].set(jnp.nan)
    compare(clean, *attend(poisoned, **options))


@pytest.mark.parametrize("is_sorted", [True, False])
def test_segments(is_sorted: bool) -> None:
    ids = np.random.default_rng(6).integers(0, 4, (2, 200)).astype(np.int32)
    ids = np.sort(ids, axis=-1) if is_sorted else ids
    check(draw(6, (2, 200, 2, 128), 200, 1, "bfloat16"), segment_ids=ids, is_causal=is_sorted)


@pytest.mark.parametrize("query_length", [1, 3])
def test_heads_that_share_keys_are_packed(query_length: int) -> None:
    """Few queries of many heads: the heads of a group are rows of one tile, so that keys are read once."""
    tensors = draw(11, (3, query_length, 64, 64), 200, 1, "bfloat16")
    call = arguments.read_call(*tensors, is_causal=True, causal_alignment="bottom_right")
    assert blackwell_forward.forward_call(call.problem, "sm_100f").packed
    check(tensors, is_causal=True, causal_alignment="bottom_right")


@pytest.mark.parametrize(("length", "heads"), [(1, (8, 2)), (3, (4, 1)), (2, (2, 2))], ids=str)
def test_parts_have_the_queries_of_their_batch_row(length: int, heads: tuple[int, int]) -> None:
    """Queries are copied for each part, and heads turned, since these kernels read no other layout."""
    check(draw(6, (2, length, heads[0], 64), 300, heads[1], "bfloat16"), key_splits=3)


def test_ids_of_keys_past_the_last_that_is_seen() -> None:
    """The kernel leaves such keys out; the ids of the next batch row must not move."""
    ids = [np.random.default_rng(12).integers(0, 4, (2, length)).astype(np.int32) for length in (100, 103)]
    check(draw(12, (2, 100, 2, 64), 103, 1, "bfloat16"), segment_ids=tuple(ids), is_causal=True)


def test_windows() -> None:
    check(draw(8, (1, 300, 1, 64), 300, 1, "bfloat16"), local_window_size=(100, 57))


def test_repeated_calls_are_bitwise_equal() -> None:
    tensors = draw(9, (1, 300, 2, 128), 600, 1, "bfloat16")
    results = []
    for seed in range(3):
        emulator.set_options(seed=seed)
        results.append(b"".join(np.asarray(one).tobytes() for one in attend(tensors)))
    assert len(set(results)) == 1


def test_compute_capability_10_3() -> None:
    """Its kernel takes row maxima with the loads from tensor memory, and emulates no exponentials."""
    with jax_fa4.target("sm_103"):
        tensors = draw(10, (1, 300, 1, 128), 500, 1, "bfloat16")
        for completion in ("random", "lazy"):
            check(tensors, completion=completion, is_causal=True, causal_alignment="bottom_right")


HEAD_DIMS = [(64, 64), (40, 64), (96, 96), (72, 88), (128, 128), (104, 128), (192, 128), (168, 96)]
LENGTHS = [(1, 77), (255, 256), (300, 130), (130, 515)]
MASKS: dict[str, dict[str, Any]] = {
    "dense": {},
    "causal": {"is_causal": True},
    "bottom_right": {"is_causal": True, "causal_alignment": "bottom_right"},
    "window": {"local_window_size": (70, 20)},
    "left_window": {"local_window_size": (33, None), "causal_alignment": "bottom_right"},
    "lengths": {"key_value_seq_lengths": np.array([60, 0])},
    "segments": {"segments": True},
    "scattered_segments": {"segments": False, "is_causal": True},
    "cap": {"is_causal": True, "logits_soft_cap": 5.0},
    "sinks": {"sinks": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_grid(dims: tuple[int, int], mask: str, lengths: tuple[int, int]) -> None:
    """320 problems, each under two seeds and orders of completion; dtypes, heads and spreads are drawn."""
    number = sum(HEAD_DIMS.index(dims) * 7 + one for one in lengths) + len(mask)
    dtype = ("bfloat16", "float16")[number % 2]
    heads, kv_heads = ((2, 2), (4, 2), (3, 1))[number % 3]
    tensors = draw(
        number, (2, lengths[0], heads, dims[0]), lengths[1], kv_heads, dtype, (1.0, 4.0)[number % 5 == 0], dims[1]
    )
    options = drawn_options(MASKS[mask], number, lengths, heads)
    for seed, completion in itertools.product((number, number + 1), ("random", "lazy")):
        check(tensors, seed, completion, **options)
