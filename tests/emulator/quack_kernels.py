"""Runs kernels of quack-kernels, by others, on the emulated GPU: `python -m tests.emulator.quack_kernels '{...}'`.

Prints one JSON line: the largest error of the result against float64, and what the launches counted.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import numpy as np

from tests.emulator.third_party import OnEmulatorCompile, prepare, pretend_cuda

CASE: dict[str, Any] = dict(arch="sm_90a", kernel="softmax", rows=12, columns=1000, depth=256, dtype="bfloat16")
CASE |= dict(tile=(128, 128), cluster=(1, 1), persistent=True, pingpong=False, dynamic=False, batch=1)
CASE |= dict(seed=0, completion="random", threads=1)


def softmax(case: dict[str, Any], x: Any) -> tuple[Any, np.ndarray]:
    import torch
    from quack.cute_dsl_utils import torch2cute_dtype_map
    from quack.softmax import Softmax

    out = torch.full_like(x, float("nan"))
    kind = torch2cute_dtype_map[x.dtype]
    Softmax.compile(kind, kind, x.shape[1])(x, out)
    exact = x.double().numpy()
    powers = np.exp(exact - exact.max(-1, keepdims=True))
    return out, powers / powers.sum(-1, keepdims=True)


def rmsnorm(case: dict[str, Any], x: Any) -> tuple[Any, np.ndarray]:
    import torch
    from quack.cute_dsl_utils import torch2cute_dtype_map
    from quack.rmsnorm import _compile_rmsnorm_fwd

    out, weight = torch.full_like(x, float("nan")), torch.randn(x.shape[1])
    kind, weight_kind = torch2cute_dtype_map[x.dtype], torch2cute_dtype_map[weight.dtype]
    compiled = _compile_rmsnorm_fwd(kind, kind, None, weight_kind, None, None, x.shape[1], False, False, False, False)
    compiled(x, weight, None, None, out, None, None, None, 1e-6)
    exact = x.double().numpy()
    return out, exact / np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-6) * weight.double().numpy()


def gemm(case: dict[str, Any], x: Any) -> tuple[Any, np.ndarray]:
    """Small integers, whose products any order of addition gives exactly."""
    import torch
    from quack.gemm import gemm as run_gemm

    from jax_fa4 import emulator

    batch, rows, columns, depth = case["batch"], case["rows"], case["columns"], case["depth"]
    draw = lambda n: torch.randint(-2, 3, (batch, n, depth)).to(x.dtype)  # noqa: E731
    a, b = draw(rows), draw(columns)
    out = torch.full((batch, rows, columns), float("nan"), dtype=torch.float32)
    semaphore = None
    if case["dynamic"] and case["arch"] == "sm_90a":
        semaphore = torch.zeros(1, dtype=torch.int32)
        emulator.add_memory(semaphore.data_ptr(), semaphore.nbytes)  # the launcher takes its address alone
    run_gemm(
        a,
        b,
        out,
        None,
        semaphore,
        *case["tile"],
        *case["cluster"],
        persistent=case["persistent"],
        pingpong=case["pingpong"],
        is_dynamic_persistent=case["dynamic"],
    )
    return out, np.einsum("lmk,lnk->lmn", a.double().numpy(), b.double().numpy())


KERNELS = {"softmax": softmax, "rmsnorm": rmsnorm, "gemm": gemm}


def main() -> None:
    """Runs the case of the command line."""
    case = CASE | json.loads(sys.argv[1])
    prepare(case["arch"])
    pretend_cuda(case["arch"])
    import cutlass.cute as cute
    import torch

    from jax_fa4 import emulator

    cute.compile = OnEmulatorCompile(cute.compile)
    emulator.set_options(seed=case["seed"], completion=case["completion"], threads=case["threads"])
    torch.manual_seed(0)
    x = torch.randn(case["rows"], case["columns"]).to(getattr(torch, case["dtype"]))
    out, expected = KERNELS[case["kernel"]](case, x)
    error = float(np.abs(out.double().numpy() - expected).max())
    launches = [{k: v for k, v in launch.items() if k != "regions"} for launch in emulator.statistics()]
    print(json.dumps({"error": error, "largest": float(np.abs(expected).max()), "launches": launches}), flush=True)
    os._exit(0)  # the launchers' libraries are unloaded in no good order at exit


if __name__ == "__main__":
    main()
