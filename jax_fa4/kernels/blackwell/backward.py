"""Device code of the attention backward on compute capability 10.x (B200, B300), in CuTe-DSL. Imported only to build.

A work item is 128 keys of one KV head, or 256 of a pair of CTAs; it walks the tiles of 128 queries that see them, of
each query head of the group, so that its key and value gradients are summed where they are and leave the CTA once.

    warps  0..3      reduce      adds the query gradients of every tile to their float32 sums in global memory
    warps  4..7      compute     queries  0 ..  63 of every tile: thread t has key t; writes the values' gradients
    warps  8..11     compute     queries 64 .. 127 of every tile; writes the keys' gradients
    warp   12        mma         issues every matrix product
    warp   13        load        copies keys and values once, queries and output gradients tile by tile
    warp   14        relay       of a pair: tells the first CTA's mma warp that both halves of a tile's dS are there
    warp   15        finds the item for all

    shared memory    key, value      (128, dim)           at the end the staging of their gradients
                     query           ring of (128, head_dim)
                     grad_out        ring of (128, value_dim)
                     grad_scores     2 x (128 keys, 64 queries)
                     statistics      ring of log-sum and delta of 128 queries
                     staged          1 or 2 x (32, 32) float32 of each reducing warp

    tensor memory    scores, grad_probs    128 columns each; in place become probs and grad_scores, two to a column
                     grad_value, grad_key  sums of the whole item
                     grad_query            of one tile; where it lies differs by head_dim (backward_plans.py)

Everything is transposed, so that keys are rows (S = K Q^T, P = exp(S - L), dP = V dO^T, dS = P (dP - delta)):

    mma        S' ..... dK = dS Q, dQ = dS^T K ....... dP' ..... dV = P' dO'    ' the next tile; product_order.py
    compute        S' -> P' ......................... dP' -> dS' (tensor memory for dK, shared memory for dQ)
    reduce                      dQ -> registers -> shared memory -> += global memory

In a pair every product is one of both CTAs (cta_group::2), issued by the first: rows are the keys of both, and each has
half of B's columns. So a CTA loads 64 of a tile's queries for S, and half of the columns of all 128 for dK; likewise
output gradients for dP and dV. dQ sums over the keys of both and is split by queries: CTA r needs the half r of dS from
both, keeps it as its warpgroup r writes it, and sends what warpgroup 1 - r writes to the other through distributed
shared memory.

    CTA 0   keys   0 .. 127   warpgroup 0: dS (queries  0 ..  63) stays   warpgroup 1: dS (queries 64 .. 127) leaves
    CTA 1   keys 128 .. 255   warpgroup 1: dS (queries 64 .. 127) stays   warpgroup 0: dS (queries  0 ..  63) leaves

    shared memory    query, grad_out                   (64, dim), the CTA's half of the rows
    besides          query_columns, grad_out_columns   (128, dim / 2), its half of the columns
                     key_columns                       (256, head_dim / 2), of the keys of both
                     leaving_grad_scores               (128 keys, 64 queries)

This is the backward of FlashAttention-4 (arXiv 2603.05451, section 3.2); that each warpgroup has columns of its own, so
that no barrier joins them, and the placing of dQ, are this kernel's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_ptr

from jax_fa4.kernels.blackwell.backward_plans import (
    COMPUTE_GROUPS,
    SCALARS,
    TILE,
    WARP_ROWS,
    WARPS_PER_GROUP,
    grad_columns,
    loaded_columns,
)
from jax_fa4.kernels.blackwell.parts import products, tensor_memory
from jax_fa4.kernels.blackwell.parts.backward_shape import ELEMENT_BYTES, HALF, Context, Inputs, Shape
from jax_fa4.kernels.blackwell.parts.gradients import Compute, Order, Reduce, Relay, fill_no_row
from jax_fa4.kernels.blackwell.product_order import Issue, after_loop, before_loop, refill
from jax_fa4.kernels.parts import boxes, by_address
from jax_fa4.kernels.plan import KernelPlan

GROUP_THREADS = 32 * WARPS_PER_GROUP
COMPUTE_WARP = WARPS_PER_GROUP
MMA_WARP = COMPUTE_WARP + COMPUTE_GROUPS * WARPS_PER_GROUP
LOAD_WARP = MMA_WARP + 1
RELAY_WARP = MMA_WARP + 2
ITEM_WARP = MMA_WARP + 3
STATISTIC_BYTES = TILE * 4


class Load:
    """One warp: keys and values, then queries, their statistics and output gradients of every tile."""

    def __init__(
        self,
        context: Context,
        maps: dict[str, cute.CopyAtom],
        statistics: tuple[Any, Any],
        padded: Int32,
        splits: Int32,
    ) -> None:
        self.context, self.shape = context, context.shape
        self.maps = {name: boxes.address_of(one) for name, one in maps.items()}
        self.statistics, self.padded = statistics, padded
        self.key_head = context.item.head // splits if self.shape.is_split else context.item.head

    @cute.jit
    def run(self) -> None:
        """Issue every copy of the item."""
        context = self.context
        if context.total > 0:
            shape, place = self.shape, (self.key_head, context.item.batch)
            corner = (context.key_row, 0)
            self.load_boxes("key", "keys_landed", context.buffer("key"), corner, (TILE, shape.head_dim), place)
            self.load_boxes("value", "values_landed", context.buffer("value"), corner, (TILE, shape.value_dim), place)
            if cutlass.const_expr(shape.ctas == 2):
                columns = shape.head_dim // 2
                corner, tile = (context.key_row - context.rank * TILE, context.rank * columns), (2 * TILE, columns)
                self.load_boxes("key", "key_columns_landed", context.buffer("key_columns"), corner, tile, place)
            for head in cutlass.range(0, context.group, 1, unroll=1):
                for step in cutlass.range(0, context.item.count, 1, unroll=1):
                    self.step(head * context.item.count + step, context.item.head * context.group + head, step)

    def step(self, use: Any, head: Any, step: Any) -> None:
        """One tile of queries."""
        context, shape = self.context, self.shape
        row, place = context.query_row(step), (head, context.item.batch)
        half, dims = context.rank * shape.query_rows, (shape.head_dim, shape.value_dim)
        self.load_stage("query", "query", use, (row + half, 0), (shape.query_rows, dims[0]), place)
        self.load_statistics(use, head, row)
        self.load_stage("grad_out", "grad_out", use, (row + half, 0), (shape.query_rows, dims[1]), place)
        if shape.ctas == 2:
            for name, dim in zip(("grad_out", "query"), (dims[1], dims[0]), strict=True):
                corner, tile = (row, context.rank * (dim // 2)), (TILE, dim // 2)
                self.load_stage(name, f"{name}_columns", use, corner, tile, place)

    def acquire(self, name: str, use: Int32) -> Int32:
        """The stage of a ring for its use-th use, when it is free."""
        free = refill(self.shape.order, name, self.shape.stages(name))
        self.context.wait(free.event, use - free.behind)
        return self.context.stage(name, use)

    def load_stage(
        self, tensor: str, name: str, use: Int32, corner: tuple[Any, Any], tile: tuple[int, int], place: tuple[Any, Any]
    ) -> None:
        """A tile into its ring."""
        stage = self.acquire(name, use)
        self.load_boxes(tensor, f"{name}_landed", self.context.buffer(name, stage), corner, tile, place, stage)

    def load_boxes(
        self,
        tensor: str,
        event: str,
        to: Int32,
        corner: tuple[Any, Any],
        tile: tuple[int, int],
        place: tuple[Any, Any],
        stage: Any = 0,
    ) -> None:
        """A tile of (rows, columns) from a corner, of the tensor's `place` (head, batch): boxes of the same columns one
        after the other. The first CTA of a pair expects what both load."""
        (rows, columns), (row, column), ctas = tile, corner, self.shape.ctas
        dim = self.shape.head_dim if tensor in ("query", "key") else self.shape.value_dim
        width, box_rows = loaded_columns(dim, ctas), TILE if tensor in ("key", "value") else self.shape.query_rows
        barrier = self.context.signal(event).address(stage)
        is_expecting = None if ctas == 1 else Int32(self.context.rank == 0)
        boxes.expect(barrier, rows * columns * ELEMENT_BYTES * ctas, is_expecting)
        for left in range(0, columns, width):
            for top in range(0, rows, box_rows):
                address = to + (left * rows + top * width) * ELEMENT_BYTES
                boxes.load(self.maps[tensor], address, (column + left, row + top, *place), barrier, ctas)

    def load_statistics(self, use: Int32, head: Int32, row: Int32) -> None:
        """Log-sums and deltas of a tile's queries."""
        context = self.context
        stage = self.acquire("statistics", use)
        barrier = context.signal("statistics_landed").address(stage)
        boxes.expect(barrier, 2 * STATISTIC_BYTES)
        heads = context.group * context.kv_heads
        first = (Int64(context.item.batch) * heads + head) * self.padded + row
        for place, statistic in enumerate(self.statistics):
            to = context.buffer("statistics", stage) + place * STATISTIC_BYTES
            by_address.load_flat(statistic + first, to, STATISTIC_BYTES, barrier)


class Mma:
    """One warp: issues every product, in the order of the plan's table."""

    def __init__(self, context: Context) -> None:
        self.context, self.shape = context, context.shape
        self.zero = Int32(0)
        self.base = cute.make_tensor(context.pointer("tensor_memory_base", Int32), cute.make_layout(1))[0]

    @cute.jit
    def run(self) -> None:
        """Every tile of the item."""
        context, order = self.context, self.shape.order
        if context.total > 0:
            context.wait("keys_landed", Int32(0))
            context.wait("values_landed", Int32(0))
            if cutlass.const_expr(self.shape.ctas == 2):
                context.wait("key_columns_landed", Int32(0))
            for issue in before_loop(order):
                self.issue(issue, Int32(0), is_first=True)
            for tile in cutlass.range(0, context.total - 1, 1, unroll=1):
                for issue in order:
                    self.issue(issue, tile + 1 if issue.is_next else tile, is_first=False)
            for issue in after_loop(order):
                self.issue(issue, context.total - 1, is_first=False)
            products.commit(context.signal("grads_ready").address(0), self.shape.ctas)

    def issue(self, issue: Issue, tile: Any, is_first: bool) -> None:
        """One row of the table for one tile."""
        context = self.context
        for wait in issue.waits:
            context.wait(wait.event, tile - wait.behind)
        tensor_memory.fence_after_wait()
        # 0, since there are fewer tiles; but that is not known when compiling. Without it all descriptors of the loop's
        # instructions, up to 96 words, are made before the loop, for which there are no registers.
        self.zero = Int32(tile) >> 30
        getattr(self, f"multiply_{issue.product}")(tile, is_first)
        for event in issue.commits:
            signal = context.signal(event)
            products.commit(signal.address(Int32(tile) & (signal.stages - 1)), self.shape.ctas)

    def whole(self, name: str, a: Int32, b: Int32, depth: int, accumulate: Any) -> None:
        """A product whose A is in shared memory."""
        product = self.shape.product(name)
        assert product.a is not None
        steps = range(depth // products.DEPTH)
        out, zero = self.shape.columns(name), self.zero
        product.issue(self.base + zero, out, product.a.lower(a) + zero, product.b.lower(b) + zero, steps, accumulate)

    def halves(self, name: str, halves: str, b: Int32, accumulate: Any) -> None:
        """A product whose A is in tensor memory, where each half of the queries lies by itself."""
        product, shape = self.shape.product(name), self.shape
        steps = HALF // products.DEPTH
        is_apart = halves != "probs" or not shape.has_own_probs
        for half in range(COMPUTE_GROUPS):
            first = shape.columns(halves) + (half * HALF if is_apart else 0)
            some = range(half * steps, (half + 1) * steps)
            out, adds = shape.columns(name), True if half else accumulate
            product.issue(self.base + self.zero, out, first, product.b.lower(b) + self.zero, some, adds)

    def ring(self, name: str, tile: Int32) -> Int32:
        """Address of a tile in its ring."""
        return self.context.buffer(name, self.context.stage(name, tile))

    def multiply_scores(self, tile: Int32, is_first: bool) -> None:
        """S = K Q^T."""
        self.whole("scores", self.context.buffer("key"), self.ring("query", tile), self.shape.head_dim, False)

    def multiply_grad_probs(self, tile: Int32, is_first: bool) -> None:
        """dP = V dO^T."""
        self.whole("grad_probs", self.context.buffer("value"), self.ring("grad_out", tile), self.shape.value_dim, False)

    def multiply_grad_value(self, tile: Int32, is_first: bool) -> None:
        """dV += P dO."""
        self.halves("grad_value", "probs", self.ring(self.columns_of("grad_out"), tile), not is_first)

    def multiply_grad_key(self, tile: Int32, is_first: bool) -> None:
        """dK += dS Q."""
        self.halves("grad_key", "grad_probs", self.ring(self.columns_of("query"), tile), tile)

    def multiply_grad_query(self, tile: Int32, is_first: bool) -> None:
        """dQ = dS^T K."""
        key = self.context.buffer(self.columns_of("key"))
        self.whole("grad_query", self.context.buffer("grad_scores"), key, self.shape.items_rows, False)

    def columns_of(self, name: str) -> str:
        """The buffer whose columns are B's: a pair has halves of them apart."""
        return f"{name}_columns" if self.shape.ctas == 2 else name


class BlackwellBackward:
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
        sums_map: cute.CopyAtom,
        grad_key_map: cute.CopyAtom,
        grad_value_map: cute.CopyAtom,
        lse_log2: cute.Pointer,
        delta: cute.Pointer,
        flags: Any,
        items: Any,
        lo: Any,
        hi: Any,
        query_ids: Any,
        key_ids: Any,
        rank_table: Any,
        queries: Int32,
        keys: Int32,
        padded: Int32,
        group: Int32,
        kv_heads: Int32,
        splits: Int32,
        offset: Int32,
        left: Int32,
        right: Int32,
        section_heads: Int32,
        interval_stride: Int32,
        rank_stride: Int32,
        last_first: Int32,
        scale: Float32,
        scale_log2: Float32,
        cap_log2: Float32,
    ) -> None:
        """Find the item, set up barriers and tensor memory, take the role."""
        shape = self.shape
        thread, _, _ = cute.arch.thread_idx()
        rank: Any = 0
        if cutlass.const_expr(shape.ctas == 2):
            rank = cute.arch.block_idx_in_cluster()
        this_warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        mask = (items, lo, hi, query_ids, key_ids)
        sizes, band = (queries, keys, padded, group, kv_heads), (offset, left, right)
        inputs = Inputs(shape, *mask, *sizes, band, section_heads, interval_stride, last_first)
        memory = cute.arch.get_dyn_smem(cutlass.Int8, alignment=1024)
        self.set_up(inputs, memory, this_warp, thread, (query_map, key_map, value_map, grad_out_map))
        if this_warp < COMPUTE_WARP:
            cute.arch.setmaxregister_decrease(shape.registers("reduce"))
            order = None
            if cutlass.const_expr(shape.is_ordered):
                order = Order(flags, rank_table, rank_stride, padded // TILE)
            Reduce(inputs.context(memory, rank), thread, sums_map, order).run()
        elif this_warp < MMA_WARP:
            cute.arch.setmaxregister_increase(shape.registers("compute"))
            group_of_warp = this_warp // WARPS_PER_GROUP - 1
            floats = (scale, scale_log2, cap_log2)
            compute = Compute(inputs.context(memory, rank), group_of_warp, thread % GROUP_THREADS, floats)
            compute.run()
            compute.store(grad_key_map, grad_value_map)
        else:
            cute.arch.setmaxregister_decrease(shape.registers("mma"))
            if this_warp == MMA_WARP:
                if rank == 0:
                    Mma(inputs.context(memory, rank)).run()
            elif this_warp == RELAY_WARP:
                if cutlass.const_expr(shape.ctas == 2):
                    Relay(inputs.context(memory, rank)).run()
            elif this_warp == LOAD_WARP:
                maps = {"query": query_map, "key": key_map, "value": value_map, "grad_out": grad_out_map}
                Load(inputs.context(memory, rank), maps, (lse_log2, delta), padded, splits).run()
        self.sync()
        if this_warp == MMA_WARP:
            tensor_memory.deallocate(shape.ctas)

    @cute.jit
    def set_up(
        self,
        inputs: cutlass.Constexpr,
        memory: cute.Pointer,
        this_warp: Int32,
        thread: Int32,
        maps: tuple[cute.CopyAtom, ...],
    ) -> None:
        """Barriers, tensor memory and the item, each by one warp, before all others need them."""
        shape = self.shape
        unknown: Any = None  # the item, and all that belongs to it
        context = Context(shape, unknown, unknown, unknown, unknown, unknown, unknown, memory, 0)
        if this_warp < COMPUTE_WARP:
            fill_no_row(context, thread)
        if this_warp == LOAD_WARP:
            for tensor_map in maps:
                cpasync.prefetch_descriptor(tensor_map)
            with cute.arch.elect_one():
                context.init_signals()
        if this_warp == MMA_WARP:
            tensor_memory.allocate(context.pointer("tensor_memory_base", Int32), shape.ctas)
        if this_warp == ITEM_WARP:
            block, key_tile, section = cute.arch.block_idx()
            inputs.tell_item(inputs.find_item(block // shape.ctas, key_tile, section), memory)
        cute.arch.mbarrier_init_fence()
        self.sync()

    def sync(self) -> None:
        """All threads of the CTA, or of the pair: before others use its barriers, and before its memory goes."""
        if self.shape.ctas == 2:
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    def tensor_map(self, operation: Any, pointer: cute.Pointer, dim: int, rows: int, width: int) -> cute.CopyAtom:
        """A tensor map's type; extents and strides stand in, since the runtime encodes the map itself."""
        layout = cute.make_layout((8192, dim, 16, 8), stride=(16384, 1, 1024, 8192 * 16384))
        tile = cute.make_layout((rows, width), stride=(width, 1))
        return cpasync.make_tiled_tma_atom(operation, cute.make_tensor(pointer, layout), tile, (rows, width)).atom

    @cute.jit
    def host(
        self,
        tensors: tuple[cute.Pointer, cute.Pointer],
        pointers: tuple[Any, ...],
        integers: tuple[Int32, ...],
        floats: tuple[Float32, ...],
    ) -> None:
        """Exists for the compiler only: the package's own runtime launches the kernel."""
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        tensor, sums = tensors
        shape = self.shape
        dims = (shape.head_dim, shape.head_dim, shape.value_dim, shape.value_dim)
        rows = (shape.query_rows, TILE, TILE, shape.query_rows)
        loads = zip(dims, rows, strict=True)
        grad, split = sums if shape.is_split else tensor, shape.is_split
        staged = shape.stage_bytes("staged_grad_query") // (WARP_ROWS * 4)
        maps = (
            *(self.tensor_map(load, tensor, dim, box, loaded_columns(dim, shape.ctas)) for dim, box in loads),
            self.tensor_map(store, sums, shape.head_dim, WARP_ROWS, staged),
            *(self.tensor_map(store, grad, dim, WARP_ROWS, grad_columns(dim, split)) for dim in dims[1:3]),
        )
        self.kernel(*maps, *pointers, *integers, *floats).launch(
            grid=self.shape.plan.cluster,
            block=(self.shape.plan.threads, 1, 1),
            cluster=self.shape.plan.cluster if self.shape.ctas == 2 else None,
            min_blocks_per_mp=1,
        )


def trace(plan: KernelPlan) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """The function to compile, and arguments of the right types."""
    backward = BlackwellBackward(plan)

    def pointer(kind: Any, alignment: int) -> Any:
        return make_ptr(kind, alignment, cute.AddressSpace.gmem, assumed_align=alignment)

    tensors = pointer(backward.shape.dtype, 16), pointer(Float32, 16)
    table = (pointer(Int32, 4),) * 3 if backward.shape.intervals else (None,) * 3
    ids = (pointer(Int32, 4),) * 2 if backward.shape.has_ids else (None,) * 2
    flags = pointer(Int32, 4) if backward.shape.is_ordered else None
    ranks = flags if backward.shape.intervals else None
    pointers = (pointer(Float32, 4), pointer(Float32, 4), flags, *table, *ids, ranks)
    return backward.host, (tensors, pointers, (Int32(1),) * len(SCALARS), (Float32(1.0),) * 3)
