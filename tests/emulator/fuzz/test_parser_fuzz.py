"""Malformed PTX gives an error code and a sentence, never a crash."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.emulator.fuzz.broken_ptx import broken_texts, seeds

EMULATOR = Path(__file__).parents[3] / "csrc" / "emulator"
REFUSALS = (218, 209)  # invalid PTX, or a target that the emulated GPU cannot run
FLAGS = "-O1 -g1 -fsanitize=address,undefined -fno-sanitize-recover=all"


@pytest.mark.usefixtures("gpu")
def test_broken_modules_are_refused_with_a_sentence():
    from jax_fa4 import emulator

    driver, module = emulator.driver(), ctypes.c_void_p()
    for text in broken_texts(1500, seed=1):
        code = driver.cuModuleLoadData(ctypes.byref(module), text.replace(b"\0", b"?") + b"\0")
        assert code in (0, *REFUSALS)
        if code == 0:
            assert driver.cuModuleUnload(module) == 0
        else:
            sentence = emulator.last_report()
            assert sentence
            assert len(sentence) < 2000


def sanitized_program() -> Path:
    """The fuzz program on an emulator with the sanitizers, built once per content of the sources."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None or shutil.which("cmake") is None:
        pytest.skip("the fuzz program needs cmake and a C++ compiler")
    main = Path(__file__).parent / "fuzz_driver.cc"
    digest = hashlib.sha256(FLAGS.encode())
    for path in [main, *sorted(p for p in EMULATOR.rglob("*") if p.suffix in (".cc", ".h", ".txt"))]:
        digest.update(path.read_bytes())
    build = Path(tempfile.gettempdir()) / f"jax_fa4_fuzz_{os.getuid()}_{digest.hexdigest()[:16]}"
    program = build / "fuzz"
    if not program.exists():
        # SKBUILD keeps the library in the build folder instead of the source tree.
        options = [
            "-DSKBUILD=ON",
            "-DCMAKE_BUILD_TYPE=None",
            f"-DCMAKE_CXX_FLAGS={FLAGS}",
            f"-DCMAKE_CXX_COMPILER={compiler}",
        ]
        subprocess.run(["cmake", "-S", EMULATOR, "-B", build, *options], check=True, timeout=60)
        subprocess.run(["cmake", "--build", build, "-j", "2"], check=True, timeout=1500)
        link = [f"-L{build}", f"-Wl,-rpath,{build}", "-ljax_fa4_emulator"]
        subprocess.run([compiler, *FLAGS.split(), main, "-o", program, *link], check=True, timeout=120)
    return program


def feed(program: Path, texts: list[bytes]) -> tuple[int, int]:
    """How many texts the parser took and refused."""
    records = b"".join(struct.pack("<I", len(text)) + text for text in texts)
    done = subprocess.run([program], input=records, capture_output=True, timeout=590, check=False)
    assert done.returncode == 0, (done.stdout[-3000:] + done.stderr[-6000:]).decode(errors="replace")
    taken, refused = done.stdout.split()
    return int(taken), int(refused)


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_hundred_thousand_broken_modules_under_the_sanitizers():
    program = sanitized_program()
    taken, refused = 0, 0
    for batch in range(20):
        good, bad = feed(program, list(broken_texts(5000, seed=100 + batch)))
        taken, refused = taken + good, refused + bad
    assert taken + refused == 100_000
    assert taken > 200, "the changes are so coarse that nothing passes the parser"
    assert refused > 10_000, "the changes are so mild that nothing is refused"


@pytest.mark.usefixtures("gpu")
def test_the_seeds_themselves_load():
    from jax_fa4 import emulator

    module = ctypes.c_void_p()
    for text in seeds():
        emulator.set_options(arch="10.0" if ".target sm_100" in text else "9.0")
        assert emulator.driver().cuModuleLoadData(ctypes.byref(module), text.encode()) == 0, emulator.last_report()
