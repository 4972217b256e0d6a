"""The mutation suite: the small kernels are right under every seed, and a mutant of them is noticed under some seed."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from tests.emulator.mutation import blackwell, hopper
from tests.emulator.mutation.mutants import mutants

SEEDS = 20
ARCHITECTURES = {blackwell: "10.0", hopper: "9.0"}
MUTANTS = mutants()


@pytest.mark.parametrize(("kernel", "target"), [(blackwell, "sm_100a"), (blackwell, "sm_100f"), (hopper, "sm_90a")])
def test_kernels_assemble(kernel, target, tmp_path):
    assembler = shutil.which("ptxas")
    if assembler is None:
        pytest.skip("ptxas is not on the path")
    source = tmp_path / "kernel.ptx"
    source.write_text(kernel.text(kernel.lines(), target))
    command = [assembler, f"-arch={target}", str(source), "-o", str(tmp_path / "kernel.cubin")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr


def test_there_are_enough_mutants_and_each_is_another_program():
    for kernel in (blackwell, hopper):
        own = [mutant for mutant in MUTANTS if mutant.kernel is kernel]
        texts = {mutant.text for mutant in own}
        assert len([mutant for mutant in own if not mutant.equivalent]) >= 40
        assert len(texts) == len(own)
        assert kernel.text(kernel.lines()) not in texts
        assert len({mutant.name for mutant in own}) == len(own)


@pytest.fixture
def problem_of(gpu):
    """Makes the problem of a kernel on an emulated GPU of its architecture."""
    from jax_fa4 import emulator
    from tests.emulator.mutation.harness import Problem

    def make(kernel):
        emulator.set_options(arch=ARCHITECTURES[kernel], stuck_after=200_000, check_tensor_fences=True)
        return Problem(kernel)

    return make


@pytest.mark.parametrize("completion", ["random", "eager", "lazy"])
@pytest.mark.parametrize("kernel", [blackwell, hopper])
def test_the_kernels_are_right_and_unreported_under_every_seed(problem_of, kernel, completion):
    from jax_fa4 import emulator

    problem = problem_of(kernel)
    emulator.set_options(completion=completion)
    for seed in range(SEEDS):
        assert problem.outcome(kernel.text(kernel.lines()), seed) == "", f"seed {seed}"


def sample(every: int) -> list[object]:
    """All mutants as test parameters; but for each `every`-th they are left to the long run."""
    return [
        pytest.param(mutant, id=f"{mutant.kernel.ENTRY}-{mutant.name}", marks=[pytest.mark.slow] if i % every else [])
        for i, mutant in enumerate(MUTANTS)
    ]


@pytest.mark.parametrize("mutant", sample(every=8))
def test_a_mutant_is_noticed_unless_it_is_equivalent(problem_of, mutant):
    noticed = problem_of(mutant.kernel).caught(mutant.text, SEEDS)
    if mutant.equivalent:
        assert noticed == "", mutant.equivalent
    else:
        assert noticed, f"no seed of {SEEDS} notices: {mutant.name}"
