"""Mutants of the two small kernels: one wait, arrival, commit, fence, count, phase or descriptor field each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

from tests.emulator.mutation import blackwell, hopper
from tests.emulator.mutation.ptx_text import Line

Edit = Callable[[list[Line]], list[Line]]


@dataclass(frozen=True)
class Mutant:
    """`edit` makes it from the kernel's lines. `equivalent` says why it computes the same; empty: it must be caught."""

    kernel: ModuleType
    name: str
    edit: Edit
    equivalent: str = ""

    @property
    def text(self) -> str:
        """The PTX of the mutant."""
        original = self.kernel.lines()
        changed = self.edit(original)
        if changed == original:
            raise ValueError(f"mutant {self.name!r} changes nothing")
        return self.kernel.text(changed)


def remove(tag: str) -> Edit:
    """Deletes every line of the tag."""
    return lambda lines: [line for line in lines if line.tag != tag]


def replace(tag: str, old: str, new: str) -> Edit:
    """Changes the text of every line of the tag that has `old` in it."""
    return lambda lines: [Line(line.text.replace(old, new), tag) if line.tag == tag else line for line in lines]


def replace_nth(tag: str, index: int, old: str, new: str) -> Edit:
    """As `replace`, for the index-th line of the tag alone."""

    def edit(lines: list[Line]) -> list[Line]:
        at = [i for i, line in enumerate(lines) if line.tag == tag][index]
        return [*lines[:at], Line(lines[at].text.replace(old, new), tag), *lines[at + 1 :]]

    return edit


def move_after(tag: str, anchor: str) -> Edit:
    """Puts each line of the tag behind the next line of the anchor (both as often, in turn)."""

    def edit(lines: list[Line]) -> list[Line]:
        result: list[Line] = []
        held: list[Line] = []
        for line in lines:
            if line.tag == tag:
                held.append(line)
                continue
            result.append(line)
            if line.tag == anchor:
                result += held
                held = []
        return result + held

    return edit


def flip(tag: str) -> Edit:
    """Waits for the other phase."""

    def edit(lines: list[Line]) -> list[Line]:
        result: list[Line] = []
        for line in lines:
            if line.tag == tag and "try_wait" in line.text:
                head, parity = line.text.rstrip(";").rsplit(", ", 1)
                result += [Line(f"xor.b32 %flip, {parity}, 1;", tag), Line(f"{head}, %flip;", tag)]
            else:
                result.append(line)
        return result

    return edit


def tags(kernel: ModuleType, prefix: str) -> list[str]:
    """Tags of the kernel that begin with the prefix, each once, in order."""
    return list(dict.fromkeys(line.tag for line in kernel.lines() if line.tag.startswith(prefix)))


ALLOCATION = "the allocation that it stands beside touches no tensor memory"
ANOTHER_FENCE = "the fence behind the wait for probs, which follows, orders this too"
ONE_CTA = "a cluster of one CTA: the CTA barrier after it orders the initialisation"
INTERLOCKED = (
    "loaded registers are interlocked, and probs made of them are signalled before the columns are overwritten"
)

ON_THE_PATH = "a proxy fence anywhere between the write and the copy orders them; the copying thread still has one"

EQUIVALENT = {
    ("blackwell", "remove wait::ld scores"): INTERLOCKED,
    ("blackwell", "remove fence before setup"): ALLOCATION,
    ("blackwell", "remove fence after setup"): ALLOCATION,
    ("blackwell", "remove fence after out_empty"): ANOTHER_FENCE,
    ("blackwell", "remove fence init"): ONE_CTA,
    ("hopper", "remove fence init"): ONE_CTA,
    ("blackwell", "fence the staging after its barrier"): ON_THE_PATH,
    ("hopper", "fence the staging after its barrier"): ON_THE_PATH,
}


def common(kernel: ModuleType) -> dict[str, Edit]:
    """Mutants that both kernels have."""
    edits: dict[str, Edit] = {}
    for prefix in ("wait", "arrive", "commit", "fence", "barrier staging", "expect", "wgmma", "load"):
        edits |= {f"remove {tag}": remove(tag) for tag in tags(kernel, prefix)}
    edits |= {f"flip the phase of {tag}": flip(tag) for tag in tags(kernel, "wait ")}
    for name, (_, count) in kernel.BARRIER_TABLE.items():
        edits[f"init {name} with one arrival more"] = replace(f"init {name}", f"], {count};", f"], {count + 1};")
        if count > 1:
            edits[f"init {name} with one arrival less"] = replace(f"init {name}", f"], {count};", f"], {count - 1};")
    for name, size in (("query", kernel.TILE_BYTES), ("key", kernel.BLOCK_BYTES), ("value", kernel.BLOCK_BYTES)):
        for change in (16, -16):
            edits[f"expect {change:+d} bytes of {name}"] = replace(
                f"expect {name}_full", f"{size};", f"{size + change};"
            )
    edits["fence the staging after its barrier"] = move_after("fence proxy staging", "barrier staging full")
    edits["walk the scores' query in steps of 48 bytes"] = replace("descriptor descriptor_a", "%low", "%base")
    edits["swizzle the staging by four rows"] = replace(
        "staging swizzle", ", 7" if kernel is blackwell else ", 2", ", 3"
    )
    edits["always accumulate scores"] = replace("accumulate scores", "setp.ne", "setp.ge")
    edits["never accumulate scores"] = replace("accumulate scores", "setp.ne", "setp.lt")
    edits["accumulate over tiles"] = replace("accumulate out", "setp.ne", "setp.ge")
    edits["forget earlier blocks"] = replace("accumulate out", "setp.ne", "setp.lt")
    first_scores = 1 if kernel is blackwell else 2  # after one loading role, or two
    edits["load into the other stage"] = replace_nth("stage", 0, "%count, 1", "%empty_parity, 1")
    edits["read scores' keys from stage 0"] = replace_nth("stage", first_scores, ", 1", ", 0")
    return edits


def of_blackwell() -> dict[str, Edit]:
    """Mutants of tensor memory and of the tcgen05 descriptors."""
    high = str(blackwell.OPERAND_HIGH)

    def fields(stride: int, layout: int) -> str:
        return str(stride >> 4 | 1 << 14 | layout << 29)

    return {
        "halve the stride of the query's descriptor": replace("descriptor descriptor_a", high, fields(512, 2)),
        "halve the stride of the keys' and values' descriptors": replace(
            "descriptor descriptor_b", high, fields(512, 2)
        ),
        "read the query with the 64-byte swizzle": replace("descriptor descriptor_a", high, fields(1024, 4)),
        "read keys and values without swizzle": replace("descriptor descriptor_b", high, fields(1024, 0)),
        "drop the version of the query's descriptor": replace(
            "descriptor descriptor_a", high, str(1024 >> 4 | 2 << 29)
        ),
        "read values K-major": replace(
            "product out", str(blackwell.OUTPUT_DESCRIPTOR), str(blackwell.SCORES_DESCRIPTOR)
        ),
        "read keys MN-major": replace(
            "product scores", str(blackwell.SCORES_DESCRIPTOR), str(blackwell.OUTPUT_DESCRIPTOR)
        ),
        "take operands for f16": replace(
            "product scores", str(blackwell.SCORES_DESCRIPTOR), str(1 << 4 | 8 << 17 | 8 << 24)
        ),
        "negate the scores": replace(
            "product scores", str(blackwell.SCORES_DESCRIPTOR), str(blackwell.SCORES_DESCRIPTOR | 1 << 13)
        ),
        "multiply 48 keys": replace(
            "product scores", str(blackwell.SCORES_DESCRIPTOR), str(blackwell.SCORES_DESCRIPTOR - (2 << 17))
        ),
        "put probs over scores": replace("store probs", "%lane_address+64", "%lane_address+32"),
        "read probs one column off": replace_nth("probs column", 1, f"{blackwell.PROBS + 8}", f"{blackwell.PROBS + 7}"),
        "signal probs before they are stored": move_after("wait::st probs", "arrive probs_full"),
        "free the output before it is read": move_after("wait::ld out", "arrive out_empty"),
        "commit the keys to the wrong barrier": replace(
            "commit key_empty", "%at", "%base+" + str(blackwell.BARRIERS + 8)
        ),
    }


def of_hopper() -> dict[str, Edit]:
    """Mutants of wgmma and its descriptors."""
    high = str(hopper.OPERAND_HIGH)
    return {
        "halve the stride of the query's descriptor": replace("descriptor descriptor_a", high, str(512 >> 4 | 1 << 30)),
        "halve the stride of the keys' and values' descriptors": replace(
            "descriptor descriptor_b", high, str(512 >> 4 | 1 << 30)
        ),
        "read the query with the 64-byte swizzle": replace("descriptor descriptor_a", high, str(1024 >> 4 | 2 << 30)),
        "read keys and values without swizzle": replace("descriptor descriptor_b", high, str(1024 >> 4)),
        "read values K-major": replace("product out", "1, 1, 1;", "1, 1, 0;"),
        "read keys MN-major": replace("product scores", "1, 1, 0, 0;", "1, 1, 0, 1;"),
        "negate the scores": replace("product scores", "1, 1, 0, 0;", "-1, 1, 0, 0;"),
        "wait for all scores but one group": replace("wgmma wait scores", " 1;", " 2;"),
        "leave the output product in flight": replace("wgmma wait out", " 0;", " 1;"),
        "leave the first scores in flight": replace("wgmma wait first scores", " 0;", " 1;"),
    }


def mutants() -> list[Mutant]:
    """All of them, of both kernels."""
    result = []
    for name, kernel, own in (("blackwell", blackwell, of_blackwell()), ("hopper", hopper, of_hopper())):
        edits = common(kernel) | own
        result += [Mutant(kernel, edit, edits[edit], EQUIVALENT.get((name, edit), "")) for edit in edits]
    return result
