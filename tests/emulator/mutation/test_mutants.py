"""The mutation suite's kernels assemble, and its mutants are what they say."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from tests.emulator.mutation import blackwell, hopper
from tests.emulator.mutation.mutants import mutants


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
    found = mutants()
    for kernel in (blackwell, hopper):
        own = [mutant for mutant in found if mutant.kernel is kernel]
        texts = {mutant.text for mutant in own}
        assert len([mutant for mutant in own if not mutant.equivalent]) >= 40
        assert len(texts) == len(own)
        assert kernel.text(kernel.lines()) not in texts
        assert len({mutant.name for mutant in own}) == len(own)
