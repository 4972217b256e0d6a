"""Writes docs/reference.md, the API reference, from the package's own signatures and docstrings.

`make docs` runs it; with --check it changes nothing and fails if the page is out of date.
"""

import argparse
import enum
import importlib
import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("reference.md")

CALL_NAMES = ("attention", "plan_segments", "SegmentPlan", "explain", "Explanation", "target", "Target")
MASK_NAMES = (
    *("MaskRule", "MaskOperands", "Intervals", "query_intervals", "key_intervals"),
    *("TileClass", "classify", "TileBounds", "tile_bounds"),
)
FLAX_NAMES = ("attention_fn", "segment_ids", "SegmentMask", "swap_nnx_attention", "swapped_linen_attention")
# Chapter title, module, names in reading order. A name that does not exist is an error here and in the tests.
CHAPTERS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("The call", "jax_fa4", CALL_NAMES),
    ("Long sequences", "jax_fa4", ("ring_attention", "zigzag_order")),
    ("Export", "jax_fa4", ("export_disabled_checks",)),
    ("Flax", "jax_fa4.flax", FLAX_NAMES),
    ("Masks", "jax_fa4.schedule.tiles", MASK_NAMES),
    ("Schedules", "jax_fa4.schedule.order", ("forward_table", "backward_table", "WorkTable", "Column", "Policy")),
    ("Simulation", "jax_fa4.schedule.simulate", ("simulate", "Simulation")),
    ("Pictures", "jax_fa4.schedule.plot", ("schedule_figure", "orders_figure", "draw_tile_map", "draw_gantt")),
    ("Feeds and speeds", "jax_fa4.cost", ("Architecture", "forward_tile", "backward_tile", "TileCost")),
)

INTRODUCTION = """\
# API reference

Written from the docstrings by `make docs`; edit those, not this page. [api.md](api.md) says what each option means
where libraries differ.
"""

LISTS = ("Args", "Attributes", "Raises")  # sections of `name: meaning`
SECTIONS = (*LISTS, "Returns", "Yields", "Source")


def entries(lines: list[str]) -> Iterator[str]:
    """Bullets of a section: `name: meaning` at the section's own indent opens one, other lines go on with it."""
    text = inspect.cleandoc("\n".join(lines))
    for entry in re.split(r"\n(?=\**[\w.]+: )", text):
        name, _, meaning = " ".join(line.strip() for line in entry.splitlines()).partition(": ")
        yield f"- `{name}`: {meaning}"


def to_markdown(docstring: str) -> str:
    """A Google-style docstring as Markdown: section headings in bold, their entries as bullets, mathematics in $$."""
    written: list[str] = []
    lines = docstring.splitlines()
    index = 0
    while index < len(lines):
        line = lines[index]
        index += 1
        heading = re.fullmatch(rf"({'|'.join(SECTIONS)}):(.*)", line)
        formula = re.fullmatch(r"\.\. math:: (.*)", line)
        if formula:
            written.append(f"$${formula[1]}$$")
        elif heading and heading[2]:
            written.append(f"**{heading[1]}:**{heading[2]}")
        elif heading:
            stop = next((i for i in range(index, len(lines)) if lines[i] and not lines[i].startswith(" ")), len(lines))
            body = lines[index:stop]
            text = entries(body) if heading[1] in LISTS else [inspect.cleandoc("\n".join(body)).strip()]
            written += [f"**{heading[1]}**", "", *text, ""]
            index = stop
        else:
            written.append(line)
    return "\n".join(written).strip()


def signature(name: str, value: Any) -> str:
    """The call as one would type it, without annotations that say only Any, one argument a line when it is long."""
    if isinstance(value, enum.EnumMeta):
        return "\n".join(f"{name}.{member.name} = {json.dumps(member.value)}" for member in value)
    parts: list[str] = []
    for parameter in inspect.signature(value).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        bare = parameter.replace(annotation=parameter.empty) if parameter.annotation is Any else parameter
        text = re.sub(r"\b(\w+\.)+(?=[A-Za-z])", "", str(bare))  # types by their own names
        parts.append(re.sub(r"<(\w+): .*>", rf"{bare.annotation.__name__}.\1", text) if "<" in text else text)
    line = f"{name}({', '.join(parts)})"
    return line if len(line) <= 100 else f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + ")"


def describe(module: str, name: str) -> str:
    """The section of one function or class, its public methods included."""
    value = getattr(importlib.import_module(module), name)
    parts = [f"### {module}.{name}", f"```python\n{signature(name, value)}\n```"]
    parts.append(to_markdown(inspect.getdoc(value) or ""))
    if inspect.isclass(value):
        for method, function in vars(value).items():
            if inspect.isfunction(function) and not method.startswith("_") and function.__doc__:
                parts += [f"#### {name}.{method}", to_markdown(inspect.getdoc(function) or "")]
    return "\n\n".join(parts)


def render() -> str:
    """The whole page."""
    parts = [INTRODUCTION.strip()]
    for title, module, names in CHAPTERS:
        parts += [f"## {title}", *(describe(module, name) for name in names)]
    return "\n\n".join(parts) + "\n"


def main() -> int:
    """Write or check the page; the exit status is 1 where a check fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if the page is out of date")
    arguments = parser.parse_args()
    page = render()
    if arguments.check:
        if PAGE.read_text() != page:
            print(f"{PAGE.name} is out of date; `make docs` writes it", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
