"""Powers of two: by the special-function unit, and by a polynomial on the multiply-add units.

The special-function unit gives 16 results a clock and multiprocessor, the multiply-add units 128, so a share of a
tile's exponentials is cheaper as a polynomial (FlashAttention-4, arXiv 2603.05451, section 3.1.3; Cody and Waite 1980):

    2^x = 2^n * 2^f,    n = floor(x),    f = x - n in [0, 1),    2^f = 1 + f (c1 + f (c2 + f c3))

n comes of an addition that rounds down: adding 1.5 * 2^23 leaves n in the low bits of the sum, from where it is shifted
into the exponent. Below 2^-119 the result stays there: the argument is brought to [0, 1] of 128 powers of two by the
saturation of the multiply-add that scales it, which costs nothing. docs/exp2_polynomials.py derives the coefficients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Float32

from jax_fa4.kernels.parts.assembly import assembly
from jax_fa4.kernels.parts.coefficients import EXP2_COEFFICIENTS

Pair = tuple[Float32, Float32]
RANGE = 128.0  # powers of two between saturation below and above
LOWEST = -119.0  # the power at which it saturates below; above, 2^9: 8 is the most that lazy rescaling lets through
ROUNDER = 1.5 * 2**23


def exp2_unit(x: Float32) -> Float32:
    """2^x by the special-function unit; results below 2^-126 are 0."""
    return cute.math.exp2(x, fastmath=True)  # type: ignore[attr-defined,no-any-return]


@dataclass(frozen=True)
class ScaledRow:
    """What turns a row's raw scores into powers of two: exponents scale * score + offset.

    Attributes:
        scale: of all rows.
        offset: of this row, -scale * maximum.
        unit_scale: scale / RANGE, for the polynomial.
    """

    scale: Float32
    offset: Float32
    unit_scale: Float32

    @staticmethod
    def of(scale: Float32, maximum: Float32) -> ScaledRow:
        """Powers 2^(scale * (score - maximum))."""
        return ScaledRow(scale, maximum * (-scale), scale * (1.0 / RANGE))

    def by_unit(self, scores: Pair) -> Pair:
        """Two powers by the special-function unit."""
        scale, offset = (self.scale, self.scale), (self.offset, self.offset)
        low, high = cute.arch.fma_packed_f32x2(scores, scale, offset)
        return exp2_unit(low), exp2_unit(high)

    def by_polynomial(self, scores: Pair, unit_offset: Float32, degree: int) -> Pair:
        """Two powers by the polynomial; `unit_offset` is `self.unit_offset()`."""
        text = "fma.rn.sat.f32 $0, $1, $2, $3;"
        places = tuple(
            assembly(text, [Float32], score, self.unit_scale, unit_offset, has_effect=False) for score in scores
        )
        return exp2_of_unit(places, degree)

    def unit_offset(self) -> Float32:
        """The offset of the polynomial's argument."""
        return self.offset * (1.0 / RANGE) + (-LOWEST / RANGE)


def _both(value: float) -> Pair:
    return Float32(value), Float32(value)


def exp2_of_unit(places: Any, degree: int) -> Pair:
    """2^(RANGE * place + LOWEST) of two places in [0, 1], by the polynomial."""
    shifted = cute.arch.fma_packed_f32x2(places, _both(RANGE), _both(ROUNDER + LOWEST), rnd="rm")
    minus_whole = cute.arch.fma_packed_f32x2(shifted, _both(-1.0), _both(ROUNDER + LOWEST))
    fraction = cute.arch.fma_packed_f32x2(places, _both(RANGE), minus_whole)
    coefficients = EXP2_COEFFICIENTS[degree]
    power = _both(coefficients[-1])
    for coefficient in (*coefficients[-2::-1], 1.0):
        power = cute.arch.fma_packed_f32x2(power, fraction, _both(coefficient))
    text = "{ .reg .b32 n, p, r; mov.b32 n, $1; mov.b32 p, $2;\nmad.lo.s32 r, n, 8388608, p; mov.b32 $0, r; }"
    low, high = (assembly(text, [Float32], *both, has_effect=False) for both in zip(shifted, power, strict=True))
    return low, high
