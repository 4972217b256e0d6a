"""The approximate instructions stay inside the error that PTX documents, over a stratified sweep of every exponent."""

from __future__ import annotations

import ctypes

import ml_dtypes
import numpy as np
import pytest

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

NAMES = ["ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin", "cos", "tanh"]
F16, BF16 = 1, 2
NAN = 0x7FFFFFFF


def evaluate(units, name, values, flush=False, lanes=False):
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    out = np.empty(bits.size, np.uint32)
    units.call("units_approx", "iiiipp", NAMES.index(name), int(flush), int(lanes), bits.size, bits, out)
    return out.view(np.float32)


def sweep(count_per_exponent: int, seed: int) -> np.ndarray:
    """Random mantissas under every exponent and both signs, subnormals included."""
    rng = np.random.default_rng(seed)
    exponents = np.repeat(np.arange(255, dtype=np.uint32), count_per_exponent)
    bits = exponents << np.uint32(23) | rng.integers(0, 1 << 23, exponents.size, dtype=np.uint32)
    return np.concatenate([bits, bits | np.uint32(1 << 31)]).view(np.float32)


def ulps(got, exact):
    """Error in last places of the exact result's binade (in smallest subnormals below the normal range)."""
    exponent = np.maximum(np.floor(np.log2(np.maximum(np.abs(exact), 2.0**-126))), -126)
    return np.abs(got.astype(np.float64) - exact) / np.exp2(exponent - 23)


def test_ex2(units):
    dense = np.random.default_rng(1).uniform(-150, 128, 2_000_000).astype(np.float32)
    values = np.concatenate([dense, sweep(400, 2)])[: 32 * 60_000]
    exact = np.exp2(values.astype(np.float64))
    finite = exact < 2.0**128
    for flush in (False, True):
        scalar, lanes = evaluate(units, "ex2", values, flush), evaluate(units, "ex2", values, flush, lanes=True)
        assert np.array_equal(scalar.view(np.uint32), lanes.view(np.uint32))
        normal = exact >= 2.0**-126
        assert ulps(scalar[finite & normal], exact[finite & normal]).max() <= 0.501
        assert np.all(np.isinf(scalar[exact >= 2.0**128]))
        if flush:
            assert np.all(scalar[exact < 2.0**-127] == 0)
        else:
            assert ulps(scalar[finite & ~normal], exact[finite & ~normal]).max() <= 0.501


def test_ex2_special_values(units):
    values = np.array([0.0, -0.0, -np.inf, np.inf, 1e-40, -149, -150, 127, 128, 3], np.float32)
    expected = np.array([1, 1, 0, np.inf, 1, 2.0**-149, 0, 2.0**127, np.inf, 8], np.float32)
    assert np.array_equal(evaluate(units, "ex2", values), expected)
    assert evaluate(units, "ex2", [-126.5], flush=True)[0] == 0
    assert evaluate(units, "ex2", [np.nan]).view(np.uint32)[0] == NAN
    powers = np.arange(-149, 128, dtype=np.float32)
    assert np.array_equal(evaluate(units, "ex2", powers), np.exp2(powers.astype(np.float64)).astype(np.float32))


@pytest.mark.parametrize(
    ("name", "function"), [("rcp", lambda x: 1 / x), ("sqrt", np.sqrt), ("rsqrt", lambda x: 1 / np.sqrt(x))]
)
def test_reciprocals_and_roots(units, name, function):
    values = sweep(4000, 3)
    with np.errstate(all="ignore"):
        exact = function(values.astype(np.float64))
    got = evaluate(units, name, values)
    in_range = np.isfinite(exact) & (np.abs(exact) < 2.0**128)
    assert ulps(got[in_range], exact[in_range]).max() <= 0.501
    assert np.all(np.isnan(got[np.isnan(exact)]))
    assert np.all(np.isinf(got[np.abs(exact) >= 2.0**128]))


def test_lg2(units):
    values = np.abs(sweep(4000, 4))
    values = values[values > 0]
    exact = np.log2(values.astype(np.float64))
    got = evaluate(units, "lg2", values)
    near_one = (values > 0.5) & (values < 2)
    assert np.abs(got - exact)[near_one].max() <= 2.0**-22
    assert ulps(got[~near_one], exact[~near_one]).max() <= 0.501
    special = evaluate(units, "lg2", [0.0, -0.0, np.inf, -1.0, 1e-40])
    assert special[0] == special[1] == -np.inf
    assert special[2] == np.inf
    assert np.isnan(special[3])
    assert np.isfinite(special[4])
    assert evaluate(units, "lg2", [1e-40], flush=True)[0] == -np.inf


@pytest.mark.parametrize(("name", "function"), [("sin", np.sin), ("cos", np.cos)])
def test_sine_and_cosine(units, name, function):
    values = np.random.default_rng(5).uniform(-np.pi, np.pi, 1_000_000).astype(np.float32)
    assert np.abs(evaluate(units, name, values) - function(values.astype(np.float64))).max() <= 2.0**-20.5
    assert np.all(np.isnan(evaluate(units, name, [np.inf, -np.inf, np.nan])))


def test_tanh(units):
    values = sweep(4000, 6)
    exact = np.tanh(values.astype(np.float64))
    got = evaluate(units, "tanh", values)
    relative = np.abs(got - exact) / np.maximum(np.abs(exact), 2.0**-126)
    assert relative.max() <= 2.0**-11
    assert np.all(np.abs(got) <= 1)


@pytest.mark.parametrize(
    ("half", "dtype", "tanh_bound"), [(F16, np.float16, 2.0**-10.987), (BF16, ml_dtypes.bfloat16, 2.0**-8)]
)
def test_every_half_argument(units, half, dtype, tanh_bound):
    codes = np.arange(1 << 16, dtype=np.uint32)
    values = codes.astype(np.uint16).view(dtype).astype(np.float64)
    tiny = float(ml_dtypes.finfo(dtype).tiny)
    for tanh, function in ((0, np.exp2), (1, np.tanh)):
        out = np.empty(codes.size, np.uint32)
        units.call("units_approx_half", "iiiipp", tanh, half, 0, codes.size, codes, out)
        got = out.astype(np.uint16).view(dtype).astype(np.float64)
        with np.errstate(over="ignore"):
            exact = function(values)
            rounded = exact.astype(np.float32).astype(dtype).astype(np.float64)
        assert np.array_equal(np.isnan(got), np.isnan(exact))
        normal = (np.abs(exact) >= tiny) & np.isfinite(rounded)
        bound = tanh_bound if tanh else 2.0 ** -(7 if half == BF16 else 9.9)
        assert (np.abs(got - exact)[normal] / np.abs(exact[normal])).max() <= bound
        assert np.all(np.abs(got - exact)[(np.abs(exact) < tiny)] <= tiny * float(ml_dtypes.finfo(dtype).eps))


def test_division(units):
    def divide(a, b, full):
        return np.uint32(
            units.call(
                "units_div_approx",
                "uuii",
                *(int(np.float32(x).view(np.uint32)) for x in (a, b)),
                0,
                full,
                result=ctypes.c_uint32,
            )
        ).view(np.float32)

    assert divide(1.0, 3.0, 0) == np.float32(1 / 3)
    assert divide(2.0**127, 2.0**127, 1) == 1
    assert divide(2.0**127, 2.0**127, 0) == 0
    assert np.isnan(divide(np.inf, 2.0**127, 0))
    assert divide(1.0, np.inf, 0) == 0
    assert divide(1.0, 0.0, 0) == np.inf
