"""Pieces of PTX that the small pipelined kernels share: phases, barriers, descriptors, the store of a tile."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from tests.emulator.mutation.ptx_text import Writer


def stage_and_parity(w: Writer, count: str = "%count") -> None:
    """From a running count of blocks: the stage, the parity to wait for when full, and when empty."""
    w(f"and.b32 %stage, {count}, 1", "stage")
    w(f"shr.u32 %parity, {count}, 1")
    w("and.b32 %parity, %parity, 1")
    w("xor.b32 %empty_parity, %parity, 1")


def tile_parities(w: Writer) -> None:
    """Parities of barriers that complete once a tile."""
    w("and.b32 %tile_parity, %tile, 1")
    w("xor.b32 %tile_empty_parity, %tile_parity, 1")


def ring(w: Writer, offset: int, stage: str = "%stage") -> str:
    """Computes into %at the address of a ring's barrier, whose stage 0 lies at a shared offset."""
    w(f"mad.lo.u32 %at, {stage}, 8, {offset}")
    w("add.u32 %at, %at, %base")
    return "%at"


def start_tiles(w: Writer) -> None:
    """Shared memory, sizes, and the first tile of the CTA."""
    w("mov.u32 %base, storage")
    w("ld.param.u32 %tiles, [tiles]")
    w("ld.param.u32 %blocks, [blocks]")
    w("mov.u32 %first_tile, %ctaid.x")
    w("mul.lo.u32 %first_tile, %first_tile, %tiles")


def init_barriers(
    w: Writer, table: Mapping[str, tuple[int, int]], rings: Collection[str], stages: int, first: int
) -> None:
    """One thread makes all barriers; `table` is (slot, count of arrivals), slot 0 lies at shared offset `first`."""
    w("setp.eq.u32 %elected, %thread, 0")
    with w.when("%elected"):
        for name, (slot, count) in table.items():
            for stage in range(stages if name in rings else 1):
                w(f"mbarrier.init.shared::cta.b64 [%base+{first + 8 * (slot + stage)}], {count}", f"init {name}")
        w("fence.mbarrier_init.release.cluster", "fence init")


def descriptor(w: Writer, register: str, address: str, step_bytes: int, high: int) -> None:
    """A shared memory descriptor at `address` plus a constant; `high` is its upper half."""
    w(f"add.u32 %low, {address}, {step_bytes}")
    w("shr.u32 %low, %low, 4")
    w("and.b32 %low, %low, 16383")
    w(f"mov.b64 {register}, {{%low, {high}}}", f"descriptor {register[1:]}")


def begin_staging(w: Writer) -> None:
    """Waits until the staging buffer of the output may be written again."""
    with w.when("%elected"):
        w("cp.async.bulk.wait_group.read 0", "wait_group.read staging")
    w("bar.sync 1, 128", "barrier staging free")


def store_staged(w: Writer, offset: int, rows: int) -> None:
    """Stores the staged tile by TMA, in two boxes of 32 columns, from a shared offset."""
    w("fence.proxy.async.shared::cta", "fence proxy staging")
    w("bar.sync 1, 128", "barrier staging full")
    with w.when("%elected"):
        w("add.u32 %row, %first_tile, %tile")
        w(f"mul.lo.u32 %row, %row, {rows}")
        w("mov.b64 %map, out_map")
        w("cvta.param.u64 %map, %map")
        for half in range(2):
            w(f"add.u32 %at, %base, {offset + half * rows * 128}")
            w(
                f"cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%map, {{{32 * half}, %row}}], [%at]",
                "store out",
            )
        w("cp.async.bulk.commit_group", "commit_group out")
