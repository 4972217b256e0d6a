"""Tensor maps: words known from the driver's encoder, and what is refused."""

from __future__ import annotations

import pytest

from jax_fa4.ffi import launch


def recipe(**changes: object) -> object:
    module = launch.native()
    fields: dict[str, object] = {
        "is_result": False,
        "buffer": 0,
        "element": module.ElementType.BFLOAT16,
        "extents": [0, 1, 2, 3],
        "strides": [4, 5, 6],
        "box": [64, 128, 1, 1],
        "swizzle": 3,
        "l2": 2,
    }
    return module.TensorMapRecipe(**{**fields, **changes})


def test_words_of_a_query_tile() -> None:
    # bfloat16 (batch 2, row 300, head 4, column 128), dimensions column, row, head, batch
    integers = [128, 300, 4, 2, 4 * 256, 256, 300 * 4 * 256]
    words = launch.native().tensor_map_words(recipe(), 0x7F00_1234_5600, integers)
    assert words[0] == 0x7F00_1234_5600
    # rank 4 -> 3 at bit 4, bfloat16 -> 10 at bit 7, 128-byte swizzle -> 3 at bit 13, L2 128 bytes -> 2 at bit 17
    assert words[1] & 0xFFFFFFFF == 3 << 4 | 10 << 7 | 3 << 13 | 2 << 17
    assert words[1] >> 32 == 4 * 256 // 16
    assert words[2] == 256 // 16 | (300 * 4 * 256 // 16) << 32
    assert words[3] == 0
    assert words[4] == 127 | 299 << 32
    assert words[5] == 3 | 1 << 32
    assert words[6] == 63 << 56
    assert words[7] == 127
    assert words[8:] == [0] * 8


def test_large_strides_keep_their_high_bits() -> None:
    stride = (1 << 39) + 16
    words = launch.native().tensor_map_words(recipe(extents=[0, 1], strides=[2], box=[64, 8]), 0x10, [64, 2, stride])
    assert words[1] >> 32 == (stride // 16) & 0xFFFFFFFF
    assert words[3] >> 32 == (stride // 16) >> 32


def test_stride_of_a_dimension_of_one_does_not_matter() -> None:
    tensor_map = recipe(extents=[0, 1, 2], strides=[3, 4], box=[64, 1, 8])
    words = launch.native().tensor_map_words(tensor_map, 0x10, [64, 1, 9, 0, 256])
    assert words[1] >> 32 == 128 // 16
    assert words[2] == 256 // 16


@pytest.mark.parametrize(
    ("changes", "address", "integers", "message"),
    [
        ({}, 8, [128, 300, 4, 2, 1024, 256, 4096], "not aligned to 16"),
        ({}, 16, [128, 300, 4, 2, 1000, 256, 4096], "stride of 1000 bytes"),
        ({}, 16, [128, 300, 4, 2, 0, 256, 4096], "stride of 0 bytes"),
        ({}, 16, [128, 300, 4, 2, 1 << 40, 256, 4096], "below 2\\^40"),
        ({}, 16, [128, 0, 4, 2, 1024, 256, 4096], "extent of 0"),
        ({"box": [128, 128, 1, 1]}, 16, [128, 300, 4, 2, 1024, 256, 4096], "256 bytes wide"),
        ({"box": [64, 257, 1, 1]}, 16, [128, 300, 4, 2, 1024, 256, 4096], "extent of 257"),
        ({"strides": [4, 5]}, 16, [128, 300, 4, 2, 1024, 256], "4 extents, 2 strides"),
    ],
)
def test_refusals(changes: dict[str, object], address: int, integers: list[int], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        launch.native().tensor_map_words(recipe(**changes), address, integers)
