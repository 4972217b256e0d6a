"""Kernel plans: everything about a kernel that is decided before it is compiled, as data that can be checked and
printed.

A `KernelPlan` names a kernel's operands and the order of its parameters, its grid, its warps by role, its maps of
shared memory and of tensor memory, and its events (one barrier per event, named by what has happened). Its
constructor refuses what no device could run or what would hang: too many columns, bytes or registers, buffers that
overlap undeclared, and arrival counts that do not add up. Nothing here needs a GPU or a compiler.

This module also holds the one table of what is supported (`ARCHITECTURES`, `DTYPES`, `HEAD_DIMS`), which feeds
validation, the bundle, messages and tests.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

OLD_NUMBER_OF_11_0 = (10, 1)


class PlanError(ValueError):
    """A plan that no device could run, or that contradicts itself."""


@dataclass(frozen=True)
class Architecture:
    """A compilation target and the limits of the devices it runs on.

    `capability` is the compute capability that it asks for; with `family`, later minor versions of it run the same code
    (PTX ISA, architecture families), all but 10.1, the older number of 11.0, whose family is another.
    """

    name: str
    capability: tuple[int, int]
    family: bool
    shared_bytes_per_block: int
    tensor_memory_columns: int
    registers_per_block: int = 65536

    def accepts(self, capability: tuple[int, int]) -> bool:
        """Whether code of this architecture runs on a device of that compute capability."""
        if capability[0] != self.capability[0] or capability == OLD_NUMBER_OF_11_0:
            return False
        return capability[1] >= self.capability[1] if self.family else capability[1] == self.capability[1]


# 227 KiB of shared memory per block is the opt-in limit of both compute capabilities 9.0 and 10.x.
ARCHITECTURES: Mapping[str, Architecture] = {
    architecture.name: architecture
    for architecture in (
        Architecture("sm_90a", (9, 0), family=False, shared_bytes_per_block=232448, tensor_memory_columns=0),
        Architecture("sm_100f", (10, 0), family=True, shared_bytes_per_block=232448, tensor_memory_columns=512),
        Architecture("sm_103a", (10, 3), family=False, shared_bytes_per_block=232448, tensor_memory_columns=512),
    )
}
DTYPES: Mapping[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Element types that kernels take, and their bytes."""
HEAD_DIMS: tuple[int, ...] = (64, 96, 128, 192, 256)
"""Head dimensions for which the wheel carries kernels."""

WARP_THREADS = 32
TENSOR_MAP_BYTES = 128
BARRIER_BYTES = 8


def architectures_for(capability: tuple[int, int]) -> tuple[Architecture, ...]:
    """The architectures whose code runs on a device of that compute capability, the most general first."""
    return tuple(one for one in ARCHITECTURES.values() if one.accepts(capability))


def architecture_for(capability: tuple[int, int]) -> Architecture | None:
    """The most general architecture whose code runs on a device of that compute capability; None where there is none.
    The wheel has every kernel for it, and only some for others (see `architectures_for`)."""
    return next(iter(architectures_for(capability)), None)


def general_architectures() -> tuple[str, ...]:
    """The architectures that are the most general for some device."""
    return tuple(one.name for one in ARCHITECTURES.values() if architecture_for(one.capability) is one)


ParameterKind = Literal["operand", "result", "int32", "int64", "float32", "divisor", "tensor_map"]
PARAMETER_BYTES: Mapping[str, int] = {
    "operand": 8,
    "result": 8,
    "int32": 4,
    "int64": 8,
    "float32": 4,
    "divisor": 12,
    "tensor_map": TENSOR_MAP_BYTES,
}


@dataclass(frozen=True)
class Parameter:
    """One kernel parameter: the address of an operand or result, a scalar of the call, a divisor made of an integer
    of the call, or a tensor map; `name` says which."""

    kind: ParameterKind
    name: str


@dataclass(frozen=True)
class TensorMap:
    """How the TMA unit sees one operand or result. `extents` and `strides_bytes` name integers of the call, contiguous
    dimension first (it has no stride); `box` is in elements, `swizzle_bytes` one of 0, 32, 64, 128."""

    name: str
    buffer: str
    element: str
    extents: tuple[str, ...]
    strides_bytes: tuple[str, ...]
    box: tuple[int, ...]
    swizzle_bytes: int = 128
    l2_promotion_bytes: int = 128


@dataclass(frozen=True)
class Extent:
    """A grid extent: the product of ceil(integer / divisor) over `terms`; no terms: 1."""

    terms: tuple[tuple[str, int], ...] = ()

    def evaluate(self, integers: Mapping[str, int]) -> int:
        """The extent in one call."""
        return math.prod(-(-integers[name] // divisor) for name, divisor in self.terms)

    def __str__(self) -> str:
        texts = [name if divisor == 1 else f"ceil({name}/{divisor})" for name, divisor in self.terms]
        return " * ".join(texts) if texts else "1"


@dataclass(frozen=True)
class Role:
    """What some warps of a block do. `registers` per thread, set at start; None: as the compiler allots."""

    name: str
    warps: int
    registers: int | None = None


@dataclass(frozen=True)
class SharedBuffer:
    """A buffer of shared memory with `stages` copies; it lies over `over`, if given, whose readers must be done."""

    name: str
    bytes: int
    stages: int = 1
    alignment: int = 128
    over: str | None = None

    @property
    def total_bytes(self) -> int:
        """Bytes of all stages."""
        return self.bytes * self.stages


@dataclass(frozen=True)
class TensorBuffer:
    """Columns [begin, begin + columns) of tensor memory; `over` names the buffers it may share columns with."""

    name: str
    begin: int
    columns: int
    over: tuple[str, ...] = ()


@dataclass(frozen=True)
class Event:
    """One barrier per stage, named by what has happened. `arrivals` says how often each role arrives in one phase, and
    `count` is what the barrier is initialised with; `waiters` are the roles that wait. `bytes` arrive by TMA."""

    name: str
    arrivals: tuple[tuple[str, int], ...]
    waiters: tuple[str, ...]
    count: int
    stages: int = 1
    bytes: int = 0


@dataclass(frozen=True)
class KernelPlan:
    """One kernel for one architecture and one set of options; see the module's text.

    `operands`, `results`, `integers` and `floats` name the values that a call brings, in order; `parameters` is the
    order in which the kernel takes them. `source` is the module that holds the device code. Raises PlanError.
    """

    kernel: str
    architecture: str
    source: str
    options: tuple[tuple[str, str | int | bool], ...]
    operands: tuple[str, ...]
    results: tuple[str, ...]
    integers: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    grid: tuple[Extent, Extent, Extent]
    roles: tuple[Role, ...]
    floats: tuple[str, ...] = ()
    tensor_maps: tuple[TensorMap, ...] = ()
    cluster: tuple[int, int, int] = (1, 1, 1)
    shared: tuple[SharedBuffer, ...] = ()
    tensor_memory: tuple[TensorBuffer, ...] = ()
    events: tuple[Event, ...] = ()
    programmatic_launch: bool = False

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise PlanError(f"architecture is {self.architecture!r}; it takes one of {known}.")
        _check_names(self)
        _check_parameters(self)
        _check_roles(self)
        _check_shared(self)
        _check_tensor_memory(self)
        _check_events(self)

    @property
    def target(self) -> Architecture:
        """The architecture's row of the table."""
        return ARCHITECTURES[self.architecture]

    @property
    def key(self) -> str:
        """A short readable name, unique among plans of one version: file name and name in messages."""
        return "-".join([self.kernel, *(f"{name}_{value}" for name, value in self.options), self.architecture])

    @property
    def threads(self) -> int:
        """Threads per block."""
        return WARP_THREADS * sum(role.warps for role in self.roles)

    @property
    def shared_offsets(self) -> dict[str, int]:
        """Byte offset of each shared buffer, in order, aligned; the events' barriers follow the last buffer."""
        offsets: dict[str, int] = {}
        end = 0
        for buffer in self.shared:
            if buffer.over is None:
                offsets[buffer.name] = -(-end // buffer.alignment) * buffer.alignment
                end = offsets[buffer.name] + buffer.total_bytes
            else:
                offsets[buffer.name] = offsets[buffer.over]
        return offsets

    @property
    def dynamic_shared_bytes(self) -> int:
        """Bytes of dynamic shared memory: buffers, then 8 bytes for each stage of each event."""
        offsets = self.shared_offsets
        end = max((offsets[buffer.name] + buffer.total_bytes for buffer in self.shared), default=0)
        barriers = BARRIER_BYTES * sum(event.stages for event in self.events)
        return -(-end // BARRIER_BYTES) * BARRIER_BYTES + barriers if barriers else end

    @property
    def event_offsets(self) -> dict[str, int]:
        """Byte offset of each event's barriers in shared memory, in the events' order after the last buffer."""
        offsets: dict[str, int] = {}
        end = self.dynamic_shared_bytes - BARRIER_BYTES * sum(event.stages for event in self.events)
        for event in self.events:
            offsets[event.name] = end
            end += BARRIER_BYTES * event.stages
        return offsets

    def option(self, name: str) -> str | int | bool:
        """The value of one option; KeyError where the kernel has none of that name."""
        return dict(self.options)[name]

    def canonical(self) -> str:
        """The plan as JSON in one canonical form."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True, separators=(",", ":"))

    @property
    def digest(self) -> str:
        """Hash of everything in the plan."""
        return hashlib.sha256(self.canonical().encode()).hexdigest()[:32]

    def describe(self) -> str:
        """The plan as tables, for people."""
        lines = [
            f"{self.key}: {self.threads} threads, grid ({', '.join(map(str, self.grid))}), cluster {self.cluster}, "
            f"{self.dynamic_shared_bytes} bytes of shared memory",
            "  parameters  " + ", ".join(f"{one.name}:{one.kind}" for one in self.parameters),
        ]
        lines += [f"  role        {one.name:<20} {one.warps:>3} warps  registers {one.registers}" for one in self.roles]
        offsets = self.shared_offsets
        lines += [
            f"  shared      {one.name:<20} {one.stages} x {one.bytes} bytes at {offsets[one.name]}"
            + (f" over {one.over}" if one.over else "")
            for one in self.shared
        ]
        lines += [
            f"  columns     {one.name:<20} [{one.begin}, {one.begin + one.columns})"
            + (f" over {', '.join(one.over)}" if one.over else "")
            for one in self.tensor_memory
        ]
        for event in self.events:
            arrivals = " + ".join(f"{count} {role}" for role, count in event.arrivals)
            lines.append(f"  event       {event.name:<20} x{event.stages}: {arrivals} -> {', '.join(event.waiters)}")
        return "\n".join(lines)


def _refuse_repeats(plan: KernelPlan, what: str, names: list[str]) -> None:
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise PlanError(f"{plan.kernel}: {what} {', '.join(repeated)} named more than once.")


def _check_names(plan: KernelPlan) -> None:
    _refuse_repeats(plan, "buffer", [*plan.operands, *plan.results])
    _refuse_repeats(plan, "scalar", [*plan.integers, *plan.floats])
    _refuse_repeats(plan, "tensor map", [one.name for one in plan.tensor_maps])
    _refuse_repeats(plan, "role", [one.name for one in plan.roles])
    _refuse_repeats(plan, "shared buffer", [one.name for one in plan.shared])
    _refuse_repeats(plan, "tensor buffer", [one.name for one in plan.tensor_memory])
    _refuse_repeats(plan, "event", [one.name for one in plan.events])


def _check_parameters(plan: KernelPlan) -> None:
    known = {
        "operand": plan.operands,
        "result": plan.results,
        "int32": plan.integers,
        "int64": plan.integers,
        "divisor": plan.integers,
        "float32": plan.floats,
        "tensor_map": tuple(one.name for one in plan.tensor_maps),
    }
    for parameter in plan.parameters:
        if parameter.name not in known[parameter.kind]:
            raise PlanError(f"{plan.kernel}: parameter {parameter.name!r} is no {parameter.kind} of the call.")
    used = {name for extent in plan.grid for name, _ in extent.terms}
    for tensor_map in plan.tensor_maps:
        used |= {*tensor_map.extents, *tensor_map.strides_bytes}
        if tensor_map.buffer not in (*plan.operands, *plan.results):
            raise PlanError(f"{plan.kernel}: tensor map {tensor_map.name!r} is of {tensor_map.buffer!r}, no buffer.")
    if missing := sorted(used - set(plan.integers)):
        raise PlanError(f"{plan.kernel}: grid or tensor maps use {', '.join(missing)}, no integers of the call.")


def _check_roles(plan: KernelPlan) -> None:
    if not 1 <= plan.threads <= 1024:
        raise PlanError(f"{plan.kernel}: {plan.threads} threads per block; a block has 32 to 1024.")
    for role in plan.roles:
        if role.registers is not None and (role.registers % 8 or not 24 <= role.registers <= 256):
            raise PlanError(
                f"{plan.kernel}: role {role.name!r} has {role.registers} registers; multiples of 8, 24 to 256."
            )
    registers = sum(WARP_THREADS * role.warps * (role.registers or 0) for role in plan.roles)
    # Roles share what the launch allots, the same multiple of 8 to every thread; more hangs on an H200.
    allotted = plan.target.registers_per_block // plan.threads // 8 * 8 * plan.threads
    if registers > allotted:
        raise PlanError(f"{plan.kernel}: {registers} registers per block; a launch of its threads allots {allotted}.")


def _check_shared(plan: KernelPlan) -> None:
    buffers = {one.name: one for one in plan.shared}
    seen: set[str] = set()
    for buffer in plan.shared:
        if buffer.over is not None:
            if buffer.over not in seen:
                raise PlanError(
                    f"{plan.kernel}: {buffer.name!r} lies over {buffer.over!r}, which is not declared before it."
                )
            if buffer.total_bytes > buffers[buffer.over].total_bytes:
                raise PlanError(f"{plan.kernel}: {buffer.name!r} is larger than {buffer.over!r}, over which it lies.")
        seen.add(buffer.name)
    limit = plan.target.shared_bytes_per_block
    if plan.dynamic_shared_bytes > limit:
        raise PlanError(f"{plan.kernel}: {plan.dynamic_shared_bytes} bytes of shared memory; a block has {limit}.")


def _check_tensor_memory(plan: KernelPlan) -> None:
    columns = plan.target.tensor_memory_columns
    for index, buffer in enumerate(plan.tensor_memory):
        if buffer.begin < 0 or buffer.columns < 1 or buffer.begin + buffer.columns > columns:
            raise PlanError(
                f"{plan.kernel}: {buffer.name!r} takes columns [{buffer.begin}, {buffer.begin + buffer.columns}); "
                f"{plan.architecture} has {columns}."
            )
        for other in plan.tensor_memory[:index]:
            apart = buffer.begin >= other.begin + other.columns or other.begin >= buffer.begin + buffer.columns
            if not apart and other.name not in buffer.over and buffer.name not in other.over:
                raise PlanError(f"{plan.kernel}: {buffer.name!r} and {other.name!r} share columns, undeclared.")


def _check_events(plan: KernelPlan) -> None:
    roles = {role.name: role for role in plan.roles}
    for event in plan.events:
        unknown = [name for name in (*dict(event.arrivals), *event.waiters) if name not in roles]
        if unknown:
            raise PlanError(f"{plan.kernel}: event {event.name!r} names {', '.join(unknown)}, no roles of the plan.")
        if not event.waiters:
            raise PlanError(f"{plan.kernel}: nobody waits for event {event.name!r}.")
        arrivals = sum(count for _, count in event.arrivals)
        if arrivals != event.count or arrivals < 1:
            raise PlanError(
                f"{plan.kernel}: event {event.name!r} counts {event.count} arrivals and its roles make {arrivals}."
            )
        for name, count in event.arrivals:
            if count > WARP_THREADS * roles[name].warps:
                raise PlanError(
                    f"{plan.kernel}: role {name!r} has fewer threads than its {count} arrivals at {event.name!r}."
                )
