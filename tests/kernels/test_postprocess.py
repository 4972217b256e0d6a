"""The backward's pre- and postprocess in the emulator against their formulas, for every architecture."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fa4 import emulator
from jax_fa4.ffi import launch
from jax_fa4.ffi.postprocess import postprocess, postprocess_formula
from jax_fa4.ffi.preprocess import preprocess, preprocess_formula, sections
from jax_fa4.kernels import build
from jax_fa4.kernels.plan import PlanError
from jax_fa4.kernels.plans import postprocess_plan, preprocess_plan

CAPABILITIES = {"sm_90a": "9.0", "sm_100f": "10.0"}


@pytest.fixture(params=CAPABILITIES)
def architecture(request: pytest.FixtureRequest) -> str:
    launch.declare_driver("emulator", str(emulator.library_path()), takes_ptx=True)
    emulator.set_options(arch=CAPABILITIES[request.param], check_uninitialized=True)
    return str(request.param)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "width"), [("bfloat16", 128, 128), ("float16", 72, 96), ("float32", 64, 64)]
)
def test_postprocess_scales_and_rounds(architecture: str, dtype: str, head_dim: int, width: int) -> None:
    sums = np.random.default_rng(0).standard_normal((2, 3, 256, width), np.float32)
    options = {"query_length": 130, "head_dim": head_dim, "dtype": dtype, "scale": 0.125}
    got = jax.jit(
        lambda sums: postprocess(sums, architecture=architecture, driver="emulator", **options)  # type: ignore[arg-type]
    )(sums)
    expected = postprocess_formula(jnp.asarray(sums), **options)  # type: ignore[arg-type]
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(expected, np.float32))


def turned(sums: np.ndarray, tile_rows: int) -> np.ndarray:
    """Sums (B, N, R, 128) in the order that a kernel which computes them transposed leaves them in."""
    batch, heads, rows, _ = sums.shape
    # In columns (half, warp, register pair, quad) and rows (tile, eight, lane of the quad, register of the pair).
    shape = (batch, heads, rows // tile_rows, tile_rows // 8, 4, 2, 2, 4, 2, 8)
    return sums.reshape(shape).transpose(0, 1, 2, 6, 3, 7, 9, 4, 8, 5).reshape(sums.shape)


@pytest.mark.skipif(build.compiler_version() is None, reason="the wheel has no such kernel; the compiler makes it")
@pytest.mark.parametrize(("dtype", "head_dim"), [("bfloat16", 128), ("float16", 104)])
@pytest.mark.parametrize("length", [1, 79, 80, 81, 330])
def test_postprocess_of_sums_that_lie_transposed(dtype: str, head_dim: int, length: int) -> None:
    launch.declare_driver("emulator", str(emulator.library_path()), takes_ptx=True)
    emulator.set_options(arch="9.0", check_uninitialized=True)
    sums = np.random.default_rng(length).standard_normal((2, 3, 480, 128), np.float32)
    options = {"query_length": length, "head_dim": head_dim, "dtype": dtype, "scale": 0.125}
    where = {"architecture": "sm_90a", "driver": "emulator"}
    got = postprocess(jnp.asarray(turned(sums, 80)), turned_rows=80, **options, **where)  # type: ignore[arg-type]
    expected = postprocess_formula(jnp.asarray(sums), **options)  # type: ignore[arg-type]
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(expected, np.float32))


def test_preprocess_pads_to_whole_tiles(architecture: str) -> None:
    """160 rows are a multiple of 80 and of the 32 that the kernel takes."""
    rng = np.random.default_rng(1)
    out, grad_out = (jnp.asarray(rng.standard_normal((1, 81, 2, 128)), jnp.bfloat16) for _ in range(2))
    lse, grad_lse = (rng.standard_normal((1, 81, 2)).astype(np.float32) for _ in range(2))
    where = {"architecture": architecture, "driver": "emulator"}
    got = preprocess(out, grad_out, lse, grad_lse, accumulator_width=128, row_tile=80, **where)  # type: ignore[arg-type]
    assert [one.shape[2] for one in got] == [160, 160, 160]
    expected = preprocess_formula(out, grad_out, lse, grad_lse, accumulator_width=128)
    np.testing.assert_allclose(got.delta[:, :, :128], expected.delta, rtol=1e-6, atol=2e-5)
    assert not np.asarray(got.accumulator).any()
    assert not np.asarray(got.delta[:, :, 81:]).any()
    assert (np.asarray(got.lse_log2[:, :, 81:]) == np.inf).all()


def test_preprocess_equals_its_formula(architecture: str) -> None:
    rng = np.random.default_rng(1)
    out, grad_out = (jnp.asarray(rng.standard_normal((2, 130, 2, 128)), jnp.bfloat16) for _ in range(2))
    lse, grad_lse = (rng.standard_normal((2, 130, 2)).astype(np.float32) for _ in range(2))
    lse[0, :5] = -np.inf
    got = preprocess(out, grad_out, lse, grad_lse, accumulator_width=128, architecture=architecture, driver="emulator")
    for one, other in zip(got, preprocess_formula(out, grad_out, lse, grad_lse, accumulator_width=128), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=2e-5)


@pytest.mark.parametrize("kernel", ["preprocess", "postprocess"])
def test_first_block_takes_the_last_rows(architecture: str, kernel: str) -> None:
    """Told from outside by the block that misses the last row of sums that lack it."""
    batch, heads, length, width = 3, 2, 256, 64
    integers = {"section_heads": 2, "sections": 3, "heads": heads, "query_length": length, "padded_length": length}
    short = jnp.zeros((batch * heads * length - 1, width))
    rows = jnp.zeros((batch, length, heads, width), jnp.bfloat16)
    floats = jax.ShapeDtypeStruct((batch, heads, length), jnp.float32)
    rows_of_heads = jax.ShapeDtypeStruct(rows.shape, rows.dtype)
    lse = jnp.zeros(rows.shape[:3])
    operands = {"accumulator": short, "out": rows, "grad_out": rows, "lse": lse, "grad_lse": lse}
    sums = jax.ShapeDtypeStruct(short.shape, jnp.float32)
    results = {"grad_query": rows_of_heads, "lse_log2": floats, "delta": floats, "accumulator": sums}
    make = preprocess_plan if kernel == "preprocess" else postprocess_plan
    plan = make(architecture, "bfloat16", width, width)
    with pytest.raises(Exception, match=r"belongs to no allocation; .*; CTA \(1, 0, 0\)"):
        launch.launch(plan, operands, results, integers, {"scale": 1.0}, driver="emulator")


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((4, 16, 2048, 128), 16),  # of 2 MiB each with what comes with them, in 50: the next divisor of 64 is 32
        ((1, 16, 32768, 128), 1),
        ((1, 16, 65536, 128), 16),  # not one fits
        ((3, 5, 8192, 128), 5),
        ((1, 65537, 32768, 128), 65537),  # a prime: more than the grid takes
        ((1 << 20, 1, 128, 64), 512),
        ((2, 3, 128, 0), 6),
        ((0, 3, 128, 64), 0),
    ],
)
def test_sections_hold_what_the_cache_does(shape: tuple[int, int, int, int], expected: int) -> None:
    found = sections("sm_90a", shape)
    assert found["section_heads"] == expected
    assert found["section_heads"] * found["sections"] == shape[0] * shape[1]
    assert found == sections("sm_100f", shape)


@pytest.mark.parametrize(
    ("dtype", "width", "turned_rows"), [("float32", 128, 80), ("bfloat16", 64, 80), ("bfloat16", 128, 84)]
)
def test_what_transposed_sums_refuse(dtype: str, width: int, turned_rows: int) -> None:
    with pytest.raises(PlanError, match=f"turned_rows is {turned_rows}"):
        postprocess_plan("sm_90a", dtype, 64, width, turned_rows=turned_rows)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "width", "message"),
    [
        ("int8", 64, 64, "dtype is 'int8'"),
        ("bfloat16", 60, 64, "head_dim is 60; it takes multiples of 8"),
        ("bfloat16", 64, 32, "accumulator_width is 32"),
    ],
)
def test_what_postprocess_refuses(dtype: str, head_dim: int, width: int, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        postprocess_plan("sm_90a", dtype, head_dim, width)
