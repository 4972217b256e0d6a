"""The forward of attention on Hopper GPUs as a JAX function.

It takes an `AttentionProblem` and its operands, chooses the plan, and calls the kernel.
"""

from __future__ import annotations

import jax

from jax_fa4.cost import ARCHITECTURES
from jax_fa4.ffi.forward_call import (
    REMEDY,
    ForwardCall,
    add_counter,
    empty_results,
    packs_heads,
    softmax_floats,
    why_no_kernel,
)
from jax_fa4.ffi.launch import CUDA_DRIVER, LaunchError, launch
from jax_fa4.kernels import bundle
from jax_fa4.kernels.hopper.plans import (
    ARCHITECTURE,
    FORWARD_DTYPES,
    FORWARD_TILES,
    SHORT_TILES,
    SINGLE_TILES,
    Tiles,
    forward_plan,
    padded_head_dim,
)
from jax_fa4.kernels.plan import KernelPlan, PlanError
from jax_fa4.problem import AttentionOperands, AttentionProblem
from jax_fa4.schedule.order import Policy

HOPPER = ARCHITECTURES["sm_90"]
# Time of a row of `SHORT_TILES` by one of `FORWARD_TILES`, from where the two are equal: 512 and 1024 rows, which they
# cover with 512 and 576, 1024 and 1152 (docs/performance.md, short sequences).
SHORT_COST = 1.1
MAX_ROWS = (1 << 31) - 1  # of a batch row's log-sum-exps, a 32-bit stride


def why_not(problem: AttentionProblem) -> str | None:
    """None where the kernel takes the problem's forward; else one sentence with the remedy."""
    if (reason := why_no_kernel(problem, "Hopper", FORWARD_DTYPES)) is not None:
        return reason
    if problem.query_length * problem.query_heads > MAX_ROWS:
        return f"the Hopper kernel takes up to {MAX_ROWS:,} queries times heads in a batch row. {REMEDY}"
    try:
        padded_head_dim(problem.head_dim)
        padded_head_dim(problem.value_dim, "value_dim")
    except PlanError as error:
        return f"{error} {REMEDY}"
    return bundle.why_unavailable(plan_of(problem))


def tiles_of(problem: AttentionProblem) -> Tiles:
    """The sizes of the kernel that takes a problem: those that leave the fewest rows empty, by their speeds; and blocks
    that do one item after the other where there are more items than multiprocessors."""
    head_dim = padded_head_dim(max(problem.head_dim, problem.value_dim))
    usual, short = FORWARD_TILES[head_dim], SHORT_TILES[head_dim]
    rows = problem.query_length * (problem.group_size if is_packed(problem, short) else 1)
    if _covered(rows, short) * SHORT_COST < _covered(rows, usual):
        return short
    items = ForwardCall(problem, usual.rows, usual.key_tile, HOPPER, packed=is_packed(problem, usual)).items
    return usual if items > HOPPER.sms else SINGLE_TILES[head_dim]


def _covered(rows: int, tiles: Tiles) -> int:
    """Rows that tiles cover, empty ones included."""
    return -(-rows // tiles.rows) * tiles.rows


def is_packed(problem: AttentionProblem, tiles: Tiles) -> bool:
    """Whether heads that share keys and values become rows: for few queries, where it takes fewer waves of items."""
    return packs_heads(problem, tiles.rows, tiles.key_tile, HOPPER)


def plan_of(
    problem: AttentionProblem,
    tiles: Tiles | None = None,
    policy: Policy | None = None,
    packed: bool | None = None,
) -> KernelPlan:
    """The plan of the kernel that takes a problem; arguments as for `forward_call`."""
    return forward_plan(
        problem.dtype,
        padded_head_dim(max(problem.head_dim, problem.value_dim)),
        forward_call(problem, tiles, policy, packed).mask_kind,
        tiles=tiles or tiles_of(problem),
        soft_cap=problem.logits_soft_cap is not None,
        sinks=problem.has_sinks,
    )


def forward_call(
    problem: AttentionProblem,
    tiles: Tiles | None = None,
    policy: Policy | None = None,
    packed: bool | None = None,
) -> ForwardCall:
    """The problem as the kernel takes it; `tiles`, `policy` and `packed` as for `hopper_forward`."""
    tiles = tiles or tiles_of(problem)
    packed = is_packed(problem, tiles) if packed is None else packed
    sizes = tiles.rows, tiles.key_tile, HOPPER
    return ForwardCall(problem, *sizes, policy=policy, packed=packed, has_strides=True, hides_tiles=ARCHITECTURE)


def describe(problem: AttentionProblem) -> list[tuple[str, str]]:
    """What `explain` says of the forward of a problem that the kernel takes."""
    return forward_call(problem).describe(plan_of(problem))


def hopper_forward(
    problem: AttentionProblem,
    operands: AttentionOperands,
    *,
    tiles: Tiles | None = None,
    policy: Policy | None = None,
    packed: bool | None = None,
    driver: str = CUDA_DRIVER,
) -> tuple[jax.Array, jax.Array]:
    """Attention by the kernel of `jax_fa4.kernels.hopper.forward`.

    Args:
      problem: the call; `why_not` says which are taken.
      operands: query (B, T, N, D), key (B, S, K, D), value (B, S, K, Dv), bfloat16 or float16; sinks, ids and lengths
        as the problem says.
      tiles: sizes of the kernel; None: those of `tiles_of`.
      policy: order of the work table, to compare orders; None: longest first, by arithmetic where no table is needed.
      packed: whether the heads of a group are rows of a tile (not with sinks); None: as `is_packed` says.
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
    call = forward_call(problem, tiles, policy, packed)
    plan = plan_of(problem, tiles, policy, packed)
    buffers, integers = call.arguments(operands, driver)
    outputs = call.results()
    aliases: dict[str, str] = {}
    if plan.option("persistent"):
        add_counter(buffers, outputs, aliases)
    results = launch(plan, buffers, outputs, integers, softmax_floats(problem), aliases=aliases, driver=driver)
    return call.unpack(results["out"]), call.unpack(results["lse"])
