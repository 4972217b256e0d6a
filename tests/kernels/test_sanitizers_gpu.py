"""compute-sanitizer finds nothing in a sample of calls; and the sample itself runs, on the emulated GPU."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Collection
from functools import cache
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

import jax_fa4
from docs import build_sass
from jax_fa4.kernels import bundle
from jax_fa4.kernels.hopper.backward_plans import bundled_plans
from tests.kernels import sanitized_sample

NOT_IN_WHEEL = ("sinks",)  # compiled when first used
WRITER = re.compile(r"Write access at [^\s+]+\+0x([0-9a-f]+)")
INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+([^;]*);")
BULK_COPY = "UBLKCP.S.G"  # a copy to shared memory without a tensor map: log-sum-exps and deltas


def sample_names() -> list[str]:
    """Calls whose kernels are at hand."""
    left_out = NOT_IN_WHEEL if bundle.compiler_version() is None else ()
    return [name for name in sanitized_sample.CALLS if name not in left_out]


def sanitized(tool: str, names: Collection[str]) -> subprocess.CompletedProcess[str]:
    """The tool's run over those calls."""
    program = shutil.which("compute-sanitizer")
    if program is None:
        pytest.skip("needs compute-sanitizer on the PATH")
    # Only our own kernels: those of other libraries are not ours to check, and take most of the time.
    command = [program, f"--tool={tool}", "--error-exitcode=9", "--kernel-regex=kns=jax_fa4kernels", sys.executable]
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    command += ["-m", "tests.kernels.sanitized_sample", *names]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@cache
def bulk_copies(kernels: int | None = None) -> tuple[frozenset[int], ...]:
    """Where each backward kernel of the wheel, or the first few, copies log-sum-exps and deltas: addresses of
    instructions."""
    program = build_sass.tool("nvdisasm")
    if program is None:
        pytest.skip("needs nvdisasm: pip install nvidia-cuda-nvdisasm")
    found = []
    with TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        for plan in islice(bundled_plans(), kernels):
            path.write_bytes(bundle.find(plan).cubin)
            text = subprocess.run([program, "-c", "-hex", path], capture_output=True, text=True, check=True).stdout
            found.append(frozenset(int(place, 16) for place, what in INSTRUCTION.findall(text) if BULK_COPY in what))
    return tuple(found)


def unexplained(output: str, kernels: tuple[frozenset[int], ...]) -> str | None:
    """None where racecheck reports nothing but copies of log-sum-exps and deltas of one kernel; else what it reports.

    racecheck does not follow such copies to the mbarriers that readers wait for (docs/performance.md, what ran); it
    does follow those with tensor maps, and the emulator's race checks follow both.
    """
    reported = output.count("Race reported")
    writers = [int(place, 16) for place in WRITER.findall(output)]
    if len(writers) == reported and any(copies.issuperset(writers) for copies in kernels):
        return None
    return output


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("tool", ["memcheck", "synccheck"])
def test_compute_sanitizer_finds_nothing(tool: str) -> None:
    names = sample_names()
    done = sanitized(tool, names)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line for line in done.stdout.splitlines() if line.endswith(" ran")] == [f"{name} ran" for name in names]
    assert "ERROR SUMMARY: 0 errors" in done.stdout + done.stderr


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", sample_names())
def test_racecheck_finds_nothing_unexplained(name: str) -> None:
    done = sanitized("racecheck", [name])
    assert f"{name} ran" in done.stdout, done.stdout + done.stderr
    output = done.stdout + done.stderr
    summary = re.search(r"RACECHECK SUMMARY: (\d+) hazard", output)
    assert summary is not None
    assert int(summary[1]) == output.count("Race reported")
    assert unexplained(output, bulk_copies()) is None


def test_only_copies_of_one_kernel_explain_a_report() -> None:
    kernels = first, second = bulk_copies(2)
    assert len(first) >= 4  # of step 0, and of the others
    assert first != second
    lines = "".join(f"Error: Race reported between Write access at kernel+0x{place:x}\n" for place in first)
    assert unexplained(lines, kernels) is None
    for line in ("Write access at kernel+0x10", "Read access at kernel+0x20", f"Write access at k+0x{min(second):x}"):
        assert unexplained(f"{lines}Error: Race reported between {line}\n", kernels) is not None


def test_the_sample_runs_on_the_emulated_gpu() -> None:
    names = ["packed, traced", "few queries in parts"]
    with jax_fa4.target("sm_90"):
        assert list(sanitized_sample.run(names, "emulated")) == [(name, True) for name in names]
