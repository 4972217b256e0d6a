"""The kernels on emulated GPUs, split over a mesh: the cases that tests/kernels/test_mesh_gpu.py runs on two GPUs."""

from __future__ import annotations

import jax
import pytest
from jax.sharding import PartitionSpec as P

from tests.kernels import mesh_checks

pytestmark = [
    pytest.mark.usefixtures("hopper"),
    pytest.mark.skipif(len(jax.devices()) < 2, reason="needs the CPU devices of conftest.py"),
]
IN_SHORT = ("heads", "fewer_kv_heads_than_devices", "sequence")


@pytest.mark.parametrize(
    "case", [case if case in IN_SHORT else pytest.param(case, marks=pytest.mark.slow) for case in mesh_checks.JIT_CASES]
)
def test_under_jit(case: str) -> None:
    mesh_checks.check_under_jit(case, 2, "emulated")


@pytest.mark.parametrize(
    ("case", "odd", "elsewhere"),
    [
        ("heads", "key", mesh_checks.SEQUENCE),
        *(
            pytest.param(case, odd, elsewhere, marks=pytest.mark.slow)
            for case, odd, elsewhere in (
                ("heads", "value", mesh_checks.WHOLE),
                ("heads", "grad_out", mesh_checks.SEQUENCE),
                ("batch", "value", mesh_checks.HEADS),
                ("batch", "grad_out", mesh_checks.WHOLE),
                ("sequence", "query", mesh_checks.WHOLE),
            )
        ),
    ],
    ids=str,
)
def test_operands_that_disagree(case: str, odd: str, elsewhere: P) -> None:
    mesh_checks.check_under_jit(case, 2, "emulated", odd, elsewhere)


@pytest.mark.parametrize(
    "case",
    [
        case if case == "causal_zigzag" else pytest.param(case, marks=pytest.mark.slow)
        for case in mesh_checks.RING_CASES
    ],
)
def test_ring(case: str) -> None:
    mesh_checks.check_ring(case, 2, "emulated")
