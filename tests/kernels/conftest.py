"""The emulated GPU for tests of kernels, with every check on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import jax_fa4
from jax_fa4 import emulator

USUAL = {"seed": 0, "sm_count": 132, "completion": "random", "check_races": True, "check_uninitialized": True}


@pytest.fixture
def hopper() -> Iterator[None]:
    """Calls are traced for an emulated H100."""
    try:
        emulator.driver()
    except FileNotFoundError:
        pytest.skip("the emulator is not built")
    emulator.set_options(threads=0, **USUAL)
    with jax_fa4.target("sm_90"):
        yield
    emulator.set_options(**USUAL)
    emulator.statistics()
