"""The Hopper backward whose items start at different queries, on the emulated GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from jax_fa4.ffi import hopper_backward
from jax_fa4.kernels import build
from jax_fa4.kernels.hopper.backward_plans import BACKWARD_TILES, PERSISTENT_TILES, backward_plan
from jax_fa4.kernels.plan import PlanError
from tests.kernels.forward_checks import draw
from tests.kernels.hopper.test_backward_emulated import check

STAGGERED = {head_dim: dataclasses.replace(tiles, staggered=True) for head_dim, tiles in BACKWARD_TILES.items()}


@pytest.fixture
def staggered(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call's backward starts at the diagonal; by blocks of one item, since there are few."""
    if build.compiler_version() is None:
        pytest.skip("the wheel has no kernels of this form")
    for head_dim, tiles in STAGGERED.items():
        monkeypatch.setitem(BACKWARD_TILES, head_dim, tiles)
        monkeypatch.setitem(PERSISTENT_TILES, head_dim, dataclasses.replace(tiles, persistent=True))


@pytest.mark.usefixtures("staggered")
@pytest.mark.parametrize("head_dim", [*(pytest.param(one, marks=pytest.mark.slow) for one in (64, 96)), 128])
@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True}, {"local_window_size": (300, 40)}],
    ids=["full", "causal", "window"],
)
def test_queries_wrap_around(head_dim: int, options: dict[str, Any]) -> None:
    """Tiles that everybody sees, and an incomplete tile at either end; two query heads share keys."""
    check(draw(head_dim, (1, 600, 2, head_dim), 530, 1, "bfloat16"), **options)


@pytest.mark.usefixtures("staggered")
@pytest.mark.parametrize(("queries", "keys"), [(1, 700), (70, 900), (900, 70), (256, 1024)])
def test_the_diagonal_may_lie_beyond_the_last_query(queries: int, keys: int) -> None:
    check(draw(1, (1, queries, 2, 64), keys, 2, "float16"))


@pytest.mark.slow
@pytest.mark.usefixtures("staggered")
def test_persistent_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """140 items, more than the multiprocessors."""
    check(draw(3, (1, 200, 70, 64), 200, 70, "bfloat16"))
    assert hopper_backward.PERSISTENT_TILES[64].staggered


def test_steps_in_fixed_order_are_not_staggered() -> None:
    with pytest.raises(PlanError, match="staggered"):
        backward_plan("bfloat16", 128, "window", tiles=STAGGERED[128], ordered=True)
    keys = {backward_plan("bfloat16", 128, "window", tiles=tiles[128]).key for tiles in (STAGGERED, BACKWARD_TILES)}
    assert len(keys) == 2
