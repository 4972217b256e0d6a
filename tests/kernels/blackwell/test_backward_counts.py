"""What the emulator counts for one more tile of queries of the Blackwell backward is what `cost.py` predicts."""

from __future__ import annotations

import pytest

from jax_fa4 import emulator
from jax_fa4.cost import ARCHITECTURES, backward_tile
from jax_fa4.kernels.blackwell.backward_plans import BACKWARD_TILES, SINGLE_TILES, TILE, Tiles
from tests.kernels.blackwell.test_backward_emulated import gradients
from tests.kernels.forward_checks import draw

pytestmark = pytest.mark.usefixtures("blackwell")
SHORT, LONG = 2, 4  # tiles of queries of the two launches whose difference is taken
STATISTICS_READ = 2 * TILE * 4 * TILE  # log-sums and deltas of a tile, by every thread


def counts(dims: tuple[int, int], tiles: Tiles, query_tiles: int) -> dict[str, float]:
    """Of one item without masks: multiply-adds, bytes by path, bank conflicts."""
    tensors = draw(0, (1, query_tiles * TILE, 1, dims[0]), tiles.rows, 1, "bfloat16", value_dim=dims[1])
    emulator.statistics()
    gradients(tensors, kernel={"tiles": tiles})
    (found,) = (one for one in emulator.statistics() if "BlackwellBackward" in str(one["kernel"]))
    bytes_moved: dict[str, float] = dict(found["bytes"])  # type: ignore[arg-type]
    return {**bytes_moved, "multiply_adds": found["multiply_adds"], "conflicts": found["bank_conflicts"]}


CASES = [*BACKWARD_TILES.items(), *SINGLE_TILES.items()]


@pytest.mark.parametrize(("dims", "tiles"), CASES, ids=[f"{dims}-{tiles.ctas}" for dims, tiles in CASES])
def test_a_tile_costs_what_is_predicted(dims: tuple[int, int], tiles: Tiles) -> None:
    arch = ARCHITECTURES["sm_100"]
    before, after = (counts(dims, tiles, query_tiles) for query_tiles in (SHORT, LONG))
    of_tile = {name: (after[name] - before[name]) / (LONG - SHORT) / tiles.ctas for name in before}
    predicted = backward_tile(arch, TILE, TILE, *dims, ctas=tiles.ctas)
    parts = {name: clocks * arch.shared_bytes for name, clocks in predicted.shared_parts.items()}
    assert of_tile["multiply_adds"] * 2 == predicted.matrix_flops
    assert of_tile["matrix_shared_read"] == parts["operands"]
    assert of_tile["shared_written"] == parts["dS"] + parts["dQ"] / 2
    assert of_tile["tensor_copy_out"] == parts["dQ"] / 2
    assert of_tile["peer"] * 2 == parts.get("exchange", 0)  # read here, and received
    assert of_tile["tensor_copy_in"] == predicted.fill * arch.shared_bytes
    assert of_tile["shared_read"] == STATISTICS_READ
    assert of_tile["conflicts"] == 0


def test_pairs_read_less_and_add_half() -> None:
    arch = ARCHITECTURES["sm_100"]
    for dims, clocks in (((128, 128), (3328, 2560)), ((192, 128), (4352, 3200))):
        single, pair = (backward_tile(arch, TILE, TILE, *dims, ctas=ctas) for ctas in (1, 2))
        assert (single.shared, pair.shared) == clocks
        assert pair.shared_parts["dQ"] * 2 == single.shared_parts["dQ"]
    assert pair.binding == ("MMA",)
