"""The emulator is quick enough to run grids of tests: floors well below what is measured on an idle core."""

import pytest

from benchmarks import emulator as benchmark
from tests.emulator.conftest import built_library, gpu

__all__ = ["built_library", "gpu"]
pytestmark = pytest.mark.usefixtures("gpu")


@pytest.mark.parametrize("name", benchmark.LOOPS)
def test_loops_run_above_the_floor(name: str) -> None:
    figure = benchmark.measure_loop(name, rounds=3, iterations=300)
    assert figure.instructions > 300 * benchmark.UNROLLED * benchmark.WARPS
    assert figure.million_a_second > 0.5, figure


@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
def test_a_forward_takes_less_than_a_second(target: str) -> None:
    figure = benchmark.measure_attention(target, backward=False, rounds=3)
    assert figure.multiply_adds == 2 * 512 * 512 * 128
    assert figure.seconds < 0.5, figure
