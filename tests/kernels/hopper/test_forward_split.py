"""Few queries against many keys on the emulated GPU: parts of keys, heads as rows, merged, against float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fa4
from jax_fa4 import arguments
from tests.kernels.forward_checks import compare, draw

pytestmark = pytest.mark.usefixtures("hopper")

LAST = {"is_causal": True, "causal_alignment": "bottom_right"}


@pytest.mark.parametrize(
    ("length", "keys", "heads", "head_dim", "options"),
    [
        (1, 640, (8, 2), 128, {"key_splits": 4}),
        (5, 640, (4, 2), 64, {"key_splits": 5, **LAST}),
        (16, 333, (2, 2), 128, {"key_splits": 3, **LAST}),
        (3, 400, (6, 2), 64, {"key_splits": 4, "local_window_size": (150, 0), "causal_alignment": "bottom_right"}),
        (2, 320, (4, 1), 128, {"key_splits": 2, "key_value_seq_lengths": np.array([100, 250])}),
    ],
    ids=str,
)
def test_parts_are_merged_exactly(
    length: int, keys: int, heads: tuple[int, int], head_dim: int, options: dict[str, Any]
) -> None:
    tensors = draw(length, (2, length, heads[0], head_dim), keys, heads[1], "bfloat16")
    run = jax.jit(
        lambda *tensors: jax_fa4.attention(*tensors, return_residual=True, implementation="emulated", **options)
    )
    out, lse = run(*tensors)
    whole = {name: value for name, value in options.items() if name != "key_splits"}
    compare(arguments.read_call(*tensors, **whole), out, lse)


def test_sinks_and_ids_join_once() -> None:
    """Sinks join in the merge, so that the kernel needs none; ids that lie scattered are compared in every part."""
    tensors = draw(9, (1, 2, 4, 64), 300, 2, "float16")
    ids = (np.array([[1, 0]]), np.arange(300)[None] % 3)
    options: dict[str, Any] = {"segment_ids": ids, "sinks": jnp.array([0.5, -2.0, 1.0, 0.0])}
    out, lse = jax_fa4.attention(*tensors, return_residual=True, implementation="emulated", key_splits=3, **options)
    compare(arguments.read_call(*tensors, **options), out, lse)


def test_explain_says_how_keys_are_cut() -> None:
    query, key = (
        jax.ShapeDtypeStruct((1, length, heads, 128), jnp.bfloat16) for length, heads in ((1, 64), (32768, 8))
    )
    report = str(jax_fa4.explain(query, key, key, implementation="emulated", **LAST))
    assert "16 parts of 2048" in report
    assert "packed" in report
    report = str(jax_fa4.explain(query, key, key, implementation="emulated", key_splits=1, **LAST))
    assert "parts of" not in report
