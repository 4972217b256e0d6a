"""Kernels through the emulator's driver API, as a program would call it: load PTX, copy arrays, launch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from jax_fa4 import emulator


class DriverError(RuntimeError):
    """A driver call that failed: its code and the emulator's sentence."""

    def __init__(self, code: int):
        super().__init__(f"{code}: {emulator.last_report()}")
        self.code = code


def check(code: int) -> None:
    if code != 0:
        raise DriverError(code)


class Buffer:
    """Device memory that starts as a copy of an array, or uninitialised."""

    def __init__(self, array: np.ndarray, upload: bool = True):
        self.shape, self.dtype, self.nbytes = array.shape, array.dtype, array.nbytes
        self._driver = emulator.driver()
        address = ctypes.c_uint64()
        check(emulator.driver().cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(max(array.nbytes, 1))))
        self.address = address.value
        if upload:
            data = np.ascontiguousarray(array)
            check(
                emulator.driver().cuMemcpyHtoD_v2(
                    address, data.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(data.nbytes)
                )
            )

    def get(self) -> np.ndarray:
        out = np.empty(self.shape, self.dtype)
        check(
            emulator.driver().cuMemcpyDtoH_v2(
                out.ctypes.data_as(ctypes.c_void_p), ctypes.c_uint64(self.address), ctypes.c_size_t(self.nbytes)
            )
        )
        return out

    def __del__(self) -> None:
        if self._driver is not None:
            self._driver.cuMemFree_v2(ctypes.c_uint64(self.address))


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint32 * 16)]


class _Config(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared", ctypes.c_uint32),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint32),
    ]


def _c_value(value: Any) -> Any:
    if isinstance(value, Buffer):
        return ctypes.c_uint64(value.address)
    if isinstance(value, (bytes, bytearray)):
        return ctypes.create_string_buffer(bytes(value), len(value))
    if isinstance(value, (float, np.floating)):
        return ctypes.c_float(float(value))
    if isinstance(value, np.int64 | np.uint64):
        return ctypes.c_uint64(int(value) & (2**64 - 1))
    return ctypes.c_uint32(int(value) & 0xFFFFFFFF)


class Kernel:
    """A kernel of a PTX text: `name`, or the only one."""

    def __init__(self, ptx: str, name: str | None = None):
        self._module = ctypes.c_void_p()
        self._driver = driver = emulator.driver()
        check(driver.cuModuleLoadData(ctypes.byref(self._module), ptx.encode()))
        self._function = ctypes.c_void_p()
        if name is None:
            check(driver.cuLibraryEnumerateKernels(ctypes.byref(self._function), 1, self._module))
        else:
            check(driver.cuModuleGetFunction(ctypes.byref(self._function), self._module, name.encode()))

    def __del__(self) -> None:
        if self._module:
            self._driver.cuModuleUnload(self._module)

    def __call__(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        *params: Any,
        shared: int = 0,
        cluster: Sequence[int] = (1, 1, 1),
        programmatic: bool = False,
    ) -> None:
        driver = emulator.driver()
        if shared > 48 * 1024:
            check(driver.cuFuncSetAttribute(self._function, 8, shared))
        values = [_c_value(p) for p in params]
        pointers = (ctypes.c_void_p * max(1, len(values)))(*[ctypes.addressof(v) for v in values])
        attributes = (_Attribute * 2)(_Attribute(4, 0), _Attribute(6, 0))  # cluster, programmatic stream serialization
        attributes[0].value[:3] = list(cluster)
        attributes[1].value[0] = programmatic
        three = ctypes.c_uint32 * 3
        pad = lambda dims: three(*(list(dims) + [1] * (3 - len(dims))))  # noqa: E731
        config = _Config(pad(grid), pad(block), shared, None, attributes, len(attributes))
        check(driver.cuLaunchKernelEx(ctypes.byref(config), self._function, pointers, None))


def entry(
    body: str, params: str = ".param .u64 out", target: str = "sm_90a", block: int | None = None, module: str = ""
) -> str:
    """A PTX module with one kernel, `body`, which has registers %r, %rd, %f, %fd, %p and %rs."""
    reqntid = f".reqntid {block}, 1, 1" if block else ""
    return f""".version 8.8
.target {target}
.address_size 64
{module}
.visible .entry kernel({params})
{reqntid}
{{
  .reg .pred %p<16>; .reg .b16 %rs<32>; .reg .b32 %r<64>; .reg .f32 %f<64>; .reg .b64 %rd<64>; .reg .f64 %fd<16>;
{body}
  ret;
}}
"""
