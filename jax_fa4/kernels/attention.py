"""The attention kernels as implementations: "fa4" on a GPU, "emulated" on the emulated one.

Both are the same kernels, chosen by architecture from one table, `KERNELS`; they differ in the driver that launches
them. What the kernels do not take is refused when the call is traced, forward and backward together.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax

from jax_fa4 import emulator
from jax_fa4.cost import ARCHITECTURES as COSTS
from jax_fa4.dispatch import Target, current_target
from jax_fa4.ffi import (
    blackwell_backward,
    blackwell_forward,
    hopper_backward,
    hopper_forward,
    launch,
    merge_parts,
    planning,
)
from jax_fa4.ffi.preprocess import padded_length
from jax_fa4.kernels.plan import Architecture, KernelPlan, architecture_for, architectures_for
from jax_fa4.problem import NO_GRIDS, AttentionOperands, AttentionProblem, PlannedGrids, interval_operands
from jax_fa4.schedule.order import WorkGrid
from jax_fa4.schedule.tiles import MaskOperands, MaskRule
from jax_fa4.splitting import Split, choose_split, problem_of, run_split

Pair = tuple[jax.Array, jax.Array]
Details = list[tuple[str, str]]


@dataclass(frozen=True)
class Kernels:
    """The attention kernels of one architecture.

    Attributes:
      forward: (problem, operands, driver=name) -> output (B, T, N, Dv) and log-sum-exp (B, T, N).
      backward: (problem, operands, out, lse, grad_out, grad_lse, driver=name) -> cotangents.
      why_not: why the kernels do not take a problem, forward and backward; None where they do.
      describe: labels and texts for `explain`.
      grids: what a `jax_fa4.SegmentPlan` makes work tables for.
    """

    forward: Callable[..., Pair]
    backward: Callable[..., AttentionOperands]
    why_not: Callable[[AttentionProblem], str | None]
    describe: Callable[[AttentionProblem], Details]
    grids: Callable[[AttentionProblem], PlannedGrids]


def _blackwell_kernels(architecture: str) -> Kernels:
    return Kernels(
        forward=functools.partial(blackwell_forward.blackwell_forward, architecture=architecture),
        backward=blackwell_backward.blackwell_backward,
        why_not=lambda problem: (
            blackwell_forward.why_not(problem, architecture=architecture) or blackwell_backward.why_not(problem)
        ),
        describe=functools.partial(_describe_blackwell, architecture=architecture),
        grids=lambda problem: PlannedGrids(
            blackwell_forward.forward_call(problem, architecture).grid, blackwell_backward.grid_of(problem)
        ),
    )


def _describe_both(
    forward: Details, problem: AttentionProblem, plan: KernelPlan, grid: WorkGrid, width: int
) -> Details:
    """The forward's labels and texts, and the backward's, whose sums of query gradients have `width` columns."""
    items = grid.batch * grid.heads * -(-problem.key_length // grid.row_tile)
    # Sums of the query gradients, and log-sum-exp and delta, float32 for each row of the padded queries.
    rows = problem.batch * problem.query_heads * padded_length(problem.query_length)
    return [
        *forward,
        ("backward kernel", plan.key),
        ("its tile", f"{grid.row_tile} keys x {grid.column_tile} queries"),
        ("its schedule", f"{items:,} items"),
        ("its workspace", f"{rows * (width + 2) * 4:,} bytes"),
    ]


def _describe_hopper(problem: AttentionProblem) -> Details:
    plan, grid = hopper_backward.plan_of(problem), hopper_backward.grid_of(problem)
    return _describe_both(hopper_forward.describe(problem), problem, plan, grid, int(plan.option("sum_columns")))


def _describe_blackwell(problem: AttentionProblem, *, architecture: str) -> Details:
    forward = blackwell_forward.describe(problem, architecture=architecture)
    plan, grid = blackwell_backward.plan_of(problem), blackwell_backward.grid_of(problem)
    return _describe_both(forward, problem, plan, grid, int(plan.option("head_dim")))


# By the names of `jax_fa4.kernels.plan.ARCHITECTURES`.
KERNELS: Mapping[str, Kernels] = {
    "sm_90a": Kernels(
        forward=hopper_forward.hopper_forward,
        backward=hopper_backward.hopper_backward,
        why_not=hopper_backward.why_not,
        describe=_describe_hopper,
        grids=lambda problem: PlannedGrids(hopper_forward.forward_call(problem).grid, hopper_backward.grid_of(problem)),
    ),
    **{name: _blackwell_kernels(name) for name in blackwell_forward.ARCHITECTURE_NAMES},
}


def _what_there_is() -> str:
    *others, last = KERNELS
    return f"there are attention kernels for {', '.join(others)} and {last}"


def capability_of(target: Target) -> tuple[int, int] | None:
    """The compute capability that a target names; None where it names no NVIDIA GPU."""
    if target.architecture is None:
        return None
    number = int(target.architecture.removeprefix("sm_"))
    return number // 10, number % 10


def general_architecture_of(target: Target) -> Architecture | None:
    """The architecture of the small kernels around attention, which need nothing special of a target."""
    return architecture_for(capability_of(target) or (0, 0))


def architecture_of(target: Target) -> Architecture | None:
    """The architecture for which there are attention kernels that run on a target; None where there is none."""
    capability = capability_of(target)
    known = () if capability is None else architectures_for(capability)
    # The most special one comes last: it has what the others lack.
    return next((one for one in reversed(known) if one.name in KERNELS), None)


def kernels_of(target: Target) -> Kernels:
    """The row of the table for a target that has one. Raises NotImplementedError for others."""
    architecture = architecture_of(target)
    if architecture is None:
        raise NotImplementedError(f"there are no attention kernels for {target}.")
    return KERNELS[architecture.name]


@functools.lru_cache(maxsize=1024)
def split_of(problem: AttentionProblem, target: Target) -> Split:
    """How the forward pass of a problem that the target's kernels take is cut where queries are few."""
    kernels, architecture = kernels_of(target), architecture_of(target)
    assert architecture is not None
    return choose_split(
        problem,
        lambda cut: kernels.grids(cut).forward,
        lambda cut: kernels.why_not(cut) is None,
        COSTS[architecture.name[:-1]],
    )


class AttentionKernels:
    """The kernels on a GPU: the implementation named "fa4"."""

    name = "fa4"
    platform = "gpu"  # of JAX, where the kernels run

    def driver(self, target: Target) -> str:
        """The name of the driver that launches the kernels."""
        return launch.CUDA_DRIVER

    def why_not(self, problem: AttentionProblem, target: Target) -> str | None:
        """None where the target's kernels take the problem; else one sentence with the remedy."""
        if target.architecture is None:
            return f"the kernels need an NVIDIA GPU, and the target is {target}; pass implementation='blockwise'."
        if architecture_of(target) is None:
            return f"{_what_there_is()}, not for {target}; pass implementation='blockwise'."
        return self._why_not_launched(problem, target)

    def _why_not_launched(self, problem: AttentionProblem, target: Target) -> str | None:
        try:
            self.driver(target)
            launch.native()
        except (ImportError, FileNotFoundError) as error:
            return str(error)
        if problem.key_splits is not None and problem.key_splits > 1 and not problem.is_empty:
            problem = problem_of(problem, Split(problem.key_splits))
        return kernels_of(target).why_not(problem)

    def describe(self, problem: AttentionProblem, target: Target) -> Details:
        """Kernels, tiles, schedule and workspace."""
        if problem.is_empty:
            return [("kernel", "none: the call is empty")]
        split, details = split_of(problem, target), []
        if not split.is_whole:
            heads = ", query heads of a key head packed in one tile" if split.packs_heads else ""
            details.append(("keys split", f"{split.parts} parts of {-(-problem.key_length // split.parts)}{heads}"))
            problem = problem_of(problem, split)
        return [*details, *kernels_of(target).describe(problem)]

    def planned_grids(self, problem: AttentionProblem, target: Target) -> PlannedGrids:
        """What a plan for such calls makes work tables for."""
        return kernels_of(target).grids(problem)

    def plan_mask(
        self, rule: MaskRule, batch: int, masks: MaskOperands, grids: PlannedGrids, target: Target
    ) -> planning.Planned | None:
        """A mask of traced ids and lengths, planned by kernels; None where they are not to be had: XLA can do it."""
        architecture = general_architecture_of(target)
        if architecture is None:
            return None
        try:
            driver = self.driver(target)
            launch.native()
        except (ImportError, FileNotFoundError):
            return None
        if planning.why_not(rule, batch, masks, grids, architecture.name) is not None:
            return None
        return planning.plan(rule, batch, masks, grids, architecture=architecture.name, driver=driver)

    def _planned(
        self, problem: AttentionProblem, operands: AttentionOperands, grids: PlannedGrids, target: Target
    ) -> tuple[AttentionProblem, AttentionOperands]:
        """The call with its mask planned, where that waits for ids and lengths. Forward and backward ask for the same,
        which XLA computes once where it sees both."""
        if not problem.has_traced_mask or operands.query_lo is not None or problem.has_intervals:
            return problem, operands
        planned = self.plan_mask(problem.mask, problem.batch, problem.mask_operands(operands), grids, target)
        if planned is None:
            return problem, operands
        rows = interval_operands(planned.queries, planned.keys)
        tables = {"forward_items": planned.forward_items, "backward_items": planned.backward_items}
        return dataclasses.replace(problem, planned=grids), operands._replace(**rows, **tables)

    def forward(self, problem: AttentionProblem, operands: AttentionOperands) -> Pair:
        """The output (B, T, N, Dv) in the problem's dtype and the log-sum-exp (B, T, N), float32.

        Raises:
          KernelUnavailableError: no binary of a kernel is at hand.
          LaunchError: the problem is too large for a grid.
        """
        target = current_target()
        kernels, split = kernels_of(target), split_of(problem, target)

        def run(problem: AttentionProblem, operands: AttentionOperands) -> Pair:
            if not problem.is_empty:
                grids = kernels.grids(problem)  # parts have no backward of their own
                grids = grids if split.is_whole else PlannedGrids(grids.forward, None)
                problem, operands = self._planned(problem, operands, grids, target)
            return kernels.forward(problem, operands, driver=self.driver(target))

        merge = None
        architecture = general_architecture_of(target)
        if not split.is_whole and architecture is not None and merge_parts.is_available(problem, architecture.name):
            merge = functools.partial(
                merge_parts.merge_parts, architecture=architecture.name, driver=self.driver(target)
            )
            if problem.has_segment_ids or problem.has_query_lengths:
                problem, operands = self._planned(problem, operands, NO_GRIDS, target)
        return run_split(run, problem, operands, split, merge)

    def backward(
        self,
        problem: AttentionProblem,
        operands: AttentionOperands,
        out: jax.Array,
        lse: jax.Array,
        grad_out: jax.Array,
        grad_lse: jax.Array,
    ) -> AttentionOperands:
        """The cotangents of query, key and value, in their shapes; raises as `forward`."""
        target = current_target()
        kernels = kernels_of(target)
        problem, operands = self._planned(problem, operands, kernels.grids(problem), target)
        return kernels.backward(problem, operands, out, lse, grad_out, grad_lse, driver=self.driver(target))


class EmulatedKernels(AttentionKernels):
    """The same kernels on the emulated GPU, on JAX's CPU platform: the implementation named "emulated"."""

    name = "emulated"
    platform = "cpu"

    def driver(self, target: Target) -> str:
        """The name of the driver that emulates the target."""
        return launch.emulated_driver(capability_of(target) or (0, 0))

    def resolve_target(self, target: Target) -> Target:
        """The emulated GPU: the one that `jax_fa4.target` names, else that of the emulator's options."""
        if target.architecture is not None:
            return target
        try:
            return Target(target.platform, "sm_" + emulator.architecture().replace(".", ""))
        except OSError:  # not built, or not loaded: `why_not` says so
            return target

    def why_not(self, problem: AttentionProblem, target: Target) -> str | None:
        """None where the kernels take the problem; else one sentence with the remedy."""
        if target.architecture is None:
            try:
                emulator.driver()
            except OSError as error:
                return str(error)
        if architecture_of(target) is None:
            return (
                f"the emulated GPU is {target}, and {_what_there_is()}; trace the call under jax_fa4.target('sm_90')."
            )
        return self._why_not_launched(problem, target)


fa4 = AttentionKernels()
emulated = EmulatedKernels()
