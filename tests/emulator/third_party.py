"""Lets programs of others that nvidia-cutlass-dsl compiles run on the emulated GPU, their own host code included.

For processes of their own: nvidia-cutlass-dsl reads its environment when it is imported. Tensors are torch's on the
CPU that claim to be on a GPU.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import types
import warnings
from pathlib import Path
from typing import Any

SM_COUNT = {"sm_90a": 132, "sm_100a": 148}
CAPABILITY = {"sm_90a": (9, 0), "sm_100a": (10, 0)}


ROOT = Path(__file__).resolve().parents[2]


def run_module(module: str, case: dict[str, Any]) -> dict[str, Any]:
    """What a module of this folder prints last, a JSON line, for a case."""
    command = [sys.executable, "-m", module, json.dumps(case)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment, cwd=ROOT)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def without_jax() -> None:
    """Lets `jax_fa4.emulator` be imported where JAX is not installed: the package around it is then only a folder."""
    if importlib.util.find_spec("jax") is None:
        package = types.ModuleType("jax_fa4")
        package.__path__ = [str(ROOT / "jax_fa4")]
        sys.modules["jax_fa4"] = package


def prepare(arch: str) -> None:
    """Sets what the compiler reads at import."""
    without_jax()
    from jax_fa4 import emulator

    os.environ["CUTE_DSL_ARCH"] = os.environ["FLASH_ATTENTION_ARCH"] = arch
    os.environ["QUACK_ARCH"] = arch.removesuffix("a")
    os.environ["QUACK_CACHE_ENABLED"] = "0"  # what comes from that cache has no PTX
    os.environ["FLASH_ATTENTION_NUM_SMS"] = str(SM_COUNT[arch])
    os.environ["CUTE_DSL_KEEP_PTX"] = os.environ["CUTE_DSL_KEEP_CUBIN"] = "1"
    os.environ["CUTE_DSL_DUMP_DIR"] = tempfile.mkdtemp(prefix="jax_fa4_dump_")
    os.environ["CUTE_DSL_LIBS"] = str(emulator.library_path())
    emulator.set_options(arch="9.0" if arch == "sm_90a" else "10.0", sm_count=SM_COUNT[arch])
    warnings.filterwarnings("ignore")


def pretend_cuda(arch: str) -> None:
    """Lets torch and the compiler believe in a GPU."""
    import cutlass.utils
    import torch

    class Properties:
        multi_processor_count = SM_COUNT[arch]
        major, minor = CAPABILITY[arch]

    class Stream:
        cuda_stream = 0

    class Hardware:
        def __init__(self, *args: object): ...
        def get_device_multiprocessor_count(self) -> int:
            return SM_COUNT[arch]

        def get_max_active_clusters(self, cluster_size: int, *args: object) -> int:
            return SM_COUNT[arch] // cluster_size

        def get_l2_cache_size_in_bytes(self) -> int:
            return 50 << 20

    torch.cuda.get_device_capability = lambda *a, **k: CAPABILITY[arch]  # type: ignore[assignment]
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_properties = lambda *a, **k: Properties()  # type: ignore[assignment]
    torch.cuda.is_available = lambda: False
    torch.cuda.current_stream = lambda *a, **k: Stream()  # type: ignore[assignment]
    torch.Tensor.is_cuda = property(lambda self: True)  # type: ignore[assignment]
    cutlass.utils.HardwareInfo = Hardware


def as_cuda(tensor: Any) -> Any:
    """A tvm_ffi tensor over the same memory that says it is on device cuda:0."""
    import ctypes

    import torch.utils.dlpack
    import tvm_ffi

    class Head(ctypes.Structure):  # the start of a DLManagedTensor
        _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32)]

    capsule = torch.utils.dlpack.to_dlpack(tensor)
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    ctypes.cast(get(capsule, b"dltensor"), ctypes.POINTER(Head)).contents.device_type = 2  # kDLCUDA
    return tvm_ffi.from_dlpack(capsule)


class OnEmulator:
    """A compiled function: its PTX is known to the emulator, its tensors are memory that kernels may touch."""

    def __init__(self, function: Any):
        from jax_fa4 import emulator

        self._function = function
        emulator.register_ptx(function.__cubin__, function.__ptx__)

    def _convert(self, value: Any, seen: list[Any]) -> Any:
        import torch

        if isinstance(value, torch.Tensor):
            seen.append(value)
            return as_cuda(value)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*[self._convert(v, seen) for v in value])
        if isinstance(value, (list, tuple)):
            return type(value)(self._convert(v, seen) for v in value)
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from jax_fa4 import emulator

        seen: list[Any] = []
        args = tuple(self._convert(a, seen) for a in args)
        kwargs = {k: self._convert(v, seen) for k, v in kwargs.items()}
        ranges = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in seen}
        for address, size in ranges.items():
            emulator.add_memory(address, size)
        emulator.last_report(clear=True)
        try:
            result = self._function(*args, **kwargs)
        finally:
            for address in ranges:
                emulator.remove_memory(address)
        if report := emulator.last_report(clear=True):
            raise RuntimeError(report)
        return result


class OnEmulatorCompile:
    """Stands for `cute.compile`: what it compiles runs on the emulator."""

    def __init__(self, compile_function: Any):
        self._compile = compile_function

    def __call__(self, *args: Any, **kwargs: Any) -> OnEmulator:
        return OnEmulator(self._compile(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compile, name)
