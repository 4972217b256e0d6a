"""The computing warpgroups of the Hopper backward; the picture is in `backward.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import warp, warpgroup

from jax_fa4.kernels.hopper.backward_item import (
    ADDED_BARRIER,
    CLOSING_BARRIER,
    DRAINED_BARRIER,
    GROUPS,
    KEY_TILE,
    MEETING_BARRIER,
    PIECE_BYTES,
    READ_BARRIER,
    STAGED_BARRIER,
    Context,
)
from jax_fa4.kernels.hopper.backward_query import query_gradients
from jax_fa4.kernels.hopper.forward_item import GROUP_ROWS, PRODUCT_DEPTH
from jax_fa4.kernels.parts import bulk
from jax_fa4.kernels.parts.block_walk import Band, RowIntervals
from jax_fa4.kernels.parts.copied_tiles import copied_tiles
from jax_fa4.kernels.parts.events import GROUP_THREADS, Ring
from jax_fa4.kernels.parts.rounding import round_pair
from jax_fa4.kernels.parts.softmax_row import cap
from jax_fa4.kernels.parts.tile_mask import hide, hide_other_ids


def _exp2(exponent: Float32) -> Float32:
    return cute.math.exp2(exponent, fastmath=True)  # type: ignore[attr-defined]


RowValues = Callable[[int], tuple[Float32, Float32]]  # of the index-th eight queries


class Compute:
    """One warpgroup: 64 keys against every visited query tile, then the gradients of these keys and values."""

    def __init__(
        self,
        context: Context,
        group: Int32,
        thread: Int32,
        visible: Band | RowIntervals,
        ids: Any,
        scales: tuple[Float32, ...],
    ) -> None:
        self.context, self.shape, self.group, self.thread = context, context.shape, group, thread
        self.visible, self.ids = visible, ids
        self.scale, self.scale_log2, self.cap_log2 = scales
        self.lane, self.warp = thread % 32, cute.arch.make_warp_uniform(thread // 32)
        self.key_row = context.walk.item.query_tile * KEY_TILE + group * GROUP_ROWS + self.warp * 16 + self.lane // 4
        self._partition_scores()
        self._partition_gradients()
        self.store_to = self._store_place()
        # Of the thread's two keys, read once an item where they lie in memory.
        self.edges = [self._edges(half) for half in range(2)] if self.shape.intervals else []
        self.key_ids = [ids.of_query(self.key_row + 8 * half) for half in range(2)] if self.shape.has_ids else []

    def _edges(self, half: int) -> tuple[Int32, Int32]:
        """Queries that see one of the thread's two keys; none where it is beyond the last."""
        row = self.key_row + 8 * half
        hi = cutlass.select_(row < self.visible.queries, self.visible.hi(row), Int32(0))
        return self.visible.lo(row), hi

    def _partition_scores(self) -> None:
        shape, context = self.shape, self.context
        product = shape.score_product()
        mine = product.get_slice(self.thread)

        def halves(tile: cute.Tensor) -> cute.Tensor:
            by_group = cute.local_tile(tile[None, None, 0], (GROUP_ROWS, shape.head_dim), (None, 0))
            return product.make_fragment_A(mine.partition_A(by_group))

        self.key, self.value = halves(context.memory.key), halves(context.memory.value)
        self.query, self.grad_out = (
            product.make_fragment_B(mine.partition_B(buffer))
            for buffer in (context.memory.query, context.memory.grad_out)
        )
        tile = product.partition_shape_C((GROUP_ROWS, shape.query_tile))
        self.scores, self.grad_probs = (cute.make_rmem_tensor(tile, Float32) for _ in range(2))

    def _partition_gradients(self) -> None:
        shape, context = self.shape, self.context
        by_key = shape.key_product()
        of_key = by_key.get_slice(self.thread)

        def columns(buffer: cute.Tensor) -> cute.Tensor:
            turned = cute.make_tensor(buffer.iterator, cute.select(buffer.layout, mode=[1, 0, 2]))
            return by_key.make_fragment_B(of_key.partition_B(turned))

        self.query_columns, self.grad_out_columns = columns(context.memory.query), columns(context.memory.grad_out)
        block = by_key.partition_shape_A((GROUP_ROWS, shape.block_rows))
        self.probs, self.grad_scores = (
            [cute.make_rmem_tensor(block, shape.dtype) for _ in range(shape.row_blocks)] for _ in range(2)
        )
        blocks = context.memory.grad_scores
        turned = cute.make_tensor(blocks.iterator, cute.select(blocks.layout, mode=[1, 0, 2]))
        turned = cute.local_tile(turned, (GROUP_ROWS, shape.block_rows), (None, 0, None))
        by_turned = shape.turned_product()
        self.turned_grad_scores = by_turned.make_fragment_A(by_turned.get_slice(self.thread).partition_A(turned))
        gradient = by_key.partition_shape_C((GROUP_ROWS, shape.head_dim))
        self.grad_key, self.grad_value = (cute.make_rmem_tensor(gradient, Float32) for _ in range(2))
        self.query_gradients = query_gradients(context, self.group, self.thread)

    def _store_place(self) -> cute.Pointer:
        """Where this lane's row of a transposed 8 x 8 matrix of dS goes: queries are rows of 128 bytes, 64 keys; 16
        bytes, 8 keys, are swapped as the 128-byte swizzle says (PTX ISA: bits 4..6 by bits 7..9)."""
        matrix, row = self.lane // 8, self.lane % 8
        chunk = (self.warp * 2 + matrix % 2) ^ row
        offset = self.group * self.shape.block_bytes + ((matrix // 2) * 8 + row) * PIECE_BYTES + chunk * 16
        base = cute.recast_ptr(self.context.memory.grad_scores.iterator, dtype=cutlass.Uint8)
        return base + offset

    @cute.jit
    def run(self) -> None:
        """Every step of the item; the last one, which prepares no other, is a copy of its own."""
        context = self.context
        steps, masked = context.walk.steps, context.walk.masked_steps
        self.grad_key.fill(0.0)
        self.grad_value.fill(0.0)
        if steps > 0:
            self.first()
        if cutlass.const_expr(self.shape.is_persistent):
            self.reclaim()
        if steps > 0:
            last = steps - 1
            masked = cutlass.min(masked, last)
            for step in cutlass.range(0, masked, 1, unroll=1):
                self.step(step, is_masked=True, is_last=False)
            for step in cutlass.range(masked, last, 1, unroll=1):
                self.step(step, is_masked=False, is_last=False)
            self.step(last, is_masked=True, is_last=True)
            warpgroup.wait_group(0)
            self.hand_over(last)

    @cute.jit
    def reclaim(self) -> None:
        """The gradients of the item before have left their staging, which dS and staged sums are to overwrite."""
        if self.warp == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        self.meet()

    def hand_over(self, last: Int32) -> None:
        """Keys, values and the last queries are read: the next item's may be copied over them. The last sums have left
        their staging."""
        memory = self.context.memory
        if self.shape.is_ahead:
            self.release(memory.queries, last)
        for ring in (memory.keys, memory.values):
            with cute.arch.elect_one():
                ring.release(self.context.progress.rounds)
        if self.shape.is_persistent:
            cute.arch.barrier(barrier_id=DRAINED_BARRIER + self.group, number_of_threads=GROUP_THREADS + 32)

    def first(self) -> None:
        """Keys and values are there; where scores are ahead, so are those of step 0."""
        self.free_grad_scores()
        memory, rounds = self.context.memory, self.context.progress.rounds
        memory.keys.wait_landed(rounds)
        if self.shape.is_ahead:
            self.issue_scores(memory.queries, Int32(0))
        memory.values.wait_landed(rounds)
        if self.shape.is_ahead:
            warpgroup.wait_group(0)

    def issue_scores(self, queries: Ring, step: Int32) -> None:
        """Wait for the queries and issue their scores."""
        use = self.context.use(step)
        queries.wait_landed(use)
        warpgroup.fence()
        self._multiply_tiles(self.scores, self.key, self.query, queries.stage(use))

    def issue_grad_probs(self, grads: Ring, step: Int32) -> None:
        """Wait for the output gradients and issue dP."""
        use = self.context.use(step)
        grads.wait_landed(use)
        warpgroup.fence()
        self._multiply_tiles(self.grad_probs, self.value, self.grad_out, grads.stage(use))

    def step(self, step: Any, is_masked: bool, is_last: bool) -> None:
        """Every product of a step; what is under way when it starts depends on whether scores are ahead."""
        if self.shape.is_ahead:
            self.step_ahead(step, is_masked, is_last)
        else:
            self.step_alone(step, is_masked, is_last)

    def step_ahead(self, step: Any, is_masked: bool, is_last: bool) -> None:
        """When it starts, its scores are there and dK of the step before is under way."""
        queries, grads = self.context.memory.queries, self.context.memory.grads
        self.issue_grad_probs(grads, Int32(step))
        self.finish_scores(step, is_masked)
        warpgroup.wait_group(1)  # dK of the step before
        self.release_if_any(queries, step)
        # Early, so that nothing waits for shared memory on the longest chain; 80 queries leave no registers for it.
        read = self.row_values if self.shape.sums_by_columns else self.read_rows
        delta = read(self.context.memory.delta, grads, step)
        warpgroup.wait_group(0)  # dP
        self.finish_grad_scores(step, delta)
        self.issue_grad_value(grads, step)
        cute.arch.fence_proxy("async.shared", space="cta")
        if not is_last:
            self.issue_scores(queries, step + 1)
        self.meet()
        warpgroup.wait_group(0 if is_last else 1)  # dV
        self.release(grads, step)
        warpgroup.fence()
        self.query_gradients.issue(step)
        self.multiply_turned_grad_scores(step)
        warpgroup.wait_group(1)  # dQ, and scores that are ahead
        if not is_last:
            self.free_grad_scores()
        self.stage_grad_query()

    def step_alone(self, step: Any, is_masked: bool, is_last: bool) -> None:
        """No product is under way when it starts, nor when it ends."""
        queries, grads = self.context.memory.queries, self.context.memory.grads
        self.issue_scores(queries, Int32(step))
        self.issue_grad_probs(grads, Int32(step))
        warpgroup.wait_group(1)  # the scores
        self.finish_scores(step, is_masked)
        warpgroup.wait_group(0)  # dP
        self.finish_grad_scores(step, self.row_values(self.context.memory.delta, grads, step))
        self.issue_grad_value(grads, step)
        cute.arch.fence_proxy("async.shared", space="cta")
        self.meet()
        warpgroup.fence()
        self.query_gradients.issue(step)
        warpgroup.wait_group(1)  # dV
        self.release(grads, step)
        warpgroup.fence()
        self.multiply_turned_grad_scores(step)
        warpgroup.wait_group(1)  # dQ
        if not is_last:
            self.free_grad_scores()
        self.stage_grad_query()
        warpgroup.wait_group(0)
        self.release(queries, step)

    def meet(self) -> None:
        """Both warpgroups have come here: written their dS, or done with shared memory that is to be overwritten."""
        cute.arch.barrier(barrier_id=MEETING_BARRIER, number_of_threads=GROUPS * GROUP_THREADS)

    def free_grad_scores(self) -> None:
        """Where dS has one stage: this warpgroup has read the other's."""
        if self.shape.grad_score_stages == 1:
            other = READ_BARRIER + 1 - self.group
            cute.arch.barrier_arrive(barrier_id=other, number_of_threads=GROUPS * GROUP_THREADS)

    def finish_scores(self, step: Any, is_masked: bool) -> None:
        """Scores to probabilities."""
        if self.shape.has_cap:
            cap(self.scores, self.cap_log2)
        if is_masked:
            self.hide(step)
        lse = self.row_values(self.context.memory.lse, self.context.memory.queries, step)
        for block in range(self.shape.row_blocks):
            self.finish_probs(lse, block)

    def issue_grad_value(self, grads: Ring, step: Any) -> None:
        """Issue dV."""
        warpgroup.fence()
        self.accumulate(self.grad_value, self.probs, self.grad_out_columns, grads.stage(self.context.use(step)))

    def _multiply_tiles(self, result: cute.Tensor, left: cute.Tensor, right: cute.Tensor, stage: Int32) -> None:
        product = self.shape.score_product()
        for depth in range(self.shape.head_dim // PRODUCT_DEPTH):
            product.set(warpgroup.Field.ACCUMULATE, depth > 0)
            mine = left[None, None, depth, self.group]
            cute.gemm(product, result, mine, right[None, None, depth, stage], result)
        warpgroup.commit_group()

    def accumulate(self, result: cute.Tensor, left: list[cute.Tensor], right: cute.Tensor, stage: Int32) -> None:
        """Issue result += left right, left in registers, a tensor for each block of queries."""
        product = self.shape.key_product()
        product.set(warpgroup.Field.ACCUMULATE, True)
        for depth in range(self.shape.query_tile // PRODUCT_DEPTH):
            block, place = divmod(depth, self.shape.block_rows // PRODUCT_DEPTH)
            cute.gemm(product, result, left[block][None, None, place], right[None, None, depth, stage], result)
        warpgroup.commit_group()

    def multiply_turned_grad_scores(self, step: Int32) -> None:
        """Issue grad_key += dS^T Q."""
        shape, stage = self.shape, self.context.memory.queries.stage(self.context.use(step))
        if not shape.is_turned:
            self.accumulate(self.grad_key, self.grad_scores, self.query_columns, stage)
            return
        product = shape.turned_product()
        product.set(warpgroup.Field.ACCUMULATE, True)
        for depth in range(shape.query_tile // PRODUCT_DEPTH):
            block, place = divmod(depth, shape.block_rows // PRODUCT_DEPTH)
            left = self.turned_grad_scores[
                None, None, place, self.group, (step % shape.grad_score_stages) * shape.row_blocks + block
            ]
            cute.gemm(product, self.grad_key, left, self.query_columns[None, None, depth, stage], self.grad_key)
        warpgroup.commit_group()

    @cute.jit
    def release_if_any(self, ring: Ring, step: Any) -> None:
        """The stage of the step before, where there was one."""
        if step > 0:
            self.release(ring, step - 1)

    def release(self, ring: Ring, step: Int32) -> None:
        """This warp has read the stage of that step."""
        with cute.arch.elect_one():
            ring.release(self.context.use(step))

    def row_values(self, rows: cute.Pointer, ring: Ring, step: Int32) -> RowValues:
        """LSE or delta of the thread's columns, as a function: of two neighbours of the index-th eight queries."""
        first = rows + ring.stage(self.context.use(step)) * self.shape.query_tile + (self.lane % 4) * 2

        def pair(index: int) -> tuple[Float32, Float32]:
            values = cute.make_tensor((first + index * 8).align(8), cute.make_layout(2)).load()
            return values[0], values[1]

        return pair

    def read_rows(self, rows: cute.Pointer, ring: Ring, step: Int32) -> RowValues:
        """The same, read now."""
        pair = self.row_values(rows, ring, step)
        pairs = [pair(index) for index in range(self.shape.query_tile // 8)]
        return lambda index: pairs[index]

    def finish_probs(self, lse: RowValues, block: int) -> None:
        """Scores to probabilities: p = 2^(s - lse), 0 for hidden pairs and for queries beyond the last; and rounded,
        unless that is done with dS.

        In place of the scores stays what dS is proportional to: p, or for capped scores t = tanh(x), p (1 - t^2).
        """
        shape, first = self.shape, block * self.shape.block_elements
        rounded = cute.recast_tensor(self.probs[block], Uint32)
        for place in range(0, shape.block_elements, 2):
            if place % 4 == 0:
                of_queries = lse((first + place) // 4)
            values = []
            for index in (place, place + 1):
                score = self.scores[first + index]
                value = _exp2(score * self.scale_log2 - of_queries[index % 2])
                values.append(value)
                if shape.has_cap:
                    bounded = cute.arch.fmax(score, Float32(-1.0))  # a hidden score is -inf
                    value = value * (1.0 - bounded * bounded)
                self.scores[first + index] = value
            if not shape.rounds_late:
                rounded[place // 2] = round_pair(values[0], values[1], shape.dtype)

    def hide(self, step: Int32) -> None:
        """Set to -inf the scores of queries that do not see the thread's keys, and of keys beyond the last."""
        shape = self.shape
        _, tile = self.context.walk.place(Int32(step))
        first_column = tile * shape.query_tile + (self.lane % 4) * 2
        for half in range(2):
            lo, hi = self.edges[half] if self.edges else self._edges(half)
            hide(self.scores, half, lo, hi, first_column)
        if shape.has_ids:
            self.compare_ids(first_column)

    @cute.jit
    def compare_ids(self, first_column: Int32) -> None:
        """Hide the queries whose ids differ from the key's, in items whose ids lie in no simple order."""
        if self.context.walk.item.compare_ids != 0:
            for half in cutlass.range_constexpr(2):
                hide_other_ids(self.scores, half, self.key_ids[half], self.ids, first_column)

    def finish_grad_scores(self, step: Int32, delta: RowValues) -> None:
        """dS = P (dP - delta), rounded: in registers, and in shared memory for both warpgroups."""
        if self.shape.grad_score_stages == 1:
            cute.arch.barrier(barrier_id=READ_BARRIER + self.group, number_of_threads=GROUPS * GROUP_THREADS)
        for block in range(self.shape.row_blocks):
            self.finish_block(step, delta, block)

    def finish_block(self, step: Int32, delta: RowValues, block: int) -> None:
        """dS of a block of queries."""
        shape, first = self.shape, block * self.shape.block_elements
        probs, rounded = (cute.recast_tensor(one[block], Uint32) for one in (self.probs, self.grad_scores))
        for place in range(0, shape.block_elements, 2):
            if place % 4 == 0:
                of_queries = delta((first + place) // 4)
            if shape.rounds_late:
                probs[place // 2] = round_pair(self.scores[first + place], self.scores[first + place + 1], shape.dtype)
            values = [
                self.scores[first + index] * (self.grad_probs[first + index] - of_queries[index % 2])
                for index in (place, place + 1)
            ]
            rounded[place // 2] = round_pair(values[0], values[1], shape.dtype)
        stage = (step % shape.grad_score_stages) * shape.row_blocks + block
        to = self.store_to + stage * (GROUPS * shape.block_bytes)
        for place in range(0, cute.size(rounded), 4):
            # Four registers: 16 queries, of the 16 keys of this warp.
            bulk.store_transposed(to + place * 4 * PIECE_BYTES, [rounded[place + index] for index in range(4)])

    def stage_grad_query(self) -> None:
        """The accumulator to its staging, four registers at a time, and tell the warp that adds."""
        shape, group, sums = self.shape, self.group, self.query_gradients.sums
        threads = GROUP_THREADS + 32
        cute.arch.barrier(barrier_id=ADDED_BARRIER + group, number_of_threads=threads)
        first = self.context.memory.staged + group * shape.sum_floats + self.thread * 4
        for chunk in range(cute.size(sums) // 4):
            to = cute.make_tensor((first + chunk * GROUP_THREADS * 4).align(16), cute.make_layout(4))
            values = cute.make_rmem_tensor(cute.make_layout(4), Float32)
            for index in range(4):
                values[index] = sums[chunk * 4 + index]
            cute.autovec_copy(values, to)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier_arrive(barrier_id=STAGED_BARRIER + group, number_of_threads=threads)

    @cute.jit
    def store(self, maps: tuple[cute.CopyAtom, ...], kv_head: Int32) -> None:
        """Round, stage where nobody reads any more, and copy out."""
        self.meet()
        context, item = self.context, self.context.walk.item
        grad_key, grad_value = context.memory.gradients(self.shape)
        staged = []
        for gradient, buffer, scale in (
            (self.grad_key, grad_key, self.scale),
            (self.grad_value, grad_value, Float32(1.0)),
        ):
            for index in range(cute.size(gradient)):
                gradient[index] = gradient[index] * scale
            rounded = cute.make_rmem_tensor(gradient.layout, self.shape.dtype)
            pairs = cute.recast_tensor(rounded, Uint32)
            for pair in range(cute.size(pairs)):
                pairs[pair] = round_pair(gradient[2 * pair], gradient[2 * pair + 1], self.shape.dtype)
            halves = cute.local_tile(buffer, (GROUP_ROWS, self.shape.head_dim), (None, 0))
            to_shared = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.shape.dtype)
            mine = cute.make_tiled_copy_C(to_shared, self.shape.key_product()).get_slice(self.thread)
            cute.copy(to_shared, mine.retile(rounded), mine.partition_D(halves[None, None, self.group]))
            staged.append(halves)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=CLOSING_BARRIER + self.group, number_of_threads=GROUP_THREADS)
        if self.warp == 0:
            for tensor_map, halves in zip(maps, staged, strict=True):
                buffer, tiles = copied_tiles(tensor_map, halves, GROUP_ROWS, kv_head, item.batch)
                cute.copy(tensor_map, buffer[None, self.group], tiles[None, item.query_tile * GROUPS + self.group])
            cute.arch.cp_async_bulk_commit_group()
            if cutlass.const_expr(not self.shape.is_persistent):
                cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def store_parts(self, results: tuple[cute.Pointer, ...], heads: Int32, dims: tuple[Int32, Int32]) -> None:
        """Write float32 gradients of part of the query heads, which are summed elsewhere."""
        item, lane = self.context.walk.item, cute.arch.lane_idx()
        first_row = item.query_tile * KEY_TILE + self.group * GROUP_ROWS + self.warp * 16 + lane // 4
        for gradient, result, head_dim, scale in (
            (self.grad_key, results[0], dims[0], self.scale),
            (self.grad_value, results[1], dims[1], Float32(1.0)),
        ):
            for half in cutlass.range_constexpr(2):
                row = first_row + 8 * half
                place = ((Int64(item.batch) * self.visible.queries + row) * heads + item.head) * head_dim
                for group in cutlass.range_constexpr(self.shape.head_dim // 8):
                    column = group * 8 + (lane % 4) * 2
                    if (row < self.visible.queries) & (column < head_dim):
                        values = cute.make_rmem_tensor(cute.make_layout(2), Float32)
                        for index in cutlass.range_constexpr(2):
                            values[index] = gradient[group * 4 + half * 2 + index] * scale
                        cute.autovec_copy(
                            values, cute.make_tensor((result + (place + column)).align(8), cute.make_layout(2))
                        )
