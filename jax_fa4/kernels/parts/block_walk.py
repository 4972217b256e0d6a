"""Which tiles of the score matrix a work item visits, and in what order.

A work item is one tile of query rows of one head. Its key tiles [begin, end) are those that some row sees; those in
[full_begin, full_end) every row sees whole, so that only the others pay for element masks. All roles of a kernel walk
the same object and so agree on the count. The masked tiles come first, then the whole ones (the softmax does not mind
the order): so a kernel has one masked loop and one plain loop, and the plain one ends at the left edge.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

ITEM_FIELDS = 8  # int32 per row of a work table: `jax_fa4.schedule.order.Column`, the fields of WorkItem in order


@dataclass(frozen=True)
class WorkItem:
    """Batch row, head, tile of queries, and the tiles of keys it visits."""

    batch: Int32
    head: Int32
    query_tile: Int32
    compare_ids: Int32  # not 0: masked tiles must compare ids besides intervals
    begin: Int32
    full_begin: Int32
    full_end: Int32
    end: Int32

    @staticmethod
    def read(table: cute.Pointer, number: Int32) -> WorkItem:
        """Row `number` of a work table."""
        row = cute.make_tensor(table + number * ITEM_FIELDS, cute.make_layout(ITEM_FIELDS))
        return WorkItem(*(cute.arch.make_warp_uniform(row[field]) for field in range(ITEM_FIELDS)))

    @property
    def count(self) -> Int32:
        """Steps: key tiles visited."""
        return self.end - self.begin

    @property
    def masked_count(self) -> Int32:
        """Steps that need element masks; they come first."""
        return (self.end - self.full_end) + (self.full_begin - self.begin)

    def key_tile(self, step: Int32) -> Int32:
        """The key tile of a step: masked tiles at the right edge, then at the left, then whole tiles right to left."""
        at_right = self.end - self.full_end
        masked = cutlass.select_(step < at_right, self.end - 1 - step, self.begin + (step - at_right))
        return cutlass.select_(step < self.masked_count, masked, self.full_end - 1 - (step - self.masked_count))


@dataclass(frozen=True)
class Band:
    """Keys that a query sees by arithmetic: row + offset - left <= key <= row + offset + right, 0 <= key < keys."""

    queries: Int32
    keys: Int32
    offset: Int32
    left: Int32
    right: Int32

    def lo(self, row: Int32) -> Int32:
        """First visible key of a row."""
        return cutlass.max(row + self.offset - self.left, Int32(0))

    def hi(self, row: Int32) -> Int32:
        """First key after the visible ones; at least 0."""
        return cutlass.max(cutlass.min(row + self.offset + self.right + 1, self.keys), Int32(0))

    def work_item(self, batch: Int32, head: Int32, query_tile: Int32, rows: int, columns: int) -> WorkItem:
        """The item of a query tile; lo and hi grow with the row, so its first and last rows bound it."""
        first = query_tile * rows
        last = cutlass.min(first + rows, self.queries) - 1
        begin = self.lo(first) // columns
        end = cutlass.max(cute.ceil_div(self.hi(last), columns), begin)
        full_begin = cutlass.min(cutlass.max(cute.ceil_div(self.lo(last), columns), begin), end)
        full_end = cutlass.min(cutlass.max(self.hi(first) // columns, full_begin), end)
        return WorkItem(batch, head, query_tile, Int32(0), begin, full_begin, full_end, end)


@dataclass(frozen=True)
class RowIntervals:
    """Keys that a query sees, from memory: an interval per row of one batch row."""

    queries: Int32
    lo_pointer: cute.Pointer
    hi_pointer: cute.Pointer

    def _load(self, pointer: cute.Pointer, row: Int32) -> Int32:
        # Rows beyond the last are computed and dropped; they repeat the last so as to read nothing outside.
        return cute.make_tensor(pointer + cutlass.min(row, self.queries - 1), cute.make_layout(1))[0]

    def lo(self, row: Int32) -> Int32:
        """First visible key of a row."""
        return self._load(self.lo_pointer, row)

    def hi(self, row: Int32) -> Int32:
        """First key after the visible ones."""
        return self._load(self.hi_pointer, row)
