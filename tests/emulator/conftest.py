"""Builds the emulator in place if its library is missing or older than its sources; gives tests fresh options."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from jax_fa4.ffi import launch

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "csrc" / "emulator"
LIBRARY = ROOT / "jax_fa4" / "libjax_fa4_emulator.so"


def _is_current() -> bool:
    if not LIBRARY.exists():
        return False
    built = LIBRARY.stat().st_mtime
    return all(p.stat().st_mtime <= built for p in SOURCES.rglob("*") if p.suffix in (".cc", ".h", ".txt"))


@pytest.fixture(scope="session")
def built_library() -> None:
    """The emulator's library, built if it is not there or older than its sources."""
    if _is_current():
        return
    if shutil.which("cmake") is None or shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("the emulator is not built, and there is no cmake or C++ compiler")
    build = Path(tempfile.gettempdir()) / f"jax_fa4_emulator_{os.getuid()}_{zlib.crc32(str(ROOT).encode()):08x}"
    build.mkdir(exist_ok=True)
    with open(build / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _is_current():
            return
        configure = ["cmake", "-S", str(SOURCES), "-B", str(build)]
        if shutil.which("ninja") is not None:
            configure += ["-G", "Ninja"]
        for command in (configure, ["cmake", "--build", str(build), "-j", "2"]):
            done = subprocess.run(command, capture_output=True, text=True, timeout=1500)
            assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


@pytest.fixture
def hopper_gpu() -> None:
    """The default device is a Hopper GPU."""
    architecture = launch.device_architecture()
    if architecture is None or architecture.name != "sm_90a":
        pytest.skip("the default device is no Hopper GPU")


@pytest.fixture
def gpu(built_library: None) -> Iterator[None]:
    """The emulator with its usual options: Hopper, seed 0, one host thread."""
    from jax_fa4 import emulator

    checks = dict(check_races=True, check_uninitialized=True, check_registers=True, check_exit_reads=True)
    defaults = checks | dict(
        check_tensor_fences=False, seed=0, arch="9.0", sm_count=132, threads=1, completion="random", stuck_after=400_000
    )
    emulator.set_options(**defaults)
    emulator.statistics()
    yield
    emulator.set_options(**defaults)
