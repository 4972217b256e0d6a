"""Tiles of a tensor and of shared memory as the DSL's copies by the TMA unit take them; `boxes.py` writes the copies of
boxes out instead."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync


def copied_tiles(
    tensor_map: cute.CopyAtom, buffer: cute.Tensor, rows: int, head: Int32, batch: Int32
) -> tuple[Any, Any]:
    """Shared-memory stages, and tiles of one head as coordinates (head_dim, row, head, batch), as a copy takes them.

    The coordinates' extents are beyond any problem's: bounds are the tensor map's affair, which fills with zeros.
    """
    head_dim = cute.size(buffer, mode=[1])
    everything = cute.make_identity_tensor((head_dim, 1 << 30, 1 << 20, 1 << 20))
    by_row = cute.make_tensor(everything.iterator, cute.select(everything.layout, mode=[1, 0, 2, 3]))
    tiles = cute.local_tile(by_row[None, None, head, batch], (rows, head_dim), (None, 0))
    stages, boxes = cute.group_modes(buffer, 0, 2), cute.group_modes(tiles, 0, 2)
    partition: tuple[Any, Any] = cpasync.tma_partition(tensor_map, 0, cute.make_layout(1), stages, boxes)
    return partition
