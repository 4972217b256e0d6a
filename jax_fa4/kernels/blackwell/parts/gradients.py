"""Roles of the backward that work on numbers: the computing warpgroups, and the warpgroup that adds up query gradients.

A computing thread has one key; its warpgroup has one half of a tile's queries, 64 columns of every accumulator whose
rows are keys, which it takes as two fragments of 32. What it writes to tensor memory lies over what it has read itself,
so its warpgroups never wait for each other:

    columns        0 ...... 31  32 ..... 63 | 64 ..... 95  96 .... 127
    scores         group 0: fragment 0, 1   | group 1: fragment 1, 0
    probs          0 ... 31                 |              96 ... 127        two to a column

(likewise for dP and dS), and the 64 columns between are free for query gradients. Group 1 takes its fragments in the
other order, since the place of its first probs must have been read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from jax_fa4.kernels.blackwell.backward_plans import (
    FRAGMENT,
    TILE,
    WARP_ROWS,
    WARPS_PER_GROUP,
    grad_columns,
)
from jax_fa4.kernels.blackwell.parts import tensor_memory
from jax_fa4.kernels.blackwell.parts.backward_shape import ELEMENT_BYTES, HALF, Context
from jax_fa4.kernels.parts import boxes, bulk, by_address
from jax_fa4.kernels.parts.exp2 import exp2_unit
from jax_fa4.kernels.parts.rounding import round_pair
from jax_fa4.kernels.parts.row_mask import hidden_bits, hide_other_ids

FRAGMENTS = HALF // FRAGMENT
CAPPED_FRAGMENT = 16  # scores that are capped together
VECTOR = 4  # words of 16 bytes
ROW_BYTES = HALF * ELEMENT_BYTES  # of dS in shared memory: 128, the swizzle's width
Pair = tuple[Float32, Float32]
LOADED_COLUMNS = 64  # query gradients that a reducing thread holds at once: more spill, if only elsewhere


class Compute:
    """One warpgroup: probs and their gradients, then one of the item's two results."""

    def __init__(self, context: Context, group: Int32, thread: Int32, floats: tuple[Float32, Float32, Float32]) -> None:
        self.context, self.shape, self.group, self.thread = context, context.shape, group, thread
        self.scale, self.scale_log2, self.cap_log2 = floats
        self.row = context.key_row + thread
        self.lanes = tensor_memory.lanes_of(thread // 32)
        # First column of each fragment in the tile.
        self.first = [group * 96, 32 + group * 32]
        self._place_statistics()
        self._place_grad_scores()

    def _place_statistics(self) -> None:
        """Where the thread reads the log-sums: keys beyond the last read +inf, which makes their probs 0."""
        context = self.context
        is_real = self.row < context.visible.queries
        self.log_sums = cutlass.select_(is_real, context.buffer("statistics"), context.buffer("no_row"))
        self.log_sums_stage = cutlass.select_(is_real, Int32(self.shape.stage_bytes("statistics")), Int32(0))

    def _place_grad_scores(self) -> None:
        """Where the thread writes its row of dS in shared memory, swizzled: 16-byte pieces trade places by row."""
        context = self.context
        if self.shape.ctas == 1:
            half = context.buffer("grad_scores", self.group)
        else:
            # What belongs to this CTA's queries stays, in its keys' place; the rest leaves for the other.
            mine = context.buffer("grad_scores", context.rank)
            self.stays = self.group == context.rank
            half = cutlass.select_(self.stays, mine, context.buffer("leaving_grad_scores"))
            self.leaving = half + self.thread // 32 * WARP_ROWS * ROW_BYTES
            self.arriving = by_address.in_cta(mine + self.leaving - half, 1 - context.rank)
        row = half + self.thread * ROW_BYTES + (self.thread & 7) * 16
        # A fragment has half of the row's pieces.
        self.grad_scores = [row ^ ((self.first[part] - self.group * HALF) * ELEMENT_BYTES) for part in range(FRAGMENTS)]

    def _half_columns(self, name: str, part: int) -> Int32:
        """Where 16-bit values of a fragment go that has the columns of its float32 values."""
        first = self.first[part] // 2 + self.group * HALF
        if name == "probs" and self.shape.has_own_probs:
            first = self.first[part] // 2
        return self.lanes + self.shape.columns(name) + first

    @cute.jit
    def run(self) -> None:
        """Every tile: those that need masks first, of each head."""
        item = self.context.item
        for head in cutlass.range(0, self.context.group, 1, unroll=1):
            before = head * item.count
            for step in cutlass.range(0, item.masked_count, 1, unroll=1):
                self.step(before + step, step, True)
            for step in cutlass.range(item.masked_count, item.count, 1, unroll=1):
                self.step(before + step, step, False)

    def step(self, use: Any, step: Any, is_masked: bool) -> None:
        """One tile; `use` counts the tiles of all heads, `step` those of this head."""
        hidden = self.hidden_words(step) if is_masked else [None] * FRAGMENTS
        self.context.wait("statistics_landed", use)
        self.context.wait("scores_ready", use)
        tensor_memory.fence_after_wait()
        kept = self.make_probs(use, hidden)
        self.signal("probs_ready")
        self.context.wait("grad_probs_ready", use)
        tensor_memory.fence_after_wait()
        self.make_grad_scores(use, kept)
        self.context.signal("statistics_free").arrive_elected(self.context.stage("statistics", use))
        by_address.fence_for_async()
        self.signal("grad_scores_ready")
        if self.shape.ctas == 2:
            self.exchange()

    @cute.jit
    def exchange(self) -> None:
        """Tell of the half of dS that stays, or send the half that belongs to the other CTA."""
        landed = self.context.signal("grad_scores_landed")
        if self.stays:
            landed.arrive_elected(0)
        else:
            there = by_address.in_cta(landed.address(0), 1 - self.context.rank)
            by_address.send(self.arriving, self.leaving, WARP_ROWS * ROW_BYTES, there)

    def signal(self, event: str) -> None:
        """Tell of what was written to tensor memory."""
        tensor_memory.wait_stores()
        tensor_memory.fence_before_arrival()
        self.context.signal(event).arrive_elected(0)

    def make_probs(self, use: Int32, hidden: list[Any]) -> list[Float32]:
        """Probs to tensor memory; what the gradients of probs are to be multiplied by, fragment by fragment."""
        shape = self.shape
        log_sums = self.log_sums + self.context.stage("statistics", use) * self.log_sums_stage
        columns = self.lanes + shape.columns("scores")
        # All scores are loaded at once; with a cap, which needs registers, few, and the next ones when the probs of
        # these are done: none of those is negative, so the sign of the last is a 0 that is not known when compiling.
        size = CAPPED_FRAGMENT if shape.has_cap else FRAGMENT
        places = [(first, start) for first in self.first for start in range(0, FRAGMENT, size)]
        at_once = 1 if shape.has_cap else len(places)
        loaded: list[Any] = []
        kept: list[Float32] = []
        words: list[Any] = []
        for number, (first, start) in enumerate(places):
            for ahead in places[len(loaded) : number + at_once]:
                zero = Int32(words[-1] >> 31) if words and shape.has_cap else 0
                loaded.append(tensor_memory.load(columns + sum(ahead) + zero, size))
            hidden_of_part = hidden[number * size // FRAGMENT]
            words += self.exponentiate(loaded[number], start, hidden_of_part, log_sums + first * 4, kept)
            if len(words) * 2 == FRAGMENT:
                tensor_memory.store(self._half_columns("probs", number * size // FRAGMENT), words)
                words = []
        return kept

    def hidden_words(self, step: Any) -> list[Any]:
        """Which of each fragment's queries do not see the thread's key, a bit for each, of the step-th tile."""
        # What masks are made of is read anew for each tile, since registers are few: 0 is added to the row, but that
        # is not known when compiling.
        row, visible = self.row + (Int32(step) >> 30), self.context.visible
        lo, hi = visible.lo(row), visible.hi(row)
        words, first = cute.make_rmem_tensor((FRAGMENTS,), Uint32), self.context.query_row(step) + self.group * HALF
        for place in range(FRAGMENTS):
            words[place] = hidden_bits(lo, hi, first + place * FRAGMENT)
        if self.shape.has_ids:
            self.hide_other_ids(words, row, first)
        # The second group takes its fragments in the other order.
        is_second = self.group != 0
        return [cutlass.select_(is_second, words[1 - part], words[part]) for part in range(FRAGMENTS)]

    @cute.jit
    def hide_other_ids(self, words: cute.Tensor, row: Int32, first_query: Int32) -> None:
        """The same for queries of other ids, where the table says that they must be compared."""
        if self.context.item.compare_ids != 0:
            ids = self.context.ids
            hide_other_ids(words, ids.of_query(row), ids, first_query)

    def exponentiate(
        self, scores: Any, first: int, hidden: Uint32 | None, log_sums: Int32, kept: list[Float32]
    ) -> list[Any]:
        """Probs 2^(scale * score - log-sum) of a fragment, from its `first` on, in pairs of 16 bits; the log-sums of
        all of it lie at an address.

        `kept` receives the probs, or with a cap the probs times the derivatives of the capped scores.
        """
        minus_scale = (-self.scale_log2, -self.scale_log2)
        words: list[Any] = []
        for start in range(first, first + len(scores), 2):
            if start % VECTOR == 0:
                of_four = by_address.read_four(log_sums, start * 4)
            pair, slopes = (scores[start - first], scores[start - first + 1]), None
            if self.shape.has_cap:
                pair, slopes = cap(pair, self.cap_log2)
            if hidden is not None:
                pair = tuple(
                    cutlass.select_(((hidden >> (start + place)) & 1) != 0, -Float32.inf, pair[place])
                    for place in (0, 1)
                )
            # Negated here and back in the special-function unit's operand, which is free.
            powers = cute.arch.fma_packed_f32x2(pair, minus_scale, of_four[start % VECTOR :][:2])
            probs = (exp2_unit(-powers[0]), exp2_unit(-powers[1]))
            words += self.round(probs)
            kept += probs if slopes is None else cute.arch.mul_packed_f32x2(probs, slopes)
        return words

    def make_grad_scores(self, use: Int32, kept: list[Float32]) -> None:
        """dS = P (dP - delta) to tensor memory and to shared memory."""
        context, shape = self.context, self.shape
        deltas = context.buffer("statistics", context.stage("statistics", use)) + TILE * 4
        columns = self.lanes + shape.columns("grad_probs")
        loaded: Any = tensor_memory.load(columns + self.first[0], FRAGMENT)
        # With a cap there are no registers for the places of all pieces, so they are worked out for each tile.
        zero = Int32(use) >> 30 if shape.has_cap else Int32(0)
        for part in range(FRAGMENTS):
            grads: list[Float32] = []
            for start in range(0, FRAGMENT, VECTOR):
                of_four = by_address.read_four(deltas + self.first[part] * 4, start * 4)
                for pair in (0, 2):
                    at = start + pair
                    difference = cute.arch.sub_packed_f32x2(
                        (loaded[at], loaded[at + 1]), (of_four[pair], of_four[pair + 1])
                    )
                    of_pair = kept[part * FRAGMENT + at], kept[part * FRAGMENT + at + 1]
                    grads += cute.arch.mul_packed_f32x2(difference, of_pair)
            if part + 1 < FRAGMENTS:
                loaded = tensor_memory.load(columns + self.first[part + 1], FRAGMENT)
            words = self.round(grads)
            tensor_memory.store(self._half_columns("grad_probs", part), words)
            if part == 0:
                # The product of the tile before has read shared memory.
                context.wait("grad_query_ready", use - 1)
            for piece in range(FRAGMENT * ELEMENT_BYTES // 16):
                by_address.write_four(
                    (self.grad_scores[part] + zero) ^ (piece * 16), words[piece * VECTOR : (piece + 1) * VECTOR]
                )

    def round(self, values: Sequence[Float32]) -> list[Any]:
        """Pairs of 16-bit values."""
        return [round_pair(low, high, self.shape.dtype) for low, high in zip(values[::2], values[1::2], strict=True)]

    @cute.jit
    def store(self, key_map: cute.CopyAtom, value_map: cute.CopyAtom) -> None:
        """Group 0 writes the values' gradients, group 1 the keys'."""
        if self.context.total > 0:
            self.context.wait("grads_ready", Int32(0))
            tensor_memory.fence_after_wait()
        if self.group == 0:
            self.store_result("grad_value", self.shape.value_dim, value_map, Float32(1.0))
        else:
            self.store_result("grad_key", self.shape.head_dim, key_map, self.scale)

    @cute.jit
    def clear(self, columns: Int32, dim: cutlass.Constexpr) -> None:
        """Make the sums of an item that met no tile zeros."""
        if self.context.total == 0:
            for column in range(0, dim, FRAGMENT):
                tensor_memory.store(columns + column, [Float32(0.0)] * FRAGMENT)
            tensor_memory.wait_stores()

    def store_result(self, name: str, dim: int, tensor_map: cute.CopyAtom, factor: Float32) -> None:
        """Each warp brings its 32 keys from tensor memory to shared memory, and from there to the tensor."""
        context, warp, is_split = self.context, self.thread // 32, self.shape.is_split
        columns = self.lanes + self.shape.columns(name)
        self.clear(columns, dim)
        width, element_bytes = grad_columns(dim, is_split), 4 if is_split else ELEMENT_BYTES
        row_bytes = width * element_bytes
        # Parts in float32 are twice as large as where they are staged: so boxes take turns.
        slots = self.shape.stage_bytes(f"staged_{name}") // (TILE * row_bytes)
        # Rows of 128 bytes: a piece's place is changed by its row modulo 8; of 64: by half the row, modulo 4.
        swizzle = (self.thread & 7) * 16 if row_bytes == ROW_BYTES else ((self.thread >> 1) & 3) * 16
        for box in range(dim // width):
            start = context.buffer(f"staged_{name}") + box % slots * TILE * row_bytes
            row = start + self.thread * row_bytes + swizzle
            if box >= slots:
                cute.arch.cp_async_bulk_wait_group(slots - 1, read=True)
                cute.arch.sync_warp()
            for column in range(0, width, FRAGMENT):
                at = columns + box * width + column
                values = [value * factor for value in tensor_memory.load(at, FRAGMENT)]
                words = values if is_split else self.round(values)
                for piece in range(FRAGMENT * element_bytes // 16):
                    place = row ^ (column * element_bytes + piece * 16)
                    by_address.write_four(place, words[piece * VECTOR : (piece + 1) * VECTOR])
            by_address.fence_for_async()
            cute.arch.sync_warp()
            corner = (box * width, context.key_row + warp * WARP_ROWS, context.item.head, context.item.batch)
            boxes.store(boxes.address_of(tensor_map), start + warp * WARP_ROWS * row_bytes, corner)
            cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)


def cap(scores: Pair, exponent_scale: Float32) -> tuple[Pair, Pair]:
    """tanh(x) of two raw scores s, where 2^(exponent_scale * s) = e^(2 x), and the derivatives 1 - tanh(x)^2.

    With u = 1 - tanh(x) = 1 / (1/2 + e^(2 x) / 2) the derivative is u (2 - u), which keeps its relative error where
    tanh(x) is near 1; `softmax_row.cap` says why this is not the hardware's tanh.
    """
    exponents = cute.arch.mul_packed_f32x2(scores, (exponent_scale, exponent_scale))
    powers = (exp2_unit(exponents[0]), exp2_unit(exponents[1]))
    halves = cute.arch.fma_packed_f32x2(powers, _both(0.5), _both(0.5))
    gaps = (cute.arch.rcp_approx(halves[0]), cute.arch.rcp_approx(halves[1]))
    slopes = cute.arch.mul_packed_f32x2(gaps, cute.arch.sub_packed_f32x2(_both(2.0), gaps))
    return cute.arch.sub_packed_f32x2(_both(1.0), gaps), slopes


def _both(value: float) -> Pair:
    return Float32(value), Float32(value)


class Relay:
    """One warp of each CTA of a pair: tells the first one's tensor core when both halves of its dS are there."""

    def __init__(self, context: Context) -> None:
        self.context = context

    @cute.jit
    def run(self) -> None:
        """Every tile."""
        context = self.context
        landed, size = context.signal("grad_scores_landed"), context.shape.stage_bytes("leaving_grad_scores")
        for use in cutlass.range(0, context.total, 1, unroll=1):
            boxes.expect(landed.address(0), size)
            context.wait("grad_scores_landed", use)
            context.signal("grad_scores_exchanged").arrive_elected(0)


class Order:
    """The order in which items add to a tile's sums, each warp by itself: those with later keys first, or those with
    earlier ones, as they start.

    Warp w of an item adds to the same places as warp w of any other. It waits until its flag counts the items before
    its own, and raises it when its sums have arrived.
    """

    def __init__(self, flags: cute.Pointer, ranks: Any, rank_stride: Int32, query_tiles: Int32) -> None:
        self.flags, self.ranks, self.rank_stride, self.query_tiles = flags, ranks, rank_stride, query_tiles

    def flag(self, context: Context, warp: Int32, head: Any, tile: Int32) -> cute.Pointer:
        """The warp's flag of a tile of queries."""
        heads, ctas = context.group * context.kv_heads, context.shape.ctas
        number = (Int64(context.item.batch) * heads + head) * self.query_tiles + tile
        return self.flags + ((number * ctas + context.rank) * WARPS_PER_GROUP + warp)

    def before(self, context: Context, tile: Int32) -> Int32:
        """How many items add to a tile before this one."""
        item, rows = context.item, context.shape.items_rows
        if context.shape.intervals:
            key_tiles = cute.ceil_div(context.visible.queries, rows)
            row = Int64(item.batch) * self.rank_stride * key_tiles + item.query_tile
            return cute.make_tensor(self.ranks + (row * self.query_tiles + tile), cute.make_layout(1))[0]
        # In the transposed band, rows are keys: the last that the tile's last query sees, the first that its first one
        # does.
        band: Any = context.visible
        seen = cutlass.min((tile + 1) * TILE - band.offset + band.left, band.queries)
        first = cutlass.max(tile * TILE - band.offset - band.right, Int32(0))
        return cutlass.select_(
            context.last_first != 0, (seen - 1) // rows - item.query_tile, item.query_tile - first // rows
        )


class Reduce:
    """One warpgroup: adds every tile's query gradients to their sums in global memory, 32 queries a warp."""

    def __init__(self, context: Context, thread: Int32, sums_map: cute.CopyAtom, order: Order | None) -> None:
        self.context, self.shape, self.order = context, context.shape, order
        self.warp, lane = thread // 32, thread % 32
        self.lanes = tensor_memory.lanes_of(self.warp)
        self.sums_map = boxes.address_of(sums_map)
        self.slots = self.shape.stages("staged_grad_query") // WARPS_PER_GROUP
        self.staged = context.buffer("staged_grad_query", self.warp * self.slots)
        self.box = self.shape.stage_bytes("staged_grad_query") // (WARP_ROWS * 4)  # columns
        swizzle = (lane & 7) * 16 if self.box == FRAGMENT else ((lane >> 1) & 3) * 16
        self.row = self.staged + lane * self.box * 4 + swizzle
        self.pieces = self.shape.head_dim // self.shape.ctas // FRAGMENT
        self.first_row, self.first_column = self.warp * WARP_ROWS, Int32(0)
        if self.shape.ctas == 2:
            # A product of a pair with 64 rows in each CTA: lanes 64 and up have the second half of the columns.
            self.first_row = context.rank * HALF + (self.warp & 1) * WARP_ROWS
            self.first_column = (self.warp >> 1) * (self.shape.head_dim // 2)

    @cute.jit
    def run(self) -> None:
        """Every tile."""
        context = self.context
        for head in cutlass.range(0, context.group, 1, unroll=1):
            for step in cutlass.range(0, context.item.count, 1, unroll=1):
                self.step(head * context.item.count + step, context.item.head * context.group + head, step)
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    def step(self, use: Any, head: Any, step: Any) -> None:
        """Take one tile's gradients out of tensor memory, as early as registers allow; stage and add them."""
        context, columns = self.context, self.lanes + self.shape.columns("grad_query")
        context.wait("grad_query_ready", use)
        tensor_memory.fence_after_wait()
        loaded: list[Any] = []
        ahead = LOADED_COLUMNS // FRAGMENT
        for piece in range(self.pieces):
            while len(loaded) < min(self.pieces, piece + ahead):
                loaded.append(tensor_memory.load(columns + len(loaded) * FRAGMENT, FRAGMENT))
                if len(loaded) == self.pieces:
                    tensor_memory.wait_loads()
                    tensor_memory.fence_before_arrival()
                    context.signal("grad_query_drained").arrive_elected(0)
            if piece == 0:
                self.wait_for_turn(head, context.query_tile(step))
            for start in range(0, FRAGMENT, self.box):
                column = self.first_column + piece * FRAGMENT + start
                corner = (column, context.query_row(step) + self.first_row, head)
                number = (piece * FRAGMENT + start) // self.box
                self.add(use, number, loaded[piece][start : start + self.box], corner)
        self.end_turn(head, context.query_tile(step))

    def wait_for_turn(self, head: Any, tile: Int32) -> None:
        """Wait until those before have added to a tile, if there is an order."""
        if self.order is not None:
            flag = self.order.flag(self.context, self.warp, head, tile)
            bulk.wait_until(flag, self.order.before(self.context, tile))
            cute.arch.fence_proxy("async.global")
            cute.arch.sync_warp()

    def end_turn(self, head: Any, tile: Int32) -> None:
        """Let the next one add to a tile, when what was added is there, if there is an order."""
        if self.order is not None:
            cute.arch.cp_async_bulk_wait_group(0)
            cute.arch.fence_proxy("async.global")
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                bulk.raise_flag(self.order.flag(self.context, self.warp, head, tile))

    def add(self, use: Int32, number: int, sums: Any, corner: tuple[Any, Any, Any]) -> None:
        """Stage the tile's box of that number, when the last copy of its slot has read it, and add it to memory."""
        slot_bytes = self.shape.stage_bytes("staged_grad_query")
        # Slots take turns; which is known when compiling, unless a tile has an odd number of boxes.
        fixed, moving = (number % self.slots) * slot_bytes, Int32(0)
        if self.pieces * FRAGMENT // self.box % self.slots:
            fixed, moving = 0, ((use + number) & (self.slots - 1)) * slot_bytes
        cute.arch.cp_async_bulk_wait_group(self.slots - 1, read=True)
        cute.arch.sync_warp()
        for column in range(0, self.box, VECTOR):
            by_address.write_four((self.row + moving) ^ (column * 4), sums[column : column + VECTOR], fixed)
        by_address.fence_for_async()
        cute.arch.sync_warp()
        by_address.add(self.sums_map, self.staged + moving + fixed, (*corner, self.context.item.batch))
        cute.arch.cp_async_bulk_commit_group()


def fill_no_row(context: Context, thread: Int32) -> None:
    """Log-sums that make every prob 0, for keys beyond the last (called by 128 threads)."""
    pointer = context.pointer("no_row", Float32) + thread
    cute.make_tensor(pointer, cute.make_layout(1))[0] = Float32.inf
