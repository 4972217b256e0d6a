"""Device code of the attention forward on compute capability 9.0 (H100, H200), in CuTe-DSL. Imported only to build.

A work item is a tile of 64 * groups query rows of one head; it walks the tiles of keys that its rows see.

    warps 0..3       load      warp 0 issues every copy; the warpgroup gives its registers away
    warps 4..7       attend    warpgroup 0: query rows   0 ..  63 of the item
    warps 8..11      attend    warpgroup 1: query rows  64 .. 127
    warps 12..15     attend    warpgroup 2: query rows 128 .. 191 (plans with three groups)

    shared memory    query     groups x (64, head_dim)         later the output's staging, each group in its own part
                     out       groups x (64, head_dim)         its staging in persistent blocks
                     keys      stages x (key_tile, head_dim)   ring: landed / free
                     values    stages x (key_tile, head_dim)   ring: landed / free
                     barriers  landed and free of each group's query and of each stage

    registers of an attending thread, for a quarter of two rows (r, r + 8):
                     scores    key_tile / 2 float32            accumulator of Q K^T
                     probs     key_tile / 2 16-bit             A operand of P V
                     out       head_dim / 2 float32            accumulator of P V

The scores of step i + 1 and the output of step i are in the tensor core together; the softmax of step i + 1 waits for
the former only. Warpgroups take turns in issuing, so that one's softmax runs under the others' products:

    group 0   [QK 1][PV 0] max 1, exp 1, round ......... [QK 2][PV 1] ...
    group 1   ............ [QK 1][PV 0] max 1, exp 1, round ......... [QK 2][PV 1] ...

Of the item's tiles of keys some are seen by the rows of one group and not by another's: those at the right edge of a
causal mask, and at a document's edges. A group passes on its turn in steps of which it sees nothing, so that the others
have the tensor core to themselves: at 2048 causal keys and 192 rows a tile a tenth of all products is left out.

A block has one item, or, if it is persistent, one after the other (`item_queue.py`): the next queries and the first
keys are loaded during the last step, and the output leaves during the next item's first.

This overlap is that of FlashAttention-3 (arXiv 2407.08608, sections 3.1 and 3.2), the order of the items and the lazy
rescaling are FlashAttention-4's (arXiv 2603.05451). docs/performance.md says which sizes were measured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import cpasync, warp, warpgroup
from cutlass.cute.runtime import make_ptr

from jax_fa4.kernels.hopper.forward_item import (
    GROUP_ROWS,
    PRODUCT_DEPTH,
    WARPS_PER_GROUP,
    Context,
    Masks,
    Memory,
    Shape,
)
from jax_fa4.kernels.hopper.item_queue import Progress, Queue, each_item
from jax_fa4.kernels.parts.block_walk import Band, WorkItem
from jax_fa4.kernels.parts.copied_tiles import copied_tiles
from jax_fa4.kernels.parts.events import GROUP_THREADS, Ring, Turns
from jax_fa4.kernels.parts.memory import read
from jax_fa4.kernels.parts.rounding import round_pair
from jax_fa4.kernels.parts.softmax_row import SoftmaxRows, cap
from jax_fa4.kernels.parts.tile_mask import hide, hide_other_ids
from jax_fa4.kernels.plan import KernelPlan

TURN_BARRIER = 1  # named barriers 1 .. groups; 0 is the whole block's
STAGED_BARRIER = 8  # named barriers 8 ..: a group's output is in shared memory


class Load:
    """Warp 0: the query tile once, then keys and values through their rings, the keys one step ahead."""

    def __init__(
        self, context: Context, maps: tuple[Any, ...], hidden_tiles: Any, group_size: Any, query_copies: Any
    ) -> None:
        shape, item = context.shape, context.item
        self.context, self.hidden_tiles = context, hidden_tiles
        self.query_map, self.key_map, self.value_map, self.hidden_map = maps
        memory = context.memory
        kv_head, query_batch = item.head // group_size, item.batch // query_copies
        self.query = copied_tiles(self.query_map, memory.query, GROUP_ROWS, item.head, query_batch)
        self.key = copied_tiles(self.key_map, memory.key, shape.key_tile, kv_head, item.batch)
        self.value = copied_tiles(self.value_map, memory.value, shape.key_tile, kv_head, item.batch)

    @cute.jit
    def run(self) -> None:
        """Issue every copy of the item; group 0 can start when its queries and the first keys are there."""
        steps = self.context.item.count
        self.load_query(0)
        if steps > 0:
            self.load_step(self.key_map, self.key, self.context.memory.keys, Int32(0))
        for group in cutlass.range_constexpr(1, self.context.shape.groups):
            self.load_query(group)
        if steps > 0:
            for step in cutlass.range(1, steps, 1, unroll=1):
                self.load_step(self.key_map, self.key, self.context.memory.keys, step)
                self.load_values(step - 1)
            self.load_values(steps - 1)

    def load_query(self, group: int) -> None:
        """One group's query rows."""
        shape, context = self.context.shape, self.context
        landed = context.memory.queries.acquire(context.query_use(group))
        buffer, tiles = self.query
        tile = self.context.item.query_tile * shape.groups + group
        cute.copy(self.query_map, tiles[None, tile], buffer[None, group], tma_bar_ptr=landed)

    def load_step(self, tensor_map: cute.CopyAtom, partition: tuple[Any, Any], ring: Ring, step: Any) -> None:
        """Keys or values of one step."""
        buffer, tiles = partition
        use = self.context.use(step)
        landed = ring.acquire(use)
        key_tile = self.context.item.key_tile(step)
        cute.copy(tensor_map, tiles[None, key_tile], buffer[None, ring.stage(use)], tma_bar_ptr=landed)

    @cute.jit
    def load_values(self, step: Any) -> None:
        """Values of one step: those in which rows that nobody sees are zeros, where the tile has such rows."""
        if cutlass.const_expr(not self.context.shape.intervals):
            self.load_step(self.value_map, self.value, self.context.memory.values, step)
        else:
            flag = read(self.hidden_tiles, self.context.item.key_tile(step))
            if cute.arch.make_warp_uniform(flag) == 0:
                self.load_step(self.value_map, self.value, self.context.memory.values, step)
            else:
                self.load_step(self.hidden_map, self.value, self.context.memory.values, step)


class Attend:
    """One warpgroup: 64 query rows against every visited key tile, then their output and LSE."""

    def __init__(self, context: Context, group: Int32, thread: Int32, softmax: SoftmaxRows, cap_log2: Float32) -> None:
        shape = context.shape
        self.context, self.shape, self.group, self.thread = context, shape, group, thread
        self.softmax, self.cap_log2 = softmax, cap_log2
        self.turns = Turns.of(TURN_BARRIER, shape.groups, group)
        self.lane = thread % 32
        self.row_of_group = context.item.query_tile * shape.rows + group * GROUP_ROWS
        self.row = self.row_of_group + (thread // 32) * 16 + self.lane // 4
        self._partition()

    def _partition(self) -> None:
        shape, context = self.shape, self.context
        score_product, output_product = shape.score_product(), shape.output_product()
        of_scores, of_out = score_product.get_slice(self.thread), output_product.get_slice(self.thread)
        value_columns = cute.make_tensor(
            context.memory.value.iterator, cute.select(context.memory.value.layout, mode=[1, 0, 2])
        )
        self.query = score_product.make_fragment_A(of_scores.partition_A(context.memory.query))
        self.key = score_product.make_fragment_B(of_scores.partition_B(context.memory.key))
        self.value = output_product.make_fragment_B(of_out.partition_B(value_columns))
        tile = (GROUP_ROWS, shape.key_tile)
        self.scores = cute.make_rmem_tensor(score_product.partition_shape_C(tile), Float32)
        self.probs = cute.make_rmem_tensor(output_product.partition_shape_A(tile), shape.dtype)
        self.out = cute.make_rmem_tensor(output_product.partition_shape_C((GROUP_ROWS, shape.head_dim)), Float32)

    @cute.jit
    def run(self) -> None:
        """Every step of the item: products where this group's rows see something, else the turn is passed on."""
        item = self.context.item
        self.out.fill(0.0)
        self.context.memory.queries.wait_landed(self.context.query_use(self.group))
        begin, end = self.context.masks.seen_tiles(item.batch, self.row_of_group)
        at_right = item.end - item.full_end
        unseen = cutlass.min(cutlass.max(item.end - end, Int32(0)), at_right)
        if cutlass.const_expr(self.shape.has_left or self.shape.intervals):
            # Tiles at the left edge come after those at the right: where the first of them are not seen, what is seen
            # falls into two runs.
            unseen_left = cutlass.min(cutlass.max(begin - item.begin, Int32(0)), item.full_begin - item.begin)
            first_end = cutlass.select_(unseen_left > 0, at_right, unseen)
            self.skip(Int32(0), unseen)
            if unseen < first_end:
                self.run_of_steps(unseen, first_end, False, is_last=False)
            second = cutlass.select_(unseen_left > 0, at_right + unseen_left, unseen)
            self.skip(first_end, second)
            if second < item.count:
                self.run_of_steps(second, item.count, unseen < first_end, is_last=True)
            else:
                self.release_query()
        else:
            self.skip(Int32(0), unseen)
            if unseen < item.count:
                self.run_of_steps(unseen, item.count, False, is_last=True)
            else:
                self.release_query()

    @cute.jit
    def run_of_steps(self, begin: Int32, end: Int32, is_again: Any, is_last: bool) -> None:
        """Steps [begin, end), at least one, masked ones first; `is_again` where there is output already."""
        masked = self.context.item.masked_count
        self.first(begin, is_again)
        for step in cutlass.range(begin + 1, cutlass.min(masked, end), 1, unroll=1):
            self.step(step, is_masked=True)
        if cutlass.const_expr(is_last):
            for step in cutlass.range(cutlass.max(masked, begin + 1), end, 1, unroll=1):
                self.step(step, is_masked=False)
            self.release_query()
        self.last(end - 1)

    @cute.jit
    def skip(self, begin: Int32, end: Int32) -> None:
        """Steps [begin, end), of whose keys this group's rows see none."""
        keys, values = self.context.memory.keys, self.context.memory.values
        for step in cutlass.range(begin, end, 1, unroll=1):
            keys.wait_landed(self.context.use(step))
            self.turns.wait()
            self.turns.give()
            self.release(keys, Int32(step))
            # Not before: a stage is free for the next copy once it is freed as often as there are readers.
            values.wait_landed(self.context.use(step))
            self.release(values, Int32(step))

    def release_query(self) -> None:
        """This warp has read its group's queries."""
        with cute.arch.elect_one():
            self.context.memory.queries.release(self.context.query_use(self.group))

    @cute.jit
    def first(self, step: Int32, is_again: Any) -> None:
        """Scores of a run's first step. The mask is applied even if no row needs it: a third copy of the code would
        gain little."""
        factors = cute.make_rmem_tensor((2,), Float32)
        self.context.memory.keys.wait_landed(self.context.use(step))
        self.turns.wait()
        warpgroup.fence()
        self.multiply_keys(step)
        self.turns.give()
        warpgroup.wait_group(0)
        self.release(self.context.memory.keys, step)
        self.finish_scores(step, is_masked=True)
        self.softmax.raise_max(self.scores, factors)
        if is_again:
            self.rescale(factors)
        self.softmax.exponentiate(self.scores)
        self.round_probs()

    def step(self, step: Any, is_masked: bool) -> None:
        """Scores of this step and output of the one before, in the tensor core together."""
        keys, values = self.context.memory.keys, self.context.memory.values
        keys.wait_landed(self.context.use(step))
        self.turns.wait()
        warpgroup.fence()
        self.multiply_keys(step)
        values.wait_landed(self.context.use(step - 1))
        self.multiply_values(step - 1)
        self.turns.give()
        warpgroup.wait_group(1)
        self.release(keys, step)
        self.finish_scores(step, is_masked)
        is_exceeded = cute.arch.vote_any_sync(self.softmax.exceeded(self.scores))
        # Not later, nor in the branch: all warps of a group must come to a wait together (PTX ISA, wgmma.wait_group).
        # The compiler moves it before the exponentials in any case.
        warpgroup.wait_group(0)
        self.release(values, step - 1)
        self.raise_max_if(is_exceeded)
        self.softmax.exponentiate(self.scores)
        self.round_probs()

    def last(self, step: Int32) -> None:
        """Output of the last step."""
        values = self.context.memory.values
        values.wait_landed(self.context.use(step))
        warpgroup.fence()
        self.multiply_values(step)
        warpgroup.wait_group(0)
        self.release(values, step)

    def multiply_keys(self, step: Int32) -> None:
        """Issue scores = Q K^T."""
        stage, product = self.context.memory.keys.stage(self.context.use(step)), self.shape.score_product()
        for depth in range(self.shape.head_dim // PRODUCT_DEPTH):
            product.set(warpgroup.Field.ACCUMULATE, depth > 0)
            query, key = self.query[None, None, depth, self.group], self.key[None, None, depth, stage]
            cute.gemm(product, self.scores, query, key, self.scores)
        warpgroup.commit_group()

    def multiply_values(self, step: Int32) -> None:
        """Issue out += P V."""
        stage, product = self.context.memory.values.stage(self.context.use(step)), self.shape.output_product()
        product.set(warpgroup.Field.ACCUMULATE, True)
        for depth in range(self.shape.key_tile // PRODUCT_DEPTH):
            cute.gemm(product, self.out, self.probs[None, None, depth], self.value[None, None, depth, stage], self.out)
        warpgroup.commit_group()

    def release(self, ring: Ring, step: Int32) -> None:
        """This warp has read the stage of that step."""
        with cute.arch.elect_one():
            ring.release(self.context.use(step))

    def finish_scores(self, step: Int32, is_masked: bool) -> None:
        """Cap the raw scores, and hide the keys outside each row's interval."""
        shape, visible = self.shape, self.context.visible
        if shape.has_cap:
            cap(self.scores, self.cap_log2)
        if not is_masked:
            return
        first_column = self.context.item.key_tile(step) * shape.key_tile + (self.lane % 4) * 2
        for half in range(2):
            row = self.row + 8 * half
            lo = visible.lo(row) if shape.has_left or shape.intervals else None
            hide(self.scores, half, lo, visible.hi(row), first_column)
        if shape.has_ids:
            self.compare_ids(first_column)

    @cute.jit
    def compare_ids(self, first_column: Int32) -> None:
        """Hide the keys whose ids differ from the row's, in items whose ids lie in no simple order."""
        ids, item = self.context.ids, self.context.item
        if item.compare_ids != 0:
            for half in cutlass.range_constexpr(2):
                hide_other_ids(self.scores, half, ids.of_query(self.row + 8 * half), ids, first_column)

    @cute.jit
    def raise_max_if(self, is_exceeded: Any) -> None:
        """Take new maxima, and bring the output to them, where a score of this warp is too high for the old ones."""
        if is_exceeded:
            factors = cute.make_rmem_tensor((2,), Float32)
            self.softmax.raise_max(self.scores, factors)
            self.rescale(factors)

    def rescale(self, factors: cute.Tensor) -> None:
        """Multiply the output's two rows."""
        for index in range(cute.size(self.out)):
            self.out[index] = self.out[index] * factors[(index // 2) % 2]

    def round_probs(self) -> None:
        """Accumulator elements lie in the order of the A operand (PTX ISA, fragments of wgmma): round pair by pair."""
        pairs = cute.recast_tensor(self.probs, Uint32)
        for pair in range(cute.size(pairs)):
            pairs[pair] = round_pair(self.scores[2 * pair], self.scores[2 * pair + 1], self.shape.dtype)

    @cute.jit
    def wait_until_output_left(self, is_first_warp: Any) -> None:
        """The first warp, which issued the last item's copy, waits until it has read the staging."""
        if is_first_warp:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def store(self, out_map: cute.CopyAtom, lse: cute.Pointer, sinks: Any) -> None:
        """Normalise, stage in this group's part of the buffer, copy out; write the LSE."""
        context, shape, item = self.context, self.shape, self.context.item
        sink = None
        if cutlass.const_expr(shape.has_sinks):
            sink = cute.make_tensor(sinks + item.head, cute.make_layout(1))[0]
        closing = [self.softmax.finish(half, sink) for half in range(2)]
        rounded = cute.make_rmem_tensor(self.out.layout, shape.dtype)
        pairs = cute.recast_tensor(rounded, Uint32)
        for pair in cutlass.range_constexpr(cute.size(pairs)):
            factor = closing[pair % 2][0]
            pairs[pair] = round_pair(self.out[2 * pair] * factor, self.out[2 * pair + 1] * factor, shape.dtype)
        # A warp's products are done; those of the group's other warps may still read the queries. In persistent blocks
        # the output of the item before may still be on its way.
        is_first_warp = cute.arch.make_warp_uniform(self.thread // 32) == 0
        if cutlass.const_expr(shape.is_persistent):
            self.wait_until_output_left(is_first_warp)
        cute.arch.barrier(barrier_id=STAGED_BARRIER + self.group, number_of_threads=GROUP_THREADS)
        to_shared = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), shape.dtype)
        mine = cute.make_tiled_copy_C(to_shared, shape.output_product()).get_slice(self.thread)
        cute.copy(to_shared, mine.retile(rounded), mine.partition_D(context.memory.out[None, None, self.group]))
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=STAGED_BARRIER + self.group, number_of_threads=GROUP_THREADS)
        if is_first_warp:
            buffer, tiles = copied_tiles(out_map, context.memory.out, GROUP_ROWS, item.head, item.batch)
            cute.copy(out_map, buffer[None, self.group], tiles[None, item.query_tile * shape.groups + self.group])
            cute.arch.cp_async_bulk_commit_group()
            if cutlass.const_expr(not shape.is_persistent):
                cute.arch.cp_async_bulk_wait_group(0, read=True)
        by_batch, by_row, by_head = context.lse_strides
        if self.lane % 4 == 0:
            for half in cutlass.range_constexpr(2):
                row = self.row + 8 * half
                if row < context.masks.band.queries:
                    place = Int64(item.batch) * by_batch + Int64(row) * by_row + item.head * by_head
                    cute.make_tensor(lse + place, cute.make_layout(1))[0] = closing[half][1]


class HopperForward:
    """The kernel of one plan."""

    def __init__(self, plan: KernelPlan) -> None:
        self.shape = Shape.of(plan)

    @cute.kernel
    def kernel(
        self,
        query_map: cute.CopyAtom,
        key_map: cute.CopyAtom,
        value_map: cute.CopyAtom,
        out_map: cute.CopyAtom,
        hidden_map: Any,
        lse: cute.Pointer,
        counter: Any,
        sinks: Any,
        items: Any,
        lo: Any,
        hi: Any,
        hidden_tiles: Any,
        query_ids: Any,
        key_ids: Any,
        queries: Int32,
        keys: Int32,
        heads: Int32,
        offset: Int32,
        left: Int32,
        right: Int32,
        section_heads: Int32,
        interval_stride: Int32,
        lse_batch_stride: Int32,
        lse_row_stride: Int32,
        lse_head_stride: Int32,
        item_count: Int32,
        group_size: cute.FastDivmodDivisor,
        query_copies: cute.FastDivmodDivisor,
        scale_log2: Float32,
        slack: Float32,
        cap_log2: Float32,
    ) -> None:
        """Set up shared memory and events, take the role, do its work for each item."""
        shape = self.shape
        thread, _, _ = cute.arch.thread_idx()
        this_warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        memory = Memory.allocate(shape)
        band = Band(queries, keys, offset, left, right)
        masks = Masks(shape, band, interval_stride, lo, hi, query_ids, key_ids)

        def item_of(number: Any) -> WorkItem:
            """The item of that number; None: of this block's place in the grid."""
            if cutlass.const_expr(shape.intervals):
                return WorkItem.read(items, cute.arch.block_idx()[0] if number is None else number)
            # Blocks start in the order of x, then y, then z: sections of heads one after the other, each with its
            # longest query tiles first.
            tiles = cute.ceil_div(queries, shape.rows)
            if cutlass.const_expr(number is None):
                block, query_tile, section = cute.arch.block_idx()
            else:
                row, block = number // section_heads, number % section_heads
                section, query_tile = row // tiles, row % tiles
            head_of_all = section * section_heads + block
            places = head_of_all // heads, head_of_all % heads, tiles - 1 - query_tile
            return band.work_item(*places, shape.rows, shape.key_tile)

        lse_strides = lse_batch_stride, lse_row_stride, lse_head_stride
        readers = shape.groups * WARPS_PER_GROUP
        queue = Queue(counter, item_count, item_of, memory.entries, memory.entry_barriers, readers)
        own = None if shape.is_persistent else item_of(None)
        if this_warp == 0:
            for tensor_map in (query_map, key_map, value_map):
                cpasync.prefetch_descriptor(tensor_map)
            with cute.arch.elect_one():
                memory.init(shape)
                if cutlass.const_expr(shape.is_persistent):
                    queue.init()
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        def load(item: WorkItem, progress: Progress) -> Int32:
            hidden = None
            if cutlass.const_expr(shape.intervals):
                hidden = hidden_tiles + item.batch * cute.ceil_div(keys, shape.key_tile)
            context = Context(shape, memory, item, masks, lse_strides, progress)
            maps = query_map, key_map, value_map, hidden_map
            Load(context, maps, hidden, group_size, query_copies).run()
            return item.count

        def attend(item: WorkItem, progress: Progress) -> Int32:
            context = Context(shape, memory, item, masks, lse_strides, progress)
            softmax, group = SoftmaxRows.create(scale_log2, slack), this_warp // WARPS_PER_GROUP - 1
            role = Attend(context, group, thread % GROUP_THREADS, softmax, cap_log2)
            role.run()
            role.store(out_map, lse, sinks)
            return context.item.count

        if this_warp < WARPS_PER_GROUP:
            cute.arch.setmaxregister_decrease(shape.load_registers)
            if this_warp == 0:
                each_item(own, queue, True, load)
        else:
            cute.arch.setmaxregister_increase(shape.attend_registers)
            group = this_warp // WARPS_PER_GROUP - 1
            Turns.of(TURN_BARRIER, shape.groups, group).open(group)
            each_item(own, queue, False, attend)
            if cutlass.const_expr(shape.is_persistent):
                cute.arch.cp_async_bulk_wait_group(0, read=True)

    def tensor_map(self, operation: Any, pointer: cute.Pointer, rows: int) -> cute.CopyAtom:
        """A tensor map's type; extents and strides stand in, since the runtime encodes the map itself."""
        shape = self.shape
        layout = cute.make_layout((8192, shape.head_dim, 16, 8), stride=(16384, 1, 1024, 8192 * 16384))
        tile = cute.select(shape.tile_layout(rows, 1), mode=[0, 1])
        whole = cute.make_tensor(pointer, layout)
        return cpasync.make_tiled_tma_atom(operation, whole, tile, (rows, shape.head_dim)).atom

    @cute.jit
    def host(
        self,
        tensors: tuple[cute.Pointer, ...],
        pointers: tuple[Any, ...],
        integers: tuple[Int32, ...],
        divisors: tuple[Int32, ...],
        floats: tuple[Float32, ...],
    ) -> None:
        """Exists for the compiler only: the package's own runtime launches the kernel."""
        shape = self.shape
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        query, key, value, out = tensors
        maps = (
            self.tensor_map(load, query, GROUP_ROWS),
            self.tensor_map(load, key, shape.key_tile),
            self.tensor_map(load, value, shape.key_tile),
            self.tensor_map(store, out, GROUP_ROWS),
            self.tensor_map(load, value, shape.key_tile) if shape.intervals else None,
        )
        threads = (1 + shape.groups) * GROUP_THREADS
        self.kernel(*maps, *pointers, *integers, *(cute.FastDivmodDivisor(one) for one in divisors), *floats).launch(
            grid=(1, 1, 1), block=(threads, 1, 1), min_blocks_per_mp=1
        )


def trace(plan: KernelPlan) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """The function to compile, and arguments of the right types."""
    forward = HopperForward(plan)

    def pointer(kind: Any, alignment: int) -> Any:
        return make_ptr(kind, alignment, cute.AddressSpace.gmem, assumed_align=alignment)

    tensors = (pointer(forward.shape.dtype, 16),) * 4
    sinks = pointer(Float32, 4) if forward.shape.has_sinks else None
    table = (pointer(Int32, 4),) * 4 if forward.shape.intervals else (None,) * 4
    ids = (pointer(Int32, 4),) * 2 if forward.shape.has_ids else (None,) * 2
    counter = pointer(Int32, 4) if forward.shape.is_persistent else None
    pointers = (pointer(Float32, 4), counter, sinks, *table, *ids)
    return forward.host, (tensors, pointers, (Int32(1),) * 12, (Int32(1),) * 2, (Float32(1.0),) * 3)
