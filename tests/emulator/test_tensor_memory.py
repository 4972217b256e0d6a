"""tcgen05 instructions that no kernel of the mutation suite has: loads that reduce, allocation by a pair."""

from __future__ import annotations

import numpy as np
import pytest

from jax_fa4 import emulator
from tests.emulator.device import Buffer, DriverError, Kernel, entry

pytestmark = pytest.mark.usefixtures("gpu")

COLUMNS = 8
LIST = ", ".join(f"%f{i}" for i in range(COLUMNS))
# A warp writes its rows into tensor memory and takes the extreme of each row with the load.
REDUCE = f"""
  ld.param.u64 %rd1, [out]; ld.param.u64 %rd2, [in]; mov.u32 %r1, %tid.x; mov.u32 %r6, slot;
  tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r6], 32; bar.sync 0; ld.shared.b32 %r7, [%r6];
  mul.wide.u32 %rd3, %r1, {4 * COLUMNS}; add.s64 %rd2, %rd2, %rd3;
  {" ".join(f"ld.global.f32 %f{i}, [%rd2+{4 * i}];" for i in range(COLUMNS))}
  tcgen05.st.sync.aligned.32x32b.x{COLUMNS}.b32 [%r7], {{{LIST}}}; tcgen05.wait::st.sync.aligned;
  tcgen05.ld.red.sync.aligned.32x32b.x{COLUMNS}.OPERATION {{{LIST}}}, %f20, [%r7];
  tcgen05.wait::ld.sync.aligned;
  mul.wide.u32 %rd4, %r1, 4; add.s64 %rd1, %rd1, %rd4; st.global.f32 [%rd1], %f20;
  tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r7, 32;"""


def reduce(operation: str, target: str = "sm_103a") -> tuple[np.ndarray, np.ndarray]:
    values = np.random.default_rng(0).standard_normal((32, COLUMNS)).astype(np.float32)
    values[3, 2] = np.nan
    body = REDUCE.replace("OPERATION", operation)
    params, module = ".param .u64 out, .param .u64 in", ".shared .align 4 .b8 slot[4];"
    out = Buffer(np.zeros(32, np.float32))
    Kernel(entry(body, params, target, module=module))((1,), (32,), out, Buffer(values))
    return values, out.get()


def test_a_load_gives_the_extreme_of_its_registers() -> None:
    emulator.set_options(arch="10.3")
    values, found = reduce("max.f32")
    np.testing.assert_array_equal(found, np.nanmax(values, axis=1))
    values, found = reduce("min.abs.NaN.f32")
    np.testing.assert_array_equal(found, np.abs(values).min(axis=1))
    values, found = reduce("min.u32")
    np.testing.assert_array_equal(found.view(np.uint32), values.view(np.uint32).min(axis=1))


def test_a_load_that_reduces_needs_compute_capability_10_3() -> None:
    emulator.set_options(arch="10.0")
    with pytest.raises(DriverError, match=r"needs compute capability 10\.3"):
        reduce("max.f32", "sm_100a")


PAIR = """
  mov.u32 %r6, slot; mov.u32 %r2, %cluster_ctarank;
  setp.eq.u32 %p1, %r2, 1; @%p1 bra $later;
  {first}
$later: {second}
  barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned; ld.shared.b32 %r7, [%r6];
  tcgen05.dealloc.cta_group::2.sync.aligned.b32 %r7, 64;"""
ALLOCATE = "tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%r6], 64;"


def test_a_pair_allocates_together() -> None:
    emulator.set_options(arch="10.0")
    module, out = ".shared .align 4 .b8 slot[4];", Buffer(np.zeros(1, np.uint32))
    both = entry(PAIR.format(first="", second=ALLOCATE), target="sm_100a", module=module)
    Kernel(both)((2,), (32,), out, cluster=(2, 1, 1))
    one = entry(PAIR.format(first=ALLOCATE, second=""), target="sm_100a", module=module)
    with pytest.raises(DriverError, match=r"wait for tensor memory"):
        Kernel(one)((2,), (32,), out, cluster=(2, 1, 1))
