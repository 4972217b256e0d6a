"""The planning kernels in the emulator: the same intervals, tile bounds and orders as `jax_fa4.schedule`."""

from __future__ import annotations

from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck
from hypothesis import strategies as st

from jax_fa4 import emulator
from jax_fa4.cost import ARCHITECTURES as COSTS
from jax_fa4.ffi import launch, planning
from jax_fa4.problem import AttentionProblem, PlannedGrids
from jax_fa4.schedule.order import backward_grid, forward_grid, make_table
from jax_fa4.schedule.tiles import MaskOperands, MaskRule, key_intervals, query_intervals
from tests.test_properties import segment_ids

HOPPER = COSTS["sm_90"]
CAPABILITIES = {"sm_90a": "9.0", "sm_100f": "10.0"}


@pytest.fixture(params=CAPABILITIES)
def architecture(request: pytest.FixtureRequest, built_library: None) -> str:
    launch.declare_driver("emulator", str(emulator.library_path()), takes_ptx=True)
    emulator.set_options(arch=CAPABILITIES[request.param], check_uninitialized=True, check_races=True)
    return str(request.param)


def grids_of(rule: MaskRule, batch: int, heads: tuple[int, int], tiles: tuple[int, int]) -> PlannedGrids:
    problem = AttentionProblem(batch, rule.query_length, rule.key_length, *heads, 128, 128, "bfloat16", rule, 1.0)
    return PlannedGrids(forward_grid(problem, *tiles, HOPPER), backward_grid(problem, *tiles, HOPPER, whole_group=True))


def check(
    rule: MaskRule, masks: MaskOperands, grids: PlannedGrids, architecture: str, driver: str = "emulator"
) -> None:
    """Kernels against NumPy, where the same ids are known."""
    batch = next(len(one) for one in masks if one is not None)
    traced = MaskOperands(*(None if one is None else jnp.asarray(one) for one in masks))
    assert planning.why_not(rule, batch, traced, grids, architecture) is None
    found = jax.jit(lambda masks: planning.plan(rule, batch, masks, grids, architecture=architecture, driver=driver))(
        traced
    )
    wanted = query_intervals(rule, masks), key_intervals(rule, masks)
    for mine, intervals in zip(found[:2], wanted, strict=True):
        for name, one, other in zip(intervals._fields, mine, intervals, strict=True):
            np.testing.assert_array_equal(one, np.broadcast_to(other, one.shape), name)
    for items, grid, intervals in zip(found[2:], grids, wanted, strict=True):
        assert (items is None) == (grid is None)
        if grid is not None:
            np.testing.assert_array_equal(items, make_table(grid, intervals).items)


def ids_of(kind: str, batch: int, length: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    ids = np.sort(rng.integers(0, 7, (batch, length)), axis=1)
    if kind == "padded":
        ids[:, length - length // 5 :] = -1
    elif kind == "holes":
        ids[ids % 3 == 1] = -3
    elif kind == "descending":
        ids = ids[:, ::-1]
    elif kind == "interleaved":
        ids = np.broadcast_to(np.arange(length) % 5, (batch, length))
    elif kind == "any order":
        ids = rng.integers(-1, 4, (batch, length))
    elif kind == "apart":
        ids = np.broadcast_to((1 << 30) + np.arange(length) * 131072, (batch, length)) & 0x7FFFFFFF
    elif kind == "padding":
        ids = np.full((batch, length), -1)
    return ids.astype(np.int32)


KINDS = ("packed", "padded", "holes", "descending", "interleaved", "any order", "apart", "padding")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "mask", [{"is_causal": True}, {}, {"window": (33, 7)}, {"window": (5, None), "is_causal": True}], ids=str
)
def test_a_packed_row(kind: str, mask: dict[str, Any], architecture: str) -> None:
    """More columns than threads, and no multiple of a word."""
    if architecture != "sm_90a" and mask != {"is_causal": True}:
        pytest.skip("the same code")
    rule, ids = MaskRule(1201, 1201, **mask), ids_of(kind, 2, 1201)
    check(rule, MaskOperands(ids, ids), grids_of(rule, 2, (6, 3), (128, 80)), architecture)


@pytest.mark.parametrize("kinds", [("packed", "padded"), ("any order", "interleaved"), ("descending", "any order")])
@pytest.mark.parametrize("lengths", [(40, 700), (700, 40), (1, 33)], ids=str)
def test_ids_of_queries_and_keys_differ(kinds: tuple[str, str], lengths: tuple[int, int]) -> None:
    launch.declare_driver("emulator", str(emulator.library_path()), takes_ptx=True)
    emulator.set_options(arch="9.0", check_uninitialized=True, check_races=True)
    masks = MaskOperands(
        *(ids_of(kind, 3, length, seed) for seed, (kind, length) in enumerate(zip(kinds, lengths, strict=True)))
    )
    for options in ({}, {"is_causal": True, "diagonal_offset": lengths[1] - lengths[0]}, {"window": (20, 3)}):
        rule = MaskRule(*lengths, **options)
        check(rule, masks, grids_of(rule, 3, (4, 4), (64, 48)), "sm_90a")


@pytest.mark.parametrize("with_ids", [False, True])
def test_lengths(with_ids: bool, architecture: str) -> None:
    ids = (ids_of("packed", 3, 70), ids_of("packed", 3, 90)) if with_ids else (None, None)
    rule = MaskRule(70, 90, is_causal=True, diagonal_offset=20)
    lengths = np.array([70, 33, 0], np.int32), np.array([90, 17, 50], np.int32)
    check(rule, MaskOperands(*ids, *lengths), grids_of(rule, 3, (4, 1), (64, 32)), architecture)
    check(rule, MaskOperands(*ids, None, lengths[1]), PlannedGrids(None, None), architecture)


def test_many_batch_rows_and_sections() -> None:
    """Sections of one head, some of which are merged; a document among short ones; more tiles than lanes."""
    launch.declare_driver("emulator", str(emulator.library_path()), takes_ptx=True)
    emulator.set_options(arch="9.0", check_uninitialized=True, check_races=True)
    rule, batch = MaskRule(2100, 2100, is_causal=True), 5
    ids = np.zeros((batch, 2100), np.int32)
    for row in range(1, batch):
        ids[row] = np.arange(2100) // (37 * row)
    wide = grids_of(rule, batch, (7, 7), (32, 64))
    narrow = PlannedGrids(*(grid.__class__(**{**vars(grid), "section_l2_bytes": 1 << 20}) for grid in wide))
    assert narrow.forward is not None
    assert narrow.forward.sections == 7
    check(rule, MaskOperands(ids, ids), narrow, "sm_90a")


@hypothesis.settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@hypothesis.given(segment_ids(2, 150), segment_ids(2, 210), st.booleans(), st.sampled_from([(None, None), (40, 9)]))
def test_any_ids(query_ids: np.ndarray, key_ids: np.ndarray, is_causal: bool, window: Any) -> None:
    launch.declare_driver("emulator", str(emulator.library_path()), takes_ptx=True)
    emulator.set_options(arch="9.0", check_uninitialized=True, check_races=True)
    rule = MaskRule(150, 210, is_causal=is_causal, window=window, diagonal_offset=60)
    check(rule, MaskOperands(query_ids, key_ids), grids_of(rule, 2, (2, 1), (64, 48)), "sm_90a")


def test_maps_leave_it_to_xla() -> None:
    """Each mapped mask has tables of its own."""
    launch.declare_driver("emulator", str(emulator.library_path()), takes_ptx=True)
    emulator.set_options(arch="9.0")
    rule = MaskRule(100, 100, is_causal=True)
    grids, ids = grids_of(rule, 2, (2, 2), (64, 32)), jnp.asarray(ids_of("any order", 6, 100).reshape(3, 2, 100))

    def plan(ids: jax.Array) -> Any:
        return planning.plan(rule, 2, MaskOperands(ids, ids), grids, architecture="sm_90a", driver="emulator")

    mapped = jax.jit(jax.vmap(plan))(ids)
    apart = [planning.formula(rule, 2, MaskOperands(one, one), grids) for one in ids]
    jax.tree.map(np.testing.assert_array_equal, mapped, jax.tree.map(lambda *one: jnp.stack(one), *apart))


def test_what_is_left_to_xla() -> None:
    rule, ids = MaskRule(64, 64), jnp.zeros((1, 64), jnp.int32)
    nothing = PlannedGrids(None, None)
    assert "neither ids" in str(planning.why_not(rule, 1, MaskOperands(), nothing, "sm_90a"))
    assert "more than" in str(planning.why_not(MaskRule(1 << 19, 64), 1, MaskOperands(ids, ids), nothing, "sm_90a"))
    assert "nothing" in str(planning.why_not(MaskRule(0, 64), 1, MaskOperands(ids, ids), nothing, "sm_90a"))
