"""Speed of the emulated GPU on this machine's cores: warp instructions a second and core, every check on.

    python -m benchmarks.emulator [--rounds N] [--nokernels]

Small loops, one for each class of instructions, and our own attention kernels. Time is the processor time of the host
threads that ran the launch, so other programs disturb it little. Asked for are 2 million warp instructions a second and
core, tensor-core work apart, and a forward of 512 x 512, head dim 128, one head, in about a second.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

import jax_fa4
from jax_fa4 import emulator
from tests.emulator.device import Buffer, Kernel, entry

WARPS = 4
UNROLLED = 8  # times that a loop repeats its body


class Figure(NamedTuple):
    """What one launch, or the launches of one call, cost."""

    instructions: int
    multiply_adds: int
    seconds: float

    @property
    def million_a_second(self) -> float:
        """Warp instructions of one core."""
        return self.instructions / self.seconds / 1e6


SETUP = f"""
  .shared .align 128 .b8 words[{WARPS * 32 * 16 * 2}];
  mov.u32 %r1, %tid.x; ld.param.u64 %rd1, [out]; mul.wide.u32 %rd2, %r1, 16; add.s64 %rd1, %rd1, %rd2;
  mov.u32 %r2, words; mad.lo.u32 %r3, %r1, 4, %r2; mad.lo.u32 %r4, %r1, 16, %r2; mov.u32 %r5, 0; mov.u32 %r6, 1;
  mov.u32 %r7, 2; mov.u32 %r8, 3; mov.u32 %r9, 4; mov.f32 %f1, 0f3F800000; mov.f32 %f2, 0f3F800001;
  mov.f32 %f3, 0f3F000000; mov.b64 %rd3, {{%f1, %f2}}; mov.b64 %rd4, {{%f2, %f3}}; mov.b64 %rd5, %rd4;
  and.b32 %r12, %r1, 31; shl.b32 %r12, %r12, 7; add.s32 %r12, %r12, %r2; setp.ne.s32 %p2, %r1, 0;
  st.shared.v4.b32 [%r4], {{%r6, %r7, %r8, %r9}}; st.shared.v4.b32 [%r4+2048], {{%r6, %r7, %r8, %r9}};
  st.global.v4.b32 [%rd1], {{%r6, %r7, %r8, %r9}}; bar.sync 0;
"""
# Each body is repeated inside of the loop.
LOOPS = {
    "integer": "add.s32 %r6, %r6, %r7; xor.b32 %r7, %r7, %r6; mad.lo.s32 %r8, %r6, %r7, %r8; shl.b32 %r9, %r8, 3;",
    "float": "fma.rn.f32 %f1, %f2, %f3, %f1; add.f32 %f2, %f1, %f3; max.f32 %f3, %f1, %f2; mul.f32 %f3, %f3, %f2;",
    "packed float": "fma.rn.f32x2 %rd3, %rd4, %rd5, %rd3; add.rn.f32x2 %rd4, %rd3, %rd5;",
    "exponential": "ex2.approx.ftz.f32 %f1, %f2; ex2.approx.ftz.f32 %f2, %f1;",
    "conversion": "cvt.rn.bf16x2.f32 %r6, %f1, %f2; cvt.rn.f16x2.f32 %r7, %f1, %f2;",
    "move and select": "mov.b64 %rd3, {%r6, %r7}; mov.b64 {%r8, %r9}, %rd3; selp.b32 %r6, %r7, %r8, %p1;",
    "compare": "setp.lt.s32 %p1, %r6, %r7; setp.gt.f32 %p1, %f1, %f2;",
    "shuffle": "shfl.sync.bfly.b32 %r6, %r7, 1, 31, -1; shfl.sync.idx.b32 %r7, %r6, 3, 31, -1;",
    "shared, 4 bytes a lane": "ld.shared.b32 %r6, [%r3]; st.shared.b32 [%r3], %r7;",
    "shared, 16 bytes a lane": "ld.shared.v4.b32 {%r6, %r7, %r8, %r9}, [%r4]; "
    "st.shared.v4.b32 [%r4], {%r6, %r7, %r8, %r9};",
    "shared, one bank": "ld.shared.b32 %r6, [%r12];",
    "shared, loads": "ld.shared.b32 %r6, [%r3]; ld.shared.v2.b32 {%r7, %r8}, [%r4];",
    "stmatrix": "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r4], {%r6, %r7, %r8, %r9};",
    "global, 16 bytes a lane": "ld.global.v4.b32 {%r6, %r7, %r8, %r9}, [%rd1]; "
    "st.global.v4.b32 [%rd1], {%r6, %r7, %r8, %r9};",
    "branch": "@%p2 bra $next; add.s32 %r6, %r6, %r7; $next: ",
    "barrier": "bar.sync 0;",
}


def loop_of(name: str, rounds: int) -> str:
    """A kernel whose warps run `rounds` rounds of the loop."""
    bodies = "\n".join(LOOPS[name].replace("$next", f"next{k}") for k in range(UNROLLED))
    ending = "add.s32 %r5, %r5, 1; setp.lt.s32 %p3, %r5, " + str(rounds) + "; @%p3 bra loop;"
    return entry(f"{SETUP}\n setp.lt.s32 %p1, %r1, 7;\nloop:\n{bodies}\n{ending}", block=WARPS * 32)


def since_last() -> Figure:
    """The launches since the last call, together."""
    launches = emulator.statistics()
    return Figure(
        sum(launch["warp_instructions"] for launch in launches),
        sum(launch["multiply_adds"] for launch in launches),
        sum(launch["cpu_seconds"] for launch in launches),
    )


def median(run: Callable[[], object], rounds: int) -> Figure:
    """The median launch of several, after a first that is left out."""
    run()
    emulator.statistics()
    figures = []
    for _ in range(rounds):
        run()
        figures.append(since_last())
    middle = statistics.median_low([figure.seconds for figure in figures])
    return next(figure for figure in figures if figure.seconds == middle)


def measure_loop(name: str, rounds: int, iterations: int = 2000) -> Figure:
    """A small loop of one class of instructions."""
    kernel = Kernel(loop_of(name, iterations))
    out = Buffer(np.zeros(WARPS * 32 * 4, np.uint32))
    return median(lambda: kernel((1,), (WARPS * 32,), out), rounds)


def measure_attention(target: str, backward: bool, rounds: int, length: int = 512, head_dim: int = 128) -> Figure:
    """Our kernels: a forward of one head, or the gradients (which launch the forward as well)."""
    drawn = np.random.default_rng(0).standard_normal((3, 1, length, 1, head_dim))
    tensors = [jnp.asarray(one, jnp.bfloat16) for one in drawn]

    def attend(*operands: jax.Array) -> jax.Array:
        return jax_fa4.attention(*operands, implementation="emulated")

    def gradients(*operands: jax.Array) -> tuple[jax.Array, ...]:
        return jax.grad(lambda *one: attend(*one).astype(jnp.float32).sum(), (0, 1, 2))(*operands)

    emulator.set_options(arch={"sm_90": "9.0", "sm_100": "10.0"}[target])
    with jax_fa4.target(target):
        run = jax.jit(gradients if backward else attend)
        return median(lambda: jax.block_until_ready(run(*tensors)), rounds)


def measure(rounds: int, kernels: bool) -> dict[str, Figure]:
    """Every figure, by name."""
    emulator.set_options(threads=1, seed=0, arch="9.0")
    figures = {name: measure_loop(name, rounds) for name in LOOPS}
    if kernels:
        for target, name in (("sm_90", "Hopper"), ("sm_100", "Blackwell")):
            figures[f"our {name} forward"] = measure_attention(target, False, rounds)
            figures[f"our {name} forward and backward"] = measure_attention(target, True, rounds)
    return figures


def define_flags() -> None:
    """Flags of the program; not defined on import, so that a test can import several benchmarks."""
    flags.DEFINE_integer("rounds", 3, "Runs of each, of which the median is printed.", lower_bound=1)
    flags.DEFINE_bool("kernels", True, "Also our attention kernels.")
    flags.DEFINE_string("out", None, "File to write the figures to, as JSON.")


def main(_: list[str]) -> None:
    """Prints the table."""
    figures = measure(flags.FLAGS.rounds, flags.FLAGS.kernels)
    if flags.FLAGS.out:
        rows = {
            name: figure._asdict() | {"million_a_second": figure.million_a_second} for name, figure in figures.items()
        }
        Path(flags.FLAGS.out).write_text(json.dumps({"benchmark": "emulator", "figures": rows}))
    print(f"{'':32}{'instructions':>14}{'multiply-adds':>16}{'seconds':>9}{'million/s':>11}")
    for name, figure in figures.items():
        counts = f"{figure.instructions:14,}{figure.multiply_adds:16,}"
        print(f"{name:32}{counts}{figure.seconds:9.3f}{figure.million_a_second:11.2f}")


if __name__ == "__main__":
    define_flags()
    app.run(main)
