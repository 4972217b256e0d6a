"""Writes docs/sass.md: what the machine code of the bundled forward kernels and of Blackwell's backward holds, loop by
loop.

    python docs/build_sass.py            writes the page
    python docs/build_sass.py --check    fails if a kernel is worse than the page says

needs nvdisasm and cuobjdump, on the PATH or from the packages nvidia-cuda-nvdisasm and nvidia-cuda-cuobjdump; no GPU.
Counts are static: each instruction of a loop's body once, with both sides of branches in it, without waits' retries
out of line.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jax_fa4.kernels import bundle
from jax_fa4.kernels.plan import KernelPlan
from jax_fa4.kernels.plans import bundled_plans

PAGE = Path(__file__).with_name("sass.md")
BACKWARD_ROLES = {"softmax": "compute", "softmax, masked": "compute, masked", "correction": "reduce"}
CLASSES = {
    "ex2": r"MUFU\.EX2",
    "round down": r"F(?:ADD|FMA)2\.RM",
    "ffma2": r"FFMA2?\b",
    "fadd2": r"FADD2\b(?!\.RM)",
    "max": r"FMNMX3?\b",
    "cvt": r"F2FP",
    "select": r"FSEL|R2P",
    "mma": r"UTC\w*MMA|HGMMA",
    "tmem": r"LDTM|STTM",
    "tma": r"UTMALDG",
    "sync": r"SYNCS|BAR\b|WARPSYNC",
    "local": r"LDL|STL",
}


def tool(name: str) -> str | None:
    """Path of a tool of the CUDA toolkit; None where it is not installed."""
    if (found := shutil.which(name)) is not None:
        return found
    spec = importlib.util.find_spec("nvidia")
    folders = list(spec.submodule_search_locations or []) if spec else []
    candidates = (path for folder in folders for path in Path(folder).glob(f"*/bin/{name}"))
    return next((str(path) for path in candidates), None)


@dataclass(frozen=True)
class Instruction:
    """One line of machine code."""

    text: str
    target: str | None  # label that it branches to

    def is_a(self, pattern: str) -> bool:
        """Whether its opcode is of a class."""
        return re.search(rf"(?:^|\s)(?:{pattern})", self.text) is not None


@dataclass(frozen=True)
class Loop:
    """A loop's body."""

    body: tuple[Instruction, ...]

    @functools.cached_property
    def counts(self) -> Counter[str]:
        """Instructions of each class."""
        classes = CLASSES.items()
        return Counter(name for one in self.body for name, pattern in classes if one.is_a(pattern))

    @property
    def is_softmax(self) -> bool:
        """Whether it computes a tile's exponentials, and no products."""
        return self.counts["ex2"] > 16 and not self.counts["mma"]

    @property
    def role(self) -> str | None:
        """What the loop does, by what it holds; None where it is of no interest."""
        counts = self.counts
        if counts["mma"]:
            return "attend" if counts["ex2"] else "mma"
        if self.is_softmax:
            return "softmax, masked" if counts["select"] > 16 else "softmax"
        if counts["tmem"]:
            return "correction"
        return "load" if counts["tma"] else None


def parse(listing: str) -> list[Loop]:
    """The innermost loops of a function: from a label to a branch back to it.

    A softmax loop counts whole where it holds one that computes no exponentials (over a masked row's fragments).
    """
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if (label := re.match(r"\s*\.(L_x_\d+):", line)) is not None:
            labels[label[1]] = len(instructions)
        elif (code := re.match(r"\s*/\*[0-9a-f]+\*/\s+(.*?);", line)) is not None:
            text = re.sub(r"/\*.*?\*/", "", code[1]).strip()
            # A loop ends in a branch on a condition; other branches back return from what lies out of line.
            branch = re.search(r"(?:^@\S+\s+BRA\b|^BRA\.U).*`\(\.(L_x_\d+)\)", text)
            instructions.append(Instruction(text, branch[1] if branch else None))
    spans = [(labels[one.target], place) for place, one in enumerate(instructions) if one.target in labels]
    # A branch back over a few instructions is a wait.
    spans = [(begin, end) for begin, end in spans if 16 < end - begin < 2000]
    loops = {(begin, end): Loop(tuple(instructions[begin : end + 1])) for begin, end in spans}
    softmax = {span for span, loop in loops.items() if loop.is_softmax}
    softmax = {one for one in softmax if not any(_is_inside(other, one) for other in softmax)}
    inner = {one for one in spans if not any(_is_inside(other, one) for other in spans)}
    found = softmax | {one for one in inner if not any(_is_inside(one, other) for other in softmax)}
    return [loops[one] for one in sorted(found)]


def _is_inside(inner: tuple[int, int], outer: tuple[int, int]) -> bool:
    return inner != outer and outer[0] <= inner[0] and inner[1] <= outer[1]


@dataclass(frozen=True)
class Kernel:
    """What is known of one binary: bytes of stack, registers of the launch, its loops by role."""

    plan: KernelPlan
    stack: int
    registers: int
    loops: dict[str, Loop]

    def rows(self) -> Iterator[tuple[str, ...]]:
        """Rows of the table: kernel, stack, registers, role, instructions of the loop, counts by class."""
        for role, loop in sorted(self.loops.items()):
            counts = (str(loop.counts[name]) for name in CLASSES)
            name = BACKWARD_ROLES.get(role, role) if self.plan.kernel == "backward" else role
            yield (self.plan.key, str(self.stack), str(self.registers), name, str(len(loop.body)), *counts)


def read(plan: KernelPlan, cubin: bytes) -> Kernel:
    """Disassemble a binary."""
    disassembler, dumper = tool("nvdisasm"), tool("cuobjdump")
    if disassembler is None or dumper is None:
        sys.exit("nvdisasm or cuobjdump is not there; pip install nvidia-cuda-nvdisasm nvidia-cuda-cuobjdump.")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        run = functools.partial(subprocess.run, capture_output=True, text=True, check=True)
        listing, usage = run([disassembler, "-c", str(path)]).stdout, run([dumper, "-res-usage", str(path)]).stdout
    stack, registers = (re.search(rf"{name}:(\d+)", usage) for name in ("STACK", "REG"))
    assert stack is not None
    assert registers is not None
    loops: dict[str, Loop] = {}
    for loop in parse(listing):
        role = loop.role
        # Of several loops of one role the longest counts: it is the main one.
        if role is not None and (role not in loops or len(loop.body) > len(loops[role].body)):
            loops[role] = loop
    return Kernel(plan, int(stack[1]), int(registers[1]), loops)


def kernels(masks: Sequence[str] = ("causal", "window", "intervals", "ids", "band")) -> Iterator[Kernel]:
    """Bundled kernels in bfloat16 for these masks; those in float16 differ in the type of two instructions."""
    for plan in bundled_plans():
        is_shown = plan.kernel == "forward" or (plan.kernel == "backward" and plan.architecture == "sm_100f")
        if is_shown and plan.option("dtype") == "bfloat16" and plan.option("mask") in masks:
            stored = bundle.stored(plan)
            if stored is None:
                sys.exit(f"{plan.key} is not in the bundle, or out of date; run python -m jax_fa4.kernels.build.")
            yield read(plan, stored.cubin)


HEAD = """# Machine code of the kernels

Written by `python docs/build_sass.py` from the binaries in the wheel, without the Hopper backward; a test fails when a
kernel gets worse. One row for each loop: its instructions, counted once each, and how many of them are of which class.
`round down` counts pairs of exponentials by the polynomial, `ex2` those of the special-function unit (in the forward
one of them is the factor of the row), for a row of 128 keys on Blackwell, for two quarters of rows on Hopper, and for
half a row of 128 queries in the backward. `registers` are those of the launch, which roles then trade. Blackwell's
kernels are emulated and compiled; not yet run on silicon. For compute capability 10.3 the forward's masked loop holds a
loop over the four fragments of a row (52 instructions), which does little for those that a warp sees whole; its
instructions, too, are counted once.
"""


def render(found: Sequence[Kernel]) -> str:
    """The page."""
    columns = ("kernel", "stack", "registers", "loop", "instructions", *CLASSES)
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(row) + " |" for kernel in found for row in kernel.rows()]
    return HEAD + "\n" + "\n".join(lines) + "\n"


COMPARED = ("stack", "registers", "instructions", "ex2", "sync", "local")


def stated(page: str) -> dict[tuple[str, str], dict[str, int]]:
    """(kernel, loop) -> the figures of `COMPARED`, as the page says."""
    table = [line for line in page.splitlines() if line[:1] == "|"]
    names, _, *rows = [[cell.strip() for cell in line.strip("|\n ").split("|")] for line in table]
    found: dict[tuple[str, str], dict[str, int]] = {}
    for row in rows:
        cells = dict(zip(names, row, strict=True))
        found[cells["kernel"], cells["loop"]] = {name: int(cells[name]) for name in COMPARED}
    return found


def worse(found: Sequence[Kernel], page: str) -> list[str]:
    """What is worse than the page says, or missing in it, in sentences."""
    known, now = stated(page), stated(render(found))
    complaints = [f"{key}, {loop}: not in docs/sass.md" for key, loop in sorted(now.keys() - known.keys())]
    for place in sorted(now.keys() & known.keys()):
        for name, after in now[place].items():
            if after > (before := known[place][name]):
                complaints.append(f"{', '.join(place)}: {name} {after}, docs/sass.md says {before}")
    return complaints


def main() -> None:
    """The command of this module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the page instead of writing it")
    options = parser.parse_args()
    found = list(kernels())
    if not options.check:
        PAGE.write_text(render(found))
    elif complaints := worse(found, PAGE.read_text()):
        sys.exit("\n".join(complaints))


if __name__ == "__main__":
    main()
