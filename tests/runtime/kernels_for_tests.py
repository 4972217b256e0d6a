"""Kernels that the stub driver knows, as plans and binaries."""

from __future__ import annotations

import itertools

from jax_fa4.kernels.build import KernelBinary
from jax_fa4.kernels.plan import PARAMETER_BYTES, Extent, KernelPlan, Parameter, Role

_numbers = itertools.count()


def fill_plan(architecture: str = "sm_90a", **changes: object) -> KernelPlan:
    """A kernel that fills its result with a float; every plan is another one."""
    fields: dict[str, object] = {
        "kernel": "fill",
        "architecture": architecture,
        "source": "none",
        "options": (("number", next(_numbers)),),
        "operands": (),
        "results": ("filled",),
        "integers": ("count",),
        "floats": ("value",),
        "parameters": (Parameter("result", "filled"), Parameter("int32", "count"), Parameter("float32", "value")),
        "grid": (Extent((("count", 128),)), Extent(), Extent()),
        "roles": (Role("all", 4),),
    }
    return KernelPlan(**{**fields, **changes})  # type: ignore[arg-type]


def stub_binary(plan: KernelPlan, image: bytes | None = None, entry: str | None = None) -> KernelBinary:
    """A binary whose image the stub can read; its kernel is called as the plan's."""
    sizes = [PARAMETER_BYTES[parameter.kind] for parameter in plan.parameters]
    layout, end = [], 0
    for size in sizes:
        alignment = 64 if size == 128 else 8 if size % 8 == 0 else 4
        offset = -(-end // alignment) * alignment
        layout.append((offset, size))
        end = offset + size
    entry = plan.kernel if entry is None else entry
    text = f"STUB entry={entry} params={','.join(map(str, sizes))}".encode() if image is None else image
    return KernelBinary(plan, entry, text + b"\0", "", tuple(layout), "", "none")
