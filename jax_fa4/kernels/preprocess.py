"""Device code of the backward's preprocess, in CuTe-DSL. Imported only to build; needs nvidia-cutlass-dsl.

For each query row of each head, with float32 arithmetic (FlashAttention-2, arXiv 2307.08691, algorithm 2, line 4):

    delta    = sum(out * grad_out) - grad_lse     0 for rows that saw no key (lse = -inf) and for padding rows
    lse_log2 = lse * log2(e)                      0 for rows that saw no key, +inf for padding rows: exp2(s - inf) = 0
    accumulator row = 0

so that the kernels after it recompute probabilities as exp2(scores_log2 - lse_log2) without a special case.

One block takes `rows` rows of one head, 256 threads; `lanes` neighbours of a warp share a row (here 16, head dim 128,
bf16):

    out, grad_out (batch, row, head, column), 16 bytes a lane and load
      row 0   |lane 0 |lane 1 |  ...  |lane 15|   -> sum over lanes by shuffles -> lane 0 writes delta, lse_log2
      row 1   |lane 16|lane 17|  ...  |lane 31|      (batch, head, padded row)
      ...     16 rows at once, then 16 more; all loads are issued before the first is used
    accumulator (batch, head, padded row, column)
      rows * width floats that lie together: 256 threads write 16 bytes each, again and again

Blocks go from the last row of the last head to the first row of the first (`place_from_last`), since the backward
kernels go from first to last: what they add to first was zeroed last, and is still in the L2 cache.

Rows beyond the query length load the last real row instead, and drop it: no branch stands between the loads. Bytes
moved per row, bf16, D = 128: 512 read, 8 read, 8 written, 512 zeroed; nothing is computed that could take longer than
that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.runtime import make_ptr

from jax_fa4.kernels.plan import DTYPES, KernelPlan

ELEMENTS = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16, "float32": cutlass.Float32}
LOG2_E = math.log2(math.e)
VECTOR_FLOATS = 4


def vector_at(pointer: cute.Pointer, offset: Int64, elements: cutlass.Constexpr) -> cute.Tensor:
    """16 bytes at an offset that is a multiple of them."""
    return cute.make_tensor((pointer + offset).align(16), cute.make_layout(elements))


@cute.jit
def place_from_last(heads: Int32) -> tuple[Int32, Int32, Int32, Int32]:
    """(pair, batch row, head, row tile) of this block, where pairs are heads of all batch rows, numbered as sums lie.

    Blocks start in the order of x, then y, then z. z is a section of neighbouring pairs, y a row tile, both from the
    last to the first; x is a pair of the section.
    """
    place, tile, section = cute.arch.block_idx()
    pairs, tiles, sections = cute.arch.grid_dim()
    pair = (sections - 1 - section) * pairs + place
    return pair, pair // heads, pair % heads, tiles - 1 - tile


class Preprocess:
    """The kernel of one plan."""

    def __init__(self, plan: KernelPlan) -> None:
        self.threads = plan.threads
        self.lanes = int(plan.option("lanes"))
        self.rows = int(plan.option("rows"))
        self.width = int(plan.option("accumulator_width"))
        self.value_dim = int(plan.option("value_dim"))
        self.vector = 16 // DTYPES[str(plan.option("dtype"))]
        self.vectors = self.value_dim // self.vector
        self.rows_at_once = self.threads // self.lanes

    @cute.jit
    def row_dot(self, out: cute.Pointer, grad_out: cute.Pointer, row_offset: Int64, lane: Int32) -> Float32:
        """This lane's share of sum(out * grad_out) over one row."""
        total = Float32(0.0)
        for step in cutlass.range_constexpr(-(-self.vectors // self.lanes)):
            index = lane + step * self.lanes
            hangs_over = (step + 1) * self.lanes > self.vectors
            if cutlass.const_expr(hangs_over):
                index = cutlass.min(index, self.vectors - 1)
            offset = row_offset + index * self.vector
            left = vector_at(out, offset, self.vector).load().to(Float32)
            right = vector_at(grad_out, offset, self.vector).load().to(Float32)
            share = (left * right).reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
            if cutlass.const_expr(hangs_over):
                share = cutlass.select_(lane + step * self.lanes < self.vectors, share, Float32(0.0))
            total += share
        return total

    @cute.jit
    def zero_accumulator(self, accumulator: cute.Pointer, first_row: Int64, thread: Int32) -> None:
        """Zeroes the accumulator rows of this block."""
        zeros = cute.make_rmem_tensor(cute.make_layout(VECTOR_FLOATS), Float32)
        zeros.fill(0.0)
        vectors = self.rows * self.width // VECTOR_FLOATS
        for step in cutlass.range_constexpr(-(-vectors // self.threads)):
            index = thread + step * self.threads
            to = vector_at(accumulator, first_row * self.width + index * VECTOR_FLOATS, VECTOR_FLOATS)
            if cutlass.const_expr((step + 1) * self.threads > vectors):
                if index < vectors:
                    cute.autovec_copy(zeros, to)
            else:
                cute.autovec_copy(zeros, to)

    @cute.kernel
    def kernel(
        self,
        out: cute.Pointer,
        grad_out: cute.Pointer,
        lse: cute.Pointer,
        grad_lse: cute.Pointer,
        lse_log2: cute.Pointer,
        delta: cute.Pointer,
        accumulator: cute.Pointer,
        heads: Int32,
        query_length: Int32,
        padded_length: Int32,
    ) -> None:
        """The text of the module says who does what."""
        thread, _, _ = cute.arch.thread_idx()
        pair, batch, head, row_tile = place_from_last(heads)
        lane = thread % self.lanes
        first_row = row_tile * self.rows
        results = []
        for step in cutlass.range_constexpr(self.rows // self.rows_at_once):
            row = first_row + step * self.rows_at_once + thread // self.lanes
            loaded_row = cutlass.min(row, query_length - 1)
            source = (Int64(batch) * query_length + loaded_row) * heads + head
            row_lse = cute.make_tensor(lse + source, cute.make_layout(1))[0]
            row_grad_lse = cute.make_tensor(grad_lse + source, cute.make_layout(1))[0]
            dot = self.row_dot(out, grad_out, source * self.value_dim, lane)
            results.append((row, row_lse, row_grad_lse, dot))
        padded_row = Int64(pair) * padded_length
        if cutlass.const_expr(self.width > 0):
            self.zero_accumulator(accumulator, padded_row + first_row, thread)
        for row, row_lse, row_grad_lse, dot in results:
            total = cute.arch.warp_reduction_sum(dot, threads_in_group=self.lanes) - row_grad_lse
            is_padding = row >= query_length
            saw_nothing = row_lse == -Float32.inf
            log2 = cutlass.select_(saw_nothing, Float32(0.0), row_lse * LOG2_E)
            log2 = cutlass.select_(is_padding, Float32.inf, log2)
            total = cutlass.select_(saw_nothing | is_padding, Float32(0.0), total)
            if lane == 0:
                cute.make_tensor(lse_log2 + (padded_row + row), cute.make_layout(1))[0] = log2
                cute.make_tensor(delta + (padded_row + row), cute.make_layout(1))[0] = total

    @cute.jit
    def host(
        self,
        out: cute.Pointer,
        grad_out: cute.Pointer,
        lse: cute.Pointer,
        grad_lse: cute.Pointer,
        lse_log2: cute.Pointer,
        delta: cute.Pointer,
        accumulator: cute.Pointer,
        heads: Int32,
        query_length: Int32,
        padded_length: Int32,
    ) -> None:
        """Exists for the compiler only: the package's own runtime launches the kernel."""
        self.kernel(
            out, grad_out, lse, grad_lse, lse_log2, delta, accumulator, heads, query_length, padded_length
        ).launch(grid=(1, 1, 1), block=(self.threads, 1, 1))


def trace(plan: KernelPlan) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """The function to compile, and arguments of the right types."""
    element = ELEMENTS[str(plan.option("dtype"))]

    def pointer(kind: Any, alignment: int) -> Any:
        return make_ptr(kind, alignment, cute.AddressSpace.gmem, assumed_align=alignment)

    rows, floats = pointer(element, 16), pointer(Float32, 4)
    arguments = (rows, rows, floats, floats, floats, floats, pointer(Float32, 16), Int32(1), Int32(1), Int32(1))
    return Preprocess(plan).host, arguments
