"""Builds the emulator's units as a shared library with a C door and gives tests a ctypes handle to it."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).parent
UNITS = HERE.parents[2] / "csrc" / "emulator" / "units"
# As csrc/emulator/units/CMakeLists.txt has them.
FLAGS = ["-std=c++20", "-O3", "-ffp-contract=off", "-fno-trapping-math", "-fno-math-errno"]
FLAGS += ["-fPIC", "-Wall", "-Wextra", "-Werror"]


def build_library() -> Path:
    """Compiles once per content of the sources; other runs find the library in the temporary directory."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("the emulator's units need a C++ compiler")
    sources = [*sorted(UNITS.glob("*.cc")), HERE / "units_c_api.cc"]
    digest = hashlib.sha256(" ".join([compiler, *FLAGS]).encode())
    for path in sources + sorted(UNITS.glob("*.h")):
        digest.update(path.read_bytes())
    target = Path(tempfile.gettempdir()) / f"jax_fa4_units_{os.getuid()}_{digest.hexdigest()[:16]}.so"
    if not target.exists():
        building = target.with_suffix(f".{os.getpid()}")
        command = [compiler, *FLAGS, f"-I{UNITS}", "-shared", "-o", str(building), *map(str, sources)]
        subprocess.run(command, check=True, timeout=500)
        building.rename(target)
    return target


class Units:
    """The library; `call` passes NumPy arrays and structures as pointers, and numbers as `signature` says."""

    def __init__(self, path: Path):
        self.library = ctypes.CDLL(str(path))

    def call(self, name: str, signature: str, *arguments: object, result: type | None = ctypes.c_int) -> int:
        """`signature` has a letter an argument: i int, u uint32, q uint64, f float, p pointer."""
        kinds = {"i": ctypes.c_int, "u": ctypes.c_uint32, "q": ctypes.c_uint64, "f": ctypes.c_float}
        function = getattr(self.library, name)
        function.restype = result
        converted: list[object] = []
        for letter, argument in zip(signature, arguments, strict=True):
            if letter != "p":
                converted.append(kinds[letter](argument))
            elif isinstance(argument, np.ndarray):
                assert argument.flags.c_contiguous
                converted.append(ctypes.c_void_p(argument.ctypes.data))
            else:
                converted.append(None if argument is None else ctypes.byref(argument))
        return function(*converted)

    def fails(self, name: str, signature: str, *arguments: object) -> str:
        """The sentence that a checking function gives (its last parameter is the buffer), or an empty string."""
        buffer = ctypes.create_string_buffer(512)
        failed = self.call(name, signature + "p", *arguments, buffer)
        sentence = buffer.value.decode()
        assert bool(failed) == bool(sentence)
        return sentence


@pytest.fixture(scope="session")
def units() -> Units:
    return Units(build_library())
