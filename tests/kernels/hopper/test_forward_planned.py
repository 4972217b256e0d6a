"""Plans of packed documents with the Hopper kernel's work tables, on the emulated GPU, against float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fa4
from jax_fa4 import arguments, emulator
from tests.kernels.forward_checks import compare, draw

pytestmark = pytest.mark.usefixtures("hopper")

LENGTH, HEADS, HEAD_DIM = 300, (4, 2), 64


def packed_ids() -> np.ndarray:
    """Documents and padding; in the second row they are interleaved."""
    ids = np.repeat([[0, 4, 2, -1], [1, 0, 1, 2]], [70, 150, 60, 20], axis=1).astype(np.int32)
    ids[1, ::7] = 2
    return ids


@pytest.mark.parametrize("heads", [None, HEADS], ids=["no tables", "tables"])
@pytest.mark.parametrize("kind", ["known", "traced"])
def test_plans_in_the_kernel(kind: str, heads: tuple[int, int] | None) -> None:
    tensors = draw(20, (2, LENGTH, HEADS[0], HEAD_DIM), LENGTH, HEADS[1], "bfloat16")
    options: dict[str, Any] = {"is_causal": True, "implementation": "emulated"}
    ids = packed_ids() if kind == "known" else jnp.asarray(packed_ids())
    shape = {} if heads is None else {"heads": heads, "head_dim": HEAD_DIM}
    plan = jax_fa4.plan_segments(ids, **shape, **options)
    assert (plan.forward_items is None) == (heads is None)
    run = jax.jit(lambda *x: jax_fa4.attention(*x[:3], segment_ids=x[3], return_residual=True, **options))
    out, lse = run(*tensors, plan)
    compare(arguments.read_call(*tensors, is_causal=True, segment_ids=packed_ids()), out, lse)


def test_explain_has_the_exact_schedule() -> None:
    shapes = [jax.ShapeDtypeStruct((2, LENGTH, heads, HEAD_DIM), jnp.bfloat16) for heads in (4, 2, 2)]
    options: dict[str, Any] = {"is_causal": True, "implementation": "emulated"}
    known = jax_fa4.explain(*shapes, segment_ids=jax_fa4.plan_segments(packed_ids(), is_causal=True), **options)
    assert "clocks, of which work is" in str(known)
    traced = jax_fa4.plan_segments(jnp.asarray(packed_ids()), is_causal=True)
    assert "ordered when the call runs" in str(jax_fa4.explain(*shapes, segment_ids=traced, **options))


@pytest.mark.parametrize("implementation", ["emulated", "blockwise"])
def test_gradients_by_a_plan_are_those_by_ids(implementation: str) -> None:
    """The backward's table comes from the plan too; nothing is sorted but for the plan itself."""
    tensors = draw(21, (2, LENGTH, HEADS[0], HEAD_DIM), LENGTH, HEADS[1], "bfloat16")
    options: dict[str, Any] = {"is_causal": True, "implementation": implementation}
    ids = jnp.asarray(packed_ids())

    def loss(*arguments: Any) -> jax.Array:
        *tensors, held = arguments
        out = jax_fa4.attention(*tensors, segment_ids=held, **options)
        return (out.astype(jnp.float32) * jnp.cos(jnp.arange(out.size).reshape(out.shape))).sum()

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    plan = jax_fa4.plan_segments(ids, heads=HEADS, head_dim=HEAD_DIM, **options)
    assert (plan.backward_items is None) == (implementation == "blockwise")
    for planned, raw in zip(gradient(*tensors, plan), gradient(*tensors, ids), strict=True):
        difference = jnp.abs(planned.astype(jnp.float32) - raw.astype(jnp.float32)).max()
        assert difference <= 2.0**-7 * jnp.abs(raw).max()  # sums of query gradients come in any order


def test_two_kernels_plan_a_mask_and_none_sorts() -> None:
    """A model's layers then launch one more each, which copies tiles that hold padding."""
    tensors = draw(23, (2, LENGTH, HEADS[0], HEAD_DIM), LENGTH, HEADS[1], "bfloat16")
    options: dict[str, Any] = {"is_causal": True, "implementation": "emulated"}

    @jax.jit
    def run(ids: jax.Array, *tensors: jax.Array) -> list[jax.Array]:
        plan = jax_fa4.plan_segments(ids, heads=HEADS, head_dim=HEAD_DIM, **options)
        return [jax_fa4.attention(*tensors, segment_ids=plan, **options) for _ in range(2)]

    ids = jnp.asarray(packed_ids())
    assert "sort(" not in run.lower(ids, *tensors).compile().as_text()
    emulator.statistics()
    jax.block_until_ready(run(ids, *tensors))
    names = [one["kernel"].split("kernels", 1)[1] for one in emulator.statistics()]
    kinds = ("plan_rows", "plan_order", "hide_rows", "hopperforward")
    assert [sum(kind in name for name in names) for kind in kinds] in ([1, 1, 1, 1], [1, 1, 1, 2], [1, 1, 2, 2])


def test_tables_of_another_device_are_refused() -> None:
    tensors = draw(22, (2, LENGTH, HEADS[0], HEAD_DIM), LENGTH, HEADS[1], "bfloat16")
    shape: dict[str, Any] = {"heads": HEADS, "head_dim": HEAD_DIM}
    with jax_fa4.target("sm_100"):
        plan = jax_fa4.plan_segments(jnp.asarray(packed_ids()), implementation="emulated", **shape)
    with pytest.raises(ValueError, match="Make the plan for the same device"):
        jax_fa4.attention(*tensors, segment_ids=plan, implementation="emulated")
