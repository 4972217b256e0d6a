"""Registers that were never written are reported where they decide something, and only there."""

from __future__ import annotations

import numpy as np
import pytest

from jax_fa4 import emulator
from tests.emulator.device import Buffer, DriverError, Kernel, entry

pytestmark = pytest.mark.usefixtures("gpu")
HEAD = "ld.param.u64 %rd1, [out]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd3, %r1, 4; add.s64 %rd4, %rd1, %rd3;"


def run(body: str) -> np.ndarray:
    out = Buffer(np.zeros(32, np.uint32))
    Kernel(entry(HEAD + body))((1,), (32,), out)
    return out.get()


@pytest.mark.parametrize(
    "body",
    [
        "st.global.b32 [%rd4], %r9;",
        "add.s32 %r3, %r9, 1; st.global.b32 [%rd4], %r3;",
        "add.s64 %rd5, %rd1, %rd9; ld.global.b32 %r3, [%rd5];",
        "setp.eq.u32 %p2, %r9, 1; @%p2 st.global.b32 [%rd4], %r1;",
        "@%p3 bra $end; st.global.b32 [%rd4], %r1;\n$end:",
        "setp.lt.u32 %p1, %r1, 16; @%p1 mov.u32 %r9, 1; st.global.b32 [%rd4], %r9;",
        "bar.sync %r9;",
        "mov.b64 %rd9, {%r1, %r9}; mov.b64 {%r3, %r4}, %rd9; st.global.b32 [%rd4], %r4;",
        "setp.lt.u32 %p1, %r1, 16; selp.b32 %r3, %r1, %r9, %p1; st.global.b32 [%rd4], %r3;",
        "setp.lt.u32 %p1, %r1, 16; setp.eq.u32 %p2, %r9, 0; or.pred %p3, %p1, %p2; @%p3 st.global.b32 [%rd4], %r1;",
    ],
)
def test_a_register_that_decides_is_reported(body: str) -> None:
    with pytest.raises(DriverError, match=r"was never written in lane \d+.*PTX line") as caught:
        run(body)
    assert caught.value.code == 719
    emulator.set_options(check_registers=False, check_races=False)
    if "[%rd5]" not in body and "bar.sync" not in body:
        run(body)


def test_the_report_names_the_first_lane() -> None:
    with pytest.raises(DriverError, match="never written in lane 16;"):
        run("setp.lt.u32 %p1, %r1, 16; @%p1 mov.u32 %r9, 1; st.global.b32 [%rd4], %r9;")


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("add.s32 %r3, %r9, 1; st.global.b32 [%rd4], %r1;", np.arange(32)),
        ("mov.b64 %rd9, {%r1, %r9}; mov.b64 {%r3, %r4}, %rd9; st.global.b32 [%rd4], %r3;", np.arange(32)),
        ("mov.pred %p1, -1; selp.b32 %r3, %r1, %r9, %p1; st.global.b32 [%rd4], %r3;", np.arange(32)),
        (
            "setp.eq.u32 %p1, %r1, 99; setp.eq.u32 %p2, %r9, 0; and.pred %p3, %p1, %p2; @%p3 trap; "
            "st.global.b32 [%rd4], %r1;",
            np.arange(32),
        ),
        (
            "setp.lt.u32 %p1, %r1, 16; @%p1 mov.u32 %r9, 7; @!%p1 mov.u32 %r9, 8; st.global.b32 [%rd4], %r9;",
            np.where(np.arange(32) < 16, 7, 8),
        ),
    ],
)
def test_unwritten_registers_that_decide_nothing_pass(body: str, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(run(body), expected)
