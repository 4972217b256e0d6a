"""Device code of the attention backward on compute capability 9.0 (H100, H200), in CuTe-DSL. Imported only to build.

A work item is a tile of 128 keys of one head; it walks the tiles of queries that see them, of every query head that
shares the keys, and keeps the gradients of its keys and values in registers.

    warp  0          load      issues every copy
    warp  1          add       adds each step's query gradients to the sums in global memory
    warps 2, 3       idle      a warpgroup gives its registers away together
    warps 4..7       compute   warpgroup 0: keys  0 ..  63 of the item
    warps 8..11      compute   warpgroup 1: keys 64 .. 127

    shared memory    keys, values        (128, head_dim), once an item; later the staging of their gradients
                     queries, grads      stages x (query_tile, head_dim): queries and output gradients, rings
                     scores' gradients   stages x (query_tile, 128), dS of both warpgroups, read by both
                     staged sums         a step's query gradients, float32, in the order of registers
                     lse, delta          stages x query_tile float32, landing with queries and grads
                     barriers            landed and free of keys, of values, and of each stage

    registers of a computing thread, for a quarter of two keys (r, r + 8); M = query_tile, D = head_dim
                     scores              M / 2 float32     S^T = K Q^T, then P^T
                     grad_probs          M / 2 float32     dP^T = V dO^T
                     grad_query          M / 2 float32     dQ = dS K or dQ^T = K^T dS^T, in the place of grad_probs
                     probs, grad_scores  M / 2 16-bit      A operands: dV += P^T dO, dK += dS^T Q
                     grad_key, grad_value  D / 2 float32 each

Both warpgroups need each other's dS for dQ, so they meet once a step and cannot take turns. The tensor core is kept
busy inside each of them instead. Products complete in the order of issue, and each is issued while an older one runs:

    issued      S 1 | dQ 0 | dK 0 | dP 1 |      | dV 1 | S 2 | dQ 1 | dK 1 | dP 2 | ...
    meanwhile        dQ out |  P 1 = exp2(S 1)  | dS 1 | meet | dQ out | P 2 = ...

At most four instructions of a warp wait for the tensor core, and the next one stops the warp: dV is issued after dS is
computed, since dS would otherwise wait for it. At head_dim 64, whose 128 queries a step leave no registers for scores
that are ahead, a step starts with its scores, and dK takes dS from registers.

Keys and values are read from shared memory in every step, so what they cost falls with the queries of a step. A product
has 64 rows; what the warpgroups share of dQ depends on that:

    64 queries     dQ     all rows, half of the columns each     sums lie in blocks of 64 rows, two parts by columns
    128 queries    dQ     64 rows each, all columns              sums lie in blocks of 64 rows
    80 queries     dQ^T   64 columns each, all rows              sums lie transposed, in blocks of 80 rows

With 80 queries, at head_dim 128, dV and dK take five pieces of 16 queries, probabilities are rounded with dS and not
before, which saves the registers of both forms. Where scores are ahead dS has one stage: there is no memory for more.

A block has one item, or, if it is persistent, one after the other (`item_queue.py`). Between two items keys, values
and the first queries are loaded while the gradients of the last keys leave; these are then staged over dS and the
staged sums instead of over keys and values:

    load      ... last queries | next queries | keys free: next keys, values | ...
    compute   ... last dK | keys free | gradients staged and on their way | next S 0 | staging free | ...

What a step computes is FlashAttention-2's algorithm 2 (arXiv 2307.08691); transposed scores, whose rounded values are
A operands without leaving their registers, are FlashAttention-3's (arXiv 2407.08608).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_ptr

from jax_fa4.kernels.hopper.backward_compute import Compute
from jax_fa4.kernels.hopper.backward_item import (
    ADDED_BARRIER,
    DRAINED_BARRIER,
    GROUPS,
    KEY_TILE,
    STAGED_BARRIER,
    Call,
    Context,
    Job,
    Memory,
    Shape,
    Walk,
)
from jax_fa4.kernels.hopper.forward_item import GROUP_ROWS, WARPS_PER_GROUP
from jax_fa4.kernels.hopper.item_queue import Progress, Queue, each_item
from jax_fa4.kernels.parts import bulk
from jax_fa4.kernels.parts.block_walk import WorkItem
from jax_fa4.kernels.parts.copied_tiles import copied_tiles
from jax_fa4.kernels.parts.events import GROUP_THREADS, Ring
from jax_fa4.kernels.parts.memory import read
from jax_fa4.kernels.plan import KernelPlan


class Load:
    """Keys and values once, queries and output gradients of every step through their rings.

    Every tensor has two maps where masks come from memory: the second, of a copy in which rows that nobody sees are
    zeros, is for the tiles that flags name.
    """

    def __init__(
        self,
        context: Context,
        maps: tuple[tuple[Any, Any], ...],
        rows: tuple[cute.Pointer, ...],
        hidden: tuple[Any, Any],
    ) -> None:
        self.context = context
        self.query_maps, self.key_maps, self.value_maps, self.grad_out_maps = maps
        self.lse_rows, self.delta_rows = rows
        self.hidden_queries, self.hidden_keys = hidden

    @cute.jit
    def run(self, kv_head: Int32) -> None:
        """Keys and values, each with what step 0 needs with them, then every other step.

        Step 0's queries and output gradients come first: their stages are free before the last item's keys are.
        """
        context = self.context
        if context.walk.steps > 0:
            self.load_queries(Int32(0))
            self.load_keys(self.key_maps, context.memory.key, context.memory.keys, kv_head)
            self.load_grads(Int32(0))
            self.load_keys(self.value_maps, context.memory.value, context.memory.values, kv_head)
            for step in cutlass.range(1, context.walk.steps, 1, unroll=1):
                self.load_queries(Int32(step))
                self.load_grads(Int32(step))

    def load_keys(self, maps: tuple[Any, Any], buffer: cute.Tensor, ring: Ring, kv_head: Int32) -> None:
        """The item's keys or values."""
        context = self.context
        key_tile = context.walk.item.query_tile
        landed = ring.acquire(context.progress.rounds)
        stages, tiles = copied_tiles(maps[0], buffer, KEY_TILE, kv_head, context.batch)
        flag = self.flag_of(self.hidden_keys, key_tile)
        self.copy(maps, tiles[None, key_tile], stages[None, 0], landed, flag)

    def load_queries(self, step: Int32) -> None:
        """Queries and their LSE of one step."""
        memory = self.context.memory
        buffers = memory.query, memory.queries, memory.lse
        self.load_step(self.query_maps, self.lse_rows, buffers, step)

    def load_grads(self, step: Int32) -> None:
        """Output gradients and their delta of one step."""
        memory = self.context.memory
        buffers = memory.grad_out, memory.grads, memory.delta
        self.load_step(self.grad_out_maps, self.delta_rows, buffers, step)

    def load_step(
        self,
        maps: tuple[Any, Any],
        row_values: cute.Pointer,
        buffers: tuple[cute.Tensor, Ring, cute.Pointer],
        step: Int32,
    ) -> None:
        """Queries with their LSE, or output gradients with their delta, of one step."""
        context, rows = self.context, self.context.shape.query_tile
        buffer, ring, row_buffer = buffers
        walked, tile = context.walk.place(Int32(step))
        head = context.first_head + walked
        flag, use = self.flag_of(self.hidden_queries, tile), context.use(step)
        landed, stage = ring.acquire(use), ring.stage(use)
        stages, tiles = copied_tiles(maps[0], buffer, rows, head, context.batch)
        self.copy(maps, tiles[None, tile], stages[None, stage], landed, flag)
        source = row_values + context.tile_number(head, tile) * rows
        with cute.arch.elect_one():
            bulk.load_run(row_buffer + stage * rows, source, rows * 4, landed)

    def flag_of(self, hidden: Any, tile: Int32) -> Any:
        """Whether a tile is to be read from the copy; None where masks are arithmetic."""
        return cute.arch.make_warp_uniform(read(hidden, tile)) if self.context.shape.intervals else None

    @cute.jit
    def copy(self, maps: tuple[Any, Any], source: Any, target: Any, landed: cute.Pointer, flag: Any) -> None:
        """One tile, by the map that its flag names."""
        if cutlass.const_expr(not self.context.shape.intervals):
            cute.copy(maps[0], source, target, tma_bar_ptr=landed)
        else:
            self.copy_either(maps, source, target, landed, flag)

    @cute.jit
    def copy_either(self, maps: tuple[Any, Any], source: Any, target: Any, landed: cute.Pointer, flag: Int32) -> None:
        """One tile of a tensor that has a copy."""
        if flag == 0:
            cute.copy(maps[0], source, target, tma_bar_ptr=landed)
        else:
            cute.copy(maps[1], source, target, tma_bar_ptr=landed)


class Add:
    """Warp 1: each step's query gradients from their staging to the sums in global memory."""

    def __init__(self, context: Context, sums: cute.Pointer, flags: Any, ranks: Any) -> None:
        self.context, self.sums, self.flags, self.ranks = context, sums, flags, ranks

    @cute.jit
    def run(self) -> None:
        """Every step; both warpgroups' parts."""
        context, shape = self.context, self.context.shape
        steps = context.walk.steps
        for group in cutlass.range_constexpr(GROUPS):
            if steps > 0:
                self.free(group)
        for step in cutlass.range(0, steps, 1, unroll=1):
            walked, tile = context.walk.place(Int32(step))
            number = context.tile_number(context.first_head + walked, tile)
            if cutlass.const_expr(shape.is_ordered):
                bulk.wait_until(self.flags + number, self.ranks.rank(tile))
                cute.arch.fence_proxy("async.global")
            for group in cutlass.range_constexpr(GROUPS):
                cute.arch.barrier(barrier_id=STAGED_BARRIER + group, number_of_threads=GROUP_THREADS + 32)
                self.add(group, number)
                cute.arch.cp_async_bulk_wait_group(0, read=True)
                if step + 1 < steps:
                    self.free(group)
                elif cutlass.const_expr(shape.is_persistent):
                    self.drain(group)
            if cutlass.const_expr(shape.is_ordered):
                cute.arch.cp_async_bulk_wait_group(0)
                cute.arch.fence_proxy("async.global")
                with cute.arch.elect_one():
                    bulk.raise_flag(self.flags + number)

    def free(self, group: int) -> None:
        """That warpgroup's staging may be overwritten."""
        cute.arch.barrier_arrive(barrier_id=ADDED_BARRIER + group, number_of_threads=GROUP_THREADS + 32)

    def drain(self, group: int) -> None:
        """That warpgroup's staging may be overwritten by gradients of keys and values."""
        cute.arch.barrier_arrive(barrier_id=DRAINED_BARRIER + group, number_of_threads=GROUP_THREADS + 32)

    def add(self, group: int, number: Int64) -> None:
        """One warpgroup's part; columns beyond the head dimension, which the last part may have, stay behind."""
        shape = self.context.shape
        floats = shape.sum_floats
        used = floats
        if not shape.sums_by_columns and shape.row_blocks == 1:
            used = GROUP_ROWS * min(shape.sum_width, shape.head_dim - group * shape.sum_width)
        to = self.sums + (number * GROUPS + group) * floats
        with cute.arch.elect_one():
            bulk.add_run(to, self.context.memory.staged + group * floats, Int32(used * 4))
            cute.arch.cp_async_bulk_commit_group()


class HopperBackward:
    """The kernel of one plan."""

    def __init__(self, plan: KernelPlan) -> None:
        self.shape = Shape.of(plan)

    @cute.kernel
    def kernel(
        self,
        query_map: cute.CopyAtom,
        key_map: cute.CopyAtom,
        value_map: cute.CopyAtom,
        grad_out_map: cute.CopyAtom,
        grad_key: Any,
        grad_value: Any,
        hidden_query_map: Any,
        hidden_key_map: Any,
        hidden_value_map: Any,
        hidden_grad_out_map: Any,
        lse: cute.Pointer,
        delta: cute.Pointer,
        sums: cute.Pointer,
        flags: Any,
        counter: Any,
        items: Any,
        lo: Any,
        hi: Any,
        hidden_queries: Any,
        hidden_keys: Any,
        key_ids: Any,
        query_ids: Any,
        ranks: Any,
        queries: Int32,
        keys: Int32,
        heads: Int32,
        item_heads: Int32,
        splits: Int32,
        offset: Int32,
        left: Int32,
        right: Int32,
        section_heads: Int32,
        interval_stride: Int32,
        rank_stride: Int32,
        query_tiles: Int32,
        head_dim: Int32,
        value_dim: Int32,
        item_count: Int32,
        scale: Float32,
        scale_log2: Float32,
        cap_log2: Float32,
    ) -> None:
        """Set up shared memory and events, take the role, do its work for each item."""
        shape = self.shape
        thread, _, _ = cute.arch.thread_idx()
        this_warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        tables = items, lo, hi, hidden_queries, hidden_keys, key_ids, query_ids, ranks
        band, strides = (offset, left, right, section_heads), (interval_stride, rank_stride, query_tiles)
        call = Call(shape, *tables, queries, keys, item_heads, *band, *strides)
        memory = Memory.allocate(shape)
        readers = 1 + GROUPS * WARPS_PER_GROUP
        queue = Queue(counter, item_count, call.item, memory.entries, memory.entry_barriers, readers)
        own = None if shape.is_persistent else call.item(None)
        if this_warp == 0:
            for tensor_map in (query_map, key_map, value_map, grad_out_map):
                cpasync.prefetch_descriptor(tensor_map)
            with cute.arch.elect_one():
                memory.init()
                if cutlass.const_expr(shape.is_persistent):
                    queue.init()
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        def context_of(job: Job, progress: Progress) -> Context:
            walked = heads // item_heads
            of_call = job.item.head * walked, heads, query_tiles
            return Context(shape, memory, Walk(job.item, walked), progress, *of_call)

        def load(item: WorkItem, progress: Progress) -> Int32:
            job = call.job(item)
            context = context_of(job, progress)
            queries_and_keys = (query_map, hidden_query_map), (key_map, hidden_key_map)
            maps = *queries_and_keys, (value_map, hidden_value_map), (grad_out_map, hidden_grad_out_map)
            Load(context, maps, (lse, delta), job.hidden).run(job.item.head // splits)
            return context.walk.steps

        def add(item: WorkItem, progress: Progress) -> Int32:
            job = call.job(item)
            context = context_of(job, progress)
            Add(context, sums, flags, job.order).run()
            return context.walk.steps

        def compute(item: WorkItem, progress: Progress) -> Int32:
            job = call.job(item)
            context = context_of(job, progress)
            group = this_warp // WARPS_PER_GROUP - 1
            scales = scale, scale_log2, cap_log2
            role = Compute(context, group, thread % GROUP_THREADS, job.visible, job.ids, scales)
            role.run()
            if cutlass.const_expr(shape.is_split):
                role.store_parts((grad_key, grad_value), item_heads, (head_dim, value_dim))
            else:
                role.store((grad_key, grad_value), job.item.head // splits)
            return context.walk.steps

        if this_warp < WARPS_PER_GROUP:
            cute.arch.setmaxregister_decrease(shape.load_registers)
            if this_warp == 0:
                each_item(own, queue, True, load)
            if this_warp == 1:
                each_item(own, queue, False, add)
        else:
            cute.arch.setmaxregister_increase(shape.compute_registers)
            each_item(own, queue, False, compute)
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
        floats: tuple[Float32, ...],
    ) -> None:
        """Exists for the compiler only: the package's own runtime launches the kernel."""
        shape = self.shape
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        query, key, value, grad_out, grad_key, grad_value = tensors
        maps: list[Any] = [
            self.tensor_map(load, query, shape.query_tile),
            self.tensor_map(load, key, KEY_TILE),
            self.tensor_map(load, value, KEY_TILE),
            self.tensor_map(load, grad_out, shape.query_tile),
        ]
        if cutlass.const_expr(shape.is_split):
            maps += [grad_key, grad_value]
        else:
            maps += [self.tensor_map(store, one, GROUP_ROWS) for one in (grad_key, grad_value)]
        maps += maps[:4] if shape.intervals else [None] * 4
        threads = (1 + GROUPS) * GROUP_THREADS
        self.kernel(*maps, *pointers, *integers, *floats).launch(
            grid=(1, 1, 1), block=(threads, 1, 1), min_blocks_per_mp=1
        )


def trace(plan: KernelPlan) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """The function to compile, and arguments of the right types."""
    backward = HopperBackward(plan)
    shape = backward.shape

    def pointer(kind: Any, alignment: int) -> Any:
        return make_ptr(kind, alignment, cute.AddressSpace.gmem, assumed_align=alignment)

    rows, floats, integers = pointer(shape.dtype, 16), pointer(Float32, 16), pointer(Int32, 4)
    gradients = (floats if shape.is_split else rows,) * 2
    flags = integers if shape.is_ordered else None
    counter = integers if shape.is_persistent else None
    table = (integers,) * 5 if shape.intervals else (None,) * 5
    ids = (integers,) * 2 if shape.has_ids else (None,) * 2
    ranks = integers if shape.is_ordered and shape.intervals else None
    pointers = (floats, floats, floats, flags, counter, *table, *ids, ranks)
    return backward.host, ((rows,) * 4 + gradients, pointers, (Int32(1),) * 15, (Float32(1.0),) * 3)
