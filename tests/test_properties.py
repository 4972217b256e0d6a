"""Hypothesis explores whole problems: blockwise against the dense reference in float64, values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.inputs import attention

LENGTHS = st.one_of(
    st.integers(0, 20), st.integers(0, 300), st.sampled_from([63, 64, 65, 127, 128, 129, 255, 256, 257])
)


@st.composite
def segment_ids(draw, batch, length):
    """Ids of a batch of rows: packed in order, shuffled, interleaved, or anything; negative ids are padding."""
    kind = draw(st.sampled_from(["packed", "unsorted", "interleaved", "anything"]))
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    documents = draw(st.integers(1, 6))
    if kind == "interleaved":
        ids = np.arange(length)[None] % documents + np.zeros((batch, 1), int)
    else:
        ids = rng.integers(-1, documents, (batch, length))
        if kind == "packed":
            ids = np.sort(ids, axis=1)[:, ::-1]
        elif kind == "unsorted":
            order = rng.permutation(documents + 1)
            ids = order[np.sort(ids, axis=1) + 1] - 1
    return np.ascontiguousarray(ids, np.int32)


@st.composite
def problems(draw):
    """(operands, options): shapes 0..300 and any combination of options."""
    batch, kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    query_length, key_length = draw(LENGTHS), draw(LENGTHS)
    head_dim, value_dim = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    heads = kv_heads * group
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    shapes = {
        "query": (batch, query_length, heads, head_dim),
        "key": (batch, key_length, kv_heads, head_dim),
        "value": (batch, key_length, kv_heads, value_dim),
    }
    operands = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    options = {"is_causal": draw(st.booleans())}
    if draw(st.booleans()):
        options["causal_alignment"] = "bottom_right"
    if draw(st.booleans()):
        side = st.one_of(st.none(), st.integers(0, 40))
        options["local_window_size"] = (draw(side), draw(side))
    if draw(st.booleans()):
        options["query_seq_lengths"] = rng.integers(0, query_length + 1, batch).astype(np.int32)
    if draw(st.booleans()):
        options["key_value_seq_lengths"] = rng.integers(0, key_length + 1, batch).astype(np.int32)
    if draw(st.booleans()):
        options["segment_ids"] = (draw(segment_ids(batch, query_length)), draw(segment_ids(batch, key_length)))
    if draw(st.booleans()):
        options["logits_soft_cap"] = draw(st.floats(0.5, 20.0))
    if draw(st.booleans()):
        options["scale"] = draw(st.floats(0.01, 1.0))
    for name in ("bias", "mask"):
        if draw(st.booleans()) and draw(st.booleans()):
            full = (batch, heads, query_length, key_length)
            shape = tuple(size if draw(st.booleans()) else 1 for size in full)
            operands[name] = rng.normal(size=shape) if name == "bias" else rng.random(shape) > 0.3
    if draw(st.booleans()):
        operands["sinks"] = rng.normal(size=heads)
    return operands, options, draw(st.booleans())


def evaluate(operands, options, implementation):
    """Output, LSE, and the gradients of a loss on both for every floating operand."""
    differentiable = {name: x for name, x in operands.items() if name != "mask"}

    def loss(floats):
        out, lse = attention(**(operands | floats), **options, return_residual=True, implementation=implementation)
        seen = jnp.where(jnp.isfinite(lse), lse, 0.0)
        return jnp.sum(jnp.sin(out + 0.3)) + jnp.sum(jnp.cos(seen)), (out, lse)

    grads, results = jax.jit(jax.grad(loss, has_aux=True))(differentiable)
    return results, grads


def check(problem):
    operands, options, traced = problem
    with jax.enable_x64(True):
        operands = jax.tree.map(jnp.asarray, operands)
        if traced:
            options = {
                k: jax.tree.map(jnp.asarray, v) if "ids" in k or "lengths" in k else v for k, v in options.items()
            }
        (out, lse), grads = evaluate(operands, options, "blockwise")
        (expected_out, expected_lse), expected_grads = evaluate(operands, options, "reference")
        assert out.dtype == jnp.float64
        np.testing.assert_allclose(out, expected_out, atol=1e-11, rtol=1e-11)
        np.testing.assert_allclose(lse, expected_lse, atol=1e-11, rtol=1e-11)
        for name, expected in expected_grads.items():
            np.testing.assert_allclose(grads[name], expected, atol=1e-10, rtol=1e-10, err_msg=name)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(problems())
def test_blockwise_equals_reference(problem):
    check(problem)


@pytest.mark.slow
@settings(max_examples=1500, deadline=None, suppress_health_check=list(HealthCheck))
@given(problems())
def test_blockwise_equals_reference_at_length(problem):
    check(problem)
