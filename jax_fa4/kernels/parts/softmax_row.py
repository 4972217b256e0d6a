"""The online softmax of a warpgroup's tile: running maximum and sum of the two rows that a thread has a quarter of.

Milakov and Gimelshein 2018 (arXiv 1805.02867), in base 2: with s the raw scores and c = scale * log2(e),
p = 2^(c s - c m), where a row that has seen nothing (m = -inf) uses 0 in place of m, so that its p are 0 and not NaN.

The maximum m need not be the true one: one that is exceeded by 8 powers of 2 at most serves, since p <= 2^8 keeps sums
far from overflow and 16-bit floats round alike at every exponent (FlashAttention-4, arXiv 2603.05451, lazy rescaling).
So a step only asks whether some score exceeds that limit, thread by thread and without a shuffle. After the first steps
of a row that is rare, and the common path has neither a reduction over lanes nor a rescaling.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32

Registers = Any  # a cute.Tensor of float32 in registers, indexed by compile-time constants
LN2 = math.log(2.0)
LOG2_E = math.log2(math.e)
CHAINS = 2  # independent chains per row: a warp alone on its scheduler must hide the latency of 4 clocks by itself


def _exp2(exponent: Float32) -> Float32:
    return cute.math.exp2(exponent, fastmath=True)  # type: ignore[attr-defined]


def _log2(value: Float32) -> Float32:
    return cute.math.log2(value, fastmath=True)  # type: ignore[attr-defined]


def _row_indices(scores: Registers, half: int) -> list[int]:
    """Elements of an accumulator fragment that belong to row r (half 0) or row r + 8 (half 1)."""
    return [index for index in range(cute.size(scores)) if (index // 2) % 2 == half]


def _over_quad(value: Float32, is_max: bool) -> Float32:
    """Reduce over the four lanes that share a row."""
    for distance in (1, 2):
        other = cute.arch.shuffle_sync_bfly(value, offset=distance)
        value = cute.arch.fmax(value, other) if is_max else value + other
    return value


def _highest(scores: Registers, half: int) -> Float32:
    """This thread's highest score of one row."""
    indices = _row_indices(scores, half)
    chains = [scores[index] for index in indices[:CHAINS]]
    for place, index in enumerate(indices[CHAINS:]):
        chains[place % CHAINS] = cute.arch.fmax(chains[place % CHAINS], scores[index])
    highest = chains[0]
    for other in chains[1:]:
        highest = cute.arch.fmax(highest, other)
    return highest


def _finite(maximum: Float32) -> Float32:
    return cutlass.select_(maximum == -Float32.inf, Float32(0.0), maximum)


@dataclass(frozen=True)
class SoftmaxRows:
    """Running statistics of the thread's two rows."""

    scale_log2: Float32  # positive; turns raw scores into exponents of 2
    slack: Float32  # by how much (raw units) a score may exceed the maximum in use
    max: Registers  # of raw scores, float32 in registers
    sum: Registers  # this thread's part of the sum of p

    @staticmethod
    def create(scale_log2: Float32, slack: Float32) -> SoftmaxRows:
        """Statistics that have seen nothing."""
        maxima, sums = cute.make_rmem_tensor((2,), Float32), cute.make_rmem_tensor((2,), Float32)
        maxima.fill(-Float32.inf)
        sums.fill(0.0)
        return SoftmaxRows(scale_log2, slack, maxima, sums)

    def exceeded(self, scores: Registers) -> Boolean:
        """Whether one of this thread's scores is too high for the maximum in use.

        A row that has seen nothing has the limit -inf, which every finite score exceeds.
        """
        return (_highest(scores, 0) > self.max[0] + self.slack) | (_highest(scores, 1) > self.max[1] + self.slack)

    def raise_max(self, scores: Registers, factors: Registers) -> None:
        """Take the rows' true maxima; `factors` receives what the rows' older outputs must be multiplied by."""
        for half in range(2):
            older = self.max[half]
            newest = _over_quad(cute.arch.fmax(_highest(scores, half), older), True)
            self.max[half] = newest
            factors[half] = _exp2((older - _finite(newest)) * self.scale_log2)
            self.sum[half] = self.sum[half] * factors[half]

    def exponentiate(self, scores: Registers) -> None:
        """Turn raw scores into p against the maximum in use, in place, and add them to the sums."""
        for half in range(2):
            offset = _finite(self.max[half]) * self.scale_log2
            indices = _row_indices(scores, half)
            for index in indices:
                scores[index] = _exp2(scores[index] * self.scale_log2 - offset)
            chains = [self.sum[half] + scores[indices[0]], *(scores[index] for index in indices[1:CHAINS])]
            for place, index in enumerate(indices[CHAINS:]):
                chains[place % CHAINS] = chains[place % CHAINS] + scores[index]
            total = chains[0]
            for other in chains[1:]:
                total = total + other
            self.sum[half] = total

    def finish(self, half: int, sink: Float32 | None) -> tuple[Float32, Float32]:
        """Close one row.

        Args:
            half: which of the two rows.
            sink: a logit (natural units) that joins the sum and has no value, or None.

        Returns:
            The factor for the row's output, and the natural logarithm of its sum of exponentials: 0 and -inf for a row
            that has seen nothing.
        """
        total, maximum_log2 = _over_quad(self.sum[half], False), _finite(self.max[half]) * self.scale_log2
        factor = Float32(1.0)
        if sink is not None:
            # The sink may lie far above every score: sum against whichever is higher.
            sink_log2 = sink * LOG2_E
            higher = _finite(cute.arch.fmax(cutlass.select_(total == 0.0, sink_log2, maximum_log2), sink_log2))
            factor = _exp2(maximum_log2 - higher)
            factor = cutlass.select_(total == 0.0, Float32(0.0), factor)
            total = total * factor + _exp2(sink_log2 - higher)
            maximum_log2 = higher
        is_empty = total == 0.0
        inverse = cute.arch.rcp_approx(cutlass.select_(is_empty, Float32(1.0), total))
        log_sum = (maximum_log2 + _log2(total)) * LN2
        return factor * inverse, cutlass.select_(is_empty, -Float32.inf, log_sum)


def cap(scores: Registers, exponent_scale: Float32) -> None:
    """Replace raw scores s by tanh(x), in place, where 2^(exponent_scale * s) = e^(2 x).

    tanh(x) = 1 - 2 / (1 + e^(2 x)): absolute error about 2^-22, where the hardware's tanh has 2^-11; and no overflow
    reaches the result, since 2 / inf = 0.
    """
    for index in range(cute.size(scores)):
        power = _exp2(scores[index] * exponent_scale)
        scores[index] = 1.0 - 2.0 * cute.arch.rcp_approx(1.0 + power)
