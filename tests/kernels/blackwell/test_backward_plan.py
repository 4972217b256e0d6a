"""The Blackwell backward's plans, its order of products, and what it refuses; nothing here needs a compiler."""

from __future__ import annotations

import itertools
from typing import Any

import jax.numpy as jnp
import pytest

from jax_fa4 import arguments
from jax_fa4.ffi import blackwell_backward as wrapper
from jax_fa4.kernels.blackwell.backward_plans import (
    BACKWARD_DTYPES,
    BACKWARD_TILES,
    MASKS,
    backward_plan,
    padded_head_dims,
)
from jax_fa4.kernels.blackwell.product_order import ORDERS, after_loop, before_loop
from jax_fa4.kernels.plan import PlanError


def test_every_plan_fits_the_device_and_has_its_own_key() -> None:
    options = itertools.product(BACKWARD_DTYPES, BACKWARD_TILES, MASKS, (False, True))
    plans = [backward_plan(dtype, dims, mask, soft_cap=cap) for dtype, dims, mask, cap in options]
    assert len({plan.key for plan in plans}) == len({plan.digest for plan in plans}) == len(plans)
    for plan in plans:
        assert plan.threads == 512
        assert sum((role.registers or 0) * role.warps for role in plan.roles) <= 128 * 16


@pytest.mark.parametrize("order", ORDERS)
def test_every_tile_gets_each_product_once(order: str) -> None:
    body = ORDERS[order]
    assert len({one.product for one in body}) == len(body) == 5
    around = before_loop(body) + after_loop(body)
    assert sorted(one.product for one in around) == sorted(one.product for one in body)


@pytest.mark.parametrize(
    ("dims", "padded"), [((8, 8), (64, 64)), ((72, 64), (96, 96)), ((128, 64), (128, 128)), ((192, 128), (192, 128))]
)
def test_head_dims_are_padded(dims: tuple[int, int], padded: tuple[int, int]) -> None:
    assert padded_head_dims(*dims) == padded


@pytest.mark.parametrize("dims", [(0, 64), (12, 64), (64, 12), (264, 64)])
def test_other_head_dims_are_refused(dims: tuple[int, int]) -> None:
    with pytest.raises(PlanError, match=f"head_dim and value_dim are {dims[0]} and {dims[1]}"):
        padded_head_dims(*dims)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": jnp.float32}, "not float32"),
        ({"bias": jnp.zeros((1, 1, 8, 8), jnp.bfloat16)}, "no bias"),
        ({"scale": -1.0}, "positive scale"),
    ],
)
def test_refusals_say_the_remedy(options: dict[str, Any], message: str) -> None:
    query = jnp.zeros((1, 8, 2, 64), options.pop("dtype", jnp.bfloat16))
    call = arguments.read_call(query, query, query, **options)
    reason = wrapper.why_not(call.problem)
    assert reason is not None
    assert message in reason
    assert reason.endswith("Pass implementation='blockwise'.")


def test_empty_problems_need_no_kernel() -> None:
    query, key = jnp.zeros((2, 5, 2, 64), jnp.bfloat16), jnp.zeros((2, 0, 2, 64), jnp.bfloat16)
    call = arguments.read_call(query, key, key)
    lse = jnp.zeros(query.shape[:3])
    found = wrapper.blackwell_backward(*call[:2], query, lse, query, lse)
    assert [one.shape for one in found[:3]] == [query.shape, key.shape, key.shape]  # type: ignore[union-attr]
