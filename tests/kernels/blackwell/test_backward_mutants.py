"""The emulator notices when one line of synchronisation is missing in the Blackwell backward's own PTX.

As `test_forward_mutants.py`, for a kernel of one CTA, one of pairs, and the one of pairs whose buffers take turns.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fa4 import arguments, emulator
from jax_fa4.ffi import blackwell_backward as wrapper
from jax_fa4.ffi import launch
from jax_fa4.kernels import bundle
from tests.kernels.blackwell.test_forward_mutants import mutants
from tests.kernels.forward_checks import draw, in_float64
from tests.kernels.gradient_checks import check_gradients

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("blackwell")]

SEEDS = 6
# What others imply, as (kind of line, event), with how many lines there are: the kernel is right without any one of
# them. Which others is said in `test_backward_protocol.py`; "end" are commits after the loop, for which nobody waits
# again.
IN_ORDER = {("wait", "grad_query_ready"): 2}  # of the computing warps, in both loops: dP comes after dQ
IMPLIED: dict[int, dict[tuple[str, str], int]] = {
    64: IN_ORDER
    | {
        # Two tiles behind, dK is awaited for the queries' sake, and comes after dV and after statistics were read.
        ("wait", "statistics_free"): 1,
        ("wait", "grad_out_free"): 1,
        ("commit", "query_free"): 1,  # end
    },
    128: {
        ("wait", "grad_query_drained"): 1,  # of dQ in the loop: the next S comes before it, and has waited for the same
        ("wait", "probs_ready"): 1,  # of dV in the loop: dQ has waited for the same
        ("wait", "statistics_free"): 1,  # dK, for which the load has waited, comes after those were read
        ("commit", "query_columns_free"): 1,  # end
    },
    192: IN_ORDER
    | {
        ("wait", "statistics_free"): 1,  # dK, for which the load has waited, comes after those were read
        ("wait", "grad_out_columns_free"): 1,  # dQ, for which the load has waited, comes after dV
        ("commit", "query_columns_free"): 1,  # end
        ("commit", "grad_out_free"): 1,  # end
    },
}
Problem = tuple[arguments.Call, tuple[jax.Array, ...]]


def event_of(lines: list[str], number: int, offsets: dict[int, str]) -> str:
    """The event at whose barrier a line waits or arrives: by the constant in its address; "" where there is none."""
    found = re.search(r"\[(%r\d+)\]", lines[number])
    register = found[1] if found else None
    while register is not None:
        place = next((one for one in range(number - 1, -1, -1) if re.search(rf"\s{register},", lines[one])), None)
        if place is None:
            return ""
        numbers = [int(one) for one in re.findall(r"(?<![%\w])\d+", lines[place])]
        if names := [offsets[one] for one in numbers if one in offsets]:
            return names[0]
        following = re.search(rf"{register},\s*(%r\d+)", lines[place])
        register, number = (following[1] if following else None), place
    return ""


def kind_of(line: str) -> str:
    """What a line is for."""
    kinds = {"try_wait": "wait", "mbarrier.arrive": "arrive", "commit": "commit"}
    return next((kind for text, kind in kinds.items() if text in line), line.strip())


def problem_of(head_dim: int) -> Problem:
    """Items of 0 to 5 tiles; the call, and output, log-sum-exp and their cotangents."""
    tensors = draw(0, (1, 640, 1, head_dim), 800, 1, "bfloat16", value_dim=min(head_dim, 128))
    call = arguments.read_call(*tensors, is_causal=True)
    out, lse = in_float64(call)
    rng = np.random.default_rng(1)
    grads = (jnp.asarray(rng.standard_normal(one.shape), kind) for one, kind in ((out, "bfloat16"), (lse, "float32")))
    return call, (jnp.asarray(out, "bfloat16"), jnp.asarray(lse, "float32"), *grads)


def outcome(problem: Problem, seed: int) -> str:
    """Empty if the gradients are right and nothing was reported; else what went wrong."""
    call, operands = problem
    emulator.set_options(seed=seed, completion=("random", "lazy", "eager")[seed % 3], stuck_after=300_000)
    try:
        driver = launch.emulated_driver((10, 0))
        found = wrapper.blackwell_backward(call.problem, call.operands, *operands, driver=driver)
        check_gradients(found[:3], call, *operands[2:])
    except Exception as error:  # what a wrong kernel makes of it: a failed launch, or wrong values
        emulator.last_report(clear=True)
        return str(error)[:200] or "wrong"
    return ""


@pytest.mark.parametrize("head_dim", list(IMPLIED))
def test_missing_synchronisation_is_noticed(head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(head_dim)
    plan = wrapper.plan_of(problem[0].problem)
    find, original = bundle.find, bundle.find(plan)
    assert outcome(problem, 0) == ""
    offsets = {
        plan.event_offsets[event.name] + 8 * stage: event.name for event in plan.events for stage in range(event.stages)
    }
    lines, tried = original.ptx.splitlines(), mutants(original.ptx)
    left, unnoticed = Counter(IMPLIED[head_dim]), []
    for number, name, text in tried:
        binary = dataclasses.replace(original, ptx=text)
        monkeypatch.setattr(launch.bundle, "find", lambda one, binary=binary: binary if one == plan else find(one))
        if any(outcome(problem, seed) for seed in range(SEEDS)):
            continue
        place = kind_of(lines[number]), event_of(lines, number, offsets)
        left[place] -= 1
        if left[place] < 0:
            unnoticed.append(f"{name} {place}")
    assert len(tried) > 60
    assert unnoticed == [], f"{len(unnoticed)} of {len(tried)}"
