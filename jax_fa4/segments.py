"""`plan_segments`: what packed documents make of a mask, found once for all layers of a model.

A call with raw ids computes, from the ids, what each query sees and each key is seen by, and for kernels the order of
their work items, forward and backward. Layers share ids, so this is the same for all of them. A `SegmentPlan` holds it
and takes the ids' place:

    plan = jax_fa4.plan_segments(segment_ids, is_causal=True, heads=(16, 4), head_dim=128)
    for layer in layers:
        ... jax_fa4.attention(query, key, value, is_causal=True, segment_ids=plan)

It is a pytree of arrays, so it goes through `jit`, `scan`, `remat` and `vmap`, and is split along a batch of examples
as ids are. Everything in it follows from the ids: a map or a mesh that changes a call's batch keeps the intervals, and
has work tables made anew.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_fa4 import arguments, dispatch
from jax_fa4.arguments import Call
from jax_fa4.problem import NO_GRIDS, AttentionProblem, HostArray, PlannedGrids, interval_operands
from jax_fa4.promotion import usual_promotion
from jax_fa4.schedule.order import item_tables
from jax_fa4.schedule.tiles import Intervals, MaskOperands, MaskRule, key_intervals, query_intervals

Array = Any  # np.ndarray or jax.Array


@dataclasses.dataclass(frozen=True)
class Heads:
    """What a plan's work tables need to know besides the mask.

    Attributes:
      query_heads, kv_heads: N and K.
      head_dim, value_dim: D and Dv.
      dtype: name of query's dtype.
    """

    query_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: str


@dataclasses.dataclass(frozen=True)
class SegmentPlan:
    """What `plan_segments` found; pass it to `attention` as `segment_ids`.

    A pytree. Arrays are NumPy where the ids were (then schedules are static), else JAX. The first axes of every array
    but the two tables are the batch dimensions of the ids; the tables' first axis, which runs over all items, may be
    split along with these (shards make tables of their own).

    Attributes:
      query_ids: (..., T) int32.
      key_ids: (..., S) int32.
      queries: `Intervals`: the keys [lo, hi) that each query sees, (..., T) int32, and whether they say it all, (...).
      keys: the queries that each key is seen by, (..., S).
      forward_items: (n, 8) int32, the forward kernel's work items in their order; None without `heads`, or where the
        implementation has no kernels.
      backward_items: the same of the backward kernel.
      rule: causality, window, diagonal and lengths T and S.
      heads: what the tables were made for; None where `heads` was not given.
      grids: the tables' tiles and costs.
    """

    query_ids: Array
    key_ids: Array
    queries: Intervals
    keys: Intervals
    forward_items: Array | None
    backward_items: Array | None
    rule: MaskRule
    heads: Heads | None
    grids: PlannedGrids

    @property
    def is_concrete(self) -> bool:
        """Whether everything is known while a call is traced."""
        return all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(self))

    def __repr__(self) -> str:
        shapes = f"queries {list(self.query_ids.shape)}, keys {list(self.key_ids.shape)}"
        tables = f"tables for {self.heads}" if self.heads else "no tables"
        return f"SegmentPlan({'known' if self.is_concrete else 'traced'}, {shapes}, {self.rule}, {tables})"


jax.tree_util.register_dataclass(
    SegmentPlan,
    data_fields=["query_ids", "key_ids", "queries", "keys", "forward_items", "backward_items"],
    meta_fields=["rule", "heads", "grids"],
)


def plan_segments(
    segment_ids: Any,
    *,
    is_causal: bool = False,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    causal_alignment: str = "top_left",
    heads: int | tuple[int, int] | None = None,
    head_dim: int | None = None,
    value_dim: int | None = None,
    dtype: Any = "bfloat16",
    logits_soft_cap: float | None = None,
    implementation: Any = None,
) -> SegmentPlan:
    """What packed documents make of a mask, to be shared by calls of `attention` with the same mask.

    Two small kernels where kernels run; elsewhere linear in T + S up to a sort, a handful of XLA operations without
    loops. Nothing is read by the host and no shape depends on values, so that new ids never recompile. Ids that are
    NumPy arrays are planned here and now, and schedules are then known when a call is traced (`explain` prints their
    length).

    Args:
      segment_ids: as for `attention`: (..., T) integers, or a pair of (..., T) and (..., S); negative is padding.
      is_causal: as the calls'.
      local_window_size: as the calls'.
      causal_alignment: as the calls'.
      heads: N, or the pair (N, K) of query and key heads. With it, the plan also has the order of kernels' work items;
        without, each call makes it, which XLA shares only among calls that it sees side by side.
      head_dim: D; needed with `heads`.
      value_dim: Dv; None: D.
      dtype: query's dtype.
      logits_soft_cap: as the calls'; some kernels have other tiles where there is one, so it matters with `heads`.
      implementation: as the calls'; which kernels' tiles the tables are for.

    Returns:
      The `SegmentPlan`.

    Raises:
      TypeError: an argument has the wrong kind or dtype.
      ValueError: an argument has the wrong shape or value, or `heads` and `head_dim` are not given together.

    Source: FlashAttention-4, arXiv 2603.05451, section 3.3 (the order of work items).
    """
    if isinstance(segment_ids, SegmentPlan):
        raise TypeError("segment_ids is a SegmentPlan already. The ids that it was made of are accepted; pass those.")
    described = _read_heads(heads, head_dim, value_dim, dtype)
    mask = arguments.read_segments(segment_ids, is_causal, local_window_size, causal_alignment)
    soft_cap = arguments.read_soft_cap(logits_soft_cap)
    grids, names, target = NO_GRIDS, dispatch.read_names(implementation), dispatch.current_target()
    if described is not None:
        problem = AttentionProblem(
            batch=math.prod(mask.leading),
            query_length=mask.rule.query_length,
            key_length=mask.rule.key_length,
            **dataclasses.asdict(described),
            mask=mask.rule,
            scale=1.0,
            logits_soft_cap=soft_cap,
            has_segment_ids=True,
        )
        grids = dispatch.planned_grids(names, problem, target)
    if isinstance(mask.query_ids, HostArray) and isinstance(mask.key_ids, HostArray):
        return _plan(mask.rule, described, grids, mask.leading, mask.query_ids.array, mask.key_ids.array)
    ids = [x.array if isinstance(x, HostArray) else x for x in (mask.query_ids, mask.key_ids)]
    return _plan_traced(mask.rule, described, grids, mask.leading, *ids, dispatch.planners(names, target, ids))


@usual_promotion()
def _plan(
    rule: MaskRule,
    heads: Heads | None,
    grids: PlannedGrids,
    leading: tuple[int, ...],
    query_ids: Array,
    key_ids: Array,
    planners: tuple[tuple[str, dispatch.Target], ...] = (),
) -> SegmentPlan:
    """The plan for ids (B, T) and (B, S), NumPy or JAX, with the leading dimensions that B stands for.

    `planners` name the implementations, and what each is traced for, of which the first that has kernels for planning
    does it.
    """
    operands = MaskOperands(query_ids, key_ids)
    made = (dispatch.plan_mask(*planner, rule, math.prod(leading), operands, grids) for planner in planners)
    planned = next(filter(None, made), None)
    if planned is not None:
        queries, keys, forward, backward = planned
    else:
        queries, keys = query_intervals(rule, operands), key_intervals(rule, operands)
        forward, backward = item_tables(grids, (queries, keys))

    def unfold(array: Array) -> Array:
        return array.reshape((*leading, *array.shape[1:]))

    rows = jax.tree.map(unfold, (query_ids, key_ids, queries, keys))
    query_ids, key_ids, queries, keys = rows
    return SegmentPlan(query_ids, key_ids, queries, keys, forward, backward, rule, heads, grids)


_plan_traced = jax.jit(_plan, static_argnums=(0, 1, 2, 3, 6))


def _read_heads(heads: Any, head_dim: Any, value_dim: Any, dtype: Any) -> Heads | None:
    if (heads is None) != (head_dim is None) or (head_dim is None and value_dim is not None):
        raise ValueError(
            f"heads is {heads!r}, head_dim {head_dim!r} and value_dim {value_dim!r}. heads and head_dim are accepted "
            "together, or neither for a plan without work tables."
        )
    if heads is None:
        return None
    counts = heads if isinstance(heads, tuple) else (heads, heads)
    value_dim = head_dim if value_dim is None else value_dim
    if len(counts) != 2 or not all(
        isinstance(size, int | np.integer) and not isinstance(size, bool) and size > 0
        for size in (*counts, head_dim, value_dim)
    ):
        raise ValueError(
            f"heads is {heads!r}, head_dim {head_dim!r} and value_dim {value_dim!r}. Positive integers are accepted; "
            "heads also as a pair (query heads, key heads)."
        )
    if counts[0] % counts[1]:
        raise ValueError(
            f"heads is {heads!r}. The number of query heads must be a multiple of the number of key heads."
        )
    accepted = f"One of {', '.join(arguments.DTYPES)} is accepted: query's; pass query.dtype."
    if dtype is None:  # NumPy would take it for float64
        raise TypeError(f"dtype is None. {accepted}")
    try:
        name = jnp.dtype(dtype).name
    except TypeError as error:
        raise TypeError(f"dtype is {dtype!r}, which names none. {accepted}") from error
    if name not in arguments.DTYPES:
        raise TypeError(f"dtype is {name}. {accepted}")
    return Heads(int(counts[0]), int(counts[1]), int(head_dim), int(value_dim), name)


def read_call(*tensors: Any, segment_ids: Any = None, **options: Any) -> Call:
    """`jax_fa4.arguments.read_call`, in which a `SegmentPlan` may stand for the ids.

    Raises:
      TypeError: as there.
      ValueError: as there, and where the plan was made for another mask or other heads.
    """
    if not isinstance(segment_ids, SegmentPlan):
        return arguments.read_call(*tensors, segment_ids=segment_ids, **options)
    ids = (segment_ids.query_ids, segment_ids.key_ids)
    call = arguments.read_call(*tensors, segment_ids=ids, **options)
    _check_fit(segment_ids, call.problem)
    return call if segment_ids.is_concrete else _attach(segment_ids, call)


def _check_fit(plan: SegmentPlan, problem: AttentionProblem) -> None:
    """Raises ValueError where the plan is for another call."""
    if problem.has_query_lengths or problem.has_key_lengths:
        raise ValueError(
            "segment_ids is a plan, and lengths were given beside it. A plan holds the whole mask; give the tokens "
            "past their lengths a negative id before planning."
        )
    names = {
        "query length": "query_length",
        "key length": "key_length",
        "is_causal": "is_causal",
        "local_window_size": "window",
        "causal_alignment (the diagonal's offset)": "diagonal_offset",
    }
    for name, field in names.items():
        made, called = getattr(plan.rule, field), getattr(problem.mask, field)
        if made != called:
            raise ValueError(
                f"segment_ids is a plan made for {name} {made}, but the call has {called}. Pass the same to "
                "plan_segments and to attention."
            )
    if plan.heads is not None:
        called = Heads(**{field.name: getattr(problem, field.name) for field in dataclasses.fields(Heads)})
        if plan.heads != called:
            raise ValueError(
                f"segment_ids is a plan with work tables for {plan.heads}, but the call has {called}. Pass the call's "
                "heads, head_dim, value_dim and dtype to plan_segments, or leave them out."
            )


def _attach(plan: SegmentPlan, call: Call) -> Call:
    """The call with what the plan knows among its operands."""
    rows = {
        name: array.reshape(call.problem.batch, *array.shape[len(call.leading) :])
        for name, array in interval_operands(plan.queries, plan.keys).items()
    }
    tables = {"forward_items": plan.forward_items, "backward_items": plan.backward_items}
    operands = call.operands._replace(**rows, **tables)
    return call._replace(operands=operands, problem=dataclasses.replace(call.problem, planned=plan.grids))
