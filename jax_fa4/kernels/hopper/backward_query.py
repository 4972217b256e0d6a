"""The query gradients of a step of the Hopper backward, a warpgroup's part, in either of two forms:

    QueryRows      dQ   = dS K          64 of 128 queries by all columns, or 64 queries by half of the columns
    QueryColumns   dQ^T = K^T dS^T      64 columns by all queries, whose number need not be a multiple of 64

Both operands lie in shared memory; dS is that of both warpgroups.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from jax_fa4.kernels.hopper.backward_item import KEY_TILE, Context
from jax_fa4.kernels.hopper.forward_item import GROUP_ROWS, PRODUCT_DEPTH


def keys_by_column(context: Context) -> cute.Tensor:
    """The item's keys as (columns, keys, parts), a part of the columns for each warpgroup, or one part.

    Where head_dim is less than sum_columns the last columns lie in the values' buffer, which is written once and
    before; what they give is dropped.
    """
    shape = context.shape
    layout = shape.tile_layout(KEY_TILE, 1, shape.sum_columns)
    wide = cute.make_tensor(context.memory.key.iterator, cute.select(layout.outer, mode=[1, 0]))
    return cute.local_tile(wide, (shape.sum_width, KEY_TILE), (None, 0))


class QueryRows:
    """dQ = dS K."""

    def __init__(self, context: Context, group: Int32, thread: Int32) -> None:
        shape = self.shape = context.shape
        self.group = group
        product = self._product()
        mine = product.get_slice(thread)
        self.keys = product.make_fragment_B(mine.partition_B(keys_by_column(context)))
        self.grad_scores = product.make_fragment_A(mine.partition_A(context.memory.grad_scores))
        self.sums = cute.make_rmem_tensor(product.partition_shape_C((GROUP_ROWS, shape.sum_width)), Float32)

    def _product(self) -> cute.TiledMma:
        return self.shape.product(self.shape.sum_width, (OperandMajorMode.K, OperandMajorMode.MN))

    def issue(self, step: Int32) -> None:
        """Issue the product of a step whose dS is written."""
        shape, product = self.shape, self._product()
        block, part = (step % shape.grad_score_stages) * shape.row_blocks, self.group
        if shape.row_blocks > 1:
            block, part = block + self.group, Int32(0)
        for depth in range(KEY_TILE // PRODUCT_DEPTH):
            product.set(warpgroup.Field.ACCUMULATE, depth > 0)
            left, right = self.grad_scores[None, None, depth, block], self.keys[None, None, depth, part]
            cute.gemm(product, self.sums, left, right, self.sums)
        warpgroup.commit_group()


class QueryColumns:
    """dQ^T = K^T dS^T."""

    def __init__(self, context: Context, group: Int32, thread: Int32) -> None:
        shape = self.shape = context.shape
        self.group = group
        product = self._product()
        mine = product.get_slice(thread)
        self.keys = product.make_fragment_A(mine.partition_A(keys_by_column(context)))
        self.grad_scores = product.make_fragment_B(mine.partition_B(context.memory.grad_scores))
        self.sums = cute.make_rmem_tensor(product.partition_shape_C((GROUP_ROWS, shape.query_tile)), Float32)

    def _product(self) -> cute.TiledMma:
        return self.shape.product(self.shape.query_tile, (OperandMajorMode.MN, OperandMajorMode.K))

    def issue(self, step: Int32) -> None:
        """Issue the product of a step whose dS is written."""
        product, stage = self._product(), step % self.shape.grad_score_stages
        for depth in range(KEY_TILE // PRODUCT_DEPTH):
            product.set(warpgroup.Field.ACCUMULATE, depth > 0)
            left, right = self.keys[None, None, depth, self.group], self.grad_scores[None, None, depth, stage]
            cute.gemm(product, self.sums, left, right, self.sums)
        warpgroup.commit_group()


def query_gradients(context: Context, group: Int32, thread: Int32) -> QueryRows | QueryColumns:
    """The form that a plan's tiles take."""
    return (QueryColumns if context.shape.sums_by_columns else QueryRows)(context, group, thread)
