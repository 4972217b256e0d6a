"""Intervals, tile classes and tile bounds against a brute-force look at every pair of query and key."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_fa4.schedule import tiles
from jax_fa4.schedule.tiles import MaskOperands, MaskRule, TileClass


def brute_force(rule: MaskRule, operands: MaskOperands, batch: int) -> np.ndarray:
    """(B, T, S) bool, by the definitions alone, one pair at a time."""
    seen = np.zeros((batch, rule.query_length, rule.key_length), bool)
    left, right = rule.window
    for b, i, j in np.ndindex(*seen.shape):
        diagonal = i + rule.diagonal_offset
        ok = not (rule.is_causal and j > diagonal)
        ok &= left is None or j >= diagonal - left
        ok &= right is None or j <= diagonal + right
        if operands.query_lengths is not None:
            ok &= i < operands.query_lengths[b]
        if operands.key_lengths is not None:
            ok &= j < operands.key_lengths[b]
        if operands.query_ids is not None:
            ok &= operands.query_ids[b, i] == operands.key_ids[b, j] and operands.query_ids[b, i] >= 0
        seen[b, i, j] = ok
    return seen


def check_intervals(intervals, seen, row_ids, column_ids):
    """`seen` is (B, rows, columns), already transposed where rows are keys."""
    batch, rows, columns = seen.shape
    lo, hi, exact = (np.asarray(part) for part in intervals)
    assert (lo.dtype, hi.dtype, exact.dtype) == (np.int32, np.int32, bool)
    assert lo.shape == hi.shape == (len(exact), rows)
    assert len(exact) in (1, batch)
    lo, hi = np.broadcast_to(lo, (batch, rows)), np.broadcast_to(hi, (batch, rows))
    column = np.arange(columns)
    inside = (column >= lo[..., None]) & (column < hi[..., None])
    visible = inside if row_ids is None else inside & (row_ids[..., None] == column_ids[:, None, :])
    np.testing.assert_array_equal(visible, seen)
    np.testing.assert_array_equal(np.broadcast_to(exact, (batch,)), (inside == seen).all(axis=(1, 2)))
    np.testing.assert_array_equal(seen.any(-1), lo < hi)
    assert ((lo == 0) & (hi == 0))[~seen.any(-1)].all()
    if columns:  # the hull is tight: its ends are visible
        assert seen[lo < hi, lo[lo < hi]].all()
        assert seen[lo < hi, hi[lo < hi] - 1].all()


def check_tiles(intervals, seen, row_tile, column_tile):
    batch, rows, columns = seen.shape
    classes = tiles.classify(intervals, row_tile, column_tile, columns)
    bounds = tiles.tile_bounds(intervals, row_tile, column_tile, columns)
    begin, full_begin, full_end, end = (np.broadcast_to(part, (batch, part.shape[1])) for part in bounds)
    row_tiles, column_tiles = -(-rows // row_tile), -(-columns // column_tile)
    assert classes.dtype == np.int8
    assert classes.shape[1:] == (row_tiles, column_tiles)
    assert {part.dtype for part in bounds} == {np.dtype(np.int32)}
    assert ((begin <= full_begin) & (full_begin <= full_end) & (full_end <= end)).all()
    classes = np.broadcast_to(classes, (batch, row_tiles, column_tiles))
    lo, hi = np.broadcast_to(intervals.lo, (batch, rows)), np.broadcast_to(intervals.hi, (batch, rows))
    column = np.arange(columns)
    inside = (column >= lo[..., None]) & (column < hi[..., None])
    exact = np.broadcast_to(intervals.exact, (batch,))
    for b, r in np.ndindex(batch, row_tiles):
        band = slice(r * row_tile, (r + 1) * row_tile)
        for c in range(column_tiles):
            tile = inside[b, band, c * column_tile : (c + 1) * column_tile]
            wanted = TileClass.PARTIAL if tile.any() else TileClass.SKIP
            if exact[b] and tile.all() and tile.shape[1] == column_tile:
                wanted = TileClass.FULL
            assert classes[b, r, c] == wanted
        met = np.flatnonzero(classes[b, r] != TileClass.SKIP)
        assert (begin[b, r], end[b, r]) == ((met[0], met[-1] + 1) if met.size else (0, 0))
        full = np.flatnonzero(classes[b, r] == TileClass.FULL)
        assert list(range(full_begin[b, r], full_end[b, r])) == list(full)


def check(rule, operands, batch, row_tile=3, column_tile=4):
    seen = brute_force(rule, operands, batch)
    both = (
        (tiles.query_intervals, seen, operands.query_ids, operands.key_ids),
        (tiles.key_intervals, seen.swapaxes(1, 2), operands.key_ids, operands.query_ids),
    )
    for function, seen_by_row, row_ids, column_ids in both:
        intervals = function(rule, operands)
        assert all(isinstance(part, np.ndarray) for part in intervals)
        check_intervals(intervals, seen_by_row, row_ids, column_ids)
        check_tiles(intervals, seen_by_row, row_tile, column_tile)


@functools.cache
def compiled(function, rule, tile, columns):
    """Kept by its static arguments, as compiling takes far longer than running."""

    def traced(operands):
        found = function(rule, operands)
        return found, tiles.tile_bounds(found, *tile, columns)

    return jax.jit(traced)


def check_jax(rule, operands, tile=(3, 4)):
    """Traced operands give what NumPy's gave."""
    for function, columns in ((tiles.query_intervals, rule.key_length), (tiles.key_intervals, rule.query_length)):
        intervals = function(rule, operands)
        wanted = (intervals, tiles.tile_bounds(intervals, *tile, columns))
        traced = compiled(function, rule, tile, columns)(operands)
        for ours, theirs in zip(jax.tree.leaves(traced), jax.tree.leaves(wanted), strict=True):
            assert isinstance(ours, jax.Array)
            assert ours.dtype == theirs.dtype
            np.testing.assert_array_equal(ours, theirs)


@st.composite
def masks(draw):
    # Few shapes, as each new one makes JAX compile; what varies is the mask.
    query_length, key_length = draw(st.sampled_from([(0, 0), (0, 5), (5, 0), (1, 7), (9, 9), (13, 6), (6, 17)]))
    side = st.none() | st.integers(0, 18)
    rule = MaskRule(
        query_length,
        key_length,
        is_causal=draw(st.booleans()),
        window=(draw(side), draw(side)),
        diagonal_offset=draw(st.sampled_from([0, key_length - query_length])),
    )
    batch = draw(st.sampled_from([0, 1, 2]))

    def ids(length):
        values = st.lists(st.integers(-2, 3), min_size=length, max_size=length)
        rows = [draw(values) for _ in range(batch)]
        if draw(st.booleans()):
            rows = [sorted(row) for row in rows]
        return np.array(rows, np.int32).reshape(batch, length)

    def lengths(length):
        return np.array([draw(st.integers(0, length + 2)) for _ in range(batch)], np.int32)

    with_ids = draw(st.booleans())
    operands = MaskOperands(
        ids(query_length) if with_ids else None,
        ids(key_length) if with_ids else None,
        lengths(query_length) if draw(st.booleans()) else None,
        lengths(key_length) if draw(st.booleans()) else None,
    )
    return rule, operands, batch


@settings(max_examples=300, deadline=None)
@given(masks(), st.sampled_from([(1, 1), (3, 4), (4, 2), (16, 32)]))
def test_any_mask(mask, tile):
    check(*mask, *tile)


TRACED_RULES = [
    MaskRule(9, 9),
    MaskRule(13, 6, is_causal=True),
    MaskRule(6, 17, is_causal=True, window=(3, None), diagonal_offset=11),
    MaskRule(9, 9, window=(2, 1)),
]


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(TRACED_RULES), st.data())
def test_traced_operands(rule, data):
    def integers(low, high, *shape):
        values = st.lists(st.integers(low, high), min_size=math.prod(shape), max_size=math.prod(shape))
        return np.array(data.draw(values), np.int32).reshape(shape)

    operands = MaskOperands(
        integers(-2, 3, 2, rule.query_length),
        integers(-2, 3, 2, rule.key_length),
        integers(0, rule.query_length + 1, 2),
        integers(0, rule.key_length + 1, 2),
    )
    check_jax(rule, operands)


@pytest.mark.parametrize("lengths", [(0, 0), (0, 5), (5, 0)])
@pytest.mark.parametrize("batch", [0, 2])
def test_traced_and_empty(lengths, batch):
    ids = (np.zeros((batch, length), np.int32) for length in lengths)
    check_jax(MaskRule(*lengths, is_causal=True), MaskOperands(*ids))


def test_one_traced_operand_traces_all():
    rule = MaskRule(9, 9, is_causal=True)
    lengths = np.array([4, 0], np.int32)
    for operands in (MaskOperands(key_lengths=lengths), MaskOperands(query_lengths=lengths)):
        check_jax(rule, operands)
    mixed = MaskOperands(query_lengths=lengths, key_lengths=jnp.asarray(lengths))
    assert all(isinstance(part, jax.Array) for part in tiles.query_intervals(rule, mixed))


@pytest.mark.parametrize("offset", [0, "bottom_right"])
@pytest.mark.parametrize("window", [(None, None), (0, 0), (2, None), (None, 2), (2, 1), (100, 100), (2**31, 2**40)])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("query_length", "key_length"), [(2, 5), (5, 2), (12, 12), (1, 9)])
def test_bands(query_length, key_length, is_causal, window, offset):
    offset = key_length - query_length if offset else 0
    check(MaskRule(query_length, key_length, is_causal, window, offset), MaskOperands(), batch=2)


SHUFFLED = {
    "sorted": [0, 0, 0, 1, 1, 1, 1, 2, 2, 2],
    "descending": [9, 9, 4, 4, 4, 4, 0, 0, 0, 0],
    "interleaved": [0, 1, 0, 1, 0, 1, 0, 1, 0, 1],
    "holes": [3, 3, -1, -1, 3, 5, -7, 5, 5, -1],
    "extremes": [2**31 - 1, 2**31 - 1, -(2**31), 0, 0, -(2**31), 7, 7, 2**31 - 1, 7],
    "all padding": [-1] * 10,
    "one": [4] * 10,
}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("keys", SHUFFLED)
@pytest.mark.parametrize("queries", SHUFFLED)
def test_ids_in_any_order(queries, keys, is_causal):
    operands = MaskOperands(np.array([SHUFFLED[queries]], np.int32), np.array([SHUFFLED[keys]], np.int32))
    check(MaskRule(10, 10, is_causal), operands, batch=1)
    check_jax(MaskRule(10, 10, is_causal), operands)


def test_exact_is_told_for_queries_and_keys_apart():
    # Queries see one key or none, all of their intervals; the key is seen by queries 0 and 2, which is no interval.
    operands = MaskOperands(np.array([[0, 1, 0]]), np.array([[0]]))
    rule = MaskRule(3, 1)
    assert tiles.query_intervals(rule, operands).exact.tolist() == [True]
    assert tiles.key_intervals(rule, operands).exact.tolist() == [False]


def test_each_batch_row_has_its_own_flag():
    ids = np.array([[0, 0, 1, 1], [0, 1, 0, 1]])
    assert tiles.query_intervals(MaskRule(4, 4), MaskOperands(ids, ids)).exact.tolist() == [True, False]
    # A window that keeps interleaved documents apart makes ids superfluous.
    rule = MaskRule(4, 4, window=(0, 0))
    assert tiles.query_intervals(rule, MaskOperands(ids, ids)).exact.tolist() == [True, True]


@pytest.mark.parametrize("operands", [MaskOperands(np.zeros((1, 3), int)), MaskOperands(None, np.zeros((1, 3), int))])
def test_half_a_pair_of_ids_is_refused(operands):
    with pytest.raises(ValueError, match="query_ids and key_ids"):
        tiles.query_intervals(MaskRule(3, 3), operands)


def test_wrong_rules_are_refused():
    with pytest.raises(ValueError, match=r"window \(-1, 0\)"):
        MaskRule(3, 3, window=(-1, 0))
    with pytest.raises(ValueError, match=r"lengths \(-1, 3\)"):
        MaskRule(-1, 3)


def test_band_property():
    assert MaskRule(3, 3).band == (None, None)
    assert MaskRule(3, 3, is_causal=True).band == (None, 0)
    assert MaskRule(3, 3, is_causal=True, window=(4, 9)).band == (4, 0)
    assert MaskRule(3, 3, window=(4, 9)).band == (4, 9)


def test_traced_masks_stay_linear():
    length = 512
    ids = jax.ShapeDtypeStruct((2, length), jnp.int32)

    def bounds(ids):
        intervals = tiles.query_intervals(MaskRule(length, length, is_causal=True), MaskOperands(ids, ids))
        return tiles.tile_bounds(intervals, 64, 64, length)

    sizes = [
        var.aval.size
        for jaxpr in _jaxprs(jax.make_jaxpr(bounds)(ids).jaxpr)
        for equation in jaxpr.eqns
        for var in equation.outvars
    ]
    assert max(sizes) <= 2 * 2 * 2 * length  # gather indices: two bounds, two coordinates a row


def _jaxprs(jaxpr):
    yield jaxpr
    for equation in jaxpr.eqns:
        for value in jax.tree.leaves(equation.params, is_leaf=lambda leaf: hasattr(leaf, "jaxpr")):
            if hasattr(value, "jaxpr"):
                yield from _jaxprs(value.jaxpr)


def test_jit_and_vmap():
    rule = MaskRule(8, 8, is_causal=True)
    rng = np.random.default_rng(0)
    ids = rng.integers(-1, 3, (3, 2, 8)).astype(np.int32)
    function = functools.partial(tiles.query_intervals, rule)
    mapped = jax.jit(jax.vmap(lambda ids: function(MaskOperands(ids, ids))))(ids)
    for outer in range(3):
        for part, one in zip(mapped, function(MaskOperands(ids[outer], ids[outer])), strict=True):
            np.testing.assert_array_equal(part[outer], one)
