"""Device code that orders work items, in CuTe-DSL: the second half of planning. Imported only to build.

The order is that of `jax_fa4.schedule.order`: batch rows by their heaviest tile, in each sections of heads, sections
that would end late merged, and in each group of sections the longest tile first. A place in the table is the number of
items before it, so that nothing is sorted: a warp takes one row tile of one section, and counts. With n row tiles that
is n^2 comparisons for each section, which are few, since a tile has a hundred rows and more.

    block    every batch row's heaviest tile and work, their order, the group of every section   in shared memory
    warp     a row tile of a section: counts the items before it, writes those of its heads
    z        0: the forward's table, 1: the backward's
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint8
from cutlass.cute.runtime import make_ptr

from jax_fa4.kernels.parts.memory import read, write
from jax_fa4.kernels.plan import KernelPlan

WARP = 32
FIELDS = 8  # of an item: jax_fa4.schedule.order.Column


@dataclass(frozen=True)
class Table:
    """One pass's items."""

    exact: cute.Pointer
    bounds: cute.Pointer
    clocks: cute.Pointer
    items: cute.Pointer
    batch: Int32
    row_tiles: Int32
    heads: Int32
    section_heads: Int32
    sections: Int32
    slots: Int32
    dropped: Int32  # bits of the clocks that do not count


@dataclass(frozen=True)
class Order:
    """What every block finds for itself, in shared memory, by batch row, by its place in the order, and by section."""

    heaviest: cute.Pointer
    work: cute.Pointer
    places: cute.Pointer  # the batch row at each place
    remaining: cute.Pointer
    joined: cute.Pointer
    groups: cute.Pointer


class PlanOrder:
    """The kernel of one plan."""

    def __init__(self, plan: KernelPlan) -> None:
        self.threads = plan.threads
        self.most_batch = int(plan.option("most_batch"))
        self.most_sections = int(plan.option("most_sections"))

    @cute.jit
    def weigh(self, table: Table, order: Order) -> None:
        """The heaviest tile and the work of every batch row, a warp each."""
        thread, _, _ = cute.arch.thread_idx()
        lane = thread % WARP
        for row in cutlass.range(thread // WARP, table.batch, self.threads // WARP, unroll=1):
            heaviest, work = Int32(0), Int64(0)
            for tile in cutlass.range(lane, table.row_tiles, WARP, unroll=4):
                clocks = read(table.clocks, row * table.row_tiles + tile)
                heaviest, work = cutlass.max(heaviest, clocks), work + Int64(clocks)
            heaviest = cute.arch.warp_redux_sync(heaviest, "max")
            for step in cutlass.range_constexpr(5):
                work += cute.arch.shuffle_sync_bfly(work, 1 << step)
            if lane == 0:
                write(order.heaviest, row, heaviest)
                write(order.work, row, work)

    @cute.jit
    def order_rows(self, table: Table, order: Order) -> None:
        """The order of batch rows, the work from each place on, and the group of every section."""
        thread, _, _ = cute.arch.thread_idx()
        for row in cutlass.range(thread, table.batch, self.threads, unroll=1):
            mine = read(order.heaviest, row)
            place = Int32(0)
            for other in cutlass.range(table.batch, unroll=1):
                theirs = read(order.heaviest, other)
                place += Int32((theirs > mine) | ((theirs == mine) & (other < row)))
            write(order.places, place, row)
        cute.arch.sync_threads()
        for position in cutlass.range(thread, table.batch, self.threads, unroll=1):
            remaining = Int64(0)
            for later in cutlass.range(position, table.batch, 1, unroll=1):
                remaining += read(order.work, read(order.places, later))
            write(order.remaining, position, remaining)
        cute.arch.sync_threads()
        count = table.batch * table.sections
        for number in cutlass.range(thread, count, self.threads, unroll=1):
            position, section = number // table.sections, number % table.sections
            row = read(order.places, position)
            work = read(order.work, row)
            heads_left = Int64(table.heads - section * table.section_heads)
            left = Int64(table.heads) * (read(order.remaining, position) - work) + work * heads_left
            ends_late = left < Int64(read(order.heaviest, row)) * Int64(table.slots)
            write(order.joined, number, Int32(ends_late & (number > 0)))
        cute.arch.sync_threads()
        for number in cutlass.range(thread, count, self.threads, unroll=1):
            group = Int32(0)
            for earlier in cutlass.range(number + 1, unroll=1):
                group += 1 - read(order.joined, earlier)
            write(order.groups, number, group)
        cute.arch.sync_threads()

    @cute.jit
    def heads_of(self, table: Table, section: Int32) -> Int32:
        """Heads of a section: the last may have fewer."""
        return cutlass.min(table.section_heads, table.heads - section * table.section_heads)

    @cute.jit
    def items_before(self, table: Table, order: Order, place: Int32, tile: Int32, group: Int32) -> Int32:
        """How many items stand before those of a row tile in a group: this lane's share."""
        thread, _, _ = cute.arch.thread_idx()
        row = read(order.places, place)
        mine = read(table.clocks, row * table.row_tiles + tile) >> table.dropped
        count = Int32(0)
        for other in cutlass.range(table.batch, unroll=1):
            heads_before, heads_beside = Int32(0), Int32(0)
            for section in cutlass.range(table.sections, unroll=1):
                other_group, heads = read(order.groups, other * table.sections + section), self.heads_of(table, section)
                heads_before += cutlass.select_(other_group < group, heads, Int32(0))
                heads_beside += cutlass.select_(other_group == group, heads, Int32(0))
            first = read(order.places, other) * table.row_tiles
            for other_tile in cutlass.range(thread % WARP, table.row_tiles, WARP, unroll=4):
                theirs = read(table.clocks, first + other_tile) >> table.dropped
                is_earlier = (other < place) | ((other == place) & (other_tile < tile))
                is_before = (theirs > mine) | ((theirs == mine) & is_earlier)
                count += heads_before + cutlass.select_(is_before, heads_beside, Int32(0))
        return count

    @cute.jit
    def write_items(self, table: Table, order: Order, number: Int32) -> None:
        """The items of one row tile and section."""
        thread, _, _ = cute.arch.thread_idx()
        lane = thread % WARP
        per_place = table.row_tiles * table.sections
        place, tile = number // per_place, number % per_place // table.sections
        section = number % table.sections
        row = read(order.places, place)
        group = read(order.groups, place * table.sections + section)
        first = cute.arch.warp_redux_sync(self.items_before(table, order, place, tile, group), "add")
        for earlier in cutlass.range(section, unroll=1):
            is_beside = read(order.groups, place * table.sections + earlier) == group
            first += cutlass.select_(is_beside, self.heads_of(table, earlier), Int32(0))
        bounds = (row * table.row_tiles + tile) * 4
        compares = 1 - Int32(read(table.exact, row))
        for head in cutlass.range(lane, self.heads_of(table, section), WARP, unroll=1):
            fields = (row, section * table.section_heads + head, tile, compares)
            for column in cutlass.range_constexpr(4):
                write(table.items, (first + head) * FIELDS + column, fields[column])
                write(table.items, (first + head) * FIELDS + 4 + column, read(table.bounds, bounds + column))

    @cute.kernel
    def kernel(self, inputs: Any, items: Any, integers: tuple[Int32, ...]) -> None:
        """The text of the module says who does what."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, direction = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        memory = cutlass.memory.SmemAllocator()
        work, remaining = (memory.allocate_array(Int64, self.most_batch) for _ in range(2))
        heaviest, places = (memory.allocate_array(Int32, self.most_batch) for _ in range(2))
        joined, groups = (memory.allocate_array(Int32, self.most_sections) for _ in range(2))
        order = Order(heaviest, work, places, remaining, joined, groups)
        warps = self.threads // WARP
        for side in cutlass.range_constexpr(2):
            if direction == side:
                exact, bounds, clocks = inputs[3 * side : 3 * side + 3]
                table = Table(exact, bounds, clocks, items[side], integers[0], *integers[1 + 6 * side : 7 + 6 * side])
                self.weigh(table, order)
                cute.arch.sync_threads()
                self.order_rows(table, order)
                count = table.batch * table.row_tiles * table.sections
                for number in cutlass.range(block * warps + thread // WARP, count, blocks * warps, unroll=1):
                    self.write_items(table, order, number)

    @cute.jit
    def host(self, inputs: Any, items: Any, integers: tuple[Int32, ...]) -> None:
        """Exists for the compiler only: the package's own runtime launches the kernel."""
        self.kernel(inputs, items, integers).launch(grid=(1, 1, 1), block=(self.threads, 1, 1))


def trace(plan: KernelPlan) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """The function to compile, and arguments of the right types."""
    made = PlanOrder(plan)

    def pointer(kind: Any) -> Any:
        return make_ptr(kind, 4, cute.AddressSpace.gmem, assumed_align=kind.width // 8)

    inputs = (pointer(Uint8), pointer(Int32), pointer(Int32)) * 2
    return made.host, (inputs, (pointer(Int32),) * 2, (Int32(1),) * 13)
