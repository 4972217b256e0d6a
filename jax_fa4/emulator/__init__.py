"""The Python door to the emulated GPU.

The emulator is a shared library with the names of the CUDA driver API (`libjax_fa4_emulator.so`), found beside the
package. It runs PTX on the CPU: what our own kernels, or others', do on a Hopper or Blackwell GPU, with its checks.
Nothing is loaded before the first call. `docs/emulator.md` says what it models and what that was compared with.
"""

from __future__ import annotations

import ctypes
import functools
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple, TypedDict

__all__ = [
    "BytesMoved",
    "LaunchStatistics",
    "Region",
    "RoleCount",
    "add_memory",
    "architecture",
    "by_role",
    "driver",
    "last_report",
    "library_path",
    "register_ptx",
    "remove_memory",
    "set_options",
    "statistics",
]

_COMPLETIONS = ("random", "eager", "lazy")
_ARCHITECTURES = {"9.0": 90, "10.0": 100, "10.3": 103}


def library_path() -> Path:
    """Where the shared library lies: beside the package.

    Raises FileNotFoundError, with the remedy, if it was not built.
    """
    path = Path(__file__).resolve().parent.parent / "libjax_fa4_emulator.so"
    if not path.exists():
        raise FileNotFoundError(
            f"the emulator's library is not at {path}. Install the package, or build it in place with "
            "`cmake -S . -B build/dev -G Ninja && cmake --build build/dev`."
        )
    return path


@functools.cache
def driver() -> ctypes.CDLL:
    """The loaded library; its functions are those of the CUDA driver API and the emulator's own."""
    library = ctypes.CDLL(str(library_path()))
    library.jax_fa4_emulator_set_option.argtypes = [ctypes.c_char_p, ctypes.c_int64]
    library.jax_fa4_emulator_register_ptx.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_char_p]
    for name in ("last_error", "take_statistics"):
        function = getattr(library, f"jax_fa4_emulator_{name}")
        function.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
        function.restype = ctypes.c_size_t
    library.jax_fa4_emulator_add_memory.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.jax_fa4_emulator_add_memory.restype = None
    library.jax_fa4_emulator_remove_memory.argtypes = [ctypes.c_void_p]
    library.jax_fa4_emulator_remove_memory.restype = None
    return library


def _text(name: str) -> str:
    function = getattr(driver(), f"jax_fa4_emulator_{name}")
    size = function(None, 0) + 1
    buffer = ctypes.create_string_buffer(size)
    function(buffer, size)
    return buffer.value.decode(errors="replace")


def _set(name: str, value: int) -> None:
    if driver().jax_fa4_emulator_set_option(name.encode(), value) != 0:
        raise ValueError(last_report())


class Region(TypedDict):
    """What one warp index executed in one loop, or outside of loops, summed over the CTAs of a launch."""

    warp: int
    lines: list[int] | None
    """First and last PTX line of the innermost loop; None: outside of loops."""
    waits: int
    """How often lanes found that they had to wait: at barriers, mbarriers, groups, for other lanes."""
    instructions: dict[str, int]
    """Warp instructions by class: "arithmetic", "matrix", "load_shared", "mbarrier_wait" and so on."""


class BytesMoved(TypedDict):
    """Bytes that a launch moved, by path. Threads' own accesses are those of global and shared memory; a copy's bytes
    count as its own path, and on its global side as global ones too."""

    global_read: int
    global_written: int
    shared_read: int
    shared_written: int
    tensor_copy_in: int
    tensor_copy_out: int
    bulk_in: int
    bulk_out: int
    peer: int
    matrix_shared_read: int
    tensor_memory_read: int
    tensor_memory_written: int


class LaunchStatistics(TypedDict):
    """What was counted in one launch."""

    kernel: str
    grid: list[int]
    block: list[int]
    cluster: list[int]
    warp_instructions: int
    asynchronous_events: int
    seconds: float
    """Of the host."""
    cpu_seconds: float
    """Of its processors: the time that the threads which ran the launch were running."""
    multiply_adds: int
    """Of the tensor cores."""
    bank_conflicts: int
    """Cycles of shared memory beyond one for each 128 bytes."""
    bytes: BytesMoved
    regions: list[Region]


class RoleCount(NamedTuple):
    """What the warps of a role did in one loop, or outside of loops: instructions by class, and waits."""

    instructions: dict[str, int]
    waits: int


def set_options(
    *,
    seed: int | None = None,
    arch: str | None = None,
    sm_count: int | None = None,
    threads: int | None = None,
    completion: str | None = None,
    check_races: bool | None = None,
    check_uninitialized: bool | None = None,
    check_registers: bool | None = None,
    check_exit_reads: bool | None = None,
    check_tensor_fences: bool | None = None,
    stuck_after: int | None = None,
) -> None:
    """Sets what is given for the launches that follow, of the whole process.

    Args:
      seed: of every random choice: the order of warps and CTAs and the moments at which asynchronous work completes.
      arch: compute capability: "9.0", "10.0" or "10.3". Modules for another one are refused when they are loaded.
      sm_count: multiprocessors that the device claims, 1 to 1024.
      threads: host threads that run CTAs; 0 takes as many as the host has. With more than one, kernels whose CTAs add
        to the same place in floating point may give other last bits from run to run.
      completion: when asynchronous work completes: "random" (after a heavy-tailed delay), "eager" (at once) or "lazy"
        (only when no warp can run).
      check_races: report accesses of global, shared and tensor memory that nothing orders, mbarriers that are used
        before their initialisation is, and shared or tensor memory that is read before it is written.
      check_uninitialized: report reads of global memory that nobody wrote.
      check_registers: report registers that were never written where they decide something: addresses, stored values,
        guards, operands of asynchronous and matrix instructions.
      check_exit_reads: report CTAs that exit while a committed bulk copy may still read their shared memory. Nothing
        documents that the memory is kept for it; CUTLASS's attention for Hopper relies on it and is right on silicon.
      check_tensor_fences: report tcgen05 instructions that another thread's come before without the pair of
        tcgen05.fence that the PTX ISA asks for. Off unless told: kernels that are right on silicon leave them out.
      stuck_after: warp instructions without any change of memory or barriers after which a launch is given up, at
        least 1000.

    Raises:
      ValueError: a value is not accepted; the text names it.
    """
    if arch is not None and arch not in _ARCHITECTURES:
        raise ValueError(f"arch is {arch!r}; the emulator knows {', '.join(_ARCHITECTURES)}.")
    if completion is not None and completion not in _COMPLETIONS:
        raise ValueError(f"completion is {completion!r}; accepted are {', '.join(_COMPLETIONS)}.")
    given: dict[str, int | None] = {
        "seed": seed,
        "architecture": None if arch is None else _ARCHITECTURES[arch],
        "sm_count": sm_count,
        "threads": threads,
        "completion": None if completion is None else _COMPLETIONS.index(completion),
        "check_races": check_races,
        "check_uninitialized": check_uninitialized,
        "check_registers": check_registers,
        "check_exit_reads": check_exit_reads,
        "check_tensor_fences": check_tensor_fences,
        "stuck_after": stuck_after,
    }
    for name, value in given.items():
        if not isinstance(value, int | None):
            raise ValueError(f"{name} is {value!r}; a number or a bool is accepted.")
        if value is not None:
            _set(name, int(value))


def architecture() -> str:
    """The compute capability that the emulated device has now, as `set_options` takes it: "9.0", "10.0" or "10.3"."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    driver().cuDeviceComputeCapability(ctypes.byref(major), ctypes.byref(minor), 0)
    return f"{major.value}.{minor.value}"


def statistics() -> list[LaunchStatistics]:
    """What was counted in each launch since the last call, oldest first: the last 4096 launches."""
    loaded: list[LaunchStatistics] = json.loads(_text("take_statistics"))
    return loaded


def by_role(
    launch: LaunchStatistics, roles: Mapping[str, Iterable[int]]
) -> dict[str, dict[tuple[int, int] | None, RoleCount]]:
    """Sums a launch's regions over the warps of each role.

    Args:
      launch: one of `statistics()`.
      roles: the warp indices of each role, as a kernel's plan names them. Warps that no role names are left out.

    Returns:
      By role and loop (first and last PTX line; None: outside of loops), what its warps did there.
    """
    counted: dict[str, dict[tuple[int, int] | None, RoleCount]] = {}
    for role, warps in roles.items():
        wanted = frozenset(warps)
        loops: dict[tuple[int, int] | None, RoleCount] = {}
        for region in launch["regions"]:
            if region["warp"] not in wanted:
                continue
            loop = None if region["lines"] is None else (region["lines"][0], region["lines"][1])
            before = loops.get(loop, RoleCount({}, 0))
            instructions = dict(Counter(before.instructions) + Counter(region["instructions"]))
            loops[loop] = RoleCount(instructions, before.waits + region["waits"])
        counted[role] = loops
    return counted


def last_report(clear: bool = False) -> str:
    """The sentence of the last driver call that failed, with the PTX line, CTA and warp where there is one.

    Empty if none failed, or none since the last call with `clear`.
    """
    text = _text("last_error")
    if clear:
        driver().jax_fa4_emulator_clear_error()
    return text


def register_ptx(cubin: bytes, ptx: str) -> None:
    """Says which PTX text stands for a cubin: modules loaded from these bytes run that text."""
    if driver().jax_fa4_emulator_register_ptx(cubin, len(cubin), ptx.encode()) != 0:
        raise ValueError(last_report())


def add_memory(address: int, size: int) -> None:
    """Lets kernels touch `size` bytes of host memory at `address`, until `remove_memory(address)`."""
    driver().jax_fa4_emulator_add_memory(address, size)


def remove_memory(address: int) -> None:
    """Ends what `add_memory(address, ...)` allowed."""
    driver().jax_fa4_emulator_remove_memory(address)
