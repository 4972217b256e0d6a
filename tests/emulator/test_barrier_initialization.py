"""mbarriers are used after their initialisation: a barrier of the CTA, or of the cluster with the fence it needs."""

from __future__ import annotations

import numpy as np
import pytest

from jax_fa4 import emulator
from tests.emulator.device import Buffer, DriverError, Kernel, entry

pytestmark = pytest.mark.usefixtures("gpu")

# Each CTA of a pair makes a barrier, and arrives at the other's.
PAIR = """
  mov.u32 %r1, %tid.x; mov.u32 %r6, bars; mov.u32 %r2, %cluster_ctarank; xor.b32 %r3, %r2, 1;
  setp.eq.u32 %p1, %r1, 0; @!%p1 bra $made;
  mbarrier.init.shared.b64 [%r6], 1; {fence}
$made: {barrier}
  mapa.shared::cluster.u32 %r7, %r6, %r3;
  setp.eq.u32 %p3, %r1, 32; @!%p3 bra $wait;
  mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r7];
$wait: mbarrier.try_wait.parity.shared.b64 %p2, [%r6], 0; @!%p2 bra $wait;
  barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
"""
RELAXED = "barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.acquire.aligned;"


def run_pair(fence: str, barrier: str, seed: int) -> None:
    emulator.set_options(seed=seed)
    source = entry(PAIR.format(fence=fence, barrier=barrier), module=".shared .align 8 .b8 bars[8];")
    Kernel(source)((2,), (64,), Buffer(np.zeros(1, np.uint32)), cluster=(2, 1, 1))


@pytest.mark.parametrize(
    ("fence", "barrier"),
    [
        ("fence.mbarrier_init.release.cluster;", RELAXED),
        ("fence.acq_rel.cluster;", RELAXED),
        ("", "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"),
        ("", "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;"),
    ],
)
def test_fenced_or_released_initialisation_passes(fence: str, barrier: str) -> None:
    for seed in range(6):
        run_pair(fence, barrier, seed)


@pytest.mark.parametrize(
    ("fence", "barrier"),
    [("", RELAXED), ("fence.proxy.async.shared::cta;", RELAXED), ("fence.acq_rel.cta;", RELAXED)],
)
def test_a_missing_initialisation_fence_is_reported(fence: str, barrier: str) -> None:
    for seed in range(6):
        with pytest.raises(DriverError, match=r"nothing orders this after its mbarrier\.init by warp 0"):
            run_pair(fence, barrier, seed)


def test_a_missing_barrier_after_the_initialisation_is_reported() -> None:
    body = """
  mov.u32 %r1, %tid.x; mov.u32 %r6, bars; setp.eq.u32 %p1, %r1, 0; @%p1 mbarrier.init.shared.b64 [%r6], 64;
  {barrier} mbarrier.arrive.shared.b64 %rd1, [%r6];"""
    for seed in range(6):
        emulator.set_options(seed=seed)
        module = ".shared .align 8 .b8 bars[8];"
        Kernel(entry(body.format(barrier="bar.sync 0;"), module=module))((1,), (64,), Buffer(np.zeros(1, np.uint32)))
        with pytest.raises(DriverError, match=r"nothing orders this after its mbarrier|no mbarrier was initialised"):
            Kernel(entry(body.format(barrier=""), module=module))((1,), (64,), Buffer(np.zeros(1, np.uint32)))
