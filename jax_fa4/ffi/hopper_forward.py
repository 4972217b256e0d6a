"""The forward of attention on Hopper GPUs as a JAX function.

It takes an `AttentionProblem` and its operands, chooses the plan, and calls the kernel. Masks without ids and lengths
are arithmetic in the kernel; others become row intervals and a work table, made when the call is traced where ids and
lengths are known then, else by XLA.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from jax_fa4.cost import ARCHITECTURES
from jax_fa4.ffi.launch import CUDA_DRIVER, LaunchError, launch
from jax_fa4.kernels.hopper.plans import (
    FORWARD_DTYPES,
    FORWARD_TILES,
    Mask,
    Tiles,
    forward_plan,
    padded_head_dim,
)
from jax_fa4.kernels.plan import DTYPES, PlanError
from jax_fa4.problem import AttentionOperands, AttentionProblem
from jax_fa4.schedule.order import forward_grid, forward_table
from jax_fa4.schedule.tiles import key_intervals, query_intervals

UNBOUNDED = 1 << 30  # an edge that never binds: beyond any row, and its sum with a row does not overflow
MAX_LENGTH = 1 << 29
SLACK_LOG2 = 8.0  # the lazy rescaling's threshold (arXiv 2603.05451); see kernels/parts/softmax_row.py
LOG2_E = math.log2(math.e)


def why_not(problem: AttentionProblem) -> str | None:
    """None where the kernel takes the problem's forward; else one sentence with the remedy."""
    remedy = "Pass implementation='blockwise'."
    if problem.dtype not in FORWARD_DTYPES:
        return f"the Hopper kernel takes {' and '.join(FORWARD_DTYPES)}, not {problem.dtype}. {remedy}"
    if problem.head_dim != problem.value_dim:
        dims = f"{problem.head_dim} and {problem.value_dim}"
        return f"the Hopper kernel takes keys and values of one head dimension, not {dims}. {remedy}"
    try:
        padded_head_dim(problem.head_dim)
    except PlanError as error:
        return f"{error} {remedy}"
    if problem.has_bias or problem.has_mask:
        return f"the Hopper kernel takes no bias and no dense mask. {remedy}"
    if problem.scale is None or problem.scale <= 0.0:
        return f"the Hopper kernel takes a positive scale that is known when the call is traced. {remedy}"
    if max(problem.query_length, problem.key_length) > MAX_LENGTH:
        return f"the Hopper kernel takes lengths up to {MAX_LENGTH}. {remedy}"
    return None


def _mask_kind(problem: AttentionProblem) -> Mask:
    if problem.has_segment_ids:
        return "ids"
    if problem.has_query_lengths or problem.has_key_lengths:
        return "intervals"
    return "causal" if problem.mask.band[0] is None else "window"


def _floats(problem: AttentionProblem) -> dict[str, float]:
    """Scores to exponents of 2: directly, or through the cap, c * tanh(scale * s / c)."""
    scale_log2 = float(problem.scale or 0.0) * LOG2_E
    cap, cap_log2 = problem.logits_soft_cap, 0.0
    if cap is not None:
        scale_log2, cap_log2 = cap * LOG2_E, 2.0 * scale_log2 / cap
    return {"scale_log2": scale_log2, "slack": SLACK_LOG2 / scale_log2, "cap_log2": cap_log2}


def _section_heads(problem: AttentionProblem, tiles: Tiles) -> int:
    """Query heads whose blocks run together: as many as fit in L2 with their keys and values, in even sections.

    Sections are of whole groups that share keys and values, and never cross the end, so that no block is without work.
    """
    most = max(forward_grid(problem, tiles.rows, tiles.key_tile, ARCHITECTURES["sm_90"]).groups_in_l2, 1)
    groups = problem.batch * problem.kv_heads
    return max(one for one in range(1, min(most, groups) + 1) if groups % one == 0) * problem.group_size


def _integers(problem: AttentionProblem, tiles: Tiles) -> dict[str, int]:
    element_bytes = DTYPES[problem.dtype]
    head_bytes = problem.head_dim * element_bytes
    left, right = problem.mask.band
    section_heads = _section_heads(problem, tiles)
    integers = {
        "batch": problem.batch,
        "query_length": problem.query_length,
        "key_length": problem.key_length,
        "heads": problem.query_heads,
        "kv_heads": problem.kv_heads,
        "offset": problem.mask.diagonal_offset,
        "left": UNBOUNDED if left is None else min(left, UNBOUNDED),
        "right": UNBOUNDED if right is None else min(right, UNBOUNDED),
        "section_heads": section_heads,
        "sections": problem.batch * problem.query_heads // section_heads,
        "interval_stride": 0,
        "items": -(-problem.query_length // tiles.rows) * problem.query_heads * problem.batch,
        "head_dim": problem.head_dim,
        "head_bytes": head_bytes,
        "query_row_bytes": problem.query_heads * head_bytes,
        "key_row_bytes": problem.kv_heads * head_bytes,
    }
    integers["query_batch_bytes"] = problem.query_length * integers["query_row_bytes"]
    integers["key_batch_bytes"] = problem.key_length * integers["key_row_bytes"]
    return integers


def _of_mask(problem: AttentionProblem, operands: AttentionOperands, tiles: Tiles) -> dict[str, Any]:
    """The kernel's operands for masks from memory; values that nobody sees, which may be NaN, replaced by zeros."""
    mask_operands = problem.mask_operands(operands)
    table = forward_table(problem, operands, tiles.rows, tiles.key_tile, ARCHITECTURES["sm_90"])
    rows = query_intervals(problem.mask, mask_operands)
    seen_from = key_intervals(problem.mask, mask_operands)
    found = {"item_table": jnp.asarray(table.items), "lo": jnp.asarray(rows.lo), "hi": jnp.asarray(rows.hi)}
    is_seen = seen_from.lo < seen_from.hi
    if isinstance(is_seen, jax.Array) or not is_seen.all():
        found["value"] = jnp.where(jnp.asarray(is_seen)[:, :, None, None], operands.value, 0)
    if problem.has_segment_ids:
        shapes = (problem.batch, problem.query_length), (problem.batch, problem.key_length)
        ids = jnp.asarray(mask_operands.query_ids), jnp.asarray(mask_operands.key_ids)
        found["query_ids"], found["key_ids"] = (jnp.broadcast_to(one, to) for one, to in zip(ids, shapes, strict=True))
    return found


def hopper_forward(
    problem: AttentionProblem, operands: AttentionOperands, *, tiles: Tiles | None = None, driver: str = CUDA_DRIVER
) -> tuple[jax.Array, jax.Array]:
    """Attention by the kernel of `jax_fa4.kernels.hopper.forward`.

    Args:
      problem: the call; `why_not` says which are taken.
      operands: query (B, T, N, D), key and value (B, S, K, D), bfloat16 or float16; sinks, ids and lengths as the
        problem says.
      tiles: sizes of the kernel; None: those of `FORWARD_TILES`.
      driver: the driver library that launches it.

    Returns:
      The output (B, T, N, D) in the problem's dtype and the log-sum-exp (B, T, N), float32.

    Raises:
      LaunchError: the problem is none that the kernel takes, or too large for a grid.
      KernelUnavailableError: no binary is at hand.
    """
    if (reason := why_not(problem)) is not None:
        raise LaunchError(reason)
    rows = (problem.batch, problem.query_length, problem.query_heads)
    if problem.is_empty:
        sees_nothing = jnp.full(rows, -jnp.inf, jnp.float32)
        if problem.has_sinks:
            sees_nothing = jnp.broadcast_to(operands.sinks.astype(jnp.float32), rows)
        return jnp.zeros((*rows, problem.value_dim), problem.dtype), sees_nothing
    tiles = tiles or FORWARD_TILES[padded_head_dim(problem.head_dim)]
    mask, integers = _mask_kind(problem), _integers(problem, tiles)
    plan = forward_plan(
        problem.dtype,
        padded_head_dim(problem.head_dim),
        mask,
        tiles=tiles,
        soft_cap=problem.logits_soft_cap is not None,
        sinks=problem.has_sinks,
    )
    buffers: dict[str, Any] = {"query": operands.query, "key": operands.key, "value": operands.value}
    if problem.has_sinks:
        buffers["sinks"] = operands.sinks.astype(jnp.float32)
    if mask in ("intervals", "ids"):
        buffers |= _of_mask(problem, operands, tiles)
        integers["interval_stride"] = problem.query_length if buffers["lo"].shape[0] > 1 else 0
    results = launch(
        plan,
        buffers,
        {
            "out": jax.ShapeDtypeStruct((*rows, problem.value_dim), problem.dtype),
            "lse": jax.ShapeDtypeStruct(rows, jnp.float32),
        },
        integers,
        _floats(problem),
        driver=driver,
    )
    return results["out"], results["lse"]
