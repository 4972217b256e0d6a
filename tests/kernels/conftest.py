"""The emulated GPUs for tests of kernels, with every check on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import jax_fa4
from jax_fa4 import emulator
from tests.emulator.conftest import built_library, gpu, hopper_gpu

__all__ = ["blackwell", "built_library", "gpu", "hopper", "hopper_gpu"]


@pytest.fixture
def hopper(gpu: None) -> Iterator[None]:
    """Calls are traced for an emulated H100, which runs on as many host threads as there are."""
    emulator.set_options(threads=0, stuck_after=4_000_000)
    with jax_fa4.target("sm_90"):
        yield


@pytest.fixture
def blackwell(gpu: None) -> Iterator[None]:
    """Calls are traced for an emulated B200, which runs on one host thread, so that a seed repeats a run."""
    emulator.set_options(stuck_after=4_000_000)
    with jax_fa4.target("sm_100"):
        yield
