"""How a block of the Hopper backward comes by its items: one, by its place in the grid; or one after the other.

A persistent block asks a counter in global memory for its next item when the last copy of this one is under way: early
enough for the next one's first copies to be on their way when this one ends, and late enough not to keep an item from
a block that is ready before. Items go out in the order of the grid or of the work table, as the hardware hands out
blocks.

    load                  every copy of an item, then ask ->  item_known
    add, compute          item_known -> read the number -> item_taken

Two places in shared memory hold numbers: the load warp is at most one item ahead of the slowest reader.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

PLACES = 2


@dataclass(frozen=True)
class Queue:
    """The numbers of a block's items.

    Attributes:
        counter: in global memory, 0 at first: the items handed out.
        items: how many there are.
        numbers: an int32 for each place, in shared memory.
        barriers: `item_known` of each place, then `item_taken` of each.
        readers: warps that read a number.
    """

    counter: Any
    items: Any
    numbers: Any
    barriers: Any
    readers: int

    def init(self) -> None:
        """Set the arrival counts (call in one thread)."""
        for place in range(PLACES):
            cute.arch.mbarrier_init(self.barriers + place, 1)
            cute.arch.mbarrier_init(self.barriers + PLACES + place, self.readers)

    @cute.jit
    def ask(self) -> Any:
        """The number of the next item, in lane 0 of the asking warp."""
        number: Any = Int32(0)
        if cute.arch.lane_idx() == 0:
            number = cute.arch.atomic_add(self.counter, Int32(1), sem="relaxed", scope="gpu")
        return number

    @cute.jit
    def tell(self, use: Int32, number: Int32) -> Int32:
        """Put lane 0's number where the others read the use-th one; the number, in every lane."""
        place, parity = use % PLACES, (use // PLACES) & 1
        cute.arch.mbarrier_wait(self.barriers + PLACES + place, parity ^ 1)
        if cute.arch.lane_idx() == 0:
            cute.make_tensor(self.numbers + place, cute.make_layout(1))[0] = number
            cute.arch.mbarrier_arrive(self.barriers + place)
        return cute.arch.make_warp_uniform(number)

    def take(self, use: Int32) -> Int32:
        """Wait for the use-th number and read it."""
        place, parity = use % PLACES, (use // PLACES) & 1
        cute.arch.mbarrier_wait(self.barriers + place, parity)
        number = cute.arch.make_warp_uniform(cute.make_tensor(self.numbers + place, cute.make_layout(1))[0])
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.barriers + PLACES + place)
        return number


@dataclass(frozen=True)
class Progress:
    """What a role counts from item to item.

    Attributes:
        steps: steps before this item, which are the uses of every ring.
        rounds: items with steps before this one, which are the uses of the buffers of keys and values.
    """

    steps: Int32
    rounds: Int32


@cute.jit
def walk(queue: Queue, leads: cutlass.Constexpr[bool], work: Callable[[Int32, Progress], Int32]) -> None:
    """Do a role's work, which returns its steps, for every item of a persistent block.

    Args:
        queue: where the items come from.
        leads: whether this warp asks for them.
        work: called with the item's number and the role's progress.
    """
    state = cute.make_rmem_tensor((4,), Int32)  # steps, rounds, items, number
    state.fill(0)
    state[3] = _next(queue, leads, state[2])
    while state[3] < queue.items:
        steps = work(state[3], Progress(state[0], state[1]))
        state[0] += steps
        state[1] += cutlass.select_(steps > 0, Int32(1), Int32(0))
        state[2] += 1
        state[3] = _next(queue, leads, state[2])


def _next(queue: Queue, leads: bool, use: Int32) -> Int32:
    return queue.tell(use, queue.ask()) if leads else queue.take(use)
