"""What a role keeps from item to item, in registers: where it is in a ring, and how much went before."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from jax_fa4.kernels.parts.signals import Cursor

STEP_BITS = 23  # an item has fewer than 2^23 steps, since lengths are below 2^30


def uncertain_zero(step: Any) -> Int32:
    """0, made of a step's number or of an item's number of steps, which the compiler does not know: what has it as a
    term is computed where it is used, and is not kept in registers over loops."""
    return Int32(step) >> STEP_BITS


class Place(Cursor):
    """A cursor that spends nothing on the stage of a ring of one."""

    @property
    def stage(self) -> Int32:
        """The stage."""
        return Int32(0) if self.stages == 1 else self._place[0]

    def advance(self) -> None:
        """Go to the next stage."""
        if self.stages == 1:
            self._place[1] = self._place[1] ^ 1
        else:
            super().advance()


class Past:
    """The items that a role has done before, which say how often each barrier was used.

    Only parities are kept, in one register, since only parities are waited for: of an event that happens once in each
    step, in each item that visits keys, or in each item, the next use is the number that these properties give, modulo
    2. A CTA of one item has no past, and the numbers are constants.
    """

    def __init__(self, has_many: bool) -> None:
        self._bits: Any = None
        if has_many:
            self._bits = cute.make_rmem_tensor((1,), Int32)
            self._bits.fill(0)

    def _parity(self, place: int) -> Int32:
        return Int32(0) if self._bits is None else self._bits[0] >> place

    @property
    def steps(self) -> Int32:
        """Steps of all items."""
        return self._parity(0)

    @property
    def visiting(self) -> Int32:
        """Items that visited keys."""
        return self._parity(1)

    @property
    def items(self) -> Int32:
        """Items."""
        return self._parity(2)

    def add(self, steps: Int32) -> None:
        """One more item, of so many steps."""
        if self._bits is not None:
            self._bits[0] = self._bits[0] ^ cutlass.select_(steps > 0, 6 + (steps & 1), Int32(4))
