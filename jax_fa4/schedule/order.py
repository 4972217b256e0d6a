"""The order in which tiles are handed to multiprocessors, as a table that a kernel only walks.

An item of work is one row tile of one head of one batch row, with the bounds of the column tiles it must visit. Handing
out the longest items first leaves no multiprocessor with a long one at the end; keeping heads together that fit in the
L2 cache lets items find each other's keys and values there. The table does both: batch rows outermost, the one with the
heaviest tile first; in each, sections of heads that fit in L2; in a section, the longest tile first, and for each tile
all heads of the section, those that share keys and values next to each other (FlashAttention-4, arXiv 2603.05451,
section 3.3).

That order has one weakness, which the paper leaves: a section that starts late may hold an item longer than all the
work that is left, as when one document of a packed row dwarfs the others. Such a section is merged with those before
it, as many as it takes for its longest item to end with the rest.

All of it is array arithmetic that NumPy does while a call is traced, or XLA at run time where ids or lengths are
traced; where kernels run, `kernels/plan_order.py` makes the same table.
"""

import dataclasses
import enum
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_fa4.cost import Architecture, ItemCost, backward_tile, forward_tile
from jax_fa4.problem import AttentionOperands, AttentionProblem, PlannedGrids
from jax_fa4.schedule.tiles import Intervals, TileBounds, tile_bounds

Array = Any  # np.ndarray or jax.Array


class Policy(enum.Enum):
    """How items are ordered: longest first by default; the orders by sections serve the deterministic backward (see
    `turns.py`), and the first two comparisons."""

    PLAIN = "plain"  # batch rows, heads, row tiles, each from first to last
    REVERSED = "reversed"  # the same with row tiles from last to first: longest first if the mask is causal
    FIRST_FIRST = "first_first"  # sections of heads that fit in L2: in each, tiles from first to last with all heads
    LAST_FIRST = "last_first"  # the same with row tiles from last to first
    LONGEST_FIRST = "longest_first"


class Column(enum.IntEnum):
    """Columns of the table. The last four are `TileBounds`, in column tiles."""

    BATCH = 0
    HEAD = 1
    TILE = 2
    COMPARE_IDS = 3  # 1 where partial tiles must compare ids besides intervals
    BEGIN = 4
    FULL_BEGIN = 5
    FULL_END = 6
    END = 7


class WorkTable(NamedTuple):
    """A schedule: a pytree of NumPy arrays, or of JAX arrays where masks are traced.

    Attributes:
      items: (n, 8) int32, one item a row, in the order in which they are handed out; see `Column`. Every row tile of
      every head is
        there once, also those that see nothing, since their outputs must be written.
      clocks: (n,) int32, what each item is estimated to take.
      batch_order: (B,) int32, virtual to actual batch row: where each place in the order of batch rows is taken from.
    """

    items: Array
    clocks: Array
    batch_order: Array


@dataclasses.dataclass(frozen=True)
class WorkGrid:
    """What there is to order, apart from the mask.

    Attributes:
      batch: batch rows.
      heads: heads that items are made for.
      sharing_heads: neighbouring heads that use the same data in L2; divides `heads`.
      shared_bytes: size of that data for one group of them and one batch row.
      row_tile: rows of an item.
      column_tile: columns of a tile.
      columns: columns of the score matrix.
      cost: clocks of an item.
      section_l2_bytes: bytes of L2 that a section may fill.
      slots: items that run at a time: multiprocessors, or pairs of them.
    """

    batch: int
    heads: int
    sharing_heads: int
    shared_bytes: int
    row_tile: int
    column_tile: int
    columns: int
    cost: ItemCost
    section_l2_bytes: int
    slots: int

    @property
    def groups_in_l2(self) -> int:
        """Groups of heads whose shared data fit in L2 together; may be 0."""
        return self.section_l2_bytes // max(self.shared_bytes, 1)

    @property
    def section_heads(self) -> int:
        """Heads of a section: those of the greatest power of two of groups that fits in L2, at least one group's."""
        power_of_two = 1 << max(self.groups_in_l2.bit_length() - 1, 0)
        return min(power_of_two * self.sharing_heads, max(self.heads, 1))

    @property
    def clock_bits(self) -> tuple[int, int]:
        """Bits of an item's clocks that count beside its section, and how many low ones are dropped for that.

        A sort by one number is several times as fast on a GPU as one by two, so section and clocks share 31 bits. The
        clocks of the longest item that there could be are known, hence what of theirs has to be dropped, if anything.
        """
        longest = self.cost.overhead + self.cost.partial * -(-self.columns // self.column_tile)
        bits = max(31 - (self.batch * self.sections).bit_length(), 1)
        return bits, max(longest.bit_length() - bits, 0)

    @property
    def sections(self) -> int:
        """Sections of each batch row."""
        return -(-self.heads // self.section_heads)


def forward_grid(
    problem: AttentionProblem, query_tile: int, key_tile: int, arch: Architecture, *, ctas: int = 1
) -> WorkGrid:
    """The grid of the forward pass: items are query tiles, and L2 keeps keys and values.

    Args:
      problem: the call.
      query_tile: query rows of an item; of a pair, where `ctas` is 2.
      key_tile: keys of a block.
      arch: the GPU.
      ctas: multiprocessors that share an item.
    """
    dims = problem.head_dim, problem.value_dim
    itemsize = jnp.dtype(problem.dtype).itemsize
    return WorkGrid(
        batch=problem.batch,
        heads=problem.query_heads,
        sharing_heads=max(problem.group_size, 1),
        shared_bytes=problem.key_length * sum(dims) * itemsize,
        row_tile=query_tile,
        column_tile=key_tile,
        columns=problem.key_length,
        cost=ItemCost.of(forward_tile(arch, query_tile // ctas, key_tile, *dims, ctas=ctas)),
        section_l2_bytes=arch.section_l2_bytes,
        slots=arch.sms // ctas,
    )


def backward_grid(
    problem: AttentionProblem,
    query_tile: int,
    key_tile: int,
    arch: Architecture,
    *,
    ctas: int = 1,
    whole_group: bool = False,
) -> WorkGrid:
    """The grid of the backward pass: items are key tiles, and L2 keeps what they read and add to for each query.

    That is queries, output gradients and float32 sums of query gradients.

    Args:
      problem: the call.
      query_tile: queries of a block.
      key_tile: key rows of an item; of a pair, where `ctas` is 2.
      arch: the GPU.
      ctas: multiprocessors that share an item.
      whole_group: whether an item walks all query heads that share its KV head, so that items are made for KV heads.
    """
    dims = problem.head_dim, problem.value_dim
    itemsize = jnp.dtype(problem.dtype).itemsize
    group = max(problem.group_size, 1) if whole_group else 1
    cost = ItemCost.of(backward_tile(arch, query_tile, key_tile // ctas, *dims, ctas=ctas))
    return WorkGrid(
        batch=problem.batch,
        heads=problem.query_heads // group,
        sharing_heads=1,
        shared_bytes=problem.query_length * (sum(dims) * itemsize + problem.head_dim * 4) * group,
        row_tile=key_tile,
        column_tile=query_tile,
        columns=problem.query_length,
        cost=dataclasses.replace(cost, full=cost.full * group, partial=cost.partial * group),
        section_l2_bytes=arch.section_l2_bytes,
        slots=arch.sms // ctas,
    )


def forward_table(
    problem: AttentionProblem,
    operands: AttentionOperands,
    query_tile: int,
    key_tile: int,
    arch: Architecture,
    *,
    ctas: int = 1,
    policy: Policy = Policy.LONGEST_FIRST,
) -> WorkTable:
    """The schedule of a forward pass; see `forward_grid` for the arguments.

    Returns:
      A WorkTable of NumPy arrays, kept from call to call, where all ids and lengths are known when the call is traced;
      of JAX arrays where one is not.
    """
    grid = forward_grid(problem, query_tile, key_tile, arch, ctas=ctas)
    return work_table(problem, operands, grid, policy, 0)


def backward_table(
    problem: AttentionProblem,
    operands: AttentionOperands,
    query_tile: int,
    key_tile: int,
    arch: Architecture,
    *,
    ctas: int = 1,
    whole_group: bool = False,
    policy: Policy = Policy.LONGEST_FIRST,
) -> WorkTable:
    """The schedule of a backward pass; see `backward_grid` for the arguments and `forward_table` for the result."""
    grid = backward_grid(problem, query_tile, key_tile, arch, ctas=ctas, whole_group=whole_group)
    return work_table(problem, operands, grid, policy, 1)


def work_table(
    problem: AttentionProblem, operands: AttentionOperands, grid: WorkGrid, policy: Policy, direction: int
) -> WorkTable:
    """The table of a grid, for the forward (0) or backward (1) pass: the plan's, a kept one, or one made here."""
    items = (operands.forward_items, operands.backward_items)[direction]
    planned = problem.planned[direction]
    if items is not None and planned == grid and policy is Policy.LONGEST_FIRST:
        return _of_items(grid, items)
    if items is not None and (planned.row_tile, planned.column_tile) != (grid.row_tile, grid.column_tile):
        raise ValueError(
            f"segment_ids is a plan with work tables for tiles of {planned.row_tile} by {planned.column_tile}, but the "
            f"kernel that takes this call has tiles of {grid.row_tile} by {grid.column_tile}. Make the plan for the "
            "same device (jax_fa4.target) and logits_soft_cap, or leave `heads` out of plan_segments."
        )
    if operands.query_lo is None and not any(isinstance(x, jax.Array) for x in problem.mask_operands(operands)):
        return _concrete_table(problem, grid, policy, direction)
    return make_table(grid, problem.intervals(operands)[direction], policy)


def _of_items(grid: WorkGrid, items: Array) -> WorkTable:
    """A table whose items are given; what they take and the order of batch rows follow from these."""
    bounds = TileBounds(*(items[:, column] for column in range(Column.BEGIN, Column.END + 1)))
    first_place = _stable_order(jnp, items[:, Column.BATCH]).reshape(grid.batch, -1)[:, 0]  # each has as many items
    return WorkTable(items, _item_clocks(jnp, bounds, grid.cost), _stable_order(jnp, first_place))


@functools.lru_cache(maxsize=256)
def _concrete_table(problem: AttentionProblem, grid: WorkGrid, policy: Policy, direction: int) -> WorkTable:
    table = make_table(grid, problem.intervals(AttentionOperands())[direction], policy)
    for array in table:
        array.flags.writeable = False
    return table


def make_table(grid: WorkGrid, intervals: Intervals, policy: Policy = Policy.LONGEST_FIRST) -> WorkTable:
    """Orders all items of a grid.

    Args:
      grid: what there is to order.
      intervals: what each row sees, (B', R) with B' = 1 or the grid's batch; NumPy or JAX.
      policy: how to order.

    Returns:
      The WorkTable, of the same kind of arrays as `intervals`.
    """
    xp = jnp if isinstance(intervals.lo, jax.Array) else np
    bounds = tile_bounds(intervals, grid.row_tile, grid.column_tile, grid.columns)
    row_tiles = bounds.end.shape[1]
    clocks = xp.broadcast_to(_item_clocks(xp, bounds, grid.cost), (grid.batch, row_tiles))
    batch_order = xp.arange(grid.batch, dtype=xp.int32)
    # Each place in the table by (virtual batch row, row tile, head): the last varies fastest unless policies say
    # otherwise.
    places = xp.arange(grid.batch * row_tiles * grid.heads, dtype=xp.int32)
    if policy is Policy.LONGEST_FIRST:
        batch_order, places = _longest_first(xp, grid, clocks, places)
    elif policy in (Policy.FIRST_FIRST, Policy.LAST_FIRST):
        places = xp.asarray(_by_sections(grid, row_tiles, policy is Policy.LAST_FIRST))
    else:
        step = -1 if policy is Policy.REVERSED else 1
        shaped = places.reshape(grid.batch, row_tiles, grid.heads)[:, ::step]
        places = shaped.swapaxes(1, 2).ravel()
    virtual_tile, head = xp.divmod(places, max(grid.heads, 1))
    virtual, tile = xp.divmod(virtual_tile, max(row_tiles, 1))
    batch = batch_order[virtual]

    def of_item(values: Array) -> Array:
        return xp.broadcast_to(values, (grid.batch, row_tiles))[batch, tile]

    compare_ids = of_item(~intervals.exact[:, None])
    columns = (batch, head, tile, compare_ids, *(of_item(bound) for bound in bounds))
    items = xp.stack([column.astype(xp.int32) for column in columns], axis=1)
    return WorkTable(items, of_item(clocks), batch_order)


def item_tables(grids: PlannedGrids, intervals: tuple[Intervals, Intervals]) -> tuple[Array | None, Array | None]:
    """Items of the forward and the backward pass, from what queries see and keys are seen by; None without a grid."""
    forward, backward = (
        None if grid is None else make_table(grid, rows).items for grid, rows in zip(grids, intervals, strict=True)
    )
    return forward, backward


def _by_sections(grid: WorkGrid, row_tiles: int, last_first: bool) -> np.ndarray:
    """Places of all items, section by section, in each tile by tile."""
    shaped = np.arange(grid.batch * row_tiles * grid.heads, dtype=np.int32).reshape(grid.batch, row_tiles, grid.heads)
    shaped = shaped[:, ::-1] if last_first else shaped
    sections = np.split(shaped, range(grid.section_heads, grid.heads, grid.section_heads), axis=2)
    return np.concatenate([one.reshape(grid.batch, row_tiles * one.shape[2]) for one in sections], axis=1).ravel()


def earlier_items(bounds: TileBounds, column_tiles: int) -> Array:
    """(B', row_tiles, column_tiles) int32: how many items with earlier rows visit a column tile; as `later_items`."""
    xp = jnp if isinstance(bounds.begin, jax.Array) else np
    mirrored = TileBounds(*(bound[:, ::-1] for bound in bounds))
    return xp.asarray(later_items(mirrored, column_tiles)[:, ::-1])


def later_items(bounds: TileBounds, column_tiles: int) -> Array:
    """(B', row_tiles, column_tiles) int32: how many items with later rows visit a column tile; NumPy or JAX as the
    bounds are."""
    xp = jnp if isinstance(bounds.begin, jax.Array) else np
    tiles = xp.arange(column_tiles)
    visits = (bounds.begin[:, :, None] <= tiles) & (tiles < bounds.end[:, :, None])
    from_last = xp.cumsum(visits[:, ::-1].astype(xp.int32), axis=1)[:, ::-1]
    return (from_last - visits).astype(xp.int32)


def _item_clocks(xp: Any, bounds: TileBounds, cost: ItemCost) -> Array:
    """(B', row_tiles) int32: the overhead, and each tile of either class."""
    full = bounds.full_end - bounds.full_begin
    partial = bounds.end - bounds.begin - full
    return (cost.overhead + cost.full * full + cost.partial * partial).astype(xp.int32)


def _longest_first(xp: Any, grid: WorkGrid, clocks: Array, places: Array) -> tuple[Array, Array]:
    """The order of batch rows, and the places of all items sorted by section, then longest first."""
    row_tiles = clocks.shape[1]
    if places.size == 0:
        return xp.arange(grid.batch, dtype=xp.int32), places
    heaviest = clocks.max(axis=1)
    batch_order = _stable_order(xp, -heaviest)
    work = clocks[batch_order].astype(xp.float32).sum(axis=1)
    heads_of_section = np.minimum(grid.section_heads, grid.heads - np.arange(grid.sections) * grid.section_heads)
    section_work = (work[:, None] * heads_of_section.astype(np.float32)).ravel()
    section_longest = xp.repeat(heaviest[batch_order], grid.sections).astype(xp.float32)
    groups = _merge_sections(xp, section_work, section_longest, grid.slots).reshape(grid.batch, grid.sections)
    section_of_head = np.arange(grid.heads) // grid.section_heads
    shape = (grid.batch, row_tiles, grid.heads)
    group = xp.broadcast_to(groups[:, section_of_head][:, None, :], shape).ravel()
    shortness, bits = _shortness(grid, clocks[batch_order])
    shortness = xp.broadcast_to(shortness[:, :, None], shape).ravel()
    return batch_order, places[_stable_order(xp, (group << bits) + shortness)]


def _shortness(grid: WorkGrid, clocks: Array) -> tuple[Array, int]:
    """Clocks as numbers that grow the shorter an item is, int32, and how many bits these have."""
    bits, dropped = grid.clock_bits
    return (1 << bits) - 1 - (clocks >> dropped), bits


def _stable_order(xp: Any, keys: Array) -> Array:
    """The places of keys in ascending order, int32; equal ones stay in their order."""
    order = np.argsort(keys, kind="stable") if xp is np else jnp.argsort(keys, stable=True)
    return order.astype(xp.int32)


def _merge_sections(xp: Any, work: Array, longest: Array, slots: int) -> Array:
    """The group of each section, ascending: sections share one where a later one's longest item would end too late.

    Args:
      xp: numpy or jax.numpy.
      work: clocks of each section's items together, in the sections' order.
      longest: clocks of each section's longest item, which never increases from a section to the next.
      slots: items that run at a time.

    Returns:
      int32 of the same length.
    """
    remaining = xp.cumsum(work[::-1])[::-1]
    # The last section at which enough work remains, on every slot, for this section's longest item to end with it.
    search = functools.partial(jnp.searchsorted, method="scan_unrolled") if xp is jnp else np.searchsorted
    latest_start = search(-remaining, -longest * slots, side="right") - 1
    sections = xp.arange(work.shape[0])
    is_joined = (latest_start < sections) & (sections > 0)
    return xp.cumsum(~is_joined).astype(xp.int32)
