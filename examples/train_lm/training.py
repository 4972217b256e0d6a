"""Loss, optimiser, one step, and the loop with its progress bar."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn

from examples.train_lm.data import PADDING_ID, Rows
from examples.train_lm.model import AttentionFunction, Transformer


def token_losses(logits: jax.Array, rows: Rows) -> tuple[jax.Array, jax.Array]:
    """Loss in bits of predicting each next byte, and which of them count; both (B, T), float32 and bool.

    A byte is predicted from the one before it only within a document: never across documents, never in padding.
    """
    segment_ids = jnp.asarray(rows.segment_ids)
    targets = jnp.roll(jnp.asarray(rows.tokens), -1, axis=1)
    next_ids = jnp.roll(segment_ids, -1, axis=1).at[:, -1].set(PADDING_ID)
    counted = (segment_ids == next_ids) & (segment_ids != PADDING_ID)
    nats = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets)
    return nats / math.log(2), counted


def bits_per_byte(model: Transformer, rows: Rows, attention: AttentionFunction) -> jax.Array:
    """Mean loss in bits over every byte that is predicted; a float32 scalar."""
    losses, counted = token_losses(model(*rows, attention), rows)
    return jnp.sum(losses, where=counted) / jnp.maximum(counted.sum(), 1)


def make_optimizer(model: Transformer, steps: int, learning_rate: float) -> nnx.Optimizer:
    """AdamW; the rate rises over the first tenth of the steps, then falls to a tenth along a cosine."""
    rate = optax.warmup_cosine_decay_schedule(
        0.0, learning_rate, warmup_steps=max(steps // 10, 1), decay_steps=max(steps, 2), end_value=learning_rate / 10
    )
    chain = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.98, weight_decay=0.01))
    return nnx.Optimizer(model, chain, wrt=nnx.Param)


StepFunction = Callable[[Transformer, nnx.Optimizer, Rows], jax.Array]


def make_step(attention: AttentionFunction) -> StepFunction:
    """One compiled training step with the given attention; updates model and optimiser, returns the loss in bits."""

    @nnx.jit
    def step(model: Transformer, optimizer: nnx.Optimizer, rows: Rows) -> jax.Array:
        loss, gradients = nnx.value_and_grad(bits_per_byte)(model, rows, attention)
        optimizer.update(model, gradients)
        return loss

    return step


def make_evaluation(attention: AttentionFunction, batch_size: int) -> Callable[[Transformer, Rows], float]:
    """A function that gives held-out bits per byte, computed `batch_size` rows at a time."""

    @nnx.jit
    def sums(model: Transformer, rows: Rows) -> tuple[jax.Array, jax.Array]:
        losses, counted = token_losses(model(*rows, attention), rows)
        return jnp.sum(losses, where=counted), counted.sum()

    def evaluate(model: Transformer, rows: Rows) -> float:
        parts = [
            sums(model, rows.take(slice(start, start + batch_size)))
            for start in range(0, len(rows.tokens) - batch_size + 1, batch_size)
        ]
        return float(sum(bits for bits, _ in parts) / sum(count for _, count in parts))

    return evaluate


@dataclass
class History:
    """What happened: losses in bits per byte, by step."""

    training: list[float] = field(default_factory=list)
    held_out: dict[int, float] = field(default_factory=dict)
    tokens_per_second: float = 0.0


def train(
    model: Transformer,
    rows: Iterator[Rows],
    held_out: Rows,
    attention: AttentionFunction,
    *,
    steps: int,
    eval_every: int,
    learning_rate: float,
    batch_size: int,
    console: Console,
) -> History:
    """Train `model` in place; prints held-out bits per byte at the start, every `eval_every` steps and at the end."""
    optimizer = make_optimizer(model, steps, learning_rate)
    step, evaluate = make_step(attention), make_evaluation(attention, batch_size)
    history = History()
    columns: list[str | ProgressColumn] = [
        "train",
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
    ]

    def report(done: int) -> None:
        history.held_out[done] = evaluate(model, held_out)
        recent = history.training[-eval_every:]
        trained = f"training {sum(recent) / len(recent):.3f}, " if recent else ""
        console.print(f"step {done:4d}: {trained}held out [bold]{history.held_out[done]:.3f}[/] bits per byte")

    with Progress(*columns, console=console) as progress:
        task = progress.add_task("compiling", total=steps)
        report(0)
        timed_seconds = 0.0
        for done in range(1, steps + 1):
            batch = next(rows)
            started = time.perf_counter()
            history.training.append(float(step(model, optimizer, batch)))
            if done > 1:  # the first step compiles
                timed_seconds += time.perf_counter() - started
                history.tokens_per_second = (done - 1) * batch.tokens.size / timed_seconds
            speed = f"{history.training[-1]:.2f} bits per byte, {history.tokens_per_second:,.0f} tokens/s"
            progress.update(task, advance=1, description=speed)
            if done % eval_every == 0 or done == steps:
                report(done)
    return history
