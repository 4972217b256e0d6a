"""The Blackwell backward's plans, its order of products, and what it refuses; nothing here needs a compiler."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from docs import build_sass
from jax_fa4 import arguments
from jax_fa4.ffi import blackwell_backward as wrapper
from jax_fa4.kernels import bundle
from jax_fa4.kernels.blackwell.backward_plans import (
    BACKWARD_DTYPES,
    BACKWARD_TILES,
    MASKS,
    backward_plan,
    padded_head_dims,
)
from jax_fa4.kernels.blackwell.product_order import ORDERS, after_loop, before_loop
from jax_fa4.kernels.plan import PlanError
from jax_fa4.problem import AttentionProblem


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


def problem_of(batch: int, heads: int, kv_heads: int, length: int, head_dim: int, **options: Any) -> AttentionProblem:
    query, key = (jax.ShapeDtypeStruct((batch, length, n, head_dim), jnp.bfloat16) for n in (heads, kv_heads))
    found: list[AttentionProblem] = []
    jax.eval_shape(lambda *two: found.append(arguments.read_call(*two, two[1], **options).problem), query, key)
    return found[0]


@pytest.mark.parametrize(
    ("problem", "splits"),
    [
        (problem_of(1, 8, 8, 256, 128), 1),  # no groups
        (problem_of(1, 32, 4, 256, 128), 8),  # 4 items for 74 pairs: whatever there is
        (problem_of(1, 32, 4, 2560, 128), 2),  # 40 items: twice as many give each pair one
        (problem_of(1, 32, 4, 8192, 128), 1),  # 128 items
        (problem_of(1, 32, 4, 2560, 64), 2),  # 80 items for 148 multiprocessors
        (problem_of(2, 12, 4, 1024, 64), 3),  # 64 items; groups of 3
    ],
)
def test_groups_are_split_where_there_are_few_items(problem: AttentionProblem, splits: int) -> None:
    assert wrapper.splits_of(problem) == splits
    plan = wrapper.plan_of(problem)
    assert plan.option("split") == (splits > 1)
    grads = [one.element for one in plan.tensor_maps if one.name.startswith("grad_") and one.name != "grad_out"]
    assert grads.count("float32") == (3 if splits > 1 else 1)  # of the query always
    assert wrapper.grid_of(problem).heads == problem.kv_heads * splits


def test_without_its_kernel_no_group_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wrapper.bundle, "why_unavailable", lambda plan: "no" if plan.option("split") else None)
    assert wrapper.splits_of(problem_of(1, 32, 4, 256, 128)) == 1


@pytest.mark.parametrize(
    ("options", "last_first"),
    [
        ({"deterministic": True, "is_causal": True}, True),
        ({"deterministic": True, "local_window_size": (0, None)}, False),  # late keys are seen by most
        ({"is_causal": True}, False),  # without an order the longest come first
    ],
)
def test_the_order_of_adding_is_chosen_by_what_it_costs(options: dict[str, Any], last_first: bool) -> None:
    assert wrapper.is_last_first(problem_of(2, 8, 8, 2048, 128, **options)) is last_first


@pytest.mark.slow
@pytest.mark.parametrize("dtype", BACKWARD_DTYPES)
@pytest.mark.parametrize("dims", BACKWARD_TILES, ids=str)
def test_no_kernel_has_a_stack(dims: tuple[int, int], dtype: str) -> None:
    """Of all options, in the wheel or not."""
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    if build_sass.tool("nvdisasm") is None or build_sass.tool("cuobjdump") is None:
        pytest.skip("needs nvdisasm and cuobjdump")
    for mask, cap, ordered, split in itertools.product(MASKS, *[(False, True)] * 3):
        plan = backward_plan(dtype, dims, mask, soft_cap=cap, ordered=ordered, split=split)
        found = build_sass.read(plan, bundle.find(plan).cubin)
        assert (found.stack, sum(loop.counts["local"] for loop in found.loops.values())) == (0, 0), plan.key


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
