"""What of a backward plan the device code needs, and what its roles share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from jax_fa4.kernels.blackwell.backward_plans import COMPUTE_GROUPS, TILE, box_columns
from jax_fa4.kernels.blackwell.parts.products import Product, SharedOperand
from jax_fa4.kernels.blackwell.product_order import ORDERS, Issue
from jax_fa4.kernels.parts import by_address
from jax_fa4.kernels.parts.block_walk import Band, RowIntervals, WorkItem
from jax_fa4.kernels.parts.signals import Signal
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

    @staticmethod
    def operand(dim: int, is_transposed: bool = False, rows: int = TILE) -> SharedOperand:
        """A tile of `dim` columns in shared memory, in boxes of that many rows."""
        return SharedOperand(box_columns(dim) * ELEMENT_BYTES, rows, is_transposed)

    def product(self, name: str) -> Product:
        """One of the five products; see `product_order`.

        In a pair each CTA has half of B's columns; where those are columns of a tensor, it has one box of them.
        """
        head, value, rows = self.head_dim, self.value_dim, self.query_rows
        columns, a, b = {
            "scores": (TILE, self.operand(head), self.operand(head, rows=rows)),
            "grad_probs": (TILE, self.operand(value), self.operand(value, rows=rows)),
            "grad_value": (value, None, self.operand(value // self.ctas, True)),
            "grad_key": (head, None, self.operand(head // self.ctas, True)),
            "grad_query": (head, self.operand(HALF, True), self.operand(head // self.ctas, True)),
        }[name]
        # Rows are keys, 128 of each CTA; those of dQ are queries.
        product_rows = TILE if name == "grad_query" else self.items_rows
        return Product(product_rows, columns, a, b, self.dtype is cutlass.BFloat16, self.ctas)


@dataclass(frozen=True)
class Context:
    """What every role shares: the item, what its keys are seen by, the buffers and the events."""

    shape: Shape
    item: WorkItem  # of keys: its rows are keys, its columns queries, its head a KV head
    visible: Band | RowIntervals
    ids: Any  # SegmentIds, or None where nothing compares them
    group: Int32  # query heads that share the KV head
    kv_heads: Int32
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

    def query_row(self, step: Any) -> Int32:
        """First query of the step-th tile."""
        return self.item.key_tile(step) * TILE

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
