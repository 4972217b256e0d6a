"""What every role of the Hopper backward shares: the shape of a plan, the steps of a work item, buffers and events."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.utils import hopper_helpers

from jax_fa4.kernels.hopper.forward_item import ELEMENTS, GROUP_ROWS, WARPS_PER_GROUP
from jax_fa4.kernels.hopper.item_queue import PLACES, Progress
from jax_fa4.kernels.parts.block_walk import ITEM_FIELDS, Band, RowIntervals, WorkItem
from jax_fa4.kernels.parts.events import GROUP_THREADS, Ring
from jax_fa4.kernels.parts.tile_mask import SegmentIds
from jax_fa4.kernels.plan import KernelPlan

GROUPS = 2  # computing warpgroups
KEY_TILE = GROUPS * GROUP_ROWS
PIECE_BYTES = 128  # of a row of dS: 64 keys of one warpgroup, in a swizzled atom
MEETING_BARRIER = 1  # named barriers; 0 is the whole block's. dS of both warpgroups is written
STAGED_BARRIER = 2  # 2, 3: a warpgroup's query gradients are staged
ADDED_BARRIER = 4  # 4, 5: they have been read
CLOSING_BARRIER = 6  # 6, 7: a warpgroup's key and value gradients are staged
DRAINED_BARRIER = 8  # 8, 9: a warpgroup's last query gradients of an item have been read (persistent blocks)
READ_BARRIER = 10  # 10, 11: the other warpgroup has read a warpgroup's dS; where dS has one stage


@dataclass(frozen=True)
class Shape:
    """What of a plan the device code needs."""

    dtype: Any
    head_dim: int  # padded
    query_tile: int
    query_stages: int
    grad_stages: int
    grad_score_stages: int  # 2: a warpgroup writes dS of a step while the other may still read the one before
    load_registers: int
    compute_registers: int
    sum_columns: int  # columns of a row of the query gradients' sums: head_dim, or more
    intervals: bool  # masks from memory, else by arithmetic
    has_ids: bool  # masked tiles may have to compare ids
    has_cap: bool
    is_ordered: bool  # sums are added in a fixed order
    is_ahead: bool  # scores of the next step are issued before the query gradients of this one
    is_turned: bool  # dK takes dS from shared memory, not from registers
    is_persistent: bool  # a block does one item after the other
    is_split: bool  # an item walks part of the query heads that share its keys: gradients are float32 parts

    @staticmethod
    def of(plan: KernelPlan) -> Shape:
        """The plan's options and registers."""
        option: Callable[[str], Any] = plan.option
        registers = {role.name: role.registers for role in plan.roles}
        mask = option("mask")
        return Shape(
            dtype=ELEMENTS[option("dtype")],
            head_dim=option("head_dim"),
            query_tile=option("query_tile"),
            query_stages=option("query_stages"),
            grad_stages=option("grad_stages"),
            grad_score_stages=option("grad_score_stages"),
            load_registers=registers["load"] or 0,
            compute_registers=registers["compute"] or 0,
            sum_columns=option("sum_columns"),
            intervals=mask in ("intervals", "ids"),
            has_ids=mask == "ids",
            has_cap=option("soft_cap"),
            is_ordered=option("ordered"),
            is_ahead=option("ahead"),
            is_turned=option("turned_scores"),
            is_persistent=option("persistent"),
            is_split=option("split"),
        )

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of queries or keys in shared memory."""
        return self.head_dim * self.dtype.width // 8

    @property
    def block_rows(self) -> int:
        """Queries of a block of dS: 64, or all of a tile that is no multiple of 64."""
        return GROUP_ROWS if self.query_tile % GROUP_ROWS == 0 else self.query_tile

    @property
    def row_blocks(self) -> int:
        """Blocks of dS in a tile."""
        return self.query_tile // self.block_rows

    @property
    def block_elements(self) -> int:
        """Scores of a thread for a block."""
        return GROUP_ROWS * self.block_rows // GROUP_THREADS

    @property
    def block_bytes(self) -> int:
        """A block of a warpgroup's dS."""
        return self.block_rows * PIECE_BYTES

    @property
    def sums_by_columns(self) -> bool:
        """A warpgroup computes 64 columns of the query gradients, transposed, and not rows of them."""
        return self.block_rows != GROUP_ROWS

    @property
    def rounds_late(self) -> bool:
        """Probabilities are rounded with dS and not before, which saves the registers that both forms take."""
        return self.sums_by_columns

    @property
    def sum_width(self) -> int:
        """Columns of the query gradients that a warpgroup computes: all for its 64 queries of 128, else half."""
        return self.sum_columns * self.row_blocks // GROUPS

    @property
    def sum_floats(self) -> int:
        """Query gradients that a warpgroup computes in a step."""
        return self.block_rows * self.sum_width

    def tile_layout(self, rows: int, count: int, columns: int | None = None) -> cute.ComposedLayout:
        """Shared-memory layout of `count` (rows, head_dim) tiles: rows cut into swizzled pieces of 128 or 64 bytes."""
        kinds = warpgroup.SmemLayoutAtomKind
        atom = warpgroup.make_smem_layout_atom(kinds.K_SW128 if self.head_dim % 64 == 0 else kinds.K_SW64, self.dtype)
        return cute.tile_to_shape(atom, (rows, columns or self.head_dim, count), order=(0, 1, 2))

    def grad_score_layout(self) -> cute.ComposedLayout:
        """Blocks of dS: queries by the item's keys, those of a warpgroup together."""
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.dtype)
        return cute.tile_to_shape(
            atom, (self.block_rows, KEY_TILE, self.row_blocks * self.grad_score_stages), order=(0, 1, 2)
        )

    def product(
        self, columns: int, majors: tuple[Any, Any], source: Any = warpgroup.OperandSource.SMEM
    ) -> cute.TiledMma:
        """64 rows by columns; which dimension of either operand is contiguous, and where the first comes from."""
        tile = (GROUP_ROWS, columns)
        return hopper_helpers.make_trivial_tiled_mma(self.dtype, self.dtype, *majors, Float32, (1, 1, 1), tile, source)

    def score_product(self) -> cute.TiledMma:
        """S^T = K Q^T and dP^T = V dO^T of one warpgroup: both operands from shared memory."""
        return self.product(self.query_tile, (OperandMajorMode.K, OperandMajorMode.K))

    def key_product(self) -> cute.TiledMma:
        """dV = P^T dO and dK = dS^T Q of one warpgroup: the first operand from registers."""
        majors = OperandMajorMode.K, OperandMajorMode.MN
        return self.product(self.head_dim, majors, warpgroup.OperandSource.RMEM)

    def turned_product(self) -> cute.TiledMma:
        """dK = dS^T Q of one warpgroup with dS from shared memory."""
        return self.product(self.head_dim, (OperandMajorMode.MN, OperandMajorMode.MN))


@dataclass(frozen=True)
class Walk:
    """The order of an item's steps: masked tiles of every query head, then whole ones, each from first to last.

    Tiles ascend from the diagonal, so that under a causal mask an item's first tile is one that no item with later keys
    is still to visit: in ordered sums, those with later keys go first.
    """

    item: WorkItem
    heads: Int32  # query heads walked

    @property
    def masked(self) -> Int32:
        """Tiles of one head that need element masks."""
        return self.item.masked_count

    @property
    def whole(self) -> Int32:
        """Tiles of one head that need none."""
        return self.item.full_end - self.item.full_begin

    @property
    def masked_steps(self) -> Int32:
        """Steps with masks; they come first."""
        return self.masked * self.heads

    @property
    def steps(self) -> Int32:
        """All steps."""
        return self.item.count * self.heads

    def place(self, step: Int32) -> tuple[Int32, Int32]:
        """(which query head, which query tile) of a step."""
        item, masked_steps = self.item, self.masked_steps
        is_masked = step < masked_steps
        local = cutlass.select_(is_masked, step, step - masked_steps)
        per_head = cutlass.max(cutlass.select_(is_masked, self.masked, self.whole), Int32(1))
        head = local // per_head
        tile = local - head * per_head
        at_left = item.full_begin - item.begin
        masked_tile = cutlass.select_(tile < at_left, item.begin + tile, item.full_end + (tile - at_left))
        return head, cutlass.select_(is_masked, masked_tile, item.full_begin + tile)


@dataclass(frozen=True)
class BandRanks:
    """How many items add to a query tile before this one, by arithmetic: those with later keys."""

    seen: Band  # keys that a query sees
    query_tile: int
    key_tile: Int32  # the item's

    def rank(self, tile: Int32) -> Int32:
        """This item's place."""
        last_row = cutlass.min((tile + 1) * self.query_tile, self.seen.queries) - 1
        return (self.seen.hi(last_row) - 1) // KEY_TILE - self.key_tile


@dataclass(frozen=True)
class TableRanks:
    """The same from memory."""

    row: cute.Pointer  # of the item, an int32 for each query tile

    def rank(self, tile: Int32) -> Int32:
        """This item's place."""
        return cute.make_tensor(self.row + tile, cute.make_layout(1))[0]


@dataclass(frozen=True)
class Memory:
    """Buffers and events in shared memory."""

    key: cute.Tensor
    value: cute.Tensor
    query: cute.Tensor
    grad_out: cute.Tensor
    grad_scores: cute.Tensor
    staged: cute.Pointer  # float32
    lse: cute.Pointer  # float32, a row per stage
    delta: cute.Pointer
    keys: Ring  # one stage
    values: Ring
    queries: Ring
    grads: Ring
    entries: Any  # items; of persistent blocks alone, as are their barriers
    entry_barriers: Any

    @staticmethod
    def allocate(shape: Shape) -> Memory:
        """Lay out shared memory in the plan's order."""
        memory = cutlass.memory.SmemAllocator()

        def tiles(layout: cute.ComposedLayout) -> cute.Tensor:
            return memory.allocate_tensor(shape.dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)

        key, value = (tiles(shape.tile_layout(KEY_TILE, 1)) for _ in range(2))
        counts = shape.query_stages, shape.grad_stages
        query, grad_out = (tiles(shape.tile_layout(shape.query_tile, count)) for count in counts)
        grad_scores = tiles(shape.grad_score_layout())
        staged = memory.allocate_array(Float32, GROUPS * shape.sum_floats)
        lse, delta = (memory.allocate_array(Float32, count * shape.query_tile) for count in counts)
        places = PLACES if shape.is_persistent else 0
        entries = memory.allocate_array(Int32, places * ITEM_FIELDS) if places else None
        barriers = memory.allocate_array(Int64, 2 * (1 + 1 + sum(counts) + places))
        tile_bytes, step_bytes = KEY_TILE * shape.row_bytes, shape.query_tile * (shape.row_bytes + 4)
        keys, values = Ring(barriers, 1, tile_bytes), Ring(barriers + 2, 1, tile_bytes)
        queries = Ring(barriers + 4, shape.query_stages, step_bytes)
        grads = Ring(queries.barriers + 2 * shape.query_stages, shape.grad_stages, step_bytes)
        entry_barriers = grads.barriers + 2 * shape.grad_stages
        tensors, rings = (key, value, query, grad_out, grad_scores), (keys, values, queries, grads)
        return Memory(*tensors, staged, lse, delta, *rings, entries, entry_barriers)

    def gradients(self, shape: Shape) -> tuple[Any, Any]:
        """Where the gradients of keys and values are staged: over keys and values, or, where these are to be loaded
        for the next item meanwhile, over dS and the staged sums."""
        if not shape.is_persistent:
            return self.key[None, None, 0], self.value[None, None, 0]
        layout = shape.tile_layout(KEY_TILE, 2)
        first = cute.recast_ptr(self.grad_scores.iterator, layout.inner, shape.dtype)
        both = cute.make_tensor(first, layout.outer)
        return both[None, None, 0], both[None, None, 1]

    def init(self) -> None:
        """Set the arrival counts of all events but those of items (call in one thread)."""
        for ring in (self.keys, self.values, self.queries, self.grads):
            ring.init(GROUPS * WARPS_PER_GROUP)


@dataclass(frozen=True)
class Job:
    """An item and what of the call's masks is about it."""

    item: WorkItem
    visible: Band | RowIntervals  # queries that see a key
    ids: SegmentIds | None
    order: BandRanks | TableRanks | None
    hidden: tuple[Any, Any]  # flags of the query tiles and key tiles that are read from copies


@dataclass(frozen=True)
class Call:
    """The parameters that say what the items are; pointers are None where the plan has none."""

    shape: Shape
    items: Any
    lo: Any
    hi: Any
    hidden_queries: Any
    hidden_keys: Any
    key_ids: Any
    query_ids: Any
    ranks: Any
    queries: Int32
    keys: Int32
    item_heads: Int32
    offset: Int32
    left: Int32
    right: Int32
    section_heads: Int32
    interval_stride: Int32
    rank_stride: Int32
    query_tiles: Int32

    def item(self, number: Int32 | None) -> WorkItem:
        """The item of that number; None: of this block's place in the grid."""
        if not self.shape.intervals:
            return self._item_of_band(number)
        return WorkItem.read(self.items, cute.arch.block_idx()[0] if number is None else number)

    def job(self, item: WorkItem) -> Job:
        """What is about an item."""
        return self._job_of_table(item) if self.shape.intervals else self._job_of_band(item)

    def _job_of_table(self, item: WorkItem) -> Job:
        first_row = Int64(item.batch) * self.interval_stride
        visible = RowIntervals(self.keys, self.lo + first_row, self.hi + first_row)
        hidden = (
            self.hidden_queries + item.batch * cute.ceil_div(self.queries, self.shape.query_tile),
            self.hidden_keys + item.batch * cute.ceil_div(self.keys, KEY_TILE),
        )
        order = None
        if self.shape.is_ordered:
            row = Int64(item.batch) * self.rank_stride + item.query_tile
            order = TableRanks(self.ranks + row * self.query_tiles)
        ids = None
        if self.shape.has_ids:
            first_query, first_key = Int64(item.batch) * self.queries, Int64(item.batch) * self.keys
            ids = SegmentIds(self.key_ids + first_key, self.query_ids + first_query, self.keys, self.queries)
        return Job(item, visible, ids, order, hidden)

    def _job_of_band(self, item: WorkItem) -> Job:
        order = None
        if self.shape.is_ordered:
            seen = Band(self.queries, self.keys, self.offset, self.left, self.right)
            order = BandRanks(seen, self.shape.query_tile, item.query_tile)
        return Job(item, self._band, None, order, (None, None))

    @property
    def _band(self) -> Band:
        """Queries that a key sees."""
        return Band(self.keys, self.queries, Int32(0) - self.offset, self.right, self.left)

    def _item_of_band(self, number: Int32 | None) -> WorkItem:
        """Items in the order of the grid's x, then y, then z: sections of heads one after the other, each with its
        first keys first, which under a causal mask are the longest items; in ordered sums its last keys first."""
        tiles = cute.ceil_div(self.keys, KEY_TILE)
        if number is None:
            head, place, section = cute.arch.block_idx()
        else:
            row, head = number // self.section_heads, number % self.section_heads
            section, place = row // tiles, row % tiles
        key_tile = tiles - 1 - place if self.shape.is_ordered else place
        head_of_all = section * self.section_heads + head
        return self._whole(self._band, head_of_all // self.item_heads, head_of_all % self.item_heads, key_tile)

    def _whole(self, visible: Band, batch: Int32, head: Int32, key_tile: Int32) -> WorkItem:
        """The item of a key tile; rows of the band are keys.

        Queries beyond the last need no mask, since their probabilities are 0; keys beyond the last do. An item that no
        query sees has no steps.
        """
        rows = self.shape.query_tile
        item = visible.work_item(batch, head, key_tile, KEY_TILE, rows)
        first = key_tile * KEY_TILE
        end = cutlass.select_(visible.lo(first) >= visible.keys, item.begin, item.end)
        sees_last = visible.hi(first) >= visible.keys
        full_end = cutlass.select_(sees_last, end, cutlass.min(item.full_end, end))
        full_begin = cutlass.min(item.full_begin, full_end)
        has_full = (first + KEY_TILE <= visible.queries) & (full_begin < full_end)
        full_begin, full_end = (cutlass.select_(has_full, one, end) for one in (full_begin, full_end))
        return dataclasses.replace(item, full_begin=full_begin, full_end=full_end, end=end)


@dataclass(frozen=True)
class Context:
    """What every role shares: the item and its steps, what came before, shared memory."""

    shape: Shape
    memory: Memory
    walk: Walk
    progress: Progress
    first_head: Int32  # of the query heads walked
    heads: Int32  # query heads of the call
    query_tiles: Int32  # of the padded query length

    @property
    def batch(self) -> Int32:
        """Batch row of the item."""
        return self.walk.item.batch

    def use(self, step: Any) -> Int32:
        """Which use of the rings a step of the item is."""
        return self.progress.steps + Int32(step)

    def tile_number(self, head: Int32, tile: Int32) -> Int64:
        """Which of the call's query tiles a tile of a head is, in arrays (batch, head, padded row)."""
        return (Int64(self.batch) * self.heads + head) * self.query_tiles + tile
