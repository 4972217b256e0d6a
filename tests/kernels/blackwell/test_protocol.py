"""The Blackwell forward's events order everything that touches the same memory, for items of 0 to 4 key tiles, one or
several in a CTA."""

from __future__ import annotations

import dataclasses
import itertools
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

MANY = [
    forward_plan("bfloat16", dims, "causal", tiles=dataclasses.replace(tiles, scheduling=scheduling))
    for dims, tiles in (*FORWARD_TILES.items(), *PAIR_TILES.items())
    for scheduling in ("persistent", "cluster")
]
# Long beside short items, and such as see nothing, alone and several in a row.
LISTS = [(4, 1, 1, 3), (3, 0, 0, 0, 2), (0, 0), (1, 0, 1, 0, 1), *itertools.product((0, 1, 3), (0, 2), (0, 1, 4))]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.key)
@pytest.mark.parametrize("steps", range(5))
def test_nothing_hangs_or_races(plan: KernelPlan, steps: int) -> None:
    protocol = Protocol(plan, steps)
    assert check(protocol.programs, protocol.counts) == []


@pytest.mark.parametrize("plan", MANY, ids=lambda plan: plan.key)
@pytest.mark.parametrize("steps", LISTS, ids=str)
def test_nothing_hangs_or_races_over_items(plan: KernelPlan, steps: tuple[int, ...]) -> None:
    protocol = Protocol(plan, *steps)
    assert check(protocol.programs, protocol.counts) == []


def mutants(plan: KernelPlan, *steps: int) -> list[tuple[str, list[str]]]:
    """Each wait and arrival left out, one at a time, and what the model says of it."""
    found = []
    agents = list(Protocol(plan, *steps).programs)
    for agent in agents:
        for place, action in enumerate(Protocol(plan, *steps).programs[agent]):
            if isinstance(action, Wait | Arrive):
                protocol = Protocol(plan, *steps)
                del protocol.programs[agent][place]
                found.append((f"{agent} {place}: {action}", check(protocol.programs, protocol.counts)))
    return found


# What others imply in items of three steps: releases that nobody waits for again, or that a later release includes; the
# end of the products, which the softmax has waited for before it tells the correction.
IMPLIED = re.compile(r"(keys|values)_free|scores_read|^correction .*out_done")
# The start of a copy, the issue of a product, the hardware's being asked: causes, no synchronisation.
CAUSES = re.compile(r"start of|issue|question")


@pytest.mark.parametrize("plan", [PLANS[0], PLANS[-1]], ids=lambda plan: plan.key)
def test_what_is_left_out_is_noticed(plan: KernelPlan) -> None:
    tried = [(name, complaints) for name, complaints in mutants(plan, 3) if not CAUSES.search(name)]
    unnoticed = [name for name, complaints in tried if not complaints]
    assert [name for name in unnoticed if not IMPLIED.search(name)] == []
    assert len(unnoticed) < len(tried) / 8


# Over items the same; what is needed only by an item that comes after; the end of the products in items of one step,
# where no factor was told before; and the correction's wait for the copy of the outputs before, except where one item
# that sees nothing follows another: else it waits for products of queries that were loaded after that copy.
IMPLIED_OVER_ITEMS = re.compile(IMPLIED.pattern + r"|query_free|output_ready|item_taken|^softmax .*out_done")


@pytest.mark.parametrize("plan", [MANY[2], MANY[-1]], ids=lambda plan: plan.key)
def test_what_is_left_out_is_noticed_over_items(plan: KernelPlan) -> None:
    tried = [(name, complaints) for name, complaints in mutants(plan, 2, 0, 0, 1) if not CAUSES.search(name)]
    unnoticed = [name for name, complaints in tried if not complaints]
    assert [name for name in unnoticed if not IMPLIED_OVER_ITEMS.search(name)] == []
    assert len(unnoticed) < len(tried) / 6


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
