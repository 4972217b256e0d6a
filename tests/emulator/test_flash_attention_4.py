"""Calibration: the kernels of flash-attn-4, which are known to be right on silicon, against float64 on the emulator.

Skipped where flash-attn-4 and what it needs are not installed. Every run has all checks on, so that the kernels also
show that the checks do not cry wolf.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from tests.emulator.third_party import run_module


def _missing() -> list[str]:
    def found(name: str) -> bool:
        try:
            return importlib.util.find_spec(name) is not None
        except ModuleNotFoundError:
            return False

    return [name for name in ("flash_attn.cute", "torch", "triton", "tvm_ffi", "cutlass") if not found(name)]


pytestmark = [
    pytest.mark.skipif(bool(_missing()), reason=f"needs flash-attn-4; missing: {', '.join(_missing())}"),
    pytest.mark.usefixtures("built_library"),
]

# bf16 outputs: a rounding of P, one of the output. Sums of up to 512 terms of order one for gradients.
TOLERANCE = {"out": 1.0e-2, "lse": 5.0e-5, "grad_query": 1.2e-2, "grad_key": 2.0e-2, "grad_value": 2.5e-2}


@pytest.mark.parametrize(
    "case",
    [
        dict(arch="sm_90a", causal=True, length=300, seed=1),
        dict(arch="sm_100a", causal=True, length=256, seed=2),
        dict(arch="sm_100a", length=512, seed=3),
        pytest.param(dict(arch="sm_90a", length=256, completion="lazy"), marks=pytest.mark.slow),
        pytest.param(dict(arch="sm_100a", length=512, completion="lazy"), marks=pytest.mark.slow),
        pytest.param(dict(arch="sm_100a", length=384, key_length=200, completion="eager"), marks=pytest.mark.slow),
        dict(arch="sm_100a", backward=True, length=256, seed=4),
        pytest.param(dict(arch="sm_90a", backward=True, causal=True, length=384), marks=pytest.mark.slow),
        pytest.param(dict(arch="sm_100a", backward=True, head_dim=64), marks=pytest.mark.slow),
    ],
    ids=lambda case: "-".join(f"{k}={v}" for k, v in case.items()),
)
def test_agrees_with_float64(case: dict[str, Any]) -> None:
    result = run_module("tests.emulator.flash_attention_4", case)
    for name, error in result["errors"].items():
        assert error < TOLERANCE[name], (name, error)
    assert sum(launch["multiply_adds"] for launch in result["launches"]) > 0
