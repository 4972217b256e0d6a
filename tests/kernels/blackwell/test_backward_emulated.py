"""The Blackwell backward in the emulator against float64, with the race checks on.

No Blackwell GPU has run it. The sample here takes seconds; the grid, every option with every head dimension under
several seeds and orders of completion, is marked slow.
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
from jax_fa4.ffi.blackwell_backward import blackwell_backward
from jax_fa4.kernels.blackwell.backward_plans import SINGLE_TILES
from tests.kernels.forward_checks import draw, in_float64, in_plain_jax, seen_rows
from tests.kernels.gradient_checks import check_gradients

pytest.importorskip("cutlass", reason="not all of these kernels are in the wheel; nvidia-cutlass-dsl builds them")
pytestmark = pytest.mark.usefixtures("blackwell")

IDS = np.random.default_rng(6).integers(0, 4, (2, 300)).astype(np.int32)


def gradients(
    tensors: Any,
    seed: int = 0,
    completion: str = "random",
    kernel: dict[str, Any] | None = None,
    grads_seed: int | None = None,
    is_poisoned: bool = False,
    **options: Any,
) -> tuple[Any, ...]:
    """Cotangents by the kernel; the call; the cotangents that it was given.

    It is given the exact log-sum-exp and plain JAX's output, whose error both then have in delta: where a row sees one
    key and has a sink, that error is nearly all of the query gradient's.

    `kernel` holds what of `blackwell_backward` is not as it chooses. Poisoned are all rows of outputs and cotangents
    that see nothing.
    """
    # Items that wait for one that the emulator has not started yet, which it does when nothing happens for so long.
    stuck_after = 30_000 if options.get("deterministic") else 4_000_000
    emulator.set_options(seed=seed, completion=completion, stuck_after=stuck_after)
    call = arguments.read_call(*tensors, **options)
    lse, out = in_float64(call)[1], in_plain_jax(call)
    rng = np.random.default_rng(100 + (seed if grads_seed is None else grads_seed))
    grad_out = jnp.asarray(rng.standard_normal(out.shape), call.problem.dtype)
    grad_lse = jnp.asarray(rng.standard_normal(lse.shape), jnp.float32)
    driver = launch.emulated_driver((10, 0))
    results = jnp.asarray(out, call.problem.dtype), jnp.asarray(lse, jnp.float32)
    grads = grad_out, grad_lse
    if is_poisoned:
        hides = np.broadcast_to(~seen_rows(call), lse.shape)
        assert hides.any()
        results = jnp.where(hides[..., None], jnp.nan, results[0]), results[1]
        grads = jnp.where(hides[..., None], jnp.nan, grad_out), jnp.where(hides, jnp.nan, grad_lse)
    found = blackwell_backward(call.problem, call.operands, *results, *grads, driver=driver, **kernel or {})
    return found[:3], call, grad_out, grad_lse


def check(tensors: Any, seed: int = 0, completion: str = "random", **options: Any) -> None:
    check_gradients(*gradients(tensors, seed, completion, **options))


@pytest.mark.parametrize("completion", ["random", "eager", "lazy"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_pipeline_under_every_order(head_dim: int, completion: str) -> None:
    tensors = draw(1, (1, 384, 2, head_dim), 256, 1, "bfloat16")
    for seed in range(2):
        check(tensors, seed, completion, is_causal=True, causal_alignment="bottom_right")


@pytest.mark.parametrize("completion", ["random", "lazy"])
@pytest.mark.parametrize("dims", SINGLE_TILES, ids=str)
def test_one_cta_to_an_item_where_a_pair_is_usual(dims: tuple[int, int], completion: str) -> None:
    tensors = draw(4, (1, 300, 2, dims[0]), 200, 1, "bfloat16", value_dim=dims[1])
    check(tensors, 1, completion, kernel={"tiles": SINGLE_TILES[dims]}, is_causal=True)


@pytest.mark.parametrize("completion", ["random", "eager", "lazy"])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}], ids=str)
def test_pair_with_little_memory(options: dict[str, Any], completion: str) -> None:
    """At (192, 128), where rows and columns of queries take turns in one buffer."""
    tensors = draw(9, (1, 400, 2, 192), 300, 1, "bfloat16", value_dim=128)
    for seed in range(2):
        check(tensors, seed, completion, **options)


@pytest.mark.parametrize("splits", [1, 2, 4])
@pytest.mark.parametrize(("head_dim", "value_dim"), [(64, 64), (40, 96), (192, 128)])
def test_groups_are_walked_or_split(head_dim: int, value_dim: int, splits: int) -> None:
    """Four query heads to a KV head: in one item, in two of two heads, in four."""
    tensors = draw(8, (2, 200, 8, head_dim), 150, 2, "bfloat16", value_dim=value_dim)
    check(tensors, splits, kernel={"splits": splits}, is_causal=True, logits_soft_cap=4.0 if splits == 2 else None)


@pytest.mark.parametrize(
    ("query_length", "key_length", "is_causal"), [(1, 1, False), (129, 300, True), (300, 129, True), (2, 257, False)]
)
def test_shapes(query_length: int, key_length: int, is_causal: bool) -> None:
    check(draw(2, (2, query_length, 2, 128), key_length, 1, "bfloat16"), is_causal=is_causal)


@pytest.mark.parametrize(("head_dim", "options"), [(64, {}), (128, {"key_value_seq_lengths": np.array([300])})])
def test_deterministic_gradients_are_bitwise_equal(head_dim: int, options: dict[str, Any]) -> None:
    """Over seeds, that is orders of CTAs and of completion, in either order of adding; without one they are not, in
    some seed, and the two orders differ."""
    tensors = draw(5, (1, 130, 1, head_dim), 700 if head_dim == 64 else 300, 1, "bfloat16")
    results: dict[Any, set[bytes]] = {True: set(), False: set(), None: set()}
    for last_first, found in results.items():
        options = options | {"deterministic": last_first is not None}
        for seed, completion in enumerate(("random", "eager", "random")):
            gradients_of = gradients(tensors, seed, completion, {"last_first": last_first}, grads_seed=0, **options)
            check_gradients(*gradients_of)
            found.add(b"".join(np.asarray(one).tobytes() for one in gradients_of[0]))
    assert len(results[True]) == len(results[False]) == 1
    if head_dim == 64:  # two items of 256 keys: either order gives the same sum
        assert len(results[None]) > 1
        assert results[True] != results[False]


ORDERED: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "bottom right": {"is_causal": True, "causal_alignment": "bottom_right"},
    "window": {"local_window_size": (200, 30)},
    "lengths": {"key_value_seq_lengths": np.array([300]), "query_seq_lengths": np.array([250])},
}


@pytest.mark.parametrize("last_first", [True, False])
@pytest.mark.parametrize("option", ORDERED)
def test_everyone_gets_a_turn(option: str, last_first: bool) -> None:
    """In both orders of adding; where an item counted others that do not add, it would wait for ever."""
    for seed, head_dim in enumerate((64, 128)):
        tensors = draw(5, (1, 260, 2, head_dim), 390, 1, "bfloat16")
        check(tensors, seed, kernel={"last_first": last_first}, deterministic=True, **ORDERED[option])


@pytest.mark.parametrize("outlier", [0.0, 20.0])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_channels_that_stand_out(head_dim: int, outlier: float) -> None:
    query, key, value = draw(3, (2, 256, 2, head_dim), 300, 1, "bfloat16")
    check((query.at[..., 3].multiply(outlier), key.at[..., 5].multiply(outlier), value))


def test_tokens_that_stand_out() -> None:
    """In one batch row a key that nearly all look at, in the other values far from the others'."""
    query, key, value = draw(3, (2, 256, 2, 128), 300, 2, "bfloat16")
    key = key.at[1, 7].set(query[1, 100] * 4)
    check((query, key, value.at[0, 250:].multiply(50.0)), is_causal=True)


def test_nothing_reads_what_takes_no_part() -> None:
    """NaN in every operand: rows of queries, outputs and cotangents that see nothing, keys and values not seen."""
    for head_dim, value_dim in ((64, 64), (192, 128)):
        query, key, value = draw(7, (2, 200, 2, head_dim), 200, 2, "bfloat16", value_dim=value_dim)
        poisoned = query.at[0].set(jnp.nan).at[1, 199].set(jnp.nan), key.at[1, 150:].set(jnp.nan)
        options = {"key_value_seq_lengths": np.array([200, 150]), "query_seq_lengths": np.array([0, 199])}
        check((*poisoned, value.at[1, 150:].set(jnp.nan)), is_poisoned=True, **options)


def test_rows_that_see_nothing_by_the_mask() -> None:
    """The first 90 queries, so that items of keys meet 0 to 2 tiles; NaN there."""
    query, key, value = draw(7, (2, 300, 2, 128), 210, 2, "bfloat16")
    poisoned = query.at[:, :90].set(jnp.nan), key, value
    check(poisoned, is_poisoned=True, is_causal=True, causal_alignment="bottom_right")


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128, 192])
@pytest.mark.parametrize("tiles", [(rows, columns) for rows in range(1, 5) for columns in range(1, 5)], ids=str)
def test_every_count_of_tiles(head_dim: int, tiles: tuple[int, int]) -> None:
    """One to four tiles of queries by as many of keys; those of the last keys see none where there are more queries,
    and one batch row has no queries at all."""
    seed, rows, columns = sum(tiles), *(128 * one - sum(tiles) for one in tiles)
    tensors = draw(seed, (2, rows, 2, head_dim), columns, 2, "bfloat16", value_dim=min(head_dim, 128))
    check(tensors, seed, is_causal=True)
    check(tensors, seed, "lazy", query_seq_lengths=np.array([rows, 0]), key_value_seq_lengths=np.array([columns, 5]))


def test_sinks_have_their_gradient() -> None:
    """Of the loss of output and log-sum-exp, through `jax_fa4.attention`, against its formula in float64."""
    tensors, sinks = draw(11, (2, 150, 2, 64), 200, 1, "bfloat16"), jnp.asarray([-1.0, 4.0])
    rng = np.random.default_rng(12)
    grad_out, grad_lse = rng.standard_normal(tensors[0].shape), rng.standard_normal(tensors[0].shape[:3])

    def loss(sinks: jax.Array, *tensors: jax.Array) -> jax.Array:
        out, lse = jax_fa4.attention(
            *tensors, sinks=sinks, is_causal=True, implementation="emulated", return_residual=True
        )
        return jnp.sum(out.astype(jnp.float32) * grad_out) + jnp.sum(lse * grad_lse)

    found, *of_tensors = jax.grad(loss, range(4))(sinks, *tensors)
    call = arguments.read_call(*tensors, sinks=sinks, is_causal=True)
    out, lse = in_float64(call)
    share = np.exp(np.asarray(sinks, np.float64) - lse)  # of the sink, of each row's sum
    expected = (share * (grad_lse - (out * grad_out).sum(-1))).sum((0, 1))
    np.testing.assert_allclose(found, expected, rtol=2e-2)
    without = (share * -(out * grad_out).sum(-1)).sum((0, 1))
    assert not np.allclose(without, expected, rtol=2e-2)
    check_gradients(of_tensors, call, jnp.asarray(grad_out, "bfloat16"), jnp.asarray(grad_lse, jnp.float32))


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
    "sinks": {"sinks": jnp.asarray([-3.0, 0.0, 9.0, 60.0]), "local_window_size": (200, 0)},
    "deterministic": {"is_causal": True, "deterministic": True},
    "deterministic ids": {"segment_ids": IDS, "deterministic": True},
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
        options = dict(OPTIONS[option])
        if "sinks" in options:
            options["sinks"] = options["sinks"][: heads[0]]
        if "deterministic" in options and completion == "lazy":
            completion = "eager"  # nothing completes while others poll their flags, for very long
        # Groups are split where little is to be done, as here; so one seed is told not to.
        check(tensors, seed, completion, kernel={"splits": 1} if seed == 2 else None, **options)
