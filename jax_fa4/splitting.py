"""Few queries against many keys: work for every multiprocessor, around any forward pass.

A decoding step has one query, or a few, and a cache of keys. One work item for each head leaves most of a GPU idle, and
query heads that share keys read these again and again. Two rearrangements of the operands cure both, and leave the
kernels as they are:

    heads     the query heads of a KV head become rows of one tile    (B, T, N, D) -> (B, T * N / K, K, D)
    keys      each part of the keys becomes a batch row of its own    (B, S, K, D) -> (B * parts, S / parts, K, D)

Even parts of the keys stay where they are. So do the queries, which every part of a batch row reads: the problem's
`QueryLayout` says where its rows lie, and a kernel reads them there; `with_plain_queries` copies them for those who
cannot. What a row sees is an interval of keys, so a part sees the interval's share. Every part gives an output and a
log-sum-exp; the results are their mean, weighted by exp(lse), which is exact (Rabe and Staats, arXiv 2112.05682). Sinks
join in the merge, once. The backward pass is not touched: it reads the merged results.

`choose_split` finds the cheapest cut from the clocks of a tile and the memory's rate; `key_splits` of `attention` sets
the number of parts by hand.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_fa4.cost import Architecture
from jax_fa4.problem import (
    NO_CONSTANTS,
    NO_GRIDS,
    PLAIN_QUERIES,
    AttentionOperands,
    AttentionProblem,
    QueryLayout,
    interval_operands,
)
from jax_fa4.schedule.order import WorkGrid
from jax_fa4.schedule.tiles import Intervals, MaskRule

Array = Any
Pair = tuple[jax.Array, jax.Array]

PARTS_LIMIT = 256
"""More parts than this never pay on any GPU here: it has at most 148 multiprocessors, and one KV head at least."""

MERGE_CLOCKS = 6000
"""Clocks of the merge besides its bytes: one more kernel behind the first, about 3 us. An estimate."""


class Split(NamedTuple):
    """How a forward pass is cut: parts of the keys, and whether heads that share keys become rows."""

    parts: int = 1
    packs_heads: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether nothing is cut."""
        return self == WHOLE


WHOLE = Split()


def problem_of(problem: AttentionProblem, split: Split, *, has_intervals: bool = True) -> AttentionProblem:
    """The problem that a forward pass gets for each part, all parts in one batch."""
    group = problem.group_size if split.packs_heads else 1
    rows, keys = problem.query_length * group, -(-problem.key_length // split.parts)
    return dataclasses.replace(
        problem,
        batch=problem.batch * split.parts,
        query_length=rows,
        key_length=keys,
        query_heads=problem.query_heads // group,
        mask=MaskRule(rows, keys),
        has_sinks=False,
        has_query_lengths=False,
        has_key_lengths=False,
        has_intervals=has_intervals,
        constants=NO_CONSTANTS,
        planned=NO_GRIDS,
        query_layout=QueryLayout(split.parts, group),
        return_residual=True,
        key_splits=None,
    )


def heads_as_rows(array: Array, group: int) -> Array:
    """(B, T, N, ...) to (B, T * group, N / group, ...), rows of one query next to each other."""
    batch, length, heads, *rest = array.shape
    turned = array.reshape(batch, length, heads // group, group, *rest).swapaxes(2, 3)
    return turned.reshape(batch, length * group, heads // group, *rest)


def rows_as_heads(array: Array, group: int) -> Array:
    """(B, T * group, N / group, ...) to (B, T, N, ...)."""
    batch, rows, heads, *rest = array.shape
    turned = array.reshape(batch, rows // group, group, heads, *rest).swapaxes(2, 3)
    return turned.reshape(batch, rows // group, heads * group, *rest)


def lay_queries(query: Array, layout: QueryLayout, wanted: QueryLayout = PLAIN_QUERIES) -> Array:
    """Queries of one layout in another, each of whose numbers is that of `layout` or 1."""
    if wanted.group != layout.group:
        query = heads_as_rows(query, layout.group)
    if wanted.copies != layout.copies:
        copies = jnp.broadcast_to(query[:, None], (query.shape[0], layout.copies, *query.shape[1:]))
        query = copies.reshape(-1, *query.shape[1:])
    return query


def with_plain_queries(
    problem: AttentionProblem, operands: AttentionOperands
) -> tuple[AttentionProblem, AttentionOperands]:
    """The call with queries (B, T, N, D), for implementations that read no other layout."""
    if problem.query_layout == PLAIN_QUERIES:
        return problem, operands
    query = lay_queries(operands.query, problem.query_layout)
    return dataclasses.replace(problem, query_layout=PLAIN_QUERIES), operands._replace(query=query)


def run_split(
    forward: Callable[[AttentionProblem, AttentionOperands], Pair],
    problem: AttentionProblem,
    operands: AttentionOperands,
    split: Split,
    merge: Callable[..., Pair] | None = None,
) -> Pair:
    """A forward pass in parts.

    Args:
      forward: of an implementation; gets the problem of all parts, and the queries as its layout says.
      problem: the call, without bias and general mask.
      operands: its arrays.
      split: the cut.
      merge: (problem, split, out, lse, sinks) -> the merged results; None: in plain JAX.

    Returns:
      The output (B, T, N, Dv) in the problem's dtype and the log-sum-exp (B, T, N).
    """
    if split.is_whole or problem.is_empty:
        return forward(problem, operands)
    cut = _Cut(problem, split)
    arrays: dict[str, Any] = {
        "query": operands.query,
        "key": cut.columns(operands.key),
        "value": cut.columns(operands.value),
        "scale": operands.scale,
    }
    part, masks = cut.masked(operands)
    out, lse = forward(part, AttentionOperands(**arrays, **masks))
    return cut.merge(out, lse, operands.sinks) if merge is None else merge(problem, split, out, lse, operands.sinks)


def _is_known_whole(intervals: Intervals, columns: int) -> bool:
    """Whether every row sees every column, and that is known as the call is traced."""
    lo, hi, exact = intervals
    is_known = all(isinstance(array, np.ndarray) for array in intervals)
    return is_known and bool((lo == 0).all() and (hi == columns).all() and exact.all())


@dataclasses.dataclass(frozen=True)
class _Cut:
    """The rearrangements of one problem's arrays."""

    problem: AttentionProblem
    split: Split

    @property
    def group(self) -> int:
        """Query heads that become rows."""
        return self.problem.group_size if self.split.packs_heads else 1

    @property
    def keys(self) -> int:
        """Keys of a part."""
        return -(-self.problem.key_length // self.split.parts)

    def masked(self, operands: AttentionOperands) -> tuple[AttentionProblem, dict[str, Any]]:
        """The problem of all parts, and its operands that say what is seen."""
        problem, split = self.problem, self.split
        masks = problem.mask_operands(operands)
        if isinstance(masks.key_lengths, jax.Array) and self._is_cut_by_key_lengths_alone():
            first = np.arange(split.parts, dtype=np.int32) * self.keys
            lengths = jnp.clip(masks.key_lengths[:, None] - first, 0, self.keys).reshape(-1)
            part = problem_of(problem, split, has_intervals=False)
            return dataclasses.replace(part, has_key_lengths=True), {"key_lengths": lengths}
        queries, keys = problem.intervals(operands)
        queries, keys = self.of_queries(queries), self.of_keys(keys)
        if self.padding == 0 and not problem.has_segment_ids and _is_known_whole(queries, self.keys):
            return problem_of(problem, split, has_intervals=False), {}
        found = interval_operands(queries, keys)
        if problem.has_segment_ids:
            found |= {"query_ids": self.of_rows(masks.query_ids), "key_ids": self.of_columns(masks.key_ids, fill=-1)}
        return problem_of(problem, split), found

    def _is_cut_by_key_lengths_alone(self) -> bool:
        """Whether all rows of a batch row see the keys up to its length, as in a step of decoding."""
        problem, (left, right) = self.problem, self.problem.mask.band
        offset, last = problem.mask.diagonal_offset, problem.query_length - 1
        is_band_open = (left is None or last + offset - left <= 0) and (
            right is None or offset + right + 1 >= problem.key_length
        )
        return is_band_open and not problem.has_segment_ids and not problem.has_query_lengths

    @property
    def padding(self) -> int:
        """Keys that the last part lacks."""
        return self.keys * self.split.parts - self.problem.key_length

    def columns(self, array: Array) -> Array:
        """(B, S, K, D) to (B * parts, S / parts, K, D): the same memory where the parts are even."""
        if self.padding:
            array = jnp.pad(array, ((0, 0), (0, self.padding), (0, 0), (0, 0)))
        return array.reshape(-1, self.keys, *array.shape[2:])

    def of_rows(self, array: Array) -> Array:
        """(B', T), for every part: (B * parts, T * group)."""
        xp = np if isinstance(array, np.ndarray) else jnp
        by_row = xp.repeat(array, self.group, axis=1)[:, None]
        shape = (self.problem.batch, self.split.parts, by_row.shape[2])
        return xp.broadcast_to(by_row, shape).reshape(-1, shape[2])

    def of_columns(self, array: Array, fill: int = 0) -> Array:
        """(B', S), each part its own: (B * parts, S / parts)."""
        xp = np if isinstance(array, np.ndarray) else jnp
        padded = xp.pad(array, ((0, 0), (0, self.padding)), constant_values=fill)
        return xp.broadcast_to(padded, (self.problem.batch, padded.shape[1])).reshape(-1, self.keys)

    def of_queries(self, queries: Intervals) -> Intervals:
        """The share of each row's interval in every part."""
        xp = np if isinstance(queries.lo, np.ndarray) else jnp
        first = np.arange(self.split.parts, dtype=np.int32) * self.keys
        first = np.tile(first, self.problem.batch)[:, None]
        lo, hi = (xp.clip(self.of_rows(bound) - first, 0, self.keys) for bound in (queries.lo, queries.hi))
        sees = lo < hi
        return Intervals(xp.where(sees, lo, 0), xp.where(sees, hi, 0), self._of_batch_rows(queries.exact))

    def of_keys(self, keys: Intervals) -> Intervals:
        """The rows that each part's keys are seen by."""
        lo, hi = (self.of_columns(bound * self.group) for bound in (keys.lo, keys.hi))
        return Intervals(lo, hi, self._of_batch_rows(keys.exact))

    def _of_batch_rows(self, exact: Array) -> Array:
        xp = np if isinstance(exact, np.ndarray) else jnp
        return xp.repeat(xp.broadcast_to(exact, (self.problem.batch,)), self.split.parts)

    def merge(self, out: Array, lse: Array, sinks: Array | None) -> Pair:
        """The parts' outputs (B * parts, T * group, N / group, Dv) and log-sum-exps as those of the call."""
        problem, parts = self.problem, self.split.parts
        lse = lse.reshape(problem.batch, parts, *lse.shape[1:])
        out = out.reshape(problem.batch, parts, *out.shape[1:]).astype(lse.dtype)
        highest = lse.max(axis=1)
        if sinks is not None:
            by_row = sinks.astype(lse.dtype).reshape(lse.shape[3], self.group).swapaxes(0, 1)
            by_row = jnp.tile(by_row, (problem.query_length, 1))
            highest = jnp.maximum(highest, by_row)
        reference = jnp.where(highest == -jnp.inf, 0, highest)
        weights = jnp.exp(lse - reference[:, None])
        total = weights.sum(axis=1)
        if sinks is not None:
            total = total + jnp.exp(by_row - reference)
        is_empty = total == 0
        weighted = (weights[..., None] * out).sum(axis=1) / jnp.where(is_empty, 1, total)[..., None]
        merged = jnp.where(is_empty, -jnp.inf, reference + jnp.log(total))
        return rows_as_heads(weighted, self.group).astype(problem.dtype), rows_as_heads(merged, self.group)


def split_clocks(problem: AttentionProblem, split: Split, grid: WorkGrid, arch: Architecture) -> float:
    """Clocks that a forward pass takes in parts, at least.

    The greater of two: items of equal length, as many at a time as there are slots; and the bytes of keys and values
    at the memory's rate. Uneven parts copy keys and values first. Of the mask only a window counts: a query near the
    end of its cache sees nearly all of it.

    Args:
      problem: the call.
      split: the cut.
      grid: of the cut problem; see `forward_grid`.
      arch: the GPU.
    """
    item_bytes = jnp.dtype(problem.dtype).itemsize
    part = -(-problem.key_length // split.parts)
    rows = problem.query_length * (problem.query_heads // grid.heads)
    items = grid.batch * grid.heads * -(-rows // grid.row_tile)
    item = grid.cost.overhead + grid.cost.full * -(-min(part, _keys_in_band(problem)) // grid.column_tile)
    key_bytes = problem.batch * problem.kv_heads * (problem.head_dim + problem.value_dim) * item_bytes
    clocks = max(-(-items // grid.slots) * item, key_bytes * _keys_in_band(problem) / arch.memory_bytes)
    if part * split.parts != problem.key_length:
        clocks += 2 * key_bytes * problem.key_length / arch.memory_bytes
    if not split.is_whole:
        partial = grid.batch * problem.query_length * problem.query_heads * problem.value_dim * item_bytes
        clocks += MERGE_CLOCKS + 2 * partial / arch.memory_bytes
    return clocks


def _keys_in_band(problem: AttentionProblem) -> int:
    """Keys that the queries' windows hold together, at most."""
    left, right = problem.mask.band
    if left is None or right is None:
        return problem.key_length
    return min(problem.key_length, left + right + problem.query_length)


def choose_split(
    problem: AttentionProblem,
    grid_of: Callable[[AttentionProblem], WorkGrid],
    is_taken: Callable[[AttentionProblem], bool],
    arch: Architecture,
) -> Split:
    """The cut of a forward pass for which `split_clocks` is least; whole where queries fill several tiles.

    Args:
      problem: the call; its `key_splits`, where given, fixes the number of parts.
      grid_of: the work of a problem.
      is_taken: whether there is a kernel for a problem.
      arch: the GPU.
    """
    if problem.is_empty or problem.has_bias or problem.has_mask:
        return WHOLE
    whole = grid_of(problem)
    if problem.query_length > whole.row_tile and problem.key_splits is None:
        return WHOLE
    most = min(PARTS_LIMIT, math.ceil(problem.key_length / whole.column_tile))
    counts = range(1, most + 1) if problem.key_splits is None else [problem.key_splits]
    packings = [False, True] if problem.group_size > 1 and 2 * problem.query_length <= whole.row_tile else [False]
    candidates = [Split(parts, packs) for packs in packings for parts in counts]
    available = {packs: is_taken(problem_of(problem, Split(1, packs))) for packs in packings}

    def cost(split: Split) -> tuple[float, int, bool]:
        """Clocks; of cuts that take as long, the one with the fewest items reads keys the least often. Kernels may pack
        heads by themselves, which takes as long, but then their results are turned: before a merge, which could."""
        grid = grid_of(problem if split.is_whole else problem_of(problem, split))
        return split_clocks(problem, split, grid, arch), grid.batch * grid.heads, split.packs_heads != (split.parts > 1)

    usable = [split for split in candidates if split.is_whole or available[split.packs_heads]]
    return min(usable, key=cost, default=WHOLE)
