"""Matrix products of the tensor core (tcgen05.mma, PTX ISA): descriptors, issue, commit.

D is (rows, columns) float32 in tensor memory; A lies in shared memory, or in tensor memory as two 16-bit values a
column; B lies in shared memory. One instruction multiplies 16 elements of depth. Everything here is called by a whole
warp; one elected lane issues. Operands of shared memory are described by 64 bits, whose upper half is the same for all
of one layout: so products take the lower half, an address in units of 16 bytes, and add constants for each step.

Tiles in shared memory are rows of `swizzle` bytes, as one TMA box leaves them; a wider tile is several boxes one after
the other.

    K-major   (rows, depth)   a step of 16 elements is 32 bytes further in the row; the next box after `swizzle` bytes
    MN-major  (depth, width)  a step of 16 elements is 16 rows further; boxes lie side by side along the width
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import Int32

from jax_fa4.kernels.parts.assembly import assembly

DEPTH = 16  # of one instruction with 16-bit operands
ELEMENT_BYTES = 2
ATOM_ROWS = 8  # rows of a swizzle atom
_SWIZZLE_CODES = {128: 2, 64: 4, 32: 6}
_VERSION = 1 << 14  # bits 46-48 of a descriptor are 1 for this generation


@dataclass(frozen=True)
class SharedOperand:
    """A tile in shared memory as an operand.

    Attributes:
        swizzle: bytes of a row of a box, 128, 64 or 32.
        box_rows: rows of a box.
        is_transposed: MN-major, else K-major.
    """

    swizzle: int
    box_rows: int
    is_transposed: bool = False

    @property
    def box_bytes(self) -> int:
        """Bytes of one box."""
        return self.swizzle * self.box_rows

    @property
    def upper(self) -> int:
        """Upper half of the descriptor: atoms of 8 rows follow each other; version; swizzle."""
        return (ATOM_ROWS * self.swizzle) >> 4 | _VERSION | _SWIZZLE_CODES[self.swizzle] << 29

    @property
    def leading(self) -> int:
        """Bits 16 and up of the lower half: the distance of boxes along the width of a transposed operand."""
        return (self.box_bytes >> 4) << 16 if self.is_transposed else 0

    def step_units(self, step: int) -> int:
        """Where the step-th 16 elements of depth begin, in units of 16 bytes."""
        if self.is_transposed:
            return step * DEPTH * self.swizzle >> 4
        steps_per_box = self.swizzle // (DEPTH * ELEMENT_BYTES)
        box, within = divmod(step, steps_per_box)
        return (box * self.box_bytes + within * DEPTH * ELEMENT_BYTES) >> 4

    def lower(self, address: Int32) -> Int32:
        """Lower half of the descriptor of a tile at a shared-memory address."""
        return (address >> 4) | self.leading


@dataclass(frozen=True)
class Product:
    """D (rows, columns) = or += A B over `steps` instructions.

    Attributes:
        rows: 128, or 256 for a pair of CTAs that each hold half of A's and D's rows and half of B's columns.
        columns: of D; a multiple of 16 (32 for a pair) up to 256.
        a: None where A lies in tensor memory.
        b: B in shared memory.
        is_bfloat16: else float16.
        ctas: 2 for a pair.
    """

    rows: int
    columns: int
    a: SharedOperand | None
    b: SharedOperand
    is_bfloat16: bool
    ctas: int = 1

    @property
    def instruction_descriptor(self) -> int:
        """Float32 sums, the operands' type and direction, sizes."""
        kind = int(self.is_bfloat16)
        bits = 1 << 4 | kind << 7 | kind << 10 | (self.columns // 8) << 17 | (self.rows // 16) << 24
        if self.a is not None and self.a.is_transposed:
            bits |= 1 << 15
        return bits | int(self.b.is_transposed) << 16

    def issue(self, base: Int32, out: int, a: Any, b: Int32, steps: range, accumulate: Int32 | bool) -> None:
        """Issue the instructions of these steps of depth, in order.

        Args:
            base: of the tensor memory; 0, but a constant would be moved through registers for each instruction.
            out: D's first column of tensor memory.
            a: lower half of A's descriptor (see `SharedOperand.lower`), or A's first column of tensor memory (an int).
            b: lower half of B's descriptor.
            steps: which 16 elements of depth; constant.
            accumulate: whether the first of them adds to D; a bool where known, else not 0 for yes. Others always do.
        """
        lines = ["{", ".reg .pred elected, adds, always;", ".reg .b32 d, kind, a_low, b_low;"]
        lines += [".reg .b64 a_whole, b_whole;", "elect.sync _|elected, -1;", "setp.eq.b32 always, 0, 0;"]
        lines += [f"add.u32 d, $0, {out};", f"mov.b32 kind, {self.instruction_descriptor};"]
        inputs = [base, b]
        first = "adds"
        if isinstance(accumulate, bool):
            lines.append(f"setp.eq.b32 adds, {int(accumulate)}, 1;")
        else:
            lines.append("setp.ne.b32 adds, $2, 0;")
            inputs.append(accumulate)
        if self.a is not None:
            inputs.append(a)
        for step in steps:
            lines += [f"add.u32 b_low, $1, {self.b.step_units(step)};", f"mov.b64 b_whole, {{b_low, {self.b.upper}}};"]
            if self.a is None:
                lines.append(f"add.u32 a_low, $0, {a + step * DEPTH * ELEMENT_BYTES // 4};")
                left = "[a_low]"
            else:
                lines.append(f"add.u32 a_low, ${len(inputs) - 1}, {self.a.step_units(step)};")
                lines.append(f"mov.b64 a_whole, {{a_low, {self.a.upper}}};")
                left = "a_whole"
            lines.append(f"@elected tcgen05.mma.cta_group::{self.ctas}.kind::f16 [d], {left}, b_whole, kind, {first};")
            first = "always"
        assembly("\n".join([*lines, "}"]), [], *inputs)


def commit(barrier: Int32, ctas: int = 1) -> None:
    """Arrive at a barrier (its shared-memory address) when every product issued so far is complete.

    With a pair of CTAs the arrival is made at the same offset in both.
    """
    multicast, mask = ("", "") if ctas == 1 else (".multicast::cluster", ", mask")
    text = (
        "{ .reg .pred elected; .reg .b16 mask; mov.b16 mask, 3; elect.sync _|elected, -1;\n"
        f"@elected tcgen05.commit.cta_group::{ctas}.mbarrier::arrive::one.shared::cluster{multicast}.b64 [$0]{mask}; }}"
    )
    assembly(text, [], barrier)
