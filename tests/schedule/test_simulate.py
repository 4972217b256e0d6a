"""List scheduling: its invariants, and the classical guarantee of longest-first."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_fa4.schedule.simulate import simulate

CLOCKS = st.lists(st.integers(0, 1000), max_size=60)
SLOTS = st.integers(1, 9)


@settings(deadline=None)
@given(CLOCKS, SLOTS)
def test_invariants(clocks, slots):
    run = simulate(np.array(clocks, np.int32), slots)
    np.testing.assert_array_equal(run.end - run.start, clocks)
    assert run.makespan >= run.lower_bound
    assert run.lower_bound * slots >= run.work == sum(clocks)
    assert 0 <= run.tail <= run.makespan
    assert 0 < run.balance <= 1
    assert (np.diff(run.start) >= 0).all()  # items begin in their order
    busy = [run.busy(slot) for slot in range(slots)]
    assert sorted(item for intervals in busy for item, _, _ in intervals) == list(range(len(clocks)))
    for intervals in busy:
        clock = 0
        for item, start, end in intervals:  # back to back: no slot waits while there is an item left
            assert (start, end) == (clock, clock + clocks[item])
            clock = end
        if intervals and clock < run.makespan:
            assert clock >= run.start.max()
    # Graham's guarantee for any order, and for longest first.
    longest = max(clocks, default=0)
    assert run.makespan <= sum(clocks) / slots + longest * (1 - 1 / slots) + 1e-9


@settings(deadline=None)
@given(CLOCKS, SLOTS)
def test_longest_first_guarantee(clocks, slots):
    """Within 4/3 - 1/(3 m) of the bound where the item that ends last is short; long ones are placed optimally."""
    longest_first = sorted(clocks, reverse=True)
    run = simulate(np.array(longest_first, np.int32), slots)
    if clocks and longest_first[run.end.argmax()] * 3 <= run.lower_bound:
        assert run.makespan <= (4 / 3 - 1 / (3 * slots)) * run.lower_bound + 1e-9


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 50), max_size=6), st.integers(1, 3))
def test_lower_bound_is_below_every_order(clocks, slots):
    makespans = [simulate(np.array(order, np.int32), slots).makespan for order in itertools.permutations(clocks)]
    assert simulate(np.array(clocks, np.int32), slots).lower_bound <= min(makespans)


def test_lower_bound_counts_waves():
    # Five equal items on four slots: one slot must run two.
    assert simulate(np.full(5, 10), 4).lower_bound == 20
    assert simulate(np.array([9, 8, 7, 6, 5]), 4).lower_bound == 11
    assert simulate(np.array([30, 1, 1, 1, 1]), 4).lower_bound == 30


def test_by_hand():
    run = simulate(np.array([1, 2, 3, 4, 5, 6, 7, 8]), 4)
    assert run.makespan == 12
    assert run.tail == 6
    assert run.lower_bound == 9
    assert run.slot.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert run.busy(0) == [(0, 0, 1), (4, 1, 6)]
    backwards = simulate(np.arange(8, 0, -1), 4)
    assert (backwards.makespan, backwards.tail, backwards.balance) == (9, 0, 1.0)


def test_nothing_to_do():
    run = simulate(np.zeros(0, np.int32), 3)
    assert (run.makespan, run.lower_bound, run.tail, run.balance, run.busy(0)) == (0, 0, 0, 1.0, [])


def test_no_slots_are_refused():
    with pytest.raises(ValueError, match="slots 0"):
        simulate(np.ones(3), 0)
