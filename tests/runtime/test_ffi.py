"""Kernels inside jit on JAX's CPU platform, through the stub driver; the preprocess wrapper's shapes and refusals."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fa4.ffi import launch
from jax_fa4.ffi.preprocess import padded_length, preprocess, preprocess_formula
from jax_fa4.kernels import bundle
from jax_fa4.kernels.plan import Extent, KernelPlan

from .conftest import Stub
from .kernels_for_tests import fill_plan, stub_binary


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> KernelPlan:
    made = fill_plan()
    monkeypatch.setattr(bundle, "find", stub_binary)
    return made


def fill(plan: KernelPlan, count: int, value: float, driver: str = "stub") -> jax.Array:
    shape = jax.ShapeDtypeStruct((count,), jnp.float32)
    return launch.launch(plan, {}, {"filled": shape}, {"count": count}, {"value": value}, driver=driver)["filled"]


def test_kernel_inside_jit(stub: Stub, plan: KernelPlan) -> None:
    function = jax.jit(lambda x: fill(plan, 300, 2.5) + x)
    for call in range(10):
        np.testing.assert_array_equal(function(jnp.float32(call)), np.full(300, 2.5 + call, np.float32))
    assert stub.count("cuLibraryLoadData") == 1
    assert stub.count("cuLaunchKernelEx") == 10
    assert "grid=3,1,1" in stub.launches()[0]


def test_program_is_the_same_in_every_process(stub: Stub, plan: KernelPlan) -> None:
    text = jax.jit(lambda: fill(plan, 4, 1.0)).lower().as_text()
    assert stub_binary(plan).content_hash in text
    assert not re.search(r"0x[0-9a-f]{6,}", text), "an address in the program would defeat the compilation cache"


def test_failing_launch_reaches_the_caller(stub: Stub, plan: KernelPlan) -> None:
    function = jax.jit(lambda: fill(plan, 4, 1.0))
    stub.fail("cuLaunchKernelEx", 719)
    with pytest.raises(Exception, match=f"{plan.key}.*CUDA_ERROR_LAUNCH_FAILED"):
        jax.block_until_ready(function())
    stub.fail("cuStreamSynchronize", 719)
    with pytest.raises(Exception, match=f"{plan.key}' failed on device 0 .*CUDA_ERROR_LAUNCH_FAILED"):
        jax.block_until_ready(function())
    np.testing.assert_array_equal(function(), np.ones(4, np.float32))


def test_unregistered_kernel_is_an_error_with_the_remedy(stub: Stub) -> None:
    launch.native()
    call = jax.ffi.ffi_call(launch.TARGET, jax.ShapeDtypeStruct((4,), jnp.float32))
    unknown = {"kernel": "feedbeef", "integers": np.zeros(4, np.int64), "floats": np.zeros(1, np.float32)}
    with pytest.raises(Exception, match=r"content hash 'feedbeef'.*jax_fa4 carries none"):
        jax.block_until_ready(jax.jit(lambda: call(driver="stub", **unknown))())


def test_an_older_jaxlib_is_told_before_anything_is_registered(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured, JAX 0.8.0 with a build against 0.10: the refusal comes when a backend starts, and JAX has none then."""
    assert launch.native().ffi_api_version <= launch._offered_api_version()
    monkeypatch.setattr(launch, "_offered_api_version", lambda: (0, 1))
    with pytest.raises(ImportError, match=r"built for XLA's FFI 0\.\d+, and the installed jaxlib offers 0\.1"):
        launch.native.__wrapped__()


def test_grid_beyond_the_device_is_refused(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "find", stub_binary)
    plan = fill_plan(grid=(Extent(), Extent((("count", 1),)), Extent()))
    with pytest.raises(launch.LaunchError, match=r"grid extent y = count is 70000 .*at most 65535"):
        jax.eval_shape(lambda: fill(plan, 70000, 1.0))


def operands(batch: tuple[int, ...] = (2,), length: int = 133, dtype: str = "bfloat16") -> tuple[jax.Array, ...]:
    rows = jnp.ones((*batch, length, 3, 64), dtype)
    return rows, rows, jnp.ones((*batch, length, 3)), jnp.ones((*batch, length, 3))


@pytest.mark.parametrize("architecture", ["sm_90a", "sm_100f"])
def test_preprocess_passes_what_its_ptx_declares(stub: Stub, architecture: str) -> None:
    stub.reset(*((9, 0) if architecture == "sm_90a" else (10, 3)))

    def call(*operands: jax.Array) -> object:
        return preprocess(*operands, accumulator_width=64, architecture=architecture, driver="stub-ptx")

    results = jax.jit(call)(*operands())
    expected = jax.eval_shape(lambda *one: preprocess_formula(*one, accumulator_width=64), *operands())
    assert jax.tree.map(lambda one: (one.shape, one.dtype), results) == jax.tree.map(
        lambda one: (one.shape, one.dtype), expected
    )
    (line,) = stub.launches()
    assert "grid=6,4,1 block=256" in line
    assert line.split()[-3:] == [number.to_bytes(4, "little").hex() for number in (3, 133, 256)]


def test_preprocess_folds_vmap_into_the_batch(stub: Stub) -> None:
    def call(*operands: jax.Array) -> object:
        return preprocess(*operands, accumulator_width=64, architecture="sm_90a", driver="stub-ptx")

    out, grad_out, lse, grad_lse = operands((5, 2))
    results = jax.jit(jax.vmap(call, in_axes=(0, 0, None, 0)))(out, grad_out, lse[0], grad_lse)
    assert results.delta.shape == (5, 2, 3, 256)
    assert results.accumulator.shape == (5, 2, 3, 256, 64)
    (line,) = stub.launches()
    assert "grid=30,4,1" in line


@pytest.mark.parametrize(
    ("position", "wrong", "message"),
    [
        (0, jnp.ones((2, 0, 3, 64), "bfloat16"), r"out has shape \(2, 0, 3, 64\)"),
        (1, jnp.ones((2, 133, 3, 64), "float16"), "grad_out is float16"),
        (2, jnp.ones((2, 3, 133)), r"lse is float32\(2, 3, 133\); it takes float32\(2, 133, 3\)"),
        (3, jnp.ones((2, 133, 3), "bfloat16"), "grad_lse is bfloat16"),
    ],
)
def test_preprocess_refuses(position: int, wrong: jax.Array, message: str) -> None:
    given = list(operands())
    given[position] = wrong
    with pytest.raises(launch.LaunchError, match=message):
        preprocess(*given, accumulator_width=64, architecture="sm_90a")


def test_preprocess_without_a_gpu_names_the_remedy() -> None:
    if launch.device_architecture() is not None:
        pytest.skip("the default device has a kernel")
    with pytest.raises(launch.LaunchError, match="implementation='blockwise'"):
        preprocess(*operands(), accumulator_width=64)


def test_padded_length() -> None:
    assert [padded_length(length) for length in (1, 128, 129)] == [128, 128, 256]
