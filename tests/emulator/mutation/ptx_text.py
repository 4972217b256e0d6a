"""Writes PTX line by line; lines that synchronise carry a tag, by which a mutant finds them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """One line of PTX; `tag` names what it does, "" if nothing is to be mutated there."""

    text: str
    tag: str = ""


class Writer:
    """Collects lines. Registers are named by the caller; labels and predicates of waits are made unique here."""

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self._labels = 0

    def __call__(self, text: str, tag: str = "") -> None:
        """Adds an instruction (without its semicolon) or a label (with its colon)."""
        self.lines.append(Line(text if text.endswith(":") else text + ";", tag))

    def label(self) -> str:
        """A fresh label name."""
        self._labels += 1
        return f"L{self._labels}"

    def wait(self, barrier: str, parity: str, tag: str) -> None:
        """Spins until the phase of that parity has completed; the whole loop carries the tag."""
        again = self.label()
        self(f"{again}:", tag)
        self(f"mbarrier.try_wait.parity.shared::cta.b64 %waited, [{barrier}], {parity}", tag)
        self(f"@!%waited bra {again}", tag)

    @contextmanager
    def when(self, predicate: str) -> Iterator[None]:
        """The enclosed lines run only in threads where the predicate holds."""
        end = self.label()
        self(f"@!{predicate} bra {end}")
        yield
        self(f"{end}:")

    @contextmanager
    def loop(self, counter: str, limit: str) -> Iterator[None]:
        """Runs the enclosed lines for counter = 0 .. limit - 1 (at least once)."""
        top = self.label()
        self(f"mov.u32 {counter}, 0")
        self(f"{top}:")
        yield
        self(f"add.u32 {counter}, {counter}, 1")
        self(f"setp.lt.u32 %again, {counter}, {limit}")
        self(f"@%again bra {top}")


def registers(prefix: str, count: int) -> str:
    """A vector operand: {%prefix0, %prefix1, ...}."""
    return "{" + ", ".join(f"%{prefix}{i}" for i in range(count)) + "}"


def module(
    target: str, entry: str, parameters: list[str], declarations: list[str], lines: list[Line], threads: int
) -> str:
    """The text of a PTX module with one kernel."""
    head = [
        ".version 8.8",
        f".target {target}",
        ".address_size 64",
        "",
        ".extern .shared .align 1024 .b8 storage[];",
        "",
    ]
    head += [
        f".visible .entry {entry}(",
        ",\n".join(f"  .param {p}" for p in parameters),
        ")",
        f".reqntid {threads}, 1, 1",
        "{",
    ]
    body = [f"  .reg {d};" for d in declarations] + [
        line.text if line.text.endswith(":") else f"  {line.text}" for line in lines
    ]
    return "\n".join([*head, *body, "}", ""])
