"""Tensor-memory accesses, tcgen05.cp and 8 x 8 matrix fragments."""

from __future__ import annotations

import numpy as np
import pytest

from tests.emulator.units.structures import operand
from tests.emulator.units.test_tma import place

SHAPES = ["32x32b", "16x64b", "16x128b", "16x256b", "16x32bx2"]
COPIES = ["128x256b", "128x128b", "4x256b", "64x128b.02_13", "64x128b.01_23", "32x128b.x4"]


def cell(shape: str, thread: int, register: int) -> tuple[int, int]:
    """(lane, column) of a register, from the figures of PTX "tcgen05.ld / st": by shape, for any repeat."""
    return {
        "32x32b": (thread, register),
        "16x64b": (thread // 4 + 8 * (thread % 2), 2 * register + thread // 2 % 2),
        "16x128b": (thread // 4 + 8 * (register % 2), 4 * (register // 2) + thread % 4),
        "16x256b": (thread // 4 + 8 * (register // 2 % 2), 8 * (register // 4) + 2 * (thread % 4) + register % 2),
        "16x32bx2": (thread % 16, register),
    }[shape]


def access(units, shape, registers, pack, split, address, warp, store, memory, words):
    arguments = (SHAPES.index(shape), registers, int(pack), split, address, warp, int(store), memory, words)
    return units.fails("units_tensor_access", "iiiiuiipp", *arguments)


CASES = [(shape, count, pack) for shape in SHAPES for count in (1, 2, 4, 16) for pack in (False, True)] + [
    ("32x32b", 128, False),
    ("16x256b", 128, False),
    ("16x64b", 64, True),
]


@pytest.mark.parametrize(("shape", "count", "pack"), CASES)
def test_loads_and_stores(units, shape, count, pack):
    registers = max(count, {"16x128b": 2, "16x256b": 4}.get(shape, 1))
    split = 100 if shape == "16x32bx2" else 0
    lane0, column0 = 64 if shape == "32x32b" else 80, 8
    memory = np.arange(128 * 512, dtype=np.uint32).reshape(128, 512) * np.uint32(2654435761)
    expected = np.zeros((registers, 32), np.uint32)
    cells = set()
    for thread in range(32):
        for register in range(registers):
            lane, column = cell(shape, thread, register)
            shift = split if thread >= 16 else 0
            if pack:
                low, high = memory[lane0 + lane, column0 + shift + 2 * column + np.arange(2)]
                expected[register, thread] = (low & 0xFFFF) | (high << np.uint32(16))
                cells |= {(lane0 + lane, column0 + shift + 2 * column + i) for i in range(2)}
            else:
                expected[register, thread] = memory[lane0 + lane, column0 + shift + column]
                cells.add((lane0 + lane, column0 + shift + column))
    words = np.zeros((registers, 32), np.uint32)
    address = lane0 << 16 | column0
    assert access(units, shape, registers, pack, split, address, 6, False, memory, words) == ""
    assert np.array_equal(words, expected)

    written = np.zeros((128, 512), np.uint32)
    assert access(units, shape, registers, pack, split, address, 6, True, written, words) == ""
    back = np.zeros((registers, 32), np.uint32)
    assert access(units, shape, registers, pack, split, address, 6, False, written, back) == ""
    assert np.array_equal(back, words)
    touched = np.zeros((registers * 64, 2), np.int32)
    total = units.call(
        "units_walk_tensor", "iiiiup", SHAPES.index(shape), registers, int(pack), split, address, touched
    )
    assert total == len(cells)
    assert {tuple(pair) for pair in touched[:total].tolist()} == cells
    columns = units.call("units_tensor_columns", "iii", SHAPES.index(shape), registers, int(pack))
    assert columns * (32 if shape in ("32x32b", "16x32bx2") else 16) == len(cells)


def test_a_warp_keeps_to_its_lanes_and_columns(units):
    memory, words = np.zeros((128, 512), np.uint32), np.zeros((128, 32), np.uint32)

    def check(shape, registers, address, warp, split=0):
        return access(units, shape, registers, False, split, address, warp, False, memory, words)

    sentence = "Warp 5 accesses tensor-memory lanes 0 to 31; it may access lanes 32 to 63 only."
    assert check("32x32b", 8, 0, 5) == sentence
    assert check("32x32b", 8, 32 << 16, 5) == ""
    assert "in halves of 16." in check("16x256b", 8, 40 << 16, 5)
    assert check("16x256b", 8, 48 << 16, 5) == ""
    assert "columns 500 to 515 goes beyond column 511." in check("32x32b", 16, 500, 0)
    assert "goes beyond" in check("16x32bx2", 16, 300, 0, 200)


@pytest.mark.parametrize("shape", COPIES)
@pytest.mark.parametrize("swizzle", ["none", "32", "128"])
def test_copies_from_shared_memory(units, shape, swizzle):
    given = operand("f32", 0, 0, 0x800, 4096, {"none": 128, "32": 256, "128": 1024}[swizzle], swizzle)
    pieces = np.zeros((512, 3), np.int32)
    count = units.call("units_walk_copy", "ipp", COPIES.index(shape), given, pieces)
    rows, columns = {"128x256b": (128, 2), "128x128b": (128, 1), "4x256b": (4, 2), "32x128b.x4": (32, 1)}.get(
        shape, (64, 1)
    )
    expected = set()
    for row in range(rows):
        lanes = {
            "4x256b": [32 * row],
            "64x128b.02_13": [row, row + 64],
            "64x128b.01_23": [row % 32 + 64 * (row // 32), row % 32 + 64 * (row // 32) + 32],
            "32x128b.x4": [row, row + 32, row + 64, row + 96],
        }.get(shape, [row])
        for piece in range(columns):
            pitch = {"none": 16, "32": 32, "128": 128}[swizzle]
            at = 0x800 + row // 8 * given.stride_bytes + row % 8 * pitch + piece * (4096 if swizzle == "none" else 16)
            expected |= {(place(at, swizzle), lane, 4 * piece) for lane in lanes}
    assert {tuple(piece) for piece in pieces[:count].tolist()} == expected
    assert count == len(expected)


def test_matrix_fragments(units):
    rows = np.arange(64, dtype=np.uint16).reshape(8, 8)
    for transpose, matrix in ((0, rows), (1, rows.T)):
        registers = np.zeros(32, np.uint32)
        units.call("units_load_matrix", "pip", rows, transpose, registers, result=None)
        halves = registers.view(np.uint16).reshape(8, 8)  # thread t holds row t / 4, elements 2 (t mod 4) and the next
        assert np.array_equal(halves, matrix)
        back = np.zeros((8, 8), np.uint16)
        units.call("units_store_matrix", "pip", back, transpose, registers, result=None)
        assert np.array_equal(back, rows)
    moved, registers = np.zeros(32, np.uint32), np.ascontiguousarray(rows).view(np.uint32).ravel().copy()
    units.call("units_transpose_matrix", "pp", moved, registers, result=None)
    assert np.array_equal(moved.view(np.uint16).reshape(8, 8), rows.T)


def test_byte_matrices_store_transposed(units):
    """A 16 x 8 matrix of bytes, stored as the rows of its transpose."""
    matrix = np.arange(128, dtype=np.uint8).reshape(16, 8)
    registers = np.zeros((32, 4), np.uint8)
    for thread in range(32):
        for i in range(4):
            registers[thread, i] = matrix[thread // 4 + 8 * (i // 2), 2 * (thread % 4) + i % 2]
    rows = np.zeros((8, 16), np.uint8)
    units.call(
        "units_store_matrix_b8", "pp", rows, np.ascontiguousarray(registers).view(np.uint32).ravel(), result=None
    )
    assert np.array_equal(rows, matrix.T)
