"""Matrix descriptors, operands in shared memory, and products into tensor memory and registers."""

from __future__ import annotations

import ctypes

import ml_dtypes
import numpy as np
import pytest

from tests.emulator.units.structures import FORMATS, Instruction, Operand, fields, operand, tensor_map
from tests.emulator.units.test_tma import place

DTYPES = {
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "tf32": np.float32,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
}
KINDS = ["f16", "tf32", "f8f6f4", "i8"]
WIDTHS = {"none": 16, "32": 32, "64": 64, "128": 128, "128_atom32": 128}


def integers(shape, seed, dtype=np.float32, limit=4):
    """Small integers: every product and sum is exact in any order."""
    return np.random.default_rng(seed).integers(-limit, limit + 1, shape).astype(dtype)


# ------------------------------------------------------------------------------------------------------ descriptors


def test_descriptors_decode_and_encode(units):
    wgmma_codes = {"none": 0, "128": 1, "64": 2, "32": 3}
    tcgen05_codes = {"none": 0, "128_atom32": 1, "128": 2, "64": 4, "32": 6}
    for blackwell, codes in ((0, wgmma_codes), (1, tcgen05_codes)):
        for swizzle, code in codes.items():
            given = operand("bf16", 0, 0, 0x12340, 0x4000, 0x400, swizzle)
            bits = (code << (61 if blackwell else 62)) | (0x1234 | 0x400 << 16 | 0x40 << 32) | (blackwell << 46)
            assert units.call("units_encode_descriptor", "ip", blackwell, given, result=ctypes.c_uint64) == bits
            out = np.zeros(4, np.uint32)
            assert units.fails("units_decode_descriptor", "iqp", blackwell, bits, out) == ""
            assert out.tolist() == [given.start, given.leading_bytes, given.stride_bytes, given.swizzle]


@pytest.mark.parametrize(
    ("blackwell", "bits", "part"),
    [
        (0, 1 << 49, "base offset 1"),
        (1, 2 << 61, "version field 0"),
        (1, 1 << 46 | 3 << 49, "base offset 3"),
        (1, 1 << 46 | 1 << 52, "absolute leading dimension"),
        (1, 1 << 46 | 3 << 61, "layout code 3"),
    ],
)
def test_unknown_descriptors_are_refused(units, blackwell, bits, part):
    sentence = units.fails("units_decode_descriptor", "iqp", blackwell, bits, np.zeros(4, np.uint32))
    assert part in sentence
    assert f"{bits:#x}" in sentence


def instruction(kind="f16", m=128, n=128, a="bf16", b="bf16", **changes) -> Instruction:
    depth = {"f16": 16, "tf32": 8, "f8f6f4": 32, "i8": 32}[kind]
    return Instruction(m=m, n=n, k=depth, a_format=FORMATS.index(a), b_format=FORMATS.index(b), **changes)


@pytest.mark.parametrize(
    ("kind", "group", "given", "bits"),
    [
        ("f16", 1, instruction(), 1 << 4 | 1 << 7 | 1 << 10 | 16 << 17 | 8 << 24),
        ("f16", 1, instruction(a="f16", b="f16", m=64, n=8, accumulate_f16=1), 1 << 17 | 4 << 24),
        ("f16", 2, instruction(m=256, n=256, b_major=1), 1 << 4 | 1 << 7 | 1 << 10 | 1 << 16 | 32 << 17 | 16 << 24),
        (
            "tf32",
            1,
            instruction("tf32", a="tf32", b="tf32", negate_a=1),
            1 << 4 | 2 << 7 | 2 << 10 | 1 << 13 | 16 << 17 | 8 << 24,
        ),
        (
            "f8f6f4",
            2,
            instruction("f8f6f4", a="e4m3", b="e5m2", a_major=1),
            1 << 4 | 1 << 10 | 1 << 15 | 16 << 17 | 8 << 24,
        ),
        (
            *("i8", 1),
            instruction("i8", a="e4m3", b="e4m3", a_signed=1, saturate_s32=1),
            1 << 3 | 2 << 4 | 1 << 7 | 16 << 17 | 8 << 24,
        ),
    ],
)
def test_instruction_descriptors(units, kind, group, given, bits):
    assert units.call("units_encode_instruction", "pi", given, KINDS.index(kind), result=ctypes.c_uint32) == bits
    decoded = Instruction()
    assert units.fails("units_decode_instruction", "uiip", bits, KINDS.index(kind), group, decoded) == ""
    assert fields(decoded) == fields(given)


@pytest.mark.parametrize(
    ("kind", "group", "bits", "part"),
    [
        ("f16", 1, 1 << 4 | 16 << 17 | 8 << 24 | 4, "sparse"),
        ("f16", 1, 1 << 4 | 2 << 7 | 16 << 17 | 8 << 24, "element codes 2 and 0"),
        ("f16", 1, 2 << 4 | 16 << 17 | 8 << 24, "accumulator code 2"),
        ("f16", 1, 0 << 4 | 1 << 7 | 1 << 10 | 16 << 17 | 8 << 24, "accumulator code 0"),
        ("f16", 1, 1 << 4 | 16 << 17 | 16 << 24, "M 256; accepted with cta_group::1 are 64 and 128."),
        ("f16", 2, 1 << 4 | 16 << 17 | 4 << 24, "M 64; accepted with cta_group::2 are 128 and 256."),
        ("f16", 2, 1 << 4 | 1 << 17 | 8 << 24, "N 8; accepted are multiples of 16 up to 256."),
        ("f8f6f4", 1, 1 << 4 | 1 << 16 | 1 << 17 | 8 << 24, "N 8; accepted are multiples of 16 up to 256."),
        ("i8", 2, 2 << 4 | 2 << 17 | 8 << 24, "N 16; accepted are multiples of 32 up to 256."),
        ("f16", 1, 1 << 4 | 34 << 17 | 8 << 24, "N 272"),
        ("f16", 1, 1 << 4 | 16 << 17 | 8 << 24 | 1 << 23, "reserved"),
        ("f8f6f4", 1, 1 << 4 | 5 << 7 | 16 << 17 | 8 << 24, "element codes 5 and 0"),
        ("i8", 1, 2 << 4 | 16 << 17 | 8 << 24 | 1 << 13, "negates an integer operand"),
    ],
)
def test_malformed_instruction_descriptors(units, kind, group, bits, part):
    assert part in units.fails("units_decode_instruction", "uiip", bits, KINDS.index(kind), group, Instruction())


# --------------------------------------------------------------------------------------------------------- operands


def store(shared: np.ndarray, address: int, swizzle: str, value: np.ndarray) -> None:
    data = np.atleast_1d(value).view(np.uint8)
    for byte in range(data.size):
        shared[place(address + byte, swizzle)] = data[byte]


def lay_out(matrix: np.ndarray, start: int, swizzle: str, major: str, leading: int, stride: int) -> np.ndarray:
    """Puts matrix[rows, k] into 64 KiB of shared memory, element by element, by the canonical layouts of PTX."""
    shared = np.full(1 << 16, 0xAA, np.uint8)
    size = matrix.itemsize
    width = WIDTHS[swizzle]
    for row in range(matrix.shape[0]):
        for k in range(matrix.shape[1]):
            if major == "k" and swizzle == "none":
                at = row // 8 * stride + row % 8 * 16 + k * size // 16 * leading + k * size % 16
            elif major == "k":
                at = row // 8 * stride + row % 8 * width + k * size
            elif swizzle == "none":
                at = row * size // 16 * stride + row * size % 16 + k // 8 * leading + k % 8 * 16
            else:
                per = 4 if swizzle == "128_atom32" else 8
                at = row * size // width * leading + row * size % width + k // per * stride + k % per * width
            store(shared, start + at, swizzle, matrix[row, k])
    return shared


LAYOUTS = [
    ("bf16", "k", "128", 16, 1024),
    ("bf16", "k", "64", 16, 512),
    ("f16", "k", "32", 16, 256),
    ("f16", "k", "none", 2048, 128),
    ("tf32", "k", "128", 16, 1024),
    ("e4m3", "k", "128", 16, 1024),
    ("e5m2", "k", "64", 16, 512),
    ("bf16", "mn", "128", 8192, 1024),
    ("bf16", "mn", "64", 4096, 512),
    ("bf16", "mn", "32", 2048, 256),
    ("f16", "mn", "none", 2048, 128),
    ("tf32", "mn", "128_atom32", 8192, 512),
    ("e4m3", "mn", "128", 8192, 1024),
]


@pytest.mark.parametrize(("form", "major", "swizzle", "leading", "stride"), LAYOUTS)
def test_operands_are_gathered_from_every_layout(units, form, major, swizzle, leading, stride):
    rows, depth = 64, 32 // np.dtype(DTYPES[form]).itemsize
    matrix = integers((rows, depth), 1, DTYPES[form])
    start = 0x2000
    shared = lay_out(matrix, start, swizzle, major, leading, stride)
    given = operand(form, rows, depth, start, leading, stride, swizzle, major)
    assert units.fails("units_check_operand", "p", given) == ""
    expected = matrix.astype(np.float32)
    for negate in (0, 1):
        plain, transposed = np.zeros((rows, depth + 3), np.float32), np.zeros((depth, rows + 8), np.float32)
        units.call("units_gather", "ppiipq", given, shared, negate, 0, plain, depth + 3, result=None)
        units.call("units_gather", "ppiipq", given, shared, negate, 1, transposed, rows + 8, result=None)
        assert np.array_equal(plain[:, :depth], -expected if negate else expected)
        assert np.array_equal(transposed[:, :rows].T, -expected if negate else expected)
        assert not plain[:, depth:].any()
    addresses = np.zeros(1024, np.uint32)
    count = units.call("units_walk_operand", "pp", given, addresses)
    assert count == matrix.nbytes // 16
    touched = (addresses[:count, None] + np.arange(16)).ravel()
    assert np.unique(touched).size == matrix.nbytes
    assert np.all(addresses[:count] % 16 == 0)
    untouched = np.delete(shared, touched)
    assert np.all(untouched == 0xAA)


def test_stepping_k_inside_a_swizzle_atom(units):
    """The second instruction of a 64-wide tile starts 32 bytes on; the offset is added before swizzling."""
    matrix = integers((128, 64), 2, ml_dtypes.bfloat16)
    shared = lay_out(matrix, 0x400, "128", "k", 16, 1024)
    for step in range(4):
        out = np.zeros((128, 16), np.float32)
        given = operand("bf16", 128, 16, 0x400 + 32 * step, 16, 1024)
        units.call("units_gather", "ppiipq", given, shared, 0, 0, out, 16, result=None)
        assert np.array_equal(out, matrix[:, 16 * step : 16 * step + 16].astype(np.float32))


def test_tf32_drops_low_bits_and_f32_keeps_them(units):
    matrix = np.full((8, 8), 1 + 2**-20, np.float32)
    shared = lay_out(matrix, 0, "32", "k", 16, 256)
    for form, expected in (("tf32", 1.0), ("f32", 1 + 2**-20)):
        out = np.zeros((8, 8), np.float32)
        units.call("units_gather", "ppiipq", operand(form, 8, 8, 0, 16, 256, "32"), shared, 0, 0, out, 8, result=None)
        assert np.all(out == np.float32(expected))


def test_byte_integers(units):
    for is_signed, dtype in ((1, np.int8), (0, np.uint8)):
        matrix = np.random.default_rng(3).integers(0, 256, (32, 32), dtype=np.uint8).view(dtype)
        for major, leading, stride in (("k", 16, 1024), ("mn", 8192, 1024)):
            shared = lay_out(matrix, 0, "128", major, leading, stride)
            out = np.zeros((32, 32), np.int32)
            given = operand("e4m3", 32, 32, 0, leading, stride, "128", major)
            units.call("units_gather_s32", "ppipq", given, shared, is_signed, out, 32, result=None)
            assert np.array_equal(out, matrix)


def test_what_cannot_be_gathered(units):
    assert "32-byte atoms" in units.fails("units_check_operand", "p", operand("tf32", 64, 8, 0, 0, 0, "128", "mn"))
    unknown = Operand(0, 0, 0, 0, 0, 6, 64, 32)
    assert "4- or 6-bit" in units.fails("units_check_operand", "p", unknown)


def test_what_tma_stores_the_tensor_core_reads(units):
    """One 128 x 128 bf16 tile is two boxes of 64 columns; read K-major, and as V is read, MN-major."""
    matrix = integers((128, 128), 4, ml_dtypes.bfloat16)
    box = tensor_map("bf16", 0, [128, 128], [256], [64, 128], swizzle="128")
    shared = np.zeros(1 << 16, np.uint8)
    for half in (0, 1):
        at = np.array([64 * half, 0], np.int32)
        units.call("units_load_box", "ppupqp", box, at, 0x4000 * half, matrix, 0, shared, result=None)
    wide = matrix.astype(np.float32)
    for step in range(8):
        out = np.zeros((128, 16), np.float32)
        given = operand("bf16", 128, 16, step // 4 * 0x4000 + step % 4 * 32, 16, 1024)
        units.call("units_gather", "ppiipq", given, shared, 0, 0, out, 16, result=None)
        assert np.array_equal(out, wide[:, 16 * step : 16 * step + 16])
        given = operand("bf16", 128, 16, step * 2048, 0x4000, 1024, "128", "mn")
        units.call("units_gather", "ppiipq", given, shared, 0, 0, out, 16, result=None)
        assert np.array_equal(out, wide[16 * step : 16 * step + 16].T)


# --------------------------------------------------------------------------------------------------- tensor memory


def lanes_and_columns(m: int, n: int, group: int, row: int) -> list[tuple[int, slice]]:
    """Where row `row` of one CTA's part of D lies: (lane, columns of D) pairs, by the data path layouts of PTX."""
    if group == 1 and m == 64:
        return [(row // 16 * 32 + row % 16, slice(0, n))]
    if group == 2 and m == 128:
        return [(row, slice(0, n // 2)), (row + 64, slice(n // 2, n))]
    return [(row, slice(0, n))]


def multiply(
    units, given, memory, a, b, *, kind="f16", group=1, accumulate=0, scale=0, lane=0, column=0, disabled=None, blocks=1
):
    return units.fails(
        "units_multiply_tensor",
        "piiiiuuppipp",
        *(given, KINDS.index(kind), group, accumulate, scale, lane, column, disabled, a, blocks, b, memory),
    )


@pytest.mark.parametrize(
    ("group", "m", "n"),
    [(1, 128, 128), (1, 128, 256), (1, 128, 16), (1, 64, 8), (1, 64, 72), (2, 256, 96), (2, 128, 64)],
)
def test_products_lie_where_ptx_says(units, group, m, n):
    given = instruction(m=m, n=n)
    rows = m // group
    a, b = integers((m, 16), 5), integers((16, n), 6)
    old = integers((128, 512), 7)
    for cta in range(group):
        part = np.ascontiguousarray(a[cta * rows : (cta + 1) * rows])
        for accumulate in (0, 1):
            memory = old.copy()
            assert multiply(units, given, memory, part, b, group=group, accumulate=accumulate, column=32) == ""
            expected = old.copy()
            for row in range(rows):
                for lane, columns in lanes_and_columns(m, n, group, row):
                    width = columns.stop - columns.start
                    product = (part[row] @ b)[columns]
                    expected[lane, 32 : 32 + width] = product + accumulate * old[lane, 32 : 32 + width]
            assert np.array_equal(memory, expected)


def test_accumulation_is_in_order_of_k_with_fused_multiply_add(units):
    rng = np.random.default_rng(8)
    a, b = rng.normal(size=(128, 16)).astype(np.float32), rng.normal(size=(16, 64)).astype(np.float32)
    memory = rng.normal(size=(128, 512)).astype(np.float32)
    expected = memory[:, :64].astype(np.float64)
    for k in range(16):
        # A product of two f32 is exact in f64; the sum rounds to f32 each time.
        expected = (expected + a[:, k, None].astype(np.float64) * b[k]).astype(np.float32).astype(np.float64)
    assert multiply(units, instruction(n=64), memory, a, b, accumulate=1) == ""
    assert np.mean(memory[:, :64] == expected) > 0.9999


def test_scale_disabled_lanes_and_f16_sums(units):
    a, b = integers((128, 16), 9), integers((16, 32), 10)
    old = integers((128, 512), 11)
    memory = old.copy()
    disabled = np.array([0x0000FFFF, 0, 0x80000000, 0], np.uint32)
    assert multiply(units, instruction(n=32), memory, a, b, accumulate=1, scale=2, disabled=disabled) == ""
    expected = old.copy()
    expected[:, :32] = old[:, :32] / 4 + a @ b
    expected[[*range(16), 95]] = old[[*range(16), 95]]
    assert np.array_equal(memory, expected)

    halves = np.zeros((128, 512), np.uint32)
    halves[:, :32] = integers((128, 32), 12, np.float16).view(np.uint16)
    start = halves[:, :32].astype(np.uint16).view(np.float16).astype(np.float32)
    given = instruction(n=32, a="f16", b="f16", accumulate_f16=1)
    assert multiply(units, given, halves, a + np.float32(2**-12), b, accumulate=1) == ""
    expected_halves = ((a + np.float32(2**-12)).astype(np.float64) @ b + start).astype(np.float16)
    assert np.array_equal(halves[:, :32].astype(np.uint16).view(np.float16), expected_halves)
    assert not halves[:, 32:].any()


def test_accumulators_stay_inside_tensor_memory(units):
    a, b, memory = integers((128, 16), 1), integers((16, 128), 2), np.zeros((128, 512), np.float32)
    assert "beyond 512" in multiply(units, instruction(), memory, a, b, column=400)
    assert "lane 16; accepted is 0." in multiply(units, instruction(), memory, a, b, lane=16)
    assert "lane 32; accepted are 0 and 16." in multiply(units, instruction(m=64), memory, a, b, lane=32)
    assert multiply(units, instruction(m=64), memory, a[:64].copy(), b, lane=16) == ""
    assert np.array_equal(memory[16:32, :128], a[:16] @ b)
    assert not memory[:16].any()


@pytest.mark.parametrize(
    ("kind", "form", "group", "m"),
    [
        ("f16", "bf16", 1, 128),
        ("f16", "f16", 1, 64),
        ("f16", "bf16", 2, 256),
        ("f16", "bf16", 2, 128),
        ("tf32", "tf32", 1, 128),
        ("f8f6f4", "e4m3", 1, 128),
    ],
)
def test_a_from_tensor_memory(units, kind, form, group, m):
    given = instruction(kind, m=m, a=form, b=form, negate_a=1)
    rows = m // group
    matrix = integers((rows, given.k), 13, DTYPES[form])
    packed = matrix.view(np.uint32)
    memory = np.full((128, 512), 0xFFFFFFFF, np.uint32)
    for row in range(rows):
        for lane, _ in lanes_and_columns(m, 16, group, row):
            memory[lane, 40 : 40 + packed.shape[1]] = packed[row]
    for block in range(2 if group == 2 and m == 128 else 1):
        out = np.zeros((rows, given.k), np.float32)
        units.call("units_gather_a_tensor", "piiuupp", given, group, block, 0, 40, memory, out, result=None)
        assert np.array_equal(out, -matrix.astype(np.float32))


def test_integer_products(units):
    a = np.random.default_rng(14).integers(-128, 128, (128, 32)).astype(np.int32)
    b = np.random.default_rng(15).integers(0, 256, (32, 64)).astype(np.int32)
    given = instruction("i8", n=64, a="e4m3", b="e4m3", a_signed=1, saturate_s32=1)
    memory = np.zeros((128, 512), np.int32)
    memory[0, :64] = 2**31 - 1
    memory[1, :64] = -(2**31)
    old = memory.copy()
    units.call("units_multiply_tensor_s32", "piippp", given, 1, 1, a, b, memory, result=None)
    exact = old[:, :64].astype(np.int64) + a @ b
    assert np.array_equal(memory[:, :64], np.clip(exact, -(2**31), 2**31 - 1))


# ------------------------------------------------------------------------------------------------------- registers


def wgmma_fragment(values: np.ndarray) -> np.ndarray:
    """Registers [n / 2, 32] of one warp's 16 x n accumulator, by the figure of PTX for wgmma D."""
    n = values.shape[1]
    registers = np.zeros((n // 2, 32), np.float32)
    for lane in range(32):
        for j in range(n // 8):
            for i in range(4):
                registers[4 * j + i, lane] = values[lane // 4 + 8 * (i // 2), 8 * j + 2 * (lane % 4) + i % 2]
    return registers


@pytest.mark.parametrize("n", [8, 80, 256])
def test_wgmma_accumulators(units, n):
    a, b, old = integers((16, 16), 16), integers((16, n), 17), integers((16, n), 18)
    for accumulate in (0, 1):
        registers = wgmma_fragment(old)
        units.call("units_wgmma", "iiiippp", n, 16, accumulate, 0, a, b, registers, result=None)
        assert np.array_equal(registers, wgmma_fragment(a @ b + accumulate * old))
    halves = wgmma_fragment(old)
    packed = np.zeros((n // 2, 32), np.uint32)
    for i in range(n // 4):
        low, high = (halves[2 * i + j].astype(np.float16).view(np.uint16).astype(np.uint32) for j in (0, 1))
        packed[i] = low | high << 16
    units.call("units_wgmma", "iiiippp", n, 16, 1, 1, a, b, packed, result=None)
    expected = wgmma_fragment(a @ b + old)
    for i in range(n // 4):
        for j in (0, 1):
            got = (packed[i] >> (16 * j) & 0xFFFF).astype(np.uint16).view(np.float16)
            assert np.array_equal(got, expected[2 * i + j].astype(np.float16))


def a_fragment(matrix: np.ndarray) -> np.ndarray:
    """Registers of A of m16n8k*, by the figures of PTX: four lanes own a row, registers alternate rows r and r + 8."""
    per = 4 // matrix.itemsize
    registers = np.zeros((matrix.shape[1] * matrix.itemsize // 8, 32, per), matrix.dtype)
    for lane in range(32):
        for i in range(registers.shape[0]):
            k = (i // 2) * 4 * per + lane % 4 * per
            registers[i, lane] = matrix[lane // 4 + 8 * (i % 2), k : k + per]
    return registers.view(np.uint32)[..., 0]


def b_fragment(matrix: np.ndarray) -> np.ndarray:
    """Registers of B (k x 8)."""
    per = 4 // matrix.itemsize
    registers = np.zeros((matrix.shape[0] * matrix.itemsize // 16, 32, per), matrix.dtype)
    for lane in range(32):
        for i in range(registers.shape[0]):
            k = i * 4 * per + lane % 4 * per
            registers[i, lane] = matrix[k : k + per, lane // 4]
    return registers.view(np.uint32)[..., 0]


@pytest.mark.parametrize("form", list(DTYPES))
def test_a_from_registers(units, form):
    matrix = integers((16, 32 // np.dtype(DTYPES[form]).itemsize), 19, DTYPES[form])
    registers = np.ascontiguousarray(a_fragment(matrix))
    for negate in (0, 1):
        out = np.zeros(matrix.shape, np.float32)
        units.call("units_gather_a_registers", "ipip", FORMATS.index(form), registers, negate, out, result=None)
        assert np.array_equal(out, matrix.astype(np.float32) * (-1 if negate else 1))


@pytest.mark.parametrize(
    ("a_form", "b_form", "k"),
    [
        ("f16", "f16", 8),
        ("f16", "f16", 16),
        ("bf16", "bf16", 16),
        ("tf32", "tf32", 4),
        ("tf32", "tf32", 8),
        ("e4m3", "e5m2", 32),
    ],
)
def test_mma_sync(units, a_form, b_form, k):
    a, b, c = integers((16, k), 20, DTYPES[a_form]), integers((k, 8), 21, DTYPES[b_form]), integers((16, 8), 22)
    a_registers, b_registers = np.ascontiguousarray(a_fragment(a)), np.ascontiguousarray(b_fragment(b))
    d = np.zeros((4, 32), np.float32)
    units.call(
        *(
            "units_mma_sync",
            "iiipippp",
            FORMATS.index(a_form),
            FORMATS.index(b_form),
            k,
            a_registers,
            a_registers.shape[0],
        ),
        *(b_registers, wgmma_fragment(c), d),
        result=None,
    )
    assert np.array_equal(d, wgmma_fragment(a.astype(np.float32) @ b.astype(np.float32) + c))
