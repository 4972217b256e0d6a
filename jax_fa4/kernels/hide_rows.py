"""Device code that replaces rows which nobody sees by zeros, in CuTe-DSL. Imported only to build.

A row of keys that no query sees, or of queries that see nothing, may hold NaN, and a product of it with a zero would be
NaN: so attention kernels must read zeros there. Most rows are seen, and a copy of a whole tensor costs as much as a
tenth of a backward pass. So only tiles that have such rows are copied, and a flag for each tile says where to read:

    tensor   tile 0   tile 1   tile 2 (row 70 unseen)   tile 3 (all unseen)     read where flags are 0
    hidden     .        .      tile 2, row 70 zero        zeros                 read where they are 1
    flags      0        0        1                        1, or 0 if no interval reaches into it

One block of 256 threads takes one tile of one batch row, all heads. In the common case it reads two integers a row and
writes one flag.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.runtime import make_ptr

from jax_fa4.kernels.parts.memory import read, write
from jax_fa4.kernels.plan import KernelPlan

VECTOR = 4  # int32 of a load and store of 16 bytes


class HideRows:
    """The kernel of one plan."""

    def __init__(self, plan: KernelPlan) -> None:
        self.threads = plan.threads
        self.tensors = int(plan.option("tensors"))

    @cute.jit
    def copy(
        self, tensor: cute.Pointer, hidden: cute.Pointer, seen: cute.Pointer, first: Int64, rows: Int32, vectors: Int32
    ) -> None:
        """The rows from `first` on, zeros for those unseen."""
        thread, _, _ = cute.arch.thread_idx()
        for place in cutlass.range(thread, rows * vectors, self.threads, unroll=4):
            offset = (first * vectors + place) * VECTOR
            loaded = cute.make_rmem_tensor(cute.make_layout(VECTOR), Int32)
            loaded.fill(0)
            if read(seen, place // vectors) != 0:
                source = cute.make_tensor((tensor + offset).align(16), cute.make_layout(VECTOR))
                cute.autovec_copy(source, loaded)
            cute.autovec_copy(loaded, cute.make_tensor((hidden + offset).align(16), cute.make_layout(VECTOR)))

    @cute.kernel
    def kernel(
        self,
        tensors: Any,
        hidden: Any,
        intervals: Any,
        flags: cute.Pointer,
        sizes: tuple[Int32, Int32, Int32, Int32, Int32],
        vectors: Any,
    ) -> None:
        """The text of the module says who does what."""
        thread, _, _ = cute.arch.thread_idx()
        tile, batch, _ = cute.arch.block_idx()
        tiles, _, _ = cute.arch.grid_dim()
        length, others, tile_rows, stride, other_stride = sizes
        memory = cutlass.memory.SmemAllocator()
        seen = memory.allocate_array(Int32, self.threads)
        found = memory.allocate_array(Int32, 3)  # is one seen, is one unseen, does an interval reach into the tile
        first = tile * tile_rows
        rows = cutlass.min(tile_rows, length - first)
        if thread < 3:
            write(found, thread, Int32(0))
        cute.arch.sync_threads()
        if thread < rows:
            place = Int64(batch) * stride + first + thread
            is_seen = Int32(read(intervals[0], place) < read(intervals[1], place))
            write(seen, thread, is_seen)
            cute.arch.atomic_max(found + (1 - is_seen), Int32(1))
        cute.arch.sync_threads()
        if read(found, 0) == 0:
            for other in cutlass.range(thread, others, self.threads, unroll=1):
                place = Int64(batch) * other_stride + other
                lo, hi = read(intervals[2], place), read(intervals[3], place)
                if (lo < hi) & (lo < first + rows) & (hi > first):
                    cute.arch.atomic_max(found + 2, Int32(1))
            cute.arch.sync_threads()
        is_copied = (read(found, 1) != 0) & ((read(found, 0) != 0) | (read(found, 2) != 0))
        if thread == 0:
            write(flags, batch * tiles + tile, Int32(is_copied))
        if is_copied:
            for number in cutlass.range_constexpr(self.tensors):
                row = Int64(batch) * length + first
                self.copy(tensors[number], hidden[number], seen, row, rows, vectors[number])

    @cute.jit
    def host(self, tensors: Any, hidden: Any, intervals: Any, flags: Any, sizes: Any, vectors: Any) -> None:
        """Exists for the compiler only: the package's own runtime launches the kernel."""
        self.kernel(tensors, hidden, intervals, flags, sizes, vectors).launch(
            grid=(1, 1, 1), block=(self.threads, 1, 1)
        )


def trace(plan: KernelPlan) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """The function to compile, and arguments of the right types."""
    made = HideRows(plan)

    def pointer(alignment: int) -> Any:
        return make_ptr(Int32, alignment, cute.AddressSpace.gmem, assumed_align=alignment)

    rows = (pointer(16),) * made.tensors
    return made.host, (rows, rows, (pointer(4),) * 4, pointer(4), (Int32(1),) * 5, (Int32(1),) * made.tensors)
