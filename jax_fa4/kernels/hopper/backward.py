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
                     scores' gradients   2 x (query_tile, 128), dS of both warpgroups, read by both
                     staged sums         a step's query gradients, float32, in the order of registers
                     lse, delta          stages x query_tile float32, landing with queries and grads
                     barriers            keys landed, values landed; landed and free of each stage

    registers of a computing thread, for a quarter of two keys (r, r + 8); M = query_tile, D = head_dim
                     scores              M / 2 float32     S^T = K Q^T, then P^T
                     grad_probs          M / 2 float32     dP^T = V dO^T
                     grad_query          float32           dQ = dS K, in the place of grad_probs
                     probs, grad_scores  M / 2 16-bit      A operands: dV += P^T dO, dK += dS^T Q
                     grad_key, grad_value  D / 2 float32 each

Both warpgroups need each other's dS for dQ, so they meet once a step and cannot take turns. The tensor core is kept
busy inside each of them instead. Products complete in the order of issue, and each is issued while an older one runs:

    issued      S 1 | dQ 0 | dK 0 | dP 1 |      | dV 1 | S 2 | dQ 1 | dK 1 | dP 2 | ...
    meanwhile        dQ out |  P 1 = exp2(S 1)  | dS 1 | meet | dQ out | P 2 = ...

At most four instructions of a warp wait for the tensor core, and the next one stops the warp: dV is issued after dS is
computed, since dS would otherwise wait for it. At head_dim 64, whose 128 queries a step leave no registers for scores
that are ahead, a step starts with its scores, and dK takes dS from registers.

What a step computes is FlashAttention-2's algorithm 2 (arXiv 2307.08691); transposed scores, whose rounded values are
A operands without leaving their registers, are FlashAttention-3's (arXiv 2407.08608).
"""

from __future__ import annotations

import dataclasses
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
    GROUPS,
    KEY_TILE,
    STAGED_BARRIER,
    BandRanks,
    Context,
    Shape,
    TableRanks,
    Walk,
)
from jax_fa4.kernels.hopper.forward import GROUP_ROWS, WARPS_PER_GROUP, _tiles_of
from jax_fa4.kernels.parts import bulk
from jax_fa4.kernels.parts.block_walk import Band, RowIntervals, WorkItem
from jax_fa4.kernels.parts.events import GROUP_THREADS, Ring
from jax_fa4.kernels.parts.memory import read
from jax_fa4.kernels.parts.tile_mask import SegmentIds
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
        """Keys and values, each before what step 0 needs with them, then every other step."""
        context = self.context
        if context.walk.steps > 0:
            self.load_keys(self.key_maps, context.key, context.key_landed, kv_head)
            self.load_queries(Int32(0))
            self.load_keys(self.value_maps, context.value, context.value_landed, kv_head)
            self.load_grads(Int32(0))
            for step in cutlass.range(1, context.walk.steps, 1, unroll=1):
                self.load_queries(Int32(step))
                self.load_grads(Int32(step))

    def load_keys(self, maps: tuple[Any, Any], buffer: cute.Tensor, landed: cute.Pointer, kv_head: Int32) -> None:
        """The item's keys or values."""
        context = self.context
        key_tile = context.walk.item.query_tile
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(landed, KEY_TILE * context.shape.row_bytes)
        stages, tiles = _tiles_of(maps[0], buffer, KEY_TILE, kv_head, context.batch)
        flag = self.flag_of(self.hidden_keys, key_tile)
        self.copy(maps, tiles[None, key_tile], stages[None, 0], landed, flag)

    def load_queries(self, step: Int32) -> None:
        """Queries and their LSE of one step."""
        context = self.context
        self.load_step(
            self.query_maps, self.hidden_queries, context.query, context.queries, self.lse_rows, context.lse, step
        )

    def load_grads(self, step: Int32) -> None:
        """Output gradients and their delta of one step."""
        context = self.context
        self.load_step(
            self.grad_out_maps,
            self.hidden_queries,
            context.grad_out,
            context.grads,
            self.delta_rows,
            context.delta,
            step,
        )

    def load_step(
        self,
        maps: tuple[Any, Any],
        hidden: Any,
        buffer: cute.Tensor,
        ring: Ring,
        row_values: cute.Pointer,
        row_buffer: cute.Pointer,
        step: Int32,
    ) -> None:
        """Queries with their LSE, or output gradients with their delta, of one step."""
        context, rows = self.context, self.context.shape.query_tile
        walked, tile = context.walk.place(Int32(step))
        head = context.first_head + walked
        flag = self.flag_of(hidden, tile)
        landed, stage = ring.acquire(step), ring.stage(step)
        stages, tiles = _tiles_of(maps[0], buffer, rows, head, context.batch)
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
            if cutlass.const_expr(shape.is_ordered):
                cute.arch.cp_async_bulk_wait_group(0)
                cute.arch.fence_proxy("async.global")
                with cute.arch.elect_one():
                    bulk.raise_flag(self.flags + number)

    def free(self, group: int) -> None:
        """That warpgroup's staging may be overwritten."""
        cute.arch.barrier_arrive(barrier_id=ADDED_BARRIER + group, number_of_threads=GROUP_THREADS + 32)

    def add(self, group: int, number: Int64) -> None:
        """One warpgroup's part; columns beyond the head dimension, which the last part may have, stay behind."""
        shape = self.context.shape
        floats = shape.sum_floats
        used = floats
        if shape.row_blocks == 1:
            used = GROUP_ROWS * min(shape.sum_width, shape.head_dim - group * shape.sum_width)
        to = self.sums + (number * GROUPS + group) * floats
        with cute.arch.elect_one():
            bulk.add_run(to, self.context.staged + group * floats, Int32(used * 4))
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
        scale: Float32,
        scale_log2: Float32,
        cap_log2: Float32,
    ) -> None:
        """Find the item, set up shared memory and events, take the role."""
        shape = self.shape
        thread, _, _ = cute.arch.thread_idx()
        block, place, section = cute.arch.block_idx()
        this_warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if this_warp == 0:
            for tensor_map in (query_map, key_map, value_map, grad_out_map):
                cpasync.prefetch_descriptor(tensor_map)
        visible: Any
        order: Any = None
        if cutlass.const_expr(shape.intervals):
            item = WorkItem.read(items, block)
            first_row = Int64(item.batch) * interval_stride
            visible = RowIntervals(keys, lo + first_row, hi + first_row)
            hidden_queries += item.batch * cute.ceil_div(queries, shape.query_tile)
            hidden_keys += item.batch * cute.ceil_div(keys, KEY_TILE)
            if cutlass.const_expr(shape.is_ordered):
                row = Int64(item.batch) * rank_stride + item.query_tile
                order = TableRanks(ranks + row * query_tiles)
        else:
            visible = Band(keys, queries, Int32(0) - offset, right, left)
            # Blocks start in the order of x, then y, then z: sections of heads one after the other, each with its
            # first keys first, which under a causal mask are the longest items; in ordered sums its last keys first.
            key_tile = place
            if cutlass.const_expr(shape.is_ordered):
                key_tile = cute.ceil_div(keys, KEY_TILE) - 1 - place
                order = BandRanks(Band(queries, keys, offset, left, right), shape.query_tile, key_tile)
            head_of_all = section * section_heads + block
            item = self.item_of(visible, head_of_all // item_heads, head_of_all % item_heads, key_tile)
        ids = None
        if cutlass.const_expr(shape.has_ids):
            first_query, first_key = Int64(item.batch) * queries, Int64(item.batch) * keys
            ids = SegmentIds(key_ids + first_key, query_ids + first_query, keys, queries)
        walked = heads // item_heads
        context = self.allocate(Walk(item, walked), item.head * walked, heads, query_tiles)
        if this_warp == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(context.key_landed, 1)
                cute.arch.mbarrier_init(context.value_landed, 1)
                context.queries.init(GROUPS * WARPS_PER_GROUP)
                context.grads.init(GROUPS * WARPS_PER_GROUP)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        kv_head = item.head // splits
        if this_warp < WARPS_PER_GROUP:
            cute.arch.setmaxregister_decrease(shape.load_registers)
            queries_and_keys = (query_map, hidden_query_map), (key_map, hidden_key_map)
            maps = *queries_and_keys, (value_map, hidden_value_map), (grad_out_map, hidden_grad_out_map)
            rows, hidden = (lse, delta), (hidden_queries, hidden_keys)
            if this_warp == 0:
                Load(context, maps, rows, hidden).run(kv_head)
            if this_warp == 1:
                Add(context, sums, flags, order).run()
        else:
            cute.arch.setmaxregister_increase(shape.compute_registers)
            group = this_warp // WARPS_PER_GROUP - 1
            scales = scale, scale_log2, cap_log2
            compute = Compute(context, group, thread % GROUP_THREADS, visible, ids, scales)
            compute.run()
            if cutlass.const_expr(shape.is_split):
                compute.store_parts((grad_key, grad_value), item_heads, (head_dim, value_dim))
            else:
                compute.store((grad_key, grad_value), kv_head)

    def item_of(self, visible: Band, batch: Int32, head: Int32, key_tile: Int32) -> WorkItem:
        """The item of a key tile; rows of the band are keys.

        Queries beyond the last need no mask, since their probabilities are 0; keys beyond the last do. An item that no
        query sees has no steps.
        """
        rows = self.shape.query_tile
        item = visible.work_item(batch, head, key_tile, KEY_TILE, rows)
        first = key_tile * KEY_TILE
        end = cutlass.select_(visible.lo(first) >= visible.keys, item.begin, item.end)
        sees_last = visible.hi(first) >= visible.keys
        full_end = cutlass.select_(sees_last, end, cutlass.min(item.full_end, end))
        full_begin = cutlass.min(item.full_begin, full_end)
        has_full = (first + KEY_TILE <= visible.queries) & (full_begin < full_end)
        full_begin, full_end = (cutlass.select_(has_full, one, end) for one in (full_begin, full_end))
        return dataclasses.replace(item, full_begin=full_begin, full_end=full_end, end=end)

    def allocate(self, walk: Walk, first_head: Int32, heads: Int32, query_tiles: Int32) -> Context:
        """Lay out shared memory in the plan's order."""
        shape = self.shape
        memory = cutlass.memory.SmemAllocator()

        def tiles(layout: cute.ComposedLayout) -> cute.Tensor:
            return memory.allocate_tensor(shape.dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)

        key, value = (tiles(shape.tile_layout(KEY_TILE, 1)) for _ in range(2))
        counts = shape.query_stages, shape.grad_stages
        query, grad_out = (tiles(shape.tile_layout(shape.query_tile, count)) for count in counts)
        grad_scores = tiles(shape.grad_score_layout())
        staged = memory.allocate_array(Float32, GROUPS * shape.sum_floats)
        lse, delta = (memory.allocate_array(Float32, count * shape.query_tile) for count in counts)
        barriers = memory.allocate_array(Int64, 2 + 2 * sum(counts))
        stage_bytes = shape.query_tile * (shape.row_bytes + 4)
        queries = Ring(barriers + 2, shape.query_stages, stage_bytes)
        grads = Ring(barriers + 2 + 2 * shape.query_stages, shape.grad_stages, stage_bytes)
        buffers = key, value, query, grad_out, grad_scores, staged, lse, delta
        return Context(shape, walk, first_head, heads, query_tiles, *buffers, barriers, barriers + 1, queries, grads)

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
    table = (integers,) * 5 if shape.intervals else (None,) * 5
    ids = (integers,) * 2 if shape.has_ids else (None,) * 2
    ranks = integers if shape.is_ordered and shape.intervals else None
    pointers = (floats, floats, floats, flags, *table, *ids, ranks)
    return backward.host, ((rows,) * 4 + gradients, pointers, (Int32(1),) * 14, (Float32(1.0),) * 3)
