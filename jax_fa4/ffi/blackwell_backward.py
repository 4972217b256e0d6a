"""The backward of attention on Blackwell GPUs as a JAX function.

It takes what the forward left and the cotangents, and calls three kernels: the preprocess (row sums of out * grad_out,
zeroed sums of the query gradients), the backward, and the postprocess (those sums, scaled and rounded). Masks without
ids and lengths are arithmetic in the kernel; others become the intervals of queries that see each key, and a work
table, made when the call is traced where ids and lengths are known then, else by XLA.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_fa4.cost import ARCHITECTURES
from jax_fa4.ffi.forward_call import MAX_SECTIONS, REMEDY, UNBOUNDED, mask_kind, softmax_floats, why_no_kernel
from jax_fa4.ffi.launch import CUDA_DRIVER, LaunchError, launch
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


def plan_of(problem: AttentionProblem, tiles: Tiles | None = None) -> KernelPlan:
    """The plan of the kernel that takes a problem; `tiles` None: those of `BACKWARD_TILES`."""
    return backward_plan(
        problem.dtype,
        padded_head_dims(problem.head_dim, problem.value_dim),
        _mask_kind(problem),
        tiles=tiles,
        soft_cap=problem.logits_soft_cap is not None,
        ordered=problem.deterministic,
    )


def _mask_kind(problem: AttentionProblem) -> Mask:
    kind = mask_kind(problem)
    return kind if kind in ("intervals", "ids") else "band"


def _floats(problem: AttentionProblem) -> dict[str, float]:
    return {**softmax_floats(problem), "scale": float(problem.scale or 0.0)}


def grid_of(problem: AttentionProblem, tiles: Tiles | None = None) -> WorkGrid:
    """What there is to order of a problem that the kernel takes; `tiles` None: those of `BACKWARD_TILES`."""
    tiles = tiles or BACKWARD_TILES[padded_head_dims(problem.head_dim, problem.value_dim)]
    return backward_grid(problem, TILE, tiles.rows, GPU, ctas=tiles.ctas, whole_group=True)


def _section_heads(problem: AttentionProblem, tiles: Tiles) -> int:
    """KV heads whose items run together: as many as fit in L2 with their group's queries, in even sections."""
    most = max(grid_of(problem, tiles).groups_in_l2, 1)
    heads = problem.batch * problem.kv_heads
    section = max(one for one in range(1, min(most, heads) + 1) if heads % one == 0)
    return section if heads // section <= MAX_SECTIONS else heads


def _integers(problem: AttentionProblem, tiles: Tiles, accumulator_width: int) -> dict[str, int]:
    element_bytes, float_bytes = DTYPES[problem.dtype], DTYPES["float32"]
    head_bytes, value_head_bytes = problem.head_dim * element_bytes, problem.value_dim * element_bytes
    left, right = (UNBOUNDED if edge is None else min(edge, UNBOUNDED) for edge in problem.mask.band)
    section_heads, rows = _section_heads(problem, tiles), padded_length(problem.query_length)
    integers = {
        "batch": problem.batch,
        "query_length": problem.query_length,
        "key_length": problem.key_length,
        "padded_length": rows,
        "heads": problem.query_heads,
        "kv_heads": problem.kv_heads,
        # Key j is seen by queries j - offset - right .. j - offset + left.
        "offset": -problem.mask.diagonal_offset,
        "left": right,
        "right": left,
        "section_heads": section_heads,
        "sections": problem.batch * problem.kv_heads // section_heads,
        "interval_stride": 0,
        "rank_stride": 0,
        "ctas": tiles.ctas,
        "items": -(-problem.key_length // tiles.rows) * problem.kv_heads * problem.batch,
        "head_dim": problem.head_dim,
        "value_dim": problem.value_dim,
        "head_bytes": head_bytes,
        "value_head_bytes": value_head_bytes,
        "query_row_bytes": problem.query_heads * head_bytes,
        "key_row_bytes": problem.kv_heads * head_bytes,
        "value_row_bytes": problem.kv_heads * value_head_bytes,
        "grad_out_row_bytes": problem.query_heads * value_head_bytes,
        "sum_columns": accumulator_width,
        "sum_row_bytes": accumulator_width * float_bytes,
        "sum_head_bytes": rows * accumulator_width * float_bytes,
        "sum_batch_bytes": problem.query_heads * rows * accumulator_width * float_bytes,
    }
    for name, length in (
        ("query", problem.query_length),
        ("key", problem.key_length),
        ("value", problem.key_length),
        ("grad_out", problem.query_length),
    ):
        integers[f"{name}_batch_bytes"] = length * integers[f"{name}_row_bytes"]
    return integers


def _of_mask(problem: AttentionProblem, operands: AttentionOperands, tiles: Tiles) -> dict[str, Any]:
    """The kernel's operands for masks from memory."""
    policy = Policy.REVERSED if problem.deterministic else Policy.LONGEST_FIRST
    table = backward_table(problem, operands, TILE, tiles.rows, GPU, ctas=tiles.ctas, whole_group=True, policy=policy)
    return backward_mask_buffers(problem, operands, table, tiles.rows, TILE)


def _seen(problem: AttentionProblem, operands: AttentionOperands, grad_out: jax.Array) -> dict[str, jax.Array]:
    """The tensors, with rows that see nothing or that nobody sees, which may hold NaN, replaced by zeros."""
    queries, keys = problem.intervals(operands)
    query, grad_out = zero_unseen(queries.lo < queries.hi, operands.query, grad_out)
    key, value = zero_unseen(keys.lo < keys.hi, operands.key, operands.value)
    return {"query": query, "grad_out": grad_out, "key": key, "value": value}


def _sums_and_grads(
    problem: AttentionProblem, buffers: dict[str, Any], prepared: Preprocessed, tiles: Tiles, driver: str
) -> dict[str, jax.Array]:
    """The backward kernel: float32 sums of the query gradients, and the gradients of keys and values."""
    mask = _mask_kind(problem)
    plan = plan_of(problem, tiles)
    integers = _integers(problem, tiles, prepared.accumulator.shape[-1])
    if mask != "band":
        is_of_row = buffers["lo"].shape[0] > 1
        integers["interval_stride"], integers["rank_stride"] = problem.key_length * is_of_row, int(is_of_row)
    buffers = buffers | {
        "zeroed_sums": prepared.accumulator,
        "lse_log2": prepared.lse_log2,
        "delta": prepared.delta,
    }
    keys = (problem.batch, problem.key_length, problem.kv_heads)
    results = {
        "grad_query_sums": jax.ShapeDtypeStruct(prepared.accumulator.shape, jnp.float32),
        "grad_key": jax.ShapeDtypeStruct((*keys, problem.head_dim), problem.dtype),
        "grad_value": jax.ShapeDtypeStruct((*keys, problem.value_dim), problem.dtype),
    }
    aliases = {"zeroed_sums": "grad_query_sums"}
    if problem.deterministic:
        tiles_of_heads = problem.batch, problem.query_heads, prepared.delta.shape[2] // TILE
        buffers["zero_flags"] = jnp.zeros((*tiles_of_heads, tiles.ctas * WARPS_PER_GROUP), jnp.int32)
        results["flags"] = jax.ShapeDtypeStruct(buffers["zero_flags"].shape, jnp.int32)
        aliases["zero_flags"] = "flags"
    return launch(plan, buffers, results, integers, _floats(problem), aliases=aliases, driver=driver)


def blackwell_backward(
    problem: AttentionProblem,
    operands: AttentionOperands,
    out: jax.Array,
    lse: jax.Array,
    grad_out: jax.Array,
    grad_lse: jax.Array,
    *,
    tiles: Tiles | None = None,
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
        buffers |= _of_mask(problem, operands, tiles)
    results = _sums_and_grads(problem, buffers, prepared, tiles, driver)
    grad_query = postprocess(
        results["grad_query_sums"],
        query_length=problem.query_length,
        head_dim=problem.head_dim,
        dtype=problem.dtype,
        scale=float(problem.scale or 0.0),
        **common,
    )
    return AttentionOperands(query=grad_query, key=results["grad_key"], value=results["grad_value"])
