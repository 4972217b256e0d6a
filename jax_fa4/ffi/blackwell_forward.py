"""The forward of attention on Blackwell data-centre GPUs as a JAX function.

It takes an `AttentionProblem` and its operands, chooses the plan, and calls the kernel. Emulated and compiled; not yet
run on Blackwell silicon.
"""

from __future__ import annotations

import dataclasses

import jax

from jax_fa4.cost import ARCHITECTURES, ItemCost, forward_tile
from jax_fa4.ffi.forward_call import (
    REMEDY,
    ForwardCall,
    empty_results,
    mask_kind,
    packs_heads,
    softmax_floats,
    why_no_kernel,
)
from jax_fa4.ffi.launch import CUDA_DRIVER, LaunchError, launch
from jax_fa4.kernels import bundle
from jax_fa4.kernels.blackwell.geometry import KEY_TILE
from jax_fa4.kernels.blackwell.plans import (
    ARCHITECTURE_NAMES,
    FORWARD_DTYPES,
    FORWARD_TILES,
    PAIR_TILES,
    Tiles,
    forward_plan,
    padded_head_dims,
    tiles_for,
)
from jax_fa4.kernels.plan import KernelPlan, PlanError
from jax_fa4.problem import AttentionOperands, AttentionProblem

__all__ = ["ARCHITECTURE_NAMES", "blackwell_forward", "describe", "why_not"]

# From this predicted gain on CTAs go from item to item. They do so in a fixed order, and lose what the hardware's own
# order gains where multiprocessors are not equally fast; so for items of equal length alone, as flash-attn-4 does.
LEAST_GAIN = 0.01
SCHEDULING_TEXTS = {
    "grid": "one item a CTA",
    "persistent": "persistent, every {workers:,}th item",
    "cluster": "persistent, next items by cluster launch control",
}


def why_not(problem: AttentionProblem, *, architecture: str = "sm_100f") -> str | None:
    """None where the kernel takes the problem's forward; else one sentence with the remedy."""
    if (reason := why_no_kernel(problem, "Blackwell", FORWARD_DTYPES)) is not None:
        return reason
    try:
        padded_head_dims(problem.head_dim, problem.value_dim)
    except PlanError as error:
        return f"{error} {REMEDY}"
    return bundle.why_unavailable(plan_of(problem, architecture))


def tiles_of(problem: AttentionProblem, architecture: str) -> Tiles:
    """The sizes of the kernel of a problem: a pair of CTAs where nothing is masked and two have work; persistent
    where that pays."""
    dims = padded_head_dims(problem.head_dim, problem.value_dim)
    is_dense = mask_kind(problem) == "causal" and problem.mask.band[1] is None
    has_pair = is_dense and dims in PAIR_TILES and problem.query_length > FORWARD_TILES[dims].rows
    tiles = tiles_for(architecture, (PAIR_TILES if has_pair else FORWARD_TILES)[dims])
    pays = gain_of_persistence(problem, architecture, tiles) >= LEAST_GAIN
    return dataclasses.replace(tiles, scheduling="persistent") if pays else tiles


def gain_of_persistence(problem: AttentionProblem, architecture: str, tiles: Tiles) -> float:
    """The share of time that the cost model predicts CTAs to save which go from item to item in a fixed order; 0 where
    items are not equally long."""
    call = forward_call(problem, architecture, tiles)
    if call.mask_kind != "causal" or not call.is_everything_seen() or problem.is_empty:
        return 0.0
    share, dims = tiles.emulated / KEY_TILE, padded_head_dims(problem.head_dim, problem.value_dim)
    tile = forward_tile(call.arch, tiles.rows // tiles.ctas, KEY_TILE, *dims, ctas=tiles.ctas, emulated_fraction=share)
    key_tiles = -(-problem.key_length // KEY_TILE)
    return ItemCost.of(tile).gain_of_persistence(key_tiles, call.items, call.grid.slots)


def plan_of(problem: AttentionProblem, architecture: str, tiles: Tiles | None = None) -> KernelPlan:
    """The plan of the kernel that takes a problem; `tiles` None: those of `tiles_of`."""
    return forward_plan(
        problem.dtype,
        padded_head_dims(problem.head_dim, problem.value_dim),
        forward_call(problem, architecture, tiles).mask_kind,
        tiles=tiles or tiles_of(problem, architecture),
        soft_cap=problem.logits_soft_cap is not None,
        sinks=problem.has_sinks,
        architecture=architecture,
    )


def forward_call(problem: AttentionProblem, architecture: str, tiles: Tiles | None = None) -> ForwardCall:
    """The problem as the kernel of these sizes takes it; `tiles` None: those of `tiles_of`."""
    tiles, arch = tiles or tiles_of(problem, architecture), ARCHITECTURES[architecture[:-1]]
    is_packed = tiles.ctas == 1 and packs_heads(problem, tiles.rows, KEY_TILE, arch)
    return ForwardCall(problem, tiles.rows, KEY_TILE, arch, tiles.ctas, packed=is_packed)


def describe(problem: AttentionProblem, *, architecture: str = "sm_100f") -> list[tuple[str, str]]:
    """What `explain` says of the forward of a problem that the kernel takes."""
    call, tiles = forward_call(problem, architecture), tiles_of(problem, architecture)
    workers = call.integers()["workers"]
    scheduling = ("scheduling", SCHEDULING_TEXTS[tiles.scheduling].format(workers=workers))
    status = ("status", "emulated and compiled; not yet run on Blackwell silicon")
    return [*call.describe(plan_of(problem, architecture)), scheduling, status]


def blackwell_forward(
    problem: AttentionProblem,
    operands: AttentionOperands,
    *,
    architecture: str = "sm_100f",
    tiles: Tiles | None = None,
    driver: str = CUDA_DRIVER,
) -> tuple[jax.Array, jax.Array]:
    """Attention by the kernel of `jax_fa4.kernels.blackwell.forward`.

    Args:
      problem: the call; `why_not` says which are taken.
      operands: query (B, T, N, D), key (B, S, K, D) and value (B, S, K, Dv), bfloat16 or float16; sinks, ids and
        lengths as the problem says.
      architecture: one of `ARCHITECTURE_NAMES`.
      tiles: sizes of the kernel, and how its CTAs come by their items; None: those of `tiles_of`.
      driver: the driver library that launches it.

    Returns:
      The output (B, T, N, Dv) in the problem's dtype and the log-sum-exp (B, T, N), float32.

    Raises:
      LaunchError: the problem is none that the kernel takes, or too large for a grid.
      KernelUnavailableError: no binary is at hand.
    """
    if (reason := why_not(problem, architecture=architecture)) is not None:
        raise LaunchError(reason)
    if problem.is_empty:
        return empty_results(problem, operands)
    plan, call = plan_of(problem, architecture, tiles), forward_call(problem, architecture, tiles)
    buffers, integers = call.arguments(operands)
    results = launch(plan, buffers, call.results(), integers, softmax_floats(problem), driver=driver)
    return call.unpack(results["out"]), call.unpack(results["lse"])
