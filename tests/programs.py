"""What a compiled program moves between devices."""

import re
from typing import NamedTuple

BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "f64": 8}
KINDS = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter", "collective-broadcast")


class Transfer(NamedTuple):
    """One collective operation: the dtypes of its results and their bytes on one device."""

    dtypes: tuple[str, ...]
    bytes: int


def collectives(program_text):
    """The collective operations of a compiled program, by kind."""
    found = {}
    for line in program_text.splitlines():
        match = re.search(rf" = (.*?) ({'|'.join(KINDS)})(-start)?\(", line)
        if not match:
            continue
        shapes = re.findall(r"(\w+)\[([\d,]*)\]", match[1])
        size = 0
        for dtype, dimensions in shapes:
            elements = 1
            for one in filter(None, dimensions.split(",")):
                elements *= int(one)
            size += elements * BYTES[dtype]
        dtypes = tuple(dict.fromkeys(dtype for dtype, _ in shapes))
        found.setdefault(match[2], []).append(Transfer(dtypes, size))
    return found
