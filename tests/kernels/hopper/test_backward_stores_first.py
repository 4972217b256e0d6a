"""The Hopper backward that stores what is added first to a tile of query gradients, on the emulated GPU.

Nothing is zeroed before: what no block adds to holds whatever memory held.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jax_fa4 import cost, emulator
from jax_fa4.ffi import hopper_backward
from jax_fa4.kernels import build
from jax_fa4.kernels.hopper.backward_plans import (
    BACKWARD_TILES,
    CAPPED_TILES,
    PERSISTENT_TILES,
    BackwardTiles,
    backward_plan,
)
from jax_fa4.kernels.plan import PlanError
from jax_fa4.kernels.plans import postprocess_plan
from tests.kernels.forward_checks import draw
from tests.kernels.hopper.test_backward_emulated import check


@pytest.fixture(params=[False, True], ids=["one item a block", "persistent"])
def storing(request: pytest.FixtureRequest, hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call's backward; persistent blocks are three."""
    if build.compiler_version() is None:
        pytest.skip("the wheel has no kernels of this form")
    for table in (BACKWARD_TILES, PERSISTENT_TILES, CAPPED_TILES):
        for head_dim, tiles in table.items():
            chosen = dataclasses.replace(tiles, stores_first=True, persistent=request.param)
            monkeypatch.setitem(table, head_dim, chosen)
    if request.param:
        few = dataclasses.replace(cost.ARCHITECTURES["sm_90"], sms=3)
        monkeypatch.setattr(hopper_backward, "ARCHITECTURES", {**cost.ARCHITECTURES, "sm_90": few})


@pytest.mark.usefixtures("storing")
@pytest.mark.parametrize("head_dim", [*(pytest.param(one, marks=pytest.mark.slow) for one in (64, 96)), 128])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}], ids=["full", "causal"])
def test_dense_rows(head_dim: int, options: dict[str, Any]) -> None:
    check(draw(head_dim, (2, 200, 2, head_dim), 300, 1, "bfloat16"), **options)


@pytest.mark.usefixtures("storing")
@pytest.mark.parametrize(
    ("queries", "keys", "options"),
    [
        (600, 130, {"is_causal": True, "causal_alignment": "bottom_right"}),  # the first queries see nothing
        (500, 130, {"local_window_size": (40, 40)}),  # nor do the last ones
        (1, 1, {}),
        (130, 513, {"is_causal": True}),
    ],
)
def test_queries_that_see_nothing(queries: int, keys: int, options: dict[str, Any]) -> None:
    check(draw(1, (1, queries, 2, 64), keys, 2, "float16"), **options)


@pytest.mark.usefixtures("storing")
@pytest.mark.parametrize("concrete", [True, False], ids=["known", "traced"])
@pytest.mark.parametrize("head_dim", [64, pytest.param(128, marks=pytest.mark.slow)])
def test_packed_segments(head_dim: int, concrete: bool) -> None:
    """Padding that holds NaN: tiles of queries to which nobody adds."""
    ids = np.sort(np.random.default_rng(5).integers(0, 6, (2, 420)), axis=-1).astype(np.int32)
    ids[0, 200:] = -1
    tensors = tuple(one.at[0, 200:].set(jnp.nan) for one in draw(5, (2, 420, 2, head_dim), 420, 1, "bfloat16"))
    check(tensors, is_causal=True, segment_ids=ids if concrete else jnp.asarray(ids))


@pytest.mark.slow
@pytest.mark.usefixtures("storing")
def test_scattered_ids_caps_and_parts_of_groups() -> None:
    rng = np.random.default_rng(6)
    ids = tuple(rng.integers(-1, 4, (2, length)).astype(np.int32) for length in (150, 430))
    check(draw(6, (2, 150, 2, 64), 430, 2, "bfloat16"), segment_ids=ids, local_window_size=(100, 40))
    check(draw(8, (2, 100, 4, 64), 350, 1, "bfloat16", 4.0), logits_soft_cap=5.0)


@pytest.mark.usefixtures("storing")
@pytest.mark.parametrize("completion", ["random", "eager", "lazy"])
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_every_order_of_events(completion: str, seed: int) -> None:
    """Who comes first depends on it."""
    emulator.set_options(seed=seed, completion=completion)
    check(draw(10, (1, 385, 2, 64), 520, 2, "bfloat16"))


def test_what_it_is_not_for() -> None:
    tiles = dataclasses.replace(BACKWARD_TILES[128], stores_first=True)
    with pytest.raises(PlanError, match="stores_first"):
        backward_plan("bfloat16", 128, "window", tiles=tiles, ordered=True)
    eighty = BackwardTiles(80, 2, 2, ahead=False, turned_scores=False, stores_first=True)
    with pytest.raises(PlanError, match="stores_first"):
        backward_plan("bfloat16", 128, "window", tiles=eighty)
    with pytest.raises(PlanError, match="mark_rows"):
        postprocess_plan("sm_90a", "bfloat16", 128, 128, mark_rows=64)
    plan = backward_plan("bfloat16", 128, "window", tiles=tiles)
    assert "zeros" not in plan.operands
    assert "marks" in plan.results
