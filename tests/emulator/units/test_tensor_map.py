"""The 128 bytes of a tensor map: known words, round trips, and the driver's checks."""

from __future__ import annotations

import numpy as np
import pytest

from tests.emulator.units.structures import Map, fields, tensor_map

# Words in the layout that the CUDA driver writes on sm_90, made by an independent encoder.
KNOWN = [
    (
        tensor_map(
            "bf16", 0x7F0000001000, [128, 300, 8, 2], [256, 76800, 614400], [64, 128, 1, 1], swizzle="128", l2=2
        ),
        [0x7F0000001000, 0x1000046530, 0x9600000012C0, 0, 0x12B0000007F, 0x100000007, 0x3F00000000000000, 0x7F],
    ),
    (
        tensor_map("f16", 0x10000, [64, 1000], [128], [32, 256], swizzle="64"),
        [0x10000, 0x800004310, 0, 0, 0x3E70000003F, 0, 0x1F00000000000000, 0xFF],
    ),
    (
        tensor_map(
            *(
                "f32",
                0x20000,
                [32, 7, 5, 3, 2],
                [1 << 36, 1 << 37, (1 << 39) + 16, 48],
                [4, 7, 5, 3, 2],
                [1, 2, 1, 3, 1],
                "32",
            ),
            l2=3,
            fill=1,
        ),
        [0x20000, 0x6A3C0, 0x100000000, 0x82100000003, 0x60000001F, 0x200000004, 0x300040800000001, 0x1020406],
    ),
    (
        tensor_map("tf32", 0x30000, [4096], [], [32], swizzle="128", l2=1),
        [0x30000, 0x36380, 0, 0, 0xFFF, 0, 0x1F00000000000000, 0],
    ),
    (
        tensor_map("f64", 0x123450, [1 << 32, 9], [1 << 35], [2, 9], fill=1),
        [0x123450, 0x8000000000008490, 0, 0, 0x8FFFFFFFF, 0, 0x100000000000000, 0x8],
    ),
    (
        tensor_map("u8", 0xFFFFFF0, [16, 16, 16], [16, 256], [16, 16, 16]),
        [0xFFFFFF0, 0x100000020, 0x10, 0, 0xF0000000F, 0xF, 0xF00000000000000, 0xF0F],
    ),
    (
        tensor_map("tf32_ftz", 0x40000, [8, 8], [32], [8, 8], [1, 8], "32", fill=1),
        [0x40000, 0x20001A410, 0, 0, 0x700000007, 0, 0x700003800000000, 0x7],
    ),
]


def encode(units, fields_of_map: Map) -> np.ndarray:
    words = np.full(16, 0xAAAA, np.uint64)
    assert units.fails("units_encode_map", "pp", fields_of_map, words) == ""
    return words


@pytest.mark.parametrize(("given", "words"), KNOWN)
def test_known_words(units, given, words):
    assert encode(units, given).tolist() == words + [0] * 8
    decoded = Map()
    # Only the first half counts: host code may leave the rest unwritten.
    padded = np.array(words + [2**64 - 1] * 8, np.uint64)
    assert units.fails("units_decode_map", "pp", padded, decoded) == ""
    assert fields(decoded) == fields(given)


def test_round_trip_of_random_maps(units):
    rng = np.random.default_rng(1)
    elements = ["u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f64", "bf16", "f32_ftz", "tf32", "tf32_ftz"]
    swizzles = ["none", "32", "64", "128", "128_atom32", "128_atom32_flip8", "128_atom64"]
    widths = [256, 32, 64, 128, 128, 128, 128]
    for _ in range(500):
        rank, which = int(rng.integers(1, 6)), int(rng.integers(0, 7))
        element = str(rng.choice(elements))
        size = fields(tensor_map(element, 0, [1], [], [1]))["stride"][0]
        inner = int(rng.integers(1, widths[which] // 16 + 1)) * 16 // size
        given = tensor_map(
            element,
            int(rng.integers(0, 1 << 53)) * 16,
            rng.integers(1, 1 << 32, rank).tolist(),
            (rng.integers(0, 1 << 36, rank - 1) * 16).tolist(),
            [max(inner, 1), *rng.integers(1, 257, rank - 1).tolist()],
            rng.integers(1, 9, rank).tolist(),
            swizzles[which],
            int(rng.integers(0, 4)),
        )
        decoded = Map()
        assert units.fails("units_decode_map", "pp", encode(units, given), decoded) == ""
        assert fields(decoded) == fields(given)


def changed(**changes) -> Map:
    result = tensor_map("bf16", 0x1000, [128, 300], [256], [64, 128], swizzle="128")
    for name, value in changes.items():
        if isinstance(value, tuple):
            getattr(result, name)[value[0]] = value[1]
        else:
            setattr(result, name, value)
    return result


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        (changed(rank=0), "tensorRank is 0; accepted are 1 to 5."),
        (changed(rank=6), "tensorRank is 6; accepted are 1 to 5."),
        (
            changed(element=13),
            "tensorDataType is u4x16 (align 8), which is not emulated; accepted are types of whole bytes.",
        ),
        (changed(interleave=1), "interleave is 1, which is not emulated; accepted is CU_TENSOR_MAP_INTERLEAVE_NONE."),
        (changed(swizzle=7), "swizzle is 7; accepted are 0 to 6."),
        (changed(l2=4), "l2Promotion is 4; accepted are 0 to 3."),
        (changed(fill=2), "oobFill is 2; accepted are 0 and 1."),
        (
            changed(element=1, fill=1),
            "oobFill asks for NaN with tensorDataType u16; accepted are floating-point types.",
        ),
        (changed(base=0x1008), "globalAddress is 4104, which is not a multiple of 16 bytes."),
        (changed(base=1 << 57), "globalAddress is 144115188075855872; accepted are addresses below 2^57."),
        (changed(extent=(1, 0)), "globalDim[1] is 0; accepted are 1 to 2^32."),
        (changed(extent=(0, (1 << 32) + 1)), "globalDim[0] is 4294967297; accepted are 1 to 2^32."),
        (changed(box=(1, 257)), "boxDim[1] is 257; accepted are 1 to 256."),
        (changed(element_stride=(1, 9)), "elementStrides[1] is 9; accepted are 1 to 8."),
        (changed(stride=(1, 250)), "globalStrides[0] is 250 bytes; accepted are multiples of 16 below 2^40."),
        (
            changed(stride=(1, 1 << 40)),
            "globalStrides[0] is 1099511627776 bytes; accepted are multiples of 16 below 2^40.",
        ),
        (changed(box=(0, 4)), "boxDim[0] is 4 elements, 8 bytes; accepted are multiples of 16 bytes."),
        (
            changed(box=(0, 128)),
            "boxDim[0] is 128 elements, 256 bytes, wider than the swizzle of 128 bytes; use several boxes.",
        ),
    ],
)
def test_each_check_has_its_sentence(units, broken, sentence):
    assert units.fails("units_encode_map", "pp", broken, np.zeros(16, np.uint64)) == sentence


def test_malformed_words_are_refused(units):
    words = np.array(KNOWN[0][1] + [0] * 8, np.uint64)
    for word, bits, part in [
        (1, 7 << 4, "tensorRank is 8"),
        (1, 15 << 7, "element type code 15"),
        (1, 1 << 19, ""),
        (0, 4, "globalAddress"),
        (6, 255 << 56, "boxDim[0] is 256 elements, 512 bytes, wider"),
    ]:
        broken = words.copy()
        broken[word] |= np.uint64(bits)
        assert part in units.fails("units_decode_map", "pp", broken, Map())
    broken = np.array(KNOWN[1][1] + [0] * 8, np.uint64)
    broken[1] |= np.uint64(1 << 19)
    assert "swizzle code 2 with atomicity 1" in units.fails("units_decode_map", "pp", broken, Map())
    rng = np.random.default_rng(2)
    for _ in range(2000):  # anything decodes or is refused
        units.fails("units_decode_map", "pp", rng.integers(0, 1 << 64, 16, dtype=np.uint64), Map())
