"""What a caller or a kernel may do wrong: an error code and one sentence, never a crash."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from jax_fa4 import emulator
from tests.emulator.device import Buffer, DriverError, Kernel, check, entry

pytestmark = pytest.mark.usefixtures("gpu")


def is_one_sentence(text: str) -> bool:
    return bool(text) and "\n" not in text and len(text) < 500


def tensor_map(buffer: Buffer, elements: int = 32) -> bytes:
    """A 1D map of 32-bit words."""
    words = (ctypes.c_uint64 * 16)()
    size = ctypes.c_uint32(elements)
    encode = emulator.driver().cuTensorMapEncodeTiled
    extent, one = ctypes.c_uint64(elements), ctypes.c_uint32(1)
    address = ctypes.c_void_p(buffer.address)
    check(encode(words, 2, 1, address, ctypes.byref(extent), None, ctypes.byref(size), ctypes.byref(one), 0, 0, 0, 0))
    return bytes(words)


def launch_with_block(kernel: Kernel, block: bytes, grid: tuple[int, int, int] = (1, 1, 1)) -> int:
    """Launches with a parameter block, which callers may give instead of a pointer to each parameter."""
    size = ctypes.c_size_t(len(block))
    data = ctypes.create_string_buffer(block, max(1, len(block)))
    extra = (ctypes.c_void_p * 5)(1, ctypes.addressof(data), 2, ctypes.addressof(size), None)
    code: int = emulator.driver().cuLaunchKernel(kernel._function, *grid, 32, 1, 1, 0, None, None, extra)
    return code


@pytest.mark.parametrize("size", [0, 4, 12, 16, 4096])
def test_a_parameter_block_of_another_size(size: int) -> None:
    kernel = Kernel(entry("", ".param .u64 out, .param .u16 small"))
    assert launch_with_block(kernel, bytes(size)) == 1
    assert f"the parameter block has {size} bytes" in emulator.last_report()
    assert is_one_sentence(emulator.last_report())
    assert launch_with_block(kernel, bytes(10)) == 0


def test_missing_parameters_and_handles() -> None:
    kernel, driver = Kernel(entry("")), emulator.driver()
    assert driver.cuLaunchKernel(kernel._function, 1, 1, 1, 32, 1, 1, 0, None, None, None) == 1
    assert "parameter 0 of 1 is missing" in emulator.last_report()
    for handle in (None, ctypes.c_void_p(1), ctypes.c_void_p(id(kernel))):
        assert driver.cuLaunchKernel(handle, 1, 1, 1, 32, 1, 1, 0, None, None, None) == 400
        assert is_one_sentence(emulator.last_report())


def launch(out: Buffer, grid: Sequence[int] = (1,), block: Sequence[int] = (32,), **options: Any) -> None:
    Kernel(entry(""))(grid, block, out, **options)


@pytest.mark.parametrize(
    ("shape", "code", "text"),
    [
        (dict(grid=(0,)), 1, "must be positive"),
        (dict(grid=(1, 65536)), 1, "exceeds (2147483647, 65535, 65535)"),
        (dict(grid=(2**32 - 1,)), 1, "exceeds (2147483647, 65535, 65535)"),
        (dict(block=(1025,)), 1, "exceeds 1024 threads"),
        (dict(block=(1, 1, 65)), 1, "exceeds 1024 threads"),
        (dict(block=(2**16, 2**16)), 1, "exceeds 1024 threads"),
        (dict(shared=232449), 1, "exceed 232448"),
        (dict(shared=2**32 - 1), 1, "exceed 232448"),
        (dict(grid=(9,), cluster=(9, 1, 1)), 912, "a cluster of 9 CTAs exceeds 8"),
        (dict(grid=(3,), cluster=(2, 1, 1)), 912, "not a multiple of cluster"),
        (dict(grid=(2**31 - 1,), cluster=(2**31 - 1, 1, 1)), 912, "a cluster of 2147483647 CTAs"),
    ],
    ids=str,
)
def test_launches_beyond_the_limits(shape: dict[str, Any], code: int, text: str) -> None:
    out = Buffer(np.zeros(1, np.uint32))
    with pytest.raises(DriverError) as caught:
        launch(out, **shape)
    assert caught.value.code == code
    assert text in str(caught.value)
    assert is_one_sentence(str(caught.value))


def test_more_dynamic_shared_memory_than_the_kernel_was_given() -> None:
    kernel, out = Kernel(entry("")), Buffer(np.zeros(1, np.uint32))
    parameters = (ctypes.c_void_p * 1)(ctypes.addressof(ctypes.c_uint64(out.address)))
    code = emulator.driver().cuLaunchKernel(kernel._function, 1, 1, 1, 32, 1, 1, 50000, None, parameters, None)
    assert code == 1
    assert "MAX_DYNAMIC_SHARED_SIZE" in emulator.last_report()


TENSOR_COPY = """
  mov.u32 %r1, %tid.x; mov.u32 %r6, tile; mad.lo.s32 %r7, %r1, 4, %r6; st.shared.b32 [%r7], %r1;
  st.shared.b32 [%r7+128], %r1; fence.proxy.async.shared::cta; bar.sync 0; mov.b64 %rd1, map;
  cvta.param.u64 %rd1, %rd1; mov.u32 %r8, 0; setp.ne.u32 %p1, %r1, 0; @%p1 bra $end;
  COPY
  cp.async.bulk.commit_group; WAIT
$end:"""
COPY = "cp.async.bulk.tensor.1d.global.shared::cta.tile.bulk_group [%rd1, {%r8}], [%r6];"
BULK = "ld.param.b64 %rd2, [map]; mov.u32 %r9, 16; cp.async.bulk.global.shared::cta.bulk_group [%rd2], [%r6], %r9;"
TILE = ".shared .align 128 .b8 tile[512];"


def copy_kernel(copy: str, wait: str = "cp.async.bulk.wait_group 0;") -> Kernel:
    return Kernel(
        entry(TENSOR_COPY.replace("COPY", copy).replace("WAIT", wait), ".param .align 64 .b8 map[128]", module=TILE)
    )


@pytest.mark.parametrize(
    ("copy", "code", "text"),
    [
        (COPY.replace("[%r6]", "[%r6+64]"), 716, "not a multiple of 128 bytes"),
        (COPY.replace("[%r6]", "[%r6+4]"), 716, "not a multiple of 128 bytes"),
        (COPY.replace("[%r6]", "[%r6+500000]"), 700, "outside of the CTA's"),
        (COPY.replace("%rd1,", "%rd1+8,"), 716, "is not aligned"),
        ("add.s64 %rd1, %rd1, 64; " + COPY, 700, "a load"),
        (COPY.replace("1d", "2d").replace("{%r8}", "{%r8, %r8}"), 716, "2D and its tensor map has rank 1"),
        (BULK.replace("16", "20"), 716, "multiples of 16"),
        (BULK.replace("[%rd2]", "[%rd2+8]"), 716, "multiples of 16"),
        (BULK.replace("[%r6]", "[%r6+4]"), 716, "multiples of 16"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_misaligned_and_misplaced_copies(copy: str, code: int, text: str) -> None:
    out = Buffer(np.zeros(32, np.uint32))
    with pytest.raises(DriverError) as caught:
        copy_kernel(copy)((1,), (32,), tensor_map(out))
    assert caught.value.code == code, str(caught.value)
    assert text in str(caught.value)
    assert is_one_sentence(str(caught.value))


@pytest.mark.parametrize("seed", range(8))
def test_garbage_is_no_tensor_map(seed: int) -> None:
    garbage = np.random.default_rng(seed).integers(0, 256, 128, dtype=np.uint8).tobytes()
    with pytest.raises(DriverError) as caught:
        copy_kernel(COPY)((1,), (32,), garbage)
    assert caught.value.code in (700, 716, 719)
    assert is_one_sentence(str(caught.value))


def test_a_copy_that_reads_shared_memory_when_its_cta_exits() -> None:
    out = Buffer(np.zeros(32, np.uint32))
    kernel = copy_kernel(COPY, wait="")
    with pytest.raises(DriverError, match="its CTA exits without"):
        kernel((1,), (32,), tensor_map(out))
    copy_kernel(COPY, wait="cp.async.bulk.wait_group.read 0;")((1,), (32,), tensor_map(out))
    emulator.set_options(check_exit_reads=False)
    for seed in range(5):
        emulator.set_options(seed=seed, completion="random")
        out = Buffer(np.zeros(32, np.uint32))
        kernel((1,), (32,), tensor_map(out))
        np.testing.assert_array_equal(out.get(), np.arange(32))
