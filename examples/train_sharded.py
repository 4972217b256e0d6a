"""The demonstration's model over a mesh: data x tensor x sequence, with checkpoints from which it goes on.

    python -m examples.train_sharded                                       # on eight CPU devices, two along each axis
    python -m examples.train_sharded --cpu_devices=0 --mesh=sequence=2     # on two GPUs

Nothing in the model speaks of devices: parameters and rows are placed, the query, key and value are said to be split by
batch, sequence and heads, and jit does the rest. Attention goes round a ring where the sequence is split. State is kept
by orbax every --save_every steps; the same command goes on where the last one stopped, on the same batches.

Several hosts: start one process on each with --distributed (jax.distributed finds its coordinator from the cluster's
environment; elsewhere set JAX_COORDINATOR_ADDRESS and give --process_count and --process_index). Every process makes
all rows and keeps the part that its devices hold; --checkpoints must then be a folder that all of them see.
"""

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from absl import app, flags, logging
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

from examples.train_lm import data
from examples.train_lm.model import AttentionFunction, ModelConfig, Transformer, packed_attention
from examples.train_lm.training import bits_per_byte

MESH = flags.DEFINE_string("mesh", "data=2,tensor=2,sequence=2", "Devices along each axis; their product is used.")
CPU_DEVICES = flags.DEFINE_integer("cpu_devices", 8, "Make so many CPU devices; 0: the devices that are there.")
STEPS = flags.DEFINE_integer("steps", 100, "Training steps in all, those before a restart counted in.", lower_bound=1)
BATCH_SIZE = flags.DEFINE_integer("batch_size", 8, "Rows of a step.", lower_bound=1)
ROW_LENGTH = flags.DEFINE_integer("row_length", 512, "Bytes of a row.", lower_bound=2)
LAYERS = flags.DEFINE_integer("layers", 2, "Layers.", lower_bound=1)
WIDTH = flags.DEFINE_integer("width", 128, "Width of the residual stream.", lower_bound=8)
HEADS = flags.DEFINE_integer("heads", 4, "Query heads, of 64; half as many KV heads.", lower_bound=2)
DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Of activations; parameters are float32.")
LEARNING_RATE = flags.DEFINE_float("learning_rate", 1e-3, "Highest learning rate.", lower_bound=0)
CHECKPOINTS = flags.DEFINE_string("checkpoints", "out/train_sharded", "Folder of the checkpoints; empty: none.")
SAVE_EVERY = flags.DEFINE_integer("save_every", 25, "Steps between checkpoints.", lower_bound=1)
REPORT_EVERY = flags.DEFINE_integer("report_every", 10, "Steps between lines of progress.", lower_bound=1)
IMPLEMENTATION = flags.DEFINE_string("attention", None, "Implementation of jax_fa4.attention; None chooses.")
DISTRIBUTED = flags.DEFINE_bool("distributed", False, "One of several processes: call jax.distributed.initialize.")
PROCESS_COUNT = flags.DEFINE_integer("process_count", None, "Of all processes, where the cluster does not say.")
PROCESS_INDEX = flags.DEFINE_integer("process_index", None, "This one's number, where the cluster does not say.")

AXES = ("data", "tensor", "sequence")
ROWS = P("data", "sequence")  # of tokens, ids and positions (B, T)
HEADS_SPLIT = P("data", "sequence", "tensor")  # of query, key and value (B, T, heads, D)

# How parameters lie, by the end of their names; others are on every device. A matrix that reads the residual stream is
# split by its outputs, one that writes it by its inputs, so that only the sum of the writes crosses devices.
PARAMETERS: dict[tuple[str, ...], P] = {
    ("project_in", "kernel"): P(None, "tensor"),
    ("project_out", "kernel"): P("tensor", None),
}


class TrainingState(NamedTuple):
    """What a step changes; a pytree of arrays."""

    parameters: nnx.State
    optimizer: optax.OptState


def read_mesh(text: str) -> Mesh:
    """A mesh from a text such as "data=2,tensor=2,sequence=2"; axes that it leaves out have one device.

    Raises:
      ValueError: an axis is unknown, a size is no positive number, or there are not so many devices.
    """
    sizes = dict.fromkeys(AXES, 1)
    for part in filter(None, text.split(",")):
        axis, _, size = part.partition("=")
        if axis not in sizes or not size.isdecimal() or int(size) < 1:
            raise ValueError(
                f"mesh has {part!r}. axis=size is accepted, with one of {', '.join(AXES)} and a number > 0."
            )
        sizes[axis] = int(size)
    count, there = int(np.prod(list(sizes.values()))), jax.devices()
    if count > len(there):
        raise ValueError(f"mesh {text!r} needs {count} devices, and there are {len(there)}; see --cpu_devices.")
    return Mesh(np.array(there[:count]).reshape(tuple(sizes.values())), AXES, axis_types=(AxisType.Auto,) * 3)


def split_attention(mesh: Mesh, implementation: str | None) -> AttentionFunction:
    """Attention within documents, of operands that are split by batch, sequence and heads."""
    attend = packed_attention(implementation)

    def attention(query: jax.Array, key: jax.Array, value: jax.Array, segment_ids: Any) -> jax.Array:
        query, key, value = (
            jax.lax.with_sharding_constraint(x, NamedSharding(mesh, HEADS_SPLIT)) for x in (query, key, value)
        )
        return attend(query, key, value, segment_ids)

    return attention


def shardings_of(state: TrainingState, mesh: Mesh) -> TrainingState:
    """How each array of the state lies on the mesh; the optimiser's averages lie as their parameters do."""

    def place(path: Any, leaf: Any) -> NamedSharding:
        names = [str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", "")))) for key in path]
        names = [name for name in names if name not in ("value", "")]
        return NamedSharding(mesh, PARAMETERS.get(tuple(names[-2:]), P()) if leaf.ndim == 2 else P())

    return jax.tree_util.tree_map_with_path(place, state)


def make_optimizer(steps: int, learning_rate: float) -> optax.GradientTransformation:
    """AdamW; the rate rises over the first tenth of the steps, then falls along a cosine."""
    rate = optax.warmup_cosine_decay_schedule(0.0, learning_rate, max(steps // 10, 1), max(steps, 2))
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.98, weight_decay=0.01))


class Trainer:
    """Model, optimiser and mesh; makes states, and the compiled step."""

    def __init__(self, config: ModelConfig, mesh: Mesh, steps: int, learning_rate: float, implementation: str | None):
        self.mesh, self.optimizer = mesh, make_optimizer(steps, learning_rate)
        attention = split_attention(mesh, implementation)

        def initial() -> TrainingState:
            parameters = nnx.state(Transformer(config, nnx.Rngs(0)), nnx.Param)
            return TrainingState(parameters, self.optimizer.init(parameters))

        self.graph = nnx.split(nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0))))[0]
        self.shardings = shardings_of(jax.eval_shape(initial), mesh)
        self.initial = jax.jit(initial, out_shardings=self.shardings)
        rows = NamedSharding(mesh, ROWS)

        def step(state: TrainingState, batch: data.Rows) -> tuple[TrainingState, jax.Array]:
            def loss_of(parameters: nnx.State) -> jax.Array:
                return bits_per_byte(nnx.merge(self.graph, parameters), batch, attention)

            loss, gradients = jax.value_and_grad(loss_of)(state.parameters)
            updates, optimizer = self.optimizer.update(gradients, state.optimizer, state.parameters)
            return TrainingState(optax.apply_updates(state.parameters, updates), optimizer), loss

        self.step = jax.jit(
            step,
            in_shardings=(self.shardings, rows),
            out_shardings=(self.shardings, NamedSharding(mesh, P())),
            donate_argnums=0,
        )

    def placed(self, batch: data.Rows) -> Any:
        """A batch as `Rows` of arrays, of which each process holds the part of its own devices."""
        rows = NamedSharding(self.mesh, ROWS)

        def place(whole: np.ndarray) -> jax.Array:
            return jax.make_array_from_callback(whole.shape, rows, lambda index: whole[index])

        return jax.tree.map(place, batch)


def train(
    trainer: Trainer,
    batches: Iterator[data.Rows],
    *,
    steps: int,
    checkpoints: ocp.CheckpointManager | None,
    report_every: int,
    console: Console,
) -> list[float]:
    """Train up to `steps`, from the last checkpoint where there is one; the losses of the steps done here."""
    first = (checkpoints.latest_step() if checkpoints else None) or 0
    state = trainer.initial()
    if checkpoints is not None and first:
        state = checkpoints.restore(first, args=ocp.args.StandardRestore(state))
        console.print(f"going on after step {first}")
    losses: list[float] = []
    started, tokens = 0.0, 0
    for number, batch in enumerate(itertools.islice(batches, first, steps), first + 1):
        state, loss = trainer.step(state, trainer.placed(batch))
        if number == first + 1:  # compiled now
            jax.block_until_ready(loss)
            started = time.perf_counter()
        else:
            tokens += batch.tokens.size
        losses.append(float(loss))
        if checkpoints is not None:
            checkpoints.save(number, args=ocp.args.StandardSave(state), force=number == steps)
        if number % report_every == 0 or number == steps:
            speed = tokens / max(time.perf_counter() - started, 1e-9)
            console.print(f"step {number:5d} of {steps}: {losses[-1]:.3f} bits per byte, {speed:,.0f} tokens/s")
    if checkpoints is not None:
        checkpoints.wait_until_finished()
    return losses


def open_checkpoints(folder: str, save_every: int) -> ocp.CheckpointManager | None:
    """Orbax's manager of a folder, which keeps the last two; None without a folder."""
    if not folder:
        return None
    options = ocp.CheckpointManagerOptions(save_interval_steps=save_every, max_to_keep=2)
    return ocp.CheckpointManager(Path(folder).absolute(), options=options)


def main(arguments: list[str]) -> None:
    """Run the example."""
    if len(arguments) > 1:
        raise app.UsageError(f"unexpected arguments {arguments[1:]}; sizes are flags, such as --steps=10")
    logging.set_verbosity(logging.WARNING)
    if CPU_DEVICES.value:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", CPU_DEVICES.value)
    if DISTRIBUTED.value:
        jax.distributed.initialize(num_processes=PROCESS_COUNT.value, process_id=PROCESS_INDEX.value)
    console = Console(highlight=False, quiet=jax.process_index() != 0)
    try:
        mesh = read_mesh(MESH.value)
    except ValueError as error:
        raise app.UsageError(str(error)) from error
    config = ModelConfig(
        layers=LAYERS.value,
        width=WIDTH.value,
        query_heads=HEADS.value,
        kv_heads=HEADS.value // 2,
        head_dim=64,
        hidden_width=3 * WIDTH.value,
        dtype=DTYPE.value,
    )
    training_files, _ = data.split_by_file(data.library_sources(), 5)
    rows = data.pack(training_files, ROW_LENGTH.value)
    console.print(
        f"{dict(mesh.shape)} of {jax.device_count()} devices; {len(rows.tokens)} rows of {ROW_LENGTH.value} bytes"
    )
    trainer = Trainer(config, mesh, STEPS.value, LEARNING_RATE.value, IMPLEMENTATION.value)
    checkpoints = open_checkpoints(CHECKPOINTS.value, SAVE_EVERY.value)
    train(
        trainer,
        data.batches(rows, BATCH_SIZE.value, seed=0),
        steps=STEPS.value,
        checkpoints=checkpoints,
        report_every=REPORT_EVERY.value,
        console=console,
    )
    if checkpoints is not None:
        checkpoints.close()


if __name__ == "__main__":
    app.run(main)
