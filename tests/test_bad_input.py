"""Wrong calls: each gets the right kind of error, with the argument's name, the value seen, and the remedy."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jax_fa4

B, T, S, N, K, D = 2, 4, 6, 4, 2, 8
QUERY = np.zeros((B, T, N, D), np.float32)
KEY = np.zeros((B, S, K, D), np.float32)
IDS, KEY_IDS = np.zeros((B, T), np.int32), np.zeros((B, S), np.int32)
SELF = {"key": np.zeros((B, T, K, D), np.float32), "value": np.zeros((B, T, K, D), np.float32)}


@dataclasses.dataclass
class Wrong:
    """A call with some arguments replaced; what its error is, and what the message must hold, in this order."""

    arguments: dict
    error: type
    says: tuple


CALLS = {
    # query, key, value
    "query_none": Wrong({"query": None}, TypeError, ("query", "None", "array")),
    "query_list": Wrong({"query": [[1.0]]}, TypeError, ("query", "[[1.0]]", "list", "array")),
    "query_string": Wrong({"query": "q"}, TypeError, ("query", "'q'", "array")),
    "query_object": Wrong({"query": np.array([None])}, TypeError, ("query", "object", "array")),
    "query_int": Wrong({"query": QUERY.astype(int)}, TypeError, ("query", "int32", "float32", "query.astype")),
    "query_bool": Wrong({"query": QUERY.astype(bool)}, TypeError, ("query", "bool", "float32", "query.astype")),
    "query_complex": Wrong(
        {"query": QUERY.astype(complex)}, TypeError, ("query", "complex", "float32", "query.astype")
    ),
    "query_float8": Wrong(
        {"query": QUERY.astype(ml_dtypes.float8_e4m3fn)}, TypeError, ("query", "float8_e4m3fn", "float32")
    ),
    "query_random_key": Wrong({"query": jax.random.key(0)}, TypeError, ("query", "key<fry>", "float32")),
    "query_2d": Wrong({"query": QUERY[0, 0]}, ValueError, ("query", "(4, 8)", "(..., T, N, D)")),
    "key_2d": Wrong({"key": KEY[0, 0]}, ValueError, ("key", "(2, 8)", "(..., S, K, D)")),
    "value_none": Wrong({"value": None}, TypeError, ("value", "None", "array")),
    "key_dtype": Wrong(
        {"key": KEY.astype(np.float16)}, TypeError, ("key", "float16", "query", "float32", "key.astype")
    ),
    "value_dtype": Wrong(
        {"value": KEY.astype(ml_dtypes.bfloat16)}, TypeError, ("value", "bfloat16", "query", "float32", "value.astype")
    ),
    "key_batch": Wrong({"key": KEY[:1]}, ValueError, ("key", "(1,)", "query", "(2,)", "vmap")),
    "key_unbatched": Wrong({"key": KEY[0]}, ValueError, ("key", "()", "query", "(2,)", "vmap")),
    "value_batch": Wrong({"value": np.zeros((3, S, K, D), np.float32)}, ValueError, ("value", "(3,)", "query", "(2,)")),
    "value_length": Wrong({"value": KEY[:, :5]}, ValueError, ("value", "(2, 5, 2, 8)", "key", "(2, 6, 2, 8)", "S")),
    "value_heads": Wrong({"value": KEY[:, :, :1]}, ValueError, ("value", "(2, 6, 1, 8)", "key", "K")),
    "key_dim": Wrong({"key": KEY[..., :4]}, ValueError, ("key", "4", "query", "8", "equal")),
    "heads": Wrong({"query": QUERY[:, :, :3]}, ValueError, ("query", "3", "key", "2", "multiple", "swapaxes")),
    "heads_first": Wrong(
        {"query": np.zeros((B, N, T + 3, D), np.float32)}, ValueError, ("query", "7", "key", "2", "swapaxes")
    ),
    "no_key_heads": Wrong(
        {"key": KEY[:, :, :0], "value": KEY[:, :, :0]}, ValueError, ("query", "4", "key", "0", "multiple")
    ),
    "no_dim": Wrong({"query": QUERY[..., :0], "key": KEY[..., :0]}, ValueError, ("query", "0", "at least 1")),
    "no_value_dim": Wrong({"value": KEY[..., :0]}, ValueError, ("value", "0", "at least 1")),
    # bias and mask
    "bias_bool": Wrong({"bias": np.ones((1, 1, T, S), bool)}, TypeError, ("bias", "bool", "floating", "mask")),
    "bias_int": Wrong({"bias": np.ones((1, 1, T, S), int)}, TypeError, ("bias", "int32", "floating", "bias.astype")),
    "bias_number": Wrong({"bias": 1.0}, TypeError, ("bias", "1.0", "array")),
    "bias_shape": Wrong({"bias": np.zeros((B, N, S, T))}, ValueError, ("bias", "(2, 4, 6, 4)", "(2, 4, 4, 6)", "1")),
    "bias_heads": Wrong({"bias": np.zeros((B, K, T, S))}, ValueError, ("bias", "(2, 2, 4, 6)", "(2, 4, 4, 6)")),
    "bias_rank": Wrong({"bias": np.zeros((1, B, N, T, S))}, ValueError, ("bias", "(1, 2, 4, 4, 6)", "(2, 4, 4, 6)")),
    "mask_int": Wrong({"mask": np.ones((T, S), int)}, TypeError, ("mask", "int32", "bool", "mask.astype(bool)")),
    "mask_float": Wrong({"mask": np.zeros((T, S))}, TypeError, ("mask", "float32", "bool", "bias")),
    "mask_list": Wrong({"mask": [[True]]}, TypeError, ("mask", "[[True]]", "array")),
    "mask_shape": Wrong({"mask": np.ones((B, S), bool)}, ValueError, ("mask", "(2, 6)", "(2, 4, 4, 6)")),
    # numbers
    "scale_string": Wrong({"scale": "sqrt"}, TypeError, ("scale", "'sqrt'", "number")),
    "scale_bool": Wrong({"scale": True}, TypeError, ("scale", "True", "number")),
    "scale_complex": Wrong({"scale": 1j}, TypeError, ("scale", "1j", "number")),
    "scale_complex_array": Wrong({"scale": jnp.array(1j)}, TypeError, ("scale", "complex64", "number")),
    "scale_per_head": Wrong({"scale": np.ones(N)}, ValueError, ("scale", "(4,)", "scalar", "query")),
    "scale_per_head_traced": Wrong({"scale": jnp.ones(N)}, ValueError, ("scale", "(4,)", "scalar", "query")),
    "scale_nan": Wrong({"scale": float("nan")}, ValueError, ("scale", "nan", "finite")),
    "scale_inf": Wrong({"scale": np.float32("inf")}, ValueError, ("scale", "inf", "finite")),
    "scale_beyond_float32": Wrong({"scale": -1e300}, ValueError, ("scale", "-1e+300", "finite", "float32")),
    "cap_beyond_float32": Wrong({"logits_soft_cap": 1e39}, ValueError, ("logits_soft_cap", "1e+39", "float32")),
    "cap_under_float32": Wrong({"logits_soft_cap": 1e-60}, ValueError, ("logits_soft_cap", "1e-60", "float32")),
    "cap_zero": Wrong({"logits_soft_cap": 0.0}, ValueError, ("logits_soft_cap", "0.0", "positive", "None")),
    "cap_negative": Wrong({"logits_soft_cap": -5}, ValueError, ("logits_soft_cap", "-5", "positive", "None")),
    "cap_inf": Wrong({"logits_soft_cap": float("inf")}, ValueError, ("logits_soft_cap", "inf", "finite", "None")),
    "cap_string": Wrong({"logits_soft_cap": "30"}, TypeError, ("logits_soft_cap", "'30'", "number")),
    "cap_array": Wrong({"logits_soft_cap": jnp.float32(30)}, TypeError, ("logits_soft_cap", "30", "static under jit")),
    "cap_vector": Wrong({"logits_soft_cap": np.ones(N)}, TypeError, ("logits_soft_cap", "[4]", "number")),
    "sinks_shape": Wrong({"sinks": np.zeros(K)}, ValueError, ("sinks", "(2,)", "each query head", "(4,)")),
    "sinks_scalar": Wrong({"sinks": 0.0}, TypeError, ("sinks", "0.0", "array")),
    "sinks_int": Wrong({"sinks": np.zeros(N, int)}, TypeError, ("sinks", "int32", "floating", "sinks.astype")),
    # flags
    "causal_int": Wrong({"is_causal": 1}, TypeError, ("is_causal", "1", "True or False")),
    "causal_none": Wrong({"is_causal": None}, TypeError, ("is_causal", "None", "True or False")),
    "causal_array": Wrong({"is_causal": jnp.array(True)}, TypeError, ("is_causal", "True or False", "static")),
    "residual_string": Wrong({"return_residual": "yes"}, TypeError, ("return_residual", "'yes'", "True or False")),
    "deterministic_int": Wrong({"deterministic": 0}, TypeError, ("deterministic", "0", "True or False")),
    "alignment": Wrong({"causal_alignment": "left"}, ValueError, ("causal_alignment", "'left'", "top_left", "bottom")),
    "alignment_none": Wrong({"causal_alignment": None}, ValueError, ("causal_alignment", "None", "top_left")),
    # window
    "window_negative": Wrong(
        {"local_window_size": -2}, ValueError, ("local_window_size", "-2", "negative", "None or -1")
    ),
    "window_side": Wrong(
        {"local_window_size": (3, -7)}, ValueError, ("local_window_size", "(3, -7)", "-7", "None or -1")
    ),
    "window_three": Wrong(
        {"local_window_size": (1, 2, 3)}, ValueError, ("local_window_size", "(1, 2, 3)", "3 sides", "pair")
    ),
    "window_float": Wrong({"local_window_size": (1.0, 2)}, TypeError, ("local_window_size", "(1.0, 2)", "int")),
    "window_bool": Wrong({"local_window_size": True}, TypeError, ("local_window_size", "True", "int")),
    "window_string": Wrong({"local_window_size": "12"}, TypeError, ("local_window_size", "'12'", "int")),
    "window_array": Wrong({"local_window_size": jnp.array([1, 2])}, TypeError, ("local_window_size", "[2]", "static")),
    # lengths
    "lengths_beyond": Wrong({"key_value_seq_lengths": [6, 7]}, ValueError, ("key_value_seq_lengths", "7", "0 to 6")),
    "lengths_negative": Wrong({"query_seq_lengths": [-1, 2]}, ValueError, ("query_seq_lengths", "-1", "0 to 4")),
    "lengths_float": Wrong(
        {"query_seq_lengths": np.ones(B)}, TypeError, ("query_seq_lengths", "float64", "Integers", "astype")
    ),
    "lengths_bool": Wrong(
        {"query_seq_lengths": np.ones(B, bool)}, TypeError, ("query_seq_lengths", "bool", "Integers")
    ),
    "lengths_shape": Wrong(
        {"key_value_seq_lengths": np.ones((B, 1), int)}, ValueError, ("key_value_seq_lengths", "(2, 1)", "(2,)")
    ),
    "lengths_scalar": Wrong({"key_value_seq_lengths": 3}, ValueError, ("key_value_seq_lengths", "()", "(2,)")),
    "lengths_traced_float": Wrong(
        {"query_seq_lengths": jnp.ones(B)}, TypeError, ("query_seq_lengths", "float32", "Integers", "astype")
    ),
    "lengths_ragged": Wrong({"query_seq_lengths": [[1], [1, 2]]}, TypeError, ("query_seq_lengths", "[[1], [1, 2]]")),
    # segment ids
    "ids_one_for_two_lengths": Wrong(
        {"segment_ids": IDS}, ValueError, ("segment_ids", "4", "6", "pair", "key_value_ids")
    ),
    "ids_shape": Wrong({"segment_ids": IDS[0], **SELF}, ValueError, ("segment_ids", "(4,)", "(2, 4)")),
    "ids_swapped": Wrong({"segment_ids": (KEY_IDS, IDS)}, ValueError, ("segment_ids[0]", "(2, 6)", "(2, 4)")),
    "ids_of_keys": Wrong({"segment_ids": (IDS, IDS)}, ValueError, ("segment_ids[1]", "(2, 4)", "(2, 6)")),
    "ids_three": Wrong({"segment_ids": (IDS, KEY_IDS, IDS)}, ValueError, ("segment_ids", "tuple of 3", "pair")),
    "ids_half": Wrong({"segment_ids": (IDS, None)}, ValueError, ("segment_ids", "None", "pair")),
    "ids_float": Wrong(
        {"segment_ids": IDS.astype(np.float32), **SELF}, TypeError, ("segment_ids", "float32", "Integers", "astype")
    ),
    "ids_bool": Wrong({"segment_ids": (IDS.astype(bool), KEY_IDS)}, TypeError, ("segment_ids[0]", "bool", "Integers")),
    "ids_strings": Wrong({"segment_ids": [["a"] * T] * B, **SELF}, TypeError, ("segment_ids", "<U1", "Integers")),
    "ids_wide": Wrong(
        {"segment_ids": np.full((B, T), 2**40), **SELF}, ValueError, ("segment_ids", str(2**40), "int32")
    ),
    # implementation
    "implementation_xla": Wrong(
        {"implementation": "xla"}, ValueError, ("implementation", "'xla'", "'blockwise'", "None")
    ),
    "implementation_unknown": Wrong(
        {"implementation": ["reference", "fa5"]}, ValueError, ("implementation", "'fa5'", "'blockwise'", "sequence")
    ),
    "implementation_empty": Wrong({"implementation": ()}, ValueError, ("implementation", "()", "'blockwise'")),
    "implementation_number": Wrong({"implementation": 4}, TypeError, ("implementation", "4", "'blockwise'")),
    "implementation_mixed": Wrong({"implementation": ["fa4", None]}, TypeError, ("implementation", "None", "sequence")),
    "implementation_unbuilt": Wrong(
        {"implementation": "fa4"}, NotImplementedError, ("implementation", "'fa4'", "implementation='blockwise'")
    ),
    # unknown keywords are Python's own errors
    "keyword": Wrong({"dropout_rate": 0.1}, TypeError, ("attention()", "dropout_rate")),
}


@pytest.mark.parametrize("wrong", CALLS.values(), ids=CALLS)
def test_wrong_call_is_explained(wrong):
    arguments = {"query": QUERY, "key": KEY, "value": KEY, "implementation": "reference", **wrong.arguments}
    with pytest.raises(wrong.error) as caught:
        jax_fa4.attention(**arguments)
    assert caught.type is wrong.error
    message = str(caught.value)
    start = 0
    for part in wrong.says:
        start = message.find(part, start)
        assert start >= 0, f"{part!r} is missing, or out of order, in: {message}"


@pytest.mark.parametrize("name", ["is_causal", "return_residual", "logits_soft_cap", "local_window_size"])
def test_traced_options_ask_for_static_ones(name):
    """Under jit an option that shapes the program is a tracer; the error says what to do, not what a tracer is."""
    call = jax.jit(lambda option: jax_fa4.attention(QUERY, KEY, KEY, **{name: option}))
    with pytest.raises(TypeError, match=f"{name}.*static"):
        call(1)


def test_explain_raises_as_attention_does():
    with pytest.raises(ValueError, match="local_window_size"):
        jax_fa4.explain(QUERY, KEY, KEY, local_window_size=-3)
    with pytest.raises(TypeError, match="dropout_rate"):
        jax_fa4.explain(QUERY, KEY, KEY, dropout_rate=0.1)
