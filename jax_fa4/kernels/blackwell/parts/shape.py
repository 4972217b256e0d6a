"""What of a forward plan the device code needs, and what its roles share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from jax_fa4.kernels.blackwell.geometry import KEY_TILE, STAGES, TILE_ROWS, emulated_pairs
from jax_fa4.kernels.blackwell.parts.products import Product, SharedOperand
from jax_fa4.kernels.parts.assembly import assembly
from jax_fa4.kernels.parts.block_walk import Band, RowIntervals, WorkItem
from jax_fa4.kernels.parts.signals import Signal
from jax_fa4.kernels.parts.tile_mask import SegmentIds
from jax_fa4.kernels.plan import KernelPlan

ELEMENTS = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}
ELEMENT_BYTES = 2
Block = Any  # a place in the grid: of the head, of the tile of queries, of the section; or in the work table


@dataclass(frozen=True)
class Shape:
    """A forward plan's options, and where its buffers lie."""

    plan: KernelPlan
    dtype: Any
    head_dim: int  # padded
    value_dim: int  # padded
    key_stages: int
    value_stages: int
    emulated: tuple[int, ...]  # pairs of each fragment that the polynomial computes
    has_own_probs: bool
    ctas: int  # that share an item and every product: 1, or 2
    scheduling: str  # how a CTA comes by its items: `plans.Scheduling`
    loads_max: bool  # loads from tensor memory can tell the highest of what they load
    intervals: bool  # masks from memory, else by arithmetic
    has_left: bool  # an arithmetic mask's left edge is not always 0
    has_ids: bool  # masked tiles may have to compare ids
    has_cap: bool
    has_sinks: bool

    @staticmethod
    def of(plan: KernelPlan) -> Shape:
        """The plan's options."""
        option: Callable[[str], Any] = plan.option
        mask = option("mask")
        return Shape(
            plan=plan,
            dtype=ELEMENTS[option("dtype")],
            head_dim=option("head_dim"),
            value_dim=option("value_dim"),
            key_stages=option("key_stages"),
            value_stages=option("value_stages"),
            emulated=emulated_pairs(option("emulated")),
            has_own_probs=option("own_probs"),
            ctas=option("ctas"),
            scheduling=option("scheduling"),
            loads_max=plan.architecture == "sm_103a",
            intervals=mask in ("intervals", "ids"),
            has_left=mask == "window",
            has_ids=mask == "ids",
            has_cap=option("soft_cap"),
            has_sinks=option("sinks"),
        )

    @property
    def has_many_items(self) -> bool:
        """Whether a CTA does more than one item."""
        return self.scheduling != "grid"

    @property
    def rows(self) -> int:
        """Query rows of a work item."""
        return STAGES * TILE_ROWS * self.ctas

    def registers(self, role: str) -> int:
        """Registers of a role's threads."""
        return next(one.registers or 0 for one in self.plan.roles if one.name == role)

    def columns(self, buffer: str) -> int:
        """First column of a buffer of tensor memory."""
        return next(one.begin for one in self.plan.tensor_memory if one.name == buffer)

    def stage_bytes(self, buffer: str) -> int:
        """Bytes of one stage of a shared buffer."""
        return next(one.bytes for one in self.plan.shared if one.name == buffer)

    @property
    def key_rows(self) -> int:
        """Keys of a tile that one CTA holds; a product takes the rest from the other."""
        return KEY_TILE // self.ctas

    @property
    def value_columns(self) -> int:
        """Columns of the values that one CTA holds."""
        return self.value_dim // self.ctas

    def operand(self, dim: int, rows: int, is_transposed: bool = False) -> SharedOperand:
        """A tile of `rows` rows of `dim` columns in shared memory."""
        return SharedOperand(self.box_columns(dim) * ELEMENT_BYTES, rows, is_transposed)

    @staticmethod
    def box_columns(dim: int) -> int:
        """Columns of a copied box."""
        return 64 if dim % 64 == 0 else 32

    @property
    def score_product(self) -> Product:
        """S = Q K^T."""
        query, key = (self.operand(self.head_dim, rows) for rows in (TILE_ROWS, self.key_rows))
        return Product(TILE_ROWS * self.ctas, KEY_TILE, query, key, self.dtype is cutlass.BFloat16, self.ctas)

    @property
    def output_product(self) -> Product:
        """O += P V, P from tensor memory."""
        value = self.operand(self.value_columns, KEY_TILE, is_transposed=True)
        return Product(TILE_ROWS * self.ctas, self.value_dim, None, value, self.dtype is cutlass.BFloat16, self.ctas)


@dataclass(frozen=True)
class Memory:
    """A CTA's buffers and events in shared memory; of a pair, where the first CTA's barriers are waited at by it alone,
    both arrive there."""

    shape: Shape
    memory: cute.Pointer  # dynamic shared memory
    rank: Any  # of this CTA in its pair; 0 where there are no pairs

    def buffer(self, name: str, stage: Any = 0) -> Int32:
        """Shared-memory address of a stage of a buffer."""
        shape = self.shape
        first = self.memory.toint() + shape.plan.shared_offsets[name]
        return first + Int32(stage) * shape.stage_bytes(name)

    def pointer(self, name: str, kind: Any) -> cute.Pointer:
        """Pointer to a shared buffer of elements of that kind."""
        return cute.recast_ptr(self.memory + self.shape.plan.shared_offsets[name], dtype=kind)

    def statistic(self, name: str, stage: Any, row: Int32) -> Any:
        """One float32 of a buffer that has one for each row."""
        return cute.make_tensor(self.pointer(name, Float32) + (Int32(stage) * TILE_ROWS + row), cute.make_layout(1))

    def signal(self, name: str) -> Signal:
        """The barriers of an event; of a pair, those that only one warp of the first CTA waits for are that CTA's."""
        plan = self.shape.plan
        event = next(one for one in plan.events if one.name == name)
        pointer = cute.recast_ptr(self.memory + plan.event_offsets[name], dtype=Int64)
        in_leader = None
        if self.shape.ctas == 2 and event.waiters in (("mma",), ("schedule",)):
            text = "mapa.shared::cluster.u32 $0, $1, 0;"
            in_leader = assembly(text, [Int32], pointer.toint(), has_effect=False)
        return Signal(pointer, event.stages, event.count, in_leader)

    def init_signals(self) -> None:
        """Set every barrier's count (call in one thread)."""
        for event in self.shape.plan.events:
            self.signal(event.name).init()


@dataclass(frozen=True)
class Context(Memory):
    """What every role shares: the buffers and the events, the item, what its rows see."""

    item: WorkItem
    visible: Band | RowIntervals
    ids: Any  # SegmentIds, or None where nothing compares them
    heads: Int32

    def first_row(self, stage: Any) -> Int32:
        """First query row of this CTA's tile of a stage: the tiles of a pair lie next to each other, as a product takes
        them."""
        tile = Int32(stage) * self.shape.ctas + self.rank
        return self.item.query_tile * self.shape.rows + tile * TILE_ROWS

    def row_sink(self, sinks: Any) -> Any:
        """The head's sink, or None."""
        if not self.shape.has_sinks:
            return None
        return cute.make_tensor(sinks + self.item.head, cute.make_layout(1))[0]


@dataclass(frozen=True)
class Call:
    """The kernel's arguments that say what this CTA works on.

    Each role makes its own context of them: what was found before the roles part would take registers of every role.
    """

    memory: Memory
    block: tuple[Int32, Int32, Int32]  # this CTA's place in the grid
    tables: tuple[Any, ...]  # work table, lo, hi, query ids, key ids; None where the plan has none
    lengths: tuple[Int32, Int32]  # queries, keys
    heads: Int32
    band: tuple[Int32, Int32, Int32]  # offset, left, right
    section_heads: Int32
    interval_stride: Int32
    items: Any  # how many in all; None where their number is that of CTAs or pairs

    def numbered(self, number: Any) -> tuple[Int32, Int32, Int32]:
        """The place of an item in the grid that has one CTA or pair for each."""
        if self.memory.shape.intervals:
            return number, Int32(0), Int32(0)
        tiles = cute.ceil_div(self.lengths[0], self.memory.shape.rows)
        rest = number // self.section_heads
        return number % self.section_heads, rest % tiles, rest // tiles

    def context(self, place: Block) -> Context:
        """The item at a place of the grid, what its rows see, and everything else."""
        shape, (queries, keys) = self.memory.shape, self.lengths
        (block, query_tile, section), (items, lo, hi, query_ids, key_ids) = place, self.tables
        visible: Any
        if shape.intervals:
            item = WorkItem.read(items, block)
            first_row = Int64(item.batch) * self.interval_stride
            visible = RowIntervals(queries, lo + first_row, hi + first_row)
        else:
            visible = Band(queries, keys, *self.band)
            # Blocks start in the order of x, then y, then z: sections of heads one after the other, each with its
            # longest query tiles first.
            head = section * self.section_heads + block
            from_last = cute.ceil_div(queries, shape.rows) - 1 - query_tile
            item = visible.work_item(head // self.heads, head % self.heads, from_last, shape.rows, KEY_TILE)
        ids = None
        if shape.has_ids:
            first_query, first_key = Int64(item.batch) * queries, Int64(item.batch) * keys
            ids = SegmentIds(query_ids + first_query, key_ids + first_key, queries, keys)
        memory = self.memory
        return Context(shape, memory.memory, memory.rank, item, visible, ids, self.heads)
