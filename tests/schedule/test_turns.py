"""Adding in a fixed order: what it costs in either order of items, and which is chosen."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jax_fa4.cost import ARCHITECTURES, ItemCost
from jax_fa4.schedule.order import Policy, WorkGrid, earlier_items, later_items, make_table
from jax_fa4.schedule.tiles import Intervals, tile_bounds
from jax_fa4.schedule.turns import Band, clocks_in_turn, is_last_first_better

FAR = 1 << 29
CAUSAL, FULL, FUTURE = Band(0, 0, FAR), Band(0, FAR, FAR), Band(0, FAR, 0)  # what a key is seen by


def grid_of(length: int, heads: int, slots: int = 74) -> WorkGrid:
    """Items of 256 keys; all heads in one section."""
    return WorkGrid(
        batch=1,
        heads=heads,
        sharing_heads=1,
        shared_bytes=1,
        row_tile=256,
        column_tile=128,
        columns=length,
        cost=ItemCost(2560, 2632),
        section_l2_bytes=ARCHITECTURES["sm_100"].section_l2_bytes,
        slots=slots,
    )


def test_one_item_at_a_time_waits_for_nobody() -> None:
    grid = grid_of(1024, 2, slots=1)
    # 4 items a head, with 8, 6, 4 and 2 tiles, of which 2 are masked; the last sums of each take their latency.
    tiles = 2 * (12 * 2560 + 8 * 2632)
    for last_first in (True, False):
        assert clocks_in_turn(grid, CAUSAL, 4, last_first=last_first, latency=None) == tiles + 8 * grid.cost.overhead
        in_turn = clocks_in_turn(grid, CAUSAL, 4, last_first=last_first, latency=100)
        assert in_turn == tiles + 8 * (grid.cost.overhead + 100)


@pytest.mark.parametrize("length", [2048, 8192])
def test_shortest_first_does_not_wait_under_a_causal_mask(length: int) -> None:
    """Two heads, whose items all run at a time: each waits only for its own last sums; longest first waits."""
    grid, row_tiles = grid_of(length, 2), length // 256
    alone = clocks_in_turn(grid, CAUSAL, row_tiles, last_first=True, latency=None)
    last, first = (clocks_in_turn(grid, CAUSAL, row_tiles, last_first=one) for one in (True, False))
    assert last == alone + 1500
    assert first > 1.1 * alone


@pytest.mark.parametrize(
    ("band", "length", "heads", "last_first"),
    [
        *((band, *sizes, band is not FUTURE) for band in (CAUSAL, FULL, FUTURE) for sizes in ((1024, 16), (8192, 2))),
        (CAUSAL, 8192, 16, False),  # many heads at a time: few items of each, and the long ones must not come last
    ],
)
def test_the_cheaper_order_is_chosen(band: Band, length: int, heads: int, last_first: bool) -> None:
    grid = grid_of(length, heads)
    assert is_last_first_better(grid, band, length) is last_first
    chosen, other = (clocks_in_turn(grid, band, length // 256, last_first=one) for one in (last_first, not last_first))
    assert chosen <= other
    # Where keys are seen by what precedes them, the other order would make each item wait for all of another.
    assert band is not FUTURE or other > 1.5 * chosen


def test_long_sequences_are_judged_by_shorter_ones() -> None:
    assert is_last_first_better(grid_of(1 << 20, 2), CAUSAL, 1 << 20)
    assert not is_last_first_better(grid_of(1 << 20, 16), dataclasses.replace(FUTURE, offset=1000), 1 << 20)


@pytest.mark.parametrize("policy", [Policy.FIRST_FIRST, Policy.LAST_FIRST])
def test_tables_follow_the_order_and_ranks_count_who_comes_before(policy: Policy) -> None:
    grid = dataclasses.replace(grid_of(640, 3), batch=2, row_tile=128, shared_bytes=30 << 20)
    assert grid.section_heads == 1
    lo = np.arange(700)[None] // 3
    intervals = Intervals(lo=lo, hi=np.minimum(lo + 300, 640), exact=np.array([True]))
    items = make_table(grid, intervals, policy).items
    bounds = tile_bounds(intervals, 128, 128, 640)
    ranks = (later_items if policy is Policy.LAST_FIRST else earlier_items)(bounds, 5)[0]
    assert sorted(map(tuple, items[:, :3])) == sorted((b, h, t) for b in range(2) for h in range(3) for t in range(6))
    assert (np.diff(items[:, 0] * 3 + items[:, 1]) >= 0).all()  # section by section
    seen = np.zeros((2, 3, 5), int)
    for batch, head, tile, _, begin, _, _, end in items:
        for column in range(begin, end):
            assert ranks[tile, column] == seen[batch, head, column]
            seen[batch, head, column] += 1
    assert seen.max() > 1
