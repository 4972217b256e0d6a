"""Device code of the backward's postprocess for sums that lie transposed, in CuTe-DSL. Imported only to build.

It scales and rounds sums as `postprocess.py` does. Hopper's kernel with 80 queries a step computes dQ^T, and leaves
blocks of `tile_rows` rows, in two halves of 64 columns, each the accumulator of one warpgroup (PTX ISA, wgmma, register
fragments of D): four registers of 128 threads after the other.

    half    |registers 0..3: thread 0, thread 1, ... thread 127|registers 4..7: ...|
    lane 4 q + c of warp w, registers 4 j ..    rows 8 j + 2 c, + 1 of column 16 w + q, then of column 16 w + q + 8

A warp takes eight rows, those of one j. What its 32 lanes load at once are 512 bytes that lie together: 16 columns, and
rounded, two rows to a register, two 8 x 8 matrices of a column in a row, which one instruction stores transposed:

    accumulator   8 loads of 16 bytes a lane, all before the first is used
    shared        8 rows of 256 bytes, 16 bytes apart so that their columns lie in different banks
    grad_query    4 stores of 16 bytes a lane, whole rows
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, Uint32
from cutlass.cute.runtime import make_ptr

from jax_fa4.kernels.parts import bulk
from jax_fa4.kernels.parts.rounding import round_pair
from jax_fa4.kernels.plan import KernelPlan
from jax_fa4.kernels.preprocess import ELEMENTS, place_from_last, vector_at

ROWS = 8  # of a warp
HALVES, HALF_COLUMNS = 2, 64
PIECES = HALF_COLUMNS // 16  # warps of the accumulator: 16 columns each
PIECE_FLOATS = 128  # 32 lanes of four registers
VECTOR = 8  # 16-bit elements of 16 bytes
ROW_BYTES = HALVES * HALF_COLUMNS * 2 + 16


class PostprocessTurned:
    """The kernel of one plan."""

    def __init__(self, plan: KernelPlan) -> None:
        self.threads = plan.threads
        self.element = ELEMENTS[str(plan.option("dtype"))]
        self.rows = int(plan.option("rows"))
        self.head_dim = int(plan.option("head_dim"))
        self.tile_rows = int(plan.option("tile_rows"))

    def load(self, source: cute.Pointer, lane: Int32) -> list[list[Any]]:
        """The lane's four floats of every piece of both halves."""
        half_floats = self.tile_rows * HALF_COLUMNS
        return [
            [
                vector_at(source, Int64(half * half_floats + piece * PIECE_FLOATS) + lane * 4, 4).load()
                for piece in range(PIECES)
            ]
            for half in range(HALVES)
        ]

    def turn(self, sums: list[list[Any]], staged: cute.Pointer, lane: Int32, scale: Float32) -> None:
        """Scaled and rounded to shared memory, where rows are rows."""
        for half in range(HALVES):
            for piece in range(0, PIECES, 2):
                matrices: list[Uint32] = []
                for values in sums[half][piece : piece + 2]:
                    scaled = values * scale
                    matrices += [round_pair(scaled[at], scaled[at + 1], self.element) for at in (0, 2)]
                column = half * HALF_COLUMNS + piece * 16 + (lane // 8) * 8
                bulk.store_transposed(staged + ((lane % 8) * ROW_BYTES + column * 2), matrices)

    @cute.kernel
    def kernel(
        self,
        accumulator: cute.Pointer,
        grad_query: cute.Pointer,
        heads: Int32,
        query_length: Int32,
        padded_length: Int32,
        scale: Float32,
    ) -> None:
        """The text of the module says who does what."""
        thread, _, _ = cute.arch.thread_idx()
        pair, batch, head, row_tile = place_from_last(heads)
        lane = thread % 32
        this_warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        memory = cutlass.memory.SmemAllocator()
        staged = memory.allocate_array(Uint8, self.threads // 32 * ROWS * ROW_BYTES) + this_warp * (ROWS * ROW_BYTES)
        first_row = row_tile * self.rows + this_warp * ROWS
        if first_row < query_length:
            tile, place = first_row // self.tile_rows, first_row % self.tile_rows // ROWS
            before = (Int64(pair) * padded_length + tile * self.tile_rows) * (HALVES * HALF_COLUMNS)
            sums = self.load(accumulator + (before + place * (PIECES * PIECE_FLOATS)), lane)
            self.turn(sums, staged, lane, scale)
            cute.arch.sync_warp()
            vectors = HALVES * HALF_COLUMNS // VECTOR  # of a row
            for step in cutlass.range_constexpr(ROWS * vectors // 32):
                index = lane + step * 32
                row, column = index // vectors, index % vectors * VECTOR
                if (first_row + row < query_length) & (column < self.head_dim):
                    to = ((Int64(batch) * query_length + first_row + row) * heads + head) * self.head_dim + column
                    source = cute.recast_ptr(staged + (row * ROW_BYTES + column * 2), dtype=self.element)
                    rounded = cute.make_tensor(source.align(16), cute.make_layout(VECTOR))
                    cute.autovec_copy(rounded, vector_at(grad_query, to, VECTOR))

    @cute.jit
    def host(
        self,
        accumulator: cute.Pointer,
        grad_query: cute.Pointer,
        heads: Int32,
        query_length: Int32,
        padded_length: Int32,
        scale: Float32,
    ) -> None:
        """Exists for the compiler only: the package's own runtime launches the kernel."""
        self.kernel(accumulator, grad_query, heads, query_length, padded_length, scale).launch(
            grid=(1, 1, 1), block=(self.threads, 1, 1)
        )


def trace(plan: KernelPlan) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """The function to compile, and arguments of the right types."""
    postprocess = PostprocessTurned(plan)

    def pointer(kind: Any) -> Any:
        return make_ptr(kind, 16, cute.AddressSpace.gmem, assumed_align=16)

    integers = (Int32(1),) * 3
    return postprocess.host, (pointer(Float32), pointer(postprocess.element), *integers, Float32(1.0))
