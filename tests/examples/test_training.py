"""The example's model trains, keeps documents apart, and runs as a program, at tiny sizes."""

import io
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from rich.console import Console

from examples.train_lm import checks, data, training
from examples.train_lm.model import (
    ModelConfig,
    Transformer,
    dense_attention,
    leaking_attention,
    packed_attention,
    rotary_angles,
    rotate,
)

ROOT = Path(__file__).parents[2]
CONFIG = ModelConfig(layers=1, width=16, query_heads=2, kv_heads=1, head_dim=8, hidden_width=24)


@pytest.fixture(scope="module")
def rows():
    documents = [bytes(range(65, 65 + length)) for length in (30, 22, 18, 11)]
    return data.pack(documents, 48)


@pytest.fixture
def model():
    return Transformer(CONFIG, nnx.Rngs(0))


def test_three_steps_lower_the_loss(model, rows):
    history = training.train(
        model,
        data.batches(rows, 2, seed=0),
        rows,
        packed_attention(),
        steps=3,
        eval_every=2,
        learning_rate=1e-2,
        batch_size=2,
        console=Console(file=io.StringIO()),
    )
    assert list(history.held_out) == [0, 2, 3]
    assert len(history.training) == 3
    assert history.held_out[3] < history.held_out[0]


def test_no_document_feels_another(model, rows):
    row = rows.shared().take(slice(0, 1))
    leak = checks.measure_leak(model, row, packed_attention())
    assert leak.others == 0.0
    assert leak.own > 0.0
    assert checks.measure_leak(model, row, leaking_attention).others > 0.0


def test_packing_changes_no_prediction(model, rows):
    """Every document of a row gets the logits that it gets alone."""
    logits = model(*rows, packed_attention())
    for row in range(len(rows.tokens)):
        for segment_id in range(rows.documents_per_row[row]):
            own = rows.segment_ids[row] == segment_id
            alone = data.Rows(*(field[row : row + 1, own] for field in rows))
            expected = model(alone.tokens, np.zeros_like(alone.tokens), alone.positions, packed_attention())
            np.testing.assert_allclose(logits[row, own], expected[0], atol=1e-5)


def test_same_loss_and_gradient_as_with_a_dense_mask(model, rows):
    ours, dense = (
        nnx.value_and_grad(training.bits_per_byte)(model, rows, attention)
        for attention in (packed_attention(), dense_attention)
    )
    np.testing.assert_allclose(ours[0], dense[0], rtol=1e-5)
    for got, expected in zip(jax.tree.leaves(ours[1]), jax.tree.leaves(dense[1]), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-5)


def test_counted_bytes(rows):
    """The first byte of a document is never predicted, nor is padding."""
    _, counted = training.token_losses(jnp.zeros((*rows.tokens.shape, 256)), rows)
    assert counted.sum() == (rows.segment_ids >= 0).sum() - rows.documents_per_row.sum()
    followed_by = np.asarray(rows.positions)[:, 1:][np.asarray(counted)[:, :-1]]
    assert (followed_by > 0).all()


def test_evaluation_counts_every_row_once(model, rows):
    evaluate = training.make_evaluation(packed_attention(), batch_size=1)
    np.testing.assert_allclose(
        evaluate(model, rows), training.bits_per_byte(model, rows, packed_attention()), rtol=1e-5
    )


def test_rotation_depends_on_distance_alone():
    seeds = jax.random.split(jax.random.key(0), 2)
    query, key = (jax.random.normal(seed, (1, 1, 1, 16)) for seed in seeds)

    def score(query_position, key_position):
        places = (jnp.full((1, 1), position) for position in (query_position, key_position))
        turned = [rotate(head, rotary_angles(place, 16)) for head, place in zip((query, key), places, strict=True)]
        return jnp.vdot(*turned)

    np.testing.assert_allclose(score(7, 3), score(104, 100), rtol=1e-4)


def test_speed_comparison_leaves_the_model_alone(model, rows):
    before = jax.tree.map(jnp.copy, nnx.state(model))
    speeds = checks.tokens_per_second(model, rows, {"dense": dense_attention}, repeats=1)
    assert speeds["dense"] > 0
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), before, nnx.state(model)))


def test_program_runs_from_start_to_end(tmp_path):
    sizes = "--steps=2 --eval_every=1 --eval_rows=2 --batch_size=2 --row_length=64 --layers=1 --width=16 --head_dim=8"
    command = [sys.executable, "-m", "examples.train_lm", *sizes.split(), "--timed_steps=1", f"--out={tmp_path}"]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    printed = " ".join(finished.stdout.split())  # lines may be wrapped
    for expected in ("bits per byte", "nothing leaks", "they leak", "tokens/s", "implementation"):
        assert expected in printed
    for picture in ("loss.png", "tiles.png"):
        assert (tmp_path / picture).stat().st_size > 10_000
