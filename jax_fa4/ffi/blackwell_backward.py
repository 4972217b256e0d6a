"""The backward of attention on Blackwell GPUs as a JAX function.

It takes what the forward left and the cotangents, and calls three kernels: the preprocess (row sums of out * grad_out,
zeroed sums of the query gradients), the backward, and the postprocess (those sums, scaled and rounded). Masks without
ids and lengths are arithmetic in the kernel; others become the intervals of queries that see each key, and a work
table, made when the call is traced where ids and lengths are known then, else by `planning.py`'s kernels or by XLA.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jax_fa4.cost import ARCHITECTURES
from jax_fa4.ffi.forward_call import REMEDY, band_edges, mask_kind, softmax_floats, why_no_kernel
from jax_fa4.ffi.launch import CUDA_DRIVER, LaunchError, even_section, launch
from jax_fa4.ffi.mask_buffers import backward_mask_buffers, zero_unseen
from jax_fa4.ffi.postprocess import postprocess
from jax_fa4.ffi.preprocess import Preprocessed, padded_length, preprocess
from jax_fa4.kernels import bundle
from jax_fa4.kernels.blackwell.backward_plans import (
    ARCHITECTURE,
    BACKWARD_DTYPES,
    BACKWARD_TILES,
    TILE,
    WARPS_PER_GROUP,
    Mask,
    Tiles,
    backward_plan,
    padded_head_dims,
)
from jax_fa4.kernels.plan import DTYPES, KernelPlan, PlanError
from jax_fa4.kernels.plans import around_backward
from jax_fa4.problem import AttentionOperands, AttentionProblem
from jax_fa4.schedule.order import Policy, WorkGrid, backward_grid, backward_table
from jax_fa4.schedule.turns import Band, is_last_first_better

GPU = ARCHITECTURES["sm_100"]


def why_not(problem: AttentionProblem) -> str | None:
    """None where the kernel takes the problem's backward; else one sentence with the remedy."""
    reason = why_no_kernel(problem, "Blackwell backward", BACKWARD_DTYPES)
    if reason is not None:
        return reason
    try:
        plans = plans_of(problem)
    except PlanError as error:
        return f"{error} {REMEDY}"
    return next(filter(None, map(bundle.why_unavailable, plans)), None)


def plans_of(problem: AttentionProblem) -> tuple[KernelPlan, KernelPlan, KernelPlan]:
    """The plans of the kernels that run one after another: before, the backward, after."""
    plan, (width, _) = plan_of(problem), padded_head_dims(problem.head_dim, problem.value_dim)
    before, after = around_backward(ARCHITECTURE, problem.dtype, problem.head_dim, problem.value_dim, width)
    return before, plan, after


def plan_of(problem: AttentionProblem, tiles: Tiles | None = None, splits: int | None = None) -> KernelPlan:
    """The plan of the kernel that takes a problem; `tiles` None: those of `BACKWARD_TILES`, `splits` None: as many as
    are worth while."""
    splits = splits_of(problem, tiles) if splits is None else splits
    return backward_plan(
        problem.dtype,
        padded_head_dims(problem.head_dim, problem.value_dim),
        _mask_kind(problem),
        tiles=tiles,
        soft_cap=problem.logits_soft_cap is not None,
        ordered=problem.deterministic,
        split=splits > 1,
    )


def splits_of(problem: AttentionProblem, tiles: Tiles | None = None) -> int:
    """Items that share the query heads of a KV head: as few as give every multiprocessor one; 1 where that kernel,
    which is not in the wheel, is not at hand.

    A part costs its sums in float32, written and read again, so there are no more than keep the GPU busy.
    """
    if problem.group_size <= 1 or bundle.why_unavailable(plan_of(problem, tiles, 2)) is not None:
        return 1
    tiles = tiles or BACKWARD_TILES[padded_head_dims(problem.head_dim, problem.value_dim)]
    items = problem.batch * problem.kv_heads * -(-problem.key_length // tiles.rows)
    wanted = GPU.sms // tiles.ctas
    divisors = [one for one in range(1, problem.group_size + 1) if problem.group_size % one == 0]
    return next((one for one in divisors if items * one >= wanted), divisors[-1])


def shared_problem(problem: AttentionProblem, splits: int) -> AttentionProblem:
    """The problem whose KV heads are those that items are made for."""
    return dataclasses.replace(problem, kv_heads=problem.kv_heads * splits)


def _mask_kind(problem: AttentionProblem) -> Mask:
    kind = mask_kind(problem)
    return kind if kind in ("intervals", "ids") else "band"


def _floats(problem: AttentionProblem) -> dict[str, float]:
    return {**softmax_floats(problem), "scale": float(problem.scale or 0.0)}


def grid_of(problem: AttentionProblem) -> WorkGrid:
    """What there is to order of a problem that the kernel takes."""
    tiles = BACKWARD_TILES[padded_head_dims(problem.head_dim, problem.value_dim)]
    return _grid(shared_problem(problem, splits_of(problem)), tiles)


def _grid(shared: AttentionProblem, tiles: Tiles) -> WorkGrid:
    return backward_grid(shared, TILE, tiles.rows, GPU, ctas=tiles.ctas, whole_group=True)


def _section_heads(problem: AttentionProblem, tiles: Tiles) -> int:
    """Heads whose items run together: as many as fit in L2 with their queries, in even sections."""
    most = max(_grid(problem, tiles).groups_in_l2, 1)
    return even_section(problem.batch * problem.kv_heads, most)


def _band(problem: AttentionProblem) -> Band:
    """Which queries a key is seen by: j - offset - right .. j - offset + left."""
    left, right = band_edges(problem.mask)
    return Band(offset=-problem.mask.diagonal_offset, left=right, right=left)


def is_last_first(problem: AttentionProblem, tiles: Tiles | None = None, splits: int | None = None) -> bool:
    """Whether items of the last keys come first, and add first: only where they add in a fixed order."""
    if not problem.deterministic:
        return False
    tiles = tiles or BACKWARD_TILES[padded_head_dims(problem.head_dim, problem.value_dim)]
    shared = shared_problem(problem, splits_of(problem, tiles) if splits is None else splits)
    return is_last_first_better(_grid(shared, tiles), _band(problem), problem.key_length)


def _integers(
    problem: AttentionProblem, shared: AttentionProblem, tiles: Tiles, width: int, last_first: bool
) -> dict[str, int]:
    element_bytes, float_bytes = DTYPES[problem.dtype], DTYPES["float32"]
    splits = shared.kv_heads // problem.kv_heads
    grad_bytes = float_bytes if splits > 1 else element_bytes
    dims, heads = (problem.head_dim, problem.value_dim), (problem.query_heads, problem.kv_heads, shared.kv_heads)
    band = _band(problem)
    section_heads, rows = _section_heads(shared, tiles), padded_length(problem.query_length)
    integers = {
        "batch": problem.batch,
        "query_length": problem.query_length,
        "key_length": problem.key_length,
        "padded_length": rows,
        "heads": problem.query_heads,
        "group": shared.group_size,
        "key_heads": problem.kv_heads,
        "kv_heads": shared.kv_heads,
        "splits": splits,
        "offset": band.offset,
        "left": band.left,
        "right": band.right,
        "last_first": int(last_first),
        "section_heads": section_heads,
        "sections": problem.batch * shared.kv_heads // section_heads,
        "interval_stride": 0,
        "rank_stride": 0,
        "ctas": tiles.ctas,
        "items": -(-problem.key_length // tiles.rows) * shared.kv_heads * problem.batch,
        "head_dim": problem.head_dim,
        "value_dim": problem.value_dim,
        "head_bytes": dims[0] * element_bytes,
        "value_head_bytes": dims[1] * element_bytes,
        "grad_head_bytes": dims[0] * grad_bytes,
        "grad_value_head_bytes": dims[1] * grad_bytes,
        "sum_columns": width,
        "sum_row_bytes": width * float_bytes,
        "sum_head_bytes": rows * width * float_bytes,
        "sum_batch_bytes": problem.query_heads * rows * width * float_bytes,
    }
    for name, length, heads_of, row in (
        ("query", problem.query_length, heads[0], dims[0] * element_bytes),
        ("key", problem.key_length, heads[1], dims[0] * element_bytes),
        ("value", problem.key_length, heads[1], dims[1] * element_bytes),
        ("grad_out", problem.query_length, heads[0], dims[1] * element_bytes),
        ("grad_key", problem.key_length, heads[2], dims[0] * grad_bytes),
        ("grad_value", problem.key_length, heads[2], dims[1] * grad_bytes),
    ):
        integers[f"{name}_row_bytes"] = heads_of * row
        integers[f"{name}_batch_bytes"] = length * heads_of * row
    return integers


def _of_mask(
    problem: AttentionProblem, shared: AttentionProblem, operands: AttentionOperands, tiles: Tiles, last_first: bool
) -> dict[str, Any]:
    """The kernel's operands for masks from memory."""
    policy = Policy.LONGEST_FIRST
    if problem.deterministic:
        policy = Policy.LAST_FIRST if last_first else Policy.FIRST_FIRST
    table = backward_table(shared, operands, TILE, tiles.rows, GPU, ctas=tiles.ctas, whole_group=True, policy=policy)
    rows = padded_length(problem.query_length)
    return backward_mask_buffers(problem, operands, table, tiles.rows, TILE, rows, last_first=last_first)


def _seen(problem: AttentionProblem, operands: AttentionOperands, grad_out: jax.Array) -> dict[str, jax.Array]:
    """The tensors, with rows that see nothing or that nobody sees, which may hold NaN, replaced by zeros."""
    queries, keys = problem.intervals(operands)
    query, grad_out = zero_unseen(queries.lo < queries.hi, operands.query, grad_out)
    key, value = zero_unseen(keys.lo < keys.hi, operands.key, operands.value)
    return {"query": query, "grad_out": grad_out, "key": key, "value": value}


def _sums_and_grads(
    problem: AttentionProblem,
    buffers: dict[str, Any],
    prepared: Preprocessed,
    tiles: Tiles,
    splits: int,
    last_first: bool,
    driver: str,
) -> dict[str, jax.Array]:
    """The backward kernel: float32 sums of the query gradients, and the gradients of keys and values."""
    mask, shared = _mask_kind(problem), shared_problem(problem, splits)
    plan = plan_of(problem, tiles, splits)
    integers = _integers(problem, shared, tiles, prepared.accumulator.shape[-1], last_first)
    if mask != "band":
        is_of_row = buffers["lo"].shape[0] > 1
        integers["interval_stride"], integers["rank_stride"] = problem.key_length * is_of_row, int(is_of_row)
    buffers = buffers | {
        "zeroed_sums": prepared.accumulator,
        "lse_log2": prepared.lse_log2,
        "delta": prepared.delta,
    }
    keys, dtype = (problem.batch, problem.key_length), "float32" if splits > 1 else problem.dtype
    results = {
        "grad_query_sums": jax.ShapeDtypeStruct(prepared.accumulator.shape, jnp.float32),
        "grad_key": jax.ShapeDtypeStruct((*keys, shared.kv_heads, problem.head_dim), dtype),
        "grad_value": jax.ShapeDtypeStruct((*keys, shared.kv_heads, problem.value_dim), dtype),
    }
    aliases = {"zeroed_sums": "grad_query_sums"}
    if problem.deterministic:
        tiles_of_heads = problem.batch, problem.query_heads, prepared.delta.shape[2] // TILE
        buffers["zero_flags"] = jnp.zeros((*tiles_of_heads, tiles.ctas * WARPS_PER_GROUP), jnp.int32)
        results["flags"] = jax.ShapeDtypeStruct(buffers["zero_flags"].shape, jnp.int32)
        aliases["zero_flags"] = "flags"
    found = launch(plan, buffers, results, integers, _floats(problem), aliases=aliases, driver=driver)
    if splits > 1:
        for name in ("grad_key", "grad_value"):
            parts = found[name].reshape(*keys, problem.kv_heads, splits, -1)
            found[name] = parts.sum(axis=3).astype(problem.dtype)
    return found


def blackwell_backward(
    problem: AttentionProblem,
    operands: AttentionOperands,
    out: jax.Array,
    lse: jax.Array,
    grad_out: jax.Array,
    grad_lse: jax.Array,
    *,
    tiles: Tiles | None = None,
    splits: int | None = None,
    last_first: bool | None = None,
    driver: str = CUDA_DRIVER,
) -> AttentionOperands:
    """Cotangents of attention by the kernel of `jax_fa4.kernels.blackwell.backward`.

    Args:
      problem: the call; `why_not` says which are taken. With `deterministic`, gradients are bitwise equal from run to
        run.
      operands: query (B, T, N, D), key (B, S, K, D) and value (B, S, K, Dv), bfloat16 or float16; ids and lengths as
        the problem says. Sinks are used through `lse` only.
      out: (B, T, N, Dv) in the problem's dtype, of the forward.
      lse: (B, T, N) float32, of the forward.
      grad_out: cotangent of `out`.
      grad_lse: cotangent of `lse`, float32.
      tiles: sizes of the kernel; None: those of `BACKWARD_TILES`.
      splits: items that share the query heads of a KV head; None: as many as are worth while (`splits_of`).
      last_first: whether items of the last keys come first, which also add first if `deterministic`; None: as costs
        less (`is_last_first`).
      driver: the driver library that launches the kernels.

    Returns:
      Cotangents of query, key and value in the problem's dtype; None for all others.

    Raises:
      LaunchError: the problem is none that the kernel takes, or too large for a grid.
      KernelUnavailableError: no binary is at hand.
    """
    if (reason := why_not(problem)) is not None:
        raise LaunchError(reason)
    if problem.is_empty:
        return AttentionOperands(*(jnp.zeros_like(one) for one in operands[:3]))
    buffers: dict[str, Any] = _seen(problem, operands, grad_out.astype(problem.dtype))
    dims = padded_head_dims(problem.head_dim, problem.value_dim)
    width, tiles = dims[0], tiles or BACKWARD_TILES[dims]
    splits = splits_of(problem, tiles) if splits is None else splits
    last_first = is_last_first(problem, tiles, splits) if last_first is None else last_first
    common: dict[str, Any] = {"architecture": ARCHITECTURE, "driver": driver}
    prepared = preprocess(
        out,
        buffers["grad_out"],
        lse.astype(jnp.float32),
        grad_lse.astype(jnp.float32),
        accumulator_width=width,
        **common,
    )
    if _mask_kind(problem) != "band":
        buffers |= _of_mask(problem, shared_problem(problem, splits), operands, tiles, last_first)
    results = _sums_and_grads(problem, buffers, prepared, tiles, splits, last_first, driver)
    grad_query = postprocess(
        results["grad_query_sums"],
        query_length=problem.query_length,
        head_dim=problem.head_dim,
        dtype=problem.dtype,
        scale=float(problem.scale or 0.0),
        **common,
    )
    return AttentionOperands(query=grad_query, key=results["grad_key"], value=results["grad_value"])
