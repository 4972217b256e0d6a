"""The Blackwell forward's plans and what it refuses; nothing here needs a GPU or a compiler."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fa4
from jax_fa4 import arguments
from jax_fa4.ffi import blackwell_forward as wrapper
from jax_fa4.ffi import launch
from jax_fa4.ffi.launch import LaunchError
from jax_fa4.kernels import attention, bundle
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


@pytest.mark.parametrize(("target", "architecture"), [("sm_100", "sm_100f"), ("sm_103", "sm_103a")])
def test_calls_are_lowered_and_exported_without_a_gpu(target: str, architecture: str) -> None:
    """For a machine that has one: the program names the kernel's binary by its content."""
    query, key = jnp.zeros((1, 300, 4, 128), jnp.bfloat16), jnp.zeros((1, 400, 2, 128), jnp.bfloat16)
    with jax_fa4.target(target) as chosen:
        found = attention.architecture_of(chosen)
        assert found is not None
        assert found.name == architecture
        call = arguments.read_call(query, key, key, is_causal=True)

        def forward(operands: Any) -> Any:
            return attention.kernels_of(chosen).forward(call.problem, operands, driver=launch.CUDA_DRIVER)

        plan = wrapper.plan_of(call.problem, architecture)
        if bundle.why_unavailable(plan) is not None:
            pytest.skip("needs the kernel's binary")
        checks = [jax.export.DisabledSafetyCheck.custom_call(launch.TARGET)]
        exported = jax.export.export(jax.jit(forward), platforms=["cuda"], disabled_checks=checks)(call.operands)
    text = exported.mlir_module()
    assert launch.TARGET in text
    assert bundle.find(plan).content_hash in text
    assert [one.shape for one in exported.out_avals] == [(1, 300, 4, 128), (1, 300, 4)]


def test_explained_without_a_gpu() -> None:
    query = jnp.zeros((1, 2048, 4, 128), jnp.bfloat16)
    with jax_fa4.target("sm_100"):
        dense = str(jax_fa4.explain(query, query, query, implementation="emulated"))
        causal = str(jax_fa4.explain(query, query, query, implementation="emulated", is_causal=True))
        short = jnp.zeros((16, 512, 16, 64), jnp.bfloat16)
        many = str(jax_fa4.explain(short, short, short, implementation="emulated"))
    assert "512 queries x 128 keys" in dense
    assert "256 queries x 128 keys" in causal
    assert "one item a CTA" in dense
    assert "persistent, every 148th item" in many
    assert "not yet run on Blackwell silicon" in causal
