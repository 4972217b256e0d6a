"""Two GPUs: what a mesh splits equals one device's result, moves what it must and nothing else, and lies as it came."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import jax_fa4
from tests.kernels import mesh_checks

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def needs_two_gpus_with_kernels() -> None:
    shape = jax.ShapeDtypeStruct((1, 64, 1, 64), jnp.bfloat16)
    if jax_fa4.explain(shape, shape, shape).implementation != "fa4" or len(jax.devices()) < 2:
        pytest.skip("needs two GPUs that have attention kernels")


@pytest.mark.parametrize("case", mesh_checks.JIT_CASES)
def test_under_jit(case: str) -> None:
    mesh_checks.check_under_jit(case, 2, None)


@pytest.mark.parametrize("odd", ["query", "key", "value", "grad_out"])
@pytest.mark.parametrize("case", ["batch", "heads", "sequence"])
def test_operands_that_disagree(case: str, odd: str) -> None:
    mesh_checks.check_under_jit(case, 2, None, odd)


@pytest.mark.parametrize("case", mesh_checks.RING_CASES)
def test_ring(case: str) -> None:
    mesh_checks.check_ring(case, 2, None)
