"""Events between warps: rings of shared-memory stages, and warpgroups that take turns.

A barrier is named by what has happened. A ring has two per stage: `landed` (the copy engine has filled the stage) and
`free` (every reader is done with it). Nobody keeps phases: the n-th use of a ring fixes both the stage, n mod stages,
and the parity to wait for, (n div stages) mod 2, so a role only counts its uses.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

GROUP_THREADS = 128  # threads of a warpgroup


@dataclass(frozen=True)
class Ring:
    """Stages that a copy warp fills and other warps read; `uses` are counted from 0 by each side."""

    barriers: cute.Pointer  # in shared memory: `landed` of each stage, then `free` of each
    stages: int
    bytes_per_stage: int

    @property
    def free(self) -> cute.Pointer:
        """Barriers of the stages that may be overwritten."""
        return self.barriers + self.stages

    def init(self, readers: int) -> None:
        """Set the arrival counts: one filler and `readers` arrivals a stage (call in one thread)."""
        for stage in range(self.stages):
            cute.arch.mbarrier_init(self.barriers + stage, 1)
            cute.arch.mbarrier_init(self.free + stage, readers)

    def stage(self, use: Int32) -> Int32:
        """The stage of the n-th use."""
        return use % self.stages

    def _parity(self, use: Int32) -> Int32:
        return (use // self.stages) & 1

    def wait_landed(self, use: Int32) -> None:
        """Wait until the n-th filling is complete."""
        cute.arch.mbarrier_wait(self.barriers + self.stage(use), self._parity(use))

    def release(self, use: Int32) -> None:
        """One reader's arrival: it has read the n-th filling."""
        cute.arch.mbarrier_arrive(self.free + self.stage(use))

    def acquire(self, use: Int32) -> cute.Pointer:
        """Wait until the stage of the n-th use may be overwritten, announce its bytes; the barrier to signal.

        A fresh barrier lets a wait for the odd parity pass, which is what the first round needs.
        """
        landed = self.barriers + self.stage(use)
        cute.arch.mbarrier_wait(self.free + self.stage(use), self._parity(use) ^ 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(landed, self.bytes_per_stage)
        return landed


@dataclass(frozen=True)
class Turns:
    """Warpgroups that issue matrix products one after the other, round and round.

    The named barrier of a warpgroup opens when the group waits at it and the group before has arrived at it.
    """

    groups: int
    mine: Int32
    following: Int32

    @staticmethod
    def of(first_barrier: int, groups: int, group: Int32) -> Turns:
        """The turns as warpgroup `group` of `groups` sees them; named barriers first_barrier .. + groups - 1."""
        following = cutlass.select_(group == groups - 1, Int32(0), group + 1)
        return Turns(groups, first_barrier + group, first_barrier + following)

    @cute.jit
    def open(self, group: Int32) -> None:
        """Give the first turn to warpgroup 0 (called once by every group)."""
        if group == self.groups - 1:
            self.give()

    def wait(self) -> None:
        """Wait for this warpgroup's turn."""
        cute.arch.barrier(barrier_id=self.mine, number_of_threads=2 * GROUP_THREADS)

    def give(self) -> None:
        """Pass the turn on."""
        cute.arch.barrier_arrive(barrier_id=self.following, number_of_threads=2 * GROUP_THREADS)
