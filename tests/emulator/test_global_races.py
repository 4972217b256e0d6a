"""Races on global memory: between CTAs, with asynchronous copies, through flags with and without fences, and between
kernels that a programmatic launch lets overlap. Each fault has its repaired twin, which must pass under every seed."""

from __future__ import annotations

import re

import numpy as np
import pytest

from jax_fa4 import emulator
from tests.emulator.device import Buffer, DriverError, Kernel, entry

pytestmark = pytest.mark.usefixtures("gpu")
SEEDS = range(6)

PARAMS = ".param .u64 data, .param .u64 flag"
# CTA 0 tells CTA 1 of data by a flag: `store`, `publish` in CTA 0, `poll` (until %r4 is 1), `consume` in CTA 1.
HANDSHAKE = """
  ld.param.u64 %rd1, [data]; ld.param.u64 %rd2, [flag]; mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x;
  mul.wide.u32 %rd3, %r1, 4; add.s64 %rd4, %rd1, %rd3; mov.u32 %r9, 1; setp.eq.u32 %p1, %r1, 0;
  setp.ne.u32 %p2, %r2, 0; @%p2 bra $reader;
  st.global.b32 [%rd4], %r1;
  bar.sync 0;
  @!%p1 bra $end;
  {publish}
  bra $end;
$reader: @!%p1 bra $met;
$poll: {poll} setp.ne.u32 %p3, %r4, 1; @%p3 bra $poll;
  {seen}
$met: bar.sync 0;
  ld.global.b32 %r5, [%rd4]; add.u32 %r5, %r5, 1; st.global.b32 [%rd4], %r5;
$end:
"""
RELEASE = {
    "publish": "red.release.gpu.global.add.u32 [%rd2], %r9;",
    "poll": "ld.acquire.gpu.global.b32 %r4, [%rd2];",
    "seen": "",
}
FENCES = {
    "publish": "fence.acq_rel.gpu; st.relaxed.gpu.global.b32 [%rd2], %r9;",
    "poll": "ld.relaxed.gpu.global.b32 %r4, [%rd2];",
    "seen": "fence.acq_rel.gpu;",
}


def report_of(parts: dict[str, str], seed: int) -> str:
    """What the emulator says of a handshake; empty if it passes and is right."""
    emulator.set_options(seed=seed)
    data, flag = Buffer(np.zeros(64, np.uint32)), Buffer(np.zeros(1, np.uint32))
    try:
        Kernel(entry(HANDSHAKE.format(**parts), PARAMS))((2,), (64,), data, flag)
    except DriverError as error:
        return str(error)
    np.testing.assert_array_equal(data.get(), np.arange(64) + 1)
    return ""


def reports(parts: dict[str, str]) -> set[str]:
    return {report_of(parts, seed) for seed in SEEDS}


@pytest.mark.parametrize(
    "parts",
    [
        RELEASE,
        FENCES,
        FENCES | {"publish": "membar.gl; atom.global.exch.b32 %r8, [%rd2], %r9;"},
        FENCES | {"publish": "fence.sc.sys; st.volatile.global.b32 [%rd2], %r9;"},
        RELEASE | {"poll": "atom.acquire.gpu.global.or.b32 %r4, [%rd2], 0;"},
    ],
)
def test_ordered_flags_pass(parts: dict[str, str]) -> None:
    assert reports(parts) == {""}


@pytest.mark.parametrize(
    "parts",
    [
        RELEASE | {"publish": "red.relaxed.gpu.global.add.u32 [%rd2], %r9;"},
        RELEASE | {"publish": "red.release.cta.global.add.u32 [%rd2], %r9;"},
        RELEASE | {"poll": "ld.relaxed.gpu.global.b32 %r4, [%rd2];"},
        FENCES | {"seen": ""},
        FENCES | {"seen": "fence.acq_rel.cta;"},
        FENCES | {"publish": "fence.acq_rel.cluster; st.relaxed.gpu.global.b32 [%rd2], %r9;"},
        FENCES | {"publish": "st.relaxed.gpu.global.b32 [%rd2], %r9; fence.acq_rel.gpu;"},
    ],
)
def test_a_missing_order_or_too_small_a_scope_is_reported(parts: dict[str, str]) -> None:
    for report in reports(parts):
        assert re.search(r"global memory at 0x[0-9a-f]+ \(byte \d+ of its allocation\), but nothing orders it", report)
        assert re.search(r"by warp \d of CTA \(\d, 0, 0\) in PTX line \d+", report)


@pytest.mark.parametrize("publish", ["st.global.b32 [%rd2], %r9;", "red.relaxed.cta.global.add.u32 [%rd2], %r9;"])
def test_a_flag_that_is_no_strong_operation_is_a_race_itself(publish: str) -> None:
    report = report_of(RELEASE | {"publish": publish}, 0)
    assert "nothing orders it" in report or "no progress" in report


def two_ctas(body: str, size: int = 64) -> None:
    """Two CTAs of 32 threads; %rd4 is the address of thread %r1 in the data, %r2 the CTA."""
    head = """
  ld.param.u64 %rd1, [data]; mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; mul.wide.u32 %rd3, %r1, 4;
  add.s64 %rd4, %rd1, %rd3;"""
    Kernel(entry(head + body, ".param .u64 data"))((2,), (32,), Buffer(np.zeros(size, np.uint32)))


def test_unordered_writes_of_two_ctas_are_reported_unless_they_write_the_same() -> None:
    with pytest.raises(DriverError, match=r"writes global memory .*nothing orders it after the write by"):
        two_ctas("st.global.b32 [%rd4], %r2;")
    two_ctas("st.global.b32 [%rd4], %r1;")


def test_a_write_after_an_unordered_read_is_reported() -> None:
    body = """
  setp.eq.u32 %p1, %r2, 0; @%p1 ld.global.b32 %r5, [%rd4]; @%p1 bra $end; st.global.b32 [%rd4], %r2;
$end:"""
    with pytest.raises(DriverError, match=r"nothing orders it after the (read|write) by"):
        two_ctas(body)


def test_atomics_do_not_race_with_each_other_but_with_plain_loads() -> None:
    two_ctas("red.relaxed.gpu.global.add.u32 [%rd1], 1; atom.global.max.u32 %r5, [%rd1], %r1;")
    with pytest.raises(DriverError, match="nothing orders it"):
        two_ctas("red.relaxed.gpu.global.add.u32 [%rd1], 1; ld.global.b32 %r5, [%rd1];")
    with pytest.raises(DriverError, match="nothing orders it"):
        two_ctas("red.relaxed.cta.global.add.u32 [%rd1], 1;")


def test_neighbouring_halves_of_a_word_do_not_race() -> None:
    two_ctas("cvt.u16.u32 %rs1, %r2; mul.wide.u32 %rd5, %r2, 2; add.s64 %rd5, %rd4, %rd5; st.global.b16 [%rd5], %rs1;")


# One CTA fills shared memory, copies it to global memory by a bulk copy, and the other warp reads that.
BULK = """
  ld.param.u64 %rd1, [data]; mov.u32 %r1, %tid.x; mov.u32 %r6, tile; mul.wide.u32 %rd3, %r1, 4;
  add.s64 %rd4, %rd1, %rd3; mad.lo.s32 %r7, %r1, 4, %r6; st.shared.b32 [%r7], %r1;
  fence.proxy.async.shared::cta; bar.sync 0;
  setp.ne.u32 %p1, %r1, 0; @%p1 bra $copied;
  cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r6], 256; cp.async.bulk.commit_group;
  {wait}
$copied: bar.sync 0; ld.global.b32 %r5, [%rd4]; add.u32 %r5, %r5, 1; st.global.b32 [%rd4], %r5;
  cp.async.bulk.wait_group.read 0;
"""


@pytest.mark.parametrize("seed", SEEDS)
def test_a_bulk_copy_is_written_after_the_full_wait_only(seed: int) -> None:
    def run(wait: str) -> np.ndarray:
        emulator.set_options(seed=seed)
        source = entry(BULK.format(wait=wait), ".param .u64 data", module=".shared .align 16 .b8 tile[256];")
        data = Buffer(np.zeros(64, np.uint32))
        Kernel(source)((1,), (64,), data)
        return data.get()

    np.testing.assert_array_equal(run("cp.async.bulk.wait_group 0;"), np.arange(64) + 1)
    for wait in ("cp.async.bulk.wait_group.read 0;", ""):
        with pytest.raises(DriverError, match=r"nothing orders it after the write by warp 0"):
            run(wait)


# A warp writes global memory, and reads it back by a bulk copy: another proxy.
PROXY = """
  ld.param.u64 %rd1, [data]; mov.u32 %r1, %tid.x; mov.u32 %r6, tile; add.u32 %r8, %r6, 256;
  mul.wide.u32 %rd3, %r1, 4; add.s64 %rd4, %rd1, %rd3; mad.lo.s32 %r7, %r1, 4, %r6;
  setp.ne.u32 %p1, %r1, 0; @!%p1 mbarrier.init.shared.b64 [%r8], 1;
  st.global.b32 [%rd4], %r1; {fence} bar.sync 0;
  @%p1 bra $wait;
  mbarrier.arrive.expect_tx.shared.b64 %rd9, [%r8], 256;
  cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r6], [%rd1], 256, [%r8];
$wait: mbarrier.try_wait.parity.shared.b64 %p2, [%r8], 0; @!%p2 bra $wait;
  ld.shared.b32 %r5, [%r7]; add.u32 %r5, %r5, 1; st.global.b32 [%rd4], %r5;
"""


def run_proxy(fence: str) -> np.ndarray:
    module = ".shared .align 16 .b8 tile[264];"
    data = Buffer(np.zeros(64, np.uint32))
    Kernel(entry(PROXY.format(fence=fence), ".param .u64 data", module=module))((1,), (64,), data)
    return data.get()


@pytest.mark.parametrize("fence", ["fence.proxy.async;", "fence.proxy.async.global;"])
def test_a_proxy_fence_of_global_memory_lets_copies_see_writes(fence: str) -> None:
    np.testing.assert_array_equal(run_proxy(fence), np.arange(64) + 1)


@pytest.mark.parametrize("fence", ["", "fence.proxy.async.shared::cta;", "fence.acq_rel.gpu;"])
def test_a_missing_proxy_fence_of_global_memory_is_reported(fence: str) -> None:
    with pytest.raises(DriverError, match=r"no fence\.proxy\.async of global memory lies between"):
        run_proxy(fence)


FILL = "ld.param.u64 %rd1, [data]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd3, %r1, 4; add.s64 %rd4, %rd1, %rd3;"


def follow(wait: str, programmatic: bool = True, synchronize: bool = False) -> None:
    """A kernel that writes, and one that reads what it wrote."""
    first = Kernel(entry(FILL + "st.global.b32 [%rd4], %r1;", ".param .u64 data"))
    second = Kernel(entry(FILL + wait + "ld.global.b32 %r5, [%rd4];", ".param .u64 data"))
    data = Buffer(np.zeros(64, np.uint32))
    first((1,), (64,), data)
    if synchronize:
        emulator.driver().cuCtxSynchronize()
    second((1,), (64,), data, programmatic=programmatic)


def test_a_programmatic_launch_must_wait_for_the_kernel_before_it() -> None:
    follow("griddepcontrol.wait;")
    follow("setp.eq.u32 %p1, %r1, 0; @%p1 griddepcontrol.wait; bar.sync 0;")
    follow("", programmatic=False)
    follow("", synchronize=True)
    with pytest.raises(DriverError, match=r"no griddepcontrol\.wait comes before"):
        follow("")
    with pytest.raises(DriverError, match=r"no griddepcontrol\.wait comes before"):
        follow("setp.lt.u32 %p1, %r1, 32; @%p1 griddepcontrol.wait;")


def test_races_are_not_looked_for_when_told_so() -> None:
    emulator.set_options(check_races=False)
    two_ctas("st.global.b32 [%rd4], %r2;")
