"""What the emulator counts for one more key tile of the Blackwell forward is what `cost.py` predicts."""

from __future__ import annotations

import pytest

from jax_fa4 import arguments, emulator
from jax_fa4.cost import ARCHITECTURES, forward_tile
from jax_fa4.ffi import launch
from jax_fa4.ffi.blackwell_forward import blackwell_forward
from jax_fa4.kernels.blackwell.geometry import KEY_TILE
from jax_fa4.kernels.blackwell.plans import FORWARD_TILES, PAIR_TILES, Tiles
from tests.kernels.forward_checks import draw

pytestmark = pytest.mark.usefixtures("blackwell")
SHORT, LONG = 5, 9  # key tiles of the two launches whose difference is taken


def counts(dims: tuple[int, int], tiles: Tiles, key_tiles: int) -> dict[str, float]:
    """Of one item without masks: multiply-adds, bytes by path, bank conflicts."""
    tensors = draw(0, (1, tiles.rows, 1, dims[0]), key_tiles * KEY_TILE, 1, "bfloat16", value_dim=dims[1])
    call = arguments.read_call(*tensors)
    emulator.statistics()
    blackwell_forward(call.problem, call.operands, driver=launch.emulated_driver((10, 0)), tiles=tiles)
    (found,) = emulator.statistics()
    bytes_moved: dict[str, float] = dict(found["bytes"])  # type: ignore[arg-type]
    return {**bytes_moved, "multiply_adds": found["multiply_adds"], "conflicts": found["bank_conflicts"]}


CASES = [*FORWARD_TILES.items(), *PAIR_TILES.items()]


@pytest.mark.parametrize(("dims", "tiles"), CASES, ids=[f"{dims}-{tiles.ctas}" for dims, tiles in CASES])
def test_a_tile_costs_what_is_predicted(dims: tuple[int, int], tiles: Tiles) -> None:
    arch = ARCHITECTURES["sm_100"]
    before, after = (counts(dims, tiles, key_tiles) for key_tiles in (SHORT, LONG))
    of_tile = {name: (after[name] - before[name]) / (LONG - SHORT) / tiles.ctas for name in before}
    predicted = forward_tile(arch, tiles.rows // tiles.ctas, KEY_TILE, *dims, ctas=tiles.ctas)
    assert of_tile["multiply_adds"] * 2 == predicted.mma * arch.mma_flops
    assert of_tile["matrix_shared_read"] == predicted.shared_parts["operands"] * arch.shared_bytes
    assert of_tile["tensor_copy_in"] == predicted.fill * arch.shared_bytes
    assert of_tile["conflicts"] == 0


def test_head_dim_64_is_no_longer_bound_twice_over_by_exponentials() -> None:
    tiles = FORWARD_TILES[64, 64]
    arch = ARCHITECTURES["sm_100"]
    predicted = forward_tile(arch, tiles.rows, KEY_TILE, 64, 64, emulated_fraction=tiles.emulated / KEY_TILE)
    assert predicted.clocks <= 1400
    assert forward_tile(arch, tiles.rows, KEY_TILE, 64, 64).clocks == 2048
