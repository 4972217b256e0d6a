"""What every role of the Hopper backward shares: the shape of a plan, the steps of a work item, buffers and events."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.utils import hopper_helpers

from jax_fa4.kernels.hopper.forward import ELEMENTS, GROUP_ROWS
from jax_fa4.kernels.parts.block_walk import Band, WorkItem
from jax_fa4.kernels.parts.events import Ring
from jax_fa4.kernels.plan import KernelPlan

GROUPS = 2  # computing warpgroups
KEY_TILE = GROUPS * GROUP_ROWS
SCORE_STAGES = 2  # a warpgroup writes dS of a step while the other may still read that of the step before
PIECE_BYTES = 128  # of a row of dS: 64 keys of one warpgroup, in a swizzled atom
BLOCK_BYTES = GROUP_ROWS * PIECE_BYTES
MEETING_BARRIER = 1  # named barriers; 0 is the whole block's. dS of both warpgroups is written
STAGED_BARRIER = 2  # 2, 3: a warpgroup's query gradients are staged
ADDED_BARRIER = 4  # 4, 5: they have been read
CLOSING_BARRIER = 6  # 6, 7: a warpgroup's key and value gradients are staged


@dataclass(frozen=True)
class Shape:
    """What of a plan the device code needs."""

    dtype: Any
    head_dim: int  # padded
    query_tile: int
    query_stages: int
    grad_stages: int
    load_registers: int
    compute_registers: int
    sum_columns: int  # columns of a row of the query gradients' sums: head_dim, or more
    intervals: bool  # masks from memory, else by arithmetic
    has_ids: bool  # masked tiles may have to compare ids
    has_cap: bool
    is_ordered: bool  # sums are added in a fixed order
    is_ahead: bool  # scores of the next step are issued before the query gradients of this one
    is_turned: bool  # dK takes dS from shared memory, not from registers
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
            load_registers=registers["load"] or 0,
            compute_registers=registers["compute"] or 0,
            sum_columns=option("sum_columns"),
            intervals=mask in ("intervals", "ids"),
            has_ids=mask == "ids",
            has_cap=option("soft_cap"),
            is_ordered=option("ordered"),
            is_ahead=option("ahead"),
            is_turned=option("turned_scores"),
            is_split=option("split"),
        )

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of queries or keys in shared memory."""
        return self.head_dim * self.dtype.width // 8

    @property
    def row_blocks(self) -> int:
        """Blocks of 64 queries in a tile."""
        return self.query_tile // GROUP_ROWS

    @property
    def sum_width(self) -> int:
        """Columns of the query gradients that a warpgroup computes: all for its 64 queries of 128, or half for 64."""
        return self.sum_columns * self.row_blocks // GROUPS

    @property
    def sum_floats(self) -> int:
        """Query gradients that a warpgroup computes in a step."""
        return GROUP_ROWS * self.sum_width

    def tile_layout(self, rows: int, count: int, columns: int | None = None) -> cute.ComposedLayout:
        """Shared-memory layout of `count` (rows, head_dim) tiles: rows cut into swizzled pieces of 128 or 64 bytes."""
        kinds = warpgroup.SmemLayoutAtomKind
        atom = warpgroup.make_smem_layout_atom(kinds.K_SW128 if self.head_dim % 64 == 0 else kinds.K_SW64, self.dtype)
        return cute.tile_to_shape(atom, (rows, columns or self.head_dim, count), order=(0, 1, 2))

    def grad_score_layout(self) -> cute.ComposedLayout:
        """Blocks of dS: 64 queries by the item's keys, those of a warpgroup together."""
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.dtype)
        return cute.tile_to_shape(atom, (GROUP_ROWS, KEY_TILE, self.row_blocks * SCORE_STAGES), order=(0, 1, 2))

    def _product(self, columns: int, b_major: OperandMajorMode, source: Any) -> cute.TiledMma:
        k_major = OperandMajorMode.K
        tile = (GROUP_ROWS, columns)
        return hopper_helpers.make_trivial_tiled_mma(
            self.dtype, self.dtype, k_major, b_major, Float32, (1, 1, 1), tile, source
        )

    def score_product(self) -> cute.TiledMma:
        """S^T = K Q^T and dP^T = V dO^T of one warpgroup: both operands from shared memory."""
        return self._product(self.query_tile, OperandMajorMode.K, warpgroup.OperandSource.SMEM)

    def key_product(self) -> cute.TiledMma:
        """dV = P^T dO and dK = dS^T Q of one warpgroup: the first operand from registers."""
        return self._product(self.head_dim, OperandMajorMode.MN, warpgroup.OperandSource.RMEM)

    def turned_product(self) -> cute.TiledMma:
        """dK = dS^T Q of one warpgroup with dS from shared memory."""
        return hopper_helpers.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            OperandMajorMode.MN,
            OperandMajorMode.MN,
            Float32,
            (1, 1, 1),
            (GROUP_ROWS, self.head_dim),
        )

    def query_product(self) -> cute.TiledMma:
        """dQ = dS K, this warpgroup's part: both operands from shared memory."""
        return self._product(self.sum_width, OperandMajorMode.MN, warpgroup.OperandSource.SMEM)


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
class Context:
    """What every role shares: the item and its steps, the buffers and the events."""

    shape: Shape
    walk: Walk
    first_head: Int32  # of the query heads walked
    heads: Int32  # query heads of the call
    query_tiles: Int32  # of the padded query length
    key: cute.Tensor
    value: cute.Tensor
    query: cute.Tensor
    grad_out: cute.Tensor
    grad_scores: cute.Tensor
    staged: cute.Pointer  # float32
    lse: cute.Pointer  # float32, a row per stage
    delta: cute.Pointer
    key_landed: cute.Pointer
    value_landed: cute.Pointer
    queries: Ring
    grads: Ring

    @property
    def batch(self) -> Int32:
        """Batch row of the item."""
        return self.walk.item.batch

    def tile_number(self, head: Int32, tile: Int32) -> Int64:
        """Which of the call's query tiles a tile of a head is, in arrays (batch, head, padded row)."""
        return (Int64(self.batch) * self.heads + head) * self.query_tiles + tile
