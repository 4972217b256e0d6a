"""jax_fa4 in a published Flax model whose code stays as it is: the same losses, step by step.

    pip install --no-deps vitax && pip install "transformers<5"
    python -m examples.swap_flax                                        # vitax, an nnx vision transformer

    git clone --depth 1 https://github.com/google/flax
    python -m examples.swap_flax --lm1b flax/examples/lm1b/models.py    # the linen language model of Flax's examples

Each model is trained twice from the same parameters on the same batches, with Flax's own attention and with jax_fa4's,
and the losses are printed side by side. The language model gets packed documents: Flax's way is a mask (B, 1, T, T),
jax_fa4's are segment ids.
"""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags
from flax import nnx

import jax_fa4.flax

LM1B = flags.DEFINE_string("lm1b", None, "models.py of Flax's example lm1b; without it, vitax is trained.")
STEPS = flags.DEFINE_integer("training_steps", 10, "Steps of each of the two runs.", lower_bound=1)

Losses = list[float]
LEARNING_RATE = 1e-3
ALLOWED_DIFFERENCE = 1e-3  # of two losses around 3; float32 sums in another order, amplified from step to step


def train_vitax(steps: int) -> tuple[Losses, Losses]:
    """The losses of `vitax.VisionTransformer` on random pictures: with Flax's attention, with jax_fa4's."""
    try:
        import vitax
    except ImportError as error:
        raise app.UsageError(f"vitax cannot be imported ({error}); see the head of this file, or use --lm1b") from error

    images = jax.random.normal(jax.random.key(0), (steps, 8, 32, 32, 3))
    labels = jax.random.randint(jax.random.key(1), (steps, 8), 0, 10)

    def train(swap: bool) -> Losses:
        model = vitax.VisionTransformer(
            num_classes=10, img_size=32, patch_size=8, num_layers=2, num_heads=4, mlp_dim=64, hidden_size=64,
            dropout_rate=0.0, fsdp=False, rngs=nnx.Rngs(0),
        )  # fmt: skip
        if swap:
            jax_fa4.flax.swap_nnx_attention(model, jax_fa4.flax.attention_fn())
        optimizer = nnx.Optimizer(model, optax.adam(LEARNING_RATE), wrt=nnx.Param)

        @nnx.jit
        def step(model: nnx.Module, optimizer: nnx.Optimizer, images: jax.Array, labels: jax.Array) -> jax.Array:
            def loss_of(model: nnx.Module) -> jax.Array:
                return vitax.compute_losses_and_logits(model, images, labels)[0]

            loss, gradients = nnx.value_and_grad(loss_of)(model)
            optimizer.update(model, gradients)
            return loss

        return [float(step(model, optimizer, *batch)) for batch in zip(images, labels, strict=True)]

    return train(swap=False), train(swap=True)


def packed_batches(steps: int, batch: int = 4, length: int = 64) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens (0 is padding), segments (from 1 on, 0 is padding) and positions, each (steps, batch, length) int32."""
    draw = np.random.default_rng(0)
    segments = np.zeros((steps, batch, length), np.int32)
    positions = np.zeros_like(segments)
    for row in np.ndindex(steps, batch):
        start = 0
        for number, size in enumerate(draw.integers(8, 28, size=3), 1):
            segments[row][start : start + size] = number
            positions[row][start : start + size] = np.arange(min(size, length - start))
            start += size
    tokens = np.where(segments > 0, draw.integers(1, 128, size=segments.shape), 0)
    return tokens.astype(np.int32), segments, positions


def train_lm1b(path: Path, steps: int) -> tuple[Losses, Losses]:
    """The losses of `TransformerLM` in a models.py of Flax's lm1b, on packed tokens: Flax's attention, jax_fa4's."""
    spec = importlib.util.spec_from_file_location("lm1b_models", path)
    if spec is None or spec.loader is None or not path.exists():
        raise app.UsageError(
            f"--lm1b is {path}, which is no Python file; the file examples/lm1b/models.py of Flax is meant"
        )
    models: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(models)
    config = models.TransformerConfig(
        vocab_size=128, output_vocab_size=128, emb_dim=64, num_heads=4, num_layers=2, qkv_dim=64, mlp_dim=128,
        max_len=64, deterministic=True,
    )  # fmt: skip
    model = models.TransformerLM(config)
    batches = packed_batches(steps)
    attend = jax_fa4.flax.attention_fn(is_causal=True, mask_is_redundant=True)

    def with_mask(variables: Any, tokens: jax.Array, segments: jax.Array, positions: jax.Array) -> jax.Array:
        return model.apply(variables, tokens, positions, segments)

    def with_segments(variables: Any, tokens: jax.Array, segments: jax.Array, positions: jax.Array) -> jax.Array:
        ids = jnp.where(segments > 0, segments, -1)
        with jax_fa4.flax.segment_ids(ids), jax_fa4.flax.swapped_linen_attention(attend):
            return model.apply(variables, tokens, positions, segments)

    def train(apply: Callable[..., jax.Array]) -> Losses:
        variables = model.init(jax.random.key(0), batches[0][0])
        optimizer = optax.adam(LEARNING_RATE)
        state = optimizer.init(variables)

        @jax.jit
        def step(variables: Any, state: Any, *batch: jax.Array) -> tuple[Any, Any, jax.Array]:
            tokens = batch[0]

            def loss_of(variables: Any) -> jax.Array:
                losses = optax.softmax_cross_entropy_with_integer_labels(apply(variables, *batch), tokens)
                return jnp.mean(losses, where=tokens > 0)

            loss, gradients = jax.value_and_grad(loss_of)(variables)
            updates, state = optimizer.update(gradients, state)
            return optax.apply_updates(variables, updates), state, loss

        losses = []
        for batch in zip(*batches, strict=True):
            variables, state, loss = step(variables, state, *batch)
            losses.append(float(loss))
        return losses

    return train(with_mask), train(with_segments)


def main(arguments: list[str]) -> None:
    """Train twice, print the losses, and fail where they differ."""
    if len(arguments) > 1:
        raise app.UsageError(f"unexpected arguments {arguments[1:]}")
    before, after = train_lm1b(Path(LM1B.value), STEPS.value) if LM1B.value else train_vitax(STEPS.value)
    print("step   Flax's attention   jax_fa4")
    for number, (theirs, ours) in enumerate(zip(before, after, strict=True)):
        print(f"{number:4d}   {theirs:16.6f}   {ours:.6f}")
    difference = max(abs(theirs - ours) for theirs, ours in zip(before, after, strict=True))
    print(f"largest difference {difference:.1e}")
    if difference > ALLOWED_DIFFERENCE:
        raise SystemExit(f"the losses differ by {difference:.1e}, more than {ALLOWED_DIFFERENCE}")


if __name__ == "__main__":
    app.run(main)
