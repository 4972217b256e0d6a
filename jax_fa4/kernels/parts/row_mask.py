"""Element masks of a tile of scores where a thread holds a whole row of it.

Every mask is an interval [lo, hi) of visible columns (causal, window, lengths, packed segments, the end of the keys).
For 32 columns it becomes a word of bits; testing constant bit positions of a word is a predicate load (R2P) and one
select per element. Ids in no simple order are compared besides.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, Uint32

from jax_fa4.kernels.parts.assembly import assembly

WORD = 32


def _bits_from(limit: Int32) -> Uint32:
    """A word whose bits from `limit` on are set: all for a negative limit, none from 32 on (PTX shifts saturate)."""
    count = cutlass.max(limit, Int32(0))
    word: Uint32 = assembly("shl.b32 $0, -1, $1;", [Uint32], count, has_effect=False)
    return word


def hidden_bits(lo: Int32 | None, hi: Int32, first_column: Int32) -> Uint32:
    """A word whose bit b is set where column first_column + b lies outside [lo, hi)."""
    hidden = _bits_from(hi - first_column)
    return hidden if lo is None else hidden | ~_bits_from(lo - first_column)


def bits_of_other_ids(row_id: Int32, ids: Any, first_column: Int32) -> Uint32:
    """A word whose bit b is set where column first_column + b has another id; `ids` is a `tile_mask.SegmentIds`."""
    word = Uint32(0)
    for bit in range(WORD):
        is_other = ids.of_key(first_column + bit) != row_id
        word = word | cutlass.select_(is_other, Uint32(1 << bit), Uint32(0))
    return word


def hide(scores: list[Any], lo: Int32 | None, hi: Int32, first_column: Int32) -> None:
    """Set to -inf the scores of a row that lie outside [lo, hi).

    Args:
        scores: float32 of consecutive columns, a multiple of 32 of them; changed in place.
        lo: first visible column, or None where that is known to be 0.
        hi: first column after the visible ones.
        first_column: column of the first score.
    """
    for start in range(0, len(scores), WORD):
        hidden = hidden_bits(lo, hi, first_column + start)
        for bit in range(WORD):
            is_hidden = ((hidden >> bit) & 1) != 0
            scores[start + bit] = cutlass.select_(is_hidden, -Float32.inf, scores[start + bit])


def hide_other_ids(scores: Any, columns: int, row_id: Int32, ids: Any, first_column: Int32) -> None:
    """Set to -inf the scores of a row against keys of other ids; `ids` is a `tile_mask.SegmentIds`."""
    for column in range(columns):
        is_same = ids.of_key(first_column + column) == row_id
        scores[column] = cutlass.select_(is_same, scores[column], -Float32.inf)
