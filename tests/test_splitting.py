"""Keys in parts, heads as rows: the same results as whole, and a cut that has work for every multiprocessor."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fa4
from jax_fa4 import arguments, splitting
from jax_fa4.blockwise import forward as blockwise_forward
from jax_fa4.cost import ARCHITECTURES
from jax_fa4.problem import QueryLayout
from jax_fa4.reference import reference
from jax_fa4.schedule.order import forward_grid
from jax_fa4.splitting import Split
from tests.inputs import assert_close, draw

HOPPER = ARCHITECTURES["sm_90"]
IDS = (np.array([[2, 0, 0], [1, -1, 0]]), np.array([[2] * 5 + [0] * 9 + [-1] * 7, [0, 1, -1] * 7]))
MASKS = {
    "none": {},
    "causal at the end": {"is_causal": True, "causal_alignment": "bottom_right"},
    "causal at the start": {"is_causal": True},
    "window": {"local_window_size": (6, 2), "causal_alignment": "bottom_right"},
    "lengths": {"query_seq_lengths": np.array([3, 1]), "key_value_seq_lengths": np.array([0, 13])},
    "ids": {"segment_ids": IDS},
    "ids and window": {"segment_ids": IDS, "is_causal": True, "causal_alignment": "bottom_right"},
}
CUTS = [(split, mask) for split in (Split(4), Split(3, True)) for mask in MASKS]
CUTS += [(split, "ids and window") for split in (Split(7), Split(1, True), Split(5, True))]


def decode(seed, **changes):
    sizes = {"query_length": 3, "key_length": 21, "query_heads": 4, "kv_heads": 2, "value_dim": 6, **changes}
    return draw(seed, **sizes)


@pytest.mark.parametrize(("split", "mask"), CUTS, ids=str)
def test_any_cut_is_exact(split, mask):
    """Ids and lengths known when the call is traced, and not."""
    tensors, is_traced = decode(0), split.parts in (4, 5)
    options = jax.tree.map(lambda x: jnp.asarray(x) if is_traced and isinstance(x, np.ndarray) else x, MASKS[mask])
    sinks = jnp.array([0.3, -1.0, 2.0, -jnp.inf])

    @jax.jit
    def both(*tensors):
        call = arguments.read_call(*tensors, **options, sinks=sinks, logits_soft_cap=3.0)
        found = splitting.run_split(blockwise_forward.forward, call.problem, call.operands, split)
        return found, reference.forward(call.problem, call.operands)

    jax.tree.map(assert_close, *both(*tensors))


def test_nan_in_unseen_keys_stays_out():
    query, key, value = decode(1)
    lengths = np.array([13, 5])
    hidden = (np.arange(21) >= lengths[:, None])[:, :, None, None]
    wanted = jax_fa4.attention(query, key, value, key_value_seq_lengths=lengths)
    for lengths_given in (lengths, jnp.asarray(lengths)):
        poisoned = (jnp.where(hidden, jnp.nan, x) for x in (key, value))
        found = jax_fa4.attention(query, *poisoned, key_value_seq_lengths=lengths_given, key_splits=4)
        assert_close(found, wanted)


@pytest.mark.parametrize("key_splits", [1, 3, 7])
def test_the_argument_and_its_gradients(key_splits):
    tensors = decode(2)

    def loss(*tensors, **options):
        out, lse = jax_fa4.attention(
            *tensors, is_causal=True, causal_alignment="bottom_right", return_residual=True, **options
        )
        return (out**2).sum() + lse.sum()

    found = jax.grad(functools.partial(loss, key_splits=key_splits, implementation="blockwise"), (0, 1, 2))(*tensors)
    jax.tree.map(
        assert_close, found, jax.grad(functools.partial(loss, implementation="reference"), (0, 1, 2))(*tensors)
    )
    mapped = jax.vmap(lambda q, k, v: jax_fa4.attention(q[None], k[None], v[None], key_splits=key_splits)[0])(*tensors)
    assert_close(mapped, jax_fa4.attention(*tensors))


def test_even_parts_are_not_copied():
    """Keys and values of even parts keep their place: the parts are a reshape."""
    tensors = [jax.ShapeDtypeStruct((1, length, 2, 8), jnp.float32) for length in (1, 4096, 4096)]
    seen = []

    def forward(problem, operands):
        seen.append(problem)
        return blockwise_forward.forward(problem, operands)

    def run(*tensors):
        call = arguments.read_call(*tensors)
        return splitting.run_split(forward, call.problem, call.operands, Split(4))

    jaxpr = str(jax.make_jaxpr(run)(*tensors))
    assert "4,1024,2,8] = reshape" in jaxpr
    assert not seen[0].has_intervals


@pytest.mark.parametrize(
    ("key_splits", "error"), [(0, ValueError), (22, ValueError), (True, TypeError), (2.0, TypeError)]
)
def test_wrong_numbers_of_parts(key_splits, error):
    with pytest.raises(error, match="key_splits"):
        jax_fa4.attention(*decode(3), key_splits=key_splits)


def test_parts_beside_a_bias_are_refused():
    with pytest.raises(ValueError, match="beside a bias or mask"):
        jax_fa4.attention(*decode(4), jnp.zeros((1, 1, 1, 21)), key_splits=2)
    with pytest.raises(NotImplementedError, match="leave key_splits out"):
        jax_fa4.attention(*decode(4), key_splits=2, implementation="reference")


def chosen(batch, query_length, key_length, heads, kv_heads, is_taken=lambda problem: True, **options):
    shapes = [(query_length, heads), (key_length, kv_heads), (key_length, kv_heads)]
    problems = []
    tensors = [jax.ShapeDtypeStruct((batch, length, count, 128), jnp.bfloat16) for length, count in shapes]
    jax.eval_shape(lambda *x: problems.append(arguments.read_call(*x, **options).problem), *tensors)
    grid = functools.partial(forward_grid, query_tile=192, key_tile=80, arch=HOPPER)
    return splitting.choose_split(problems[0], grid, is_taken, HOPPER)


def test_the_choice():
    assert chosen(1, 1, 32768, 64, 8) == Split(16, True)  # 8 tiles become 128, for 132 multiprocessors
    assert chosen(32, 1, 32768, 64, 8).parts <= 2  # 256 tiles, nothing to gain but a fuller last wave
    assert chosen(1, 1, 32768, 64, 8, lambda problem: False) == Split()
    assert chosen(1, 1, 32768, 64, 8, key_splits=2) == Split(2, True)  # as long as with heads apart, with fewer reads
    assert chosen(1, 16, 131072, 8, 8).parts >= 8
    assert chosen(1, 1, 128, 64, 8).parts == 1  # a merge would cost more than it saves
    assert chosen(1, 4096, 4096, 16, 4) == Split()
    assert chosen(1, 1, 32768, 64, 8, key_splits=5) == Split(5, True)
    window = {"local_window_size": (100, 0), "causal_alignment": "bottom_right"}
    assert chosen(1, 1, 32768, 64, 8, **window).parts == 1  # it sees two tiles of keys


@pytest.mark.parametrize("key_length", [8192, 131072, 10007])
@pytest.mark.parametrize("batch", [1, 3, 8])
def test_the_choice_fills_the_gpu(batch, key_length):
    """Multiprocessors are three quarters busy in the last wave; odd lengths, whose parts must be copied, pay for it."""
    split = chosen(batch, 1, key_length, 64, 8)
    assert split.packs_heads
    waves = batch * 8 * split.parts / HOPPER.sms
    assert waves / np.ceil(waves) > 0.75 or key_length == 10007


@pytest.mark.parametrize("layout", [QueryLayout(), QueryLayout(3), QueryLayout(1, 4), QueryLayout(2, 3)], ids=str)
def test_queries_lie_as_their_layout_says(layout):
    batch, length, heads, width = 2, 5, 2, 3
    shape = batch, length, heads * layout.group, width
    operand = np.arange(np.prod(shape)).reshape(shape)
    b, r, n = np.ogrid[: batch * layout.copies, : length * layout.group, :heads]
    wanted = operand[b // layout.copies, r // layout.group, n * layout.group + r % layout.group]
    np.testing.assert_array_equal(splitting.lay_queries(operand, layout), wanted)
    turned = splitting.lay_queries(operand, layout, layout._replace(group=1))
    np.testing.assert_array_equal(splitting.lay_queries(turned, layout._replace(group=1)), wanted)
    np.testing.assert_array_equal(splitting.rows_as_heads(turned, layout.group), operand)


def test_queries_are_not_copied_for_who_reads_them_where_they_lie():
    """The forward of an implementation gets the caller's array; the problem says what every part reads of it."""
    tensors, seen = decode(5), []

    def forward(problem, operands):
        seen.append((problem.query_layout, operands.query))
        return blockwise_forward.forward(problem, operands)

    call = arguments.read_call(*tensors)
    splitting.run_split(forward, call.problem, call.operands, Split(3, True))
    assert seen[0][0] == QueryLayout(copies=3, group=2)
    assert seen[0][1] is call.operands.query
