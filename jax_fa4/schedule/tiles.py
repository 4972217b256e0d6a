"""The one mask language: what each row of the score matrix sees, and what that makes of a tile.

Causality, windows, sequence lengths and packed documents all give each query row one interval of visible keys, and
each key row one interval of queries. Documents whose tokens are interleaved give the hull of what is visible, and a
flag that says so. Intervals make tiles that are skipped, computed with an element mask, or computed without one.
`blockwise`, the schedules and every kernel read this page and nothing else about masks.

NumPy operands give NumPy results; as soon as one operand is a `jax.Array` the same arithmetic is traced. No array here
has query length times key length elements; the tile map of `classify` has that divided by the tile's area.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Array = Any  # np.ndarray or jax.Array: every function here takes and gives either


@dataclass(frozen=True)
class MaskRule:
    """The part of a mask that is known from the call alone.

    Attributes:
      query_length: T, the number of query rows.
      key_length: S, the number of key rows.
      is_causal: whether keys to the right of the diagonal are unseen.
      window: keys to the (left, right) of the diagonal that are seen, itself not counted; None is unbounded.
      diagonal_offset: the key that lies on the diagonal of query 0; S - T aligns the last query with the last key.

    Raises:
      ValueError: if a length or a bound of the window is negative.
    """

    query_length: int
    key_length: int
    is_causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    diagonal_offset: int = 0

    def __post_init__(self) -> None:
        if self.query_length < 0 or self.key_length < 0:
            raise ValueError(f"lengths ({self.query_length}, {self.key_length}) must be at least 0.")
        if any(side is not None and side < 0 for side in self.window):
            raise ValueError(f"window {self.window} must have bounds of at least 0, or None where unbounded.")

    @property
    def band(self) -> tuple[int | None, int | None]:
        """(left, right): query i sees key j only if i + offset - left <= j <= i + offset + right; None is unbounded."""
        left, right = self.window
        if self.is_causal:
            right = 0 if right is None else min(right, 0)
        return left, right


class MaskOperands(NamedTuple):
    """The part of a mask that is data, int32: ids (B, T) and (B, S), lengths (B,); None where absent."""

    query_ids: Array | None = None
    key_ids: Array | None = None
    query_lengths: Array | None = None
    key_lengths: Array | None = None


class Intervals(NamedTuple):
    """What each row sees: columns [lo, hi), (B', R) int32; a row that sees nothing has lo = hi = 0.

    `exact` is (B',) bool: False where some row does not see all of its interval, so that ids must be compared as well;
    lo and hi - 1 are themselves visible in either case. B' is 1 when nothing depends on the batch row.
    """

    lo: Array
    hi: Array
    exact: Array


class TileClass(IntEnum):
    """What has to be done with one tile of scores: nothing, compute with an element mask, or compute without."""

    SKIP = 0
    PARTIAL = 1
    FULL = 2


class TileBounds(NamedTuple):
    """The column tiles of each row tile, (B', row_tiles) int32, with begin <= full_begin <= full_end <= end.

    Tiles outside [begin, end) are SKIP, those in [full_begin, full_end) are FULL, the rest count as PARTIAL.
    """

    begin: Array
    full_begin: Array
    full_end: Array
    end: Array


def query_intervals(rule: MaskRule, operands: MaskOperands) -> Intervals:
    """The keys that each query sees.

    Args:
      rule: the mask's static part.
      operands: the mask's data.

    Returns:
      Intervals of shape (B', T), in keys.

    Raises:
      ValueError: if only one of the two arrays of ids is given.
    """
    left, right = rule.band
    lower = None if left is None else rule.diagonal_offset - left
    upper = None if right is None else rule.diagonal_offset + right
    band = _band(rule.query_length, rule.key_length, lower, upper)
    return _intervals(
        band, rule.key_length, operands.query_ids, operands.key_ids, operands.query_lengths, operands.key_lengths
    )


def key_intervals(rule: MaskRule, operands: MaskOperands) -> Intervals:
    """The queries that each key is seen by; the transpose of `query_intervals`.

    Args:
      rule: the mask's static part.
      operands: the mask's data.

    Returns:
      Intervals of shape (B', S), in queries. Queries at or past their length lie in none of them.

    Raises:
      ValueError: if only one of the two arrays of ids is given.
    """
    left, right = rule.band
    lower = None if right is None else -rule.diagonal_offset - right
    upper = None if left is None else -rule.diagonal_offset + left
    band = _band(rule.key_length, rule.query_length, lower, upper)
    return _intervals(
        band, rule.query_length, operands.key_ids, operands.query_ids, operands.key_lengths, operands.query_lengths
    )


def classify(intervals: Intervals, row_tile: int, column_tile: int, columns: int) -> Array:
    """The class of every tile, found from every row's interval (NumPy only).

    Args:
      intervals: of shape (B', R), NumPy.
      row_tile: rows of a tile.
      column_tile: columns of a tile.
      columns: the number of columns.

    Returns:
      (B', row_tiles, column_tiles) int8 of `TileClass`. A tile is SKIP iff no row's interval meets it; FULL iff every
      row that exists sees all of its `column_tile` columns and no ids need comparing; else PARTIAL.
    """
    lo, hi = np.asarray(intervals.lo), np.asarray(intervals.hi)
    batch, rows = lo.shape
    row_tiles, column_tiles = _tiles(rows, row_tile), _tiles(columns, column_tile)
    line = np.arange(batch)[:, None] * row_tiles + np.arange(rows) // row_tile

    def rows_covering(begin: np.ndarray, end: np.ndarray) -> np.ndarray:
        """Counts, for each tile, the rows whose range of column tiles [begin, end) holds it."""
        stride = column_tiles + 1
        size = batch * row_tiles * stride
        covers = (begin < end).ravel()
        opened = np.bincount((line * stride + begin).ravel()[covers], minlength=size)
        closed = np.bincount((line * stride + end).ravel()[covers], minlength=size)
        return np.cumsum((opened - closed).reshape(batch, row_tiles, stride), axis=-1)[..., :column_tiles]

    met = rows_covering(lo // column_tile, np.where(lo < hi, _tiles(hi, column_tile), 0)) > 0
    rows_of_tile = np.minimum(row_tile, rows - np.arange(row_tiles) * row_tile)[:, None]
    filled = rows_covering(_tiles(lo, column_tile), hi // column_tile) == rows_of_tile
    full = filled & np.asarray(intervals.exact)[:, None, None]
    return np.where(full, TileClass.FULL, np.where(met, TileClass.PARTIAL, TileClass.SKIP)).astype(np.int8)


def tile_bounds(intervals: Intervals, row_tile: int, column_tile: int, columns: int) -> TileBounds:
    """The column tiles that each row tile must visit, and those among them that need no element mask.

    Args:
      intervals: of shape (B', R), NumPy or JAX.
      row_tile: rows of a tile.
      column_tile: columns of a tile.
      columns: the number of columns; a last column tile that hangs over it is never FULL.

    Returns:
      TileBounds: the smallest range of tiles that holds all visible columns of the row tile, and the largest range in
      it that every row of the tile sees wholly (empty, at `end`, where there is none or where ids must be compared). A
      row tile that sees nothing has all four at 0.
    """
    xp = _namespace(intervals)
    batch, rows = intervals.lo.shape
    row_tiles = _tiles(rows, row_tile)

    def by_tile(values: Array, fill: int) -> Array:
        padded = xp.pad(values, ((0, 0), (0, row_tiles * row_tile - rows)), constant_values=fill)
        return padded.reshape(batch, row_tiles, row_tile)

    lo, hi = intervals.lo, intervals.hi
    begin = by_tile(xp.where(lo < hi, lo, columns), columns).min(axis=-1) // column_tile
    end = _tiles(by_tile(hi, 0).max(axis=-1), column_tile)
    # A row that sees nothing has hi = 0, which leaves the row tile without FULL tiles, as it must.
    full_begin = _tiles(by_tile(lo, 0).max(axis=-1), column_tile)
    full_end = by_tile(hi, columns).min(axis=-1) // column_tile
    has_full = (full_begin < full_end) & intervals.exact[:, None]
    bounds = (
        xp.where(end > 0, begin, 0),
        xp.where(has_full, full_begin, end),
        xp.where(has_full, full_end, end),
        end,
    )
    return TileBounds(*(bound.astype(xp.int32) for bound in bounds))


def _namespace(arrays: tuple[Array | None, ...]) -> Any:
    """jax.numpy as soon as one array is JAX's, else NumPy: concrete masks stay concrete while a call is traced."""
    return jnp if any(isinstance(array, jax.Array) for array in arrays) else np


def _tiles(count: Any, tile: int) -> Any:
    return (count + tile - 1) // tile


def _band(rows: int, columns: int, lower: int | None, upper: int | None) -> tuple[np.ndarray, np.ndarray]:
    """[lo, hi) of each row, (R,) int32 in [0, columns], for columns row + lower <= column <= row + upper."""
    row = np.arange(rows, dtype=np.int64)
    limit = rows + columns  # bounds of any size become harmless ones before they are added to a row
    lo = np.zeros_like(row) if lower is None else row + min(max(lower, -limit), limit)
    hi = np.full_like(row, columns) if upper is None else row + min(max(upper, -limit), limit) + 1
    return np.clip(lo, 0, columns).astype(np.int32), np.clip(hi, 0, columns).astype(np.int32)


def _intervals(
    band: tuple[np.ndarray, np.ndarray],
    columns: int,
    row_ids: Array | None,
    column_ids: Array | None,
    row_lengths: Array | None,
    column_lengths: Array | None,
) -> Intervals:
    """Narrows a band by lengths, then by ids."""
    if (row_ids is None) != (column_ids is None):
        raise ValueError("query_ids and key_ids must be given together.")
    xp = _namespace((row_ids, column_ids, row_lengths, column_lengths))
    rows = band[0].shape[0]
    lo, hi = xp.asarray(band[0][None]), xp.asarray(band[1][None])
    if column_lengths is not None:
        hi = xp.minimum(hi, xp.asarray(column_lengths)[:, None])
    if row_lengths is not None:
        hi = xp.where(xp.arange(rows) < xp.asarray(row_lengths)[:, None], hi, 0)
    if row_ids is None:
        visible = hi - lo
    else:
        row_ids, column_ids = xp.asarray(row_ids), xp.asarray(column_ids)
        hi = xp.where(row_ids >= 0, hi, 0)
        lo, hi, visible = _narrow_by_ids(xp, xp.maximum(xp.minimum(lo, hi), 0), xp.maximum(hi, 0), row_ids, column_ids)
    exact = ((visible == hi - lo) | (lo >= hi)).all(axis=-1)
    lo, hi = (xp.where(lo < hi, bound, 0).astype(xp.int32) for bound in (lo, hi))
    lo, hi = xp.broadcast_arrays(lo, hi)
    return Intervals(lo, hi, exact)


def _narrow_by_ids(xp: Any, lo: Array, hi: Array, row_ids: Array, column_ids: Array) -> tuple[Array, Array, Array]:
    """The hull of the columns in [lo, hi) whose id is the row's, and how many these are; all (B, R)."""
    shape = row_ids.shape
    lo, hi = xp.broadcast_to(lo, shape), xp.broadcast_to(hi, shape)
    if 0 in shape or column_ids.shape[1] == 0:
        zeros = xp.zeros(shape, xp.int32)
        return zeros, zeros, zeros
    if xp is jnp:
        return _narrow_by_sorting(xp, lo, hi, row_ids, column_ids)
    start, end, is_scattered = _runs_of_ids(row_ids, column_ids)
    lo, hi = np.maximum(lo, start), np.minimum(hi, end)
    visible = np.maximum(hi - lo, 0)
    if is_scattered.any():
        scattered = (part[is_scattered] for part in (lo, hi, row_ids, column_ids))
        for part, narrowed in zip((lo, hi, visible), _narrow_by_sorting(np, *scattered), strict=True):
            part[is_scattered] = narrowed
    return lo, hi, visible


_FIRST_ID = 1 << 31  # what id 0 becomes in the low half of a key, so that keys order negative ids below it


def _runs_of_ids(row_ids: np.ndarray, column_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The columns [start, end) that hold each row's id, (B, R), for documents that lie together, which most do.

    Only the heads of runs of equal ids are sorted and looked up, so that a long row with few documents costs little.
    The third result, (B,) bool, tells batch rows in which some id has several runs; there a row gets all columns.
    """
    row_keys, _, row_counts = _runs(row_ids)
    keys, starts, counts = _runs(column_ids)
    is_document = (keys & 0xFFFFFFFF) >= _FIRST_ID
    keys, starts, counts = keys[is_document], starts[is_document], counts[is_document]
    order = np.argsort(keys)
    keys = np.append(keys[order], -1)  # the last, found by what is nowhere else, is an empty run
    starts, ends = np.append(starts[order], 0), np.append((starts + counts)[order], 0)
    is_scattered = np.zeros(len(row_ids), bool)
    is_scattered[keys[1:][keys[1:] == keys[:-1]] >> 32] = True
    place = np.searchsorted(keys[:-1], row_keys)
    place[keys[place] != row_keys] = len(keys) - 1
    start = np.repeat(starts[place].astype(np.int32), row_counts).reshape(row_ids.shape)
    end = np.repeat(ends[place].astype(np.int32), row_counts).reshape(row_ids.shape)
    start[is_scattered], end[is_scattered] = 0, column_ids.shape[1]
    return start, end, is_scattered


def _runs(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Runs of equal ids of all batch rows, in order: (batch row, id) as one int64 key, first position, length."""
    flat = ids.ravel()
    is_head = np.ones(flat.shape, bool)
    np.not_equal(flat[1:], flat[:-1], out=is_head[1:])
    is_head[:: ids.shape[1]] = True
    heads = np.flatnonzero(is_head)
    batch, position = np.divmod(heads, ids.shape[1])
    keys = (batch << 32) + (flat[heads].astype(np.int64) + _FIRST_ID)
    return keys, position, np.diff(heads, append=flat.size)


def _narrow_by_sorting(xp: Any, lo: Array, hi: Array, row_ids: Array, column_ids: Array) -> tuple[Array, Array, Array]:
    """`_narrow_by_ids` for ids in any order.

    Columns are sorted by (id, position); those of a row's id and interval then lie together, between two ranks.
    """
    columns = column_ids.shape[1]
    rows = row_ids.shape[1]
    positions = xp.concatenate([lo, hi], axis=1)
    ids = xp.concatenate([row_ids, row_ids], axis=1)
    search = _search_numpy if xp is np else _search_jax
    sorted_positions, ranks = search(column_ids, ids, positions)
    first, last = ranks[:, :rows], ranks[:, rows:] - 1
    visible = last + 1 - first
    lo = xp.take_along_axis(sorted_positions, xp.clip(first, 0, columns - 1), axis=1)
    hi = xp.take_along_axis(sorted_positions, xp.clip(last, 0, columns - 1), axis=1) + 1
    return xp.where(visible > 0, lo, 0), xp.where(visible > 0, hi, 0), visible


def _search_numpy(column_ids: np.ndarray, ids: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Positions of the columns sorted by (id, position), and the rank of each searched pair among them."""
    columns = column_ids.shape[1]
    stride = columns + 1  # int32 ids times int32 positions fit in int64, so that a pair is one number
    pairs = np.sort(column_ids.astype(np.int64) * stride + np.arange(columns), axis=1)
    wanted = ids.astype(np.int64) * stride + positions
    ranks = np.empty(ids.shape, np.int64)
    for batch_row in range(len(pairs)):
        ranks[batch_row] = np.searchsorted(pairs[batch_row], wanted[batch_row])
    return pairs % stride, ranks


def _search_jax(column_ids: jax.Array, ids: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """As `_search_numpy`; a binary search over pairs, as JAX has no 64-bit integers by default to pack them into.

    The search has one state, the rank so far, and no loop: a chain of gathers, which XLA makes one kernel of.
    """
    columns = column_ids.shape[1]
    order = jnp.argsort(column_ids, axis=1, stable=True).astype(jnp.int32)
    sorted_ids = jnp.take_along_axis(column_ids, order, axis=1)
    rank = jnp.zeros_like(positions)
    for bit in reversed(range(columns.bit_length())):
        raised = rank + (1 << bit)
        place = jnp.minimum(raised, columns) - 1
        id_there = jnp.take_along_axis(sorted_ids, place, axis=1, mode="promise_in_bounds")
        position_there = jnp.take_along_axis(order, place, axis=1, mode="promise_in_bounds")
        is_below = (id_there < ids) | ((id_there == ids) & (position_there < positions))
        rank = jnp.where((raised <= columns) & is_below, raised, rank)
    return order, rank
