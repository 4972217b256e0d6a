"""How a block of a Hopper kernel comes by its items: one, by its place in the grid; or one after the other.

A persistent block asks a counter in global memory for its next item when the last copy of this one is under way: early
enough for the next one's first copies to be on their way when this one ends, and late enough not to keep an item from
a block that is ready before. Items go out in the order of the grid or of the work table, as the hardware hands out
blocks.

    load                  every copy of an item, then ask ->  item_known
    the others            item_known -> read the item -> item_taken

Two places in shared memory hold items: the load warp is at most one item ahead of the slowest reader. It alone works
out what an item is, or reads it from the table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from jax_fa4.kernels.parts.block_walk import ITEM_FIELDS, WorkItem

PLACES = 2
FIELDS = tuple(WorkItem.__dataclass_fields__)  # in the order of a work table's columns


@dataclass(frozen=True)
class Queue:
    """The items of a persistent block.

    Attributes:
        counter: in global memory, 0 at first: the items handed out.
        count: how many there are.
        item_of: the item of a number.
        entries: `ITEM_FIELDS` int32 for each place, in shared memory; none is left where the batch row is -1.
        barriers: `item_known` of each place, then `item_taken` of each.
        readers: warps that read an item.
    """

    counter: Any
    count: Any
    item_of: Callable[[Int32], WorkItem]
    entries: Any
    barriers: Any
    readers: int

    def init(self) -> None:
        """Set the arrival counts (call in one thread)."""
        for place in range(PLACES):
            cute.arch.mbarrier_init(self.barriers + place, 1)
            cute.arch.mbarrier_init(self.barriers + PLACES + place, self.readers)

    @cute.jit
    def ask(self, use: Int32) -> WorkItem:
        """Get the next item and put it where the others read the use-th one."""
        place, parity = use % PLACES, (use // PLACES) & 1
        drawn: Any = Int32(0)
        if cute.arch.lane_idx() == 0:
            drawn = cute.arch.atomic_add(self.counter, Int32(1), sem="relaxed", scope="gpu")
        number = cute.arch.make_warp_uniform(drawn)
        item = self.item_of(cutlass.min(number, self.count - 1))
        item = dataclasses.replace(item, batch=cutlass.select_(number < self.count, item.batch, Int32(-1)))
        cute.arch.mbarrier_wait(self.barriers + PLACES + place, parity ^ 1)
        if cute.arch.lane_idx() == 0:
            entry = cute.make_tensor(self.entries + place * ITEM_FIELDS, cute.make_layout(ITEM_FIELDS))
            for field in cutlass.range_constexpr(ITEM_FIELDS):
                entry[field] = getattr(item, FIELDS[field])
            cute.arch.mbarrier_arrive(self.barriers + place)
        return item

    def take(self, use: Int32) -> WorkItem:
        """Wait for the use-th item and read it."""
        place, parity = use % PLACES, (use // PLACES) & 1
        cute.arch.mbarrier_wait(self.barriers + place, parity)
        entry = cute.make_tensor(self.entries + place * ITEM_FIELDS, cute.make_layout(ITEM_FIELDS))
        fields = [entry[field] for field in range(ITEM_FIELDS)]
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.barriers + PLACES + place)
        # Last: what is made uniform before a branch of one lane does not count as uniform, and in loops whose ends are
        # not uniform the compiler lets products complete one by one.
        return WorkItem(*(cute.arch.make_warp_uniform(field) for field in fields))


@dataclass(frozen=True)
class Progress:
    """What a role counts from item to item.

    Attributes:
      steps: steps before this item, which are the uses of every ring.
      rounds: items with steps before this one.
      items: items before this one.
    """

    steps: Int32
    rounds: Int32
    items: Int32


@cute.jit
def walk(queue: Queue, leads: cutlass.Constexpr[bool], work: Callable[[WorkItem, Progress], Int32]) -> None:
    """Do a role's work, which returns its steps, for every item of a persistent block.

    Args:
        queue: where the items come from.
        leads: whether this warp asks for them.
        work: called with the item and the role's progress.
    """
    done = cute.make_rmem_tensor((3,), Int32)  # steps, rounds, items
    done.fill(0)
    current = cute.make_rmem_tensor((ITEM_FIELDS,), Int32)
    _next(queue, leads, done[2], current)
    while current[0] >= 0:
        steps = work(WorkItem(*(current[field] for field in range(ITEM_FIELDS))), Progress(done[0], done[1], done[2]))
        done[0] += steps
        done[1] += cutlass.select_(steps > 0, Int32(1), Int32(0))
        done[2] += 1
        _next(queue, leads, done[2], current)


def each_item(own: WorkItem | None, queue: Queue, leads: bool, work: Callable[[WorkItem, Progress], Int32]) -> None:
    """A role's work for this block's own item; None: for one after the other, as `walk`."""
    if own is None:
        walk(queue, leads, work)
    else:
        work(own, Progress(Int32(0), Int32(0), Int32(0)))


def _next(queue: Queue, leads: bool, use: Int32, current: cute.Tensor) -> None:
    item = queue.ask(use) if leads else queue.take(use)
    for place, field in enumerate(FIELDS):
        current[place] = getattr(item, field)
