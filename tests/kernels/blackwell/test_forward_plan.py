"""The Blackwell forward's plans and what it refuses; nothing here needs a GPU or a compiler."""

from __future__ import annotations

import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jax_fa4 import arguments
from jax_fa4.ffi import blackwell_forward as wrapper
from jax_fa4.ffi.launch import LaunchError
from jax_fa4.kernels.blackwell.geometry import emulated_pairs
from jax_fa4.kernels.blackwell.plans import FORWARD_DTYPES, FORWARD_TILES, MASKS, forward_plan, padded_head_dims
from jax_fa4.kernels.plan import KernelPlan, PlanError


def every_plan() -> list[KernelPlan]:
    options = itertools.product(FORWARD_DTYPES, FORWARD_TILES, MASKS, (False, True), (False, True))
    return [forward_plan(dtype, dims, mask, soft_cap=cap, sinks=sinks) for dtype, dims, mask, cap, sinks in options]


def test_every_plan_fits_the_device_and_has_its_own_key() -> None:
    plans = every_plan()
    assert len({plan.key for plan in plans}) == len({plan.digest for plan in plans}) == len(plans)
    for plan in plans:
        assert plan.threads == 512
        # setmaxnreg moves registers between warpgroups: the sum must be what the launch allots, 65536 / 512 a thread.
        assert sum((role.registers or 0) * role.warps for role in plan.roles) <= 128 * 16
        assert max(plan.event_offsets.values()) < plan.dynamic_shared_bytes


@pytest.mark.parametrize(("elements", "pairs"), [(0, (0, 0, 0, 0)), (16, (0, 4, 4, 0)), (44, (6, 8, 8, 0))])
def test_emulated_shares_are_spread_over_fragments(elements: int, pairs: tuple[int, ...]) -> None:
    assert emulated_pairs(elements) == pairs


@pytest.mark.parametrize("elements", [1, 66, -2])
def test_other_shares_are_refused(elements: int) -> None:
    with pytest.raises(ValueError, match=f"emulated is {elements}"):
        emulated_pairs(elements)


@pytest.mark.parametrize(("dims", "padded"), [((8, 8), (64, 64)), ((64, 64), (64, 64)), ((104, 128), (128, 128))])
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
    with pytest.raises(LaunchError):
        wrapper.blackwell_forward(call.problem, call.operands)


def test_empty_problems_need_no_kernel() -> None:
    query, key = jnp.zeros((2, 5, 2, 64), jnp.bfloat16), jnp.zeros((2, 0, 2, 64), jnp.bfloat16)
    out, lse = wrapper.blackwell_forward(*arguments.read_call(query, key, key)[:2])
    assert not np.asarray(out).any()
    assert (np.asarray(lse) == -np.inf).all()
