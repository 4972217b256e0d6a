"""jax_fa4 behind the attention operator of a decoder in the manner of MaxText: the same losses, step by step.

    python -m examples.swap_maxtext

MaxText's decoders do not take an `attention_fn`; their attention layers call an operator

    out, local_max, local_sum = op.apply_attention(query, key, value, decoder_segment_ids, lengths, model_mode, ...)

with queries that are scaled already, grouped heads, the ids of packed documents (0 is padding), and a local window, a
soft cap and sinks besides; the last two results are for decoding, None in training. Two operators of that interface are
here: `DenseOp`, a softmax over a dense mask, and `Fa4Op`, whose body is one call. In MaxText itself the same body goes
where `attention_kernel` chooses one. The decoder below is a small one of our own, written against this interface.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags
from flax import linen

import jax_fa4
from examples.swap_flax import packed_batches

STEPS = flags.DEFINE_integer("maxtext_steps", 10, "Steps of each of the two runs.", lower_bound=1)

MODEL_MODE_TRAIN, MODEL_MODE_AUTOREGRESSIVE = "train", "autoregressive"
LEARNING_RATE = 1e-3
ALLOWED_DIFFERENCE = 1e-3  # of two losses around 5; float32 sums in another order, amplified from step to step
VOCABULARY, WIDTH, HEADS, KV_HEADS, HEAD_DIM = 128, 64, 4, 2, 16

Attended = tuple[jax.Array, jax.Array | None, jax.Array | None]


@dataclasses.dataclass(frozen=True)
class DenseOp:
    """Attention by a mask of every query with every key.

    Attributes:
      sliding_window_size: keys that a query sees, itself included; None: all before it.
      attn_logits_soft_cap: as `jax_fa4.attention`'s.
    """

    sliding_window_size: int | None = None
    attn_logits_soft_cap: float | None = None

    def apply_attention(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        decoder_segment_ids: jax.Array | None,
        lengths: jax.Array | None,
        model_mode: str,
        *,
        sinks: jax.Array | None = None,
    ) -> Attended:
        """Output (B, T, N, D) of query (B, T, N, D), key and value (B, T, K, D)."""
        rows, columns = jnp.indices((query.shape[1], key.shape[1]))
        visible = (columns <= rows)[None]
        if self.sliding_window_size is not None:
            visible &= (rows - columns < self.sliding_window_size)[None]
        if decoder_segment_ids is not None:
            visible &= decoder_segment_ids[:, :, None] == decoder_segment_ids[:, None, :]
        key, value = (jnp.repeat(x, query.shape[2] // key.shape[2], axis=2) for x in (key, value))
        logits = jnp.einsum("btnd,bsnd->bnts", query, key)
        if self.attn_logits_soft_cap is not None:
            logits = self.attn_logits_soft_cap * jnp.tanh(logits / self.attn_logits_soft_cap)
        logits = jnp.where(visible[:, None], logits, -jnp.inf)
        if sinks is not None:
            extra = jnp.broadcast_to(sinks[None, :, None, None], (*logits.shape[:3], 1))
            logits = jnp.concatenate([logits, extra], axis=-1)
        probs = jax.nn.softmax(logits, axis=-1)[..., : key.shape[1]]
        return jnp.einsum("bnts,bsnd->btnd", probs, value), None, None


@dataclasses.dataclass(frozen=True)
class Fa4Op(DenseOp):
    """The same by jax_fa4. Padding, id 0, stays a document of its own, as it is in MaxText: its loss is masked out."""

    def apply_attention(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        decoder_segment_ids: jax.Array | None,
        lengths: jax.Array | None,
        model_mode: str,
        *,
        sinks: jax.Array | None = None,
    ) -> Attended:
        """As `DenseOp`. Raises ValueError for decoding, where MaxText merges by the two other results."""
        if model_mode == MODEL_MODE_AUTOREGRESSIVE:
            raise ValueError(
                f"model_mode is {model_mode!r}. 'train' and 'prefill' are accepted: decoding keeps attention_kernel "
                "'dot_product', as with MaxText's other kernels."
            )
        out = jax_fa4.attention(
            query,
            key,
            value,
            scale=1.0,  # MaxText scales queries before
            is_causal=True,
            local_window_size=None if self.sliding_window_size is None else (self.sliding_window_size - 1, 0),
            segment_ids=decoder_segment_ids,
            logits_soft_cap=self.attn_logits_soft_cap,
            sinks=sinks,
        )
        return out, None, None


class Attention(linen.Module):
    """Projections around the operator; sinks where it has a window, as models that alternate the two have."""

    op: DenseOp

    @linen.compact
    def __call__(self, inputs: jax.Array, decoder_segment_ids: jax.Array, model_mode: str) -> jax.Array:
        """Inputs (B, T, WIDTH) to outputs of their shape."""
        query = linen.DenseGeneral((HEADS, HEAD_DIM), use_bias=False, name="query")(inputs) * HEAD_DIM**-0.5
        key = linen.DenseGeneral((KV_HEADS, HEAD_DIM), use_bias=False, name="key")(inputs)
        value = linen.DenseGeneral((KV_HEADS, HEAD_DIM), use_bias=False, name="value")(inputs)
        sinks = None
        if self.op.sliding_window_size is not None:
            sinks = self.param("sinks", linen.initializers.normal(1.0), (HEADS,))
        out, _, _ = self.op.apply_attention(query, key, value, decoder_segment_ids, None, model_mode, sinks=sinks)
        return linen.DenseGeneral(WIDTH, axis=(-2, -1), use_bias=False, name="out")(out)


class Decoder(linen.Module):
    """Layers with a sliding window and without, in turn."""

    kind: type[DenseOp]

    @linen.compact
    def __call__(
        self,
        decoder_input_tokens: jax.Array,
        decoder_positions: jax.Array,
        decoder_segment_ids: jax.Array,
        model_mode: str = MODEL_MODE_TRAIN,
    ) -> jax.Array:
        """Tokens, places within documents and ids (B, T) to logits (B, T, VOCABULARY)."""
        x = linen.Embed(VOCABULARY, WIDTH)(decoder_input_tokens) + linen.Embed(64, WIDTH)(decoder_positions)
        for op in (self.kind(sliding_window_size=6), self.kind(attn_logits_soft_cap=20.0)):
            x = x + Attention(op)(linen.RMSNorm()(x), decoder_segment_ids, model_mode)
            hidden = linen.Dense(2 * WIDTH, use_bias=False)(linen.RMSNorm()(x))
            x = x + linen.Dense(WIDTH, use_bias=False)(linen.silu(hidden))
        return linen.Dense(VOCABULARY, use_bias=False)(linen.RMSNorm()(x))


def train(kind: type[DenseOp], steps: int) -> list[float]:
    """The losses of a decoder on packed tokens, the next of which it predicts."""
    tokens, segments, positions = packed_batches(steps)
    model, optimizer = Decoder(kind), optax.adam(LEARNING_RATE)
    variables: Any = Decoder(DenseOp).init(jax.random.key(0), tokens[0], positions[0], segments[0])
    state = optimizer.init(variables)

    @jax.jit
    def step(
        variables: Any, state: Any, tokens: jax.Array, segments: jax.Array, positions: jax.Array
    ) -> tuple[Any, Any, jax.Array]:
        def loss_of(variables: Any) -> jax.Array:
            logits: Any = model.apply(variables, tokens, positions, segments)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
            return jnp.mean(losses, where=(segments[:, 1:] > 0) & (segments[:, 1:] == segments[:, :-1]))

        loss, gradients = jax.value_and_grad(loss_of)(variables)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(variables, updates), state, loss

    losses = []
    for batch in zip(tokens, segments, positions, strict=True):
        variables, state, loss = step(variables, state, *batch)
        losses.append(float(loss))
    return losses


def main(arguments: list[str]) -> None:
    """Train with each operator, print the losses, and fail where they differ."""
    if len(arguments) > 1:
        raise app.UsageError(f"unexpected arguments {arguments[1:]}")
    before, after = (train(kind, STEPS.value) for kind in (DenseOp, Fa4Op))
    print("step   dense mask   jax_fa4")
    for number, (theirs, ours) in enumerate(zip(before, after, strict=True)):
        print(f"{number:4d}   {theirs:10.6f}   {ours:.6f}")
    difference = float(np.abs(np.subtract(before, after)).max())
    print(f"largest difference {difference:.1e}")
    if difference > ALLOWED_DIFFERENCE:
        raise SystemExit(f"the losses differ by {difference:.1e}, more than {ALLOWED_DIFFERENCE}")


if __name__ == "__main__":
    app.run(main)
