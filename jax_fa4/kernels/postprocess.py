"""Device code of the backward's postprocess, in CuTe-DSL. Imported only to build; needs nvidia-cutlass-dsl.

The backward kernels add up the query gradients in float32, row by row in the order of (batch, head, padded row); this
kernel scales and rounds the sums:

    grad_query[b, t, n, :] = round(scale * accumulator[b, n, t, :])        t < query_length

One block takes `rows` rows of one head, 256 threads; each thread turns `vector` neighbouring floats (two loads of 16
bytes for 16-bit results, one for float32) into one store of 16 bytes:

    accumulator (batch, head, padded row, accumulator_width)   read whole rows that lie together
    grad_query  (batch, row, head, head_dim)                   head_dim may be less than the accumulator's width

Bytes moved per row, bf16, D = 128: 512 read, 256 written; nothing is computed that could take longer than that. Blocks
go from the last head to the first, since the backward kernels go from first to last: what they added to last is read
first, while it is in the L2 cache.

Hopper's kernel leaves its sums in the order of registers, so that it adds runs of bytes: blocks of 64 rows, cut into
`fragment_parts` parts by columns, each the accumulator of one warpgroup (PTX ISA, wgmma, register fragments of D), four
registers of 128 threads after the other. Four lanes' 64 bytes are then eight neighbours of row r and eight of row
r + 8:

    part    |registers 0..3: thread 0, thread 1, ... thread 127|registers 4..7: ...|
    lane 4 q + c, registers 4 j ..    columns 8 j + 2 c, + 1 of row q, then the same of row q + 8
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.runtime import make_ptr

from jax_fa4.kernels.plan import DTYPES, KernelPlan
from jax_fa4.kernels.preprocess import ELEMENTS, place_from_last, vector_at

VECTOR_FLOATS = 4
COLUMNS = 8  # neighbours that four lanes hold
FRAGMENT_ROWS = 64


class Postprocess:
    """The kernel of one plan."""

    def __init__(self, plan: KernelPlan) -> None:
        self.threads = plan.threads
        self.element = ELEMENTS[str(plan.option("dtype"))]
        self.rows = int(plan.option("rows"))
        self.width = int(plan.option("accumulator_width"))
        self.head_dim = int(plan.option("head_dim"))
        self.vector = 16 // DTYPES[str(plan.option("dtype"))]
        self.vectors = self.head_dim // self.vector
        self.fragment_parts = int(plan.option("fragment_parts"))

    @cute.jit
    def convert(self, source: cute.Pointer, offset: Int64, scale: Float32) -> cute.Tensor:
        """`vector` sums, scaled and rounded."""
        rounded = cute.make_rmem_tensor(cute.make_layout(self.vector), self.element)
        for part in cutlass.range_constexpr(self.vector // VECTOR_FLOATS):
            sums = vector_at(source, offset + part * VECTOR_FLOATS, VECTOR_FLOATS).load() * scale
            for place in cutlass.range_constexpr(VECTOR_FLOATS):
                rounded[part * VECTOR_FLOATS + place] = sums[place].to(self.element)
        return rounded

    @cute.jit
    def convert_fragments(
        self, source: cute.Pointer, place: Int32, scale: Float32
    ) -> tuple[Int32, Int32, list[cute.Tensor]]:
        """Eight columns of two rows, 8 apart: first row and column in the block, and the rounded values of each."""
        groups = self.width // COLUMNS
        pair, column_group = place // groups, place % groups
        of_part = groups // self.fragment_parts
        part, group = column_group // of_part, column_group % of_part
        warp, quad = pair // 8, pair % 8
        first = part * (FRAGMENT_ROWS * self.width // self.fragment_parts) + (group * 128 + warp * 32 + quad * 4) * 4
        rounded = [cute.make_rmem_tensor(cute.make_layout(COLUMNS), self.element) for _ in range(2)]
        for lane in cutlass.range_constexpr(4):
            sums = vector_at(source, Int64(first + lane * 4), VECTOR_FLOATS).load() * scale
            for index in cutlass.range_constexpr(VECTOR_FLOATS):
                rounded[index // 2][lane * 2 + index % 2] = sums[index].to(self.element)
        return warp * 16 + quad, column_group * COLUMNS, rounded

    @cute.jit
    def store_fragments(
        self,
        accumulator: cute.Pointer,
        grad_query: cute.Pointer,
        first_row: Int32,
        rows_before: tuple[Int64, Int64],
        heads_and_length: tuple[Int32, Int32, Int32],
        scale: Float32,
    ) -> None:
        """One block of 64 rows; `rows_before` are those of the accumulator and of the gradient."""
        thread, _, _ = cute.arch.thread_idx()
        heads, head, query_length = heads_and_length
        source = accumulator + rows_before[0] * self.width
        places = FRAGMENT_ROWS // 2 * (self.width // COLUMNS)
        for step in cutlass.range_constexpr(-(-places // self.threads)):
            place = thread + step * self.threads
            if place < places:
                row, column, rounded = self.convert_fragments(source, place, scale)
                for half in cutlass.range_constexpr(2):
                    to_row = first_row + row + 8 * half
                    if (to_row < query_length) & (column < self.head_dim):
                        to = ((rows_before[1] + to_row) * heads + head) * self.head_dim + column
                        cute.autovec_copy(rounded[half], vector_at(grad_query, to, COLUMNS))

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
        if cutlass.const_expr(self.fragment_parts > 0):
            first_row = row_tile * FRAGMENT_ROWS
            rows_before = Int64(pair) * padded_length + first_row, Int64(batch) * query_length
            self.store_fragments(accumulator, grad_query, first_row, rows_before, (heads, head, query_length), scale)
            return
        for step in cutlass.range_constexpr(-(-self.rows * self.vectors // self.threads)):
            index = thread + step * self.threads
            row = row_tile * self.rows + index // self.vectors
            column = (index % self.vectors) * self.vector
            is_real = row < query_length
            if cutlass.const_expr(self.rows * self.vectors % self.threads != 0):
                is_real = is_real & (index < self.rows * self.vectors)
            if is_real:
                source = (Int64(pair) * padded_length + row) * self.width + column
                to = ((Int64(batch) * query_length + row) * heads + head) * self.head_dim + column
                rounded = self.convert(accumulator, source, scale)
                cute.autovec_copy(rounded, vector_at(grad_query, to, self.vector))

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
    postprocess = Postprocess(plan)

    def pointer(kind: Any) -> Any:
        return make_ptr(kind, 16, cute.AddressSpace.gmem, assumed_align=16)

    integers = (Int32(1),) * 3
    return postprocess.host, (pointer(Float32), pointer(postprocess.element), *integers, Float32(1.0))
