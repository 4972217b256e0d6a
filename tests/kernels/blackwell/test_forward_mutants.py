"""The emulator notices when one line of synchronisation is missing in the Blackwell forward's own PTX, where a CTA does
one item and where it does several.

Each wait, arrival, commit, fence of a proxy, wait for stores and named barrier is left out, one at a time. Fences of
tcgen05 are not tried: the emulator does not check them.
"""

from __future__ import annotations

import dataclasses
import re

import pytest

from jax_fa4 import arguments, emulator
from jax_fa4.ffi import blackwell_forward as wrapper
from jax_fa4.ffi import launch
from jax_fa4.kernels import bundle
from jax_fa4.kernels.blackwell.plans import Scheduling, Tiles
from tests.kernels.forward_checks import compare, draw

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("blackwell")]

SEEDS = 6
# What replaces a line: a wait that passes at once, or nothing.
PASSED = "setp.eq.u32 {}, 0, 0;"
SYNCHRONISATION = re.compile(
    r"mbarrier\.try_wait|@elected mbarrier\.arrive|tcgen05\.commit|tcgen05\.wait::(?:st|ld)|barrier\.cta\.|fence\.proxy"
)
# Events whose waits others imply, so that the kernel is right without them: the softmax has waited for the end of the
# products before it tells the correction; the ring of values, which is shorter, holds the load back for that of keys.
IMPLIED = ("keys_free", "out_done")
# With cluster launch control besides: the correction's wait for the copy of the outputs before, which matters only
# between items that see nothing, of which there is one here.
IMPLIED_IN_CLUSTERS = (*IMPLIED, "query_free")
CONTEXT = 12  # lines before a wait in which its barrier's offset is written


def mutants(ptx: str) -> list[tuple[int, str, str]]:
    """Line, name and text of each mutant."""
    lines, found = ptx.splitlines(), []
    for number, line in enumerate(lines):
        if SYNCHRONISATION.search(line) is None:
            continue
        if (predicate := re.search(r"try_wait\S*\s+(%?\w+),", line)) is not None:
            changed = PASSED.format(predicate[1])
        else:
            changed = "}" if line.rstrip().endswith("}") else ""
        name = f"line {number + 1}: {line.strip()[:90]}"
        found.append((number, name, "\n".join([*lines[:number], changed, *lines[number + 1 :]])))
    return found


def outcome(call: arguments.Call, tiles: Tiles, seed: int) -> str:
    """Empty if the results are right and nothing was reported; else what went wrong."""
    emulator.set_options(seed=seed, completion=("random", "lazy", "eager")[seed % 3], stuck_after=300_000)
    try:
        driver = launch.emulated_driver((10, 0))
        compare(call, *wrapper.blackwell_forward(call.problem, call.operands, tiles=tiles, driver=driver), 8.6e-5)
    except Exception as error:  # what a wrong kernel makes of it: a failed launch, or wrong values
        emulator.last_report(clear=True)
        return str(error)[:200] or "wrong"
    return ""


@pytest.mark.parametrize("scheduling", ["grid", "persistent", "cluster"])
def test_missing_synchronisation_is_noticed(scheduling: Scheduling, monkeypatch: pytest.MonkeyPatch) -> None:
    one = dataclasses.replace(wrapper.ARCHITECTURES["sm_100"], sms=1)
    monkeypatch.setitem(wrapper.ARCHITECTURES, "sm_100", one)
    tensors = draw(0, (1, 900, 1, 128), 620, 1, "bfloat16")  # one of four items sees no keys
    call = arguments.read_call(*tensors, is_causal=True, causal_alignment="bottom_right")
    tiles = dataclasses.replace(wrapper.tiles_of(call.problem, "sm_100f"), scheduling=scheduling)
    plan = wrapper.plan_of(call.problem, "sm_100f", tiles)
    original = bundle.find(plan)
    assert outcome(call, tiles, 0) == ""
    names = IMPLIED_IN_CLUSTERS if scheduling == "cluster" else IMPLIED
    implied = [
        str(plan.event_offsets[name] + 8 * stage) for name in names if name in plan.event_offsets for stage in range(2)
    ]
    lines, unnoticed, tried = original.ptx.splitlines(), [], mutants(original.ptx)
    for number, name, text in tried:
        binary = dataclasses.replace(original, ptx=text)
        monkeypatch.setattr(launch.bundle, "find", lambda _, binary=binary: binary)
        is_noticed = any(outcome(call, tiles, seed) for seed in range(SEEDS))
        # The correction uses what it has loaded before it gives the columns free: its wait for loads adds nothing.
        is_noticed = is_noticed or (scheduling != "grid" and "tcgen05.wait::ld" in name)
        # Proxies are not told apart where the hardware's answers are overwritten.
        is_answer = "query_cancel" in "".join(lines[number - 2 * CONTEXT : number])
        is_noticed = is_noticed or ("fence.proxy" in name and is_answer)
        context = " ".join(lines[number - CONTEXT : number])
        if not is_noticed and not any(offset in context for offset in implied):
            unnoticed.append(name)
    assert len(tried) > 60
    assert unnoticed == [], f"{len(unnoticed)} of {len(tried)}"
