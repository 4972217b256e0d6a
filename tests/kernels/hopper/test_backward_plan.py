"""The Hopper backward's plans; nothing here needs a GPU or a compiler."""

from __future__ import annotations

import itertools

import pytest

from jax_fa4.kernels.hopper.backward_plans import (
    BACKWARD_TILES,
    BackwardTiles,
    backward_plan,
    sum_parts,
    turned_rows,
)
from jax_fa4.kernels.hopper.plans import FORWARD_DTYPES, MASKS
from jax_fa4.kernels.plan import KernelPlan, PlanError


def every_plan() -> list[KernelPlan]:
    flags = (False, True)
    options = itertools.product(FORWARD_DTYPES, BACKWARD_TILES, MASKS[1:], flags, flags, flags)
    return [
        backward_plan(dtype, head_dim, mask, soft_cap=cap, ordered=ordered, split=split)
        for dtype, head_dim, mask, cap, ordered, split in options
    ]


def test_every_plan_fits_the_device_and_has_its_own_key() -> None:
    plans = every_plan()
    assert len({plan.key for plan in plans}) == len({plan.digest for plan in plans}) == len(plans) == 144
    for plan in plans:
        # setmaxnreg moves registers between warpgroups, of those that the launch allots: multiples of 8 a thread.
        allotted = 65536 // plan.threads // 8 * 8 * plan.threads
        assert sum(role.registers * role.warps * 32 for role in plan.roles) <= allotted  # type: ignore[operator]


def test_causal_masks_take_the_kernel_of_windows() -> None:
    assert backward_plan("bfloat16", 64, "causal").key == backward_plan("bfloat16", 64, "window").key


def test_warpgroups_share_columns_or_rows() -> None:
    assert sum_parts(BackwardTiles(64, 2, 2)) == 2
    assert sum_parts(BackwardTiles(128, 2, 2)) == 1

    assert sum_parts(BackwardTiles(80, 2, 2)) == 2
    assert [turned_rows(BackwardTiles(queries, 2, 2)) for queries in (64, 80, 128)] == [0, 80, 0]


def test_eighty_queries_a_step() -> None:
    in_turn = BackwardTiles(80, 2, 2, ahead=False, turned_scores=False)
    ahead = BackwardTiles(80, 3, 2, grad_score_stages=1)
    for tiles, stages, used in ((in_turn, 2, 230752), (ahead, 1, 231152)):
        plan = backward_plan("bfloat16", 128, "window", tiles=tiles)
        assert plan.dynamic_shared_bytes == used <= plan.target.shared_bytes_per_block
        text = plan.describe()
        assert f"query_tile_80-query_stages_{tiles.query_stages}-grad_stages_2" in text
        assert f"grad_scores          {stages} x 20480 bytes" in text
        assert "staged_sums          1 x 40960 bytes" in text
        assert "(64, 80, 1, 1)" in str([one.box for one in plan.tensor_maps])


def test_what_is_refused() -> None:
    with pytest.raises(PlanError, match="query_tile is 96"):
        backward_plan("bfloat16", 128, "window", tiles=BackwardTiles(96, 2, 2))
    with pytest.raises(PlanError, match="grad_score_stages is 3"):
        backward_plan("bfloat16", 128, "window", tiles=BackwardTiles(64, 2, 2, grad_score_stages=3))
    with pytest.raises(PlanError, match="query_tile is 80 with head_dim 64"):
        backward_plan("bfloat16", 64, "window", tiles=BackwardTiles(80, 2, 2))
    with pytest.raises(PlanError, match="persistent blocks stage their results"):
        backward_plan("bfloat16", 128, "window", tiles=BackwardTiles(80, 3, 2, grad_score_stages=1, persistent=True))
    for refused in ({"soft_cap": True}, {"tiles": BackwardTiles(80, 2, 2, turned_scores=False, grad_score_stages=1)}):
        options = {"tiles": BackwardTiles(80, 2, 2, grad_score_stages=1)} | refused
        with pytest.raises(PlanError, match="without a soft cap, and turned_scores"):
            backward_plan("bfloat16", 128, "window", **options)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="bytes of shared memory"):
        backward_plan("bfloat16", 128, "window", tiles=BackwardTiles(128, 2, 2))
    with pytest.raises(PlanError, match="head_dim 192"):
        backward_plan("bfloat16", 192, "window")
