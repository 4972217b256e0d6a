"""Scalar instructions, control flow, memory and barriers of the emulated machine, by small PTX kernels."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from jax_fa4 import emulator
from tests.emulator.device import Buffer, DriverError, Kernel, check, entry

pytestmark = pytest.mark.usefixtures("gpu")
UNARY = ".param .u64 out, .param .u64 in"
HEAD = """
  mov.u32 %r1, %tid.x; ld.param.u64 %rd1, [out]; ld.param.u64 %rd2, [in];
  mul.wide.u32 %rd3, %r1, 4; add.s64 %rd1, %rd1, %rd3; add.s64 %rd2, %rd2, %rd3; ld.global.b32 %r2, [%rd2];
"""


def run_one(body: str, values: np.ndarray, dtype: type = np.uint32) -> np.ndarray:
    """`body` computes %r3 from %r2 in each of as many threads as there are values."""
    kernel = Kernel(entry(HEAD + body + "\n  st.global.b32 [%rd1], %r3;", UNARY))
    source, result = Buffer(values), Buffer(np.empty(values.shape, dtype), upload=False)
    kernel((1,), (values.size,), result, source)
    return result.get()


INTS = np.random.default_rng(0).integers(0, 2**32, 96, dtype=np.uint64).astype(np.uint32)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("add.u32 %r3, %r2, 7;", INTS + np.uint32(7)),
        ("sub.s32 %r3, 5, %r2;", np.uint32(5) - INTS),
        ("mul.lo.s32 %r3, %r2, -3;", INTS * np.uint32(2**32 - 3)),
        ("mul.hi.u32 %r3, %r2, %r2;", ((INTS.astype(np.uint64) ** 2) >> 32).astype(np.uint32)),
        ("shr.s32 %r3, %r2, 9;", (INTS.view(np.int32) >> 9).view(np.uint32)),
        ("shl.b32 %r3, %r2, 33;", np.zeros_like(INTS)),
        ("min.s32 %r3, %r2, 12;", np.minimum(INTS.view(np.int32), 12).view(np.uint32)),
        ("div.s32 %r3, %r2, 1000;", np.trunc(INTS.view(np.int32) / 1000).astype(np.int32).view(np.uint32)),
        ("rem.u32 %r3, %r2, 1000;", INTS % 1000),
        ("lop3.b32 %r3, %r2, %r1, 255, 0x96;", INTS ^ np.arange(96, dtype=np.uint32) ^ 255),
        ("bfe.u32 %r3, %r2, 4, 8;", (INTS >> 4) & 255),
        ("popc.b32 %r3, %r2;", np.array([int(v).bit_count() for v in INTS], np.uint32)),
        ("mov.b64 %rd9, {%r2, %r1}; mov.b64 {%r4, %r3}, %rd9;", np.arange(96, dtype=np.uint32)),
        ("cvt.u64.u32 %rd9, %r2; add.s64 %rd9, %rd9, -1; cvt.u32.u64 %r3, %rd9;", INTS - np.uint32(1)),
        ("cvt.u16.u32 %rs1, %r2; cvt.s32.s16 %r3, %rs1;", INTS.astype(np.int16).astype(np.int32).view(np.uint32)),
        ("setp.lt.u32 %p1, %r2, %r1; selp.b32 %r3, 1, 2, %p1;", np.where(np.arange(96) > INTS, 1, 2).astype(np.uint32)),
    ],
)
def test_integers(body: str, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(run_one(body, INTS), expected)


def test_carry_chain_adds_64_bits() -> None:
    body = "mov.b32 %r4, %r1; add.cc.u32 %r5, %r2, %r2; addc.u32 %r3, %r4, %r4;"
    expected = (2 * (INTS.astype(np.uint64) + (np.arange(96, dtype=np.uint64) << 32))) >> 32
    np.testing.assert_array_equal(run_one(body, INTS), expected.astype(np.uint32))


def test_floats() -> None:
    values = np.random.default_rng(1).standard_normal(64).astype(np.float32)
    body = """
  mov.b32 %f1, %r2; fma.rn.f32 %f2, %f1, 0f40490FDB, 0f3F800000; mov.b64 %rd5, {%f1, %f2}; mov.b64 %rd6, {%f2, %f2};
  mul.rn.f32x2 %rd7, %rd5, %rd6; mov.b64 {%f3, %f4}, %rd7; max.f32 %f5, %f3, %f4; mov.b32 %r3, %f5;"""
    second = (values.astype(np.float64) * np.float32(np.pi) + 1).astype(np.float32)
    expected = np.maximum(values * second, second * second)
    np.testing.assert_array_equal(run_one(body, values, np.float32), expected)


def test_packed_conversion_to_bf16() -> None:
    values = np.random.default_rng(2).standard_normal(64).astype(np.float32)
    got = run_one("mov.b32 %f1, %r2; cvt.rn.bf16x2.f32 %r3, %f1, 0f3F800000;", values)
    bits = values.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint32)
    np.testing.assert_array_equal(got, (rounded << 16) | 0x3F80)


def test_loops_diverge_and_come_together() -> None:
    body = """
  mov.u32 %r3, 0; and.b32 %r4, %r1, 7;
$again: setp.eq.s32 %p1, %r4, 0; @%p1 bra $done; add.s32 %r3, %r3, %r4; sub.s32 %r4, %r4, 1; bra $again;
$done: shfl.sync.bfly.b32 %r5, %r3, 1, 31, -1; add.s32 %r3, %r3, %r5;"""
    n = np.arange(64) % 8
    sums = n * (n + 1) // 2
    np.testing.assert_array_equal(run_one(body, np.zeros(64, np.uint32)), sums + sums[np.arange(64) ^ 1])


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("shfl.sync.up.b32 %r3, %r1, 1, 0, -1;", lambda lane: np.maximum(lane - 1, 0)),
        ("shfl.sync.down.b32 %r3, %r1, 4, 0x1807, -1;", lambda lane: np.where(lane % 8 < 4, lane + 4, lane)),
        ("shfl.sync.idx.b32 %r3, %r1, 5, 31, -1;", lambda lane: np.full(32, 5)),
        ("setp.gt.u32 %p1, %r1, 29; vote.sync.ballot.b32 %r3, %p1, -1;", lambda lane: np.full(32, 0xC0000000)),
        ("redux.sync.max.u32 %r3, %r1, -1;", lambda lane: np.full(32, 31)),
        ("shr.u32 %r4, %r1, 3; match.any.sync.b32 %r3, %r4, -1;", lambda lane: 0xFF << (lane // 8 * 8)),
        ("elect.sync %r3|%p1, -1; selp.b32 %r3, 100, %r3, %p1;", lambda lane: np.where(lane == 0, 100, 0)),
    ],
)
def test_lanes_together(body: str, expected: object) -> None:
    got = run_one(body, np.zeros(32, np.uint32))
    np.testing.assert_array_equal(got, expected(np.arange(32, dtype=np.int64)).astype(np.uint32))  # type: ignore[operator]


SHARED_SUM = """
  mov.u32 %r6, tile; mad.lo.s32 %r7, %r1, 4, %r6; st.shared.b32 [%r7], %r2;
  {barrier}
  xor.b32 %r8, %r1, 33; mad.lo.s32 %r8, %r8, 4, %r6; ld.shared.b32 %r3, [%r8];"""


def shared_exchange(barrier: str) -> np.ndarray:
    source = entry(
        HEAD + SHARED_SUM.format(barrier=barrier) + "st.global.b32 [%rd1], %r3;",
        UNARY,
        module=".shared .align 16 .b8 tile[512];",
    )
    kernel, data, result = Kernel(source), Buffer(INTS[:64]), Buffer(INTS[:64], upload=False)
    kernel((1,), (64,), result, data)
    return result.get()


def test_barrier_orders_shared_memory() -> None:
    np.testing.assert_array_equal(shared_exchange("bar.sync 0;"), INTS[:64][np.arange(64) ^ 33])


def test_missing_barrier_is_reported() -> None:
    with pytest.raises(
        DriverError, match=r"shared memory of CTA \(0, 0, 0\) at 0x4[0-9a-f]+ \(tile \+ \d+\)"
    ) as caught:
        shared_exchange("")
    assert caught.value.code == 719
    assert "PTX line" in str(caught.value)


def test_atomics_count_every_thread() -> None:
    source = entry(
        "ld.param.u64 %rd1, [out]; atom.global.add.u32 %r1, [%rd1], 1; red.relaxed.gpu.global.max.s32 [%rd1+4], %r1;"
    )
    result = Buffer(np.zeros(2, np.uint32))
    Kernel(source)((7, 3), (96,), result)
    np.testing.assert_array_equal(result.get(), [7 * 3 * 96, 7 * 3 * 96 - 1])


def test_special_registers() -> None:
    body = """
  mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.x; mov.u32 %r3, %tid.x; mad.lo.s32 %r1, %r1, %r2, %r3; 
  mov.u32 %r4, %nctaid.x; mov.u32 %r5, %laneid; mad.lo.s32 %r5, %r4, 100, %r5; ld.param.u64 %rd1, [out];
  mul.wide.u32 %rd2, %r1, 4; add.s64 %rd1, %rd1, %rd2; st.global.b32 [%rd1], %r5;"""
    result = Buffer(np.zeros(120, np.uint32))
    Kernel(entry(body))((3,), (40,), result)
    np.testing.assert_array_equal(result.get(), 300 + np.tile(np.arange(40) % 32, 3))


@pytest.mark.parametrize(
    ("body", "code", "text"),
    [
        ("mov.u64 %rd1, 64; ld.global.b32 %r1, [%rd1];", 700, "belongs to no allocation"),
        ("ld.param.u64 %rd1, [out]; ld.global.b32 %r1, [%rd1+2];", 716, "not aligned"),
        ("ld.param.u64 %rd1, [out]; ld.global.b32 %r1, [%rd1+16];", 700, "belongs to no allocation"),
        ("ld.param.u64 %rd1, [out]; ld.global.b32 %r1, [%rd1];", 719, "never written"),
        ("mov.u32 %r1, 5000; ld.shared.b32 %r2, [%r1];", 700, "outside of the CTA's 0 bytes"),
        ("bar.sync 16;", 719, "barriers 0 to 15"),
        (
            "mov.u32 %r9, %tid.x; setp.lt.u32 %p1, %r9, 32; @%p1 bra $end; bar.sync 1, 64;\n$end:",
            702,
            "32 of 64 threads arrived",
        ),
        ("$loop: bra $loop;", 702, "no progress"),
        ("trap;", 719, "trapped"),
    ],
)
def test_faults_are_sentences(body: str, code: int, text: str) -> None:
    with pytest.raises(DriverError) as caught:
        Kernel(entry(body))((1,), (64,), Buffer(np.empty(4, np.uint32), upload=False))
    assert caught.value.code == code
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("frobnicate.b32 %r1, %r2;", "does not know this instruction"),
        ("add.b31 %r1, %r2, %r3;", "no type"),
        ("add.s32 %r1, %r2;", "takes 3 operands, not 2"),
        ("add.s32 %rd1, %r2, %r3;", "does not fit the type"),
        ("bra $nowhere;", "no label"),
        ("mov.u32 %r99, 1;", "destination must be a register"),
        ("{ add.s32 %r1, %r1, 1;", "expected"),
        ("add.s32 %r1, %r1, 0xZ;", "no digits"),
    ],
)
def test_bad_ptx_names_the_line(body: str, text: str) -> None:
    with pytest.raises(DriverError, match="PTX line") as caught:
        Kernel(entry(body))
    assert caught.value.code == 218
    assert text in str(caught.value)


def test_launch_limits() -> None:
    kernel, out = Kernel(entry("ret;", block=64)), Buffer(np.zeros(1, np.uint32))
    with pytest.raises(DriverError, match="reqntid"):
        kernel((1,), (32,), out)
    with pytest.raises(DriverError, match="not a multiple of cluster"):
        kernel((3,), (64,), out, cluster=(2, 1, 1))
    emulator.set_options(arch="10.0")
    with pytest.raises(DriverError, match=r"compute capability 10\.0"):
        Kernel(entry("ret;"))
    with pytest.raises(ValueError, match=r"seed is 'x'; a number or a bool"):
        emulator.set_options(seed="x")
    with pytest.raises(ValueError, match=r"arch is '8\.0'"):
        emulator.set_options(arch="8.0")


def test_statistics_count_by_warp_and_loop() -> None:
    body = "mov.u32 %r1, 0;\n$again: add.s32 %r1, %r1, 1;\n setp.lt.s32 %p1, %r1, 10;\n @%p1 bra $again;\n"
    Kernel(entry(body))((2,), (64,), Buffer(np.zeros(1, np.uint32)))
    (launch,) = emulator.statistics()
    assert launch["warp_instructions"] == 2 * 2 * (1 + 30 + 1)
    in_loop = [r for r in launch["regions"] if r["lines"] is not None]
    assert [r["warp"] for r in in_loop] == [0, 1]
    assert in_loop[0]["instructions"] == {"arithmetic": 20, "compare": 20, "branch": 20}


def test_roles_sum_their_warps_by_loop() -> None:
    body = "mov.u32 %r1, 0;\n$again: add.s32 %r1, %r1, 1;\n setp.lt.s32 %p1, %r1, 10;\n @%p1 bra $again;\n bar.sync 0;"
    Kernel(entry(body))((2,), (96,), Buffer(np.zeros(1, np.uint32)))
    (launch,) = emulator.statistics()
    counts = emulator.by_role(launch, {"pair": (0, 1), "last": [2], "none": []})
    (loop,) = [lines for lines in counts["pair"] if lines is not None]
    assert counts["pair"][loop].instructions == {"arithmetic": 40, "compare": 40, "branch": 40}
    assert counts["last"][loop].instructions == {"arithmetic": 20, "compare": 20, "branch": 20}
    assert counts["none"] == {}
    waits = sum(counts[role][None].waits for role in ("pair", "last"))
    assert waits == sum(region["waits"] for region in launch["regions"]) >= 2 * 2


LOADS = "ld.param.u64 %rd1, [out]; ld.param.s32 %rd2, [value]; ld.param.u32 %rd3, [value]; ld.param.u8 %rd4, [value];"


def test_loads_extend_to_wider_registers_and_stores_cut_them() -> None:
    body = (
        LOADS
        + """
  st.global.b64 [%rd1], %rd2; st.global.b64 [%rd1+8], %rd3; st.global.b64 [%rd1+16], %rd4;
  ld.global.s32 %rd5, [%rd1]; ld.global.s16 %rd6, [%rd1]; ld.global.s8 %r5, [%rd1]; cvt.s64.s32 %rd7, %r5;
  st.global.b64 [%rd1+24], %rd5; st.global.b64 [%rd1+32], %rd6; st.global.b64 [%rd1+40], %rd7;
  st.global.b32 [%rd1+48], %rd2; st.global.b16 [%rd1+52], %rd2; st.global.b16 [%rd1+54], %r5;"""
    )
    out = Buffer(np.zeros(7, np.int64))
    Kernel(entry(body, ".param .u64 out, .param .u32 value"))((1,), (1,), out, -3)
    expected = np.array([-3, 2**32 - 3, 253, -3, -3, -3, 0], np.int64)
    expected[-1:].view(np.int32)[0] = -3
    expected[-1:].view(np.int16)[2:] = -3
    np.testing.assert_array_equal(out.get(), expected)


@pytest.mark.parametrize("lanes", ["setp.eq.u32 %p1, %r1, 0;", "setp.lt.u32 %p1, %r1, 32;"])
def test_a_tensor_store_of_a_whole_warp_counts_once(lanes: str) -> None:
    body = f"""
  mov.u32 %r1, %tid.x; mov.u32 %r6, tile; mad.lo.s32 %r7, %r1, 4, %r6; st.shared.b32 [%r7], %r1;
  fence.proxy.async.shared::cta; bar.sync 0; mov.b64 %rd1, map; cvta.param.u64 %rd1, %rd1; mov.u32 %r8, 0; {lanes}
  @%p1 cp.async.bulk.tensor.1d.global.shared::cta.tile.bulk_group [%rd1, {{%r8}}], [%r6];
  cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"""
    out = Buffer(np.zeros(32, np.uint32))
    words = (ctypes.c_uint64 * 16)()
    one, size = (ctypes.c_uint32 * 1)(1), (ctypes.c_uint32 * 1)(32)
    encode = emulator.driver().cuTensorMapEncodeTiled
    extent = (ctypes.c_uint64 * 1)(32)
    check(encode(words, 2, 1, ctypes.c_void_p(out.address), extent, None, size, one, 0, 0, 0, 0))
    source = entry(body, ".param .align 64 .b8 map[128]", module=".shared .align 128 .b8 tile[128];")
    Kernel(source)((1,), (32,), bytes(words))
    np.testing.assert_array_equal(out.get(), np.arange(32))
    (launch,) = emulator.statistics()
    assert launch["bytes"]["tensor_copy_out"] == 128


def test_vector_registers_of_inline_assembly() -> None:
    body = (
        HEAD
        + """
  { .reg .v4 .b32 all; mov.b32 all.x, %r1; mov.b32 all.y, 5; mov.b32 all.z, 6; mov.b32 all.w, 7;
    st.shared.v4.b32 [tile], all; ld.shared.v4.b32 all, [tile]; add.u32 %r3, all.b, all.w; }
  st.global.b32 [%rd1], %r3;"""
    )
    kernel = Kernel(entry(body, UNARY, module=".shared .align 16 .b8 tile[16];"))
    result = Buffer(np.zeros(1, np.uint32))
    kernel((1,), (1,), result, Buffer(INTS[:1]))
    assert result.get()[0] == 13
