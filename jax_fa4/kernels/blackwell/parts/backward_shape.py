"""What of a backward plan the device code needs, and what its roles share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import fields as fields_of
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from jax_fa4.kernels.blackwell.backward_plans import COMPUTE_GROUPS, TILE, loaded_columns
from jax_fa4.kernels.blackwell.parts.products import Product, SharedOperand
from jax_fa4.kernels.blackwell.product_order import ORDERS, Issue
from jax_fa4.kernels.parts import by_address
from jax_fa4.kernels.parts.assembly import assembly
from jax_fa4.kernels.parts.block_walk import ITEM_FIELDS, Band, RowIntervals, WorkItem
from jax_fa4.kernels.parts.signals import Signal
from jax_fa4.kernels.parts.tile_mask import SegmentIds
from jax_fa4.kernels.plan import KernelPlan

ELEMENTS = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}
ELEMENT_BYTES = 2
HALF = TILE // COMPUTE_GROUPS  # queries of a computing warpgroup


@dataclass(frozen=True)
class Shape:
    """A backward plan's options, and where its buffers lie."""

    plan: KernelPlan
    dtype: Any
    head_dim: int  # padded
    value_dim: int  # padded
    ctas: int  # that share an item and every product: 1, or 2
    order: tuple[Issue, ...]
    intervals: bool  # masks from memory, else by arithmetic
    has_ids: bool  # masked tiles may have to compare ids
    has_cap: bool
    is_ordered: bool  # sums of query gradients are added in a fixed order
    is_split: bool  # several items share the query heads of a KV head

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
            ctas=option("ctas"),
            order=ORDERS[option("order")],
            intervals=mask in ("intervals", "ids"),
            has_ids=mask == "ids",
            has_cap=option("soft_cap"),
            is_ordered=option("ordered"),
            is_split=option("split"),
        )

    def registers(self, role: str) -> int:
        """Registers of a role's threads."""
        return next(one.registers or 0 for one in self.plan.roles if one.name == role)

    def columns(self, buffer: str) -> int:
        """First column of a buffer of tensor memory."""
        return next(one.begin for one in self.plan.tensor_memory if one.name == buffer)

    def stages(self, buffer: str) -> int:
        """Stages of a shared buffer."""
        return next(one.stages for one in self.plan.shared if one.name == buffer)

    def stage_bytes(self, buffer: str) -> int:
        """Bytes of one stage of a shared buffer."""
        return next(one.bytes for one in self.plan.shared if one.name == buffer)

    @property
    def has_own_probs(self) -> bool:
        """Whether probs have columns of their own; else each half lies over its half of the scores."""
        return self.columns("probs") != self.columns("scores")

    @property
    def items_rows(self) -> int:
        """Keys of an item."""
        return self.ctas * TILE

    @property
    def query_rows(self) -> int:
        """Rows of queries that a CTA loads for S and dP: a pair's halves are B's columns."""
        return TILE // self.ctas

    def operand(self, dim: int, is_transposed: bool = False, rows: int = TILE) -> SharedOperand:
        """A tile of a tensor of `dim` columns in shared memory, in boxes of that many rows."""
        return SharedOperand(loaded_columns(dim, self.ctas) * ELEMENT_BYTES, rows, is_transposed)

    def product(self, name: str) -> Product:
        """One of the five products; see `product_order`.

        In a pair each CTA has half of B's columns.
        """
        head, value, rows = self.head_dim, self.value_dim, self.query_rows
        grad_scores = SharedOperand(HALF * ELEMENT_BYTES, TILE, is_transposed=True)
        columns, a, b = {
            "scores": (TILE, self.operand(head), self.operand(head, rows=rows)),
            "grad_probs": (TILE, self.operand(value), self.operand(value, rows=rows)),
            "grad_value": (value, None, self.operand(value, True)),
            "grad_key": (head, None, self.operand(head, True)),
            "grad_query": (head, grad_scores, self.operand(head, True, self.items_rows)),
        }[name]
        # Rows are keys, 128 of each CTA; those of dQ are queries.
        product_rows = TILE if name == "grad_query" else self.items_rows
        return Product(product_rows, columns, a, b, self.dtype is cutlass.BFloat16, self.ctas)


@dataclass(frozen=True)
class Inputs:
    """The kernel's parameters that say what its items are and what keys are seen by; see `backward_plans.SCALARS`."""

    shape: Shape
    items: Any
    lo: Any
    hi: Any
    query_ids: Any
    key_ids: Any
    queries: Int32
    keys: Int32
    padded: Int32
    group: Int32
    kv_heads: Int32
    band: tuple[Int32, Int32, Int32]  # offset, left, right
    section_heads: Int32
    interval_stride: Int32
    last_first: Int32

    def visible_band(self) -> Band:
        """The transposed mask: rows are keys. Queries up to the last tile's end take part, as what is beyond the last
        has log-sums of +inf: so their tile needs no mask."""
        return Band(self.keys, self.padded, *self.band)

    def find_item(self, block: Int32, key_tile: Int32, section: Int32) -> WorkItem:
        """The item of a block: a row of the table; or by arithmetic, sections of heads one after the other as blocks
        start in the order of x, then y, then z."""
        if self.shape.intervals:
            return WorkItem.read(self.items, block)
        from_last = cute.ceil_div(self.keys, self.shape.items_rows) - 1 - key_tile
        key_tile = cutlass.select_(self.last_first != 0, from_last, key_tile)
        head_of_all = section * self.section_heads + block
        batch, head = head_of_all // self.kv_heads, head_of_all % self.kv_heads
        return self.visible_band().work_item(batch, head, key_tile, self.shape.items_rows, TILE)

    def tell_item(self, item: WorkItem, memory: cute.Pointer) -> None:
        """Write an item to shared memory, for all roles."""
        fields = [getattr(item, field.name) for field in fields_of(WorkItem)]
        for place in range(0, ITEM_FIELDS, 4):
            address = memory.toint() + self.shape.plan.shared_offsets["work_item"] + place * 4
            by_address.write_four(address, [Uint32(one) for one in fields[place : place + 4]])

    def context(self, memory: cute.Pointer, rank: Any) -> Context:
        """What a role shares with the others, read when its branch is taken: kept from before it, it would take
        registers that each role needs for itself."""
        address = memory.toint() + self.shape.plan.shared_offsets["work_item"]
        fields: list[Int32] = []
        for place in range(0, ITEM_FIELDS, 4):
            text = f"ld.shared.v4.b32 {{$0, $1, $2, $3}}, [$4 + {place * 4}];"
            fields += assembly(text, [Int32] * 4, address)
        item = WorkItem(*(cute.arch.make_warp_uniform(field) for field in fields))
        visible: Band | RowIntervals = self.visible_band()
        if self.shape.intervals:
            first_row = Int64(item.batch) * self.interval_stride
            visible = RowIntervals(self.keys, self.lo + first_row, self.hi + first_row)
        ids = None
        if self.shape.has_ids:
            first_query, first_key = Int64(item.batch) * self.queries, Int64(item.batch) * self.keys
            ids = SegmentIds(self.key_ids + first_key, self.query_ids + first_query, self.keys, self.queries)
        return Context(self.shape, item, visible, ids, self.group, self.kv_heads, self.last_first, memory, rank)


@dataclass(frozen=True)
class Context:
    """What every role shares: the item, what its keys are seen by, the buffers and the events."""

    shape: Shape
    item: WorkItem  # of keys: its rows are keys, its columns queries, its head one that items are made for
    visible: Band | RowIntervals
    ids: Any  # SegmentIds, or None where nothing compares them
    group: Int32  # query heads of an item
    kv_heads: Int32  # heads that items are made for
    last_first: Int32
    memory: cute.Pointer  # dynamic shared memory
    rank: Any  # of this CTA in its pair; 0 where there are no pairs

    @property
    def key_row(self) -> Int32:
        """First key of this CTA."""
        return self.item.query_tile * self.shape.items_rows + self.rank * TILE

    @property
    def total(self) -> Int32:
        """Tiles that the item meets in all query heads of the group."""
        return self.item.count * self.group

    def query_tile(self, step: Any) -> Int32:
        """The step-th tile of queries: those that need masks first, those at the left edge before those at the right;
        then from the first to the last. So of two items of a causal mask that start together, the one with the earlier
        keys meets every tile one step after the other."""
        item = self.item
        at_left, masked = item.full_begin - item.begin, item.masked_count
        of_masked = cutlass.select_(step < at_left, item.begin + step, item.full_end + (step - at_left))
        return cutlass.select_(step < masked, of_masked, item.full_begin + (step - masked))

    def query_row(self, step: Any) -> Int32:
        """First query of the step-th tile."""
        return self.query_tile(step) * TILE

    def buffer(self, name: str, stage: Any = 0) -> Int32:
        """Shared-memory address of a stage of a buffer."""
        first = self.memory.toint() + self.shape.plan.shared_offsets[name]
        return first + stage * self.shape.stage_bytes(name)

    def stage(self, name: str, use: Any) -> Int32:
        """The stage of a ring for its use-th use; rings have a power of two of stages."""
        return Int32(use) & (self.shape.stages(name) - 1)

    def pointer(self, name: str, kind: Any) -> cute.Pointer:
        """Pointer to a shared buffer of elements of that kind."""
        return cute.recast_ptr(self.memory + self.shape.plan.shared_offsets[name], dtype=kind)

    def signal(self, name: str) -> Signal:
        """The barriers of an event; of a pair, those that the tensor core's warp waits for are the first CTA's."""
        plan = self.shape.plan
        event = next(one for one in plan.events if one.name == name)
        pointer = cute.recast_ptr(self.memory + plan.event_offsets[name], dtype=Int64)
        in_leader = None
        if self.shape.ctas == 2 and event.waiters == ("mma",):
            in_leader = by_address.in_cta(Int32(pointer.toint()), 0)
        return Signal(pointer, event.stages, event.count, in_leader)

    def wait(self, event: str, use: Any) -> None:
        """Wait for an event's use-th time; holds at once for use -1."""
        signal = self.signal(event)
        if signal.stages == 1:
            signal.wait(0, Int32(use))
        else:
            shift = signal.stages.bit_length() - 1
            signal.wait(Int32(use) & (signal.stages - 1), Int32(use) >> shift)

    def init_signals(self) -> None:
        """Set every barrier's count (call in one thread)."""
        for event in self.shape.plan.events:
            self.signal(event.name).init()
