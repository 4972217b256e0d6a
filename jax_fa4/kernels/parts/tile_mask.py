"""Element masks of a tile of scores, from each row's interval [lo, hi) of visible keys.

Every mask is such an interval (causal, window, lengths, packed segments, the end of the keys), so this is the only mask
routine. In the accumulator layout of a warpgroup product (PTX ISA, wgmma, register fragments of D) a thread holds for
two rows, r and r + 8, the columns 8j + 2c and 8j + 2c + 1, c = lane mod 4. Visible columns become bits, 32 bits for
128 columns; testing constant bit positions of a word is a predicate load (R2P) and one select per element.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

COLUMNS_PER_WORD = 128  # 32 bits: two columns in each group of eight


def _bits_below(limit: Int32) -> Uint32:
    """Bits of this thread's columns that are below `limit` (relative to its first column), in one word."""
    columns = cutlass.min(cutlass.max(limit, Int32(0)), Int32(COLUMNS_PER_WORD))
    count = ((columns >> 3) << 1) + cutlass.min(columns & 7, Int32(2))
    # A shift by 32 is not a shift: build the word from two halves of the count.
    half = Uint32(count >> 1)
    return ~((Uint32(0xFFFFFFFF) << half) << (Uint32(count) - half))


def hide(scores: cute.Tensor, row_half: int, lo: Int32 | None, hi: Int32, first_column: Int32) -> None:
    """Set to -inf the scores of one of the thread's two rows that lie outside [lo, hi).

    Args:
        scores: accumulator fragment of a (64, N) tile, in registers; changed in place.
        row_half: 0 for row r, 1 for row r + 8.
        lo: first visible column of the row, or None where that is known to be 0.
        hi: first column after the visible ones.
        first_column: column of the key sequence that this thread's first element has (tile start + 2 * (lane mod 4)).
    """
    size = cute.size(scores)
    words = -(-size * 2 // COLUMNS_PER_WORD)  # size elements for two rows of 4 lanes: 2 * size columns
    for word in range(words):
        start = first_column + word * COLUMNS_PER_WORD
        visible = _bits_below(hi - start)
        if lo is not None:
            visible = visible & ~_bits_below(lo - start)
        for bit in range(32):
            group, element = word * 16 + bit // 2, bit % 2
            index = group * 4 + row_half * 2 + element
            if index < size:
                shown = ((visible >> bit) & 1) != 0
                scores[index] = cutlass.select_(shown, scores[index], -Float32.inf)


@dataclass(frozen=True)
class SegmentIds:
    """Ids of one batch row's queries and keys, in memory."""

    query_pointer: cute.Pointer
    key_pointer: cute.Pointer
    queries: Int32
    keys: Int32

    def of_query(self, row: Int32) -> Int32:
        """A query's id; rows beyond the last repeat it."""
        return cute.make_tensor(self.query_pointer + cutlass.min(row, self.queries - 1), cute.make_layout(1))[0]

    def of_key(self, column: Int32) -> Int32:
        """A key's id; columns beyond the last, which intervals hide, repeat it."""
        return cute.make_tensor(self.key_pointer + cutlass.min(column, self.keys - 1), cute.make_layout(1))[0]


def hide_other_ids(scores: cute.Tensor, row_half: int, row_id: Int32, ids: SegmentIds, first_column: Int32) -> None:
    """Set to -inf the scores of one of the thread's two rows against keys of other ids; arguments as for `hide`."""
    for index in range(cute.size(scores)):
        if (index // 2) % 2 == row_half:
            is_same = ids.of_key(first_column + (index // 4) * 8 + index % 2) == row_id
            scores[index] = cutlass.select_(is_same, scores[index], -Float32.inf)
