"""How blockwise cuts a problem: tile sizes, groups of heads, tile-major arrays, and which tiles are visited.

Scores are computed a tile at a time for a *group*: some batch rows times some key-value heads, whose query heads ride
along. Arrays are copied once into *tile-major* order, (groups, tiles, units, ...) with units = batch rows x key-value
heads of a group, so that a tile is one contiguous piece and each product of a tile is one batched product over units:

    key, value           (groups, key tiles, units, key_tile, D or Dv)
    query, out, grads    (groups, query tiles, units, lanes, D or Dv); lanes = query heads per kv head x query_tile
    scores of one tile   (units, key_tile, lanes), or by parts (rows, heads, key_tile, query heads, query_tile)

Queries lie along the last axis of the scores, the lanes of a vector unit: then sums and maxima over keys are plain
vector operations, all five products of the backward pass have a left factor that is not transposed, and the query heads
that share a key-value head are summed by the products themselves.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_fa4.problem import AttentionOperands, AttentionProblem
from jax_fa4.schedule.tiles import Intervals, TileBounds, tile_bounds

Array = Any
Carry = TypeVar("Carry")

TILE_LIMIT = 256
"""Rows of a tile at most. CPU, 2 cores, causal 4096 forward: 128 rows 401 ms, 192 rows 404 ms, 256 rows 360 ms."""

PACKED_TILE_LIMIT = 128
"""The same where there are segment ids, and smaller tiles leave out more. Packed 8192, 16 documents of random lengths,
forward and backward: 128 rows 838 ms, 256 rows 1033 ms; of equal lengths 454 ms and 492 ms."""

GROUP_BYTES = 4 << 20
"""Bytes of one tile's scores over a whole group at most, a share of the last-level cache."""


@dataclass(frozen=True)
class Tiling:
    """The cut of one problem.

    Attributes:
      batch, kv_heads, query_heads_per_kv_head, query_length, key_length: sizes of the problem.
      query_tile: queries of a tile.
      key_tile: keys of a tile.
      rows: batch rows of a group.
      heads: key-value heads of a group.
    """

    batch: int
    kv_heads: int
    query_heads_per_kv_head: int
    query_length: int
    key_length: int
    query_tile: int
    key_tile: int
    rows: int
    heads: int

    @property
    def query_tiles(self) -> int:
        """Tiles along the queries."""
        return -(-self.query_length // self.query_tile)

    @property
    def key_tiles(self) -> int:
        """Tiles along the keys."""
        return -(-self.key_length // self.key_tile)

    @property
    def head_groups(self) -> int:
        """Groups that share one set of batch rows."""
        return self.kv_heads // self.heads

    @property
    def groups(self) -> int:
        """Groups in all: sets of batch rows, outermost, times sets of heads."""
        return self.batch // self.rows * self.head_groups

    @property
    def units(self) -> int:
        """Matrices of one batched product."""
        return self.rows * self.heads

    @property
    def lanes(self) -> int:
        """Columns of a tile of scores: query heads of one key-value head times queries."""
        return self.query_heads_per_kv_head * self.query_tile

    @property
    def parts(self) -> tuple[int, int, int, int, int]:
        """The scores of a tile by parts: (rows, heads, key_tile, query heads per key-value head, query_tile)."""
        return self.rows, self.heads, self.key_tile, self.query_heads_per_kv_head, self.query_tile

    def batch_row(self, group: Any) -> Any:
        """The first batch row of a group."""
        return group // self.head_groups * self.rows

    def kv_head(self, group: Any) -> Any:
        """The first key-value head of a group."""
        return group % self.head_groups * self.heads

    def _split(self, array: Array, tile: int) -> Array:
        """(B, length, heads, D) to (row groups, rows, tiles, tile, head groups, kv heads, query heads, D)."""
        batch, length, heads, width = array.shape
        tiles = -(-length // tile)
        array = jnp.pad(array, ((0, 0), (0, tiles * tile - length), (0, 0), (0, 0)))
        members = heads // self.kv_heads
        shape = (batch // self.rows, self.rows, tiles, tile, self.head_groups, self.heads, members, width)
        return array.reshape(shape)

    def to_tiles(self, array: Array, tile: int, swapped: bool = False) -> Array:
        """(B, length, heads, D) in tile-major order.

        Args:
          array: of query heads or of key-value heads.
          tile: `query_tile` or `key_tile`.
          swapped: D before the rows of the tile.

        Returns:
          (groups, tiles, units, members x tile, D), or with the last two axes swapped.
        """
        split = self._split(array, tile)
        tiles, members, width = split.shape[2], split.shape[6], split.shape[7]
        if swapped:
            split = split.transpose(0, 4, 2, 1, 5, 7, 6, 3)
            return split.reshape(self.groups, tiles, self.units, width, members * tile)
        split = split.transpose(0, 4, 2, 1, 5, 6, 3, 7)
        return split.reshape(self.groups, tiles, self.units, members * tile, width)

    def from_tiles(self, tiled: Array, tile: int, length: int, swapped: bool = False) -> Array:
        """The inverse of `to_tiles`: (B, length, heads, D)."""
        if swapped:
            tiled = tiled.reshape(*tiled.shape[:4], tiled.shape[4] // tile, tile)
            tiled = jnp.moveaxis(tiled, 3, -1)
        else:
            tiled = tiled.reshape(*tiled.shape[:3], tiled.shape[3] // tile, tile, tiled.shape[4])
        groups, tiles, _, members, _, width = tiled.shape
        split = tiled.reshape(
            groups // self.head_groups, self.head_groups, tiles, self.rows, self.heads, members, tile, width
        )
        split = split.transpose(0, 3, 2, 6, 1, 4, 5, 7)
        return split.reshape(self.batch, tiles * tile, self.kv_heads * members, width)[:, :length]

    def row_tiles(self, array: Array, tile: int) -> Array:
        """(B', length) to (B', tiles, tile), zeros at the end; NumPy stays NumPy."""
        xp = np if isinstance(array, np.ndarray) else jnp
        batch, length = array.shape
        tiles = -(-length // tile)
        return xp.pad(array, ((0, 0), (0, tiles * tile - length))).reshape(batch, tiles, tile)

    def of_group(self, array: Array, group: Any, index: Any) -> Array:
        """Tile `index` of (B', tiles, tile) for the batch rows of a group: (rows or 1, tile)."""
        array = jnp.asarray(array)
        row, rows = (0, 1) if array.shape[0] == 1 else (self.batch_row(group), self.rows)
        return lax.dynamic_slice(array, indices(row, index, 0), (rows, 1, array.shape[2]))[:, 0]


def _even_tile(length: int, limit: int) -> int:
    """The tile that cuts a length evenly into tiles of at most `limit` rows, in multiples of eight."""
    tiles = -(-length // limit)
    return length if tiles == 1 else -(-length // (8 * tiles)) * 8


def _largest_divisor(number: int, limit: int) -> int:
    return max(divisor for divisor in range(1, number + 1) if number % divisor == 0 and divisor <= max(limit, 1))


def choose_tiling(problem: AttentionProblem, mask_rows: int) -> Tiling:
    """Cuts a problem that is not empty.

    Args:
      problem: the call.
      mask_rows: B' of its intervals; batch rows with masks of their own share a group only where there is one tile,
        since the tiles that are visited are those of a whole group.
    """
    limit = min(TILE_LIMIT, PACKED_TILE_LIMIT) if problem.has_segment_ids else TILE_LIMIT
    query_tile, key_tile = _even_tile(problem.query_length, limit), _even_tile(problem.key_length, limit)
    bytes_per_head = 4 * problem.group_size * query_tile * key_tile
    heads = _largest_divisor(problem.kv_heads, GROUP_BYTES // bytes_per_head)
    never_tile = query_tile == problem.query_length and key_tile == problem.key_length
    rows = 1
    if heads == problem.kv_heads and (mask_rows == 1 or never_tile):
        rows = _largest_divisor(problem.batch, GROUP_BYTES // (bytes_per_head * heads))
    return Tiling(
        batch=problem.batch,
        kv_heads=problem.kv_heads,
        query_heads_per_kv_head=problem.group_size,
        query_length=problem.query_length,
        key_length=problem.key_length,
        query_tile=query_tile,
        key_tile=key_tile,
        rows=rows,
        heads=heads,
    )


class Geometry(NamedTuple):
    """What is visible in a call: intervals of queries and keys, NumPy where known when traced; and its cut."""

    queries: Intervals
    keys: Intervals
    tiling: Tiling


def geometry(problem: AttentionProblem, operands: AttentionOperands) -> Geometry:
    """The mask of a call, as intervals, and the tiling chosen for it."""
    queries, keys = problem.intervals(operands)
    return Geometry(queries, keys, choose_tiling(problem, max(queries.lo.shape[0], keys.lo.shape[0])))


class TileTable(NamedTuple):
    """The column tiles that each row tile of each group visits, (groups, row tiles) int32, NumPy where concrete."""

    begin: Array
    full_begin: Array
    full_end: Array
    end: Array

    @property
    def is_concrete(self) -> bool:
        """True when the table is known as the call is traced."""
        return isinstance(self.begin, np.ndarray)

    @property
    def has_full(self) -> bool:
        """Whether some tile may need no element mask."""
        return not self.is_concrete or bool((self.full_begin < self.full_end).any())

    @property
    def is_all_full(self) -> bool:
        """Whether every row tile is known to visit FULL tiles only, at least one."""
        return self.is_concrete and not self.has_partial and bool((self.full_begin < self.full_end).all())

    @property
    def has_partial(self) -> bool:
        """Whether some tile may need an element mask."""
        return not self.is_concrete or bool((self.end - self.begin != self.full_end - self.full_begin).any())


def tile_table(problem: AttentionProblem, shape: Geometry, by_key: bool) -> TileTable:
    """The tiles to visit, by query tile (columns are key tiles) or by key tile (columns are query tiles).

    A general mask makes every visited tile PARTIAL. So does a last key tile that hangs over the keys, as a row tile:
    keys there are zeros, and a score of zero may be far above the log-sum-exp of its row.
    """
    tiling = shape.tiling
    if by_key:
        bounds = tile_bounds(shape.keys, tiling.key_tile, tiling.query_tile, tiling.query_length)
    else:
        bounds = tile_bounds(shape.queries, tiling.query_tile, tiling.key_tile, tiling.key_length)
    begin, full_begin, full_end, end = _by_group(bounds, tiling)
    if problem.has_mask:
        return TileTable(begin, end, end, end)
    if by_key and tiling.key_length % tiling.key_tile:
        hangs_over = np.arange(tiling.key_tiles) == tiling.key_tiles - 1
        xp = np if isinstance(begin, np.ndarray) else jnp
        full_begin, full_end = xp.where(hangs_over, end, full_begin), xp.where(hangs_over, end, full_end)
    return TileTable(begin, full_begin, full_end, end)


def _by_group(bounds: TileBounds, tiling: Tiling) -> TileBounds:
    """Bounds of batch rows, (B', tiles), to bounds that hold for all rows of a group, (groups, tiles)."""
    xp = np if isinstance(bounds.begin, np.ndarray) else jnp
    tiles = bounds.begin.shape[1]

    def merged(bound: Array, reduce: Callable[..., Array]) -> Array:
        if bound.shape[0] == 1:
            return xp.broadcast_to(bound, (tiling.groups, tiles))
        by_rows = reduce(bound.reshape(-1, tiling.rows, tiles), axis=1)
        return xp.repeat(by_rows, tiling.head_groups, axis=0)

    sees = bounds.begin < bounds.end
    columns = np.int32(max(tiling.query_tiles, tiling.key_tiles))
    begin = merged(xp.where(sees, bounds.begin, columns), xp.min)
    end = merged(bounds.end, xp.max)
    full_begin = merged(bounds.full_begin, xp.max)
    full_end = merged(bounds.full_end, xp.min)
    has_full = full_begin < full_end
    return TileBounds(
        xp.minimum(begin, end), xp.where(has_full, full_begin, end), xp.where(has_full, full_end, end), end
    )


def visit(
    table: TileTable, group: Any, row_tile: Any, columns: int, step: Callable[[Any, Carry, bool], Carry], carry: Carry
) -> Carry:
    """Runs `step(column_tile, carry, is_full)` over the tiles of one row tile, those that need no element mask first.

    Args:
      table: the tiles of every row tile.
      group, row_tile: which row tile.
      columns: column tiles in all; one alone is stepped into without a loop.
      step: the work of one tile.
      carry: its state.
    """
    if columns == 1:
        return step(0, carry, table.is_all_full)
    begin, full_begin, full_end, end = (jnp.asarray(bound)[group, row_tile] for bound in table)
    if table.has_full:
        carry = lax.fori_loop(full_begin, full_end, lambda column, state: step(column, state, True), carry)
    if table.has_partial:
        skipped = full_end - full_begin

        def partial_step(column: Array, state: Carry) -> Carry:
            return step(jnp.where(column < full_begin, column, column + skipped), state, False)

        carry = lax.fori_loop(begin, end - skipped, partial_step, carry)
    return carry


def each(groups: int, row_tiles: int, step: Callable[[Any, Any, Carry], Carry], carry: Carry) -> Carry:
    """Runs `step(group, row_tile, carry)` over all row tiles of all groups; a single one without a loop."""
    if groups * row_tiles == 1:
        return step(0, 0, carry)
    return lax.fori_loop(0, groups * row_tiles, lambda i, state: step(i // row_tiles, i % row_tiles, state), carry)


def indices(*values: Any) -> tuple[jax.Array, ...]:
    """Where a slice starts, all int32: Python numbers would be int64 beside them under x64."""
    return tuple(jnp.asarray(value, jnp.int32) for value in values)


def tile_at(tiled: Array, group: Any, index: Any) -> Array:
    """One tile of a tile-major array."""
    start = indices(group, index, *(0,) * (tiled.ndim - 2))
    return lax.dynamic_slice(tiled, start, (1, 1, *tiled.shape[2:]))[0, 0]


def put_tile(tiled: Array, tile: Array, group: Any, index: Any) -> Array:
    """A tile-major array with one tile replaced."""
    start = indices(group, index, *(0,) * (tiled.ndim - 2))
    return lax.dynamic_update_slice(tiled, tile[None, None].astype(tiled.dtype), start)


def batched(lhs: Array, rhs: Array, rhs_contracts: int) -> Array:
    """(units, M, C) times (units, C, P) if `rhs_contracts` is 1, (units, P, C) if 2, to (units, M, P)."""
    return lax.dot_general(lhs, rhs, (((2,), (rhs_contracts,)), ((0,), (0,))), preferred_element_type=lhs.dtype)
