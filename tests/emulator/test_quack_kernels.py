"""Calibration: kernels of quack-kernels, which are known to be right on silicon, against float64 on the emulator.

Skipped where the package and what it needs are not installed. All checks are on, so the kernels also show that the
checks do not cry wolf.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from tests.emulator.third_party import run_module

MISSING = [
    name for name in ("quack", "torch", "triton", "tvm_ffi", "cutlass") if importlib.util.find_spec(name) is None
]
pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"needs quack-kernels; missing: {', '.join(MISSING)}"),
    pytest.mark.usefixtures("built_library"),
]

ROUNDING = {"bfloat16": 2.0**-8, "float32": 2.0**-21}  # of the largest value: a rounding of it, or of some sums


@pytest.mark.parametrize(
    "case",
    [
        dict(kernel="softmax"),
        dict(kernel="softmax", dtype="float32", columns=40000, rows=3, seed=1),
        dict(kernel="rmsnorm", arch="sm_100a"),
        dict(kernel="rmsnorm", columns=20000, rows=2, seed=2),
    ],
    ids=str,
)
def test_rows_agree_with_float64(case: dict[str, Any]) -> None:
    result = run_module("tests.emulator.quack_kernels", case)
    assert result["error"] <= ROUNDING[case.get("dtype", "bfloat16")] * result["largest"]


@pytest.mark.parametrize(
    "case",
    [
        dict(rows=256, columns=192),
        dict(rows=300, columns=256, cluster=(2, 1), seed=1),
        pytest.param(dict(rows=256, columns=512, pingpong=True, seed=2), marks=pytest.mark.slow),
        pytest.param(dict(rows=256, columns=512, dynamic=True, seed=3), marks=pytest.mark.slow),
        dict(arch="sm_100a", rows=256, columns=192, seed=4),
        dict(arch="sm_100a", rows=512, columns=256, tile=(256, 128), cluster=(2, 1), seed=5),
        dict(arch="sm_100a", rows=512, columns=512, dynamic=True, seed=6),
        pytest.param(dict(arch="sm_100a", rows=300, columns=256, completion="lazy", batch=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_products_are_exact(case: dict[str, Any]) -> None:
    result = run_module("tests.emulator.quack_kernels", dict(kernel="gemm") | case)
    assert result["error"] == 0.0
    assert result["largest"] > 100
    assert sum(launch["multiply_adds"] for launch in result["launches"]) > 0
