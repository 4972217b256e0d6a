"""Runs a text of the small kernels on the emulator and says what came of it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import ModuleType

import ml_dtypes
import numpy as np

from jax_fa4 import emulator
from tests.emulator.device import Buffer, DriverError, Kernel, check

FLOAT32, BFLOAT16 = 7, 9  # CUtensorMapDataType
SWIZZLE_128B = 3
# Phases of every barrier complete several times, so surplus arrivals add up to a phase; rings wrap with an odd count.
TILES, BLOCKS, CTAS = 5, 5, 2


def tensor_map(buffer: Buffer, element: int, box: Sequence[int]) -> bytes:
    """A map of a two-dimensional row-major array, 128-byte swizzle."""
    rows, columns = buffer.shape
    words = (ctypes.c_uint64 * 16)()
    extents = (ctypes.c_uint64 * 2)(columns, rows)
    strides = (ctypes.c_uint64 * 1)(columns * buffer.dtype.itemsize)
    boxes, steps = (ctypes.c_uint32 * 2)(*box), (ctypes.c_uint32 * 2)(1, 1)
    address = ctypes.c_void_p(buffer.address)
    check(
        emulator.driver().cuTensorMapEncodeTiled(
            words, element, 2, address, extents, strides, boxes, steps, 0, SWIZZLE_128B, 0, 0
        )
    )
    return bytes(words)


class Problem:
    """Small integers, so that scores, their bf16 roundings and outputs are exact in any order of addition."""

    def __init__(self, kernel: ModuleType):
        self.kernel = kernel
        rng = np.random.default_rng(0)
        rows, keys = kernel.TILE_ROWS * TILES * CTAS, kernel.BLOCK_KEYS * BLOCKS
        arrays = [rng.integers(-2, 3, (n, kernel.HEAD_DIM)).astype(ml_dtypes.bfloat16) for n in (rows, keys, keys)]
        self.buffers = [Buffer(array) for array in arrays]
        query, key, value = (array.astype(np.float32) for array in arrays)
        self.expected = (query @ key.T).astype(ml_dtypes.bfloat16).astype(np.float32) @ value
        boxes = [(kernel.HEAD_DIM, kernel.TILE_ROWS), *[(kernel.HEAD_DIM, kernel.BLOCK_KEYS)] * 2]
        self.maps = [tensor_map(b, BFLOAT16, box) for b, box in zip(self.buffers, boxes, strict=True)]

    def outcome(self, text: str, seed: int) -> str:
        """Empty if the output is right and nothing was reported; else what went wrong."""
        emulator.set_options(seed=seed)
        out = Buffer(np.full(self.expected.shape, np.nan, np.float32))
        out_map = tensor_map(out, FLOAT32, (32, self.kernel.TILE_ROWS))
        try:
            kernel = Kernel(text, self.kernel.ENTRY)
            kernel(
                (CTAS,),
                (self.kernel.THREADS,),
                *(*self.maps, out_map, TILES, BLOCKS),
                shared=self.kernel.SHARED_BYTES,
            )
        except DriverError as error:
            return str(error)
        return "" if np.array_equal(out.get(), self.expected) else "wrong output"

    def caught(self, text: str, seeds: int) -> str:
        """What the first of the seeds that notices something says; empty if none does."""
        return next(filter(None, (self.outcome(text, seed) for seed in range(seeds))), "")
