"""The preprocess kernel on a GPU against sums in float64, inside jit; as many threads use it first; in command buffers.

Command buffers are forced by the environment of the process:
XLA_FLAGS='--xla_gpu_enable_command_buffer=FUSION,CUSTOM_CALL --xla_gpu_graph_min_graph_size=1'.
"""

from __future__ import annotations

import ctypes
import math
import os
import subprocess
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fa4.ffi import launch
from jax_fa4.ffi.preprocess import Preprocessed, padded_length, preprocess, preprocess_formula

pytestmark = pytest.mark.gpu

COUNTING_DRIVER = """
#include <dlfcn.h>
static int launches = 0;
extern "C" int counted_launches() { return launches; }
extern "C" int cuLaunchKernelEx(const void* config, void* function, void** parameters, void** extra) {
  static auto real = reinterpret_cast<int (*)(const void*, void*, void**, void**)>(
      dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuLaunchKernelEx"));
  ++launches;
  return real(config, function, parameters, extra);
}
"""


@pytest.fixture(autouse=True)
def needs_gpu() -> None:
    if launch.device_architecture() is None:
        pytest.skip("the default device is no GPU for which there are kernels")


def draw(seed: int, shape: tuple[int, ...], dtype: str) -> tuple[jax.Array, ...]:
    """Operands; one row in seven saw no key, and holds NaN."""
    rng = np.random.default_rng(seed)
    out, grad_out = (rng.standard_normal(shape, np.float32) for _ in range(2))
    lse, grad_lse = (rng.standard_normal(shape[:-1], np.float32) for _ in range(2))
    saw_nothing = rng.random(shape[:-1]) < 1 / 7
    lse[saw_nothing] = -np.inf
    grad_out[saw_nothing] = np.nan
    return jnp.asarray(out, dtype), jnp.asarray(grad_out, dtype), jnp.asarray(lse), jnp.asarray(grad_lse)


def check(results: Preprocessed, operands: tuple[jax.Array, ...]) -> None:
    """Compares with float64. A float32 sum of D terms in any order is off by at most D * 2^-24 * sum(|terms|) at first
    order; the products of 16-bit factors are exact."""
    out, grad_out, lse, grad_lse = (np.asarray(one, np.float64) for one in operands)
    length, padded = lse.shape[-2], padded_length(lse.shape[-2])
    assert results.lse_log2.shape[-1] == padded
    saw_nothing = lse == -np.inf
    terms = np.where(saw_nothing[..., None], 0, out * grad_out)
    delta = np.where(saw_nothing, 0, terms.sum(-1) - grad_lse)
    bound = (out.shape[-1] + 2) * 2.0**-24 * (np.abs(terms).sum(-1) + np.abs(grad_lse))
    got = np.swapaxes(np.asarray(results.delta), -1, -2)
    assert (np.abs(got[..., :length, :] - delta) <= bound).all()
    assert (got[..., length:, :] == 0).all()
    log2 = np.swapaxes(np.asarray(results.lse_log2), -1, -2)
    expected = np.where(saw_nothing, 0, lse) * math.log2(math.e)
    np.testing.assert_allclose(log2[..., :length, :], expected, rtol=2.0**-22, atol=0)
    assert (log2[..., length:, :] == np.inf).all()
    assert not np.asarray(results.accumulator).any()


def poison(results: Preprocessed) -> None:
    """Frees buffers of the results' sizes full of NaN, for the allocator to hand out next."""
    for one in results:
        jnp.full(one.shape, jnp.nan, one.dtype).block_until_ready().delete()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("length", [1, 333, 1024])
def test_equals_float64(dtype: str, head_dim: int, length: int) -> None:
    function = jax.jit(lambda *one: preprocess(*one, accumulator_width=head_dim))
    operands = draw(length, (2, length, 3, head_dim), dtype)
    poison(jax.eval_shape(function, *operands))
    check(function(*operands), operands)


def test_equals_the_formula_and_folds_vmap() -> None:
    operands = draw(1, (3, 2, 201, 4, 128), "bfloat16")
    mapped = jax.jit(jax.vmap(lambda *one: preprocess(*one, accumulator_width=128)))(*operands)
    formula = jax.vmap(lambda *one: preprocess_formula(*one, accumulator_width=128))(*operands)
    for got, expected in zip(mapped, formula, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-4)
    check(mapped, operands)


def test_ten_calls_with_fresh_buffers() -> None:
    function = jax.jit(lambda *one: preprocess(*one, accumulator_width=128))
    kept = []  # buffers that stay alive make the next ones lie elsewhere
    for seed in range(10):
        operands = draw(seed, (2, 77, 3, 128), "bfloat16")
        kept.append((function(*operands), operands))
    for results, operands in kept:
        check(results, operands)


def test_eight_threads_first_use() -> None:
    barrier = threading.Barrier(8)
    failures: list[BaseException] = []

    def work(thread: int) -> None:
        try:
            dtype = ("bfloat16", "float16")[thread % 2]
            head_dim = (64, 96, 128, 192)[thread // 2]
            operands = draw(thread, (1, 50 + thread, 2, head_dim), dtype)
            function = jax.jit(lambda *one: preprocess(*one, accumulator_width=head_dim)).lower(*operands).compile()
            barrier.wait()
            check(function(*operands), operands)
        except BaseException as error:
            barrier.abort()
            failures.append(error)

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


@pytest.mark.skipif("command_buffer=" not in os.environ.get("XLA_FLAGS", ""), reason="XLA_FLAGS force none")
def test_replayed_from_a_command_buffer(tmp_path: Path) -> None:
    """Counts launches with a driver library that stands before the real one: a replayed graph makes none."""
    ctypes.CDLL("libcuda.so.1")
    maps = Path("/proc/self/maps").read_text().splitlines()
    library = next(line.split()[-1] for line in maps if "libcuda.so" in line)
    (tmp_path / "counting.cc").write_text(COUNTING_DRIVER)
    counting = tmp_path / "libcounting.so"
    command = [
        "g++",
        "-shared",
        "-fPIC",
        "-o",
        counting,
        tmp_path / "counting.cc",
        "-Wl,--no-as-needed",
        library,
        "-ldl",
    ]
    subprocess.run(command, check=True)
    launch.declare_driver("counting", str(counting), takes_ptx=False)

    def program(*operands: jax.Array) -> jax.Array:
        results = preprocess(*operands, accumulator_width=128, driver="counting")
        again = preprocess(*operands, accumulator_width=128, driver="counting")
        return results.delta + again.delta

    function = jax.jit(program)
    operands = draw(0, (2, 77, 3, 128), "bfloat16")
    expected = 2 * preprocess_formula(*operands, accumulator_width=128).delta
    results = []
    for _ in range(10):
        results.append(np.asarray(function(*operands)))
    for result in results:
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-4)
    launches = ctypes.CDLL(str(counting)).counted_launches()
    print(f"launches for 10 executions of 2 calls: {launches}")
    assert 0 < launches < 20


def test_tensor_maps_are_those_of_the_driver() -> None:
    module = launch.native()
    buffer = jnp.zeros((1 << 20,), jnp.bfloat16)
    address = buffer.unsafe_buffer_pointer()
    cases = [
        ("BFLOAT16", [128, 300, 4, 2], [1024, 256, 307200], [64, 128, 1, 1], 3, 2),
        ("FLOAT16", [64, 301], [128], [64, 64], 3, 3),
        ("FLOAT32", [128, 64, 3], [512, 32768], [32, 64, 1], 3, 0),
        ("TFLOAT32", [32, 7], [128], [8, 7], 1, 1),
        ("UINT8", [256, 9, 5, 3, 2], [256, 4096, 32768, 1 << 38], [64, 9, 1, 1, 1], 2, 2),
        ("INT32", [64, 16], [256], [64, 16], 0, 0),
    ]
    for element, extents, strides, box, swizzle, l2 in cases:
        count = len(extents)
        recipe = module.TensorMapRecipe(
            is_result=False,
            buffer=0,
            element=getattr(module.ElementType, element),
            extents=list(range(count)),
            strides=list(range(count, 2 * count - 1)),
            box=box,
            swizzle=swizzle,
            l2=l2,
        )
        ours = module.tensor_map_words(recipe, address, [*extents, *strides])
        drivers = module.tensor_map_words(recipe, address, [*extents, *strides], through_driver="cuda")
        assert [hex(word) for word in ours[:8]] == [hex(word) for word in drivers[:8]], element
