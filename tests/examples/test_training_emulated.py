"""The example trains on the emulated Blackwell GPU, forward and backward by its kernels, as it does in plain JAX.

No Blackwell GPU has run it.
"""

from __future__ import annotations

import io

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from rich.console import Console

import jax_fa4
from examples.train_lm import data, training
from examples.train_lm.model import ModelConfig, Transformer, packed_attention
from jax_fa4 import emulator
from tests.emulator.conftest import built_library, gpu

__all__ = ["built_library", "gpu"]
pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl builds the kernels that the wheel lacks")

STEPS = 3
CONFIG = ModelConfig(layers=1, width=32, query_heads=2, kv_heads=1, head_dim=64, hidden_width=48)


def losses(implementation: str) -> list[float]:
    """Training losses of a few steps, attention in bfloat16."""
    attend = packed_attention(implementation)

    def attention(query, key, value, segment_ids):
        return attend(*(one.astype(jnp.bfloat16) for one in (query, key, value)), segment_ids).astype(query.dtype)

    rows = data.pack([bytes(range(60, 60 + length)) for length in (90, 70, 50, 34)], 136)
    history = training.train(
        Transformer(CONFIG, nnx.Rngs(0)),
        data.batches(rows, 2, seed=0),
        rows,
        attention,
        steps=STEPS,
        eval_every=STEPS,
        learning_rate=1e-2,
        batch_size=2,
        console=Console(file=io.StringIO()),
    )
    return list(history.training)


@pytest.mark.usefixtures("gpu")
def test_losses_equal_those_of_the_reference() -> None:
    emulator.set_options(stuck_after=4_000_000)
    with jax_fa4.target("sm_100"):
        ours = losses("emulated")
    # Bits per byte, about 8 at the start: the roundings of bfloat16 (2^-9) in attention move them by far less.
    np.testing.assert_allclose(ours, losses("reference"), atol=2.0**-8)
    assert ours[-1] < ours[0]
