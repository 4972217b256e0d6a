"""Two questions about a trained model: does a document see another one, and how fast is a step."""

import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from examples.train_lm.data import Rows
from examples.train_lm.model import AttentionFunction, Transformer
from examples.train_lm.training import make_optimizer, make_step, token_losses


class Leak(NamedTuple):
    """Largest absolute gradient of one document's loss, by whose input embeddings it was taken."""

    own: float
    others: float


def measure_leak(model: Transformer, row: Rows, attention: AttentionFunction) -> Leak:
    """Gradient of the last document's loss with respect to every input embedding of a row.

    Where documents are kept apart, the gradient that reaches the others' embeddings is exactly zero.
    """
    last = row.documents_per_row[0] - 1
    embeddings = model.embedding(jnp.asarray(row.tokens))

    def loss_of_last_document(embeddings: jax.Array) -> jax.Array:
        logits = model.from_embeddings(embeddings, row.segment_ids, row.positions, attention)
        losses, counted = token_losses(logits, row)
        return jnp.sum(losses, where=counted & (row.segment_ids == last))

    gradient = np.abs(np.asarray(jax.jit(jax.grad(loss_of_last_document))(embeddings), np.float32))
    own = row.segment_ids == last
    return Leak(own=float(gradient[own].max()), others=float(gradient[~own].max()))


def tokens_per_second(
    model: Transformer, rows: Rows, attentions: dict[str, AttentionFunction], repeats: int
) -> dict[str, float]:
    """Speed of a whole training step with each attention, from the median of `repeats` steps taken in turn.

    Steps of the candidates alternate, so that whatever else the machine does falls on all of them alike. The model is
    copied first and stays as it is.
    """
    candidates = {}
    for name, attention in attentions.items():
        copy = nnx.clone(model)
        candidates[name] = (make_step(attention), copy, make_optimizer(copy, steps=repeats + 1, learning_rate=1e-4))
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for repeat in range(repeats + 1):
        for name, (step, copy, optimizer) in candidates.items():
            started = time.perf_counter()
            step(copy, optimizer, rows).block_until_ready()
            if repeat:  # the first step compiles
                seconds[name].append(time.perf_counter() - started)
    return {name: rows.tokens.size / float(np.median(times)) for name, times in seconds.items()}
