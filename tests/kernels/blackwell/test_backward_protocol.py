"""The Blackwell backward's events order everything that touches the same memory, for items of 0 to 4 tiles."""

from __future__ import annotations

import re

import pytest

from jax_fa4.kernels.blackwell.backward_plans import BACKWARD_TILES, SINGLE_TILES, backward_plan
from jax_fa4.kernels.blackwell.backward_protocol import BackwardProtocol
from jax_fa4.kernels.model import Arrive, Wait, check
from jax_fa4.kernels.plan import KernelPlan

PLANS = [
    *(backward_plan("bfloat16", dims, "band") for dims in BACKWARD_TILES),
    *(backward_plan("bfloat16", dims, "band", tiles=tiles) for dims, tiles in SINGLE_TILES.items()),
]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.key)
@pytest.mark.parametrize("steps", range(5))
def test_nothing_hangs_or_races(plan: KernelPlan, steps: int) -> None:
    protocol = BackwardProtocol(plan, steps)
    assert check(protocol.programs, protocol.counts) == []


# What others imply in items of three tiles: releases that nobody waits for again; waits of a product for what a product
# before it, or the end of all of them, has waited for.
IMPLIED = re.compile(r"_free|grad_query_drained|grad_query_ready\[0\] of CTA \d', (use=2|count)|probs_ready|_landed")
# In all orders but "pair" the next gradients of probs are issued after the query gradients, so that they imply them.
IMPLIED_IN_ORDER = re.compile(r"^compute .*Wait\(event='grad_query_ready")
# The start of a copy, the issue of a product: causes, no synchronisation.
CAUSES = re.compile(r"start of|issue")


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.key)
def test_what_is_left_out_is_noticed(plan: KernelPlan) -> None:
    unnoticed, tried = [], 0
    for agent, program in BackwardProtocol(plan, 3).programs.items():
        for place, action in enumerate(program):
            name = f"{agent} {place}: {action}"
            if not isinstance(action, Wait | Arrive) or CAUSES.search(name):
                continue
            protocol = BackwardProtocol(plan, 3)
            del protocol.programs[agent][place]
            tried += 1
            if not check(protocol.programs, protocol.counts):
                unnoticed.append(name)
    if plan.option("order") != "pair":
        unnoticed = [name for name in unnoticed if not IMPLIED_IN_ORDER.search(name)]
    assert [name for name in unnoticed if not IMPLIED.search(name)] == []
    assert len(unnoticed) < tried / 6, unnoticed
