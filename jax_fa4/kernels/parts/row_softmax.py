"""The online softmax where a thread holds a whole row of a tile: no lane needs another's values.

The mathematics is that of `softmax_row.py`: base 2, a maximum that may be exceeded by the slack before it is raised
(lazy rescaling), 0 in place of the maximum of a row that has seen nothing. Packed instructions take two elements each;
the row's sum is kept in two parts, of even and of odd columns, until the row is closed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from jax_fa4.kernels.parts.assembly import assembly
from jax_fa4.kernels.parts.exp2 import Pair, ScaledRow, exp2_unit

Registers = Any  # a cute.Tensor of float32 in registers, indexed by compile-time constants
MAX_CHAINS = 4  # independent chains of the maximum: a scheduler's two softmax warps must hide the latency of 4 clocks
SUM_CHAINS = 4  # independent chains of the sum, in pairs
LN2 = 0.6931471805599453
LOG2_E = 1.4426950408889634


def highest_of(scores: Sequence[Float32]) -> Float32:
    """The highest of a row's scores, three at a time."""
    chains = list(scores[:MAX_CHAINS])
    rest = scores[MAX_CHAINS:]
    for place in range(0, len(rest) - 1, 2):
        chain = place // 2 % MAX_CHAINS
        chains[chain] = _highest_of_three(chains[chain], rest[place], rest[place + 1])
    if len(rest) % 2:
        chains.append(rest[-1])
    while len(chains) > 2:
        chains = [_highest_of_three(*chains[:3]), *chains[3:]]
    return chains[0] if len(chains) == 1 else cute.arch.fmax(chains[0], chains[1])


def _highest_of_three(first: Float32, second: Float32, third: Float32) -> Float32:
    highest: Float32 = assembly("max.f32 $0, $1, $2, $3;", [Float32], first, second, third, has_effect=False)
    return highest


def finite(maximum: Float32) -> Float32:
    """The maximum, or 0 where it is -inf."""
    return cutlass.select_(maximum == -Float32.inf, Float32(0.0), maximum)


@dataclass(frozen=True)
class RowStatistics:
    """Running statistics of a thread's row.

    Attributes:
        scale_log2: positive; turns raw scores into exponents of 2.
        slack: by how much (raw units) a score may exceed the maximum in use.
        max: the maximum in use, of raw scores.
        sum: of even and of odd columns.
    """

    scale_log2: Float32
    slack: Float32
    max: Registers
    sum: Registers

    @staticmethod
    def create(scale_log2: Float32, slack: Float32) -> RowStatistics:
        """Statistics that have seen nothing."""
        maximum, sums = cute.make_rmem_tensor((1,), Float32), cute.make_rmem_tensor((2,), Float32)
        maximum.fill(-Float32.inf)
        sums.fill(0.0)
        return RowStatistics(scale_log2, slack, maximum, sums)

    def take_first(self, highest: Float32) -> ScaledRow:
        """Take the maximum of the first tile."""
        self.max[0] = highest
        return self._scaled(finite(self.max[0]))

    def raise_max(self, highest: Float32, may_be_hidden: bool) -> tuple[ScaledRow, Float32]:
        """Take a later tile's maximum if it exceeds the one in use by more than the slack.

        Args:
            highest: of the tile's scores.
            may_be_hidden: whether all of them may be -inf; else some is finite.

        Returns:
            How to scale the tile, and the factor for what was computed against the older maximum.
        """
        older = self.max[0]
        # A row that has seen nothing has the limit -inf, which every finite score exceeds.
        newest = cutlass.select_(highest > older + self.slack, highest, older)
        in_use = finite(newest) if may_be_hidden else newest
        factor = exp2_unit((older - in_use) * self.scale_log2)
        self.max[0] = newest
        return self._scaled(in_use), factor

    def _scaled(self, maximum: Float32) -> ScaledRow:
        return ScaledRow.of(self.scale_log2, maximum)

    def add(self, powers: Sequence[Pair], factor: Float32 | None) -> None:
        """Bring the sums to a new maximum by `factor`, and add a tile's powers."""
        chains = list(powers[:SUM_CHAINS])
        if factor is not None:
            older = self.sum[0], self.sum[1]
            chains[0] = cute.arch.fma_packed_f32x2(older, (factor, factor), chains[0])
        for place, power in enumerate(powers[SUM_CHAINS:]):
            chains[place % SUM_CHAINS] = cute.arch.add_packed_f32x2(chains[place % SUM_CHAINS], power)
        while len(chains) > 1:
            chains = [cute.arch.add_packed_f32x2(*pair) for pair in zip(chains[::2], chains[1::2], strict=True)]
        self.sum[0], self.sum[1] = chains[0]


def close_row(total: Float32, maximum: Float32, scale_log2: Float32, sink: Float32 | None) -> tuple[Float32, Float32]:
    """Close a row.

    Args:
        total: the sum of its powers.
        maximum: the maximum in use, of raw scores; -inf where the row has seen nothing.
        scale_log2: as everywhere.
        sink: a logit (natural units) that joins the sum and has no value, or None.

    Returns:
        The factor for the row's output, and the natural logarithm of its sum of exponentials: 0 and -inf for a row that
        has seen nothing.
    """
    maximum_log2, factor = finite(maximum) * scale_log2, Float32(1.0)
    if sink is not None:
        # The sink may lie far above every score: sum against whichever is higher.
        sink_log2 = sink * LOG2_E
        higher = finite(cute.arch.fmax(cutlass.select_(total == 0.0, sink_log2, maximum_log2), sink_log2))
        factor = cutlass.select_(total == 0.0, Float32(0.0), exp2_unit(maximum_log2 - higher))
        total = total * factor + exp2_unit(sink_log2 - higher)
        maximum_log2 = higher
    is_empty = total == 0.0
    inverse = cute.arch.rcp_approx(cutlass.select_(is_empty, Float32(1.0), total))
    log_sum = (maximum_log2 + cute.math.log2(total, fastmath=True)) * LN2  # type: ignore[attr-defined]
    return factor * inverse, cutlass.select_(is_empty, -Float32.inf, log_sum)


def cap(scores: list[Any], exponent_scale: Float32) -> None:
    """Replace raw scores s by tanh(x), in place, where 2^(exponent_scale * s) = e^(2 x).

    tanh(x) = 1 - 2 / (1 + e^(2 x)): see `softmax_row.cap`.
    """
    for column, score in enumerate(scores):
        scores[column] = 1.0 - 2.0 * cute.arch.rcp_approx(1.0 + exp2_unit(score * exponent_scale))
