"""TMA boxes against an element-by-element model; reductions against NumPy."""

from __future__ import annotations

import ctypes
import itertools

import ml_dtypes
import numpy as np
import pytest

from tests.emulator.units.structures import ELEMENTS, SWIZZLES, tensor_map


def place(linear: int, swizzle: str) -> int:
    """The swizzled address as PTX words it: atoms exchange places by the index of their 128-byte line."""
    line, within = divmod(linear, 128)
    if swizzle == "none":
        return linear
    if swizzle in ("32", "64", "128"):
        atoms = int(swizzle) // 16
        atom, byte = divmod(within, 16)
        return line * 128 + ((atom // atoms) * atoms + (atom % atoms ^ line % atoms)) * 16 + byte
    if swizzle == "128_atom64":
        return line * 128 + (within // 64 ^ line % 2) * 64 + within % 64
    address = line * 128 + (within // 32 ^ line % 4) * 32 + within % 32
    return address ^ (8 if swizzle == "128_atom32_flip8" and line % 2 else 0)


@pytest.mark.parametrize("swizzle", SWIZZLES)
def test_swizzle_is_a_permutation_by_lines(units, swizzle):
    for address in range(0, 4096, 4):
        got = units.call("units_swizzle", "ui", address, SWIZZLES.index(swizzle), result=ctypes.c_uint32)
        assert got == place(address, swizzle)


def model_load(box_map, coordinates, shared_address, memory, fill_bytes):
    """Every byte of the box, one element at a time."""
    size = box_map.stride[0]
    counts = [box_map.box[0]] + [-(-box_map.box[d] // box_map.element_stride[d]) for d in range(1, box_map.rank)]
    shared = {}
    linear = shared_address
    for index in itertools.product(*(range(n) for n in reversed(counts))):
        index = index[::-1]
        at = [coordinates[d] + index[d] * (box_map.element_stride[d] if d else 1) for d in range(box_map.rank)]
        inside = all(0 <= at[d] < box_map.extent[d] for d in range(box_map.rank))
        offset = sum(at[d] * box_map.stride[d] for d in range(box_map.rank))
        for byte in range(size):
            value = memory[offset + byte] if inside else fill_bytes[byte]
            shared[place(linear + byte, SWIZZLES[box_map.swizzle])] = int(value)
        linear += size
    return shared


CASES = [
    ("bf16", [70, 9], [144], [64, 8], None, "128", [0, 0]),
    ("bf16", [70, 9], [144], [64, 8], None, "128", [-3, 4]),
    ("bf16", [70, 9], [144], [64, 8], None, "128", [13, -2]),
    ("bf16", [70, 9], [144], [64, 8], None, "128", [70, 0]),
    ("f32", [13], [], [8], None, "32", [9]),
    ("f16", [40, 5, 4], [96, 480], [32, 3, 2], None, "64", [20, 3, 3]),
    ("u8", [33, 7], [48], [32, 8], None, "32", [4, 2]),
    ("f32", [33, 7], [144], [32, 4], None, "128_atom32", [4, 2]),
    ("f32", [33, 7], [144], [32, 4], None, "128_atom32_flip8", [4, 5]),
    ("f32", [33, 7], [144], [32, 4], None, "128_atom64", [4, 5]),
    ("bf16", [16, 4, 3, 3, 2], [32, 128, 384, 1152], [8, 2, 2, 3, 2], None, "none", [10, 3, 1, -1, 0]),
    ("bf16", [16, 11], [32], [16, 8], [1, 3], "32", [4, 1]),
    ("f64", [6, 4], [48], [4, 4], None, "none", [-1, 1]),
]


# Each with zero fill, and with NaN fill where the element has a NaN.
FILLED = [(*case, fill) for case in CASES for fill in (0, 1) if not (fill and case[0] == "u8")]


@pytest.mark.parametrize(("element", "extent", "strides", "box", "steps", "swizzle", "coordinates", "fill"), FILLED)
def test_box_load(units, element, extent, strides, box, steps, swizzle, coordinates, fill):
    base, shared_address = 1 << 20, 0x480
    given = tensor_map(element, base, extent, strides, box, steps, swizzle, fill=fill)
    assert units.fails("units_check_tile_copy", "piu", given, len(extent), shared_address) == ""
    memory = np.random.default_rng(1).integers(0, 256, strides[-1] * extent[-1] if strides else 64, dtype=np.uint8)
    at = np.array(coordinates, np.int32)
    shared = np.full(1 << 14, 0xEE, np.uint8)
    units.call("units_load_box", "ppupqp", given, at, shared_address, memory, base, shared, result=None)
    size = given.stride[0]
    fill_bytes = [0] * size if not fill else [0xFF] * (size - 1) + [0x7F]
    expected = np.full(1 << 14, 0xEE, np.uint8)
    model = model_load(given, coordinates, shared_address, memory, fill_bytes)
    for address, value in model.items():
        expected[address] = value
    assert np.array_equal(shared, expected)
    assert units.call("units_box_bytes", "p", given, result=ctypes.c_uint32) == len(model)


def test_runs_are_long_and_rows_bound_them(units):
    given = tensor_map("bf16", 0x10000, [128, 300], [256], [128, 4])
    runs = np.zeros((64, 4), np.uint64)
    count = units.call("units_walk_box", "ppup", given, np.array([64, 298], np.int32), 0x400, runs)
    # Half of each row is inside; the last two rows lie beyond the tensor.
    assert runs[:count].tolist() == [
        [0x10000 + 298 * 256 + 128, 0x400, 128, 1],
        [0, 0x480, 128, 0],
        [0x10000 + 299 * 256 + 128, 0x500, 128, 1],
        [0, 0x580, 128, 0],
        [0, 0x600, 256, 0],
        [0, 0x700, 256, 0],
    ]
    rows = np.zeros((8, 3), np.uint64)
    assert units.call("units_walk_rows", "ppup", given, np.array([64, 298], np.int32), 0x400, rows) == 4
    assert rows[:4, 1:].tolist() == [[128, 0x400], [128, 0x500], [0, 0x600], [0, 0x700]]
    assert rows[0, 0] == 0x10000 + 298 * 256 + 128


def test_addresses_beyond_32_bits(units):
    given = tensor_map("bf16", 0, [64, 1 << 31], [1 << 12], [64, 1], swizzle="128")
    runs = np.zeros((8, 4), np.uint64)
    assert units.call("units_walk_box", "ppup", given, np.array([0, (1 << 31) - 1], np.int32), 0, runs) == 8
    assert runs[0, 0] == ((1 << 31) - 1) << 12


def test_checks(units):
    given = tensor_map("bf16", 0, [64, 64], [128], [64, 8], swizzle="128")
    assert (
        units.fails("units_check_tile_copy", "piu", given, 3, 0)
        == "The instruction is 3D and its tensor map has rank 2."
    )
    sentence = "The shared address 1040 of a tensor copy is not a multiple of 128 bytes."
    assert units.fails("units_check_tile_copy", "piu", given, 2, 1040) == sentence
    given.box[0] = 128
    assert "wider than the swizzle" in units.fails("units_check_tile_copy", "piu", given, 2, 1024)


def test_loads_convert_tf32_and_flush(units):
    memory = np.array([1 + 2**-11, 1 + 3 * 2**-12, -1e-40, np.nan], np.float32)
    for element, expected in [
        ("tf32", np.array([1.0, 1 + 2**-10, -1e-40, np.nan], np.float32)),
        ("f32_ftz", np.array([1 + 2**-11, 1 + 3 * 2**-12, -0.0, np.nan], np.float32)),
        ("tf32_ftz", np.array([1.0, 1 + 2**-10, -0.0, np.nan], np.float32)),
    ]:
        shared = np.zeros(4, np.float32)
        given = tensor_map(element, 0, [4], [], [4])
        units.call("units_load_box", "ppupqp", given, np.zeros(1, np.int32), 0, memory, 0, shared, result=None)
        if element.startswith("tf32"):
            assert np.all(shared.view(np.uint32)[:3] & 0x1FFF == 0)
        assert np.allclose(shared, expected, rtol=0, atol=1e-41, equal_nan=True)
        assert np.signbit(shared[2])


INTEGER = {"u32": np.uint32, "s32": np.int32, "u64": np.uint64, "s64": np.int64}
FLOAT = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32, "f64": np.float64}
REDUCTIONS = ["add", "min", "max", "inc", "dec", "and", "or", "xor"]


def reduce(units, name, element, destination, source):
    result = destination.copy()
    sentence = units.fails(
        "units_reduce", "iippu", REDUCTIONS.index(name), ELEMENTS.index(element), result, source, source.nbytes
    )
    return sentence or result


@pytest.mark.parametrize("element", list(INTEGER))
def test_integer_reductions(units, element):
    rng = np.random.default_rng(3)
    old, new = (rng.integers(0, 256, 512, dtype=np.uint8).view(INTEGER[element]) for _ in range(2))
    functions = {
        "min": np.minimum,
        "max": np.maximum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }
    functions["add"] = lambda a, b: a + b
    for name, function in functions.items():
        assert np.array_equal(reduce(units, name, element, old, new), function(old, new)), name


def test_counters_wrap(units):
    old, limit = np.array([0, 5, 7, 9], np.uint32), np.array([7, 7, 7, 7], np.uint32)
    assert reduce(units, "inc", "u32", old, limit).tolist() == [1, 6, 0, 0]
    assert reduce(units, "dec", "u32", old, limit).tolist() == [7, 4, 6, 7]


@pytest.mark.parametrize("element", list(FLOAT))
def test_float_reductions(units, element):
    rng = np.random.default_rng(4)
    old, new = (rng.normal(0, 3, 300).astype(FLOAT[element]) for _ in range(2))
    assert np.array_equal(reduce(units, "add", element, old, new), (old + new).astype(FLOAT[element]))
    if element in ("f16", "bf16"):
        assert np.array_equal(reduce(units, "min", element, old, new), np.minimum(old, new))
        assert np.array_equal(reduce(units, "max", element, old, new), np.maximum(old, new))
    else:
        assert reduce(units, "min", element, old, new) == f"A bulk reduction .min of {element} does not exist."
    assert reduce(units, "xor", element, old, new) == f"A bulk reduction .xor of {element} does not exist."
