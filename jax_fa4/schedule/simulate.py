"""What an order of work items does on a GPU: whichever multiprocessor is free takes the next item of the table.

This is what thread blocks launched in the table's order do, and what work stealing does. It needs no GPU, and it tells
how far an order is from the best that any could do.
"""

import dataclasses
import heapq

import numpy as np


@dataclasses.dataclass(frozen=True)
class Simulation:
    """When and where each item ran; clocks count from 0.

    Attributes:
      slots: multiprocessors, or pairs of them.
      slot: (n,) int32, the one that ran each item.
      start: (n,) int64, the clock at which each item began.
      end: (n,) int64, the clock at which each item was done.
    """

    slots: int
    slot: np.ndarray
    start: np.ndarray
    end: np.ndarray

    @property
    def makespan(self) -> int:
        """Clocks until the last item is done."""
        return int(self.end.max(initial=0))

    @property
    def work(self) -> int:
        """Clocks of all items together."""
        return int((self.end - self.start).sum())

    @property
    def lower_bound(self) -> int:
        """Clocks that no order can beat.

        The greatest of: all slots busy throughout; the longest item alone; and for each k the k + 1 shortest of the
        k * slots + 1 longest items, as some slot must run k + 1 of these.
        """
        longest_first = np.sort(self.end - self.start)[::-1]
        until = np.concatenate([[0], np.cumsum(longest_first)])
        waves = np.arange(-(-len(longest_first) // self.slots))
        last = waves * self.slots + 1
        crowded = until[last] - until[last - waves - 1]
        return max(-(-self.work // self.slots), int(crowded.max(initial=0)))

    @property
    def tail(self) -> int:
        """Clocks from the first slot that finds nothing left to the end."""
        finish = np.zeros(self.slots, np.int64)
        np.maximum.at(finish, self.slot, self.end)
        return self.makespan - int(finish.min())

    @property
    def balance(self) -> float:
        """Share of all slots' time that is work; 1 is perfect."""
        return self.work / (self.makespan * self.slots) if self.makespan else 1.0

    def busy(self, slot: int) -> list[tuple[int, int, int]]:
        """(item, start, end) of all that one slot ran, in the order in which it did."""
        items = np.flatnonzero(self.slot == slot)
        return [(int(item), int(self.start[item]), int(self.end[item])) for item in items]


def simulate(clocks: np.ndarray, slots: int) -> Simulation:
    """Runs items in their order on slots that each take the next one as soon as they are free.

    Args:
      clocks: (n,) what each item takes, at least 0.
      slots: how many run at a time.

    Returns:
      The Simulation. Ties go to the slot of the lowest number.

    Raises:
      ValueError: if there are no slots.
    """
    if slots < 1:
        raise ValueError(f"slots {slots} must be at least 1.")
    free = [(0, slot) for slot in range(slots)]
    taken = np.empty(len(clocks), np.int32)
    start = np.empty(len(clocks), np.int64)
    for item, duration in enumerate(np.asarray(clocks).tolist()):
        clock, slot = free[0]
        taken[item], start[item] = slot, clock
        heapq.heapreplace(free, (clock + duration, slot))
    return Simulation(slots, taken, start, start + np.asarray(clocks, np.int64))
