"""Device code that merges parts of the keys, in CuTe-DSL. Imported only to build.

Few queries against many keys are attended part by part (`jax_fa4.splitting`); the result is the mean of the parts'
outputs, weighted by exp(lse) (Rabe and Staats, arXiv 2112.05682). Query heads that share keys may have been rows of one
head:

    parts     out (batch, part, query * group + head in group, KV head, value_dim), lse likewise
    results   out (batch, query, KV head * group + head in group, value_dim), lse likewise

A warp takes one row of the results: lanes find the greatest log-sum-exp of the parts and the sum of the weights, then
each has four columns, and adds them up part by part. It moves bytes, and little else.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.runtime import make_ptr

from jax_fa4.kernels.parts.memory import read, write
from jax_fa4.kernels.plan import KernelPlan
from jax_fa4.kernels.preprocess import ELEMENTS

WARP = 32
COLUMNS = 4  # of a lane
LOG2_E = math.log2(math.e)


def _exp2(exponent: Float32) -> Float32:
    return cute.math.exp2(exponent, fastmath=True)  # type: ignore[attr-defined]


def _log2(value: Float32) -> Float32:
    return cute.math.log2(value, fastmath=True)  # type: ignore[attr-defined]


class MergeParts:
    """The kernel of one plan."""

    def __init__(self, plan: KernelPlan) -> None:
        self.threads = plan.threads
        self.element = ELEMENTS[str(plan.option("dtype"))]
        self.value_dim = int(plan.option("value_dim"))
        self.has_sinks = bool(plan.option("sinks"))

    @cute.jit
    def weigh(self, lse: cute.Pointer, sink: Any, parts: Int32, stride: Int64) -> tuple[Any, Any]:
        """The greatest log-sum-exp (0 where no part sees a key), and the sum of the weights."""
        thread, _, _ = cute.arch.thread_idx()
        lane = thread % WARP
        highest = -Float32.inf
        for part in cutlass.range(lane, parts, WARP, unroll=1):
            highest = cutlass.max(highest, read(lse, Int64(part) * stride))
        highest = cute.arch.warp_reduction_max(highest)
        if cutlass.const_expr(self.has_sinks):
            highest = cutlass.max(highest, sink)
        highest = cutlass.select_(highest == -Float32.inf, Float32(0.0), highest)
        total = Float32(0.0)
        for part in cutlass.range(lane, parts, WARP, unroll=1):
            total += _exp2((read(lse, Int64(part) * stride) - highest) * LOG2_E)
        total = cute.arch.warp_reduction_sum(total)
        if cutlass.const_expr(self.has_sinks):
            total += _exp2((sink - highest) * LOG2_E)
        return highest, total

    @cute.jit
    def add_columns(
        self, parts_out: cute.Pointer, lse: cute.Pointer, to: cute.Pointer, closing: tuple[Any, Any], parts: Int32
    ) -> None:
        """The weighted mean of four columns a lane; `closing` is the stride between parts and what weights are of."""
        thread, _, _ = cute.arch.thread_idx()
        stride, (highest, factor) = closing
        for first in cutlass.range_constexpr(0, self.value_dim, COLUMNS * WARP):
            column = first + thread % WARP * COLUMNS
            if column < self.value_dim:
                total = cute.make_rmem_tensor(cute.make_layout(COLUMNS), Float32)
                total.fill(0.0)
                for part in cutlass.range(parts, unroll=16):
                    place = Int64(part) * stride
                    weight = _exp2((read(lse, place) - highest) * LOG2_E) * factor
                    source = (parts_out + place * self.value_dim + column).align(8)
                    loaded = cute.make_tensor(source, cute.make_layout(COLUMNS)).load().to(Float32)
                    total.store(total.load() + loaded * weight)
                rounded = cute.make_rmem_tensor(cute.make_layout(COLUMNS), self.element)
                rounded.store(total.load().to(self.element))
                cute.autovec_copy(rounded, cute.make_tensor((to + column).align(8), cute.make_layout(COLUMNS)))

    @cute.kernel
    def kernel(
        self,
        parts_out: cute.Pointer,
        parts_lse: cute.Pointer,
        sinks: Any,
        out: cute.Pointer,
        lse: cute.Pointer,
        sizes: tuple[Int32, Int32, Int32, Int32, Int32],
    ) -> None:
        """The text of the module says who does what."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        rows, parts, queries, heads, group = sizes
        row = block * (self.threads // WARP) + cute.arch.make_warp_uniform(thread // WARP)
        if row < rows:
            head, of_batch = row % heads, row // heads // queries
            query = row // heads % queries
            stride = Int64(queries) * heads
            packed = (query * group + head % group) * (heads // group) + head // group
            first = Int64(of_batch) * parts * stride + packed
            sink = None
            if cutlass.const_expr(self.has_sinks):
                sink = read(sinks, head)
            highest, total = self.weigh(parts_lse + first, sink, parts, stride)
            is_empty = total == Float32(0.0)
            factor = 1.0 / cutlass.select_(is_empty, Float32(1.0), total)
            to = out + Int64(row) * self.value_dim
            source = parts_out + first * self.value_dim
            self.add_columns(source, parts_lse + first, to, (stride, (highest, factor)), parts)
            if thread % WARP == 0:
                merged = highest + _log2(total) / LOG2_E
                write(lse, row, cutlass.select_(is_empty, -Float32.inf, merged))

    @cute.jit
    def host(
        self, parts_out: cute.Pointer, parts_lse: cute.Pointer, sinks: Any, out: Any, lse: Any, sizes: Any
    ) -> None:
        """Exists for the compiler only: the package's own runtime launches the kernel."""
        self.kernel(parts_out, parts_lse, sinks, out, lse, sizes).launch(grid=(1, 1, 1), block=(self.threads, 1, 1))


def trace(plan: KernelPlan) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """The function to compile, and arguments of the right types."""
    made = MergeParts(plan)

    def pointer(kind: Any, alignment: int) -> Any:
        return make_ptr(kind, alignment, cute.AddressSpace.gmem, assumed_align=alignment)

    rows, floats = pointer(made.element, 16), pointer(Float32, 4)
    return made.host, (rows, floats, floats if made.has_sinks else None, rows, floats, (Int32(1),) * 5)
