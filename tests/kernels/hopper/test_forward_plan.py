"""The Hopper forward's plans and what it refuses; nothing here needs a GPU or a compiler."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jax_fa4 import arguments
from jax_fa4.ffi import hopper_forward as wrapper
from jax_fa4.ffi.forward_call import mask_kind
from jax_fa4.ffi.launch import LaunchError, call_integers
from jax_fa4.kernels.hopper.plans import (
    FORWARD_DTYPES,
    FORWARD_TILES,
    MASKS,
    SINGLE_TILES,
    Tiles,
    forward_plan,
    padded_head_dim,
)
from jax_fa4.kernels.plan import KernelPlan, PlanError
from jax_fa4.splitting import Split, problem_of


def read(shape: tuple[int, int, int, int], key_length: int, kv_heads: int, **options: Any) -> arguments.Call:
    query = jnp.zeros(shape, options.pop("dtype", jnp.bfloat16))
    key = jnp.zeros((shape[0], key_length, kv_heads, shape[-1]), query.dtype)
    return arguments.read_call(query, key, key, **options)


def every_plan() -> list[KernelPlan]:
    flags = (False, True)
    options = itertools.product(FORWARD_DTYPES, FORWARD_TILES, MASKS, flags, flags)
    return [
        forward_plan(dtype, head_dim, mask, tiles=FORWARD_TILES[head_dim], soft_cap=cap, sinks=sinks)
        for dtype, head_dim, mask, cap, sinks in options
    ]


def test_every_plan_fits_the_device_and_has_its_own_key() -> None:
    plans = every_plan()
    assert len({plan.key for plan in plans}) == len({plan.digest for plan in plans}) == len(plans) == 96
    for plan in plans:
        kinds = [parameter.kind for parameter in plan.parameters]
        assert kinds[:4] == ["tensor_map"] * 4
        assert plan.threads == 512
        # setmaxnreg moves registers between warpgroups: the sum must be what the launch allots, 65536 / 512 a thread.
        assert sum(role.registers * role.warps for role in plan.roles) == 128 * 16  # type: ignore[operator]


@pytest.mark.parametrize(("head_dim", "padded"), [(8, 64), (64, 64), (72, 96), (96, 96), (104, 128), (128, 128)])
def test_head_dims_are_padded(head_dim: int, padded: int) -> None:
    assert padded_head_dim(head_dim) == padded


@pytest.mark.parametrize("head_dim", [0, 4, 12, 136, 256])
def test_other_head_dims_are_refused(head_dim: int) -> None:
    with pytest.raises(PlanError, match=f"head_dim is {head_dim}; .* multiples of 8 up to 128"):
        padded_head_dim(head_dim)


def test_too_large_tiles_are_refused() -> None:
    with pytest.raises(PlanError, match="bytes of shared memory"):
        forward_plan("bfloat16", 128, "causal", tiles=Tiles(3, 128, 4))
    with pytest.raises(PlanError, match="groups is 1"):
        forward_plan("bfloat16", 128, "causal", tiles=Tiles(1, 128, 2))


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({}, "causal"),
        ({"is_causal": True}, "causal"),
        ({"local_window_size": (None, 7)}, "causal"),
        ({"is_causal": True, "local_window_size": (7, None)}, "window"),
        ({"key_value_seq_lengths": np.array([3, 5])}, "intervals"),
        ({"segment_ids": np.zeros((2, 40), np.int32)}, "ids"),
    ],
)
def test_masks_choose_the_plan(options: dict[str, Any], kind: str) -> None:
    call = read((2, 40, 4, 64), 40, 2, **options)
    assert wrapper.why_not(call.problem) is None
    assert mask_kind(call.problem) == kind


def test_integers_of_a_call() -> None:
    call = read((3, 1000, 6, 40), 777, 2, is_causal=True, causal_alignment="bottom_right", local_window_size=(9, None))
    tiles = FORWARD_TILES[64]
    plan = forward_plan("bfloat16", 64, "window", tiles=tiles)
    integers = wrapper.forward_call(call.problem, tiles).integers()
    values = dict(zip(plan.integers, call_integers(plan, integers), strict=False))
    assert values["items"] == 3 * 6 * 6  # ceil(1000 / 192) tiles of 6 heads of 3 rows
    assert (values["offset"], values["left"], values["right"]) == (777 - 1000, 9, 0)
    assert values["query_row_bytes"] == 6 * 40 * 2
    assert values["key_batch_bytes"] == 777 * 2 * 40 * 2
    assert (values["section_heads"], values["sections"]) == (18, 1)
    assert list(call_integers(plan, integers)[-3:]) == [3 * 6 * 6, 1, 1]  # the grid: no more blocks than items
    single = forward_plan("bfloat16", 64, "window", tiles=SINGLE_TILES[64])
    integers = wrapper.forward_call(call.problem, SINGLE_TILES[64]).integers()
    assert list(call_integers(single, integers)[-3:]) == [18, 6, 1]


def test_strides_of_packed_heads() -> None:
    """Rows of one query's heads lie a head apart; parts read the queries of their batch row; results as asked for."""
    problem = read((3, 1, 6, 40), 600, 2).problem
    integers = wrapper.forward_call(problem, packed=True).integers()
    assert (integers["query_row_bytes"], integers["query_head_bytes"], integers["query_batch_bytes"]) == (80, 240, 480)
    assert (integers["out_row_bytes"], integers["out_head_bytes"]) == (80, 240)
    assert (integers["lse_row_stride"], integers["lse_head_stride"], integers["query_copies"]) == (1, 3, 1)
    parts = wrapper.forward_call(problem_of(problem, Split(5, True))).integers()
    assert (parts["query_row_bytes"], parts["query_head_bytes"], parts["out_row_bytes"]) == (80, 240, 160)
    assert (parts["query_copies"], parts["query_batch"], parts["batch"]) == (5, 3, 15)
    assert (parts["lse_row_stride"], parts["lse_head_stride"]) == (2, 1)
    several = wrapper.forward_call(problem_of(read((3, 2, 6, 40), 600, 2).problem, Split(5, True))).integers()
    assert (several["query_row_bytes"], several["query_head_bytes"], several["query_copies"]) == (160, 80, 5)


@pytest.mark.parametrize(
    ("length", "groups"), [(1, 2), (128, 2), (129, 3), (192, 3), (256, 2), (257, 3), (384, 3), (640, 2), (8192, 3)]
)
def test_tiles_leave_few_rows_empty(length: int, groups: int) -> None:
    assert wrapper.tiles_of(read((2, length, 4, 128), 300, 4).problem).groups == groups


@pytest.mark.parametrize(
    ("shape", "kv_heads", "is_packed"),
    [
        ((32, 1, 32, 128), 8, True),  # 256 items instead of 1024
        ((1, 1, 32, 128), 8, False),  # one wave in either case
        ((32, 1, 32, 128), 32, False),  # no groups
        ((32, 100, 32, 128), 8, False),  # tiles are full already
    ],
)
def test_packing_of_groups(shape: Any, kv_heads: int, is_packed: bool) -> None:
    problem = read(shape, 1000, kv_heads).problem
    assert wrapper.forward_call(problem).packed == is_packed
    with_sinks = read(shape, 1000, kv_heads, sinks=jnp.zeros(shape[2])).problem
    assert not wrapper.forward_call(with_sinks).packed


def test_many_short_sequences_fit_a_grid() -> None:
    """65537 is prime: even sections would be as many, more than the grid's z takes."""
    problem = dataclasses.replace(read((1, 1, 1, 64), 300_000, 1).problem, batch=65537)
    assert wrapper.forward_call(problem).section_heads() == 65537


def test_sections_are_even_and_fit_in_l2() -> None:
    # 4 MiB of keys and values a head: 12 fit in 50 MiB, and 8 divides 2 * 16.
    call = read((2, 8192, 32, 128), 8192, 16)
    assert wrapper.forward_call(call.problem, FORWARD_TILES[128]).section_heads() == 8 * 2


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((1, 8, 2, 64), {"dtype": jnp.float32}, "not float32"),
        ((1, 8, 2, 256), {}, "head_dim is 256"),
        ((1, 8, 2, 64), {"bias": jnp.zeros((1, 1, 8, 8), jnp.bfloat16)}, "no bias"),
        ((1, 8, 2, 64), {"scale": -1.0}, "positive scale"),
        ((1, 8, 2, 64), {"scale": jnp.float32(1.0)}, "known when the call is traced"),
    ],
)
def test_refusals_say_the_remedy(shape: Any, options: dict[str, Any], message: str) -> None:
    call = read(shape, shape[1], shape[2], **options)
    reason = wrapper.why_not(call.problem)
    assert reason is not None
    assert message in reason
    assert reason.endswith("Pass implementation='blockwise'.")
    with pytest.raises(LaunchError):
        wrapper.hopper_forward(call.problem, call.operands)


def test_empty_problems_need_no_kernel() -> None:
    out, lse = wrapper.hopper_forward(*read((2, 5, 2, 64), 0, 2)[:2])
    assert not np.asarray(out).any()
    assert (np.asarray(lse) == -np.inf).all()
