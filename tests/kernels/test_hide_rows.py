"""Tiles with rows that nobody sees, hidden by the kernel in the emulator: what is copied, and what is left alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fa4 import emulator
from jax_fa4.ffi import launch
from jax_fa4.ffi.mask_buffers import hide_unseen
from jax_fa4.schedule.tiles import Intervals, MaskOperands, MaskRule, key_intervals, query_intervals

TILE = 32


@pytest.fixture(autouse=True)
def needs_emulator(built_library: None) -> None:
    launch.declare_driver("emulator", str(emulator.library_path()), takes_ptx=True)
    emulator.set_options(arch="9.0", check_uninitialized=True, check_races=True)


def ids() -> np.ndarray:
    """Wholly seen; padding at the end; holes, one of them in a tile of its own between keys that a query sees."""
    found = np.zeros((3, 200), np.int32)
    found[1, 70:] = -1
    found[2, 5:9], found[2, 64:130] = -1, -1
    return found


@pytest.mark.parametrize("count", [1, 2])
def test_only_tiles_with_unseen_rows_are_copied(count: int) -> None:
    masks, rule = MaskOperands(ids(), ids()), MaskRule(200, 200)
    seen, others = key_intervals(rule, masks), query_intervals(rule, masks)
    tensors = [jax.random.normal(jax.random.key(n), (3, 200, 2, 8 * (n + 1)), jnp.bfloat16) for n in range(count)]

    def hide(seen: Intervals, others: Intervals, *tensors: jax.Array) -> object:
        return hide_unseen(seen, others, TILE, 7, *tensors, architecture="sm_90a", driver="emulator")

    hidden, flags = jax.jit(hide)(*jax.tree.map(jnp.asarray, (seen, others)), *tensors)  # type: ignore[misc]
    # Row 1: no interval reaches beyond key 70. Row 2: intervals span the hole, and tiles 2 and 3 are all in it.
    np.testing.assert_array_equal(flags, [[0] * 7, [0, 0, 1, 0, 0, 0, 0], [1, 0, 1, 1, 1, 0, 0]])
    is_seen = (seen.lo < seen.hi)[:, :, None, None]
    for mine, tensor in zip(hidden, tensors, strict=True):
        expected = np.where(is_seen, np.asarray(tensor, np.float32), 0)
        copied = np.repeat(np.asarray(flags), TILE, axis=1)[:, :200] == 1
        np.testing.assert_array_equal(np.asarray(mine, np.float32)[copied], expected[copied])


def test_nothing_is_copied_where_all_is_known_to_be_seen() -> None:
    masks, rule = MaskOperands(ids()[:1], ids()[:1]), MaskRule(200, 200)
    tensor = jnp.ones((1, 200, 2, 8), jnp.bfloat16)
    (hidden,), flags = hide_unseen(
        key_intervals(rule, masks), query_intervals(rule, masks), TILE, 7, tensor, architecture="sm_90a"
    )
    assert hidden is tensor
    assert not flags.any()
