"""Any packing of documents through the Hopper kernels on the emulated GPU, forward and backward.

Shapes are fixed and ids are traced, so that one program serves every example.
"""

from __future__ import annotations

import functools
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck
from hypothesis import strategies as st

import jax_fa4
from jax_fa4 import arguments
from tests.kernels.forward_checks import compare, draw
from tests.test_properties import segment_ids

pytestmark = pytest.mark.usefixtures("hopper")

QUERIES, KEYS, HEADS, KV_HEADS, HEAD_DIM = 140, 210, 2, 1, 64
OPTIONS: dict[str, Any] = {"is_causal": True, "causal_alignment": "bottom_right"}


def tensors() -> tuple[jax.Array, jax.Array, jax.Array]:
    return draw(30, (2, QUERIES, HEADS, HEAD_DIM), KEYS, KV_HEADS, "bfloat16")


@functools.cache
def attend() -> Any:
    """Output and log-sum-exp for ids of queries and keys."""
    options: dict[str, Any] = {**OPTIONS, "implementation": "emulated"}

    def run(query_ids: jax.Array, key_ids: jax.Array) -> Any:
        plan = jax_fa4.plan_segments((query_ids, key_ids), heads=(HEADS, KV_HEADS), head_dim=HEAD_DIM, **options)
        return jax_fa4.attention(*tensors(), segment_ids=plan, return_residual=True, **options)

    return jax.jit(run)


@hypothesis.settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@hypothesis.given(segment_ids(2, QUERIES), segment_ids(2, KEYS))
def test_any_packing(query_ids: np.ndarray, key_ids: np.ndarray) -> None:
    out, lse = attend()(jnp.asarray(query_ids), jnp.asarray(key_ids))
    call = arguments.read_call(*tensors(), segment_ids=(query_ids, key_ids), **OPTIONS)
    compare(call, out, lse)


@functools.cache
def sensitivity() -> Any:
    """Gradients by keys and values of the outputs of the queries chosen."""

    def chosen(key: jax.Array, value: jax.Array, is_chosen: jax.Array, ids: Any) -> jax.Array:
        out = jax_fa4.attention(tensors()[0], key, value, segment_ids=ids, implementation="emulated", **OPTIONS)
        return jnp.where(is_chosen[:, :, None, None], out.astype(jnp.float32), 0).sum()

    return jax.jit(jax.grad(chosen, argnums=(0, 1)))


@hypothesis.settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@hypothesis.given(segment_ids(2, QUERIES), segment_ids(2, KEYS), st.integers(0, 2))
def test_no_gradient_leaves_a_document(query_ids: np.ndarray, key_ids: np.ndarray, document: int) -> None:
    """NaN in all padding, and gradients that are exactly zero outside of the document."""
    _, key, value = tensors()
    is_padding = jnp.asarray(key_ids < 0)[:, :, None, None]
    key, value = (jnp.where(is_padding, jnp.nan, one) for one in (key, value))
    ids = jnp.asarray(query_ids), jnp.asarray(key_ids)
    for grad in sensitivity()(key, value, jnp.asarray(query_ids == document), ids):
        assert (np.asarray(grad.astype(jnp.float32))[key_ids != document] == 0).all()
