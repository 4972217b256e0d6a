"""Device code that merges parts of the keys, in CuTe-DSL. Imported only to build.

Few queries against many keys are attended part by part (`jax_fa4.splitting`); the result is the mean of the parts'
outputs, weighted by exp(lse) (Rabe and Staats, arXiv 2112.05682). Query heads that share keys may have been rows of one
head:

    parts     out (batch, part, query * group + head in group, KV head, value_dim), lse likewise
    results   out (batch, query, KV head * group + head in group, value_dim), lse likewise

A block takes one row of the results, and each of its warps a share of the parts; a lane has four columns. What takes
time is one read of what the kernel before has just written: so every load of a share is under way before the first is
used, weights are computed by every lane for itself, and the warps' means are merged once, in shared memory.
"""

from __future__ import annotations

import functools
import math
import operator
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
COLUMNS = 4  # of a lane: loads of 8 bytes
CHUNK = 4  # parts that a warp loads before it uses the first
LOG2_E, LN_2 = math.log2(math.e), math.log(2.0)


def _exp2(exponent: Float32) -> Float32:
    return cute.math.exp2(exponent, fastmath=True)  # type: ignore[attr-defined]


def _log2(value: Float32) -> Float32:
    return cute.math.log2(value, fastmath=True)  # type: ignore[attr-defined]


def finite_or_zero(log_sum: Float32) -> Float32:
    """A greatest log-sum-exp with 0 for -inf, of which weights are 0 too."""
    return cutlass.select_(log_sum == -Float32.inf, Float32(0.0), log_sum)


def weigh(lses: list[Any]) -> tuple[Any, list[Any]]:
    """The greatest log-sum-exp, and the weights by it."""
    greatest = functools.reduce(cute.arch.fmax, lses)
    reference = finite_or_zero(greatest)
    return greatest, [_exp2((one - reference) * LOG2_E) for one in lses]


class MergeParts:
    """The kernel of one plan."""

    def __init__(self, plan: KernelPlan) -> None:
        self.warps = plan.threads // WARP
        self.element = ELEMENTS[str(plan.option("dtype"))]
        self.has_sinks = bool(plan.option("sinks"))
        self.vectors = int(plan.option("value_dim")) // COLUMNS  # of a row, one a lane
        self.spans = -(-self.vectors // WARP)

    @cute.jit
    def load(
        self, rows: cute.Pointer, lse: cute.Pointer, stride: Int64, parts: Int32, lane: Int32
    ) -> tuple[cute.Tensor, cute.Tensor]:
        """Log-sum-exps (CHUNK,) and vectors (spans, CHUNK) of every `warps`-th part from here on; -inf and 0 where
        there are no more."""
        lses = cute.make_rmem_tensor(cute.make_layout(CHUNK), Float32)
        loaded = cute.make_rmem_tensor(cute.make_layout((self.spans, CHUNK)), Int64)
        lses.fill(Float32(-math.inf))
        loaded.fill(0)
        for index in cutlass.range_constexpr(CHUNK):
            if index * self.warps < parts:
                row = stride * (index * self.warps)
                lses[index] = read(lse, row)
                for span in cutlass.range_constexpr(self.spans):
                    vector = span * WARP + lane
                    if vector < self.vectors:
                        loaded[span, index] = read(rows, row * self.vectors + vector)
        return lses, loaded

    @cute.jit
    def sum_share(
        self, rows: cute.Pointer, lse: cute.Pointer, stride: Int64, parts: Int32, sums: cute.Tensor
    ) -> tuple[Any, Any]:
        """Sums of a warp's share of the parts, (columns of a lane,), its greatest log-sum-exp and its weights' sum."""
        thread, _, _ = cute.arch.thread_idx()
        warp, lane = cute.arch.make_warp_uniform(thread // WARP), thread % WARP
        highest, total = -Float32.inf, Float32(0.0)
        sums.fill(Float32(0.0))
        for part in cutlass.range(warp, parts, self.warps * CHUNK, unroll=1):
            place = stride * part
            lses, loaded = self.load(rows + place * self.vectors, lse + place, stride, parts - part, lane)
            highest, (shrink, *weights) = weigh([highest, *(lses[index] for index in range(CHUNK))])
            total = functools.reduce(operator.add, weights, total * shrink)
            elements = cute.recast_tensor(loaded, self.element)
            for column in cutlass.range_constexpr(self.spans * COLUMNS):
                one = sums[column] * shrink
                for index in cutlass.range_constexpr(CHUNK):
                    one += elements[index * self.spans * COLUMNS + column].to(Float32) * weights[index]
                sums[column] = one
        return highest, total

    @cute.kernel
    def kernel(
        self,
        parts_out: cute.Pointer,
        parts_lse: cute.Pointer,
        sinks: Any,
        out: cute.Pointer,
        lse: cute.Pointer,
        integers: tuple[Int32, Int32, Int32],
        strides: tuple[Int64, Int64],
        divisors: tuple[Any, Any],
    ) -> None:
        """The text of the module says who does what; `strides` are rows of a part, and of all parts of a batch row."""
        thread, _, _ = cute.arch.thread_idx()
        place, head, _ = cute.arch.block_idx()  # (batch row, query), head
        _, heads, _ = cute.arch.grid_dim()
        warp, lane = cute.arch.make_warp_uniform(thread // WARP), thread % WARP
        (parts, group, kv_heads), (stride, of_batch), (queries, by_group) = integers, strides, divisors
        row = Int64(place) * heads + head
        batch, query = divmod(place, queries)
        kv_head, member = divmod(head, by_group)
        first = Int64(batch) * of_batch + Int64(query * group + member) * kv_heads + kv_head
        sink = None
        if cutlass.const_expr(self.has_sinks):
            sink = read(sinks, head)
        sums = cute.make_rmem_tensor(cute.make_layout(self.spans * COLUMNS), Float32)
        rows = cute.recast_ptr(parts_out, dtype=Int64) + first * self.vectors
        highest, total = self.sum_share(rows, parts_lse + first, stride, parts, sums)
        memory, width = cutlass.memory.SmemAllocator(), self.spans * COLUMNS
        shares = cute.make_tensor(
            memory.allocate_array(Float32, self.warps * width * WARP), cute.make_layout((width, WARP, self.warps))
        )
        statistics = cute.make_tensor(memory.allocate_array(Float32, 2 * self.warps), cute.make_layout((2, self.warps)))
        cute.autovec_copy(sums, shares[None, lane, warp])
        if lane == 0:
            statistics[0, warp], statistics[1, warp] = highest, total
        cute.arch.sync_threads()
        if warp == 0:
            found = self.merge(shares[None, lane, None], statistics, sink, out, row)
            if lane == 0:
                write(lse, row, found)

    @cute.jit
    def merge(self, shares: cute.Tensor, statistics: cute.Tensor, sink: Any, out: cute.Pointer, row: Int64) -> Any:
        """Writes a lane's columns of the mean of the shares, (columns, warps); returns the row's log-sum-exp."""
        lses, totals = ([statistics[which, one] for one in range(self.warps)] for which in range(2))
        if cutlass.const_expr(self.has_sinks):
            lses, totals = [*lses, sink], [*totals, Float32(1.0)]
        highest, weights = weigh(lses)
        total = functools.reduce(operator.add, (one * weight for one, weight in zip(totals, weights, strict=True)))
        is_empty = total == Float32(0.0)
        factor = cute.arch.rcp_approx(cutlass.select_(is_empty, Float32(1.0), total))
        mean = cute.make_rmem_tensor(cute.make_layout((COLUMNS, self.spans)), self.element)
        for column in cutlass.range_constexpr(self.spans * COLUMNS):
            weighted = (shares[column, index] * weights[index] for index in range(self.warps))
            mean[column] = (functools.reduce(operator.add, weighted) * factor).to(self.element)
        vectors = cute.recast_tensor(mean, Int64)
        to = cute.recast_ptr(out, dtype=Int64) + row * self.vectors
        thread, _, _ = cute.arch.thread_idx()
        for span in cutlass.range_constexpr(self.spans):
            vector = span * WARP + thread % WARP
            if vector < self.vectors:
                write(to, vector, vectors[span])
        merged = finite_or_zero(highest) + _log2(total) * LN_2
        return cutlass.select_(is_empty, -Float32.inf, merged)

    @cute.jit
    def host(self, pointers: tuple[Any, ...], integers: Any, strides: Any, divisors: tuple[Int32, ...]) -> None:
        """Exists for the compiler only: the package's own runtime launches the kernel."""
        by = tuple(cute.FastDivmodDivisor(one) for one in divisors)
        self.kernel(*pointers, integers, strides, by).launch(grid=(1, 1, 1), block=(self.warps * WARP, 1, 1))


def trace(plan: KernelPlan) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """The function to compile, and arguments of the right types."""
    made = MergeParts(plan)

    def pointer(kind: Any, alignment: int) -> Any:
        return make_ptr(kind, alignment, cute.AddressSpace.gmem, assumed_align=alignment)

    rows, floats = pointer(made.element, 16), pointer(Float32, 4)
    pointers = (rows, floats, floats if made.has_sinks else None, rows, floats)
    return made.host, (pointers, (Int32(1),) * 3, (Int64(1),) * 2, (Int32(1),) * 2)
