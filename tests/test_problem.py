"""The canonical values of a call: how arguments are read, folded, hashed and compared."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fa4.arguments import read_call
from jax_fa4.problem import HostArray, MaskConstants

QUERY, KEY = np.zeros((2, 3, 4, 6, 8), np.float32), np.zeros((2, 3, 5, 2, 8), np.float32)


def read(**options):
    return read_call(QUERY, KEY, KEY, **options)


def test_leading_dimensions_are_folded():
    call = read_call(QUERY, KEY, KEY[..., :7])
    problem = call.problem
    assert call.leading == (2, 3)
    assert (problem.batch, problem.query_length, problem.key_length) == (6, 4, 5)
    assert (problem.query_heads, problem.kv_heads, problem.group_size) == (6, 2, 3)
    assert (problem.head_dim, problem.value_dim, problem.dtype) == (8, 7, "float32")
    assert [x.shape for x in call.operands[:3]] == [(6, 4, 6, 8), (6, 5, 2, 8), (6, 5, 2, 7)]
    unbatched = read_call(QUERY[0, 0], KEY[0, 0], KEY[0, 0])
    assert unbatched.leading == ()
    assert unbatched.problem.batch == 1


@pytest.mark.parametrize(
    ("shape", "folded"),
    [
        ((1, 1, 1, 1, 1), (1, 1, 1, 1)),
        ((2, 3, 6, 4, 5), (6, 6, 4, 5)),
        ((1, 3, 6, 4, 1), (6, 6, 4, 1)),
        ((2, 1, 1, 1, 5), (6, 1, 1, 5)),
        ((4, 5), (1, 1, 4, 5)),
        ((6, 1, 1), (1, 6, 1, 1)),
        ((3, 1, 4, 5), (6, 1, 4, 5)),
    ],
)
def test_bias_and_mask_keep_dimensions_of_size_one(shape, folded):
    bias = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    call = read(bias=bias, mask=bias > 1)
    assert call.operands.bias.shape == folded
    assert call.operands.mask.shape == folded
    want = np.broadcast_to(bias, (2, 3, 6, 4, 5)).reshape(6, 6, 4, 5)
    np.testing.assert_array_equal(np.broadcast_to(call.operands.bias, want.shape), want)
    assert call.problem.has_bias
    assert call.problem.has_mask


def test_bias_of_four_dimensions_beside_an_unbatched_query():
    """jax.nn takes (1, N, T, S) there."""
    call = read_call(QUERY[0, 0], KEY[0, 0], KEY[0, 0], bias=np.zeros((1, 6, 1, 5), np.float32))
    assert call.operands.bias.shape == (1, 6, 1, 5)


@pytest.mark.parametrize(
    ("window", "sides"),
    [
        (None, (None, None)),
        (3, (3, 3)),
        (0, (0, 0)),
        (-1, (None, None)),
        ((2, None), (2, None)),
        ((-1, 0), (None, 0)),
        ([1, 2], (1, 2)),
        (np.int64(4), (4, 4)),
        ((np.int32(1), -1), (1, None)),
    ],
)
def test_windows(window, sides):
    assert read(local_window_size=window).problem.mask.window == sides


def test_alignment_moves_the_diagonal():
    assert read().problem.mask.diagonal_offset == 0
    assert read(causal_alignment="bottom_right").problem.mask.diagonal_offset == 1


def test_numpy_is_known_and_jax_is_traced():
    """Each array by itself: a pair may be half known."""
    ids, lengths = np.zeros((2, 3, 4), np.uint8), [[1, 2, 3], [4, 0, 1]]
    call = read(segment_ids=(ids, jnp.ones((2, 3, 5), jnp.int8)), query_seq_lengths=lengths)
    problem, operands = call.problem, call.operands
    assert operands.query_ids is None
    assert operands.key_ids.shape == (6, 5)
    assert operands.key_ids.dtype == jnp.int32
    assert operands.query_lengths is None
    np.testing.assert_array_equal(problem.constants.query_lengths.array, [1, 2, 3, 4, 0, 1])
    assert problem.constants.query_ids.array.dtype == np.int32
    assert (problem.has_segment_ids, problem.has_query_lengths, problem.has_key_lengths) == (True, True, False)
    data = problem.mask_operands(operands)
    assert isinstance(data.query_ids, np.ndarray)
    assert data.key_ids is operands.key_ids
    assert data.key_lengths is None


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32", "uint32", "int64", "uint64"])
def test_traced_integers_of_every_dtype(dtype):
    """Lengths are cut to their range, negative ids become -1, ids beyond int32 padding: never another document's."""
    with jax.enable_x64(True):
        info = np.iinfo(dtype)
        ids = np.array([0, 1, info.max, info.min], dtype)
        read = read_call(
            QUERY[0, 0],
            KEY[0, 0, :4],
            KEY[0, 0, :4],
            segment_ids=jnp.asarray(ids),
            query_seq_lengths=jnp.asarray(ids[3]),
            key_value_seq_lengths=jnp.asarray(ids[2]),
        )
        operands = read.operands
        of_mask = (operands.query_ids, operands.key_ids, operands.query_lengths, operands.key_lengths)
        assert {x.dtype.name for x in of_mask} == {"int32"}
        largest = int(info.max) if info.max <= np.iinfo(np.int32).max else -1
        assert operands.query_ids[0].tolist() == [0, 1, largest, -1 if info.min < 0 else 0]
        assert operands.query_lengths.tolist() == [0]
        assert operands.key_lengths.tolist() == [4]


def test_scale_is_known_or_an_operand():
    assert read().problem.scale == 1 / np.sqrt(8)
    for scale in (2, 2.0, np.float32(2), np.array(2)):
        call = read(scale=scale)
        assert call.problem.scale == 2.0
        assert call.operands.scale is None
    for scale in (jnp.float32(2), jnp.int32(2), jnp.bfloat16(2)):
        call = read(scale=scale)
        assert call.problem.scale is None
        assert call.operands.scale.dtype == jnp.float32
        assert float(call.operands.scale) == 2.0


def test_float64_is_wide_throughout():
    with jax.enable_x64(True):
        query, key = QUERY.astype(np.float64), KEY.astype(np.float64)
        call = read_call(query, key, key, sinks=np.zeros(6, np.float32), scale=jnp.float32(1))
        assert call.problem.accumulation_dtype == "float64"
        assert call.operands.sinks.dtype == call.operands.scale.dtype == jnp.float64


def test_problems_hash_by_content():
    ids = np.zeros((2, 3, 4), np.int32)
    options = {"segment_ids": (ids, np.zeros((2, 3, 5), np.int64)), "scale": 0.5, "is_causal": np.bool_(True)}
    first, second = read(**options).problem, read(**options).problem
    assert first == second
    assert hash(first) == hash(second)
    ids[1, 2, 3] = 1
    third = read(**options).problem
    assert third != first
    assert len({first, second, third}) == 2
    assert dataclasses.replace(first, batch=7) != first


def test_host_array_copies_and_compares_by_content():
    array = np.arange(6, dtype=np.int32)
    host, again = HostArray(array), HostArray(list(range(6)))
    array[0] = 9
    assert host.array[0] == 0
    with pytest.raises(ValueError, match="read-only"):
        host.array[0] = 1
    assert host != again  # int64 content is other content
    assert host == HostArray(np.arange(6, dtype=np.int32))
    assert host != HostArray(np.arange(6, dtype=np.int32).reshape(2, 3))
    assert host != "text"
    assert HostArray(np.zeros((0, 3), np.int32)) != HostArray(np.zeros((3, 0), np.int32))
    assert hash(HostArray(np.asfortranarray(np.ones((2, 3), np.int32)))) == hash(HostArray(np.ones((2, 3), np.int32)))


def test_copies_of_a_batch():
    lengths = np.array([[1, 2, 3], [4, 0, 1]])
    problem = read(query_seq_lengths=lengths).problem
    twice = problem.with_copies(2)
    assert twice.batch == 12
    np.testing.assert_array_equal(twice.constants.query_lengths.array, np.tile(lengths.ravel(), 2))
    assert problem.constants.tiled(1) == problem.constants
    assert MaskConstants().tiled(3) == MaskConstants()
