"""The Blackwell backward in the emulator against float64, with the race checks on.

No Blackwell GPU has run it. The sample here takes seconds; the grid, every option with every head dimension under
several seeds and orders of completion, is marked slow.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jax_fa4 import arguments, emulator
from jax_fa4.ffi import launch
from jax_fa4.ffi.blackwell_backward import blackwell_backward
from jax_fa4.kernels.blackwell.backward_plans import SINGLE_128
from tests.kernels.forward_checks import draw, in_float64
from tests.kernels.gradient_checks import check_gradients

pytest.importorskip("cutlass", reason="not all of these kernels are in the wheel; nvidia-cutlass-dsl builds them")
pytestmark = pytest.mark.usefixtures("blackwell")

IDS = np.random.default_rng(6).integers(0, 4, (2, 300)).astype(np.int32)


def gradients(
    tensors: Any,
    seed: int = 0,
    completion: str = "random",
    tiles: Any = None,
    grads_seed: int | None = None,
    **options: Any,
) -> tuple[Any, ...]:
    """Cotangents by the kernel, from the exact output and log-sum-exp; the call; the cotangents that it was given."""
    emulator.set_options(seed=seed, completion=completion)
    call = arguments.read_call(*tensors, **options)
    out, lse = in_float64(call)
    rng = np.random.default_rng(100 + (seed if grads_seed is None else grads_seed))
    grad_out = jnp.asarray(rng.standard_normal(out.shape), call.problem.dtype)
    grad_lse = jnp.asarray(rng.standard_normal(lse.shape), jnp.float32)
    driver = launch.emulated_driver((10, 0))
    results = jnp.asarray(out, call.problem.dtype), jnp.asarray(lse, jnp.float32)
    grads = grad_out, grad_lse
    found = blackwell_backward(call.problem, call.operands, *results, *grads, tiles=tiles, driver=driver)
    return found[:3], call, grad_out, grad_lse


def check(tensors: Any, seed: int = 0, completion: str = "random", tiles: Any = None, **options: Any) -> None:
    check_gradients(*gradients(tensors, seed, completion, tiles, **options))


@pytest.mark.parametrize("completion", ["random", "eager", "lazy"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_pipeline_under_every_order(head_dim: int, completion: str) -> None:
    tensors = draw(1, (1, 384, 2, head_dim), 256, 1, "bfloat16")
    for seed in range(2):
        check(tensors, seed, completion, is_causal=True, causal_alignment="bottom_right")


@pytest.mark.parametrize("completion", ["random", "lazy"])
def test_one_cta_to_an_item_where_a_pair_is_usual(completion: str) -> None:
    check(draw(4, (1, 300, 2, 128), 200, 1, "bfloat16"), 1, completion, tiles=SINGLE_128, is_causal=True)


@pytest.mark.parametrize(
    ("query_length", "key_length", "is_causal"), [(1, 1, False), (129, 300, True), (300, 129, True), (2, 257, False)]
)
def test_shapes(query_length: int, key_length: int, is_causal: bool) -> None:
    check(draw(2, (2, query_length, 2, 128), key_length, 1, "bfloat16"), is_causal=is_causal)


@pytest.mark.parametrize(
    ("head_dim", "options"), [(64, {"is_causal": True}), (128, {"key_value_seq_lengths": np.array([200, 300])})]
)
def test_deterministic_gradients_are_bitwise_equal(head_dim: int, options: dict[str, Any]) -> None:
    """Over seeds, that is orders of CTAs and of completion; without an order they are not, in some seed."""
    tensors = draw(5, (2, 300, 2, head_dim), 300, 1, "bfloat16")
    results = {True: set(), False: set()}  # type: ignore[var-annotated]
    for is_ordered, found in results.items():
        for seed in range(3):
            gradients_of = gradients(tensors, seed, grads_seed=0, deterministic=is_ordered, **options)
            check_gradients(*gradients_of)
            found.add(b"".join(np.asarray(one).tobytes() for one in gradients_of[0]))
    assert len(results[True]) == 1
    assert head_dim == 128 or len(results[False]) > 1  # two items of 256 keys: either order gives the same sum


@pytest.mark.parametrize("outlier", [0.0, 20.0])
def test_channels_that_stand_out(outlier: float) -> None:
    query, key, value = draw(3, (2, 256, 2, 64), 300, 1, "bfloat16")
    check((query.at[..., 3].multiply(outlier), key.at[..., 5].multiply(outlier), value))


def test_lengths_hide_nan() -> None:
    query, key, value = draw(7, (2, 200, 2, 64), 200, 2, "bfloat16")
    poisoned = query.at[0].set(jnp.nan), key.at[1, 150:].set(jnp.nan), value.at[1, 150:].set(jnp.nan)
    options = {"key_value_seq_lengths": np.array([200, 150]), "query_seq_lengths": np.array([0, 199])}
    check(poisoned, **options)


@pytest.mark.parametrize("is_sorted", [True, False])
def test_segments(is_sorted: bool) -> None:
    ids = np.sort(IDS, axis=-1) if is_sorted else IDS
    check(draw(6, (2, 300, 2, 64), 300, 1, "bfloat16"), segment_ids=ids, is_causal=is_sorted)


DIMS = {64: None, 40: None, 72: None, 128: None, 192: 128}
OPTIONS: dict[str, dict[str, Any]] = {
    "dense": {},
    "causal": {"is_causal": True},
    "bottom right": {"is_causal": True, "causal_alignment": "bottom_right"},
    "window": {"local_window_size": (100, 30)},
    "cap": {"logits_soft_cap": 3.0, "is_causal": True},
    "lengths": {"key_value_seq_lengths": np.array([0, 129]), "query_seq_lengths": np.array([5, 300])},
    "traced lengths": {"key_value_seq_lengths": jnp.array([300, 1])},
    "ids": {"segment_ids": IDS, "is_causal": True},
    "sorted ids": {"segment_ids": np.sort(IDS, axis=-1)},
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("head_dim", DIMS)
def test_grid(head_dim: int, option: str, dtype: str) -> None:
    for seed, completion in enumerate(("random", "eager", "lazy", "random")):
        lengths = (
            (300, 300)
            if "ids" in option or "lengths" in option
            else [(300, 300), (130, 300), (300, 129), (1, 260)][seed]
        )
        heads = [(2, 1), (1, 1), (4, 2), (3, 3)][seed]
        shape = (2, lengths[0], heads[0], head_dim)
        tensors = draw(seed, shape, lengths[1], heads[1], dtype, value_dim=DIMS[head_dim])
        check(tensors, seed, completion, **OPTIONS[option])
