"""Device code of the attention forward on compute capability 10.x (B200, B300), in CuTe-DSL. Imported only to build.

A work item is two tiles of 128 query rows of one head, stages 0 and 1; it walks the 128-key tiles that its rows see.

    warps  0..3      softmax     stage 0: thread t has row t of every tile of scores
    warps  4..7      softmax     stage 1
    warps  8..11     correction  brings outputs to a new maximum, and at the end to shared memory; writes the LSE
    warp   12        mma         issues every matrix product
    warp   13        epilogue    copies finished outputs to global memory
    warp   14        load        copies queries, keys and values to shared memory
    warp   15        schedule    with cluster launch control, asks for the next item; else idle

    shared memory    query       2 x (128, head_dim)    later the output's staging
                     keys        ring of (128, head_dim)
                     values      ring of (128, value_dim)
                     factors, maxima                    what a row's softmax tells its correction

    tensor memory    0 .. 127    scores of stage 0      its probs overwrite columns 64 .. 127, two to a column
                     128 .. 255  scores of stage 1      its probs overwrite columns 192 .. 255
                     256 ..      outputs of stages 0 and 1, value_dim columns each

The tensor core works on one stage while the softmax of the other runs. Its products are issued, and done, in this order
(S = Q K^T, O += P V; the digit is the stage, ' the next tile of keys):

    S0 S1 | O0 S0' O1 S1' | O0' S0" O1' S1" | ... | O0 O1

so that "S' is ready" implies "O is done", and P needs no event to be overwritten by S'. O waits for three quarters of P
and for the correction; its last quarter waits for the last quarter of P.

    softmax      scores_ready -> max -> factor .............. -> exp, round, store P: 3/4, 1/4
    correction                          factor -> rescale O if any row of the warp needs it
    mma                                        -> output_ready: O += P V (3/4) -> probs_ready: (1/4), S'

This is FlashAttention-4's pipeline (arXiv 2603.05451, section 3.1). The plan of each variant prints its sizes, buffers
and events (`python -m jax_fa4.kernels.build --print`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_ptr

from jax_fa4.kernels.blackwell.geometry import FRAGMENT, HEAD_FRAGMENTS, KEY_TILE, STAGES, TILE_ROWS, WARPS_PER_GROUP
from jax_fa4.kernels.blackwell.parts import products, tensor_memory
from jax_fa4.kernels.blackwell.parts.correction import Correction, Epilogue
from jax_fa4.kernels.blackwell.parts.items import schedule, walk
from jax_fa4.kernels.blackwell.parts.places import Past, Place, uncertain_zero
from jax_fa4.kernels.blackwell.parts.products import SharedOperand
from jax_fa4.kernels.blackwell.parts.shape import ELEMENT_BYTES, Call, Context, Memory, Shape
from jax_fa4.kernels.blackwell.parts.softmax import Softmax
from jax_fa4.kernels.parts import boxes
from jax_fa4.kernels.parts.row_softmax import RowStatistics
from jax_fa4.kernels.plan import KernelPlan

GROUP_THREADS = 32 * WARPS_PER_GROUP
CORRECTION_WARP = STAGES * WARPS_PER_GROUP
MMA_WARP = CORRECTION_WARP + WARPS_PER_GROUP
EPILOGUE_WARP = MMA_WARP + 1
LOAD_WARP = MMA_WARP + 2
HEAD_STEPS = range(HEAD_FRAGMENTS * FRAGMENT // products.DEPTH)
TAIL_STEPS = range(HEAD_STEPS.stop, KEY_TILE // products.DEPTH)
# Without `uncertain_zero` in them, descriptors of the queries are made before the loop, and there are too few uniform
# registers for them; with more than 8 steps of depth too few also for the addresses of the probs.
MOST_HOISTED = 8


class Load:
    """One warp: the first keys and the queries, then values and keys in the order in which they are needed."""

    def __init__(self, memory: Memory, maps: tuple[cute.CopyAtom, ...], group_size: Int32) -> None:
        self.shape, self.group_size, self.past = memory.shape, group_size, Past(memory.shape.has_many_items)
        self.query_map, self.key_map, self.value_map = (boxes.address_of(one) for one in maps)
        self.key_place, self.value_place = Place(self.shape.key_stages), Place(self.shape.value_stages)

    @cute.jit
    def run(self, context: Context) -> None:
        """Issue every copy of an item."""
        self.context, self.kv_head = context, context.item.head // self.group_size
        steps = context.item.count
        if steps > 0:
            self.load_keys(Int32(0))
        for stage in cutlass.range_constexpr(STAGES):
            if cutlass.const_expr(self.shape.has_many_items):
                # Also before items that load none: who waits for parities must not miss a phase, and says so.
                context.signal("query_free").wait_free(stage, self.past.items)
                context.signal("query_free").arrive_elected(stage)
            if steps > 0:
                self.load_query(stage)
        if steps > 0:
            for step in cutlass.range(1, steps, 1, unroll=1):
                self.load_pair(step)
            self.load_values(steps - 1)
        self.past.add(steps)

    def load_pair(self, step: Any) -> None:
        """Keys of a step and values of the one before, in the order in which the products take them."""
        if self.shape.has_own_probs:
            self.load_keys(step)
            self.load_values(step - 1)
        else:
            self.load_values(step - 1)
            self.load_keys(step)

    def load_query(self, stage: int) -> None:
        """One stage's query rows."""
        context, item = self.context, self.context.item
        place = context.first_row(stage), item.head, item.batch
        self.load_tile(self.query_map, "query", stage, (TILE_ROWS, self.shape.head_dim), 0, place)

    def load_keys(self, step: Any) -> None:
        """Keys of one step."""
        context, shape = self.context, self.shape
        row = context.item.key_tile(step) * KEY_TILE + context.rank * shape.key_rows
        self.load_step(self.key_map, "keys", (shape.key_rows, shape.head_dim), 0, row, self.key_place)

    def load_values(self, step: Any) -> None:
        """Values of one step."""
        context, shape = self.context, self.shape
        row, column = context.item.key_tile(step) * KEY_TILE, context.rank * shape.value_columns
        self.load_step(self.value_map, "values", (KEY_TILE, shape.value_columns), column, row, self.value_place)

    def load_step(
        self, tensor_map: Int64, name: str, tile: tuple[int, int], column: Any, row: Int32, cursor: Place
    ) -> None:
        """A tile (rows, columns) of keys or values, when its place in the ring is free."""
        context, item = self.context, self.context.item
        context.signal(f"{name}_free").wait_free(cursor.stage, cursor.use)
        self.load_tile(tensor_map, name, cursor.stage, tile, column, (row, self.kv_head, item.batch))
        cursor.advance()

    def load_tile(
        self, tensor_map: Int64, name: str, stage: Any, tile: tuple[int, int], column: Any, place: tuple[Any, ...]
    ) -> None:
        """A tile (rows, columns) from `column` and `place` (row, head, batch), box by box."""
        context, ctas, (rows, columns) = self.context, self.shape.ctas, tile
        width, landed = self.shape.box_columns(columns), context.signal(f"{name}_landed")
        to, size = context.buffer(name, stage), rows * columns * ELEMENT_BYTES * ctas
        # The first CTA of a pair expects what both load.
        boxes.expect(landed.address(stage), size, None if ctas == 1 else Int32(context.rank == 0))
        for box in range(columns // width):
            corner = (column + box * width, *place)
            boxes.load(tensor_map, to + box * rows * width * ELEMENT_BYTES, corner, landed.address(stage), ctas)


class Mma:
    """One warp: issues every product. See the order at the head of this file."""

    def __init__(self, memory: Memory) -> None:
        shape = memory.shape
        self.memory, self.shape, self.past = memory, shape, Past(shape.has_many_items)
        self.scores, self.output = shape.score_product, shape.output_product
        query: SharedOperand = self.scores.a  # type: ignore[assignment]
        self.query = [query.lower(memory.buffer("query", one)) for one in range(STAGES)]
        self.key_place, self.value_place = Place(shape.key_stages), Place(shape.value_stages)
        self.base = tensor_memory.base(memory.buffer("tensor_memory_base"))

    @cute.jit
    def run(self, context: Context) -> None:
        """Every step of an item."""
        steps = context.item.count
        if steps > 0:
            self.wait_landed("keys", self.key_place)
            for stage in cutlass.range_constexpr(STAGES):
                self.memory.signal("query_landed").wait(stage, self.past.visiting)
                self.multiply_keys(stage, steps)
            self.release("keys", self.key_place)
            for step in cutlass.range(0, steps - 1, 1, unroll=1):
                self.step(step)
            self.last(steps - 1)
        self.past.add(steps)

    def step(self, step: Any) -> None:
        """Outputs of this step, scores of the next."""
        if self.shape.has_own_probs:
            self.step_with_own_probs(step)
            return
        self.wait_landed("values", self.value_place)
        for stage in range(STAGES):
            self.multiply_values(stage, step)
            if stage == 0:
                self.wait_landed("keys", self.key_place)
            else:
                self.release("values", self.value_place)
            self.multiply_keys(stage, step)
        self.release("keys", self.key_place)

    def step_with_own_probs(self, step: Any) -> None:
        """Scores of the next step as soon as this step's are read, then this step's outputs."""
        self.wait_landed("keys", self.key_place)
        for stage in range(STAGES):
            self.memory.signal("scores_read").wait(stage, self.past.steps + step)
            tensor_memory.fence_after_wait()
            self.multiply_keys(stage, step)
        self.release("keys", self.key_place)
        self.wait_landed("values", self.value_place)
        for stage in range(STAGES):
            self.multiply_values(stage, step)
            self.announce("out_updated", stage)
        self.release("values", self.value_place)

    def last(self, step: Any) -> None:
        """Outputs of the last step."""
        self.wait_landed("values", self.value_place)
        for stage in range(STAGES):
            self.multiply_values(stage, step)
            if stage == 1 and self.shape.has_many_items:
                # Before what everyone waits for: nothing may arrive when the CTA is gone.
                self.release("values", self.value_place)
            self.announce("out_done", stage)

    def multiply_keys(self, stage: int, step: Any) -> None:
        """Scores of a stage with the keys at the cursor; `step` is a number that changes in the loop around."""
        key = self.scores.b.lower(self.memory.buffer("keys", self.key_place.stage))
        steps = range(self.shape.head_dim // products.DEPTH)
        zero = uncertain_zero(step)
        base, query = self.base + zero, self.query[stage] + zero
        self.scores.issue(base, self.shape.columns(f"scores_{stage}"), query, key, steps, False)
        self.announce("scores_ready", stage)

    def multiply_values(self, stage: int, step: Any) -> None:
        """Output of a stage with the values at the cursor, as soon as its probs are there."""
        memory, shape, use = self.memory, self.shape, self.past.steps + step
        value = self.output.b.lower(memory.buffer("values", self.value_place.stage))
        out, probs, base = shape.columns(f"out_{stage}"), shape.columns(f"probs_{stage}"), self.base
        if shape.head_dim // products.DEPTH > MOST_HOISTED:
            base = base + uncertain_zero(step)
        memory.signal("output_ready").wait(stage, use)
        tensor_memory.fence_after_wait()
        self.output.issue(base, out, probs, value, HEAD_STEPS, step)
        memory.signal("probs_ready").wait(stage, use)
        tensor_memory.fence_after_wait()
        self.output.issue(base, out, probs, value, TAIL_STEPS, True)

    def wait_landed(self, name: str, cursor: Place) -> None:
        """Wait for the tile at the cursor."""
        self.memory.signal(f"{name}_landed").wait(cursor.stage, cursor.use)

    def release(self, name: str, cursor: Place) -> None:
        """The tile at the cursor is free when what was issued is done."""
        self.announce(f"{name}_free", cursor.stage)
        cursor.advance()

    def announce(self, name: str, stage: Any) -> None:
        """An event of every CTA, when what was issued is done."""
        products.commit(self.memory.signal(name).address(stage), self.shape.ctas)


class BlackwellForward:
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
        lse: cute.Pointer,
        sinks: Any,
        items: Any,
        lo: Any,
        hi: Any,
        query_ids: Any,
        key_ids: Any,
        queries: Int32,
        keys: Int32,
        heads: Int32,
        kv_heads: Int32,
        offset: Int32,
        left: Int32,
        right: Int32,
        section_heads: Int32,
        interval_stride: Int32,
        item_count: Any,
        scale_log2: Float32,
        slack: Float32,
        cap_log2: Float32,
    ) -> None:
        """Find the item, set up barriers and tensor memory, take the role."""
        shape = self.shape
        thread, _, _ = cute.arch.thread_idx()
        block, query_tile, section = cute.arch.block_idx()
        rank: Any = 0
        if cutlass.const_expr(shape.ctas == 2):
            rank = query_tile % 2
            query_tile = query_tile // 2
        this_warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        memory = Memory(shape, cute.arch.get_dyn_smem(cutlass.Int8, alignment=1024), rank)
        tables, lengths, band = (items, lo, hi, query_ids, key_ids), (queries, keys), (offset, left, right)
        place = block, query_tile, section
        call = Call(memory, place, tables, lengths, heads, band, section_heads, interval_stride, item_count)
        if this_warp == LOAD_WARP:
            for tensor_map in (query_map, key_map, value_map):
                cpasync.prefetch_descriptor(tensor_map)
            with cute.arch.elect_one():
                memory.init_signals()
        if this_warp == MMA_WARP:
            tensor_memory.allocate(memory.pointer("tensor_memory_base", Int32), shape.ctas)
        cute.arch.mbarrier_init_fence()
        self.meet()
        if this_warp < CORRECTION_WARP:
            cute.arch.setmaxregister_increase(shape.registers("softmax"))
            statistics, stage = RowStatistics.create(scale_log2, slack), this_warp // WARPS_PER_GROUP
            walk(call, Softmax(memory, stage, thread % GROUP_THREADS, statistics, cap_log2).run)
        elif this_warp < MMA_WARP:
            cute.arch.setmaxregister_decrease(shape.registers("correction"))
            walk(call, Correction(memory, thread % GROUP_THREADS, scale_log2, lse, sinks).run)
        else:
            cute.arch.setmaxregister_decrease(shape.registers("mma"))
            if this_warp == MMA_WARP:
                if rank == 0:
                    walk(call, Mma(memory).run)
            elif this_warp == EPILOGUE_WARP:
                walk(call, Epilogue(memory, out_map).run)
            elif this_warp == LOAD_WARP:
                walk(call, Load(memory, (query_map, key_map, value_map), heads // kv_heads).run)
            elif cutlass.const_expr(shape.scheduling == "cluster"):
                schedule(memory)
        self.meet()
        if this_warp == MMA_WARP:
            tensor_memory.deallocate(shape.ctas)

    def meet(self) -> None:
        """All threads of the CTA, or of the pair: before others use its barriers, and before its memory goes."""
        if self.shape.ctas == 2:
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    def tensor_map(self, operation: Any, pointer: cute.Pointer, rows: int, dim: int) -> cute.CopyAtom:
        """A tensor map's type; extents and strides stand in, since the runtime encodes the map itself."""
        layout = cute.make_layout((8192, dim, 16, 8), stride=(16384, 1, 1024, 8192 * 16384))
        width = self.shape.box_columns(dim)
        tile = cute.make_layout((rows, width), stride=(width, 1))
        whole = cute.make_tensor(pointer, layout)
        return cpasync.make_tiled_tma_atom(operation, whole, tile, (rows, width)).atom

    @cute.jit
    def host(
        self,
        tensors: tuple[cute.Pointer, ...],
        pointers: tuple[Any, ...],
        integers: tuple[Any, ...],
        floats: tuple[Float32, ...],
    ) -> None:
        """Exists for the compiler only: the package's own runtime launches the kernel."""
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        query, key, value, out = tensors
        shape = self.shape
        maps = (
            self.tensor_map(load, query, TILE_ROWS, shape.head_dim),
            self.tensor_map(load, key, shape.key_rows, shape.head_dim),
            self.tensor_map(load, value, KEY_TILE, shape.value_columns),
            self.tensor_map(store, out, TILE_ROWS, shape.value_dim),
        )
        self.kernel(*maps, *pointers, *integers, *floats).launch(
            grid=shape.plan.cluster,
            block=(shape.plan.threads, 1, 1),
            cluster=shape.plan.cluster if shape.ctas == 2 else None,
            min_blocks_per_mp=1,
        )


def trace(plan: KernelPlan) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """The function to compile, and arguments of the right types."""
    forward = BlackwellForward(plan)

    def pointer(kind: Any, alignment: int) -> Any:
        return make_ptr(kind, alignment, cute.AddressSpace.gmem, assumed_align=alignment)

    tensors = (pointer(forward.shape.dtype, 16),) * 4
    sinks = pointer(Float32, 4) if forward.shape.has_sinks else None
    table = (pointer(Int32, 4),) * 3 if forward.shape.intervals else (None,) * 3
    ids = (pointer(Int32, 4),) * 2 if forward.shape.has_ids else (None,) * 2
    pointers = (pointer(Float32, 4), sinks, *table, *ids)
    items = Int32(1) if forward.shape.scheduling == "persistent" else None
    return forward.host, (tensors, pointers, (*(Int32(1),) * 9, items), (Float32(1.0),) * 3)
