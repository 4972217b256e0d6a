"""What every role of the Hopper forward shares: the shape of a plan, shared memory, what rows see, the item."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.utils import hopper_helpers

from jax_fa4.kernels.hopper.item_queue import PLACES, Progress
from jax_fa4.kernels.parts.block_walk import ITEM_FIELDS, Band, RowIntervals, WorkItem
from jax_fa4.kernels.parts.events import Ring
from jax_fa4.kernels.parts.tile_mask import SegmentIds
from jax_fa4.kernels.plan import KernelPlan

ELEMENTS = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}
GROUP_ROWS = 64  # rows of one warpgroup product (PTX ISA: wgmma m64nNk16)
WARPS_PER_GROUP = 4
NO_KEY = (1 << 31) - 1  # the first key of rows that see none
PRODUCT_DEPTH = 16  # k of one warpgroup product of 16-bit operands


@dataclass(frozen=True)
class Shape:
    """What of a plan the device code needs."""

    dtype: Any
    head_dim: int  # padded
    groups: int
    key_tile: int
    stages: int
    load_registers: int
    attend_registers: int
    intervals: bool  # masks from memory, else by arithmetic
    has_left: bool  # an arithmetic mask's left edge is not always 0
    has_ids: bool  # masked tiles may have to compare ids
    has_cap: bool
    has_sinks: bool
    is_persistent: bool  # a block does one item after the other

    @staticmethod
    def of(plan: KernelPlan) -> Shape:
        """The plan's options and registers."""
        option: Callable[[str], Any] = plan.option
        registers = {role.name: role.registers for role in plan.roles}
        mask = option("mask")
        return Shape(
            dtype=ELEMENTS[option("dtype")],
            head_dim=option("head_dim"),
            groups=option("groups"),
            key_tile=option("key_tile"),
            stages=option("stages"),
            load_registers=registers["load"] or 0,
            attend_registers=registers["attend"] or 0,
            intervals=mask in ("intervals", "ids"),
            has_left=mask == "window",
            has_ids=mask == "ids",
            has_cap=option("soft_cap"),
            has_sinks=option("sinks"),
            is_persistent=option("persistent"),
        )

    @property
    def rows(self) -> int:
        """Query rows of a work item."""
        return self.groups * GROUP_ROWS

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in shared memory."""
        return self.head_dim * self.dtype.width // 8

    def tile_layout(self, rows: int, count: int) -> cute.ComposedLayout:
        """Shared-memory layout of `count` (rows, head_dim) tiles: rows cut into swizzled pieces of 128 or 64 bytes."""
        kinds = warpgroup.SmemLayoutAtomKind
        atom = warpgroup.make_smem_layout_atom(kinds.K_SW128 if self.head_dim % 64 == 0 else kinds.K_SW64, self.dtype)
        return cute.tile_to_shape(atom, (rows, self.head_dim, count), order=(0, 1, 2))

    def score_product(self) -> cute.TiledMma:
        """Q K^T of one warpgroup: both operands from shared memory."""
        return hopper_helpers.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            OperandMajorMode.K,
            OperandMajorMode.K,
            Float32,
            (1, 1, 1),
            (GROUP_ROWS, self.key_tile),
        )

    def output_product(self) -> cute.TiledMma:
        """P V of one warpgroup: P from registers, V from shared memory, contiguous along head_dim."""
        return hopper_helpers.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            OperandMajorMode.K,
            OperandMajorMode.MN,
            Float32,
            (1, 1, 1),
            (GROUP_ROWS, self.head_dim),
            warpgroup.OperandSource.RMEM,
        )


@dataclass(frozen=True)
class Memory:
    """Buffers and events in shared memory."""

    query: cute.Tensor
    key: cute.Tensor
    value: cute.Tensor
    out: cute.Tensor
    queries: Ring  # a stage for each group
    keys: Ring
    values: Ring
    entries: Any  # items; of persistent blocks alone, as are their barriers
    entry_barriers: Any

    @staticmethod
    def allocate(shape: Shape) -> Memory:
        """Lay out shared memory in the plan's order."""
        memory = cutlass.memory.SmemAllocator()

        def tiles(layout: cute.ComposedLayout) -> cute.Tensor:
            return memory.allocate_tensor(shape.dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)

        query = tiles(shape.tile_layout(GROUP_ROWS, shape.groups))
        key, value = (tiles(shape.tile_layout(shape.key_tile, shape.stages)) for _ in range(2))
        out = tiles(shape.tile_layout(GROUP_ROWS, shape.groups)) if shape.is_persistent else query
        places = PLACES if shape.is_persistent else 0
        entries = memory.allocate_array(Int32, places * ITEM_FIELDS) if places else None
        barriers = memory.allocate_array(Int64, 2 * (shape.groups + 2 * shape.stages + places))
        queries = Ring(barriers, shape.groups, GROUP_ROWS * shape.row_bytes)
        keys = Ring(barriers + 2 * shape.groups, shape.stages, shape.key_tile * shape.row_bytes)
        values = Ring(keys.barriers + 2 * shape.stages, shape.stages, shape.key_tile * shape.row_bytes)
        return Memory(query, key, value, out, queries, keys, values, entries, values.barriers + 2 * shape.stages)

    def init(self, shape: Shape) -> None:
        """Set the arrival counts of all events but those of items (call in one thread)."""
        self.queries.init(WARPS_PER_GROUP)
        for ring in (self.keys, self.values):
            ring.init(shape.groups * WARPS_PER_GROUP)


@dataclass(frozen=True)
class Masks:
    """What rows see in every batch row, by arithmetic or from memory; pointers are None where the plan has none."""

    shape: Shape
    band: Band
    interval_stride: Int32
    lo: Any
    hi: Any
    query_ids: Any
    key_ids: Any

    def visible(self, batch: Int32) -> Band | RowIntervals:
        """Keys that the queries of a batch row see."""
        if not self.shape.intervals:
            return self.band
        first = Int64(batch) * self.interval_stride
        return RowIntervals(self.band.queries, self.lo + first, self.hi + first)

    @cute.jit
    def seen_tiles(self, batch: Int32, first: Int32) -> tuple[Int32, Int32]:
        """Tiles of keys [begin, end) that a warpgroup sees whose first row is given; the same in each warp.

        Rows beyond the last see nothing.
        """
        queries, columns = self.band.queries, self.shape.key_tile
        lo, hi = Int32(0), Int32(0)
        if cutlass.const_expr(self.shape.intervals):
            visible, lane = self.visible(batch), cute.arch.lane_idx()
            lo = Int32(NO_KEY)
            for half in cutlass.range_constexpr(GROUP_ROWS // 32):
                row = first + 32 * half + lane
                row_lo, row_hi = visible.lo(row), visible.hi(row)
                lo = cutlass.min(lo, cutlass.select_(row_lo < row_hi, row_lo, Int32(NO_KEY)))
                hi = cutlass.max(hi, row_hi)
            lo, hi = cute.arch.warp_redux_sync(lo, "min"), cute.arch.warp_redux_sync(hi, "max")
        else:  # edges grow with the row
            lo, hi = self.band.lo(first), self.band.hi(cutlass.min(first + GROUP_ROWS, queries) - 1)
        end = cutlass.select_(first < queries, cute.ceil_div(hi, columns), Int32(0))
        return cute.arch.make_warp_uniform(lo // columns), cute.arch.make_warp_uniform(end)

    def ids(self, batch: Int32) -> SegmentIds:
        """Ids of a batch row."""
        queries, keys = self.band.queries, self.band.keys
        first_query, first_key = Int64(batch) * queries, Int64(batch) * keys
        return SegmentIds(self.query_ids + first_query, self.key_ids + first_key, queries, keys)


@dataclass(frozen=True)
class Context:
    """What every role shares: the item, what its rows see, what came before, shared memory."""

    shape: Shape
    memory: Memory
    item: WorkItem
    masks: Masks
    lse_strides: tuple[Int32, Int32, Int32]  # in elements, of batch rows, rows and heads
    progress: Progress

    @property
    def visible(self) -> Band | RowIntervals:
        """Keys that the item's queries see."""
        return self.masks.visible(self.item.batch)

    @property
    def ids(self) -> SegmentIds:
        """Ids of the item's queries and keys."""
        return self.masks.ids(self.item.batch)

    def use(self, step: Any) -> Int32:
        """Which use of the rings a step of the item is."""
        return self.progress.steps + Int32(step)

    def query_use(self, group: Any) -> Int32:
        """Which use of the ring of queries those of a group are."""
        return self.progress.items * self.shape.groups + Int32(group)
