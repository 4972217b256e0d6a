"""The kernels that prepare masks on a GPU: they find what NumPy finds, at lengths that the emulator is slow at."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fa4
from jax_fa4.ffi import launch
from jax_fa4.ffi.mask_buffers import hide_unseen
from jax_fa4.schedule.tiles import MaskOperands, MaskRule, key_intervals, query_intervals
from tests.kernels.test_planning import KINDS, check, grids_of, ids_of

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def architecture() -> str:
    found = launch.device_architecture()
    if found is None:
        pytest.skip("the default device is no GPU that the kernels support")
    return found.name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [8192, 32768, 100_001])
def test_packed_rows(kind: str, length: int, architecture: str) -> None:
    rule, ids = MaskRule(length, length, is_causal=True), ids_of(kind, 2, length)
    check(rule, MaskOperands(ids, ids), grids_of(rule, 2, (16, 4), (192, 80)), architecture, launch.CUDA_DRIVER)


@pytest.mark.parametrize("kind", KINDS)
def test_windows_over_other_ids_than_the_queries(kind: str, architecture: str) -> None:
    rule = MaskRule(3000, 5000, window=(700, 10), diagonal_offset=2000)
    masks = MaskOperands(ids_of("packed", 3, 3000), ids_of(kind, 3, 5000, 1))
    check(rule, masks, grids_of(rule, 3, (4, 4), (128, 128)), architecture, launch.CUDA_DRIVER)


def test_lengths_of_a_step_of_decoding(architecture: str) -> None:
    lengths = np.random.default_rng(0).integers(0, 2049, 256).astype(np.int32)
    rule = MaskRule(8, 2048)
    check(rule, MaskOperands(None, None, None, lengths), grids_of(rule, 256, (8, 8), (128, 128)), architecture, "cuda")


def test_hidden_rows(architecture: str) -> None:
    if architecture != "sm_90a":
        pytest.skip("the attention kernels of this GPU take whole tensors without unseen rows")
    ids, rule = ids_of("holes", 3, 2000), MaskRule(2000, 2000, is_causal=True)
    seen, others = key_intervals(rule, MaskOperands(ids, ids)), query_intervals(rule, MaskOperands(ids, ids))
    tensors = [jax.random.normal(jax.random.key(n), (3, 2000, 2, 64), jnp.bfloat16) for n in range(2)]

    def hide(seen: Any, others: Any, *tensors: jax.Array) -> Any:
        return hide_unseen(seen, others, 80, 25, *tensors, architecture="sm_90a")

    hidden, flags = jax.jit(hide)(*jax.tree.map(jnp.asarray, (seen, others)), *tensors)
    is_seen = np.pad((seen.lo < seen.hi), ((0, 0), (0, 0)))
    tiles = np.repeat(np.asarray(flags) == 1, 80, axis=1)
    assert tiles.any()
    assert not tiles.all()
    assert is_seen[~tiles].any()
    for mine, tensor in zip(hidden, tensors, strict=True):
        expected = np.where(is_seen[:, :, None, None], np.asarray(tensor, np.float32), 0)
        np.testing.assert_array_equal(np.asarray(mine, np.float32)[tiles], expected[tiles])


def test_plans_of_a_million_ids_by_xla() -> None:
    """More tokens than the kernel's shared memory holds."""
    ids = jnp.asarray(np.arange(1 << 19) // 3000)[None]
    plan = jax_fa4.plan_segments(ids, is_causal=True)
    np.testing.assert_array_equal(plan.queries.lo[0], np.arange(1 << 19) // 3000 * 3000)
