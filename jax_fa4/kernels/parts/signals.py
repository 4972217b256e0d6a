"""One barrier per stage, named by what has happened: who has seen what, by shared-memory address.

Nobody keeps phases: the n-th use of a stage (n counted from 0) is over when the barrier's phase of parity n mod 2 is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from jax_fa4.kernels.parts.assembly import assembly

BARRIER_BYTES = 8


@dataclass(frozen=True)
class Signal:
    """Barriers of `stages` stages.

    Attributes:
        pointer: the first, in shared memory.
        stages: how many.
        count: arrivals that end a phase.
        in_leader: address of the first in the other CTA of a pair, or this one, that everyone arrives at; None: here.
    """

    pointer: cute.Pointer
    stages: int
    count: int
    in_leader: Int32 | None = None

    def init(self) -> None:
        """Set the arrival counts (call in one thread)."""
        for stage in range(self.stages):
            cute.arch.mbarrier_init(self.pointer + stage, self.count)

    def address(self, stage: Any) -> Int32:
        """The shared-memory address of a stage's barrier, of the leader's if there is one."""
        first = self.pointer.toint() if self.in_leader is None else self.in_leader
        return first + Int32(stage) * BARRIER_BYTES

    def wait(self, stage: Any, use: Any) -> None:
        """Wait until the use-th phase of a stage is over."""
        cute.arch.mbarrier_wait(self.pointer + stage, use & 1)

    def wait_free(self, stage: Any, use: Any) -> None:
        """Wait until the phase before the use-th is over, which holds at once for use 0."""
        cute.arch.mbarrier_wait(self.pointer + stage, (use & 1) ^ 1)

    def arrive_elected(self, stage: Any) -> None:
        """One lane's arrival, for the whole warp."""
        where = "shared::cta" if self.in_leader is None else "release.cluster.shared::cluster"
        text = f"{{ .reg .pred elected; elect.sync _|elected, -1;\n@elected mbarrier.arrive.{where}.b64 _, [$0]; }}"
        assembly(text, [], self.address(stage))


class Cursor:
    """A role's place in a ring: stage and parity of the phase it waits for next, kept in registers.

    Counting uses and dividing would do as well, and cost more instructions where the number of stages is no power of
    two.
    """

    def __init__(self, stages: int) -> None:
        self.stages = stages
        self._place = cute.make_rmem_tensor((2,), Int32)
        self._place.fill(0)

    @property
    def stage(self) -> Int32:
        """The stage."""
        return self._place[0]

    @property
    def use(self) -> Int32:
        """How often the ring was gone round, modulo 2."""
        return self._place[1]

    def advance(self) -> None:
        """Go to the next stage."""
        following = self._place[0] + 1
        is_round = following == self.stages
        self._place[0] = cutlass.select_(is_round, Int32(0), following)
        self._place[1] = cutlass.select_(is_round, self._place[1] ^ 1, self._place[1])
