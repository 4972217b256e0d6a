"""How a CTA, or a pair, comes by its items: one; every so-many-th; or, when done, one of a CTA that has not started.

Every role walks by itself, and all walk alike. With cluster launch control a warp asks for the next item while this one
runs; the answer (PTX ISA, clusterlaunchcontrol) lands in shared memory, in one of two places, from where every warp
reads it.

    schedule    item_taken -> ask .......... item_known -> read; ends when there is none
    the others                               item_known -> read -> item_taken
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from jax_fa4.kernels.blackwell.geometry import ANSWERS
from jax_fa4.kernels.blackwell.parts.places import Place
from jax_fa4.kernels.blackwell.parts.shape import Block, Call, Context, Memory
from jax_fa4.kernels.parts.assembly import assembly

ANSWER_BYTES = 16


@cute.jit
def walk(call: Call, work: Callable[[Context], None]) -> None:
    """Do the work of a role for each of this CTA's items."""
    shape = call.memory.shape
    if cutlass.const_expr(shape.scheduling == "grid"):
        work(call.context(call.block))
    elif cutlass.const_expr(shape.scheduling == "persistent"):
        first, _, _ = call.block
        for number in cutlass.range(first, call.items, workers(), unroll=1):
            work(call.context(call.numbered(number)))
    else:
        answers, block = Place(ANSWERS), cute.make_rmem_tensor((4,), Int32)
        for place, one in enumerate((*call.block, 1)):
            block[place] = Int32(one)
        while block[3] != 0:
            work(call.context((block[0], block[1], block[2])))
            take(call.memory, answers, block)
            release(call.memory, answers)
            go_on(answers)


def workers() -> Int32:
    """CTAs or pairs of the launch; each role reads it anew, since kept before them it would be spilled."""
    count: Int32 = assembly("mov.u32 $0, %nctaid.x;", [Int32])
    return count


@cute.jit
def schedule(memory: Memory) -> None:
    """The scheduling warp: ask for items until there are no more."""
    answers, block = Place(ANSWERS), cute.make_rmem_tensor((4,), Int32)
    block[3] = Int32(1)
    while block[3] != 0:
        ask(memory, answers)
        take(memory, answers, block)
        if memory.rank != 0:
            release(memory, answers)
        go_on(answers)


@cute.jit
def ask(memory: Memory, answers: Place) -> None:
    """Ask for an item when every warp has read what the answer overwrites; of a pair the first CTA asks, for both."""
    known, address = memory.signal("item_known"), memory.buffer("answers", answers.stage)
    expect = f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], {ANSWER_BYTES};"
    _elected(expect, known.address(answers.stage))
    where = ".multicast::cluster::all" if memory.shape.ctas == 2 else ""
    request = f"clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes{where}.b128 [$0], [$1];"
    if memory.rank == 0:
        memory.signal("item_taken").wait_free(answers.stage, answers.use)
        _elected(request, address, known.address(answers.stage))


def take(memory: Memory, answers: Place, block: Block) -> None:
    """Wait for the answer; write its place in the grid, and whether it is one, to four registers."""
    memory.signal("item_known").wait(answers.stage, answers.use)
    text = (
        "{ .reg .b128 answer; .reg .pred is_one; ld.shared.b128 answer, [$4]; mov.b32 $0, 0; mov.b32 $1, 0;\n"
        "mov.b32 $2, 0; clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 is_one, answer;\n"
        "@is_one clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {$0, $1, $2, _}, answer;\n"
        "selp.b32 $3, 1, 0, is_one; }"
    )
    x, y, z, is_one = assembly(text, [Int32] * 4, memory.buffer("answers", answers.stage))
    for place, one in enumerate((x, y // memory.shape.ctas, z, is_one)):
        block[place] = cute.arch.make_warp_uniform(one)


def release(memory: Memory, answers: Place) -> None:
    """The answer is read, and may be overwritten by the hardware's next one."""
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_warp()
    memory.signal("item_taken").arrive_elected(answers.stage)


def go_on(answers: Place) -> None:
    """Turn to the next answer."""
    answers.advance()


def _elected(text: str, *inputs: Any) -> None:
    assembly(f"{{ .reg .pred elected; elect.sync _|elected, -1;\n@elected {text} }}", [], *inputs)
