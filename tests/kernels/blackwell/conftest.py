"""The emulated Blackwell GPU as a driver of the package's own runtime."""

from __future__ import annotations

import pytest

from jax_fa4 import emulator
from jax_fa4.ffi import launch
from tests.emulator.conftest import built_library, gpu

__all__ = ["blackwell", "built_library", "gpu"]


@pytest.fixture
def blackwell(gpu: None) -> str:
    """The name of the driver; an emulated B200 with every check on."""
    launch.declare_driver("emulated-for-tests", str(emulator.library_path()), takes_ptx=True)
    emulator.set_options(arch="10.0")
    return "emulated-for-tests"
