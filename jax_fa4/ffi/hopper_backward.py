"""The backward of attention on Hopper GPUs as a JAX function: preprocess, the kernel, postprocess.

The kernel walks tiles of keys. Masks without ids and lengths are arithmetic in it; others become an interval of queries
for each key and a work table, made when the call is traced where ids and lengths are known then, else by
`planning.py`'s kernels or by XLA.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_fa4.cost import ARCHITECTURES
from jax_fa4.ffi import hopper_forward
from jax_fa4.ffi.forward_call import add_counter, band_edges, mask_kind, softmax_floats
from jax_fa4.ffi.launch import CUDA_DRIVER, LaunchError, even_section, launch
from jax_fa4.ffi.mask_buffers import backward_mask_buffers, hide_unseen, zero_unseen
from jax_fa4.ffi.postprocess import postprocess
from jax_fa4.ffi.preprocess import ROW_MULTIPLE, Preprocessed, preprocess
from jax_fa4.kernels import bundle
from jax_fa4.kernels.hopper.backward_plans import (
    BACKWARD_TILES,
    CAPPED_TILES,
    KEY_TILE,
    PERSISTENT_TILES,
    BackwardTiles,
    backward_plan,
    sum_columns,
    sum_parts,
    turned_rows,
)
from jax_fa4.kernels.hopper.plans import ARCHITECTURE, padded_head_dim
from jax_fa4.kernels.plan import DTYPES, KernelPlan
from jax_fa4.kernels.plans import around_backward
from jax_fa4.problem import AttentionOperands, AttentionProblem
from jax_fa4.schedule.order import Policy, WorkGrid, backward_grid, backward_table

SHORT_ITEM = 2048  # queries of an item up to which persistent blocks are not slower (docs/performance.md)
SAMPLED_KEYS = 1024
ITEMS_PER_SM = 2  # items for each multiprocessor that splitting groups of query heads aims at


def why_not(problem: AttentionProblem) -> str | None:
    """None where the kernels take the problem, forward and backward; else one sentence with the remedy."""
    if (reason := hopper_forward.why_not(problem)) is not None:
        return reason
    return next(filter(None, map(bundle.why_unavailable, plans_of(problem))), None)


def tiles_of(problem: AttentionProblem) -> BackwardTiles:
    """The sizes of the kernel that takes a problem; and blocks that do one item after the other where items are short
    and more than the multiprocessors."""
    head_dim = padded_head_dim(max(problem.head_dim, problem.value_dim))
    if problem.logits_soft_cap is not None:
        return CAPPED_TILES[head_dim]
    items = problem.batch * problem.kv_heads * -(-problem.key_length // KEY_TILE)
    if problem.deterministic or items <= ARCHITECTURES["sm_90"].sms or _queries_of_an_item(problem) > SHORT_ITEM:
        return BACKWARD_TILES[head_dim]
    return PERSISTENT_TILES[head_dim]


def _queries_of_an_item(problem: AttentionProblem) -> float:
    """How many queries, of all heads that share it, see a key in the mean of some keys; 0 where ids or lengths decide:
    then documents are taken for short."""
    if mask_kind(problem) in ("intervals", "ids"):
        return 0.0
    left, right = band_edges(problem.mask)
    keys = np.linspace(0, problem.key_length - 1, min(problem.key_length, SAMPLED_KEYS)).astype(np.int64)
    first = np.maximum(keys - problem.mask.diagonal_offset - right, 0)
    end = np.minimum(keys - problem.mask.diagonal_offset + left + 1, problem.query_length)
    return float(np.maximum(end - first, 0).mean()) * problem.group_size


def plan_of(problem: AttentionProblem, tiles: BackwardTiles | None = None) -> KernelPlan:
    """The plan of the kernel that takes a problem; `tiles` None: those of `tiles_of`."""
    return _plan(problem, tiles, _splits(problem) > 1)


def plans_of(
    problem: AttentionProblem, tiles: BackwardTiles | None = None
) -> tuple[KernelPlan, KernelPlan, KernelPlan]:
    """The plans of the kernels that run one after another: before, the backward, after."""
    plan, tiles = plan_of(problem, tiles), tiles or tiles_of(problem)
    width = sum_columns(padded_head_dim(max(problem.head_dim, problem.value_dim)))
    dims, order = (problem.head_dim, problem.value_dim), (sum_parts(tiles), turned_rows(tiles))
    before, after = around_backward(ARCHITECTURE, problem.dtype, *dims, width, *order)
    return before, plan, after


def _plan(problem: AttentionProblem, tiles: BackwardTiles | None, is_split: bool) -> KernelPlan:
    return backward_plan(
        problem.dtype,
        padded_head_dim(max(problem.head_dim, problem.value_dim)),
        mask_kind(problem),
        tiles=tiles or tiles_of(problem),
        soft_cap=problem.logits_soft_cap is not None,
        ordered=problem.deterministic,
        split=is_split,
    )


def _splits(problem: AttentionProblem) -> int:
    """Items that share the query heads of a KV head: as few as give every multiprocessor work; 1 where that kernel,
    which is not in the wheel, is not at hand."""
    if problem.group_size == 1 or bundle.why_unavailable(_plan(problem, None, is_split=True)) is not None:
        return 1
    items = problem.batch * problem.kv_heads * -(-problem.key_length // KEY_TILE)
    wanted = ITEMS_PER_SM * ARCHITECTURES["sm_90"].sms
    divisors = [one for one in range(1, problem.group_size + 1) if problem.group_size % one == 0]
    return next((one for one in divisors if items * one >= wanted), divisors[-1])


def grid_of(problem: AttentionProblem) -> WorkGrid:
    """What there is to order of a problem that the kernel takes."""
    tiles = tiles_of(problem)
    shared = dataclasses.replace(problem, kv_heads=problem.kv_heads * _splits(problem))
    return backward_grid(shared, tiles.query_tile, KEY_TILE, ARCHITECTURES["sm_90"], whole_group=True)


def _section_heads(problem: AttentionProblem, query_tile: int) -> int:
    """Heads whose items run together: as many as fit in L2 with all that a head's items read and add to."""
    grid = backward_grid(problem, query_tile, KEY_TILE, ARCHITECTURES["sm_90"], whole_group=True)
    return even_section(problem.batch * problem.kv_heads, max(grid.groups_in_l2, 1))


def _integers(problem: AttentionProblem, shared: AttentionProblem, query_tile: int, rows: int) -> dict[str, int]:
    """The call's integers; `shared` is the problem whose KV heads are those that items are made for."""
    left, right = band_edges(problem.mask)
    heads = shared.batch * shared.kv_heads
    section_heads = _section_heads(shared, query_tile)
    items = -(-problem.key_length // KEY_TILE) * heads
    integers = {
        "batch": problem.batch,
        "query_length": problem.query_length,
        "key_length": problem.key_length,
        "heads": problem.query_heads,
        "kv_heads": problem.kv_heads,
        "item_heads": shared.kv_heads,
        "splits": shared.kv_heads // problem.kv_heads,
        "offset": problem.mask.diagonal_offset,
        "left": left,
        "right": right,
        "section_heads": section_heads,
        "sections": heads // section_heads,
        "interval_stride": 0,
        "rank_stride": 0,
        "items": items,
        "workers": min(items, ARCHITECTURES["sm_90"].sms),
        "query_tiles": rows // query_tile,
        "head_dim": problem.head_dim,
        "value_dim": problem.value_dim,
    }
    sides = {"query": ("query", problem.query_heads, "head"), "key": ("key", problem.kv_heads, "head")}
    sides |= {"value": ("key", problem.kv_heads, "value"), "grad_out": ("query", problem.query_heads, "value")}
    for name, (side, heads, of) in sides.items():
        head_bytes = integers[f"{of}_dim"] * DTYPES[problem.dtype]
        integers[f"{name}_head_bytes"] = head_bytes
        integers[f"{name}_row_bytes"] = heads * head_bytes
        integers[f"{name}_batch_bytes"] = integers[f"{side}_length"] * heads * head_bytes
    return integers


def _of_mask(
    problem: AttentionProblem, shared: AttentionProblem, operands: AttentionOperands, query_tile: int, rows: int
) -> dict[str, Any]:
    """The kernel's operands for masks from memory; `rows` are those of the padded queries."""
    policy = Policy.REVERSED if problem.deterministic else Policy.LONGEST_FIRST
    table = backward_table(
        shared, operands, query_tile, KEY_TILE, ARCHITECTURES["sm_90"], whole_group=True, policy=policy
    )
    return backward_mask_buffers(problem, operands, table, KEY_TILE, query_tile, rows)


def _hidden(
    problem: AttentionProblem, operands: AttentionOperands, grad_out: jax.Array, query_tile: int, driver: str
) -> dict[str, Any]:
    """What the kernel reads of tiles that hold rows which nobody sees, and which tiles these are."""
    seeing, seen = problem.intervals(operands)
    counts = -(-problem.query_length // query_tile), -(-problem.key_length // KEY_TILE)
    where: dict[str, Any] = {"architecture": ARCHITECTURE, "driver": driver}
    of_queries = hide_unseen(seeing, seen, query_tile, counts[0], operands.query, grad_out, **where)
    of_keys = hide_unseen(seen, seeing, KEY_TILE, counts[1], operands.key, operands.value, **where)
    (query, hidden_grad_out), (key, value) = of_queries[0], of_keys[0]
    hidden = {"query": query, "grad_out": hidden_grad_out, "key": key, "value": value}
    flags = {"hidden_queries": of_queries[1], "hidden_keys": of_keys[1]}
    return flags | {f"hidden_{name}": tensor for name, tensor in hidden.items()}


def _launch(
    problem: AttentionProblem,
    operands: AttentionOperands,
    grad_out: jax.Array,
    prepared: Preprocessed,
    tiles: BackwardTiles,
    driver: str,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sums of the query gradients, and the gradients of keys and values."""
    splits, rows = _splits(problem), prepared.delta.shape[2]
    shared = dataclasses.replace(problem, kv_heads=problem.kv_heads * splits)
    mask, integers = mask_kind(problem), _integers(problem, shared, tiles.query_tile, rows)
    plan = plan_of(problem, tiles)
    buffers: dict[str, Any] = {"query": operands.query, "key": operands.key, "value": operands.value}
    buffers |= {"grad_out": grad_out, "lse": prepared.lse_log2, "delta": prepared.delta, "zeros": prepared.accumulator}
    rows_of_keys = problem.batch, problem.key_length
    results = {
        name: jax.ShapeDtypeStruct((*rows_of_keys, shared.kv_heads, dim), "float32" if splits > 1 else problem.dtype)
        for name, dim in (("grad_key", problem.head_dim), ("grad_value", problem.value_dim))
    }
    results["sums"] = _like(prepared.accumulator)
    aliases = {"zeros": "sums"}
    if problem.deterministic:
        flags = jnp.zeros((problem.batch, problem.query_heads, rows // tiles.query_tile), jnp.int32)
        buffers["zero_flags"], results["flags"] = flags, _like(flags)
        aliases["zero_flags"] = "flags"
    if tiles.persistent:
        add_counter(buffers, results, aliases)
    if mask in ("intervals", "ids"):
        buffers |= _of_mask(problem, shared, operands, tiles.query_tile, rows)
        buffers |= _hidden(problem, operands, grad_out, tiles.query_tile, driver)
        integers["interval_stride"] = problem.key_length if buffers["lo"].shape[0] > 1 else 0
        if problem.deterministic and buffers["ranks"].shape[0] > 1:
            integers["rank_stride"] = buffers["ranks"].shape[1]
    floats = {**softmax_floats(problem), "scale": float(problem.scale or 0.0)}
    found = launch(plan, buffers, results, integers, floats, aliases=aliases, driver=driver)
    gradients = found["grad_key"], found["grad_value"]
    if splits > 1:
        parts = (*rows_of_keys, problem.kv_heads, splits, -1)
        grad_key, grad_value = (one.reshape(parts).sum(axis=3).astype(problem.dtype) for one in gradients)
        gradients = grad_key, grad_value
    return found["sums"], *gradients


def _like(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def hopper_backward(
    problem: AttentionProblem,
    operands: AttentionOperands,
    out: jax.Array,
    lse: jax.Array,
    grad_out: jax.Array,
    grad_lse: jax.Array,
    *,
    tiles: BackwardTiles | None = None,
    driver: str = CUDA_DRIVER,
) -> AttentionOperands:
    """Gradients of attention by the kernel of `jax_fa4.kernels.hopper.backward`.

    Args:
      problem: the call; `why_not` says which are taken. With `deterministic`, gradients are bitwise equal from run to
        run.
      operands: as `hopper_forward` takes them; sinks enter through `lse` alone.
      out: the forward's output (B, T, N, D).
      lse: its log-sum-exp (B, T, N), float32.
      grad_out: the output's cotangent (B, T, N, D), in the problem's dtype.
      grad_lse: the log-sum-exp's cotangent (B, T, N), float32.
      tiles: sizes of the kernel; None: those of `tiles_of`.
      driver: the driver library that launches it.

    Returns:
      The cotangents of query, key and value in the problem's dtype; None for all others.

    Raises:
      LaunchError: the problem is none that the kernel takes, or too large for a grid.
      KernelUnavailableError: no binary is at hand.
    """
    if (reason := why_not(problem)) is not None:
        raise LaunchError(reason)
    if problem.is_empty:
        zeros = (jnp.zeros(one.shape, problem.dtype) for one in operands[:3])
        return AttentionOperands(*zeros)
    seeing, seen = problem.intervals(operands)
    grad_out = grad_out.astype(problem.dtype)
    is_table = mask_kind(problem) in ("intervals", "ids")
    if not is_table:  # else the kernel reads zeros from copies of some tiles
        key, value = zero_unseen(seen.lo < seen.hi, operands.key, operands.value)
        query, grad_out, grad_lse = zero_unseen(seeing.lo < seeing.hi, operands.query, grad_out, grad_lse)
        operands = operands._replace(query=query, key=key, value=value)
    elif problem.has_sinks:  # rows that see nothing have a log-sum-exp, and what follows from it must be a number
        grad_out, grad_lse = zero_unseen(seeing.lo < seeing.hi, grad_out, grad_lse)
    head_dim = padded_head_dim(max(problem.head_dim, problem.value_dim))
    tiles = tiles or tiles_of(problem)
    prepared = preprocess(
        *(out, grad_out, lse, grad_lse),
        accumulator_width=sum_columns(head_dim),
        row_tile=turned_rows(tiles) or ROW_MULTIPLE,
        architecture=ARCHITECTURE,
        driver=driver,
    )
    sums, grad_key, grad_value = _launch(problem, operands, grad_out, prepared, tiles, driver)
    grad_query = postprocess(
        sums,
        query_length=problem.query_length,
        head_dim=problem.head_dim,
        dtype=problem.dtype,
        scale=float(problem.scale or 0.0),
        architecture=ARCHITECTURE,
        fragment_parts=sum_parts(tiles),
        turned_rows=turned_rows(tiles),
        driver=driver,
    )
    return AttentionOperands(grad_query, grad_key, grad_value)
