"""Tensor memory: 128 lanes of 512 columns of 32 bits, where the tensor core keeps its accumulators.

An address is lane << 16 | column. Warp w of a warpgroup reaches lanes 32 w .. 32 w + 31 only, one lane a thread, so a
thread that loads n columns gets n consecutive elements of one row of an accumulator. Kernels here take all 512 columns,
so that the allocation begins at column 0 and every column is a constant.

Loads are issued without `tcgen05.wait::ld`: the registers are interlocked, as those of other loads are (compiled
kernels of flash-attn-4, which run on silicon, rely on that). Stores have no such help: who tells others of them waits
first (`wait_stores`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from jax_fa4.kernels.parts.assembly import assembly

COLUMNS = 512
LANES_SHIFT = 16


def allocate(address_slot: cute.Pointer, ctas: int = 1) -> None:
    """Take all columns; the base, which is 0, is written to shared memory (called by one whole warp of each CTA)."""
    cute.arch.alloc_tmem(COLUMNS, address_slot, is_two_cta=ctas == 2)
    cute.arch.relinquish_tmem_alloc_permit(is_two_cta=ctas == 2)


def base(address_slot: Int32) -> Int32:
    """The base as it was written to that address of shared memory; read each time."""
    address: Int32 = assembly("ld.volatile.shared.b32 $0, [$1];", [Int32], address_slot)
    return cute.arch.make_warp_uniform(address)


def deallocate(ctas: int = 1) -> None:
    """Give all columns back (called by the warp that allocated)."""
    text = f"tcgen05.dealloc.cta_group::{ctas}.sync.aligned.b32 $0, {COLUMNS};"
    assembly(text, [], Int32(0))


def lanes_of(warp: Int32) -> Int32:
    """The part of an address that names the first lane a warp reaches; `warp` is its index modulo 4."""
    return warp << (LANES_SHIFT + 5)


def load(address: Int32, columns: int, offset: int = 0) -> tuple[Any, ...]:
    """`columns` (a power of two up to 128) float32 of this thread's lane, from column address + offset."""
    registers = ", ".join(f"${place}" for place in range(columns))
    text = f"tcgen05.ld.sync.aligned.32x32b.x{columns}.b32 {{{registers}}}, [${columns} + {offset}];"
    return tuple(assembly(text, [Float32] * columns, address))


def load_with_max(address: Int32, columns: int, offset: int = 0) -> tuple[tuple[Any, ...], Float32]:
    """`load`, and the highest of what it loads; on compute capability 10.3, not on 10.0."""
    registers = ", ".join(f"${place}" for place in range(columns))
    text = f"tcgen05.ld.red.sync.aligned.32x32b.x{columns}.max.f32 {{{registers}}}, "
    text += f"${columns}, [${columns + 1} + {offset}];"
    *values, highest = assembly(text, [Float32] * (columns + 1), address)
    return tuple(values), highest


def store(address: Int32, values: Sequence[Float32 | Uint32], offset: int = 0) -> None:
    """Write this thread's lane from column address + offset on; the number of values is a power of two up to 128."""
    count = len(values)
    registers = ", ".join(f"${place + 1}" for place in range(count))
    text = f"tcgen05.st.sync.aligned.32x32b.x{count}.b32 [$0 + {offset}], {{{registers}}};"
    assembly(text, [], address, *values)


def wait_loads() -> None:
    """Wait until this warp's loads have read tensor memory, so that others may overwrite it."""
    cute.arch.fence_view_async_tmem_load()


def wait_stores() -> None:
    """Wait until this warp's stores have been made, so that others may be told."""
    cute.arch.fence_view_async_tmem_store()


def fence_before_arrival() -> None:
    """Order this thread's loads and stores before a barrier arrival that follows."""
    assembly("tcgen05.fence::before_thread_sync;", [])


def fence_after_wait() -> None:
    """Order what follows after the barrier wait before it."""
    assembly("tcgen05.fence::after_thread_sync;", [])
