"""Element masks of a tile of scores where a thread holds a whole row of it.

Every mask is an interval [lo, hi) of visible columns (causal, window, lengths, packed segments, the end of the keys).
For 32 columns it becomes a word of bits; testing constant bit positions of a word is a predicate load (R2P) and one
select per element. Ids in no simple order are compared besides.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
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


def hidden_words(lo: Int32 | None, hi: Int32, first_column: Int32, columns: int) -> list[Uint32]:
    """Words of the columns outside [lo, hi), a bit for each.

    Args:
        lo: first visible column, or None where that is known to be 0.
        hi: first column after the visible ones.
        first_column: column of the first bit.
        columns: how many, a multiple of 32.
    """
    return [hidden_bits(lo, hi, first_column + start) for start in range(0, columns, WORD)]


def hide(scores: list[Any], words: list[Any]) -> None:
    """Set to -inf the scores of a row whose bits are set; changed in place."""
    for column in range(len(scores)):
        is_hidden = ((words[column // WORD] >> (column % WORD)) & 1) != 0
        scores[column] = cutlass.select_(is_hidden, -Float32.inf, scores[column])


@cute.jit
def hide_other_ids(words: cute.Tensor, row_id: Int32, ids: Any, first_column: Int32) -> None:
    """Set the bits of keys whose ids differ from the row's; `ids` is a `tile_mask.SegmentIds`.

    A lane loads the id of one column of each word, and all lanes see each in turn; a loop, since that is rare.
    """
    count = cutlass.const_expr(cute.size(words))
    mine = cute.make_rmem_tensor((count,), Int32)
    for word in cutlass.range_constexpr(count):
        mine[word] = ids.of_key(first_column + word * WORD + cute.arch.lane_idx())
    for bit in cutlass.range(WORD, unroll=1):
        for word in cutlass.range_constexpr(count):
            is_other = cute.arch.shuffle_sync(mine[word], bit) != row_id
            words[word] = words[word] | (Uint32(is_other) << Uint32(bit))
