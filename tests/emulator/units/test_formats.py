"""Conversions, arithmetic in all rounding modes, minimum and maximum, integer helpers."""

from __future__ import annotations

import ctypes
import math

import ml_dtypes
import numpy as np
import pytest

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

FORMATS = ["f32", "f16", "bf16", "tf32", "e4m3", "e5m2", "e3m2", "e2m3", "e2m1", "ue8m0"]
ROUNDINGS = ["nearest_even", "toward_zero", "down", "up", "nearest_away"]
FLUSH, RELU, SATURATE_FINITE, SATURATE = 1, 2, 4, 8
CODE_BITS = {"f16": 16, "bf16": 16, "e4m3": 8, "e5m2": 8, "e3m2": 6, "e2m3": 6, "e2m1": 4, "ue8m0": 8}
NUMPY_DTYPES = {
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "ue8m0": ml_dtypes.float8_e8m0fnu,
}
NAN = 0x7FFFFFFF


def random_bits(count: int, seed: int) -> np.ndarray:
    """Bit patterns of f32 over all exponents, with a share of special values and of neighbours of powers of two."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 1 << 32, count, dtype=np.uint32)
    special = np.array([0, 1, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0x7F800000, 0x7FC00000, 0x3F800000], np.uint32)
    special = np.concatenate([special, special | np.uint32(1 << 31)])
    where = rng.random(count) < 0.05
    bits[where] = rng.choice(special, int(where.sum()))
    near = rng.random(count) < 0.1
    bits[near] = (
        (bits[near] & np.uint32(0xFF800000)) + rng.integers(0, 3, int(near.sum()), dtype=np.uint32) - np.uint32(1)
    )
    return bits


def convert(units, format_name, values, rounding="nearest_even", flags=0):
    values = np.ascontiguousarray(values)
    out = np.empty(values.size, np.uint32)
    name = {np.dtype(np.float32): "units_from_f32", np.dtype(np.float64): "units_from_f64"}[values.dtype]
    units.call(name, "iiiipp", FORMATS.index(format_name), ROUNDINGS.index(rounding), flags, values.size, values, out)
    return out


def widen(units, format_name, codes):
    codes = np.ascontiguousarray(codes, dtype=np.uint32)
    out = np.empty(codes.size, np.float32)
    units.call("units_to_f32", "iipp", FORMATS.index(format_name), codes.size, codes, out)
    return out


def same_numbers(got, expected):
    """Equal as numbers and signs of zero; any NaN equals any NaN."""
    got, expected = np.asarray(got), np.asarray(expected)
    both_nan = np.isnan(got) & np.isnan(expected)
    equal = (got == expected) & (np.signbit(got) == np.signbit(expected))
    return bool(np.all(both_nan | equal))


@pytest.mark.parametrize("name", list(CODE_BITS))
def test_every_code_widens_to_its_value(units, name):
    codes = np.arange(1 << CODE_BITS[name], dtype=np.uint32)
    storage = codes.astype(np.uint16 if CODE_BITS[name] == 16 else np.uint8)
    assert same_numbers(widen(units, name, codes), storage.view(NUMPY_DTYPES[name]).astype(np.float32))


@pytest.mark.parametrize("name", ["f16", "bf16", "e4m3", "e5m2", "e3m2", "e2m3", "e2m1"])
def test_nearest_even_agrees_with_ml_dtypes(units, name):
    values = random_bits(300_000, 1).view(np.float32)
    # Half of the values lie where the narrow formats have their range.
    values[::2] = np.random.default_rng(2).normal(0, 1, values[::2].size) * np.exp2(
        np.random.default_rng(3).integers(-12, 12, values[::2].size)
    )
    limit = float(ml_dtypes.finfo(NUMPY_DTYPES[name]).max) if name not in ("f16", "bf16") else np.inf
    values = values[~np.isnan(values) & (np.abs(values) <= limit)]
    with np.errstate(over="ignore"):
        expected = values.astype(NUMPY_DTYPES[name]).astype(np.float32)
    assert same_numbers(widen(units, name, convert(units, name, values)), expected)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("name", ["f16", "bf16", "tf32", "e4m3", "e5m2", "e2m1"])
def test_every_mode_picks_the_right_neighbour(units, name, rounding):
    """Against the sorted list of all finite values: the neighbours of x, the mode's choice among them."""
    if name == "tf32":
        grid = np.unique((np.arange(1 << 19, dtype=np.uint32) << 13).view(np.float32))
    else:
        grid = np.unique(widen(units, name, np.arange(1 << CODE_BITS[name], dtype=np.uint32)))
    grid = grid[np.isfinite(grid)].astype(np.float64)
    rng = np.random.default_rng(5)
    values = random_bits(60_000, 4).view(np.float32)
    values[::3] = (rng.choice(grid[1:-1], values[::3].size) * (1 + rng.normal(0, 1e-3, values[::3].size))).astype(
        np.float32
    )
    # Ties: middles of neighbours.
    at = rng.integers(0, grid.size - 1, values[1::3].size)
    values[1::3] = ((grid[at] + grid[at + 1]) / 2).astype(np.float32)
    values = values[np.isfinite(values) & (np.abs(values) < grid[-1])]
    x = values.astype(np.float64)
    above = np.searchsorted(grid, x, "left")
    high, low = grid[above], grid[np.where(grid[above] == x, above, above - 1)]
    got = widen(units, name, convert(units, name, values, rounding)).astype(np.float64)
    toward_zero, away = np.where(x > 0, low, high), np.where(x > 0, high, low)
    nearest = np.where(high - x < x - low, high, np.where(x - low < high - x, low, away))
    expected = {"down": low, "up": high, "toward_zero": toward_zero}.get(rounding, nearest)
    # Ties to even are left to the comparison with ml_dtypes.
    settled = (rounding != "nearest_even") | (high - x != x - low)
    assert np.array_equal(got[settled], expected[settled])
    assert np.array_equal(np.signbit(got), np.signbit(values))


def test_overflow_and_special_values(units):
    huge = np.array([1e30, -1e30, np.inf, -np.inf], np.float32)
    assert convert(units, "f16", huge).tolist() == [0x7C00, 0xFC00, 0x7C00, 0xFC00]
    assert convert(units, "f16", huge, "toward_zero").tolist() == [0x7BFF, 0xFBFF, 0x7C00, 0xFC00]
    assert convert(units, "f16", huge, "down").tolist() == [0x7BFF, 0xFC00, 0x7C00, 0xFC00]
    assert convert(units, "f16", huge, flags=SATURATE_FINITE).tolist() == [0x7BFF, 0xFBFF, 0x7BFF, 0xFBFF]
    assert convert(units, "e4m3", huge, flags=SATURATE_FINITE).tolist() == [0x7E, 0xFE, 0x7E, 0xFE]
    assert convert(units, "e5m2", huge, flags=SATURATE_FINITE).tolist() == [0x7B, 0xFB, 0x7B, 0xFB]
    assert convert(units, "e2m1", huge, flags=SATURATE_FINITE).tolist() == [7, 15, 7, 15]
    nan = np.array([np.nan, -np.nan], np.float32)
    expected = {
        "f32": NAN,
        "f16": 0x7FFF,
        "bf16": 0x7FFF,
        "tf32": NAN,
        "e4m3": 0x7F,
        "e5m2": 0x7F,
        "e2m1": 7,
        "ue8m0": 0xFF,
    }
    for name, code in expected.items():
        assert convert(units, name, nan, flags=SATURATE_FINITE).tolist() == [code, code], name
    assert convert(units, "bf16", np.array([-3, -0.0, 2, np.nan], np.float32), flags=RELU).tolist() == [
        0,
        0,
        0x4000,
        0x7FFF,
    ]
    unit = np.array([-1, 0.5, 7, np.nan, np.inf], np.float32)
    assert convert(units, "f16", unit, flags=SATURATE).tolist() == [0, 0x3800, 0x3C00, 0, 0x3C00]
    tiny = np.array([1e-40, -1e-40], np.float32)
    assert convert(units, "bf16", tiny, flags=FLUSH).tolist() == [0, 0x8000]
    assert convert(units, "bf16", tiny, "up").tolist() == [2, 0x8001]


def test_powers_of_two_format(units):
    values = np.array([1, 1.5, 2, 2.0001, 2.0**-127, 0, 3e38, -4], np.float32)
    down = [127, 127, 128, 128, 0, 0, 254, 129]
    assert convert(units, "ue8m0", values, "toward_zero").tolist() == down
    assert convert(units, "ue8m0", values, "up").tolist() == [127, 128, 128, 129, 0, 0, 254, 129]


def test_f64_and_integers_round_once(units):
    rng = np.random.default_rng(6)
    values = rng.normal(0, 1, 100_000) * np.exp2(rng.integers(-150, 130, 100_000).astype(np.float64))
    with np.errstate(over="ignore"):
        assert same_numbers(widen(units, "f32", convert(units, "f32", values)), values.astype(np.float32))
        assert same_numbers(
            widen(units, "f16", convert(units, "f16", values)), values.astype(np.float16).astype(np.float32)
        )
    integers = rng.integers(-(2**62), 2**62, 20_000) >> rng.integers(0, 62, 20_000)
    out = np.empty(integers.size, np.uint32)
    units.call("units_from_integer", "iiipp", 0, 0, integers.size, integers, out)
    assert np.array_equal(out.view(np.float32), integers.astype(np.float32))


def test_packed_conversions(units):
    values = random_bits(64 * 2000, 7)
    upper, lower = np.ascontiguousarray(values[::2]), np.ascontiguousarray(values[1::2])
    for name in ("bf16", "f16"):
        out = np.empty(upper.size, np.uint32)
        units.call("units_pack_lanes", "iippp", FORMATS.index(name), upper.size, upper, lower, out)
        scalar = convert(units, name, upper.view(np.float32)) << 16 | convert(units, name, lower.view(np.float32))
        assert np.array_equal(out, scalar)

    def pack(name, a, b):
        return units.call("units_pack2", "iff", FORMATS.index(name), a, b, result=ctypes.c_uint32)

    assert pack("f16", 1.0, -2.0) == 0x3C00C000
    assert pack("e4m3", 1.0, 448.0) == 0x387E
    assert pack("e2m1", 6.0, -1.0) == 0x7A

    def unpack(name, code):
        return units.call("units_unpack2", "iui", FORMATS.index(name), code, 1, result=ctypes.c_uint32)

    assert unpack("e4m3", 0x387E) == 0x3C005F00
    assert unpack("e2m1", 0x7A) == 0x4600BC00


@pytest.mark.parametrize("bits", [8, 16, 32, 64])
@pytest.mark.parametrize("is_signed", [False, True])
def test_float_to_integer(units, bits, is_signed):
    rng = np.random.default_rng(8)
    values = np.concatenate(
        [rng.normal(0, 1, 2000) * np.exp2(rng.integers(-2, 70, 2000)), [0.5, 1.5, -0.5, -1.5, np.inf, -np.inf, np.nan]]
    )
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if is_signed else (0, 2**bits - 1)
    for rounding, function in {
        "nearest_even": round,
        "toward_zero": math.trunc,
        "down": math.floor,
        "up": math.ceil,
    }.items():
        out = np.empty(values.size, np.uint64)
        units.call(
            "units_integer_from_f64",
            "iiiiipp",
            bits,
            int(is_signed),
            ROUNDINGS.index(rounding),
            0,
            values.size,
            values,
            out,
        )
        for value, got in zip(values.tolist(), out.tolist(), strict=True):
            if math.isnan(value):
                expected = 2**63 if bits == 64 else 0
            elif math.isinf(value):
                expected = high if value > 0 else low
            else:
                expected = min(max(function(value), low), high)
            assert got == expected % 2**64, (value, rounding)


@pytest.mark.parametrize("rounding", ROUNDINGS[:4])
@pytest.mark.parametrize(("operation", "name"), list(enumerate(["add", "sub", "mul", "fma", "div", "sqrt", "rcp"])))
def test_f32_arithmetic_agrees_with_the_host_in_every_mode(units, rounding, operation, name):
    count = 320_000
    a, b, c = (random_bits(count, seed).view(np.float32) for seed in (10, 11, 12))
    # Close operands: cancellation; distant ones: a remainder that only decides the direction.
    b[::4] = -a[::4] * (
        1 + np.random.default_rng(13).integers(-4, 5, b[::4].size).astype(np.float32) * np.float32(2**-23)
    )
    c[::5] = -(a[::5].astype(np.float64) * b[::5]).astype(np.float32)
    mode = ROUNDINGS.index(rounding)
    expected = np.empty(count, np.float32)
    units.call("host_f32", "iiipppp", operation, mode, count, a, b, c, expected)
    got = np.empty(count, np.uint32)
    units.call("units_f32", "iiiiipppp", operation, mode, 0, 0, count, a, b, c, got)
    assert same_numbers(got.view(np.float32), expected)
    assert np.all(got[np.isnan(expected)] == NAN)
    if name in ("add", "sub", "mul", "fma"):
        lanes = np.empty(count, np.uint32)
        units.call("units_f32", "iiiiipppp", operation, mode, 0, 1, count, a, b, c, lanes)
        assert np.array_equal(lanes, got)


def f32(units, operation, a, b, rounding="nearest_even", flags=0, c=0):
    arrays = [np.array([x], np.uint32) for x in (a, b, c, 0)]
    units.call("units_f32", "iiiiipppp", operation, ROUNDINGS.index(rounding), flags, 0, 1, *arrays)
    return int(arrays[3][0])


def test_directed_rounding_sees_the_smallest_operand(units):
    """Software floor adds 1.5 * 2^23 rounding down; a tiny operand must move the result by one unit."""
    one, tiny = 0x3F800000, 1
    assert f32(units, 0, one, tiny, "up") == one + 1
    assert f32(units, 0, one, tiny | 1 << 31, "down") == one - 1
    assert f32(units, 0, one, tiny | 1 << 31, "toward_zero") == one - 1
    magic = int(np.float32(1.5 * 2**23).view(np.uint32))
    minus_tiny = int(np.float32(-1e-30).view(np.uint32))
    assert np.uint32(f32(units, 0, magic, minus_tiny, "down")).view(np.float32) == 1.5 * 2**23 - 1
    assert f32(units, 3, tiny, tiny, "up") == 1  # 2^-298 rounded up is the smallest subnormal
    assert f32(units, 0, one, one | 1 << 31, "down") == 1 << 31
    assert f32(units, 0, one, one | 1 << 31, "up") == 0


def test_flush_and_saturate(units):
    subnormal, one = 0x00400000, 0x3F800000
    assert f32(units, 0, subnormal, subnormal, flags=1) == 0
    assert f32(units, 0, subnormal, subnormal) == 0x00800000
    assert f32(units, 2, 0x00800000, 0xBF000000, flags=1) == 1 << 31  # result -2^-127 flushed to -0
    assert f32(units, 0, one, one, flags=2) == one
    assert f32(units, 0, one | 1 << 31, 0, flags=2) == 0
    assert f32(units, 0, 0x7FC00000, one, flags=2) == 0


@pytest.mark.parametrize("rounding", ROUNDINGS[:4])
@pytest.mark.parametrize("operation", [0, 2, 3])
def test_f64_arithmetic_agrees_with_the_host_in_every_mode(units, rounding, operation):
    rng = np.random.default_rng(14)
    a, b, c = (rng.normal(0, 1, 50_000) * np.exp2(rng.integers(-200, 200, 50_000).astype(np.float64)) for _ in range(3))
    c[::2] = -(a * b)[::2]
    a[:4], b[:4] = [1e308, -1e308, 1.0, -0.0], [1e308, -1e308, -1.0, 0.0]
    expected, got = np.empty(a.size), np.empty(a.size)
    units.call("host_f64", "iiipppp", operation, ROUNDINGS.index(rounding), a.size, a, b, c, expected)
    units.call("units_f64", "iiipppp", operation, ROUNDINGS.index(rounding), a.size, a, b, c, got)
    assert same_numbers(got, expected)


def test_min_max(units):
    a, b = random_bits(64_000, 20), random_bits(64_000, 21)
    b[::7] = a[::7] ^ np.uint32(1 << 31)
    x, y = a.view(np.float32), b.view(np.float32)
    for maximum, function in ((0, np.fmin), (1, np.fmax)):
        scalar, lanes = np.empty(a.size, np.uint32), np.empty(a.size, np.uint32)
        units.call("units_min_max", "iiiippp", maximum, 0, 0, a.size, a, b, scalar)
        units.call("units_min_max", "iiiippp", maximum, 0, 1, a.size, a, b, lanes)
        assert np.array_equal(scalar, lanes)
        got, expected = scalar.view(np.float32), function(x, y)
        assert np.array_equal(np.isnan(got), np.isnan(expected))
        assert np.array_equal(got[~np.isnan(got)], expected[~np.isnan(got)])
        assert np.all(scalar[np.isnan(got)] == NAN)

    def three(maximum, flags, *args):
        return units.call("units_min_max3", "iiuuu", maximum, flags, *args, result=ctypes.c_uint32)

    zero, minus_zero, one, minus_two, nan = 0, 1 << 31, 0x3F800000, 0xC0000000, 0x7FC00000
    assert three(1, 0, minus_zero, zero, minus_zero) == zero
    assert three(0, 0, zero, minus_zero, zero) == minus_zero
    assert three(1, 0, nan, one, minus_two) == one
    assert three(1, 2, nan, one, minus_two) == NAN  # .NaN
    assert three(1, 8, zero, one, minus_two) == 0x40000000  # .abs
    assert three(1, 4, zero, one, minus_two) == 0xC0000000  # .xorsign.abs
    assert three(1, 1, 0x00000001, zero, minus_zero) == zero  # .ftz


@pytest.mark.parametrize("half", ["f16", "bf16"])
def test_half_arithmetic(units, half):
    rng = np.random.default_rng(30)
    a, b, c = (rng.integers(0, 1 << 16, 40_000, dtype=np.uint32) for _ in range(3))
    dtype = NUMPY_DTYPES[half]
    x, y, z = (v.astype(np.uint16).view(dtype).astype(np.longdouble) for v in (a, b, c))
    with np.errstate(all="ignore"):
        # Products of 11-bit numbers are exact in 64 bits; sums are too unless the operands are 2^42 apart, where the
        # reference would round twice: those are left to the cases below.
        cases = {0: (x, y), 1: (x, -y), 2: (x * y, 0 * x), 3: (x * y, z)}
        for operation, (left, right) in cases.items():
            got = np.empty(a.size, np.uint32)
            units.call("units_half", "iiiipppp", operation, FORMATS.index(half), 0, a.size, a, b, c, got)
            far = np.abs(np.frexp(left)[1] - np.frexp(right)[1]) > 42
            expected = (left * 1 if operation == 2 else left + right).astype(np.float64)
            narrowed = widen(units, half, convert(units, half, expected))
            keep = ~(far & (left != 0) & (right != 0)) if operation != 2 else np.ones(a.size, bool)
            wide = widen(units, half, got)
            assert np.array_equal(np.nan_to_num(wide[keep], nan=7), np.nan_to_num(narrowed[keep], nan=7)), operation
    # One unit at 2^-24 decides a tie: 1 + 2^-11 + 2^-24 rounds up in f16, 1 + 2^-11 to even.
    if half == "f16":
        one, tie, smallest = np.array([0x3C00], np.uint32), np.array([0x1000], np.uint32), np.array([1], np.uint32)
        out = np.empty(1, np.uint32)
        units.call("units_half", "iiiipppp", 0, 1, 0, 1, one, tie, one, out)
        assert out[0] == 0x3C00
        units.call("units_half", "iiiipppp", 3, 1, 0, 1, one, np.array([0x3C01], np.uint32), smallest, out)
        assert out[0] == 0x3C01


def test_integer_helpers(units):
    rng = np.random.default_rng(40)
    mask = {32: 2**32 - 1, 64: 2**64 - 1}

    def signed(value, bits):
        return value - (1 << bits) if value >> (bits - 1) else value

    for bits in (32, 64):
        for _ in range(300):
            a, b = (int(rng.integers(0, 2**63)) * 2 + int(rng.integers(0, 2)) & mask[bits] for _ in range(2))
            for is_signed in (0, 1):
                product = signed(a, bits) * signed(b, bits) if is_signed else a * b
                got = units.call("units_mul_hi", "qqii", a, b, bits, is_signed, result=ctypes.c_uint64)
                assert got == (product >> bits) & mask[bits]
            position, length = int(rng.integers(0, bits + 8)), int(rng.integers(0, bits + 8))
            got = units.call("units_bfe", "quuii", a, position, length, bits, 0, result=ctypes.c_uint64)
            assert got == (a >> position) & ((1 << length) - 1)
            got = units.call("units_bfe", "quuii", a, position, length, bits, 1, result=ctypes.c_uint64)
            field = (signed(a, bits) >> position) & ((1 << length) - 1) if length else 0
            top = (signed(a, bits) >> min(position + length - 1, bits - 1)) & 1 if length else 0
            assert got == (field | (-1 << length if top else 0)) & mask[bits]
            got = units.call("units_bfi", "qquui", a, b, position, length, bits, result=ctypes.c_uint64)
            window = (((1 << length) - 1) << position) & mask[bits]
            assert got == (b & ~window) | ((a << position) & window)
            assert units.call("units_brev", "qi", a, bits, result=ctypes.c_uint64) == int(f"{a:0{bits}b}"[::-1], 2)
            assert (
                units.call("units_bfind", "qiii", a >> 3, bits, 0, 0, result=ctypes.c_uint32)
                == (a >> 3).bit_length() - 1 % 2**32
            )
            amount = int(rng.integers(0, bits + 8))
            assert (
                units.call("units_shift", "quiii", a, amount, bits, 1, 0, result=ctypes.c_uint64)
                == (a << amount) & mask[bits]
            )
            got = units.call("units_shift", "quiii", a, amount, bits, 0, 1, result=ctypes.c_uint64)
            assert got == (signed(a, bits) >> amount) & mask[bits]

    def find(a, is_signed, shift):
        return units.call("units_bfind", "qiii", a, 32, is_signed, shift, result=ctypes.c_uint32)

    assert find(0, 0, 0) == 0xFFFFFFFF
    assert find(0xFFFFFFFF, 1, 0) == 0xFFFFFFFF
    assert find(0xFFFFFFF0, 1, 0) == 3
    assert find(0x10, 0, 1) == 27


def test_bytes_and_logic(units):
    rng = np.random.default_rng(41)

    def prmt(a, b, s, mode=0):
        return units.call("units_prmt", "uuui", a, b, s, mode, result=ctypes.c_uint32)

    a, b = 0x83828180, 0x07060504
    assert prmt(a, b, 0x7531) == 0x07058381
    assert prmt(a, b, 0x4C8B) == 0x0400FFFF  # with the sign of byte 4, 0 and 3
    assert [prmt(a, b, 1, mode) for mode in range(1, 7)] == [
        0x04838281,
        0x06078081,
        0x81818181,
        0x83828181,
        0x81818180,
        0x83828382,
    ]
    words = rng.integers(0, 1 << 32, (3, 32), dtype=np.uint32)
    for table in range(256):
        out = np.empty(32, np.uint32)
        units.call("units_lop3_lanes", "pppup", words[0], words[1], words[2], table, out)
        bits = [[(int(words[k, 0]) >> i) & 1 for i in range(32)] for k in range(3)]
        expected = sum(((table >> (4 * bits[0][i] + 2 * bits[1][i] + bits[2][i])) & 1) << i for i in range(32))
        assert out[0] == expected
        x, y, z = (int(words[k, 5]) for k in range(3))
        assert out[5] == units.call("units_lop3", "uuuu", x, y, z, table, result=ctypes.c_uint32)

    def shf(low, high, n, left, wrap):
        return units.call("units_shf", "uuuii", low, high, n, left, wrap, result=ctypes.c_uint32)

    assert shf(0x89ABCDEF, 0x01234567, 8, 1, 0) == 0x23456789
    assert shf(0x89ABCDEF, 0x01234567, 8, 0, 0) == 0x6789ABCD
    assert shf(0x89ABCDEF, 0x01234567, 40, 1, 0) == 0x89ABCDEF
    assert shf(0x89ABCDEF, 0x01234567, 40, 1, 1) == 0x23456789

    def dot(*args):
        return units.call("units_dot", "uuuiiii", *args, result=ctypes.c_uint32)

    assert dot(0xFF02FE01, 0x02020202, 10, 1, 0, 4, 0) == (10 + 2 * (-1 + 2 - 2 + 1)) % 2**32
    assert dot(0xFFFF0002, 0x04030201, 0, 1, 0, 2, 0) == 0  # 2 * 1 - 1 * 2
    assert dot(0xFFFF0002, 0x04030201, 0, 1, 0, 2, 1) == 2  # 2 * 3 - 1 * 4

    def fns(*args):
        return units.call("units_fns", "uui", *args, result=ctypes.c_uint32)

    assert [
        fns(0b101100, 0, 1),
        fns(0b101100, 0, 3),
        fns(0b101100, 4, -1),
        fns(0b101100, 3, 0),
        fns(0b101100, 0, 4),
    ] == [2, 5, 3, 3, 0xFFFFFFFF]


def test_round_to_integral(units):
    def integral(x, mode):
        return np.uint32(
            units.call(
                "units_round_to_integral",
                "uii",
                int(np.float32(x).view(np.uint32)),
                ROUNDINGS.index(mode),
                0,
                result=ctypes.c_uint32,
            )
        ).view(np.float32)

    assert [integral(2.5, mode) for mode in ROUNDINGS] == [2, 2, 2, 3, 3]
    assert [integral(-2.5, mode) for mode in ROUNDINGS] == [-2, -2, -3, -2, -3]
    assert np.signbit(integral(-0.25, "nearest_even"))
