"""CTAs of the Blackwell forward that go from item to item, on the emulated GPU against float64: barriers' phases go on
from item to item, and one item's loads run beside another's epilogue. No silicon has run it.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import numpy as np
import pytest

import jax_fa4
from jax_fa4 import arguments, emulator
from jax_fa4.ffi import blackwell_forward as wrapper
from jax_fa4.ffi import launch
from jax_fa4.kernels.blackwell.plans import Scheduling
from tests.kernels.forward_checks import compare, draw, drawn_options

pytest.importorskip("cutlass", reason="not all of these kernels are in the wheel; nvidia-cutlass-dsl builds them")
pytestmark = pytest.mark.usefixtures("blackwell")

POLYNOMIAL_ERROR = 8.6e-5  # of degree 3 (docs/exp2_polynomials.py), which computes a share of the exponentials
FORMS: tuple[Scheduling, ...] = ("persistent", "cluster")


@pytest.fixture(autouse=True)
def few_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three, so that each has several items: one CTA on each, or one pair on two of them."""
    for name in ("sm_100", "sm_103"):
        monkeypatch.setitem(wrapper.ARCHITECTURES, name, dataclasses.replace(wrapper.ARCHITECTURES[name], sms=3))


def attend(
    tensors: Any, scheduling: Scheduling, architecture: str = "sm_100f", **options: Any
) -> tuple[jax.Array, jax.Array]:
    call = arguments.read_call(*tensors, **options)
    tiles = dataclasses.replace(wrapper.tiles_of(call.problem, architecture), scheduling=scheduling)
    driver = launch.emulated_driver((10, 3) if architecture == "sm_103a" else (10, 0))
    return wrapper.blackwell_forward(call.problem, call.operands, architecture=architecture, tiles=tiles, driver=driver)


def check(
    tensors: Any,
    scheduling: Scheduling,
    seed: int = 0,
    completion: str = "random",
    architecture: str = "sm_100f",
    **options: Any,
) -> None:
    emulator.set_options(seed=seed, completion=completion)
    out, lse = attend(tensors, scheduling, architecture, **options)
    compare(arguments.read_call(*tensors, **options), out, lse, POLYNOMIAL_ERROR)


@pytest.mark.parametrize("completion", ["random", "eager", "lazy"])
@pytest.mark.parametrize(("head_dim", "is_causal"), [(64, True), (128, True), (128, False)])
@pytest.mark.parametrize("scheduling", FORMS)
def test_pipeline_under_every_order(scheduling: Scheduling, head_dim: int, is_causal: bool, completion: str) -> None:
    """Items of 0 to 3 key tiles where causal; pairs where dense."""
    tensors = draw(1, (1, 1100, 3, head_dim), 380, 1, "bfloat16")
    check(tensors, scheduling, 1, completion, is_causal=is_causal, causal_alignment="bottom_right")


@pytest.mark.parametrize("scheduling", FORMS)
def test_items_of_a_table(scheduling: Scheduling) -> None:
    """Documents of very different lengths, and rows that see nothing."""
    ids = np.repeat(np.arange(6), [3, 290, 1, 130, 70, 206])[None].repeat(2, 0).astype(np.int32)
    tensors = draw(6, (2, 700, 2, 64), 700, 1, "bfloat16")
    check(tensors, scheduling, segment_ids=ids, is_causal=True)
    check(tensors, scheduling, key_value_seq_lengths=np.array([130, 0]))


@pytest.mark.parametrize("scheduling", FORMS)
def test_head_dims_whose_outputs_are_narrower_than_queries(scheduling: Scheduling) -> None:
    check(draw(7, (1, 900, 2, 192), 300, 2, "bfloat16", value_dim=128), scheduling, is_causal=True)


@pytest.mark.parametrize("scheduling", FORMS)
def test_the_results_are_those_of_one_item_a_cta(scheduling: Scheduling) -> None:
    tensors, results = draw(9, (2, 600, 3, 128), 500, 1, "bfloat16"), []
    for one, seed in (("grid", 0), (scheduling, 1), (scheduling, 2)):
        emulator.set_options(seed=seed)
        parts = attend(tensors, one, is_causal=True)  # type: ignore[arg-type]
        results.append(b"".join(np.asarray(part).tobytes() for part in parts))
    assert len(set(results)) == 1


@pytest.mark.parametrize("scheduling", FORMS)
def test_compute_capability_10_3(scheduling: Scheduling) -> None:
    tensors = draw(10, (1, 800, 2, 128), 500, 1, "bfloat16")
    check(tensors, scheduling, 0, "random", "sm_103a", is_causal=True, causal_alignment="bottom_right")


def test_dense_calls_of_many_short_items_are_persistent() -> None:
    """By the public function, and only those: fewer items than multiprocessors, or long ones, gain nothing."""
    tensors = draw(3, (2, 600, 4, 64), 200, 2, "bfloat16")
    emulator.statistics()
    out, lse = jax_fa4.attention(*tensors, return_residual=True, implementation="emulated")
    compare(arguments.read_call(*tensors), out, lse, POLYNOMIAL_ERROR)
    (found,) = emulator.statistics()
    assert found["grid"] == [3, 1, 1]


HEAD_DIMS = [(64, 64), (96, 96), (128, 128), (192, 128)]
LENGTHS = [(700, 130), (1030, 515)]
MASKS: dict[str, dict[str, Any]] = {
    "dense": {},
    "bottom_right": {"is_causal": True, "causal_alignment": "bottom_right"},
    "window": {"local_window_size": (70, 20)},
    "lengths": {"key_value_seq_lengths": np.array([60, 0]), "query_seq_lengths": np.array([700, 3])},
    "segments": {"segments": True, "is_causal": True},
    "scattered_segments": {"segments": False},
    "cap": {"is_causal": True, "logits_soft_cap": 5.0},
    "sinks": {"is_causal": True, "causal_alignment": "bottom_right", "sinks": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["sm_100f", "sm_103a"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("scheduling", FORMS)
def test_grid(
    scheduling: Scheduling, dims: tuple[int, int], mask: str, lengths: tuple[int, int], architecture: str
) -> None:
    """256 problems, each under two seeds and orders of completion."""
    number = HEAD_DIMS.index(dims) * 7 + sum(lengths) + len(mask)
    heads, kv_heads = ((2, 2), (4, 2), (3, 1))[number % 3]
    dtype = ("bfloat16", "float16")[number % 2]
    tensors = draw(number, (2, lengths[0], heads, dims[0]), lengths[1], kv_heads, dtype, value_dim=dims[1])
    options = drawn_options(MASKS[mask], number, lengths, heads)
    for seed, completion in itertools.product((number, number + 1), ("random", "lazy")):
        check(tensors, scheduling, seed, completion, architecture, **options)
