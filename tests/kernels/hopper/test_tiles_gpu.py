"""Every choice of tiles of the Hopper backward that `benchmarks/hopper_tiles.py` times gives right gradients on a GPU.

Where its kernels are at hand: in the cache, by `python -m benchmarks.hopper_tiles --build` where the compiler is.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import hopper_tiles
from jax_fa4.arguments import read_call
from jax_fa4.ffi import hopper_backward
from jax_fa4.kernels.hopper.backward_plans import BACKWARD_TILES, PERSISTENT_TILES
from tests.kernels.forward_checks import draw
from tests.kernels.hopper import test_backward_emulated as emulated

CHOICES = [(head_dim, name) for head_dim in BACKWARD_TILES for name in hopper_tiles.tiles_of(head_dim)]


@pytest.mark.gpu
@pytest.mark.parametrize(("head_dim", "name"), CHOICES)
def test_gradients(hopper_gpu: None, head_dim: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tiles = hopper_tiles.tiles_of(head_dim)[name]
    for table in (BACKWARD_TILES, PERSISTENT_TILES):
        monkeypatch.setitem(table, head_dim, tiles)
    ids = np.sort(np.random.default_rng(5).integers(-1, 9, (2, 1500)), axis=-1).astype(np.int32)
    ids[0, 700:] = -1
    packed: dict[str, Any] = {"is_causal": True, "segment_ids": jnp.asarray(ids)}
    causal: dict[str, Any] = {"is_causal": True, "causal_alignment": "bottom_right"}
    for keys, options in ((1500, {}), (700, causal), (1500, packed)):
        tensors = draw(3, (2, 1500, 16, head_dim), keys, 16, "bfloat16")
        reason = hopper_backward.why_not(read_call(*tensors[:3], **options).problem)
        if reason is not None:
            pytest.skip(reason)
        emulated.check(tensors, "fa4", **options)
