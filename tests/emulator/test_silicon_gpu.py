"""Calibration against silicon: our Hopper kernels on the GPU and on the emulator, on the same inputs.

Bit for bit where every operation is exact; elsewhere the outputs differ by the hardware's approximations of 2^x and
1/x and by the order and width of the tensor cores' sums, which may move a result by a rounding. Run with -rP to see
how many outputs are equal.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fa4 import arguments, emulator
from jax_fa4.ffi import launch
from jax_fa4.ffi.hopper_backward import hopper_backward
from jax_fa4.ffi.hopper_forward import hopper_forward
from jax_fa4.ffi.preprocess import preprocess

pytestmark = pytest.mark.gpu


UNIT = {"bfloat16": 2.0**-7, "float16": 2.0**-10}  # distance of neighbours, of the power of two below a value


@pytest.fixture(autouse=True)
def checked_emulator(hopper_gpu: None, built_library: None) -> None:
    emulator.set_options(threads=0, completion="random", seed=0, check_races=True)


def on_both(function: Any, *arrays: Any) -> tuple[Any, Any]:
    """`function(driver, *arrays)` on the GPU and on the emulator; results as NumPy arrays."""

    def run(device: jax.Device, driver: str) -> Any:
        with jax.default_device(device):
            moved = jax.tree.map(lambda one: jax.device_put(np.asarray(one), device), arrays)
            return jax.tree.map(np.asarray, jax.jit(lambda *given: function(driver, *given))(*moved))

    return run(jax.devices()[0], launch.CUDA_DRIVER), run(jax.devices("cpu")[0], launch.emulated_driver((9, 0)))


def compare(name: str, gpu: np.ndarray, emulated: np.ndarray) -> float:
    """Prints how the results differ; the share of equal ones."""
    gpu, emulated = (np.asarray(one, np.float64) for one in (gpu, emulated))
    np.testing.assert_array_equal(np.isfinite(gpu), np.isfinite(emulated))
    equal = float(np.mean((gpu == emulated) | (np.isnan(gpu) & np.isnan(emulated))))
    both = np.isfinite(gpu)
    largest = float(np.abs(gpu[both] - emulated[both]).max(initial=0))
    of = np.abs(gpu[both]).max(initial=0)
    print(f"{name}: {100 * equal:.4f}% of {gpu.size} equal, largest difference {largest:.3g} of {of:.3g}")
    return equal


def draw(seed: int, length: int, key_length: int, heads: int, kv_heads: int, head_dim: int, dtype: str) -> Any:
    rng = np.random.default_rng(seed)
    shapes = [(2, length, heads, head_dim)] + [(2, key_length, kv_heads, head_dim)] * 2
    return tuple(jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_preprocess_is_equal_bit_for_bit(dtype: str, head_dim: int) -> None:
    rng = np.random.default_rng(head_dim)
    out, grad_out = (jnp.asarray(rng.standard_normal((2, 333, 3, head_dim)), dtype) for _ in range(2))
    lse, grad_lse = (jnp.asarray(rng.standard_normal((2, 333, 3)), jnp.float32) for _ in range(2))
    lse = lse.at[0, 5].set(-jnp.inf)

    def run(driver: str, *arrays: jax.Array) -> Any:
        return preprocess(*arrays, accumulator_width=head_dim, architecture="sm_90a", driver=driver)

    gpu, emulated = on_both(run, out, grad_out, lse, grad_lse)
    for name, mine, theirs in zip(gpu._fields, gpu, emulated, strict=True):
        assert compare(name, mine, theirs) == 1.0


def forward(call: arguments.Call) -> tuple[Any, Any]:
    return on_both(lambda driver, operands: hopper_forward(call.problem, operands, driver=driver), call.operands)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_exact_attention_is_equal_bit_for_bit(dtype: str, head_dim: int) -> None:
    """Scores of zero: weights of 2^-9 each, sums of small integers. And scores so far apart that one key is taken."""
    rng = np.random.default_rng(3)
    key, value = (jnp.asarray(rng.integers(-4, 5, (1, 512, 1, head_dim)), dtype) for _ in range(2))
    even = arguments.read_call(jnp.zeros((1, 512, 2, head_dim), dtype), key, value)
    chosen = jnp.asarray(np.eye(64, head_dim)[None, :, None], dtype)
    one = arguments.read_call(chosen * 1024, chosen, value[:, :64], scale=1.0)
    for name, call in (("even", even), ("one key", one)):
        gpu, emulated = forward(call)
        assert compare(f"{name} out", gpu[0], emulated[0]) == 1.0
        assert compare(f"{name} lse", gpu[1], emulated[1]) == 1.0


@pytest.mark.parametrize(
    ("length", "key_length", "head_dim", "dtype", "options"),
    [
        (512, 512, 128, "bfloat16", {}),
        (300, 500, 128, "float16", dict(is_causal=True, causal_alignment="bottom_right")),
        (400, 400, 64, "bfloat16", dict(is_causal=True)),
        (333, 333, 96, "bfloat16", dict(local_window_size=(100, 57))),
        (400, 400, 128, "bfloat16", dict(segment_ids=np.sort(np.arange(800).reshape(2, 400) // 130, axis=-1))),
    ],
    ids=str,
)
def test_attention_is_equal_but_for_roundings(
    length: int, key_length: int, head_dim: int, dtype: str, options: dict[str, Any]
) -> None:
    call = arguments.read_call(*draw(7, length, key_length, 4, 2, head_dim, dtype), **options)
    gpu, emulated = forward(call)
    rounding = UNIT[dtype]  # a weight or an output that rounds the other way
    largest = np.abs(np.asarray(emulated[0], np.float64)).max()
    assert compare("out", gpu[0], emulated[0]) > 0.97
    np.testing.assert_allclose(
        np.asarray(gpu[0], np.float64), np.asarray(emulated[0], np.float64), rtol=rounding, atol=rounding * largest / 4
    )
    compare("lse", gpu[1], emulated[1])
    np.testing.assert_allclose(gpu[1], emulated[1], rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize(
    ("head_dim", "dtype", "options"),
    [(128, "bfloat16", dict(is_causal=True)), (64, "bfloat16", {}), (128, "float16", {})],
    ids=str,
)
def test_gradients_are_equal_but_for_roundings(head_dim: int, dtype: str, options: dict[str, Any]) -> None:
    call = arguments.read_call(*draw(9, 400, 333, 4, 2, head_dim, dtype), **options)
    _, (out, lse) = forward(call)
    rng = np.random.default_rng(11)
    grad_out = jnp.asarray(rng.standard_normal(out.shape), dtype)
    grad_lse = jnp.asarray(rng.standard_normal(lse.shape), jnp.float32)

    def run(driver: str, operands: Any, *arrays: jax.Array) -> Any:
        found = hopper_backward(call.problem, operands, *arrays, driver=driver)
        return found.query, found.key, found.value

    gpu, emulated = on_both(run, call.operands, out, lse, grad_out, grad_lse)
    rounding = UNIT[dtype]
    for name, mine, theirs in zip(("grad_query", "grad_key", "grad_value"), gpu, emulated, strict=True):
        mine, theirs = (np.asarray(one, np.float64) for one in (mine, theirs))
        compare(name, mine, theirs)
        np.testing.assert_allclose(mine, theirs, rtol=rounding, atol=rounding * np.abs(theirs).max())
