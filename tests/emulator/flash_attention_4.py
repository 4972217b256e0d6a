"""Runs flash-attn-4, a package of others, on the emulated GPU: `python -m tests.emulator.flash_attention_4 '{...}'`.

A process of its own, because nvidia-cutlass-dsl reads its environment when it is imported. Prints one JSON line: the
largest errors of the outputs against float64, and what the launches counted. The package's own host code runs, with CPU
tensors that claim to be on a GPU.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
import types
import warnings
from pathlib import Path
from typing import Any

import numpy as np

CASE: dict[str, Any] = dict(
    arch="sm_90a", causal=False, length=256, key_length=None, heads=2, kv_heads=1, batch=1, head_dim=128
)
CASE |= dict(backward=False, deterministic=False, seed=0, completion="random", threads=1)
SM_COUNT = {"sm_90a": 132, "sm_100a": 148}
CAPABILITY = {"sm_90a": (9, 0), "sm_100a": (10, 0)}


def without_jax() -> None:
    """Lets `jax_fa4.emulator` be imported where JAX is not installed: the package around it is then only a folder."""
    if importlib.util.find_spec("jax") is None:
        package = types.ModuleType("jax_fa4")
        package.__path__ = [str(Path(__file__).resolve().parents[2] / "jax_fa4")]
        sys.modules["jax_fa4"] = package


def prepare(arch: str) -> None:
    """Sets what the compiler reads at import."""
    without_jax()
    from jax_fa4 import emulator

    os.environ["CUTE_DSL_ARCH"] = os.environ["FLASH_ATTENTION_ARCH"] = arch
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

        def get_max_active_clusters(self, size: int, *args: object) -> int:
            return SM_COUNT[arch] // size

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


def redirect_compilation() -> Any:
    """The package's interface module, whose compiled functions run on the emulator."""
    import cutlass.cute as cute
    import flash_attn.cute.cute_dsl_utils as dsl_utils
    import flash_attn.cute.interface as interface
    import flash_attn.cute.utils as utils

    from_dlpack, compile_function = dsl_utils.from_dlpack, cute.compile
    dsl_utils.from_dlpack = lambda tensor, **kwargs: from_dlpack(as_cuda(tensor), **kwargs)
    utils.from_dlpack = dsl_utils.from_dlpack

    class Compile:
        def __call__(self, *args: Any, **kwargs: Any) -> OnEmulator:
            return OnEmulator(compile_function(*args, **kwargs))

        def __getattr__(self, name: str) -> Any:
            return getattr(compile_function, name)

    interface.cute.compile = Compile()
    return interface


def reference(query: Any, key: Any, value: Any, causal: bool, grad_out: Any) -> dict[str, np.ndarray]:
    """Attention and its gradients in float64; arrays (batch, length, heads, dim); causal at the bottom right."""
    q, k, v, do = (t.double().numpy() for t in (query, key, value, grad_out))
    group, scale = q.shape[2] // k.shape[2], q.shape[3] ** -0.5
    keys, values = np.repeat(k, group, axis=2), np.repeat(v, group, axis=2)
    scores = np.einsum("bqhd,bkhd->bhqk", q, keys) * scale
    if causal:
        hidden = np.arange(k.shape[1])[None] > np.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
        scores = np.where(hidden, -np.inf, scores)
    top = scores.max(-1, keepdims=True)
    probs = np.exp(scores - top)
    total = probs.sum(-1, keepdims=True)
    probs = probs / total
    out = np.einsum("bhqk,bkhd->bqhd", probs, values)
    grad_probs = np.einsum("bqhd,bkhd->bhqk", do, values)
    grad_scores = probs * (grad_probs - np.einsum("bqhd,bqhd->bhq", do, out)[..., None])
    split = lambda x: x.reshape(*x.shape[:2], k.shape[2], group, -1).sum(3)  # noqa: E731
    return {
        "out": out,
        "lse": (top + np.log(total))[..., 0],
        "grad_query": np.einsum("bhqk,bkhd->bqhd", grad_scores, keys) * scale,
        "grad_key": split(np.einsum("bhqk,bqhd->bkhd", grad_scores, q) * scale),
        "grad_value": split(np.einsum("bhqk,bqhd->bkhd", probs, do)),
    }


def run(case: dict[str, Any]) -> dict[str, Any]:
    """Errors by output, and the counts of the launches."""
    import torch

    from jax_fa4 import emulator

    interface = redirect_compilation()
    emulator.set_options(seed=case["seed"], completion=case["completion"], threads=case["threads"])
    torch.manual_seed(0)
    b, s, sk = case["batch"], case["length"], case["key_length"] or case["length"]
    make = lambda length, heads: torch.randn(b, length, heads, case["head_dim"]).to(torch.bfloat16)  # noqa: E731
    query, key, value = make(s, case["heads"]), make(sk, case["kv_heads"]), make(sk, case["kv_heads"])
    grad_out = make(s, case["heads"])
    expected = reference(query, key, value, case["causal"], grad_out)
    if case["backward"]:
        out = torch.tensor(expected["out"]).to(torch.bfloat16)
        lse = torch.tensor(expected["lse"]).float()
        grads = interface._flash_attn_bwd(
            query, key, value, out, grad_out, lse, causal=case["causal"], deterministic=case["deterministic"]
        )
        got = dict(zip(("grad_query", "grad_key", "grad_value"), grads[:3], strict=True))
    else:
        out = torch.full(query.shape, float("nan"), dtype=torch.bfloat16)
        lse = torch.full((b, case["heads"], s), float("nan"))
        interface._flash_attn_fwd(query, key, value, causal=case["causal"], out=out, lse=lse, return_lse=True)
        got = {"out": out, "lse": lse}
    errors = {name: float(np.abs(t.double().numpy() - expected[name]).max()) for name, t in got.items()}
    launches = [{k: v for k, v in launch.items() if k != "regions"} for launch in emulator.statistics()]
    return {"errors": errors, "launches": launches}


def main() -> None:
    """Runs the case of the command line."""
    case = CASE | json.loads(sys.argv[1])
    prepare(case["arch"])
    pretend_cuda(case["arch"])
    print(json.dumps(run(case)), flush=True)
    # The launchers' libraries are unloaded in no good order at exit.
    os._exit(0)


if __name__ == "__main__":
    main()
