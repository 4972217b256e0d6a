"""Device code that finds what each row of a mask sees, in CuTe-DSL: the first half of planning. Imported only to build.

The results are those of `jax_fa4.schedule.tiles`: the interval of columns of each row, whether intervals say it all,
and the column tiles of each row tile; and the clocks of each row tile. Ids may lie in any order.

Blocks of 1024 threads take shares of the rows of one batch row in one direction: queries as rows and keys as columns
(y = 0), or the reverse. Each looks at all columns, and at whether all rows are as expected. All that is known of the
columns is kept in shared memory, three words for 32 columns:

    heads    bit c: column c begins a run of equal ids      0 0 0 0 7 7 7 3|3 3 3 ...
    before   the last run that begins before these 32       1 . . . 1 . . 1|. . .
    after    the first run that begins after them

Where a column's run begins and ends follows from these without a search. Documents nearly always lie together in
ascending order and rows and columns have the same ids: this is checked, and then a row sees the run at its own place,
cut by its band. Else one block takes all rows, since what it finds is for all. It puts the runs in a hash table in
global memory, id to first and last column (in which ids of one run, in any order, are found at once); where a band cuts
an id of several runs a row walks from run to run to the first that has its id. That is linear in rows and columns but
for such a walk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint8, Uint32
from cutlass.cute.runtime import make_ptr

from jax_fa4.kernels.parts.memory import read, write
from jax_fa4.kernels.plan import KernelPlan

WARP = 32
WARPS = 32
THREADS = WARP * WARPS
ENTRY = 3  # int32 of an entry of the hash table: id, first column, last column + 1
NO_ID = -1
HASH_FACTOR = 0x9E3779B1  # 2^32 over the golden ratio (Knuth, The Art of Computer Programming, volume 3, section 6.4)


@dataclass(frozen=True)
class Side:
    """One direction of one batch row: rows, columns, and where results go."""

    row_ids: Any  # pointers to this batch row's, or None without ids
    column_ids: Any
    row_length: Any  # how many rows and columns exist, or None without lengths
    column_length: Any
    lo: cute.Pointer
    hi: cute.Pointer
    exact: cute.Pointer
    bounds: cute.Pointer
    clocks: cute.Pointer
    table: Any
    rows: Int32
    columns: Int32
    lower: Int32  # row + lower <= column <= row + upper
    upper: Int32
    row_tile: Int32
    column_tile: Int32
    full_clocks: Int32
    partial_clocks: Int32
    overhead: Int32
    share: Int32  # which share of the row tiles a block takes, of how many
    shares: Int32

    def tiles(self, is_whole: bool) -> tuple[Int32, Int32]:
        """The row tiles [begin, end) of this block's share, or all."""
        count = cute.ceil_div(self.rows, self.row_tile)
        if is_whole:
            return Int32(0), count
        each = cute.ceil_div(count, self.shares)
        begin = cutlass.min(self.share * each, count)
        return begin, cutlass.min(begin + each, count)


@dataclass(frozen=True)
class Runs:
    """The runs of equal ids among the columns, in shared memory."""

    heads: cute.Pointer
    before: cute.Pointer
    after: cute.Pointer

    def start(self, column: Any) -> Int32:
        """The first column of the run that holds a column."""
        word, bit = column // WARP, column % WARP
        upto = Uint32(read(self.heads, word)) & (Uint32(0xFFFFFFFF) >> Uint32(31 - bit))
        here = word * WARP + 31 - Int32(cute.arch.clz(upto))
        return cutlass.select_(upto != Uint32(0), here, read(self.before, word))

    def end(self, column: Any) -> Int32:
        """The column after that run."""
        word, bit = column // WARP, column % WARP
        later = (Uint32(read(self.heads, word)) >> Uint32(bit)) >> Uint32(1)
        here = column + 1 + Int32(cute.arch.clz(cute.arch.brev(later)))
        return cutlass.select_(later != Uint32(0), here, read(self.after, word))


class PlanRows:
    """The kernel of one plan."""

    def __init__(self, plan: KernelPlan) -> None:
        self.has_ids = bool(plan.option("ids"))
        self.has_lengths = bool(plan.option("lengths"))
        self.words = int(plan.option("most_columns")) // WARP

    @cute.jit
    def scan_max(self, values: cute.Pointer, count: Int32, first: Int32, sums: cute.Pointer, is_reversed: bool) -> None:
        """Replaces values by the greatest of those before each, or after each if reversed; `first` before them all."""
        thread, _, _ = cute.arch.thread_idx()
        lane, this_warp = thread % WARP, thread // WARP
        carried = first
        for base in cutlass.range(0, count, THREADS, unroll=1):
            place = base + thread
            at = place
            if cutlass.const_expr(is_reversed):
                at = count - 1 - place
            exists = place < count
            value = first
            if exists:
                value = read(values, at)
            for step in cutlass.range_constexpr(5):
                other = cute.arch.shuffle_sync_up(value, 1 << step)
                value = cutlass.select_(lane >= (1 << step), cutlass.max(value, other), value)
            if lane == WARP - 1:
                write(sums, this_warp, value)
            exclusive = cute.arch.shuffle_sync_up(value, 1)
            exclusive = cutlass.select_(lane == 0, first, exclusive)
            cute.arch.sync_threads()
            of_warp = read(sums, lane)
            earlier = cutlass.select_(lane < this_warp, of_warp, first)
            greatest = cute.arch.warp_redux_sync(earlier, "max")
            total = cute.arch.warp_redux_sync(of_warp, "max")
            if exists:
                write(values, at, cutlass.max(cutlass.max(greatest, exclusive), carried))
            carried = cutlass.max(carried, total)
            cute.arch.sync_threads()

    @cute.jit
    def find_runs(self, side: Side, runs: Runs, sums: cute.Pointer, flag: cute.Pointer) -> None:
        """Fills `runs`; leaves 1 in `flag` where ids do not ascend, or rows have other ids than the columns beside."""
        thread, _, _ = cute.arch.thread_idx()
        lane, this_warp = thread % WARP, thread // WARP
        words = cute.ceil_div(side.columns, WARP)
        if thread == 0:
            write(flag, 0, Int32(0))
        for word in cutlass.range(this_warp, words, WARPS, unroll=8):
            column = word * WARP + lane
            exists = column < side.columns
            value = read(side.column_ids, cutlass.min(column, side.columns - 1))
            previous = read(side.column_ids, cutlass.max(cutlass.min(column, side.columns) - 1, Int32(0)))
            is_head = exists & ((value != previous) | (column == 0))
            mask = Uint32(cute.arch.vote_ballot_sync(is_head))
            greatest = cute.arch.warp_redux_sync(cutlass.select_(exists, value, Int32(NO_ID)), "max")
            if lane == 0:
                write(runs.heads, word, Int32(mask))
                last = word * WARP + 31 - Int32(cute.arch.clz(mask))
                write(runs.before, word, cutlass.select_(mask != Uint32(0), last, Int32(-1)))
                write(runs.after, word, greatest)
        cute.arch.sync_threads()
        self.scan_max(runs.before, words, Int32(-1), sums, False)
        self.scan_max(runs.after, words, Int32(NO_ID), sums, False)
        self.check_order(side, runs, flag)
        cute.arch.sync_threads()
        for word in cutlass.range(thread, words, THREADS, unroll=1):
            mask = Uint32(read(runs.heads, word))
            first = word * WARP + Int32(cute.arch.clz(cute.arch.brev(mask)))
            write(runs.after, word, cutlass.select_(mask != Uint32(0), -first, -side.columns))
        cute.arch.sync_threads()
        self.scan_max(runs.after, words, -side.columns, sums, True)
        for word in cutlass.range(thread, words, THREADS, unroll=1):
            write(runs.after, word, -read(runs.after, word))
        cute.arch.sync_threads()

    @cute.jit
    def check_order(self, side: Side, runs: Runs, flag: cute.Pointer) -> None:
        """Sets `flag` where a run's id is not above all before it, or a row's is not that of the column beside it."""
        thread, _, _ = cute.arch.thread_idx()
        lane, this_warp = thread % WARP, thread // WARP
        words = cute.ceil_div(side.columns, WARP)
        for word in cutlass.range(this_warp, words, WARPS, unroll=1):
            mask = Uint32(cute.arch.make_warp_uniform(read(runs.heads, word)))
            if mask != Uint32(0):
                column = word * WARP + lane
                value = read(side.column_ids, cutlass.min(column, side.columns - 1))
                greatest = value
                for step in cutlass.range_constexpr(5):
                    other = cute.arch.shuffle_sync_up(greatest, 1 << step)
                    greatest = cutlass.select_(lane >= (1 << step), cutlass.max(greatest, other), greatest)
                exclusive = cute.arch.shuffle_sync_up(greatest, 1)
                exclusive = cutlass.select_(lane == 0, Int32(NO_ID), exclusive)
                exclusive = cutlass.max(exclusive, read(runs.after, word))
                is_head = ((mask >> Uint32(lane)) & Uint32(1)) != Uint32(0)
                if is_head & (value >= 0) & (value <= exclusive):
                    cute.arch.atomic_max(flag, Int32(1))
        for row in cutlass.range(thread, side.rows, THREADS, unroll=8):
            value = read(side.row_ids, row)
            beside = read(side.column_ids, cutlass.min(row, side.columns - 1))
            if (value >= 0) & ((row >= side.columns) | (value != beside)):
                cute.arch.atomic_max(flag, Int32(1))

    @cute.jit
    def fill_table(self, side: Side, runs: Runs, mask: Int32) -> None:
        """Puts every run with an id into the hash table, whose last place is `mask`."""
        thread, _, _ = cute.arch.thread_idx()
        for place in cutlass.range(thread, mask + 1, THREADS, unroll=4):
            write(side.table, place * ENTRY, Int32(NO_ID))
            write(side.table, place * ENTRY + 1, side.columns)
            write(side.table, place * ENTRY + 2, Int32(0))
        cute.arch.sync_threads()
        for column in cutlass.range(thread, side.columns, THREADS, unroll=1):
            value = read(side.column_ids, column)
            if (value >= 0) & (runs.start(column) == column):
                place = self.hashed(value) & mask
                found = cute.arch.atomic_cas(side.table + place * ENTRY, cmp=Int32(NO_ID), val=value)
                while (found != Int32(NO_ID)) & (found != value):
                    place = (place + 1) & mask
                    found = cute.arch.atomic_cas(side.table + place * ENTRY, cmp=Int32(NO_ID), val=value)
                cute.arch.atomic_min(side.table + place * ENTRY + 1, Int32(column))
                cute.arch.atomic_max(side.table + place * ENTRY + 2, runs.end(column))
        cute.arch.sync_threads()

    def hashed(self, value: Int32) -> Int32:
        """An id as a place in a table; ids of documents are often neighbours, and stay apart."""
        product = Uint32(value) * Uint32(HASH_FACTOR)
        return Int32(product ^ (product >> Uint32(15)))

    @cute.jit
    def look_up(self, side: Side, runs: Runs, mask: Int32, value: Int32, band: tuple[Int32, Int32]) -> tuple[Any, Any]:
        """The hull of the columns of a band that have an id; empty where none has."""
        place = self.hashed(value) & mask
        found = read(side.table, place * ENTRY)
        while (found != value) & (found != Int32(NO_ID)):
            place = (place + 1) & mask
            found = read(side.table, place * ENTRY)
        lo, hi = Int32(0), Int32(0)
        if found == value:
            lo = cutlass.max(band[0], read(side.table, place * ENTRY + 1))
            hi = cutlass.min(band[1], read(side.table, place * ENTRY + 2))
            searches = lo < hi
            while searches:
                if read(side.column_ids, lo) != value:
                    lo = runs.end(lo)
                    searches = lo < hi
                else:
                    searches = False
            searches = lo < hi
            while searches:
                if read(side.column_ids, hi - 1) != value:
                    hi = runs.start(hi - 1)
                else:
                    searches = False
        return lo, hi

    @cute.jit
    def band(self, side: Side, row: Int32) -> tuple[Any, Any]:
        """The columns [lo, hi) of a row by band and lengths; empty where lo >= hi."""
        end = side.columns
        if cutlass.const_expr(self.has_lengths):
            end = cutlass.min(end, read(side.column_length, 0))
        lo = cutlass.max(row + side.lower, Int32(0))
        hi = cutlass.min(row + side.upper + 1, end)
        if cutlass.const_expr(self.has_lengths):
            hi = cutlass.select_(row < read(side.row_length, 0), hi, Int32(0))
        return lo, hi

    @cute.jit
    def plan(self, side: Side, runs: Runs, sums: cute.Pointer, flag: cute.Pointer, mask: Int32) -> None:
        """Writes the intervals and tiles of this block's rows, and whether intervals say it all."""
        is_scattered = Int32(0)
        if cutlass.const_expr(self.has_ids):
            self.find_runs(side, runs, sums, flag)
            is_scattered = read(flag, 0)
            cute.arch.sync_threads()
        if is_scattered == 0:
            self.write_runs(side, runs)
            cute.arch.sync_threads()
            self.write_tiles(side, Int32(1), False)
        elif side.share == 0:
            self.look_up_all(side, runs, flag, mask)
            self.write_tiles(side, 1 - read(flag, 0), True)

    @cute.jit
    def write_runs(self, side: Side, runs: Runs) -> None:
        """The intervals of this block's rows, where each sees the run at its own place."""
        thread, _, _ = cute.arch.thread_idx()
        begin, end = side.tiles(False)
        end_row = cutlass.min(end * side.row_tile, side.rows)
        for row in cutlass.range(begin * side.row_tile + thread, end_row, THREADS, unroll=2):
            lo, hi = self.band(side, row)
            if cutlass.const_expr(self.has_ids):
                at = cutlass.min(row, side.columns - 1)  # rows beyond have no id
                lo, hi = cutlass.max(lo, runs.start(at)), cutlass.min(hi, runs.end(at))
                hi = cutlass.select_(read(side.row_ids, row) < 0, Int32(0), hi)
            self.write_interval(side, row, lo, hi)
        if (thread == 0) & (side.share == 0):
            write(side.exact, 0, Uint8(1))

    @cute.jit
    def look_up_all(self, side: Side, runs: Runs, flag: cute.Pointer, mask: Int32) -> None:
        """The intervals of all rows by the hash table; leaves 1 in `flag` where one has columns of other ids."""
        if cutlass.const_expr(not self.has_ids):
            return
        thread, _, _ = cute.arch.thread_idx()
        self.fill_table(side, runs, mask)
        if thread == 0:
            write(flag, 0, Int32(0))
        cute.arch.sync_threads()
        for row in cutlass.range(thread, side.rows, THREADS, unroll=1):
            lo, hi = self.band(side, row)
            value = read(side.row_ids, row)
            if value < 0:
                hi = Int32(0)
            elif lo < hi:
                lo, hi = self.look_up(side, runs, mask, value, (lo, hi))
                if (lo < hi) & (runs.start(cutlass.max(hi - 1, Int32(0))) > lo):
                    cute.arch.atomic_max(flag, Int32(1))
            self.write_interval(side, row, lo, hi)
        cute.arch.sync_threads()
        if thread == 0:
            write(side.exact, 0, Uint8(1 - read(flag, 0)))

    def write_interval(self, side: Side, row: Any, lo: Int32, hi: Int32) -> None:
        """One row's columns [lo, hi); 0, 0 where there are none."""
        is_empty = lo >= hi
        write(side.lo, row, cutlass.select_(is_empty, Int32(0), lo))
        write(side.hi, row, cutlass.select_(is_empty, Int32(0), hi))

    @cute.jit
    def write_tiles(self, side: Side, is_exact: Int32, is_whole: bool) -> None:
        """The column tiles of this block's row tiles, or of all, a warp each, and their clocks."""
        thread, _, _ = cute.arch.thread_idx()
        lane = thread % WARP
        begin_tile, end_tile = side.tiles(is_whole)
        for tile in cutlass.range(begin_tile + thread // WARP, end_tile, WARPS, unroll=1):
            first = tile * side.row_tile
            end_row = cutlass.min(first + side.row_tile, side.rows)
            least_lo, greatest_lo = side.columns, Int32(0)
            least_hi, greatest_hi = side.columns, Int32(0)
            for row in cutlass.range(first + lane, end_row, WARP, unroll=6):
                lo, hi = read(side.lo, row), read(side.hi, row)
                least_lo = cutlass.min(least_lo, cutlass.select_(lo < hi, lo, side.columns))
                greatest_lo, greatest_hi = cutlass.max(greatest_lo, lo), cutlass.max(greatest_hi, hi)
                least_hi = cutlass.min(least_hi, hi)
            least_lo = cute.arch.warp_redux_sync(least_lo, "min")
            greatest_lo = cute.arch.warp_redux_sync(greatest_lo, "max")
            least_hi = cute.arch.warp_redux_sync(least_hi, "min")
            greatest_hi = cute.arch.warp_redux_sync(greatest_hi, "max")
            if lane == 0:
                end = cute.ceil_div(greatest_hi, side.column_tile)
                full_begin = cute.ceil_div(greatest_lo, side.column_tile)
                full_end = least_hi // side.column_tile
                has_full = (full_begin < full_end) & (is_exact != 0)
                begin = cutlass.select_(end > 0, least_lo // side.column_tile, Int32(0))
                full_begin = cutlass.select_(has_full, full_begin, end)
                full_end = cutlass.select_(has_full, full_end, end)
                for column, bound in enumerate((begin, full_begin, full_end, end)):
                    write(side.bounds, tile * 4 + column, bound)
                full = full_end - full_begin
                clocks = side.overhead + side.full_clocks * full + side.partial_clocks * (end - begin - full)
                write(side.clocks, tile, clocks)

    @cute.kernel
    def kernel(self, ids: Any, lengths: Any, results: Any, table: Any, integers: tuple[Int32, ...]) -> None:
        """The text of the module says who does what."""
        batch, direction, share = cute.arch.block_idx()
        _, _, shares = cute.arch.grid_dim()
        memory = cutlass.memory.SmemAllocator()
        runs = Runs(*(memory.allocate_array(Int32, self.words) for _ in range(3)))
        sums, flag = memory.allocate_array(Int32, WARPS), memory.allocate_array(Int32, 1)
        for side in cutlass.range_constexpr(2):
            if direction == side:
                mine = self.side(side, batch, (share, shares), ids, lengths, results, table, integers)
                self.plan(mine, runs, sums, flag, integers[2] - 1)

    def side(
        self,
        number: int,
        batch: Int32,
        share: tuple[Int32, Int32],
        ids: Any,
        lengths: Any,
        results: Any,
        table: Any,
        integers: tuple[Int32, ...],
    ) -> Side:
        """The pointers and sizes of one direction."""
        sizes = (integers[0], integers[1])
        rows, columns = sizes[number], sizes[1 - number]
        lower, upper, row_tile, column_tile, full, partial, overhead = integers[3 + 7 * number : 10 + 7 * number]
        lo, hi, exact, bounds, clocks = results[5 * number : 5 * number + 5]
        row_tiles = cute.ceil_div(rows, row_tile)
        of_rows = of_columns = row_length = column_length = hashed = None
        if self.has_ids:
            of_rows, of_columns = ids[number] + batch * rows, ids[1 - number] + batch * columns
            hashed = table + (batch * 2 + number) * integers[2] * ENTRY
        if self.has_lengths:
            row_length, column_length = lengths[number] + batch, lengths[1 - number] + batch
        return Side(
            *(of_rows, of_columns, row_length, column_length),
            *(lo + batch * rows, hi + batch * rows, exact + batch),
            *(bounds + batch * row_tiles * 4, clocks + batch * row_tiles, hashed),
            *(rows, columns, lower, upper, row_tile, column_tile, full, partial, overhead, *share),
        )

    @cute.jit
    def host(self, ids: Any, lengths: Any, results: Any, table: Any, integers: tuple[Int32, ...]) -> None:
        """Exists for the compiler only: the package's own runtime launches the kernel."""
        self.kernel(ids, lengths, results, table, integers).launch(grid=(1, 1, 1), block=(THREADS, 1, 1))


def trace(plan: KernelPlan) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """The function to compile, and arguments of the right types."""
    made = PlanRows(plan)

    def pointer(kind: Any) -> Any:
        return make_ptr(kind, 4, cute.AddressSpace.gmem, assumed_align=kind.width // 8)

    pair = (pointer(Int32),) * 2
    of_side = (pointer(Int32), pointer(Int32), pointer(Uint8), pointer(Int32), pointer(Int32))
    ids, lengths = (pair if exists else None for exists in (made.has_ids, made.has_lengths))
    table = pointer(Int32) if made.has_ids else None
    return made.host, (ids, lengths, of_side * 2, table, (Int32(1),) * 17)
