"""The Hopper forward compiles to what its plan says, and keeps everything in registers."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from jax_fa4.kernels import build
from jax_fa4.kernels.hopper.plans import FORWARD_TILES, Mask, forward_plan

pytestmark = pytest.mark.skipif(build.compiler_version() is None, reason="needs nvidia-cutlass-dsl")


@functools.cache
def built(mask: Mask) -> build.KernelBinary:
    return build.build(forward_plan("bfloat16", 128, mask, tiles=FORWARD_TILES[128], soft_cap=True, sinks=True))


@pytest.fixture
def binary() -> build.KernelBinary:
    return built("ids")


def test_the_kernel_is_launched_as_planned(binary: build.KernelBinary) -> None:
    threads = re.search(r"\.reqntid (\d+), 1, 1", binary.ptx)
    assert threads is not None
    assert int(threads[1]) == binary.plan.threads
    for role in binary.plan.roles:
        assert re.search(rf"setmaxnreg\.(inc|dec)\.sync\.aligned\.u32\s+{role.registers};", binary.ptx)


@pytest.mark.parametrize(("mask", "copies"), [("causal", 3), ("ids", 5)])
def test_one_copy_of_each_loop(mask: Mask, copies: int) -> None:
    """Scores and outputs of a first step or of a last one, of a masked, of a whole; where steps at both edges can be
    masked, also of the two of a run at the right edge alone, after which a warpgroup may pass on steps."""
    products = re.findall(r"wgmma\.mma_async\.sync\.aligned\.(m64n\d+)k16", built(mask).ptx)
    assert products.count("m64n80") == copies * 128 // 16
    assert products.count("m64n128") == copies * 80 // 16


@pytest.mark.skipif(shutil.which("cuobjdump") is None, reason="needs cuobjdump on the PATH")
def test_nothing_is_spilled(binary: build.KernelBinary, tmp_path: Path) -> None:
    (tmp_path / "kernel.cubin").write_bytes(binary.cubin)
    command = ["cuobjdump", "-res-usage", str(tmp_path / "kernel.cubin")]
    usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "STACK:0" in usage
    assert "LOCAL:0" in usage
