"""Plans of the Hopper kernels: which sizes they take, and why those."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from jax_fa4.kernels.plan import (
    DTYPES,
    Event,
    Extent,
    KernelPlan,
    Parameter,
    PlanError,
    Role,
    SharedBuffer,
    TensorMap,
)

ARCHITECTURE = "sm_90a"
FORWARD_DTYPES = ("bfloat16", "float16")
GROUP_ROWS = 64
WARPS_PER_GROUP = 4
PLACES, ITEM_BYTES = 2, 32  # of items in shared memory, of persistent blocks
Mask = Literal["causal", "window", "intervals", "ids"]
# Integers of a call that the kernel takes, in order, and those that only its tensor maps and grid need.
SCALARS = (
    *("query_length", "key_length", "heads", "offset", "left", "right", "section_heads"),
    *("interval_stride", "lse_batch_stride", "lse_row_stride", "lse_head_stride", "items"),
)
DIVISORS = ("group_size", "query_copies")
SIZES = (
    *(*DIVISORS, "kv_heads", "batch", "query_batch", "sections", "workers", "head_dim", "value_dim"),
    *(f"{name}_{what}_bytes" for name in ("query", "key", "value", "out") for what in ("row", "head", "batch")),
)
FLOATS = ("scale_log2", "slack", "cap_log2")
MASKS: tuple[Mask, ...] = ("causal", "window", "intervals", "ids")


@dataclass(frozen=True)
class Tiles:
    """Sizes of a forward kernel: warpgroups of 64 query rows, keys per step, stages of each ring; and whether there are
    as many blocks as multiprocessors, each doing one item after the other."""

    groups: int
    key_tile: int
    stages: int
    persistent: bool = False

    @property
    def rows(self) -> int:
        """Query rows of a work item."""
        return self.groups * GROUP_ROWS

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a loading and of an attending thread: 512 for each column of one thread per warpgroup."""
        return (24, 240) if self.groups == 2 else (32, 160)


# Measured on one H200, 16k tokens, hidden size 2048, bfloat16 (docs/performance.md): three groups keep the tensor core
# busy while others are in their softmax, and read keys and values from the L2 cache once for 192 rows. With 160
# registers a thread, 80 keys are what fits beside an output of 128 columns without spilling, and 96 beside one of 96.
# Persistent blocks gain 2 to 12% (docs/performance.md, from item to item); where every block has one item, nothing.
FORWARD_TILES = {
    64: Tiles(3, 128, 2, persistent=True),
    96: Tiles(3, 96, 3, persistent=True),
    128: Tiles(3, 80, 3, persistent=True),
}
SINGLE_TILES = {head_dim: replace(tiles, persistent=False) for head_dim, tiles in FORWARD_TILES.items()}
# For short sequences and few queries: two groups, which leave fewer rows empty, and whose 240 registers hold 128 keys.
SHORT_TILES = {64: Tiles(2, 128, 3), 96: Tiles(2, 128, 2), 128: Tiles(2, 128, 2)}


def padded_head_dim(head_dim: int, name: str = "head_dim") -> int:
    """The head dimension a kernel computes with. Raises PlanError, which calls the dimension `name`, where there is
    none."""
    for padded in FORWARD_TILES:
        if head_dim <= padded and head_dim % 8 == 0 and head_dim > 0:
            return padded
    raise PlanError(f"{name} is {head_dim}; the Hopper kernel takes multiples of 8 up to {max(FORWARD_TILES)}.")


def _tensor_maps(dtype: str, head_dim: int, tiles: Tiles, is_table: bool) -> tuple[TensorMap, ...]:
    """(head or value dim, row, head, batch) of each tensor, in boxes of a swizzled piece of a row by a copy's rows.

    What a box has beyond the tensor is filled with zeros, or not written: so dims below the kernel's are padded.
    """
    box_columns = 64 if head_dim % 64 == 0 else 32
    of_values = ("value", "value_dim", "key_length", "kv_heads", "batch", tiles.key_tile)
    return tuple(
        TensorMap(
            name=name,
            buffer=name,
            element=dtype,
            extents=(dim, length, heads, batch),
            strides_bytes=(f"{like}_row_bytes", f"{like}_head_bytes", f"{like}_batch_bytes"),
            box=(box_columns, rows, 1, 1),
            swizzle_bytes=box_columns * DTYPES[dtype],
        )
        for name, like, dim, length, heads, batch, rows in (
            ("query", "query", "head_dim", "query_length", "heads", "query_batch", GROUP_ROWS),
            ("key", "key", "head_dim", "key_length", "kv_heads", "batch", tiles.key_tile),
            ("value", *of_values),
            ("out", "out", "value_dim", "query_length", "heads", "batch", GROUP_ROWS),
            *([("hidden_value", *of_values)] if is_table else []),
        )
    )


def _events(tiles: Tiles, row_bytes: int) -> tuple[Event, ...]:
    """One copy fills a stage; one lane of each attending warp frees it."""
    readers, step_bytes = tiles.groups * WARPS_PER_GROUP, tiles.key_tile * row_bytes
    uses = [("query", WARPS_PER_GROUP, tiles.groups, GROUP_ROWS * row_bytes)]
    uses += [(ring, readers, tiles.stages, step_bytes) for ring in ("keys", "values")]
    rings = [
        event
        for name, of_stage, stages, size in uses
        for event in (
            Event(f"{name}_landed", (("load", 1),), ("attend",), 1, stages, size),
            Event(f"{name}_free", (("attend", of_stage),), ("load",), of_stage, stages),
        )
    ]
    items = (
        Event("item_known", (("load", 1),), ("attend",), 1, PLACES),
        Event("item_taken", (("attend", readers),), ("load",), readers, PLACES),
    )
    return (*rings, *(items if tiles.persistent else ()))


def forward_plan(
    dtype: str, head_dim: int, mask: Mask, *, tiles: Tiles, soft_cap: bool = False, sinks: bool = False
) -> KernelPlan:
    """The forward for one padded head dimension.

    Args:
        dtype: one of `FORWARD_DTYPES`, of queries, keys, values and outputs.
        head_dim: padded, a key of `FORWARD_TILES`; smaller ones are filled with zeros by the tensor maps.
        mask: "causal" (or none: a right edge by arithmetic), "window" (both edges by arithmetic), "intervals" (both
            from memory, and a table of work items), or "ids" (intervals, and ids that masked tiles compare where the
            table says so).
        tiles: the sizes.
        soft_cap: scores are capped.
        sinks: one logit per head joins the softmax.

    Raises PlanError on what no device could run.
    """
    if dtype not in FORWARD_DTYPES or head_dim not in FORWARD_TILES:
        raise PlanError(
            f"forward: dtype {dtype!r} with head_dim {head_dim}; the Hopper kernel takes {', '.join(FORWARD_DTYPES)} "
            f"with {', '.join(map(str, FORWARD_TILES))}."
        )
    if tiles.groups not in (2, 3):
        raise PlanError(f"forward: groups is {tiles.groups}; it takes 2 or 3.")
    load_registers, attend_registers = tiles.registers
    row_bytes = head_dim * DTYPES[dtype]
    operands = ["query", "key", "value"]
    if sinks:
        operands.append("sinks")
    pointers = operands[3:]
    is_table = mask in ("intervals", "ids")
    if is_table:
        pointers += ["item_table", "lo", "hi", "hidden_tiles"]
        operands += [*pointers[-4:], "hidden_value"]
    if mask == "ids":
        pointers += ["query_ids", "key_ids"]
        operands += pointers[-2:]
    grid = (Extent((("section_heads", 1),)), Extent((("query_length", tiles.rows),)), Extent((("sections", 1),)))
    if is_table:
        grid = (Extent((("items", 1),)), Extent(), Extent())
    results = ["out", "lse"]
    if tiles.persistent:
        grid = (Extent((("workers", 1),)), Extent(), Extent())
        operands.append("zero_counter")
        results.append("counter")
    return KernelPlan(
        kernel="forward",
        architecture=ARCHITECTURE,
        source="jax_fa4.kernels.hopper.forward",
        options=(
            ("dtype", dtype),
            ("head_dim", head_dim),
            ("mask", mask),
            ("soft_cap", soft_cap),
            ("sinks", sinks),
            ("groups", tiles.groups),
            ("key_tile", tiles.key_tile),
            ("stages", tiles.stages),
            ("persistent", tiles.persistent),
        ),
        operands=tuple(operands),
        results=tuple(results),
        integers=(*SCALARS, *SIZES),
        floats=FLOATS,
        parameters=(
            *(Parameter("tensor_map", name) for name in ("query", "key", "value", "out")),
            *([Parameter("tensor_map", "hidden_value")] if is_table else []),
            *(Parameter("result", name) for name in results[1:]),
            *(Parameter("operand", name) for name in pointers),
            *(Parameter("int32", name) for name in SCALARS),
            *(Parameter("divisor", name) for name in DIVISORS),
            *(Parameter("float32", name) for name in FLOATS),
        ),
        grid=grid,
        roles=(
            Role("load", WARPS_PER_GROUP, load_registers),
            Role("attend", tiles.groups * WARPS_PER_GROUP, attend_registers),
        ),
        tensor_maps=_tensor_maps(dtype, head_dim, tiles, is_table),
        shared=(
            SharedBuffer("query", GROUP_ROWS * row_bytes, tiles.groups, alignment=1024),
            SharedBuffer("keys", tiles.key_tile * row_bytes, tiles.stages, alignment=1024),
            SharedBuffer("values", tiles.key_tile * row_bytes, tiles.stages, alignment=1024),
            SharedBuffer(
                "staged_out",
                GROUP_ROWS * row_bytes,
                tiles.groups,
                alignment=1024,
                over=None if tiles.persistent else "query",
            ),
            *([SharedBuffer("entries", ITEM_BYTES, PLACES)] if tiles.persistent else []),
        ),
        events=_events(tiles, row_bytes),
    )
