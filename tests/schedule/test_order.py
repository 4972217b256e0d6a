"""Work tables: completeness, the order's structure, how well it balances, and how long planning takes."""

import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_fa4.cost import ARCHITECTURES, ItemCost
from jax_fa4.ffi import hopper_backward
from jax_fa4.problem import NO_CONSTANTS, AttentionOperands, AttentionProblem, HostArray, MaskConstants
from jax_fa4.schedule import order
from jax_fa4.schedule.order import Column, Policy, WorkGrid, make_table
from jax_fa4.schedule.simulate import simulate
from jax_fa4.schedule.tiles import MaskOperands, MaskRule, key_intervals, query_intervals, tile_bounds

B200, HOPPER = ARCHITECTURES["sm_100"], ARCHITECTURES["sm_90"]
TABLES = {"forward": order.forward_table, "backward": order.backward_table}
TILES = {"forward": (256, 128), "backward": (128, 128)}


def problem(batch=1, length=4096, heads=16, kv_heads=None, *, is_causal=True, ids=None, head_dim=128):
    constants = NO_CONSTANTS
    if ids is not None:
        batch, length = ids.shape
        constants = MaskConstants(HostArray(ids), HostArray(ids))
    return AttentionProblem(
        batch,
        length,
        length,
        heads,
        kv_heads or heads,
        head_dim,
        head_dim,
        "bfloat16",
        MaskRule(length, length, is_causal=is_causal),
        None,
        has_segment_ids=ids is not None,
        constants=constants,
    )


def packed(*lengths):
    """One row of documents of the given lengths."""
    return np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)[None]


def table_of(the_problem, direction="forward", **options):
    return TABLES[direction](the_problem, AttentionOperands(), *TILES[direction], B200, **options)


def ratio(table, slots=B200.sms):
    run = simulate(table.clocks, slots)
    return run.makespan / run.lower_bound


def grid_of(batch=1, heads=4, sharing_heads=1, shared_bytes=1, slots=4, columns=64, **changes):
    grid = WorkGrid(
        batch=batch,
        heads=heads,
        sharing_heads=sharing_heads,
        shared_bytes=shared_bytes,
        row_tile=4,
        column_tile=4,
        columns=columns,
        cost=ItemCost(full=10, partial=12, overhead=5),
        section_l2_bytes=4,
        slots=slots,
    )
    return dataclasses.replace(grid, **changes)


def check_complete(table, grid, intervals):
    """Every item is there once, with its tile's bounds and its clocks."""
    items = np.asarray(table.items)
    bounds = tile_bounds(intervals, grid.row_tile, grid.column_tile, grid.columns)
    row_tiles = bounds.end.shape[1]
    places = items[:, [Column.BATCH, Column.TILE, Column.HEAD]]
    every = np.stack(np.indices((grid.batch, row_tiles, grid.heads)), axis=-1).reshape(-1, 3)
    assert sorted(map(tuple, places)) == sorted(map(tuple, every))
    batch, tile = items[:, Column.BATCH], items[:, Column.TILE]
    for column, bound in zip(range(Column.BEGIN, Column.END + 1), bounds, strict=True):
        np.testing.assert_array_equal(items[:, column], np.broadcast_to(bound, (grid.batch, row_tiles))[batch, tile])
    exact = np.broadcast_to(intervals.exact, (grid.batch,))
    np.testing.assert_array_equal(items[:, Column.COMPARE_IDS], ~exact[batch])
    full = items[:, Column.FULL_END] - items[:, Column.FULL_BEGIN]
    partial = items[:, Column.END] - items[:, Column.BEGIN] - full
    np.testing.assert_array_equal(table.clocks, 5 + 10 * full + 12 * partial)
    assert sorted(np.asarray(table.batch_order)) == list(range(grid.batch))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 3),
    st.sampled_from([(1, 1), (4, 1), (6, 2), (6, 3), (0, 1)]),
    st.integers(0, 40),
    st.integers(1, 9),
    st.sampled_from(Policy),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_every_item_is_there_once(batch, heads, length, slots, policy, with_ids, seed):
    ids = np.random.default_rng(seed).integers(-1, 4, (batch, length)).astype(np.int32)
    operands = MaskOperands(ids, ids) if with_ids else MaskOperands()
    grid = grid_of(batch, *heads, slots=slots, columns=length)
    for intervals_of in (query_intervals, key_intervals):
        intervals = intervals_of(MaskRule(length, length, is_causal=True), operands)
        check_complete(make_table(grid, intervals, policy), grid, intervals)


def test_longest_first_structure():
    """Batch rows by their heaviest tile, sections of heads, tiles from the longest, and all heads of each."""
    lengths = np.array([8, 32, 16], np.int32)
    intervals = query_intervals(MaskRule(32, 32, is_causal=True), MaskOperands(None, None, lengths, lengths))
    # Four single-byte groups of two heads fit into L2; one slot lets no section end too late.
    table = make_table(grid_of(3, 16, 2, slots=1, columns=32), intervals)
    assert table.batch_order.tolist() == [1, 2, 0]
    items = table.items
    batches = items[:, Column.BATCH]
    assert batches.tolist() == [1] * 128 + [2] * 128 + [0] * 128
    first = items[:64]  # batch row 1, its first section: heads 0 to 7
    assert set(first[:, Column.HEAD]) == set(range(8))
    assert first[:, Column.HEAD].tolist() == list(range(8)) * 8
    assert first[:, Column.TILE].tolist() == np.repeat(np.arange(8)[::-1], 8).tolist()
    assert set(items[64:128, Column.HEAD]) == set(range(8, 16))
    for start in range(0, len(items), 64):
        assert (np.diff(table.clocks[start : start + 64]) <= 0).all()


@pytest.mark.parametrize(
    ("key_length", "section"), [(1024, 64), (8192, 8), (32768, 2), (65536, 1), (131072, 1), (1 << 20, 1), (0, 64)]
)
def test_sections_fit_in_l2(key_length, section):
    # d = 128 in 16 bits: 0.5 MiB of keys and values for 1024 keys of one head.
    one = dataclasses.replace(problem(heads=64, length=64), key_length=key_length)
    assert order.forward_grid(one, 256, 128, B200).section_heads == section
    grouped = dataclasses.replace(one, query_heads=512)
    assert order.forward_grid(grouped, 256, 128, B200).section_heads == section * 8


def test_backward_sections_count_queries_gradients_and_float32_sums():
    # 8192 queries of one head: 2 MiB of queries, 2 of output gradients, 4 of float32 query gradients.
    one = problem(heads=32, kv_heads=8, length=8192)
    assert order.backward_grid(one, 128, 128, B200).section_heads == 4
    whole = order.backward_grid(one, 128, 128, B200, whole_group=True)
    assert (whole.heads, whole.section_heads) == (8, 1)
    single = order.backward_grid(one, 128, 128, B200)
    assert whole.cost.full == 4 * single.cost.full
    assert whole.cost.overhead == single.cost.overhead


def test_heads_that_share_keys_are_neighbours():
    table = table_of(problem(heads=32, kv_heads=4, length=8192))
    heads = table.items[:, Column.HEAD].reshape(-1, 8)
    assert (heads // 8 == heads[:, :1] // 8).all()
    tiles = table.items[:, Column.TILE].reshape(-1, 8)
    assert (tiles == tiles[:, :1]).all()


def test_plain_and_reversed():
    intervals = query_intervals(MaskRule(12, 12, is_causal=True), MaskOperands())
    grid = grid_of(2, 2, columns=12)
    plain = make_table(grid, intervals, Policy.PLAIN).items[:, : Column.TILE + 1]
    assert plain.tolist() == [[b, h, t] for b in range(2) for h in range(2) for t in range(3)]
    backwards = make_table(grid, intervals, Policy.REVERSED).items[:, : Column.TILE + 1]
    assert backwards.tolist() == [[b, h, t] for b in range(2) for h in range(2) for t in (2, 1, 0)]


@pytest.mark.parametrize(
    "shape", [(1, 8192, 16), (4, 4096, 16), (1, 32768, 16), (16, 2048, 8)], ids=lambda shape: "x".join(map(str, shape))
)
def test_longest_first_beats_plain_on_causal(shape):
    spans = {policy: simulate(table_of(problem(*shape), policy=policy).clocks, B200.sms).makespan for policy in Policy}
    assert spans[Policy.LONGEST_FIRST] < spans[Policy.PLAIN]
    assert spans[Policy.LONGEST_FIRST] < spans[Policy.REVERSED]


HUNDREDS = (131072 - 30000) // 100
SKEWED = {
    "one giant first": packed(30000, *[100] * HUNDREDS, 131072 - 30000 - 100 * HUNDREDS),
    "one giant last": packed(*[100] * HUNDREDS, 131072 - 30000 - 100 * HUNDREDS, 30000),
    "two giants": packed(30000, *[100] * 711, 29972),
    "equal lengths": packed(*[1024] * 128),
    "short equal lengths": packed(*[100] * 1310, 72),
    "one document": packed(32768),
    "padding-only rows": np.concatenate([packed(6000, 2192), np.full((15, 8192), -1, np.int32)]),
    "mostly padding": np.concatenate([packed(30000), np.full((1, 30000), -1, np.int32)], axis=1),
    "rows of all kinds": np.concatenate([packed(*[256] * 64), packed(16384), packed(8000, 8384), packed(*[64] * 256)]),
}


@pytest.mark.parametrize("direction", TABLES)
@pytest.mark.parametrize("heads", [(16, 16), (16, 2), (4, 4), (1, 1)], ids=str)
@pytest.mark.parametrize("packing", SKEWED)
def test_skewed_packings_stay_near_the_bound(packing, heads, direction):
    assert ratio(table_of(problem(1, 0, *heads, ids=SKEWED[packing]), direction)) <= 1.10


@pytest.mark.parametrize("direction", TABLES)
@pytest.mark.parametrize("heads", [(16, 16), (16, 2), (16, 1)], ids=["MHA", "GQA", "MQA"])
@pytest.mark.parametrize("packing", SKEWED)
def test_skewed_packings_on_hopper(packing, heads, direction):
    """The tiles of the Hopper kernels, whose backward walks whole groups of query heads, or parts of them."""
    the_problem = problem(1, 0, *heads, ids=SKEWED[packing])
    if direction == "forward":
        table = order.forward_table(the_problem, AttentionOperands(), 192, 80, HOPPER)
    else:
        grid = hopper_backward.grid_of(the_problem)
        the_problem = dataclasses.replace(the_problem, kv_heads=grid.heads)
        sizes = grid.column_tile, grid.row_tile
        table = order.backward_table(the_problem, AttentionOperands(), *sizes, HOPPER, whole_group=True)
    assert ratio(table, HOPPER.sms) <= 1.10


@pytest.mark.parametrize("direction", TABLES)
def test_pairs_of_multiprocessors(direction):
    """A pair shares an item of twice the rows, so that half as many run at a time, each as long as one CTA's half."""
    query_tile, key_tile = {"forward": (512, 128), "backward": (128, 256)}[direction]
    the_problem = problem(2, 8192, 8)
    pairs = TABLES[direction](the_problem, AttentionOperands(), query_tile, key_tile, B200, ctas=2)
    single = table_of(the_problem, direction)
    assert 2 * len(pairs.items) == len(single.items)
    assert pairs.clocks.max() <= 1.05 * single.clocks.max()
    assert ratio(pairs, B200.sms // 2) <= 1.10


def test_whole_groups_balance():
    """Items that walk all query heads of a group are fewer and longer."""
    the_problem = problem(2, 16384, 32, 8)
    whole = table_of(the_problem, "backward", whole_group=True)
    assert 4 * len(whole.items) == len(table_of(the_problem, "backward").items)
    assert set(whole.items[:, Column.HEAD]) == set(range(8))
    assert ratio(whole) <= 1.10


def test_sections_that_would_end_late_are_merged():
    """Without it, the giant document of the last section would begin when the others are nearly done."""
    the_problem = problem(1, 0, 4, 4, ids=SKEWED["one giant last"])
    grid = order.forward_grid(the_problem, 256, 128, B200)
    assert grid.sections == 4
    intervals = query_intervals(the_problem.mask, the_problem.mask_operands(AttentionOperands()))
    # With one slot every section has time enough, so that none is merged: the order of the paper.
    unmerged = make_table(dataclasses.replace(grid, slots=1), intervals)
    assert np.flatnonzero(np.diff(unmerged.items[:, Column.HEAD])).size == 3
    assert ratio(make_table(grid, intervals)) < 1.01 < 1.15 < ratio(unmerged)


@pytest.mark.parametrize("direction", TABLES)
@pytest.mark.parametrize("policy", Policy)
def test_traced_masks_give_the_same_table(direction, policy):
    rng = np.random.default_rng(1)
    ids = np.sort(rng.integers(0, 7, (3, 1500)), axis=1).astype(np.int32)
    ids[2] = rng.integers(-1, 3, 1500)
    known = problem(1, 0, 6, 2, ids=ids)
    traced = dataclasses.replace(known, constants=NO_CONSTANTS)
    wanted = table_of(known, direction, policy=policy)

    @jax.jit
    def plan(ids):
        operands = AttentionOperands(query_ids=ids, key_ids=ids)
        return TABLES[direction](traced, operands, *TILES[direction], B200, policy=policy)

    for ours, theirs in zip(plan(ids), wanted, strict=True):
        assert isinstance(ours, jax.Array)
        assert ours.dtype == theirs.dtype == jnp.int32
        np.testing.assert_array_equal(ours, theirs)


def test_known_masks_are_planned_once():
    ids = packed(500, 1500, 48)
    first = table_of(problem(ids=ids))
    assert table_of(problem(ids=ids.copy())) is first
    assert table_of(problem(ids=ids[:, ::-1])) is not first
    with pytest.raises(ValueError, match="read-only"):
        first.items[0, 0] = 1


@pytest.mark.parametrize("direction", TABLES)
def test_planning_is_fast(direction):
    """128k tokens in 500 documents. The limit is 50 ms; processor time, as other processes may share the machine."""
    rng = np.random.default_rng(2)
    cuts = np.sort(rng.choice(131071, 499, replace=False) + 1)
    ids = packed(*np.diff(np.concatenate([[0], cuts, [131072]])))
    seconds = []
    for shift in range(5):
        the_problem = problem(ids=ids + shift)
        start = time.process_time()
        table_of(the_problem, direction)
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.05


@pytest.mark.parametrize("shape", [(0, 128, 4), (2, 0, 4), (2, 128, 0)], ids=str)
@pytest.mark.parametrize("direction", TABLES)
def test_empty_problems_have_empty_tables(shape, direction):
    table = table_of(dataclasses.replace(problem(*shape[:2]), query_heads=shape[2], kv_heads=shape[2]), direction)
    assert table.items.shape == (0, 8)
    assert table.clocks.shape == (0,)


def test_no_keys_still_have_outputs_to_write():
    the_problem = dataclasses.replace(problem(2, 300, 4), key_length=0, mask=MaskRule(300, 0))
    table = table_of(the_problem)
    assert len(table.items) == 2 * 2 * 4
    assert not table.items[:, Column.BEGIN :].any()
