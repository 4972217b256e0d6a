"""The merge of parts of the keys as a JAX function, by one kernel."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_fa4.ffi.launch import CUDA_DRIVER, launch
from jax_fa4.kernels import bundle
from jax_fa4.kernels.plan import PlanError
from jax_fa4.kernels.planning_plans import merge_parts_plan
from jax_fa4.problem import AttentionProblem
from jax_fa4.splitting import Split


def is_available(problem: AttentionProblem, architecture: str) -> bool:
    """Whether there is a kernel for a call's parts."""
    try:
        plan = merge_parts_plan(architecture, problem.dtype, problem.value_dim, sinks=problem.has_sinks)
    except PlanError:
        return False
    return bundle.why_unavailable(plan) is None


def merge_parts(
    problem: AttentionProblem,
    split: Split,
    out: jax.Array,
    lse: jax.Array,
    sinks: jax.Array | None,
    *,
    architecture: str,
    driver: str = CUDA_DRIVER,
) -> tuple[jax.Array, jax.Array]:
    """Output (B, T, N, Dv) and log-sum-exp (B, T, N) of a call from those of its parts.

    Args:
      problem: the call.
      split: how it was cut.
      out: (B * parts, T * group, N / group, Dv), group the heads that were rows of one.
      lse: (B * parts, T * group, N / group), float32.
      sinks: (N,), or None.
      architecture: one of `jax_fa4.kernels.plan.ARCHITECTURES`.
      driver: the driver library that launches the kernel.

    Raises:
      KernelUnavailableError: no binary is at hand.
    """
    rows = problem.batch, problem.query_length, problem.query_heads
    plan = merge_parts_plan(architecture, problem.dtype, problem.value_dim, sinks=sinks is not None)
    operands = {"parts_out": out, "parts_lse": lse}
    if sinks is not None:
        operands["sinks"] = sinks.astype(jnp.float32)
    group = problem.group_size if split.packs_heads else 1
    integers = {
        **dict(zip(("batch", "queries", "heads"), rows, strict=True)),
        "part_rows": rows[1] * rows[2],
        "batch_rows": split.parts * rows[1] * rows[2],
        "parts": split.parts,
        "group": group,
        "kv_heads": problem.query_heads // group,
    }
    results = {
        "out": jax.ShapeDtypeStruct((*rows, problem.value_dim), problem.dtype),
        "lse": jax.ShapeDtypeStruct(rows, jnp.float32),
    }
    found = launch(plan, operands, results, integers, driver=driver)
    return found["out"], found["lse"]
