"""One tile of scores: the element mask, the bias, the soft cap; and the bias's gradient, added where the bias lay.

Bias and general mask are never copied or padded as a whole (they may be query length x key length): each tile is sliced
out of the user's array, at whatever sizes that array has.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_fa4.blockwise.tiling import Geometry, Tiling, batched, indices
from jax_fa4.problem import AttentionOperands, AttentionProblem

Array = Any


class _Window(NamedTuple):
    """Where a tile lies along one axis of a bias: `size` from `start`; its first element is `shift` further on."""

    start: Any
    size: int
    shift: Any


def _window(length: int, tile: int, index: Any) -> _Window:
    """A last tile that hangs over is read further back, and shifted."""
    if length == 1:
        return _Window(0, 1, 0)
    if length % tile == 0:
        return _Window(index * tile, tile, 0)
    start = jnp.minimum(index * tile, length - tile)
    return _Window(start, tile, index * tile - start)


def _shifted(tile: Array, axis: int, shift: Any, forward: bool) -> Array:
    """Moves the elements `shift` places towards the front (or, not `forward`, towards the back); zeros come in."""
    if isinstance(shift, int) and shift == 0:
        return tile
    size = tile.shape[axis]
    zeros = jnp.zeros_like(tile)
    if forward:
        return lax.dynamic_slice_in_dim(jnp.concatenate([tile, zeros], axis), shift, size, axis)
    return lax.dynamic_slice_in_dim(jnp.concatenate([zeros, tile], axis), size - shift, size, axis)


class TileOfBias(NamedTuple):
    """Slices one tile out of a (B or 1, N or 1, T or 1, S or 1) array, and adds one tile to such an array."""

    tiling: Tiling
    shape: tuple[int, ...]
    group: Any
    query_index: Any
    key_index: Any

    def _windows(self) -> tuple[_Window, _Window, _Window, _Window]:
        tiling = self.tiling
        members = tiling.query_heads_per_kv_head
        rows = _Window(tiling.batch_row(self.group), tiling.rows, 0)
        heads = _Window(tiling.kv_head(self.group) * members, tiling.heads * members, 0)
        return (
            rows if self.shape[0] > 1 else _Window(0, 1, 0),
            heads if self.shape[1] > 1 else _Window(0, 1, 0),
            _window(self.shape[2], tiling.query_tile, self.query_index),
            _window(self.shape[3], tiling.key_tile, self.key_index),
        )

    def read(self, array: Array) -> Array:
        """The tile, broadcastable to `tiling.parts`."""
        windows = self._windows()
        tile = lax.dynamic_slice(
            array, indices(*(window.start for window in windows)), [window.size for window in windows]
        )
        for axis in (2, 3):
            tile = _shifted(tile, axis, windows[axis].shift, forward=True)
        rows, heads, queries, keys = tile.shape
        by_member = heads > 1 or self.tiling.query_heads_per_kv_head * self.tiling.heads == 1
        kv_heads, members = (self.tiling.heads, self.tiling.query_heads_per_kv_head) if by_member else (1, 1)
        return tile.reshape(rows, kv_heads, members, queries, keys).transpose(0, 1, 4, 2, 3)

    def add(self, array: Array, tile: Array) -> Array:
        """`array` with a tile of shape `tiling.parts` added, summed where the array is broadcast."""
        windows = self._windows()
        rows, kv_heads, keys, members, queries = tile.shape
        tile = tile.transpose(0, 1, 3, 4, 2).reshape(rows, kv_heads * members, queries, keys)
        summed = [axis for axis in range(4) if self.shape[axis] == 1 and tile.shape[axis] > 1]
        tile = tile.sum(axis=summed, keepdims=True)
        for axis in (2, 3):
            tile = _shifted(tile, axis, windows[axis].shift, forward=False)
        start = indices(*(window.start for window in windows))
        return lax.dynamic_update_slice(array, lax.dynamic_slice(array, start, tile.shape) + tile, start)


class Scores(NamedTuple):
    """Makes tiles of scores of one call.

    `lo`, `hi` are the queries' intervals, (B', query tiles, query_tile); the ids, (B, tiles, tile), are None where the
    intervals say it all; `bias` and `mask` are the user's, 4-D, or None.
    """

    tiling: Tiling
    cap: float | None
    lo: Array
    hi: Array
    query_ids: Array | None
    key_ids: Array | None
    bias: Array | None
    mask: Array | None

    @classmethod
    def of(cls, problem: AttentionProblem, operands: AttentionOperands, shape: Geometry) -> "Scores":
        """The tile maker of a call."""
        tiling, mask = shape.tiling, problem.mask_operands(operands)
        query_ids = key_ids = None
        if mask.query_ids is not None and not _is_known_true(shape.queries.exact):
            query_ids = tiling.row_tiles(mask.query_ids, tiling.query_tile)
            key_ids = tiling.row_tiles(mask.key_ids, tiling.key_tile)
        return cls(
            tiling=tiling,
            cap=problem.logits_soft_cap,
            lo=tiling.row_tiles(shape.queries.lo, tiling.query_tile),
            hi=tiling.row_tiles(shape.queries.hi, tiling.query_tile),
            query_ids=query_ids,
            key_ids=key_ids,
            bias=operands.bias,
            mask=operands.mask,
        )

    def visible(self, group: Any, query_index: Any, key_index: Any) -> Array:
        """Which scores of a tile count: bool, broadcastable to `tiling.parts`."""
        tiling = self.tiling
        keys = (key_index * tiling.key_tile + jnp.arange(tiling.key_tile, dtype=jnp.int32))[:, None]

        def along_queries(array: Array) -> Array:
            return tiling.of_group(array, group, query_index)[:, None, :]

        seen = (along_queries(self.lo) <= keys) & (keys < along_queries(self.hi))
        if self.query_ids is not None:
            seen &= along_queries(self.query_ids) == tiling.of_group(self.key_ids, group, key_index)[:, :, None]
        seen = seen[:, None, :, None, :]
        if self.mask is not None:
            seen = seen & TileOfBias(tiling, self.mask.shape, group, query_index, key_index).read(self.mask)
        return seen

    def tile(
        self, query: Array, key: Array, group: Any, query_index: Any, key_index: Any
    ) -> tuple[Array, Array | None]:
        """The scores of a tile before the element mask.

        Args:
          query: (units, lanes, D); one of `query` and `key` carries the scale.
          key: (units, key_tile, D).
          group, query_index, key_index: which tile.

        Returns:
          Scores with cap and bias, by parts; and d score / d logit, which is 1 (None) where there is no cap.
        """
        logits = batched(key, query, 2).reshape(self.tiling.parts)
        slope = None
        if self.cap is not None:
            bent = jnp.tanh(logits / self.cap)
            logits, slope = bent * self.cap, 1 - bent * bent
        if self.bias is not None:
            tile = TileOfBias(self.tiling, self.bias.shape, group, query_index, key_index).read(self.bias)
            logits = logits + tile.astype(logits.dtype)
        return logits, slope


def _is_known_true(exact: Array) -> bool:
    """True when every row's interval says it all, and that is known as the call is traced."""
    return isinstance(exact, np.ndarray) and bool(exact.all())
