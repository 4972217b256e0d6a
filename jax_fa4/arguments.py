"""What the user typed, checked and made into a problem and its operands.

Every check of an argument lives here. A wrong dtype or kind is a TypeError, a wrong shape or value a ValueError; each
message names the argument, shows what was seen, says what is accepted and, where there is one, the remedy.
"""

import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_fa4.problem import AttentionOperands, AttentionProblem, HostArray, MaskConstants, default_scale
from jax_fa4.schedule.tiles import MaskRule

DTYPES = ("bfloat16", "float16", "float32", "float64")
CAUSAL_ALIGNMENTS = ("top_left", "bottom_right")
INT32_MAX = np.iinfo(np.int32).max
SMALLEST_FLOAT32, LARGEST_FLOAT32 = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


class Call(NamedTuple):
    """A checked call: the problem, its operands, and the leading dimensions that the output gets back."""

    problem: AttentionProblem
    operands: AttentionOperands
    leading: tuple[int, ...]


class Sizes(NamedTuple):
    """The dimensions that query, key and value agree on, and the leading ones before they are folded."""

    leading: tuple[int, ...]
    query_length: int
    key_length: int
    query_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int

    @property
    def batch(self) -> int:
        """B, the product of the leading dimensions."""
        return math.prod(self.leading)


class Segments(NamedTuple):
    """The mask of packed documents: its rule, ids (B, T) and (B, S), and the leading dimensions that B stands for."""

    rule: MaskRule
    query_ids: HostArray | jax.Array
    key_ids: HostArray | jax.Array
    leading: tuple[int, ...]


def read_segments(segment_ids: Any, is_causal: Any, local_window_size: Any, causal_alignment: Any) -> Segments:
    """Check segment ids and the mask around them without the tensors of a call.

    Raises:
      TypeError: an argument has the wrong kind or dtype.
      ValueError: an argument has the wrong shape or value.
    """
    if segment_ids is None:
        raise TypeError("segment_ids is None. Integers (..., T), or a pair of (..., T) and (..., S), are accepted.")
    sides = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
    try:
        shapes = [np.shape(side) for side in sides]
    except ValueError as error:
        raise TypeError(
            f"segment_ids is {_seen(segment_ids)}, which is no array. Integers (..., T), or a pair of (..., T) and "
            "(..., S), are accepted."
        ) from error
    if len(shapes) != 2 or not all(shapes) or shapes[0][:-1] != shapes[1][:-1]:
        raise ValueError(
            f"segment_ids has shape {', '.join(map(str, shapes))}. Integers (..., T), or a pair of (..., T) and "
            "(..., S) with equal leading dimensions, are accepted."
        )
    sizes = Sizes(shapes[0][:-1], shapes[0][-1], shapes[1][-1], 1, 1, 1, 1)
    rule = _read_rule(sizes, is_causal, local_window_size, causal_alignment)
    query_ids, key_ids = _read_segment_ids(segment_ids, sizes)
    assert query_ids is not None
    assert key_ids is not None
    return Segments(rule, query_ids, key_ids, sizes.leading)


def read_call(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: Any = None,
    is_causal: Any = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: Any = None,
    segment_ids: Any = None,
    causal_alignment: Any = "top_left",
    logits_soft_cap: Any = None,
    sinks: Any = None,
    return_residual: Any = False,
    deterministic: Any = False,
    key_splits: Any = None,
    devices: int = 1,
) -> Call:
    """Check the arguments of `jax_fa4.attention` and put them into canonical form.

    `devices` share the sequence: lengths count tokens of the whole, of which query, key and value are one share.

    Returns:
      The problem, its operands with one batch dimension, and the leading dimensions that were folded into it.

    Raises:
      TypeError: an argument has the wrong kind or dtype.
      ValueError: an argument has the wrong shape or value.
    """
    query, key, value = (_floats(name, x) for name, x in (("query", query), ("key", key), ("value", value)))
    sizes = _read_sizes(query, key, value)
    rule = _read_rule(sizes, is_causal, local_window_size, causal_alignment)
    wide = jnp.float64 if query.dtype == jnp.float64 else jnp.float32
    known_scale, traced_scale = _read_scale(scale, sizes.head_dim, wide)
    query_ids, key_ids = _read_segment_ids(segment_ids, sizes)
    query_lengths = _read_lengths("query_seq_lengths", query_seq_lengths, sizes.leading, devices * sizes.query_length)
    key_lengths = _read_lengths(
        "key_value_seq_lengths", key_value_seq_lengths, sizes.leading, devices * sizes.key_length
    )
    vectors = {
        "query_ids": query_ids,
        "key_ids": key_ids,
        "query_lengths": query_lengths,
        "key_lengths": key_lengths,
    }
    operands = AttentionOperands(
        query=query.reshape(sizes.batch, *query.shape[-3:]),
        key=key.reshape(sizes.batch, *key.shape[-3:]),
        value=value.reshape(sizes.batch, *value.shape[-3:]),
        bias=_read_bias(bias, sizes),
        mask=_read_mask(mask, sizes),
        sinks=_read_sinks(sinks, sizes.query_heads, wide),
        scale=traced_scale,
        **{name: None if isinstance(x, HostArray) else x for name, x in vectors.items()},
    )
    problem = AttentionProblem(
        batch=sizes.batch,
        **{name: size for name, size in sizes._asdict().items() if name != "leading"},
        dtype=query.dtype.name,
        mask=rule,
        scale=known_scale,
        logits_soft_cap=read_soft_cap(logits_soft_cap),
        has_bias=bias is not None,
        has_mask=mask is not None,
        has_sinks=sinks is not None,
        has_query_lengths=query_lengths is not None,
        has_key_lengths=key_lengths is not None,
        has_segment_ids=query_ids is not None,
        constants=MaskConstants(**{name: x if isinstance(x, HostArray) else None for name, x in vectors.items()}),
        return_residual=_read_flag("return_residual", return_residual),
        deterministic=_read_flag("deterministic", deterministic),
        key_splits=_read_key_splits(key_splits, sizes.key_length, bias is not None or mask is not None),
    )
    return Call(problem, operands, sizes.leading)


def _seen(value: Any) -> str:
    """The value as an error shows it: dtype and shape of an array, a shortened repr of anything else."""
    if hasattr(value, "shape") and hasattr(value, "dtype") and value.shape != ():
        return f"{value.dtype}{list(value.shape)}"
    if isinstance(value, tuple):
        return f"({', '.join(_seen(item) for item in value)})"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _is_traced(value: Any) -> bool:
    """True for a `jax.Array` (traced or not), something that becomes one, or a sequence that holds one."""
    return any(isinstance(x, jax.Array) or hasattr(x, "__jax_array__") for x in jax.tree.leaves(value))


def _array(name: str, value: Any, accepted: str) -> jax.Array:
    is_array = isinstance(value, jax.Array | np.ndarray | np.generic) or hasattr(value, "__jax_array__")
    if not is_array:
        raise TypeError(f"{name} is {_seen(value)} ({type(value).__name__}). It must be an array of {accepted}.")
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "OSUMmV" and value.dtype.name not in DTYPES:
        raise TypeError(f"{name} has dtype {value.dtype}. It must be an array of {accepted}.")
    return jnp.asarray(value)


def _floats(name: str, value: Any) -> jax.Array:
    array = _array(name, value, f"one of {', '.join(DTYPES)}")
    if array.dtype.name not in DTYPES:
        raise TypeError(
            f"{name} has dtype {array.dtype}. One of {', '.join(DTYPES)} is accepted; "
            f"convert it, for example with {name}.astype(jax.numpy.bfloat16)."
        )
    return array


def _read_sizes(query: jax.Array, key: jax.Array, value: jax.Array) -> Sizes:
    shapes = {"query": query.shape, "key": key.shape, "value": value.shape}
    letters = {"query": "(..., T, N, D)", "key": "(..., S, K, D)", "value": "(..., S, K, Dv)"}
    for name, shape in shapes.items():
        if len(shape) < 3:
            raise ValueError(f"{name} has shape {shape}. It must have 3 dimensions or more, {letters[name]}.")
        if not all(isinstance(size, int) for size in shape):
            raise ValueError(
                f"{name} has shape {shape}, in which a size is a symbol. Sizes that are numbers when the call is "
                "traced are accepted; export a program for each."
            )
    for name, array in (("key", key), ("value", value)):
        if array.dtype != query.dtype:
            raise TypeError(
                f"{name} has dtype {array.dtype} but query has {query.dtype}. The three must be equal; "
                f"convert one, for example with {name}.astype(query.dtype)."
            )
        if array.shape[:-3] != query.shape[:-3]:
            raise ValueError(
                f"{name} has leading dimensions {array.shape[:-3]} but query has {query.shape[:-3]}. "
                f"They must be equal: query {letters['query']}, {name} {letters[name]}; "
                "broadcast one of the two, or map over it with jax.vmap."
            )
    if value.shape[-3:-1] != key.shape[-3:-1]:
        raise ValueError(
            f"value has shape {value.shape} but key has {key.shape}. Their lengths S and heads K must be equal: "
            "key (..., S, K, D), value (..., S, K, Dv)."
        )
    (query_length, query_heads, head_dim), (key_length, kv_heads, key_dim) = query.shape[-3:], key.shape[-3:]
    if key_dim != head_dim:
        raise ValueError(
            f"key has head dimension {key_dim} but query has {head_dim}. They must be equal; only value may differ."
        )
    if head_dim == 0 or value.shape[-1] == 0:
        name, dim = ("query", head_dim) if head_dim == 0 else ("value", value.shape[-1])
        raise ValueError(f"{name} has head dimension {dim}. It must be at least 1, shape (..., length, heads, dim).")
    if query_heads % kv_heads if kv_heads else query_heads:
        raise ValueError(
            f"query has {query_heads} heads and key has {kv_heads}. The number of query heads must be a multiple "
            "of the number of key heads, and the layout (..., length, heads, dim); "
            "transpose with jax.numpy.swapaxes(x, -3, -2) where heads come first."
        )
    return Sizes(query.shape[:-3], query_length, key_length, query_heads, kv_heads, head_dim, value.shape[-1])


def _read_flag(name: str, value: Any) -> bool:
    if isinstance(value, bool | np.bool_):
        return bool(value)
    remedy = "; under jit make it a static argument" if _is_traced(value) else ""
    raise TypeError(f"{name} is {_seen(value)} ({type(value).__name__}). It must be True or False{remedy}.")


def _read_key_splits(key_splits: Any, key_length: int, is_dense: bool) -> int | None:
    accepted = f"An int from 1 to S = {key_length} is accepted; None takes as many as pay"
    if key_splits is None:
        return None
    if isinstance(key_splits, bool) or not isinstance(key_splits, int | np.integer):
        raise TypeError(f"key_splits is {_seen(key_splits)} ({type(key_splits).__name__}). {accepted}.")
    if not 1 <= key_splits <= max(key_length, 1):
        raise ValueError(f"key_splits is {key_splits}. {accepted}.")
    if key_splits > 1 and is_dense:
        raise ValueError(
            f"key_splits is {key_splits} beside a bias or mask, with which keys are not split; leave it out."
        )
    return int(key_splits)


def _read_rule(sizes: Sizes, is_causal: Any, window: Any, alignment: Any) -> MaskRule:
    if not isinstance(alignment, str) or alignment not in CAUSAL_ALIGNMENTS:
        raise ValueError(
            f"causal_alignment is {_seen(alignment)}. 'top_left' (query 0 sees key 0) and "
            "'bottom_right' (the last query sees the last key) are accepted."
        )
    return MaskRule(
        query_length=sizes.query_length,
        key_length=sizes.key_length,
        is_causal=_read_flag("is_causal", is_causal),
        window=_read_window(window),
        diagonal_offset=sizes.key_length - sizes.query_length if alignment == "bottom_right" else 0,
    )


def _read_window(window: Any) -> tuple[int | None, int | None]:
    accepted = "An int, or a pair (left, right) of int or None, is accepted; None or -1 leaves a side unbounded"
    if window is None:
        return None, None
    if _is_traced(window):
        raise TypeError(
            f"local_window_size is {_seen(window)}, a jax.Array. {accepted}. "
            "It must be known when the call is traced: pass Python ints, static under jit."
        )
    sides = window if isinstance(window, Sequence) and not isinstance(window, str) else (window, window)
    if len(sides) != 2:
        raise ValueError(f"local_window_size is {_seen(window)}, which has {len(sides)} sides. {accepted}.")

    def read_side(side: Any) -> int | None:
        if side is None:
            return None
        try:
            size = operator.index(side)
        except TypeError:
            size = None
        if size is None or isinstance(side, bool | np.bool_):
            raise TypeError(f"local_window_size is {_seen(window)}. {accepted}.")
        if size < -1:
            raise ValueError(f"local_window_size is {_seen(window)}; the side {size} is negative. {accepted}.")
        return None if size == -1 else size

    return read_side(sides[0]), read_side(sides[1])


def _read_scale(scale: Any, head_dim: int, wide: Any) -> tuple[float | None, jax.Array | None]:
    """The scale as a number, or as an operand: a `jax.Array` is traced, anything else is known."""
    accepted = "A real number, or a scalar array of one, is accepted; None means 1 / sqrt(head_dim)"
    remedy = "multiply query by it where it differs from head to head"
    if scale is None:
        return default_scale(head_dim), None
    if isinstance(scale, bool | np.bool_ | str | bytes):
        raise TypeError(f"scale is {_seen(scale)}. {accepted}.")
    if _is_traced(scale):
        array = jnp.asarray(scale)
        if array.shape != ():
            raise ValueError(f"scale has shape {array.shape}. {accepted}; {remedy}.")
        if not (jnp.issubdtype(array.dtype, jnp.floating) or jnp.issubdtype(array.dtype, jnp.integer)):
            raise TypeError(f"scale has dtype {array.dtype}. {accepted}.")
        return None, array.astype(wide)
    if np.shape(scale) != ():
        raise ValueError(f"scale has shape {np.shape(scale)}. {accepted}; {remedy}.")
    try:
        number = float(scale)
    except (TypeError, ValueError) as error:
        raise TypeError(f"scale is {_seen(scale)}. {accepted}.") from error
    scores = jnp.finfo(wide)
    if not abs(number) <= float(scores.max):
        raise ValueError(f"scale is {number}. It must be finite, as {scores.dtype} too. {accepted}.")
    return 0.0 if abs(number) < float(scores.tiny) else number, None


def read_soft_cap(cap: Any) -> float | None:
    """The cap as a float; raises TypeError and ValueError as `read_call`."""
    accepted = "A positive finite number, as float32 too, is accepted; None means no cap"
    if cap is None:
        return None
    if _is_traced(cap):
        raise TypeError(
            f"logits_soft_cap is {_seen(cap)}, a jax.Array. {accepted}. "
            "It must be known when the call is traced: pass a Python float, static under jit."
        )
    if isinstance(cap, bool | np.bool_ | str | bytes) or np.shape(cap) != ():
        raise TypeError(f"logits_soft_cap is {_seen(cap)}. {accepted}.")
    try:
        number = float(cap)
    except (TypeError, ValueError) as error:
        raise TypeError(f"logits_soft_cap is {_seen(cap)}. {accepted}.") from error
    if not SMALLEST_FLOAT32 <= number <= LARGEST_FLOAT32:
        raise ValueError(f"logits_soft_cap is {number}. {accepted}.")
    return number


def _read_sinks(sinks: Any, query_heads: int, wide: Any) -> jax.Array | None:
    if sinks is None:
        return None
    array = _array("sinks", sinks, "floats, one for each query head")
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(
            f"sinks has dtype {array.dtype}. A floating dtype is accepted; convert it with sinks.astype('float32')."
        )
    if array.shape != (query_heads,):
        raise ValueError(
            f"sinks has shape {array.shape}. One logit for each query head is accepted, shape ({query_heads},)."
        )
    return array.astype(wide)


def _read_bias(bias: Any, sizes: Sizes) -> jax.Array | None:
    if bias is None:
        return None
    array = _array("bias", bias, "floats that broadcasts to (..., N, T, S)")
    if array.dtype == jnp.bool_:
        raise TypeError("bias has dtype bool. A floating dtype is accepted; pass a boolean mask as the argument mask.")
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(
            f"bias has dtype {array.dtype}. A floating dtype is accepted; convert it with bias.astype(query.dtype)."
        )
    return _fold_scores("bias", array, sizes)


def _read_mask(mask: Any, sizes: Sizes) -> jax.Array | None:
    if mask is None:
        return None
    array = _array("mask", mask, "bool that broadcasts to (..., N, T, S)")
    if array.dtype != jnp.bool_:
        raise TypeError(
            f"mask has dtype {array.dtype}. Only bool is accepted (True: the pair takes part); convert it with "
            "mask.astype(bool), or pass it as bias if it is to be added to the logits."
        )
    return _fold_scores("mask", array, sizes)


def _fold_scores(name: str, array: jax.Array, sizes: Sizes) -> jax.Array:
    """A bias or mask with one batch dimension: (1 or B, 1 or N, 1 or T, 1 or S)."""
    full = (*sizes.leading, sizes.query_heads, sizes.query_length, sizes.key_length)
    shape = (1,) * (len(full) - array.ndim) + array.shape
    if not sizes.leading and array.ndim == 4 and array.shape[0] == 1:
        shape = array.shape[1:]  # jax.nn takes (1, N, T, S) beside a query without batch dimension
    if len(shape) != len(full) or any(have not in (1, want) for have, want in zip(shape, full, strict=True)):
        raise ValueError(
            f"{name} has shape {array.shape}. A shape that broadcasts to (..., N, T, S) = {full} is accepted, "
            "each dimension full or of size 1."
        )
    array = array.reshape(shape)
    leading = shape[:-3]
    if any(size != 1 for size in leading):
        array = jnp.broadcast_to(array, (*sizes.leading, *shape[-3:]))
        return array.reshape(sizes.batch, *shape[-3:])
    return array.reshape(1, *shape[-3:])


def _integers(name: str, value: Any, shape: tuple[int, ...], accepted: str) -> np.ndarray | jax.Array:
    """An array of integers of the given shape, NumPy where it is known when the call is traced."""
    is_traced = _is_traced(value)
    try:
        array = jnp.asarray(value) if is_traced else np.asarray(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} is {_seen(value)}, which is no array. {accepted}.") from error
    if not (jnp.issubdtype(array.dtype, jnp.integer) or (array.size == 0 and not hasattr(value, "dtype"))):
        detail = f"dtype {array.dtype}" if array.dtype != object else f"entries of different kinds: {_seen(value)}"
        remedy = f"; convert it with {name}.astype('int32')" if hasattr(value, "astype") else ""
        raise TypeError(f"{name} has {detail}. {accepted}{remedy}.")
    if array.shape != shape and not (array.shape == (1,) and shape == ()):
        raise ValueError(f"{name} has shape {array.shape}. {accepted}.")
    return array


def _read_lengths(name: str, value: Any, leading: tuple[int, ...], limit: int) -> HostArray | jax.Array | None:
    if value is None:
        return None
    accepted = f"Integers of shape {leading}, one for each sequence, from 0 to {limit} are accepted"
    array = _integers(name, value, leading, accepted)
    if isinstance(array, jax.Array):
        return _narrow(array, 0, limit, limit).reshape(-1)
    wrong = array[(array < 0) | (array > limit)]
    if wrong.size:
        raise ValueError(f"{name} holds {wrong.flat[0]}. {accepted}.")
    return HostArray(array.astype(np.int32).reshape(-1))


def _read_segment_ids(ids: Any, sizes: Sizes) -> tuple[HostArray | jax.Array | None, HostArray | jax.Array | None]:
    if ids is None:
        return None, None
    is_pair = isinstance(ids, tuple)
    if is_pair and (len(ids) != 2 or ids[0] is None or ids[1] is None):
        raise ValueError(
            f"segment_ids is a tuple of {len(ids)}, {_seen(ids)}. An array (..., T), or a pair of arrays "
            "(query_ids (..., T), key_value_ids (..., S)), is accepted; write ids by hand as a list or a NumPy array."
        )
    if not is_pair and sizes.query_length != sizes.key_length:
        raise ValueError(
            f"segment_ids is one array, but query has length {sizes.query_length} and key {sizes.key_length}. "
            "Pass a pair: segment_ids=(query_ids (..., T), key_value_ids (..., S))."
        )
    if not is_pair:
        both = _read_ids("segment_ids", ids, sizes, sizes.query_length)
        return both, both
    query_ids = _read_ids("segment_ids[0]", ids[0], sizes, sizes.query_length)
    return query_ids, _read_ids("segment_ids[1]", ids[1], sizes, sizes.key_length)


def _read_ids(name: str, value: Any, sizes: Sizes, length: int) -> HostArray | jax.Array:
    shape = (*sizes.leading, length)
    accepted = f"Integers of shape {shape} are accepted, one for each token; negative is padding"
    array = _integers(name, value, shape, accepted)
    if isinstance(array, jax.Array):
        return _narrow(array, -1, INT32_MAX, -1).reshape(sizes.batch, length)
    if array.size and array.max() > INT32_MAX:
        raise ValueError(f"{name} holds {array.max()}. {accepted}; ids must fit into int32.")
    return HostArray(np.maximum(array.astype(np.int64), -1).astype(np.int32).reshape(sizes.batch, length))


def _narrow(array: jax.Array, low: int, high: int, above: int) -> jax.Array:
    """Integers of any dtype as int32: those under `low` become `low`, those over `high` become `above`."""
    info = jnp.iinfo(array.dtype)
    if info.min < low:
        array = jnp.maximum(array, low)
    if info.max > high:
        is_above = array > high
        array = jnp.where(is_above, above if above >= info.min else 0, array)
        if above < info.min:
            return jnp.where(is_above, above, array.astype(jnp.int32))
    return array.astype(jnp.int32)
