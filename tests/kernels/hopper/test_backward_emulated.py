"""The Hopper backward on the emulated GPU against float64: every option, at sizes that take a second or less.

The emulator reports what nothing orders, reads of what nobody wrote, and copies left at exit; a report fails the call.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fa4
from jax_fa4 import arguments, emulator
from jax_fa4.kernels import build
from tests.kernels.forward_checks import draw, seen_rows
from tests.kernels.gradient_checks import check_gradients

pytestmark = pytest.mark.usefixtures("hopper")
needs_compiler = pytest.mark.skipif(
    build.compiler_version() is None, reason="the wheel has no kernels with soft cap or sinks; nvidia-cutlass-dsl does"
)


def gradients(tensors: Any, cotangents: Any, implementation: str = "emulated", **options: Any) -> Any:
    """Cotangents of query, key and value by the public function, inside jit."""

    def run(tensors: Any, cotangents: Any) -> Any:
        def function(*tensors: jax.Array) -> Any:
            return jax_fa4.attention(*tensors, return_residual=True, implementation=implementation, **options)

        return jax.vjp(function, *tensors)[1](cotangents)

    return jax.jit(run)(tensors, cotangents)


def check(tensors: Any, implementation: str = "emulated", **options: Any) -> None:
    """Against float64; cotangents of rows that see nothing are NaN."""
    call = arguments.read_call(*tensors, **options)
    query, _, value = tensors
    rng = np.random.default_rng(query.shape[1])
    shape = query.shape[:3]
    has_seen = np.broadcast_to(seen_rows(call), shape)
    grad_out = np.where(has_seen[..., None], rng.standard_normal((*shape, value.shape[-1])), np.nan)
    grad_lse = np.where(has_seen, rng.standard_normal(shape), np.nan)
    cotangents = jnp.asarray(grad_out, query.dtype), jnp.asarray(grad_lse, jnp.float32)
    check_gradients(gradients(tensors, cotangents, implementation, **options), call, *cotangents)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_grouped_heads_over_several_tiles(dtype: str, head_dim: int) -> None:
    check(draw(head_dim, (2, 200, 2, head_dim), 300, 1, dtype), is_causal=True, causal_alignment="bottom_right")


@pytest.mark.parametrize("lengths", [(1, 1), (1, 300), (300, 1), (65, 129), (130, 128), (200, 81)], ids=str)
@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_lengths_that_divide_nothing(lengths: tuple[int, int], alignment: str, is_causal: bool) -> None:
    tensors = draw(sum(lengths), (1, lengths[0], 2, 64), lengths[1], 2, "bfloat16")
    check(tensors, is_causal=is_causal, causal_alignment=alignment)


@pytest.mark.parametrize(("head_dim", "value_dim"), [(8, 8), (40, 40), (72, 72), (104, 104), (64, 48), (72, 128)])
def test_dims_that_are_padded(head_dim: int, value_dim: int) -> None:
    check(draw(2, (1, 100, 3, head_dim), 150, 1, "bfloat16", value_dim=value_dim), is_causal=True)


@pytest.mark.parametrize("window", [(0, 0), (30, 0), (100, 57), (5, None), (None, 9), (300, 300)], ids=str)
@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
def test_windows(window: tuple[int | None, int | None], alignment: str) -> None:
    tensors = draw(4, (1, 210, 2, 64), 260, 1, "bfloat16")
    check(tensors, local_window_size=window, causal_alignment=alignment)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("concrete", [True, False], ids=["known", "traced"])
def test_packed_segments(concrete: bool, deterministic: bool) -> None:
    """Documents with padding at the end, whose rows hold NaN."""
    ids = np.sort(np.random.default_rng(5).integers(0, 6, (2, 260)), axis=-1).astype(np.int32)
    ids[0, 200:] = -1
    tensors = tuple(one.at[0, 200:].set(jnp.nan) for one in draw(5, (2, 260, 2, 64), 260, 1, "bfloat16"))
    check(tensors, is_causal=True, segment_ids=ids if concrete else jnp.asarray(ids), deterministic=deterministic)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("concrete", [True, False], ids=["known", "traced"])
def test_segments_in_any_order(concrete: bool, deterministic: bool) -> None:
    """Interleaved documents, other ids for queries than for keys, padding between; a window on top."""
    rng = np.random.default_rng(6)
    ids = tuple(rng.integers(-1, 4, (2, length)).astype(np.int32) for length in (150, 230))
    ids[0][0], ids[1][0] = np.sort(ids[0][0]), np.sort(ids[1][0])
    tensors = draw(6, (2, 150, 2, 64), 230, 2, "bfloat16")
    given = ids if concrete else tuple(jnp.asarray(one) for one in ids)
    check(
        tensors,
        segment_ids=given,
        local_window_size=(100, 40),
        causal_alignment="bottom_right",
        deterministic=deterministic,
    )


def test_lengths_hide_what_lies_behind_them() -> None:
    query, key, value = draw(7, (4, 100, 2, 64), 150, 1, "bfloat16")
    key_lengths, query_lengths = np.array([150, 0, 1, 77]), np.array([0, 100, 1, 99])
    for row in range(4):
        key = key.at[row, key_lengths[row] :].set(jnp.nan)
        value = value.at[row, key_lengths[row] :].set(jnp.inf)
        query = query.at[row, query_lengths[row] :].set(jnp.nan)
    options = {"key_value_seq_lengths": key_lengths, "query_seq_lengths": query_lengths}
    check((query, key, value), is_causal=True, **options)


@needs_compiler
def test_soft_cap_and_sinks() -> None:
    tensors = draw(8, (2, 100, 4, 64), 150, 2, "bfloat16", 4.0)
    sinks = jnp.asarray([-3.0, 0.0, 9.0, 60.0])
    check(tensors, is_causal=True, logits_soft_cap=5.0)
    check(tensors, is_causal=True, sinks=sinks)
    check(tensors, key_value_seq_lengths=np.array([150, 0]), sinks=sinks, logits_soft_cap=20.0)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"local_window_size": (150, 10)}], ids=str)
def test_ordered_sums(options: dict[str, Any]) -> None:
    """Items wait for each other in the order that their ranks say; one that was wrong would wait for ever."""
    check(draw(9, (2, 330, 4, 64), 400, 2, "bfloat16"), deterministic=True, **options)


@pytest.mark.parametrize("spread", [0.0, 30.0])
def test_scores_of_every_size(spread: float) -> None:
    check(draw(3, (1, 130, 2, 128), 200, 2, "bfloat16", spread))


@pytest.mark.parametrize("completion", ["random", "eager", "lazy"])
@pytest.mark.parametrize("seed", [1, 2])
def test_every_order_of_events_gives_the_same_bits(completion: str, seed: int) -> None:
    """Copies and products complete at other moments, warps run in other orders: nothing may depend on it."""
    tensors = draw(10, (1, 385, 2, 64), 300, 1, "bfloat16")
    cotangents = jnp.ones((1, 385, 2, 64), jnp.bfloat16), jnp.ones((1, 385, 2), jnp.float32)
    options = {"is_causal": True, "deterministic": True}
    emulator.set_options(seed=0, completion="random")
    expected = gradients(tensors, cotangents, **options)
    emulator.set_options(seed=seed, completion=completion)
    for one, other in zip(gradients(tensors, cotangents, **options), expected, strict=True):
        np.testing.assert_array_equal(np.asarray(one).view(np.uint16), np.asarray(other).view(np.uint16))
