"""Training over a mesh equals training on one device, and goes on from a checkpoint as if nothing had happened."""

import io
import itertools

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

ocp = pytest.importorskip("orbax.checkpoint")

from rich.console import Console  # noqa: E402

from examples import train_sharded  # noqa: E402
from examples.train_lm import data  # noqa: E402
from examples.train_lm.model import ModelConfig  # noqa: E402

CONFIG = ModelConfig(layers=1, width=16, query_heads=4, kv_heads=2, head_dim=8, hidden_width=24)
STEPS = 4

pytestmark = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs the eight CPU devices that conftest.py asks for")


@pytest.fixture(scope="module")
def rows():
    draw = np.random.default_rng(0)
    return data.pack([bytes(draw.integers(97, 123, size).astype(np.uint8)) for size in draw.integers(5, 60, 80)], 32)


@pytest.fixture(scope="module")
def trainer():
    return train_sharded.Trainer(
        CONFIG, train_sharded.read_mesh("data=2,tensor=2,sequence=2"), STEPS, 1e-2, "blockwise"
    )


def losses_of(trainer, rows, steps=STEPS, checkpoints=None, console=None):
    console = console or Console(file=io.StringIO())
    batches = data.batches(rows, 4, seed=0)
    return train_sharded.train(trainer, batches, steps=steps, checkpoints=checkpoints, report_every=2, console=console)


def test_a_mesh_of_eight_and_a_restart_train_as_one_device(trainer, rows, tmp_path):
    alone = train_sharded.Trainer(CONFIG, train_sharded.read_mesh(""), STEPS, 1e-2, "blockwise")
    want = losses_of(alone, rows)
    assert want[-1] < want[0]
    out = io.StringIO()
    folder = str(tmp_path / "checkpoints")
    manager = train_sharded.open_checkpoints(folder, save_every=2)
    first = losses_of(trainer, rows, steps=2, checkpoints=manager)
    manager.close()
    manager = train_sharded.open_checkpoints(folder, save_every=2)
    rest = losses_of(trainer, rows, checkpoints=manager, console=Console(file=out))
    assert manager.latest_step() == STEPS
    manager.close()
    np.testing.assert_allclose(first + rest, want, rtol=1e-4)
    assert "going on after step 2" in out.getvalue()
    assert "tokens/s" in out.getvalue()


def test_parameters_and_their_averages_are_split(trainer):
    specs = [x.spec for x in jax.tree.leaves(trainer.shardings, is_leaf=lambda x: isinstance(x, NamedSharding))]
    # Two matrices that read and two that write, each with two averages of the optimiser.
    assert specs.count(P(None, "tensor")) == specs.count(P("tensor", None)) == 2 * 3


def test_each_process_places_only_its_rows(trainer, rows):
    batch = next(itertools.islice(data.batches(rows, 4, seed=0), 1))
    placed = trainer.placed(batch)
    assert {shard.data.shape for shard in placed.tokens.addressable_shards} == {(2, 16)}
    np.testing.assert_array_equal(placed.segment_ids, batch.segment_ids)


@pytest.mark.parametrize(
    ("text", "message"),
    [("model=2", "mesh has 'model=2'"), ("data=0", "mesh has 'data=0'"), ("data=16", "needs 16 devices")],
)
def test_a_mesh_that_is_not_there_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        train_sharded.read_mesh(text)
