"""Copies of whole runs of bytes by the copy engine, sums into global memory, and flags there.

Each function is one PTX instruction (PTX ISA: cp.async.bulk, cp.reduce.async.bulk, ld.acquire, red.release), to be
executed by one thread unless it says otherwise. Addresses and sizes are multiples of 16 bytes.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32


def load_run(to: cute.Pointer, source: cute.Pointer, size_bytes: int, landed: cute.Pointer) -> None:
    """Copy from global to shared memory; the bytes are counted at the barrier `landed`."""
    cute.arch.inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[to.toint(), source.toint(), Int32(size_bytes), landed.toint()],
    )


def add_run(to: cute.Pointer, source: cute.Pointer, size_bytes: Int32) -> None:
    """Add float32 values in shared memory to those in global memory, in the thread's current bulk group."""
    cute.arch.inline_ptx(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{$r0}], [{$r1}], {$r2};",
        read_only_args=[to.toint(), source.toint(), size_bytes],
    )


@cute.jit
def wait_until(flag: cute.Pointer, value: Int32) -> None:
    """Spin until the flag in global memory has that value, and see what was written before it was raised."""
    seen = cute.arch.load(flag, Int32, sem="acquire", scope="gpu")
    while seen != value:
        seen = cute.arch.load(flag, Int32, sem="acquire", scope="gpu")


def raise_flag(flag: cute.Pointer) -> None:
    """Add 1 to the flag after everything that this thread has written or seen written."""
    cute.arch.red(flag, Int32(1), op="add", dtype="s32", sem="release", scope="gpu")


def store_transposed(to: cute.Pointer, values: list[cutlass.Uint32]) -> None:
    """Store four 8 x 8 matrices of 16-bit values transposed (PTX ISA: stmatrix.trans); by a whole warp, lane 8 q + i
    naming where row i of the q-th transposed matrix lies."""
    cute.arch.inline_ptx(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[to.toint(), *values],
    )
