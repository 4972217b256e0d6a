"""compute-sanitizer finds nothing in a sample of calls; and the sample itself runs, on the emulated GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

import jax_fa4
from tests.kernels import sanitized_sample

# racecheck does not follow copies of the bulk engine to their mbarriers: with traced ids it takes the backward's
# log-sum-exps and deltas, which arrive by such copies, for unordered. The emulator's race checks do follow them.
NOT_RACECHECKED = tuple(name for name, sample in sanitized_sample.CALLS.items() if sample.are_ids_traced)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("tool", ["memcheck", "synccheck", "racecheck"])
def test_compute_sanitizer_finds_nothing(tool: str) -> None:
    program = shutil.which("compute-sanitizer")
    if program is None:
        pytest.skip("needs compute-sanitizer on the PATH")
    names = [name for name in sanitized_sample.CALLS if tool != "racecheck" or name not in NOT_RACECHECKED]
    # Only our own kernels: those of other libraries are not ours to check, and take most of the time.
    command = [program, f"--tool={tool}", "--error-exitcode=9", "--kernel-regex=kns=jax_fa4kernels", sys.executable]
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run(
        [*command, "-m", "tests.kernels.sanitized_sample", *names], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line for line in done.stdout.splitlines() if line.endswith(" ran")] == [f"{name} ran" for name in names]
    assert "ERROR SUMMARY: 0 errors" in done.stdout + done.stderr or "RACECHECK SUMMARY: 0 hazards" in done.stdout


def test_the_sample_runs_on_the_emulated_gpu() -> None:
    names = ["packed, traced", "few queries in parts"]
    with jax_fa4.target("sm_90"):
        assert list(sanitized_sample.run(names, "emulated")) == [(name, True) for name in names]
