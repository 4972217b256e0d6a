"""Calls of compiled kernels inside `jax.jit`: one custom-call target for all of them.

A call names its kernel by content hash and its driver by name, and carries the integers and floats from which the
runtime fills the kernel's parameters; the recipe of how to do that is registered in this process when the call is
traced. What XLA compiles is therefore the same in every process, so the persistent compilation cache serves it.
"""

from __future__ import annotations

import functools
import importlib
import re
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from jax_fa4 import emulator
from jax_fa4.kernels import bundle
from jax_fa4.kernels.build import KernelBinary
from jax_fa4.kernels.plan import ARCHITECTURES, Architecture, KernelPlan, architecture_for

TARGET = "jax_fa4_launch"
CUDA_DRIVER = "cuda"
_CUDA_LIBRARY = "libcuda.so.1"
_GRID_LIMITS = (2**31 - 1, 65535, 65535)


class LaunchError(ValueError):
    """A call that a kernel cannot take."""


@functools.cache
def native() -> types.ModuleType:
    """The compiled part of the package, with its XLA targets registered. Raises ImportError with the remedy."""
    try:
        module = importlib.import_module("jax_fa4._native")
    except ImportError as error:
        raise ImportError(
            f"jax_fa4's compiled part cannot be imported ({error}). Install the package with `pip install .`, or "
            "build it in place as the head of CMakeLists.txt says."
        ) from error
    try:
        module.set_binary_finder(register_stored)
        built_for = module.ffi_api_version
    except AttributeError as error:
        raise ImportError(
            f"jax_fa4's compiled part is older than its Python part ({error}). Build it again: `pip install .`, or "
            "`make ext` in a clone."
        ) from error
    offered = _offered_api_version()
    if offered is not None and (built_for[0] != offered[0] or built_for > offered):
        raise ImportError(
            f"jax_fa4's compiled part was built for XLA's FFI {built_for[0]}.{built_for[1]}, and the installed jaxlib "
            f"offers {offered[0]}.{offered[1]}. Install a newer jaxlib, or build jax_fa4 against this one: "
            "`pip install --no-build-isolation .`."
        )
    module.declare_driver(CUDA_DRIVER, _CUDA_LIBRARY, False)
    cuda = {"initialize": module.handler("initialize"), "execute": module.handler("launch_on_cuda")}
    jax.ffi.register_ffi_target(TARGET, cuda, platform="CUDA", api_version=1)
    jax.ffi.register_ffi_target(TARGET, module.handler("launch_on_host"), platform="cpu", api_version=1)
    return module


def _offered_api_version() -> tuple[int, int] | None:
    """The version of XLA's FFI in the installed jaxlib, as its headers say; None where they do not.

    Asked before registering anything: XLA refuses newer handlers only when a backend starts, and then JAX has none.
    """
    try:
        text = (Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h").read_text()
    except OSError:
        return None
    found = [re.search(rf"#define XLA_FFI_API_{part} (\d+)", text) for part in ("MAJOR", "MINOR")]
    return None if None in found else (int(found[0][1]), int(found[1][1]))  # type: ignore[index]


def declare_driver(name: str, path: str, *, takes_ptx: bool, capability: tuple[int, int] = (0, 0)) -> None:
    """Lets calls name another driver library than CUDA's, for JAX's CPU platform: its path, whether it loads PTX (else
    cubins), and for the emulator's the compute capability of its device; (0, 0): what its options say. It is opened at
    its first use. Raises RuntimeError where the name is in use for another path."""
    native().declare_driver(name, path, takes_ptx, *capability)


@functools.cache
def emulated_driver(capability: tuple[int, int]) -> str:
    """The name of the driver that emulates a GPU of that compute capability, declared. Raises FileNotFoundError where
    the emulator was not built."""
    name = "emulator_sm_{}{}".format(*capability)
    declare_driver(name, str(emulator.library_path()), takes_ptx=True, capability=capability)
    return name


def device_architecture(device: jax.Device | None = None) -> Architecture | None:
    """The architecture of a JAX device (default: the first of the default backend); None where it is no GPU that a
    kernel's architecture covers."""
    device = jax.devices()[0] if device is None else device
    capability = getattr(device, "compute_capability", None)
    if device.platform != "gpu" or not isinstance(capability, str):
        return None
    major, _, minor = capability.partition(".")
    return architecture_for((int(major), int(minor or 0)))


def native_recipe(plan: KernelPlan, layout: Sequence[tuple[int, int]]) -> Any:
    """The plan's launch recipe as the runtime takes it, with every name replaced by a position; `layout` is (offset,
    bytes) of each parameter. The grid's three extents follow the plan's integers."""
    module = native()
    recipe = module.LaunchRecipe()
    positions = {
        "operand": {name: index for index, name in enumerate(plan.operands)},
        "result": {name: index for index, name in enumerate(plan.results)},
        "float32": {name: index for index, name in enumerate(plan.floats)},
        "tensor_map": {one.name: index for index, one in enumerate(plan.tensor_maps)},
    }
    integers = {name: index for index, name in enumerate(plan.integers)}
    positions |= dict.fromkeys(("int32", "int64", "divisor"), integers)
    for parameter, (offset, size) in zip(plan.parameters, layout, strict=True):
        kind = getattr(module.ParameterKind, parameter.kind.upper())
        recipe.add_parameter(kind, positions[parameter.kind][parameter.name], offset, size)
    for one in plan.tensor_maps:
        is_result = one.buffer in plan.results
        recipe.add_tensor_map(
            module.TensorMapRecipe(
                is_result=is_result,
                buffer=positions["result" if is_result else "operand"][one.buffer],
                element=getattr(module.ElementType, one.element.upper()),
                extents=[integers[name] for name in one.extents],
                strides=[integers[name] for name in one.strides_bytes],
                box=list(one.box),
                swizzle=(0, 32, 64, 128).index(one.swizzle_bytes),
                l2=(0, 64, 128, 256).index(one.l2_promotion_bytes),
            )
        )
    recipe.operand_count, recipe.result_count = len(plan.operands), len(plan.results)
    recipe.integer_count, recipe.float_count = len(plan.integers) + 3, len(plan.floats)
    recipe.grid = [len(plan.integers) + axis for axis in range(3)]
    recipe.block, recipe.cluster = [plan.threads, 1, 1], list(plan.cluster)
    recipe.dynamic_shared_bytes = plan.dynamic_shared_bytes
    recipe.programmatic_launch = plan.programmatic_launch
    return recipe


def register(binary: KernelBinary) -> str:
    """Makes a binary known to the runtime of this process; returns its content hash. A second time costs a look-up."""
    module = native()
    if not module.is_registered(binary.content_hash):
        plan = binary.plan
        module.register_binary(
            hash=binary.content_hash,
            name=plan.key,
            entry=binary.entry,
            cubin=binary.cubin,
            ptx=binary.ptx.encode(),
            architecture=plan.architecture,
            major=plan.target.capability[0],
            minor=plan.target.capability[1],
            family=plan.target.family,
            alternatives=", ".join(ARCHITECTURES),
            recipe=native_recipe(plan, binary.layout),
        )
    return binary.content_hash


def register_stored(content_hash: str) -> bool:
    """Makes the wheel's binary with this hash known to the runtime of this process, for a program that was traced in
    another; whether there is one."""
    binary = bundle.find_by_hash(content_hash)
    if binary is not None:
        register(binary)
    return binary is not None


def call_integers(plan: KernelPlan, integers: Mapping[str, int]) -> np.ndarray:
    """The integers of a call in the plan's order, then the grid's extents, int64. Raises LaunchError on a grid that
    no device takes."""
    grid = [extent.evaluate(integers) for extent in plan.grid]
    for axis, (extent, limit) in enumerate(zip(grid, _GRID_LIMITS, strict=True)):
        if extent > limit:
            raise LaunchError(
                f"{plan.kernel}: grid extent {'xyz'[axis]} = {plan.grid[axis]} is {extent} for this problem; a GPU "
                f"takes at most {limit}. Split the problem, or choose implementation='blockwise'."
            )
        if extent % plan.cluster[axis]:
            raise LaunchError(
                f"{plan.kernel}: grid extent {extent} is no multiple of the cluster's {plan.cluster[axis]}."
            )
    return np.array([*(integers[name] for name in plan.integers), *grid], np.int64)


def even_section(heads: int, most: int) -> int:
    """Heads of a section of a grid whose z counts sections: a divisor of all heads, so that no block is without work.

    The largest up to `most`; all heads where there is none, or where there would be more sections than a grid takes.
    """
    section = max((one for one in range(1, min(most, heads) + 1) if heads % one == 0), default=heads)
    return section if heads // max(section, 1) <= _GRID_LIMITS[2] else heads


def _varying_as(
    operands: Sequence[jax.Array], results: Sequence[jax.ShapeDtypeStruct]
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The results' types; inside `jax.shard_map` they differ from shard to shard over the axes that an operand does.

    Without it the results would count as replicated, and the gradients of what follows as sums over all shards. JAX has
    changed how a type says this, so the types are those of a sum that is never computed.
    """
    if AxisType.Manual not in jax.sharding.get_abstract_mesh().axis_types:
        return tuple(results)

    def depending_on_all(*operands: jax.Array) -> tuple[jax.Array, ...]:
        everything = sum((jnp.sum(operand).astype(jnp.float32) for operand in operands), jnp.float32(0))
        return tuple(jnp.zeros(one.shape, one.dtype) + everything.astype(one.dtype) for one in results)

    return jax.eval_shape(depending_on_all, *operands)


def _operand(array: jax.Array | np.ndarray) -> jax.Array:
    """An operand as the program holds it: a NumPy array is a constant.

    XLA makes a constant of one number alone anew in each call, by a kernel. With another number behind it, which nobody
    reads, it lies in memory.
    """
    if isinstance(array, np.ndarray) and array.size and (array == array.flat[0]).all():
        array = np.append(array, array.dtype.type(not array.flat[0]))
    return jnp.asarray(array)


def launch(
    plan: KernelPlan,
    operands: Mapping[str, jax.Array | np.ndarray],
    results: Mapping[str, jax.ShapeDtypeStruct],
    integers: Mapping[str, int],
    floats: Mapping[str, float] | None = None,
    *,
    aliases: Mapping[str, str] | None = None,
    driver: str = CUDA_DRIVER,
) -> dict[str, jax.Array]:
    """Adds one kernel call to the traced program: operands and results by the plan's names, results' shapes and dtypes
    given. An operand that is a NumPy array is a constant of the program; a traced scalar is an operand too: the kernel
    reads it through its address. `aliases` names operands whose content is in the named results' buffers when the
    kernel starts, for one that adds to what is there. Raises KernelUnavailableError, LaunchError."""
    content_hash = register(bundle.find(plan))
    floats = floats or {}
    shared = {plan.operands.index(one): plan.results.index(other) for one, other in (aliases or {}).items()}
    inputs = [_operand(operands[name]) for name in plan.operands]
    types = _varying_as(inputs, [results[name] for name in plan.results])
    call = jax.ffi.ffi_call(TARGET, types, input_output_aliases=shared)
    outputs = call(
        *inputs,
        driver=driver,
        kernel=content_hash,
        integers=call_integers(plan, integers),
        floats=np.array([floats[name] for name in plan.floats], np.float32),
    )
    return dict(zip(plan.results, outputs, strict=True))
