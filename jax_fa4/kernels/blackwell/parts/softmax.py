"""The softmax role: a warpgroup turns every tile of scores of its stage into probs, one row a thread."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from jax_fa4.kernels.blackwell.geometry import FRAGMENT, FRAGMENTS, HEAD_FRAGMENTS, KEY_TILE
from jax_fa4.kernels.blackwell.parts import tensor_memory
from jax_fa4.kernels.blackwell.parts.places import Past
from jax_fa4.kernels.blackwell.parts.shape import Context, Memory
from jax_fa4.kernels.parts.assembly import assembly
from jax_fa4.kernels.parts.exp2 import ScaledRow
from jax_fa4.kernels.parts.rounding import round_pair
from jax_fa4.kernels.parts.row_mask import hidden_words, hide, hide_other_ids
from jax_fa4.kernels.parts.row_softmax import RowStatistics, cap, highest_of

FACTOR_BARRIER = 1  # named barriers 1 .. 8: a warp of the softmax (stage, warp) and the correction warp of its rows
PAIR_THREADS = 64
POLYNOMIAL_DEGREE = 3  # 8.8e-5 relative, against bfloat16's rounding of 2e-3 (docs/performance.md)


def notify_pair(number: Int32) -> None:
    """Tell the other warp of a pair; it need not be there yet."""
    assembly(f"barrier.cta.arrive $0, {PAIR_THREADS};", [], number)


def wait_pair(number: Int32) -> None:
    """Wait for the other warp of a pair."""
    assembly(f"barrier.cta.sync $0, {PAIR_THREADS};", [], number)


class Softmax:
    """A warpgroup of one stage."""

    def __init__(self, memory: Memory, stage: Int32, thread: Int32, statistics: RowStatistics, cap_log2: Any) -> None:
        self.shape, self.stage, self.row, self.past = memory.shape, stage, thread, Past(memory.shape.has_many_items)
        self.statistics, self.cap_log2 = statistics, cap_log2
        warp = cute.arch.make_warp_uniform(thread // 32)
        self.pair = FACTOR_BARRIER + 4 * stage + warp
        lanes = tensor_memory.lanes_of(warp)
        self.scores = lanes + stage * KEY_TILE
        probs = [self.shape.columns(f"probs_{one}") for one in range(2)]
        self.probs = lanes + probs[0] + stage * (probs[1] - probs[0])

    def start(self, context: Context) -> None:
        """Turn to an item: what the row sees of it."""
        self.context = context
        self.query_row = context.first_row(self.stage) + self.row
        has_lo = self.shape.has_left or self.shape.intervals
        self.lo = context.visible.lo(self.query_row) if has_lo else None
        self.hi = context.visible.hi(self.query_row)

    @cute.jit
    def run(self, context: Context) -> None:
        """Every step of an item: the first, other masked ones, whole ones; each kind has its copy of the code."""
        self.start(context)
        item = context.item
        if item.count > 0:
            self.step(Int32(0), is_masked=True, is_first=True)
            masked = self.masked_count()
            for step in cutlass.range(1, masked, 1, unroll=1):
                self.step(step, is_masked=True, is_first=False)
            for step in cutlass.range(cutlass.max(masked, Int32(1)), item.count, 1, unroll=1):
                self.step(step, is_masked=False, is_first=False)
            context.signal("out_done").wait(self.stage, self.past.visiting)
            self.publish()
        self.past.add(item.count)

    def masked_count(self) -> Int32:
        """Steps that need element masks; with a right edge alone, those of this stage's rows, not of the item's."""
        context, item, shape = self.context, self.context.item, self.shape
        if shape.has_left or shape.intervals:
            return item.masked_count
        whole = context.visible.hi(context.first_row(self.stage)) // KEY_TILE
        return item.end - cutlass.min(cutlass.max(whole, item.begin), item.end)

    def step(self, step: Any, is_masked: bool, is_first: bool) -> None:
        """One tile: scores from tensor memory, probs back to it."""
        context, statistics = self.context, self.statistics
        hides_in_place = is_masked and self.shape.loads_max
        words = self.tile_words(step) if is_masked and not hides_in_place else None
        context.signal("scores_ready").wait(self.stage, self.past.steps + step)
        tensor_memory.fence_after_wait()
        if hides_in_place:
            self.hide_in_place(step)
        if self.shape.loads_max and (is_masked or not self.shape.has_cap):
            scores, highest = self.load_scores_with_max()
        else:
            scores, highest = self.load_scores(words)
        factor = None
        if is_first:
            scaled = statistics.take_first(highest)
        else:
            scaled, factor = statistics.raise_max(highest, is_masked)
        if self.shape.has_own_probs:
            self.release_scores(step, is_first)
        if factor is not None:
            # The correction has read the last factor: what this warp has waited for was issued after that.
            context.statistic("factors", self.stage, self.row)[0] = factor
            notify_pair(self.pair)
        powers = self.store_probs(scores, scaled, is_masked)
        statistics.add(powers, factor)

    def load_scores(self, words: list[Any] | None) -> tuple[list[Any], Float32]:
        """The row's scores, capped, without those whose bits in `words` are set; and the highest of them."""
        scores: list[Any] = []
        for fragment in range(FRAGMENTS):
            scores += tensor_memory.load(self.scores, FRAGMENT, fragment * FRAGMENT)
        if self.shape.has_cap:
            cap(scores, self.cap_log2)
        if words is not None:
            hide(scores, words)
        return scores, highest_of(scores)

    def load_scores_with_max(self) -> tuple[list[Any], Float32]:
        """The row's scores as they lie in tensor memory, and the highest of them, which the loads tell."""
        found = [tensor_memory.load_with_max(self.scores, FRAGMENT, one * FRAGMENT) for one in range(FRAGMENTS)]
        return [score for scores, _ in found for score in scores], highest_of([highest for _, highest in found])

    @cute.jit
    def hide_in_place(self, step: Any) -> None:
        """Cap and hide scores in tensor memory, so that the loads that follow find the highest of the others.

        A loop over fragments, which leaves out those that every row of the warp sees whole: of a tile on the diagonal
        a warp sees all but a few so.
        """
        first_column = self.context.item.key_tile(step) * KEY_TILE
        for fragment in cutlass.range(FRAGMENTS, unroll=1):
            word = self.hidden_words(first_column + fragment * FRAGMENT, FRAGMENT)[0]
            if self.shape.has_cap or cute.arch.vote_any_sync(word != Uint32(0)):
                self.rewrite(fragment, word)
        tensor_memory.wait_stores()

    def rewrite(self, fragment: Any, word: Any) -> None:
        """Cap a fragment of scores in tensor memory, and hide those whose bits are set."""
        address = self.scores + fragment * FRAGMENT
        scores = list(tensor_memory.load(address, FRAGMENT))
        if self.shape.has_cap:
            cap(scores, self.cap_log2)
        hide(scores, [word])
        tensor_memory.store(address, scores)

    def release_scores(self, step: Any, is_first: bool) -> None:
        """The scores are in registers; the probs' columns are free when the product with the last ones is done."""
        tensor_memory.wait_loads()
        tensor_memory.fence_before_arrival()
        self.context.signal("scores_read").arrive_elected(self.stage)
        if not is_first:
            # The last step of an item does not tell.
            self.context.signal("out_updated").wait(self.stage, self.past.steps - self.past.visiting + step - 1)
            tensor_memory.fence_after_wait()

    def tile_words(self, step: Any) -> list[Any]:
        """Bits of the keys of a step that the row does not see."""
        return self.hidden_words(self.context.item.key_tile(step) * KEY_TILE, KEY_TILE)

    def hidden_words(self, first_column: Int32, columns: int) -> list[Any]:
        """Bits of these keys that the row does not see."""
        words: list[Any] = hidden_words(self.lo, self.hi, first_column, columns)
        if self.shape.has_ids:
            tensor = cute.make_rmem_tensor((len(words),), Uint32)
            for place, word in enumerate(words):
                tensor[place] = word
            self.compare_ids(tensor, first_column)
            words = [tensor[place] for place in range(len(words))]
        return words

    @cute.jit
    def compare_ids(self, words: cute.Tensor, first_column: Int32) -> None:
        """Hide also the keys whose ids differ from the row's, in items whose ids lie in no simple order."""
        if self.context.item.compare_ids != 0:
            ids = self.context.ids
            hide_other_ids(words, ids.of_query(self.query_row), ids, first_column)

    def store_probs(self, scores: list[Any], scaled: ScaledRow, is_masked: bool) -> list[Any]:
        """Powers of a row, stored as probs fragment by fragment; tells the tensor core after three and after all."""
        powers: list[Any] = []
        for fragment in range(FRAGMENTS):
            # Masked tiles are few: there the code is kept short, without the polynomial.
            count = 0 if is_masked else self.shape.emulated[fragment]
            found = self.fragment_powers(scores[fragment * FRAGMENT : (fragment + 1) * FRAGMENT], scaled, count)
            words = [round_pair(low, high, self.shape.dtype) for low, high in found]
            tensor_memory.store(self.probs, words, fragment * FRAGMENT // 2)
            powers += found
            if fragment + 1 in (HEAD_FRAGMENTS, FRAGMENTS):
                tensor_memory.wait_stores()
                tensor_memory.fence_before_arrival()
                name = "output_ready" if fragment + 1 == HEAD_FRAGMENTS else "probs_ready"
                self.context.signal(name).arrive_elected(self.stage)
        return powers

    def fragment_powers(self, scores: list[Any], scaled: ScaledRow, emulated: int) -> list[Any]:
        """Pairs of powers of a fragment; `emulated` of them, spread evenly, by the polynomial."""
        pairs = list(zip(scores[::2], scores[1::2], strict=True))
        chosen = {(2 * place + 1) * len(pairs) // (2 * emulated) for place in range(emulated)}
        unit_offset: Any = scaled.unit_offset() if emulated else None
        return [
            scaled.by_polynomial(pair, unit_offset, POLYNOMIAL_DEGREE) if place in chosen else scaled.by_unit(pair)
            for place, pair in enumerate(pairs)
        ]

    def publish(self) -> None:
        """Hand the row's sum and maximum to the correction, which has read its last factor before."""
        context, statistics = self.context, self.statistics
        context.statistic("sums", self.stage, self.row)[0] = statistics.sum[0] + statistics.sum[1]
        context.statistic("maxima", self.stage, self.row)[0] = statistics.max[0]
        notify_pair(self.pair)
