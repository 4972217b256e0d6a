"""The Hopper backward's events order everything that touches the same memory, for items of 0 to 7 steps."""

from __future__ import annotations

import re

import pytest

from jax_fa4.kernels.hopper.backward_plans import BACKWARD_TILES, BackwardTiles, backward_plan
from jax_fa4.kernels.hopper.backward_protocol import BackwardProtocol
from jax_fa4.kernels.model import Touch, Wait, check
from jax_fa4.kernels.plan import KernelPlan

OTHERS = (
    BackwardTiles(80, 2, 2, ahead=False, turned_scores=False),
    BackwardTiles(80, 2, 2, ahead=False, grad_score_stages=1),
    BackwardTiles(80, 3, 2, grad_score_stages=1),
)
PLANS = [
    *(backward_plan("bfloat16", head_dim, "window") for head_dim in BACKWARD_TILES),
    *(backward_plan("bfloat16", 128, "window", tiles=tiles) for tiles in OTHERS),
]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.key)
@pytest.mark.parametrize("steps", range(8))
def test_nothing_hangs_or_races(plan: KernelPlan, steps: int) -> None:
    protocol = BackwardProtocol(plan, steps)
    assert check(protocol.programs, protocol.counts) == []


# What others imply in items of five steps: that the first sums may be staged, and dS of the first step written; ends of
# products that later waits imply, or that touch nothing which is written again; room for output gradients, where
# queries wait for what comes later; the last releases, for which nobody waits.
IMPLIED = re.compile(
    r"(added|read) .', use=0|end of grad_(value|key) |end of scores 0|load .*grads_free|_free.*count=4"
)


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.key)
def test_what_is_left_out_is_noticed(plan: KernelPlan) -> None:
    programs = BackwardProtocol(plan, 5).programs
    awaited = {action.event for program in programs.values() for action in program if isinstance(action, Wait)}
    unnoticed, tried = [], 0
    for agent, program in programs.items():
        for place, action in enumerate(program):
            # The start of a copy or product is a cause, no synchronisation.
            if isinstance(action, Touch) or action.event not in awaited or action.event.startswith("start of"):
                continue
            protocol = BackwardProtocol(plan, 5)
            del protocol.programs[agent][place]
            tried += 1
            if not check(protocol.programs, protocol.counts):
                unnoticed.append(f"{agent} {place}: {action}")
    assert [name for name in unnoticed if not IMPLIED.search(name)] == []
    assert len(unnoticed) < tried / 6, unnoticed
