"""ctypes forms of the structures that units_c_api.cc takes, and small constructors for them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

ELEMENTS = [
    "u8",
    "u16",
    "u32",
    "s32",
    "u64",
    "s64",
    "f16",
    "f32",
    "f64",
    "bf16",
    "f32_ftz",
    "tf32",
    "tf32_ftz",
    "u4x16",
]
ELEMENT_BYTES = [1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4, 0]
SWIZZLES = ["none", "32", "64", "128", "128_atom32", "128_atom32_flip8", "128_atom64"]
FORMATS = ["f32", "f16", "bf16", "tf32", "e4m3", "e5m2"]


class Map(ctypes.Structure):
    _fields_ = [
        ("base", ctypes.c_uint64),
        ("extent", ctypes.c_uint64 * 5),
        ("stride", ctypes.c_uint64 * 5),
        *((name, ctypes.c_int32) for name in ("rank", "element", "interleave", "swizzle", "l2", "fill")),
        ("box", ctypes.c_uint32 * 5),
        ("element_stride", ctypes.c_uint32 * 5),
    ]


class Operand(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint32) for name in ("start", "leading_bytes", "stride_bytes")),
        *((name, ctypes.c_int32) for name in ("swizzle", "major", "format", "rows", "depth")),
    ]


class Instruction(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int32)
        for name in (
            *("m", "n", "k", "a_format", "b_format", "a_signed", "b_signed"),
            *("accumulate_f16", "saturate_s32", "negate_a", "negate_b", "a_major", "b_major"),
        )
    ]


def tensor_map(
    element: str,
    base: int,
    extent: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    element_stride: Sequence[int] | None = None,
    swizzle: str = "none",
    l2: int = 0,
    fill: int = 0,
) -> Map:
    """Arguments as cuTensorMapEncodeTiled takes them: strides in bytes, of dimensions 1 and up."""
    rank = len(extent)
    result = Map(
        base=base, rank=rank, element=ELEMENTS.index(element), swizzle=SWIZZLES.index(swizzle), l2=l2, fill=fill
    )
    for d in range(5):
        result.extent[d] = extent[d] if d < rank else 1
        result.box[d] = box[d] if d < rank else 1
        result.element_stride[d] = element_stride[d] if element_stride and d < rank else 1
        result.stride[d] = ELEMENT_BYTES[result.element] if d == 0 else (strides[d - 1] if d < rank else 0)
    return result


def operand(
    form: str, rows: int, depth: int, start: int, leading: int, stride: int, swizzle: str = "128", major: str = "k"
) -> Operand:
    """A matrix operand in shared memory; offsets in bytes."""
    return Operand(
        start, leading, stride, SWIZZLES.index(swizzle), ["k", "mn"].index(major), FORMATS.index(form), rows, depth
    )


def fields(structure: ctypes.Structure) -> dict[str, object]:
    """All fields as Python values, for comparison."""
    plain = {}
    for name, _ in structure._fields_:  # type: ignore[misc]
        value = getattr(structure, name)
        plain[name] = list(value) if isinstance(value, ctypes.Array) else value
    return plain
