"""`make demo`: train on packed documents, then check the result for leaks and for speed.

Every size is a flag: `python -m examples.train_lm --help`.
"""

from pathlib import Path

import jax
import numpy as np
from absl import app, flags, logging
from flax import nnx
from rich.console import Console

import jax_fa4
from examples.train_lm import checks, data, pictures, training
from examples.train_lm.model import (
    AttentionFunction,
    ModelConfig,
    Transformer,
    dense_attention,
    leaking_attention,
    packed_attention,
)

STEPS = flags.DEFINE_integer("steps", 112, "Training steps.", lower_bound=1)
EVAL_EVERY = flags.DEFINE_integer("eval_every", 28, "Steps from one evaluation to the next.", lower_bound=1)
EVAL_ROWS = flags.DEFINE_integer("eval_rows", 12, "Held-out rows to evaluate on.", lower_bound=1)
BATCH_SIZE = flags.DEFINE_integer("batch_size", 2, "Rows per step.", lower_bound=1)
ROW_LENGTH = flags.DEFINE_integer("row_length", 2048, "Tokens (bytes) per row.", lower_bound=2)
HELD_OUT_PERCENT = flags.DEFINE_integer("held_out_percent", 5, "Share of files held out.", 1, 50)
LEARNING_RATE = flags.DEFINE_float("learning_rate", 4e-3, "Highest learning rate.", lower_bound=0.0)
LAYERS = flags.DEFINE_integer("layers", 4, "Transformer layers.", lower_bound=1)
WIDTH = flags.DEFINE_integer("width", 128, "Width of the residual stream.", lower_bound=8)
QUERY_HEADS = flags.DEFINE_integer("query_heads", 2, "Query heads.", lower_bound=1)
KV_HEADS = flags.DEFINE_integer("kv_heads", 1, "Key and value heads; divides query_heads.", lower_bound=1)
HEAD_DIM = flags.DEFINE_integer("head_dim", 64, "Size of a head; even.", lower_bound=2)
DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Type of activations.")
IMPLEMENTATION = flags.DEFINE_string("implementation", None, "Implementation of jax_fa4.attention; best one if unset.")
SEED = flags.DEFINE_integer("seed", 0, "Seed of parameters and of the order of rows.")
TIMED_STEPS = flags.DEFINE_integer("timed_steps", 3, "Steps per candidate of the speed comparison; 0 leaves it out.")
OUT = flags.DEFINE_string("out", "out", "Folder for the pictures.")


def load_rows(console: Console) -> tuple[data.Rows, data.Rows]:
    """Training rows and the held-out rows that are evaluated."""
    sources = data.library_sources()
    training_files, held_out_files = data.split_by_file(sources, HELD_OUT_PERCENT.value)
    rows, held_out = (data.pack(files, ROW_LENGTH.value) for files in (training_files, held_out_files))
    order = np.random.default_rng(SEED.value).permutation(len(held_out.tokens))
    held_out = held_out.take(order[: EVAL_ROWS.value])
    padding = (rows.segment_ids == data.PADDING_ID).mean()
    console.print(
        f"{len(training_files)} files to train on, {len(held_out_files)} held out\n"
        f"{len(rows.tokens)} rows of {ROW_LENGTH.value} bytes, {padding:.1%} padding, "
        f"{rows.documents_per_row.max()} documents in the fullest"
    )
    return rows, held_out


def make_model(console: Console) -> Transformer:
    """The transformer that the flags describe."""
    config = ModelConfig(
        layers=LAYERS.value,
        width=WIDTH.value,
        query_heads=QUERY_HEADS.value,
        kv_heads=KV_HEADS.value,
        head_dim=HEAD_DIM.value,
        hidden_width=3 * WIDTH.value,
        dtype=DTYPE.value,
    )
    model = Transformer(config, nnx.Rngs(SEED.value))
    parameters = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    console.print(f"{config.layers} layers, width {config.width}, {parameters / 1e6:.2f} million parameters")
    return model


def report_leaks(model: Transformer, rows: data.Rows, attention: AttentionFunction, console: Console) -> None:
    """Print what one document's loss feels of its neighbours, with segment ids and without."""
    row = rows.shared().take(slice(0, 1))
    console.rule("Do documents leak into each other?")
    console.print(f"A row of {row.documents_per_row[0]} documents; gradient of the last one's loss (largest entry) by")
    leaks = {"jax_fa4, segment_ids": attention, "jax.nn, causal only": leaking_attention}
    for name, candidate in leaks.items():
        leak = checks.measure_leak(model, row, candidate)
        verdict = "[green]nothing leaks[/]" if leak.others == 0.0 else "[red]they leak[/]"
        console.print(f"  {name:22s} its own inputs {leak.own:.3g}, the others' {leak.others:.3g}: {verdict}")


def report_speed(model: Transformer, rows: data.Rows, attention: AttentionFunction, console: Console) -> None:
    """Print tokens per second of training on jax_fa4 and on jax.nn, measured in turn."""
    console.rule("How fast is a training step?")
    candidates = {"jax_fa4": attention, "jax.nn, dense mask": dense_attention}
    speeds = checks.tokens_per_second(model, rows, candidates, TIMED_STEPS.value)
    ours, dense = speeds.values()
    for name, speed in speeds.items():
        console.print(f"  {name:22s} {speed:8,.0f} tokens/s")
    console.print(f"  {ours / dense:.2f} times as fast")


def explain_call(model: Transformer, rows: data.Rows, console: Console) -> None:
    """Print which implementation the model's attention calls get, and why."""
    config = model.config
    shape = (*rows.tokens.shape, config.query_heads, config.head_dim)
    query = jax.ShapeDtypeStruct(shape, config.dtype)
    segment_ids = jax.ShapeDtypeStruct(shape[:2], "int32")  # traced, as in the training step
    key = jax.ShapeDtypeStruct((*shape[:2], config.kv_heads, config.head_dim), config.dtype)
    report = jax_fa4.explain(
        query, key, key, segment_ids=segment_ids, is_causal=True, implementation=IMPLEMENTATION.value
    )
    console.rule("What jax_fa4.explain says of one attention call")
    console.print(str(report), markup=False, soft_wrap=True)


def main(arguments: list[str]) -> None:
    """Run the demonstration."""
    if len(arguments) > 1:
        raise app.UsageError(f"unexpected arguments {arguments[1:]}; sizes are flags, such as --steps=10")
    logging.set_verbosity(logging.WARNING)
    console = Console(highlight=False)
    console.rule("A language model on Python's standard library")
    rows, held_out = load_rows(console)
    model = make_model(console)
    attention = packed_attention(IMPLEMENTATION.value)
    batches = data.batches(rows, BATCH_SIZE.value, SEED.value)
    entropy = data.unigram_entropy(held_out)
    history = training.train(
        model,
        batches,
        held_out,
        attention,
        steps=STEPS.value,
        eval_every=EVAL_EVERY.value,
        learning_rate=LEARNING_RATE.value,
        batch_size=BATCH_SIZE.value,
        console=console,
    )
    console.print(f"a model that sees no context could reach {entropy:.3f} bits per byte")
    report_leaks(model, rows, attention, console)
    batch = next(batches)
    if TIMED_STEPS.value:
        report_speed(model, batch, attention, console)
    explain_call(model, batch, console)
    out = Path(OUT.value)
    out.mkdir(parents=True, exist_ok=True)
    pictures.draw_losses(history, entropy, out / "loss.png")
    pictures.draw_tiles(rows, model.config, out / "tiles.png")
    console.print(f"pictures: {out / 'loss.png'}, {out / 'tiles.png'}")


if __name__ == "__main__":
    app.run(main)
