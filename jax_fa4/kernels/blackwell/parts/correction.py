"""The correction role brings outputs to new maxima, and finishes them; the epilogue role copies them out."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from jax_fa4.kernels.blackwell.geometry import STAGES, TILE_ROWS
from jax_fa4.kernels.blackwell.parts import tensor_memory
from jax_fa4.kernels.blackwell.parts.places import Past, uncertain_zero
from jax_fa4.kernels.blackwell.parts.shape import ELEMENT_BYTES, Context, Memory
from jax_fa4.kernels.blackwell.parts.softmax import FACTOR_BARRIER, wait_pair
from jax_fa4.kernels.parts import boxes
from jax_fa4.kernels.parts.assembly import assembly
from jax_fa4.kernels.parts.rounding import round_pair
from jax_fa4.kernels.parts.row_softmax import close_row

RESCALED_COLUMNS = 32  # of an output at a time: what the role's registers hold
CHUNK = 8  # 16-bit elements of 16 bytes, the unit of swizzling


class Correction:
    """A warpgroup: thread t has row t of both stages."""

    def __init__(self, memory: Memory, thread: Int32, scale_log2: Float32, lse: cute.Pointer, sinks: Any) -> None:
        self.memory, self.shape, self.row, self.scale_log2 = memory, memory.shape, thread, scale_log2
        self.lse, self.sinks, self.past = lse, sinks, Past(memory.shape.has_many_items)
        self.warp = cute.arch.make_warp_uniform(thread // 32)
        self.lanes = tensor_memory.lanes_of(self.warp)
        for stage in range(STAGES):
            self.allow_output(stage)

    def allow_output(self, stage: int) -> None:
        """Of the item that follows, the first product may overwrite a stage's output."""
        self.memory.signal("output_ready").arrive_elected(stage)

    def out(self, stage: int) -> int:
        """First column of a stage's output."""
        return self.shape.columns(f"out_{stage}")

    def run(self, context: Context) -> None:
        """Every step of an item, and its end."""
        self.context = context
        self.follow()
        self.finish()
        self.past.add(context.item.count)

    @cute.jit
    def follow(self) -> None:
        """A factor from every step but the first, before which there is no output to rescale."""
        ready = self.context.signal("output_ready")
        for _ in cutlass.range(1, self.context.item.count, 1, unroll=1):
            for stage in cutlass.range_constexpr(STAGES):
                wait_pair(FACTOR_BARRIER + 4 * stage + self.warp)
                factor = self.context.statistic("factors", stage, self.row)[0]
                self.rescale(stage, factor)
                ready.arrive_elected(stage)

    @cute.jit
    def rescale(self, stage: int, factor: Float32) -> None:
        """Multiply a stage's output where some row of the warp has a new maximum.

        The product that added to it last is done: the softmax has waited for it, or for scores that were issued after.
        """
        if cute.arch.vote_any_sync(factor != 1.0):
            tensor_memory.fence_after_wait()
            for column in cutlass.range_constexpr(0, self.shape.value_dim, RESCALED_COLUMNS):
                values = tensor_memory.load(self.lanes, RESCALED_COLUMNS, self.out(stage) + column)
                pairs = zip(values[::2], values[1::2], strict=True)
                scaled = [cute.arch.mul_packed_f32x2(pair, (factor, factor)) for pair in pairs]
                tensor_memory.store(self.lanes, [one for pair in scaled for one in pair], self.out(stage) + column)
            tensor_memory.wait_stores()
            tensor_memory.fence_before_arrival()

    @cute.jit
    def finish(self) -> None:
        """Normalise both outputs, stage them for the copy, write the LSE."""
        context, item = self.context, self.context.item
        sink, lse = context.row_sink(self.sinks), self.lse
        for stage in cutlass.range_constexpr(STAGES):
            total, maximum = Float32(0.0), Float32(-Float32.inf)
            if item.count > 0:
                wait_pair(FACTOR_BARRIER + 4 * stage + self.warp)
                total = context.statistic("sums", stage, self.row)[0]
                maximum = context.statistic("maxima", stage, self.row)[0]
            factor, log_sum = close_row(total, maximum, self.scale_log2, sink)
            if cutlass.const_expr(self.shape.has_many_items):
                context.signal("query_free").wait_free(stage, self.past.items)
            if item.count > 0:
                context.signal("out_done").wait(stage, self.past.visiting)
                tensor_memory.fence_after_wait()
                self.stage_out(stage, factor)
                if cutlass.const_expr(self.shape.has_many_items):
                    tensor_memory.wait_loads()
                    tensor_memory.fence_before_arrival()
                    self.allow_output(stage)
            else:
                self.stage_out(stage, None)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()
            context.signal("out_staged").arrive_elected(stage)
            row = context.first_row(stage) + self.row
            if row < context.visible.queries:
                place = (Int64(item.batch) * context.visible.queries + row) * context.heads + item.head
                cute.make_tensor(lse + place, cute.make_layout(1))[0] = log_sum

    def stage_out(self, stage: int, factor: Float32 | None) -> None:
        """This thread's row, rounded, or zeros, to shared memory as boxes lie there: pieces of 16 bytes swizzled by
        row."""
        shape = self.shape
        width = shape.box_columns(shape.value_dim)
        row_bytes = width * ELEMENT_BYTES
        first = self.context.buffer("staged_out", stage) + self.row * row_bytes
        if shape.has_many_items and shape.loads_max:
            # Kept over the items, the addresses make this role spill; without the term, the softmax of 10.0 does.
            first = first + uncertain_zero(self.context.item.count)
        # Address bits 4 and up are flipped by bits 7 and up (PTX ISA, swizzling modes).
        flip = (self.row & 7) << 4 if row_bytes == 128 else ((self.row >> 1) & 3) << 4
        words = [Uint32(0)] * (RESCALED_COLUMNS // 2)
        for column in range(0, shape.value_dim, RESCALED_COLUMNS):
            if factor is not None:
                words = self.rounded(self.out(stage) + column, factor)
            for place in range(0, RESCALED_COLUMNS, CHUNK):
                box, within = divmod(column + place, width)
                address = first + box * TILE_ROWS * row_bytes + ((within * ELEMENT_BYTES) ^ flip)
                piece = words[place // 2 : (place + CHUNK) // 2]
                assembly("st.shared.v4.b32 [$0], {$1, $2, $3, $4};", [], address, *piece)

    def rounded(self, column: int, factor: Float32) -> list[Uint32]:
        """Columns of the output times `factor`, rounded."""
        loaded = tensor_memory.load(self.lanes, RESCALED_COLUMNS, column)
        values = [value * factor for value in loaded]
        return [round_pair(*pair, self.shape.dtype) for pair in zip(values[::2], values[1::2], strict=True)]


class Epilogue:
    """One warp: copies each stage's output when it is staged."""

    def __init__(self, memory: Memory, out_map: cute.CopyAtom) -> None:
        self.shape, self.map, self.past = memory.shape, boxes.address_of(out_map), Past(memory.shape.has_many_items)

    def run(self, context: Context) -> None:
        """Both stages of an item; the CTA's shared memory must not go, nor be filled again, before it is read."""
        shape, item = self.shape, context.item
        width = shape.box_columns(shape.value_dim)
        for stage in range(STAGES):
            context.signal("out_staged").wait(stage, self.past.items)
            row = context.first_row(stage)
            for box in range(shape.value_dim // width):
                source = context.buffer("staged_out", stage) + box * TILE_ROWS * width * ELEMENT_BYTES
                boxes.store(self.map, source, (box * width, row, item.head, item.batch))
            cute.arch.cp_async_bulk_commit_group()
            if shape.has_many_items:
                cute.arch.cp_async_bulk_wait_group(0, read=True)
                context.signal("query_free").arrive_elected(stage)
        if not shape.has_many_items:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        self.past.add(item.count)
