"""The backward's preprocess on a GPU: time against the bytes it must move, and against XLA's own fusion of the formula.

    python -m benchmarks.preprocess_gpu [--variants FOLDER]

All times are medians over `--repeats` runs of `--calls` calls each, in one process: through jit, dispatched together
and timed on the host's clock, and on the stream, launched by the runtime alone and timed by the driver's events. The
ceiling is the driver's own copy from device to device, counting bytes read and bytes written. `--write_variants` builds
(on any machine with the compiler) binaries with other row counts per thread into a folder; `--variants` times them.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from jax_fa4.ffi import launch
from jax_fa4.ffi.preprocess import padded_length, preprocess, preprocess_formula, sections
from jax_fa4.kernels import build, bundle
from jax_fa4.kernels.plan import KernelPlan
from jax_fa4.kernels.plans import preprocess_plan

BATCH, HEADS = 4, 32
CASES = (
    ("bfloat16", 64, 16384),
    ("bfloat16", 96, 8192),
    ("bfloat16", 128, 8192),
    ("bfloat16", 256, 4096),
    ("float32", 128, 4096),
)
ROWS_PER_THREAD = (1, 2, 4)

FLAGS = flags.FLAGS


def variant_plans() -> list[KernelPlan]:
    """The kernel of the first bfloat16 128 case with every number of rows per thread."""
    return [preprocess_plan("sm_90a", "bfloat16", 128, 128, rows) for rows in ROWS_PER_THREAD]


def median_seconds(function: Callable[..., object], *operands: jax.Array) -> float:
    """Median seconds of one call."""
    jax.block_until_ready(function(*operands))
    seconds = []
    for _ in range(FLAGS.repeats):
        start = time.perf_counter()
        results = [function(*operands) for _ in range(FLAGS.calls)]
        jax.block_until_ready(results[-1])
        seconds.append((time.perf_counter() - start) / FLAGS.calls)
        del results
    return float(np.median(seconds))


def operands_of(dtype: str, head_dim: int, length: int) -> tuple[jax.Array, ...]:
    """Random operands of one case."""
    keys = jax.random.split(jax.random.key(0), 4)
    shape = (BATCH, length, HEADS, head_dim)
    wide = [jax.random.normal(key, shape, dtype) for key in keys[:2]]
    return (*wide, *(jax.random.normal(key, shape[:3], jnp.float32) for key in keys[2:]))


def bytes_moved(dtype: str, head_dim: int, length: int) -> int:
    """Fewest bytes: operands read once, results written once."""
    rows, padded_rows = BATCH * HEADS * length, BATCH * HEADS * padded_length(length)
    return rows * (2 * head_dim * jnp.dtype(dtype).itemsize + 8) + padded_rows * (8 + 4 * head_dim)


def bandwidth() -> float:
    """Bytes per second of the driver's copy of 1 GiB, read and written."""
    source, target = (jnp.full((1 << 30,), value, jnp.uint8) for value in (1, 2))
    jax.block_until_ready((source, target))
    addresses = [ctypes.c_uint64(one.unsafe_buffer_pointer()) for one in (target, source)]
    driver = ctypes.CDLL("libcuda.so.1")

    def copy() -> None:
        result = driver.cuMemcpyDtoDAsync_v2(*addresses, ctypes.c_size_t(source.nbytes), None)
        if result != 0:
            raise RuntimeError(f"the copy failed: {result}")

    return 2 * source.nbytes / timed_on_stream(copy)


def on_stream(plan: KernelPlan, binary: build.KernelBinary, operands: tuple[jax.Array, ...], length: int) -> float:
    """Median seconds of one launch by the runtime, without XLA."""
    width = int(plan.option("accumulator_width"))
    results = jax.jit(lambda *one: preprocess(*one, accumulator_width=width))(*operands)
    addresses = [[one.unsafe_buffer_pointer() for one in group] for group in (operands, results)]
    integers = {"heads": HEADS, "query_length": length, "padded_length": padded_length(length)}
    integers |= sections(plan.architecture, results[-1].shape)
    content_hash = launch.register(binary)
    values = [int(value) for value in launch.call_integers(plan, integers)]
    launch.native().load(launch.CUDA_DRIVER, content_hash, 0)
    call = launch.native().launch
    return timed_on_stream(lambda: call(launch.CUDA_DRIVER, content_hash, 0, *addresses, values, [], 0))


def run_case(dtype: str, head_dim: int, length: int, ceiling: float) -> None:
    """Prints one line of the table."""
    operands = operands_of(dtype, head_dim, length)
    kernel = jax.jit(lambda *one: preprocess(*one, accumulator_width=head_dim))
    formula = jax.jit(lambda *one: preprocess_formula(*one, accumulator_width=head_dim))
    for got, expected in zip(kernel(*operands), formula(*operands), strict=True):
        np.testing.assert_allclose(got[..., :8, :3], expected[..., :8, :3], rtol=1e-5, atol=1e-3)
    needed = bytes_moved(dtype, head_dim, length)
    ours, xla = median_seconds(kernel, *operands), median_seconds(formula, *operands)
    again = median_seconds(kernel, *operands)
    plan = preprocess_plan("sm_90a", dtype, head_dim, head_dim)
    alone = on_stream(plan, bundle.find(plan), operands, length)
    print(
        f"{dtype:9} d {head_dim:3} T {length:5}: {needed / 1e9:5.2f} GB, floor {needed / ceiling * 1e6:6.1f} us, "
        f"on the stream {alone * 1e6:6.1f} us, {needed / alone / 1e12:4.2f} TB/s = {needed / alone / ceiling:5.1%} "
        f"of a copy; in jit {ours * 1e6:6.1f} us (then {again * 1e6:6.1f}), XLA {xla * 1e6:6.1f}, {xla / ours:4.2f}x",
        flush=True,
    )


def run_variants(folder: Path) -> None:
    """Times the binaries with other numbers of rows per thread."""
    operands = operands_of("bfloat16", 128, 8192)
    for plan in variant_plans():
        binary = build.KernelBinary.from_bytes(plan, (folder / f"{plan.key}.kernel").read_bytes())
        seconds = on_stream(plan, binary, operands, 8192)
        print(f"rows per block {plan.option('rows'):3}: {seconds * 1e6:6.1f} us", flush=True)


def timed_on_stream(call: Callable[[], object]) -> float:
    """Median seconds of a call on the legacy stream, by the driver's events."""
    driver = ctypes.CDLL("libcuda.so.1")
    begin, end, milliseconds = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_float()
    context, device = ctypes.c_void_p(), ctypes.c_int()
    for result in (
        driver.cuDeviceGet(ctypes.byref(device), 0),
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device),
        driver.cuCtxSetCurrent(context),
        driver.cuEventCreate(ctypes.byref(begin), 0),
        driver.cuEventCreate(ctypes.byref(end), 0),
    ):
        assert result == 0, result
    seconds = []
    for _ in range(FLAGS.repeats + 1):
        driver.cuEventRecord(begin, None)
        for _ in range(FLAGS.calls):
            call()
        driver.cuEventRecord(end, None)
        assert driver.cuEventSynchronize(end) == 0
        assert driver.cuEventElapsedTime_v2(ctypes.byref(milliseconds), begin, end) == 0
        seconds.append(milliseconds.value * 1e-3 / FLAGS.calls)
    return float(np.median(seconds[1:]))


def define_flags() -> None:
    """Flags of the program; not defined on import, so that a test can import several benchmarks."""
    flags.DEFINE_integer("calls", 20, "calls dispatched together")
    flags.DEFINE_integer("repeats", 9, "timed runs, of which the median is taken")
    flags.DEFINE_string("variants", None, "folder with binaries of other rows per thread, to be timed as well")
    flags.DEFINE_string("write_variants", None, "build those binaries into this folder and end")


def main(_: list[str]) -> None:
    """The commands of this module's text."""
    if FLAGS.write_variants:
        folder = Path(FLAGS.write_variants)
        folder.mkdir(parents=True, exist_ok=True)
        for plan in variant_plans():
            binary = bundle.stored(plan) or build.build(plan)
            (folder / f"{plan.key}.kernel").write_bytes(binary.to_bytes())
        return
    print(f"JAX {jax.__version__}, {jax.devices()[0].device_kind}, batch {BATCH}, {HEADS} heads", flush=True)
    ceiling = bandwidth()
    print(f"ceiling, copy on the device: {ceiling / 1e12:.2f} TB/s", flush=True)
    for case in CASES:
        run_case(*case, ceiling)
    if FLAGS.variants:
        run_variants(Path(FLAGS.variants))


if __name__ == "__main__":
    define_flags()
    app.run(main)
