"""Single numbers in memory, by pointer and place."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute


def read(pointer: cute.Pointer, place: Any) -> Any:
    """The number at a place."""
    return cute.make_tensor(pointer + place, cute.make_layout(1))[0]


def write(pointer: cute.Pointer, place: Any, value: Any) -> None:
    """Stores a number at a place."""
    cute.make_tensor(pointer + place, cute.make_layout(1))[0] = value
