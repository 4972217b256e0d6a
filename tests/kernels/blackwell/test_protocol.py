"""The Blackwell forward's events order everything that touches the same memory, for items of 0 to 4 key tiles."""

from __future__ import annotations

import re

import pytest

from jax_fa4.kernels.blackwell.plans import FORWARD_TILES, PAIR_TILES, forward_plan
from jax_fa4.kernels.blackwell.protocol import Protocol
from jax_fa4.kernels.model import Arrive, Touch, Wait, check
from jax_fa4.kernels.plan import KernelPlan

PLANS = [
    *(forward_plan("bfloat16", dims, "causal") for dims in FORWARD_TILES),
    *(forward_plan("bfloat16", dims, "causal", tiles=tiles) for dims, tiles in PAIR_TILES.items()),
]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.key)
@pytest.mark.parametrize("steps", range(5))
def test_nothing_hangs_or_races(plan: KernelPlan, steps: int) -> None:
    protocol = Protocol(plan, steps)
    assert check(protocol.programs, protocol.counts) == []


def mutants(plan: KernelPlan, steps: int) -> list[tuple[str, list[str]]]:
    """Each wait and arrival left out, one at a time, and what the model says of it."""
    found = []
    agents = list(Protocol(plan, steps).programs)
    for agent in agents:
        for place, action in enumerate(Protocol(plan, steps).programs[agent]):
            if isinstance(action, Wait | Arrive):
                protocol = Protocol(plan, steps)
                del protocol.programs[agent][place]
                found.append((f"{agent} {place}: {action}", check(protocol.programs, protocol.counts)))
    return found


# What others imply in items of three steps: releases that nobody waits for again, or that a later release includes; the
# end of the products, which the softmax has waited for before it tells the correction.
IMPLIED = re.compile(r"(keys|values)_free|scores_read|^correction .*out_done")
# The start of a copy, the issue of a product: causes, no synchronisation.
CAUSES = re.compile(r"start of|issue")


@pytest.mark.parametrize("plan", [PLANS[0], PLANS[-1]], ids=lambda plan: plan.key)
def test_what_is_left_out_is_noticed(plan: KernelPlan) -> None:
    tried = [(name, complaints) for name, complaints in mutants(plan, 3) if not CAUSES.search(name)]
    unnoticed = [name for name, complaints in tried if not complaints]
    assert [name for name in unnoticed if not IMPLIED.search(name)] == []
    assert len(unnoticed) < len(tried) / 8


def test_complaints_say_what_is_wrong() -> None:
    write, read = Touch("shared memory", 0, 8, True), Touch("shared memory", 4, 12, False)
    ordered = {"first": [write, Arrive("written")], "second": [Wait("written", 0), read]}
    assert check(ordered, {"written": 1}) == []
    (race,) = check({"first": [write], "second": [read]}, {})
    assert race.startswith("nothing orders first: Touch")
    (hang,) = check({"first": [Wait("written", 0)]}, {"written": 1})
    assert hang == "first waits for ever: Wait(event='written', use=0)"
    (early,) = check({"first": [Arrive("written")], "second": [Arrive("written")]}, {"written": 1})
    assert early == "second may arrive at written for phase 1 while 0 is not over"
