"""Rounding two float32 values into one register of 16-bit values."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import BFloat16, Float32, Uint32


def round_pair(low: Float32, high: Float32, dtype: type) -> Uint32:
    """Round to nearest even; `low` goes to the lower half.

    A whole fragment converted as one vector takes twice the instructions where its length is no power of two.
    """
    kind = "bf16x2" if dtype is BFloat16 else "f16x2"
    return cute.arch.inline_ptx(
        f"cvt.rn.{kind}.f32 {{$w0}}, {{$r1}}, {{$r0}};", write_only_types=[Uint32], read_only_args=[low, high]
    )
