"""The forward of attention on Blackwell data-centre GPUs as a JAX function.

It takes an `AttentionProblem` and its operands, chooses the plan, and calls the kernel. Emulated and compiled; not yet
run on Blackwell silicon.
"""

from __future__ import annotations

import jax

from jax_fa4.cost import ARCHITECTURES
from jax_fa4.ffi.forward_call import (
    REMEDY,
    ForwardCall,
    empty_results,
    mask_kind,
    softmax_floats,
    why_no_kernel,
)
from jax_fa4.ffi.launch import CUDA_DRIVER, LaunchError, launch
from jax_fa4.kernels.blackwell.geometry import KEY_TILE
from jax_fa4.kernels.blackwell.plans import (
    FORWARD_DTYPES,
    FORWARD_TILES,
    PAIR_TILES,
    Tiles,
    forward_plan,
    padded_head_dims,
)
from jax_fa4.kernels.plan import PlanError
from jax_fa4.problem import AttentionOperands, AttentionProblem


def why_not(problem: AttentionProblem) -> str | None:
    """None where the kernel takes the problem's forward; else one sentence with the remedy."""
    if (reason := why_no_kernel(problem, "Blackwell", FORWARD_DTYPES)) is not None:
        return reason
    try:
        padded_head_dims(problem.head_dim, problem.value_dim)
    except PlanError as error:
        return f"{error} {REMEDY}"
    return None


def choose_tiles(problem: AttentionProblem, dims: tuple[int, int]) -> Tiles:
    """The sizes for a problem: a pair of CTAs where nothing is masked and there is work for two."""
    is_dense = mask_kind(problem) == "causal" and problem.mask.band[1] is None
    if is_dense and dims in PAIR_TILES and problem.query_length > FORWARD_TILES[dims].rows:
        return PAIR_TILES[dims]
    return FORWARD_TILES[dims]


def blackwell_forward(
    problem: AttentionProblem, operands: AttentionOperands, *, tiles: Tiles | None = None, driver: str = CUDA_DRIVER
) -> tuple[jax.Array, jax.Array]:
    """Attention by the kernel of `jax_fa4.kernels.blackwell.forward`.

    Args:
      problem: the call; `why_not` says which are taken.
      operands: query (B, T, N, D), key (B, S, K, D) and value (B, S, K, Dv), bfloat16 or float16; sinks, ids and
        lengths as the problem says.
      tiles: sizes of the kernel; None: those of `FORWARD_TILES`.
      driver: the driver library that launches it.

    Returns:
      The output (B, T, N, Dv) in the problem's dtype and the log-sum-exp (B, T, N), float32.

    Raises:
      LaunchError: the problem is none that the kernel takes, or too large for a grid.
      KernelUnavailableError: no binary is at hand.
    """
    if (reason := why_not(problem)) is not None:
        raise LaunchError(reason)
    if problem.is_empty:
        return empty_results(problem, operands)
    dims = padded_head_dims(problem.head_dim, problem.value_dim)
    tiles = tiles or choose_tiles(problem, dims)
    plan = forward_plan(
        problem.dtype,
        dims,
        mask_kind(problem),
        tiles=tiles,
        soft_cap=problem.logits_soft_cap is not None,
        sinks=problem.has_sinks,
    )
    call = ForwardCall(problem, tiles.rows, KEY_TILE, ARCHITECTURES["sm_100"], tiles.ctas)
    buffers, integers = call.arguments(operands)
    results = launch(plan, buffers, call.results(), integers, softmax_floats(problem), driver=driver)
    return results["out"], results["lse"]
