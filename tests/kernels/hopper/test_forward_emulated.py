"""The Hopper forward on the emulated GPU against float64: every option, at sizes that take a fraction of a second.

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
from jax_fa4.ffi import launch
from jax_fa4.ffi.hopper_forward import hopper_forward
from jax_fa4.kernels import build
from tests.kernels.forward_checks import compare, draw

pytestmark = pytest.mark.usefixtures("hopper")
needs_compiler = pytest.mark.skipif(
    build.compiler_version() is None, reason="the wheel has no kernels with soft cap or sinks; nvidia-cutlass-dsl does"
)


def check(tensors: Any, **options: Any) -> None:
    """The public function, inside jit, against float64."""

    def run(*tensors: jax.Array) -> Any:
        return jax_fa4.attention(*tensors, return_residual=True, implementation="emulated", **options)

    out, lse = jax.jit(run)(*tensors)
    compare(arguments.read_call(*tensors, **options), out, lse)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_grouped_heads_over_several_tiles(dtype: str, head_dim: int) -> None:
    """Three query tiles of 192, the last of one row; rings of keys go round more than once."""
    check(draw(head_dim, (2, 385, 2, head_dim), 450, 1, dtype), is_causal=True, causal_alignment="bottom_right")


@pytest.mark.parametrize("lengths", [(1, 1), (1, 300), (300, 1), (65, 79), (64, 192), (193, 80), (200, 81)], ids=str)
@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_lengths_that_divide_nothing(lengths: tuple[int, int], alignment: str, is_causal: bool) -> None:
    """Dao-AILab/flash-attention #1778, jax-ml/jax #24491: T and S differ, in either direction and alignment."""
    tensors = draw(sum(lengths), (1, lengths[0], 2, 128), lengths[1], 2, "bfloat16")
    check(tensors, is_causal=is_causal, causal_alignment=alignment)


@pytest.mark.parametrize(("head_dim", "value_dim"), [(8, 8), (40, 40), (72, 72), (104, 104), (64, 48), (72, 128)])
def test_dims_that_are_padded(head_dim: int, value_dim: int) -> None:
    check(draw(2, (1, 100, 3, head_dim), 150, 1, "bfloat16", value_dim=value_dim), is_causal=True)


def test_ids_of_keys_past_the_last_that_is_seen() -> None:
    """The kernel leaves such keys out; the ids of the next batch row must not move."""
    ids = [np.random.default_rng(12).integers(0, 4, (2, length)).astype(np.int32) for length in (100, 103)]
    check(draw(12, (2, 100, 2, 64), 103, 1, "bfloat16"), segment_ids=tuple(ids), is_causal=True)


@pytest.mark.parametrize("window", [(0, 0), (30, 0), (100, 57), (5, None), (None, 9), (300, 300)], ids=str)
@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
def test_windows(window: tuple[int | None, int | None], alignment: str) -> None:
    """jax-ml/jax PR #39576: each side by itself, with T != S, causal or not."""
    tensors = draw(4, (1, 210, 2, 64), 260, 1, "bfloat16")
    check(tensors, local_window_size=window, causal_alignment=alignment)
    check(tensors, local_window_size=window, causal_alignment=alignment, is_causal=True)


@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
@pytest.mark.parametrize("window", [(20, 0), (None, 0), (0, 3)], ids=str)
def test_keys_that_no_window_shows_may_hold_nan(window: tuple[int | None, int], alignment: str) -> None:
    query, key, value = draw(5, (1, 70, 2, 64), 200, 2, "bfloat16")
    offset = 130 if alignment == "bottom_right" else 0
    first = 0 if window[0] is None else max(offset - window[0], 0)
    last = 70 + offset + window[1]
    hidden = np.r_[0:first, last:200]
    key, value = (one.at[:, hidden].set(bad) for one, bad in ((key, jnp.inf), (value, jnp.nan)))
    check((query, key, value), local_window_size=window, causal_alignment=alignment)


@pytest.mark.parametrize("concrete", [True, False], ids=["known", "traced"])
def test_lengths_hide_what_lies_behind_them(concrete: bool) -> None:
    """Each of the two by itself, 0 and 1 among them; NaN and inf in all that must not be read."""
    query, key, value = draw(7, (4, 100, 2, 64), 150, 1, "bfloat16")
    as_given = np.asarray if concrete else jnp.asarray
    key_lengths, query_lengths = (as_given(one, np.int32) for one in ([150, 0, 1, 77], [0, 100, 1, 99]))
    for row, length in enumerate(np.asarray(key_lengths)):
        key, value = key.at[row, length:].set(jnp.nan), value.at[row, length:].set(jnp.inf)
    check((query, key, value), key_value_seq_lengths=key_lengths)
    for row, length in enumerate(np.asarray(query_lengths)):
        query = query.at[row, length:].set(jnp.nan)
    check((query, key, value), key_value_seq_lengths=key_lengths, query_seq_lengths=query_lengths, is_causal=True)
    key, value = (jnp.nan_to_num(one, posinf=0.0) for one in (key, value))
    check((query, key, value), query_seq_lengths=query_lengths)


@pytest.mark.parametrize("concrete", [True, False], ids=["known", "traced"])
@pytest.mark.parametrize("is_causal", [True, False])
def test_packed_segments(concrete: bool, is_causal: bool) -> None:
    ids = np.sort(np.random.default_rng(5).integers(0, 6, (3, 260)), axis=-1).astype(np.int32)
    ids[0, 200:] = -1
    query, key, value = draw(5, (3, 260, 2, 64), 260, 1, "bfloat16")
    query, key, value = (one.at[0, 200:].set(jnp.nan) for one in (query, key, value))
    check((query, key, value), is_causal=is_causal, segment_ids=ids if concrete else jnp.asarray(ids))


@pytest.mark.parametrize("concrete", [True, False], ids=["known", "traced"])
def test_segments_in_any_order(concrete: bool) -> None:
    """Interleaved documents, other ids for queries than for keys, padding between; a window on top."""
    rng = np.random.default_rng(6)
    ids = tuple(rng.integers(-1, 4, (2, length)).astype(np.int32) for length in (150, 230))
    ids[0][0], ids[1][0] = np.sort(ids[0][0]), np.sort(ids[1][0])
    tensors = draw(6, (2, 150, 2, 64), 230, 2, "bfloat16")
    given = ids if concrete else tuple(jnp.asarray(one) for one in ids)
    check(tensors, segment_ids=given)
    check(tensors, segment_ids=given, local_window_size=(100, 40), causal_alignment="bottom_right")


@pytest.mark.parametrize(
    ("length", "options"),
    [
        (1, {}),
        (1, {"is_causal": True, "causal_alignment": "bottom_right"}),
        (5, {"is_causal": True, "causal_alignment": "bottom_right"}),
        (5, {"local_window_size": (30, 2), "causal_alignment": "bottom_right"}),
        (3, {"key_value_seq_lengths": np.arange(17) * 6, "query_seq_lengths": np.arange(17) % 4}),
        (3, {"key_value_seq_lengths": jnp.arange(17) * 6}),
        (4, {"segment_ids": (np.arange(68).reshape(17, 4) % 3, np.arange(17 * 100).reshape(17, 100) % 4 - 1)}),
    ],
    ids=["one", "one at the end", "causal", "window", "lengths", "traced lengths", "ids"],
)
def test_few_queries_of_a_group_share_a_tile(length: int, options: dict[str, Any]) -> None:
    """A step of decoding: 16 query heads over 2, in fewer waves of items than one for each query head."""
    emulator.statistics()
    check(draw(12, (17, length, 16, 64), 100, 2, "bfloat16"), **options)
    assert emulator.statistics()[-1]["grid"] == [34, 1, 1]  # after kernels that prepare the mask


@pytest.mark.parametrize("options", [{}, {"key_value_seq_lengths": jnp.array([70, 9])}], ids=["none", "traced lengths"])
@pytest.mark.parametrize(("length", "heads"), [(1, (6, 2)), (3, (6, 1)), (3, (6, 2)), (50, (6, 2))], ids=str)
def test_packed_heads(length: int, heads: tuple[int, int], options: dict[str, Any]) -> None:
    """Read and written by strides where there is one query or one KV head, else turned; more rows than a tile has."""
    tensors = draw(13, (2, length, heads[0], 64), 90, heads[1], "bfloat16")
    call, driver = arguments.read_call(*tensors, **options), launch.emulated_driver((9, 0))
    out, lse = jax.jit(lambda operands: hopper_forward(call.problem, operands, packed=True, driver=driver))(
        call.operands
    )
    compare(call, out, lse)


@needs_compiler
def test_soft_cap_and_sinks() -> None:
    tensors = draw(8, (2, 100, 4, 64), 150, 2, "bfloat16", 4.0)
    lengths = np.array([150, 0])
    sinks = jnp.asarray([-3.0, 0.0, 9.0, 60.0])
    check(tensors, is_causal=True, logits_soft_cap=5.0)
    check(tensors, is_causal=True, sinks=sinks)
    check(tensors, key_value_seq_lengths=lengths, sinks=sinks, logits_soft_cap=20.0)
    ids = np.tile(np.arange(100) % 3, (2, 1)), np.tile(np.arange(150) // 50 - 1, (2, 1))
    check(tensors, segment_ids=ids, sinks=sinks)


@pytest.mark.parametrize("spread", [0.0, 30.0, 1000.0])
def test_scores_of_every_size(spread: float) -> None:
    check(draw(3, (1, 130, 2, 128), 400, 2, "bfloat16", spread))


@pytest.mark.parametrize("kind", ["large mean", "outliers", "constant", "huge", "rising"])
def test_inputs_that_are_not_gaussian(kind: str) -> None:
    """Large means cancel in the maximum, outliers force rescaling late, rising keys force it in every step."""
    rng = np.random.default_rng(9)
    query, key, value = (np.asarray(one, np.float32) for one in draw(9, (1, 130, 2, 64), 400, 1, "float16"))
    if kind == "large mean":
        query, key, value = query + 3, key + 3, value + 100
    elif kind == "outliers":
        for one in (query, key, value):
            one[..., rng.integers(0, 64, 2)] *= 50
    elif kind == "constant":
        query, key, value = (np.full_like(one, 0.5) for one in (query, key, value))
    elif kind == "huge":
        value = np.where(rng.random(value.shape) < 0.5, 1e4, -1e4).astype(np.float32)
    else:
        query, key = np.abs(query), np.abs(key) * np.linspace(0, 20, 400)[None, :, None, None]
    check(tuple(jnp.asarray(one, "float16") for one in (query, key, value)), scale=0.125)


@pytest.mark.parametrize("completion", ["random", "eager", "lazy"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_every_order_of_events_gives_the_same_bits(completion: str, seed: int) -> None:
    """Copies and products complete at other moments, warps run in other orders: nothing may depend on it."""
    tensors = draw(10, (1, 385, 1, 64), 600, 1, "bfloat16")
    run = jax.jit(lambda *one: jax_fa4.attention(*one, is_causal=True, implementation="emulated"))
    emulator.set_options(seed=0, completion="random")
    expected = np.asarray(run(*tensors)).view(np.uint16)
    emulator.set_options(seed=seed, completion=completion)
    np.testing.assert_array_equal(np.asarray(run(*tensors)).view(np.uint16), expected)
