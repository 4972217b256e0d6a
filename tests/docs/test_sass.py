"""The machine code of the bundled forward kernels is no worse than docs/sass.md says, and within the budgets."""

from __future__ import annotations

import pytest

from docs import build_sass

# Instructions of loops with head_dim 128 by (architecture, CTAs of an item): what flash-attn-4 4.0.0b36 has, or less.
BUDGETS = {
    ("sm_100f", 1): {"softmax": 515, "softmax, masked": 515 + 150, "correction": 186, "mma": 220},
    ("sm_100f", 2): {"softmax": 543, "softmax, masked": 543 + 150, "correction": 186, "mma": 220},
    ("sm_103a", 1): {"softmax": 385, "softmax, masked": 630, "correction": 186, "mma": 220},
}


@pytest.fixture(scope="module")
def stated() -> dict[tuple[str, str], tuple[int, int, int]]:
    return build_sass.stated(build_sass.PAGE.read_text())


def test_no_stack_and_no_local_memory(stated: dict[tuple[str, str], tuple[int, int, int]]) -> None:
    """Of Blackwell's; two of Hopper's, which compare ids, spill."""
    blackwell = {place: counts for place, counts in stated.items() if place[0].endswith(("sm_100f", "sm_103a"))}
    assert len(blackwell) > 100
    assert {(stack, local) for stack, _, local in blackwell.values()} == {(0, 0)}


@pytest.mark.parametrize(("architecture", "ctas"), list(BUDGETS))
def test_budgets(stated: dict[tuple[str, str], tuple[int, int, int]], architecture: str, ctas: int) -> None:
    share = {("sm_100f", 1): 16, ("sm_100f", 2): 24, ("sm_103a", 1): 0}[architecture, ctas]
    middle = "head_dim_128-value_dim_128-mask_causal"
    tail = f"emulated_{share}-own_probs_False-ctas_{ctas}-{architecture}"
    counts = {loop: count for (key, loop), (_, count, _) in stated.items() if middle in key and key.endswith(tail)}
    for loop, most in BUDGETS[architecture, ctas].items():
        assert counts[loop] <= most


def test_kernels_are_as_the_page_says() -> None:
    if build_sass.tool("nvdisasm") is None or build_sass.tool("cuobjdump") is None:
        pytest.skip("needs nvdisasm and cuobjdump")
    found = list(build_sass.kernels(("causal",)))  # a third of them, for the time that disassembling takes
    assert len(found) > 10
    assert build_sass.worse(found, build_sass.PAGE.read_text()) == []


def test_worse_kernels_are_named() -> None:
    page = "| kernel | stack | loop | instructions | local |\n|---|\n| a | 0 | mma | 100 | 0 |\n"
    assert build_sass.stated(page) == {("a", "mma"): (0, 100, 0)}
