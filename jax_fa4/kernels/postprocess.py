"""Device code of the backward's postprocess, in CuTe-DSL. Imported only to build; needs nvidia-cutlass-dsl.

The backward kernels add up the query gradients in float32, row by row in the order of (batch, head, padded row); this
kernel scales and rounds the sums:

    grad_query[b, t, n, :] = round(scale * accumulator[b, n, t, :])        t < query_length

One block takes `rows` rows of one head, 256 threads; each thread turns `vector` neighbouring floats (two loads of 16
bytes for 16-bit results, one for float32) into one store of 16 bytes:

    accumulator (batch, head, padded row, accumulator_width)   read whole rows that lie together
    grad_query  (batch, row, head, head_dim)                   head_dim may be less than the accumulator's width

Bytes moved per row, bf16, D = 128: 512 read, 256 written; nothing is computed that could take longer than that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.runtime import make_ptr

from jax_fa4.kernels.plan import DTYPES, KernelPlan
from jax_fa4.kernels.preprocess import ELEMENTS, vector_at

VECTOR_FLOATS = 4


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

    @cute.jit
    def convert(self, source: cute.Pointer, offset: Int64, scale: Float32) -> cute.Tensor:
        """`vector` sums, scaled and rounded."""
        rounded = cute.make_rmem_tensor(cute.make_layout(self.vector), self.element)
        for part in cutlass.range_constexpr(self.vector // VECTOR_FLOATS):
            sums = vector_at(source, offset + part * VECTOR_FLOATS, VECTOR_FLOATS).load() * scale
            for place in cutlass.range_constexpr(VECTOR_FLOATS):
                rounded[part * VECTOR_FLOATS + place] = sums[place].to(self.element)
        return rounded

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
        pair, row_tile, _ = cute.arch.block_idx()
        batch = pair // heads
        head = pair % heads
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
