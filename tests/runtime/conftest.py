"""Builds the stub driver and the C++ test program with CMake, and loads the stub for tests to look into."""

from __future__ import annotations

import ctypes
import fcntl
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def tool(name: str) -> str | None:
    """A program on the path, or beside this Python."""
    return shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))


def build_programs(sanitizer: str = "") -> Path:
    """Builds the stubs and runtime_test under a sanitizer ('' for none); returns the folder that holds them."""
    cmake = tool("cmake")
    if cmake is None or tool("c++") is None:
        pytest.skip("needs cmake and a C++ compiler")
    folder = ROOT / "build" / f"tests-{sanitizer or 'plain'}"
    configure = [cmake, "-S", str(ROOT), "-B", str(folder), "-DFA4_BUILD_EXTENSION=OFF", f"-DFA4_SANITIZER={sanitizer}"]
    configure.append(f"-DCMAKE_BUILD_TYPE={'Debug' if sanitizer else 'RelWithDebInfo'}")
    if not (folder / "CMakeCache.txt").exists() and (ninja := tool("ninja")) is not None:
        configure += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
    targets = ["stub_driver", "stub_driver_incomplete", "runtime_test"]
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several test processes may want the same programs
        for command in (configure, [cmake, "--build", str(folder), "--target", *targets]):
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr
    return folder / "tests" / "runtime"


class Stub:
    """The stub driver library, as the tests steer it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._library = ctypes.CDLL(str(path))
        self._library.stub_log.restype = ctypes.c_size_t
        self._library.stub_log.argtypes = [ctypes.c_char_p, ctypes.c_size_t]

    def reset(self, major: int = 9, minor: int = 0, devices: int = 2) -> None:
        """Forgets all calls and injected failures; sets the compute capability."""
        self._library.stub_reset(major, minor, devices)

    def fail(self, function: str, result: int, calls_before: int = 0) -> None:
        """Lets one later call of a function return `result`."""
        self._library.stub_fail(function.encode(), result, calls_before)

    def count(self, function: str) -> int:
        """How often a function was called since the reset."""
        return self._library.stub_count(function.encode())

    def log(self) -> list[str]:
        """The calls since the reset, a line each."""
        size = self._library.stub_log(None, 0)
        buffer = ctypes.create_string_buffer(size)
        self._library.stub_log(buffer, size)
        return buffer.value.decode().splitlines()

    def launches(self) -> list[str]:
        """The lines of the launches."""
        return [line for line in self.log() if line.startswith("cuLaunchKernelEx")]


@pytest.fixture(scope="session")
def stub_library() -> Stub:
    """The stub, declared as driver 'stub' (cubins) and 'stub-ptx'."""
    launch = pytest.importorskip("jax_fa4.ffi.launch")
    try:
        launch.native()
    except ImportError as error:
        pytest.skip(str(error))
    stub = Stub(build_programs() / "libstub_driver.so")
    launch.declare_driver("stub", str(stub.path), takes_ptx=False)
    launch.declare_driver("stub-ptx", str(stub.path), takes_ptx=True)
    return stub


@pytest.fixture
def stub(stub_library: Stub) -> Stub:
    """The stub, with an empty log and compute capability 9.0."""
    stub_library.reset()
    return stub_library
