"""The machine code of the bundled kernels is no worse than docs/sass.md says, and within the budgets."""

from __future__ import annotations

import itertools

import pytest

from docs import build_sass
from jax_fa4.kernels.plans import bundled_plans

# Instructions of loops by architecture and CTAs of an item: what flash-attn-4 4.0.0b36 has with head_dim 128, or less.
SOFTMAX = {("sm_100f", 1): 515, ("sm_100f", 2): 543, ("sm_103a", 1): 385, ("sm_103a", 2): 385}
BUDGETS = {"correction": 186, "mma": 220}
MOST_FOR_MASKS = 150
IDS_LOOP = 56  # the loop that compares ids, where they lie in no simple order; flash-attn-4 has none
# Of the Blackwell backward's computing loop without a mask, by head_dim: flash-attn-4 has 452, 550 and 551.
BACKWARD_BUDGETS = {64: 400, 96: 400, 128: 480, 192: 480}
Stated = dict[tuple[str, str], dict[str, int]]


@pytest.fixture(scope="module")
def stated() -> Stated:
    return build_sass.stated(build_sass.PAGE.read_text())


def test_no_stack_and_no_local_memory(stated: Stated) -> None:
    """Of Blackwell's; two of Hopper's, which compare ids, spill."""
    blackwell = {place: counts for place, counts in stated.items() if place[0].endswith(("sm_100f", "sm_103a"))}
    assert len(blackwell) > 100
    assert {(counts["stack"], counts["local"]) for counts in blackwell.values()} == {(0, 0)}


def blackwell_loops(stated: Stated) -> dict[str, dict[str, int]]:
    """Instructions by kernel and loop."""
    found: dict[str, dict[str, int]] = {}
    for (key, loop), counts in stated.items():
        if key.startswith("forward") and key.endswith(("sm_100f", "sm_103a")):
            found.setdefault(key, {})[loop] = counts["instructions"]
    return found


@pytest.mark.parametrize(("architecture", "ctas"), list(SOFTMAX))
def test_budgets(stated: Stated, architecture: str, ctas: int) -> None:
    """The softmax of head_dim 64 computes a greater share by the polynomial, and is longer for that."""
    found = [
        (key, loops)
        for key, loops in blackwell_loops(stated).items()
        if key.endswith(architecture) and f"ctas_{ctas}-" in key
    ]
    assert len(found) >= 2
    for key, loops in found:
        assert "head_dim_64" in key or loops["softmax"] <= SOFTMAX[architecture, ctas], key
        assert all(loops[name] <= most for name, most in BUDGETS.items()), key


def test_masks_cost_little(stated: Stated) -> None:
    found = {key: loops for key, loops in blackwell_loops(stated).items() if "softmax, masked" in loops}
    assert len(found) > 30
    for key, loops in found.items():
        most = MOST_FOR_MASKS + (IDS_LOOP if "mask_ids" in key else 0)
        assert loops["softmax, masked"] <= loops["softmax"] + most, key


@pytest.mark.parametrize("head_dim", list(BACKWARD_BUDGETS))
def test_budgets_of_the_backward(stated: Stated, head_dim: int) -> None:
    start = f"backward-dtype_bfloat16-head_dim_{head_dim}-"
    keys = {key for key, _ in stated if key.startswith(start) and key.endswith("sm_100f")}
    assert len(keys) == 6  # masks, in order or not
    for key in keys:
        assert stated[key, "compute"]["instructions"] <= BACKWARD_BUDGETS[head_dim]
        assert stated[key, "compute"]["ex2"] == stated[key, "compute, masked"]["ex2"] == 64
        loops = {loop for of_key, loop in stated if of_key == key}
        assert loops >= {"compute", "compute, masked", "reduce", "mma", "load"}


def test_kernels_are_as_the_page_says() -> None:
    if build_sass.tool("nvdisasm") is None or build_sass.tool("cuobjdump") is None:
        pytest.skip("needs nvdisasm and cuobjdump")
    found = list(build_sass.kernels(("causal", "band")))  # a third of them, for the time that disassembling takes
    assert len(found) > 10
    assert build_sass.worse(found, build_sass.PAGE.read_text()) == []


def test_worse_kernels_are_named() -> None:
    loop = build_sass.Loop((build_sass.Instruction("MUFU.EX2 R0, R1", None),) * 20)
    (plan,) = itertools.islice((plan for plan in bundled_plans() if plan.kernel == "backward"), 1)
    before, after = (build_sass.Kernel(plan, stack, 128, {"softmax": loop}) for stack in (0, 8))
    page = build_sass.render([before])
    assert build_sass.stated(page)[plan.key, "compute"]["ex2"] == 20
    assert build_sass.worse([before], page) == []
    assert build_sass.worse([after], page) == [f"{plan.key}, compute: stack 8, docs/sass.md says 0"]
    assert build_sass.worse([after], page.replace(plan.key, "other")) == [f"{plan.key}, compute: not in docs/sass.md"]
