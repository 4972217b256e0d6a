"""Plans of the Blackwell forward: which sizes it takes, and why those."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from jax_fa4.kernels.blackwell.geometry import (
    ANSWERS,
    KEY_TILE,
    STAGES,
    TILE_ROWS,
    WARPS_PER_GROUP,
    emulated_pairs,
)
from jax_fa4.kernels.plan import (
    DTYPES,
    Event,
    Extent,
    KernelPlan,
    Parameter,
    PlanError,
    Role,
    SharedBuffer,
    TensorBuffer,
    TensorMap,
)

ARCHITECTURE_NAMES = ("sm_100f", "sm_103a")
FORWARD_DTYPES = ("bfloat16", "float16")
Mask = Literal["causal", "window", "intervals", "ids"]
MASKS: tuple[Mask, ...] = ("causal", "window", "intervals", "ids")
# How a CTA, or a pair, comes by its items: each has one; each has every so-many-th, with as many as run at a time; or
# there is one for each, and one that is done takes over the item of one that has not started (cluster launch control).
Scheduling = Literal["grid", "persistent", "cluster"]
# Integers of a call that the kernel takes, in order, and those that only its tensor maps and grid need.
SCALARS = (
    *("query_length", "key_length", "heads", "kv_heads", "offset", "left", "right", "section_heads"),
    "interval_stride",
)
SIZES = (
    *("batch", "sections", "items", "workers", "ctas", "head_dim", "value_dim", "head_bytes", "value_head_bytes"),
    *("query_row_bytes", "key_row_bytes", "value_row_bytes", "out_row_bytes"),
    *("query_batch_bytes", "key_batch_bytes", "value_batch_bytes", "out_batch_bytes"),
)
FLOATS = ("scale_log2", "slack", "cap_log2")


@dataclass(frozen=True)
class Tiles:
    """Sizes of a forward kernel.

    Attributes:
        key_stages: stages of the ring of keys, 128 to a stage (64 in each CTA of a pair).
        value_stages: of the ring of values.
        emulated: exponentials of a row of 128 that are computed by the polynomial; even.
        registers: of a thread of the softmax, of the correction and of the other warps: 512 for each column of one
            thread per warpgroup, softmax twice.
        has_own_probs: probs have columns of their own, so that the next scores are computed while the softmax runs;
            else they overwrite half of their scores.
        ctas: CTAs that share an item: 1, or 2 that each hold half of the keys' rows and of the values' columns.
        scheduling: how a CTA comes by its items.
    """

    key_stages: int
    value_stages: int
    emulated: int
    registers: tuple[int, int, int]
    has_own_probs: bool = False
    ctas: int = 1
    scheduling: Scheduling = "grid"

    @property
    def rows(self) -> int:
        """Query rows of a work item."""
        return STAGES * TILE_ROWS * self.ctas


# (head_dim, value_dim), padded. Shares of emulated exponentials: see docs/sass.md.
FORWARD_TILES: dict[tuple[int, int], Tiles] = {
    (64, 64): Tiles(5, 5, 44, (192, 80, 48), has_own_probs=True),
    (96, 96): Tiles(4, 3, 16, (192, 80, 48)),
    (128, 128): Tiles(3, 2, 16, (192, 80, 48)),
    (192, 128): Tiles(2, 1, 16, (192, 80, 48)),
}


# Where nothing but the end of the keys is masked, a pair of CTAs shares keys and values: each reads and holds half.
PAIR_TILES: dict[tuple[int, int], Tiles] = {
    (128, 128): Tiles(5, 5, 24, (192, 80, 48), ctas=2),
}


def tiles_for(architecture: str, tiles: Tiles) -> Tiles:
    """The sizes on an architecture: compute capability 10.3 has twice the special-function units, so that no
    exponential is worth emulating there."""
    return dataclasses.replace(tiles, emulated=0) if architecture == "sm_103a" else tiles


def padded_head_dims(head_dim: int, value_dim: int) -> tuple[int, int]:
    """The head dimensions a kernel computes with. Raises PlanError where there are none."""
    are_whole = all(dim > 0 and dim % 8 == 0 for dim in (head_dim, value_dim))
    for padded in FORWARD_TILES:
        if are_whole and head_dim <= padded[0] and value_dim <= padded[1]:
            return padded
    known = ", ".join(str(one) for one in FORWARD_TILES)
    raise PlanError(
        f"forward: head_dim and value_dim are {head_dim} and {value_dim}; the Blackwell kernel takes multiples of 8 up "
        f"to one of {known}."
    )


def box_columns(dim: int) -> int:
    """Columns of a box: as wide as the widest swizzle that divides the dimension."""
    return 64 if dim % 64 == 0 else 32


def _tensor_maps(dtype: str, head_dim: int, value_dim: int, tiles: Tiles) -> tuple[TensorMap, ...]:
    """(head_dim, row, head, batch) of each tensor, in boxes of a swizzled piece of a row by the rows of a tile."""
    value_columns = value_dim // tiles.ctas
    return tuple(
        TensorMap(
            name=name,
            buffer=name,
            element=dtype,
            extents=(dim_name, f"{side}_length", heads, "batch"),
            strides_bytes=(f"{name}_row_bytes", head_bytes, f"{name}_batch_bytes"),
            box=(box_columns(dim), rows, 1, 1),
            swizzle_bytes=box_columns(dim) * DTYPES[dtype],
        )
        for name, side, heads, rows, dim, dim_name, head_bytes in (
            ("query", "query", "heads", TILE_ROWS, head_dim, "head_dim", "head_bytes"),
            ("key", "key", "kv_heads", KEY_TILE // tiles.ctas, head_dim, "head_dim", "head_bytes"),
            ("value", "key", "kv_heads", KEY_TILE, value_columns, "value_dim", "value_head_bytes"),
            ("out", "query", "heads", TILE_ROWS, value_dim, "value_dim", "value_head_bytes"),
        )
    )


def _tensor_memory(value_dim: int, tiles: Tiles) -> tuple[TensorBuffer, ...]:
    """Scores of both stages, then outputs; probs over the upper half of their scores, or after the outputs."""
    buffers = [TensorBuffer(f"scores_{stage}", stage * KEY_TILE, KEY_TILE) for stage in range(STAGES)]
    outs = STAGES * KEY_TILE
    buffers += [TensorBuffer(f"out_{stage}", outs + stage * value_dim, value_dim) for stage in range(STAGES)]
    for stage in range(STAGES):
        if tiles.has_own_probs:
            begin = outs + STAGES * value_dim + stage * KEY_TILE // 2
            buffers.append(TensorBuffer(f"probs_{stage}", begin, KEY_TILE // 2))
        else:
            begin = stage * KEY_TILE + KEY_TILE // 2
            buffers.append(TensorBuffer(f"probs_{stage}", begin, KEY_TILE // 2, over=(f"scores_{stage}",)))
    return tuple(buffers)


def _events(tiles: Tiles, query_bytes: int, key_bytes: int, value_bytes: int) -> tuple[Event, ...]:
    """Copies and products arrive once; of the others one lane of each warp does."""
    warps = WARPS_PER_GROUP * tiles.ctas  # the tensor core waits for those of both CTAs of a pair
    softmax, correction = ("softmax", warps), ("correction", warps)
    own_probs = (
        Event("scores_read", (softmax,), ("mma",), warps, STAGES),
        Event("out_updated", (("mma", 1),), ("softmax",), 1, STAGES),
    )
    return (
        Event("query_landed", (("load", 1),), ("mma",), 1, STAGES, query_bytes),
        Event("keys_landed", (("load", 1),), ("mma",), 1, tiles.key_stages, key_bytes),
        Event("keys_free", (("mma", 1),), ("load",), 1, tiles.key_stages),
        Event("values_landed", (("load", 1),), ("mma",), 1, tiles.value_stages, value_bytes),
        Event("values_free", (("mma", 1),), ("load",), 1, tiles.value_stages),
        Event("scores_ready", (("mma", 1),), ("softmax",), 1, STAGES),
        Event("output_ready", (softmax, correction), ("mma",), 2 * warps, STAGES),
        Event("probs_ready", (softmax,), ("mma",), warps, STAGES),
        Event("out_done", (("mma", 1),), ("softmax", "correction"), 1, STAGES),
        Event("out_staged", (("correction", WARPS_PER_GROUP),), ("epilogue",), WARPS_PER_GROUP, STAGES),
        *(own_probs if tiles.has_own_probs else ()),
        *_item_events(tiles),
    )


def _item_events(tiles: Tiles) -> tuple[Event, ...]:
    """Where a CTA does several items: queries lie under the staged outputs of the item before; answers of the hardware
    are read by every warp that walks from item to item.

    The load arrives at `query_free` when it has seen the one of the item before, since it tells phases apart by parity:
    items that see no keys need no load, and would be over without it.
    """
    if tiles.scheduling == "grid":
        return ()
    free = Event("query_free", (("epilogue", 1), ("load", 1)), ("load", "correction"), 2, STAGES)
    if tiles.scheduling == "persistent":
        return (free,)
    groups = {"softmax": STAGES * WARPS_PER_GROUP, "correction": WARPS_PER_GROUP, "epilogue": 1, "load": 1}
    # Of a pair, only the first CTA has products, and only the second CTA's scheduling warp does not ask itself.
    readers = {name: warps * tiles.ctas for name, warps in groups.items()} | {"mma": 1}
    if tiles.ctas == 2:
        readers["schedule"] = 1
    walkers = ("softmax", "correction", "mma", "epilogue", "load", "schedule")
    return (
        free,
        Event("item_known", (("schedule", 1),), walkers, 1, ANSWERS, 16),
        Event("item_taken", tuple(readers.items()), ("schedule",), sum(readers.values()), ANSWERS),
    )


def _roles(tiles: Tiles) -> tuple[Role, ...]:
    softmax, correction, other = tiles.registers
    return (
        Role("softmax", STAGES * WARPS_PER_GROUP, softmax),
        Role("correction", WARPS_PER_GROUP, correction),
        Role("mma", 1, other),
        Role("epilogue", 1, other),
        Role("load", 1, other),
        Role("schedule" if tiles.scheduling == "cluster" else "idle", 1, other),
    )


def _shared(tiles: Tiles, query_bytes: int, key_bytes: int, value_bytes: int) -> tuple[SharedBuffer, ...]:
    """Buffers; each stage of the outputs, which are no wider than the queries, lies over its own queries."""
    statistic = TILE_ROWS * DTYPES["float32"]
    return (
        SharedBuffer("query", query_bytes, STAGES, alignment=1024),
        SharedBuffer("staged_out", query_bytes, STAGES, alignment=1024, over="query"),
        SharedBuffer("keys", key_bytes, tiles.key_stages, alignment=1024),
        SharedBuffer("values", value_bytes, tiles.value_stages, alignment=1024),
        SharedBuffer("factors", statistic, STAGES),
        SharedBuffer("sums", statistic, STAGES, over="factors"),
        SharedBuffer("maxima", statistic, STAGES),
        SharedBuffer("tensor_memory_base", 16),
        *((SharedBuffer("answers", 16, ANSWERS),) if tiles.scheduling == "cluster" else ()),
    )


def forward_plan(
    dtype: str,
    head_dims: tuple[int, int],
    mask: Mask,
    *,
    tiles: Tiles | None = None,
    soft_cap: bool = False,
    sinks: bool = False,
    architecture: str = "sm_100f",
) -> KernelPlan:
    """The forward for one pair of padded head dimensions.

    Args:
        dtype: one of `FORWARD_DTYPES`, of queries, keys, values and outputs.
        head_dims: of queries and keys, and of values; a key of `FORWARD_TILES`. Smaller ones are filled with zeros by
            the tensor maps.
        mask: "causal" (or none: a right edge by arithmetic), "window" (both edges by arithmetic), "intervals" (both
            from memory, and a table of work items), or "ids" (intervals, and ids that masked tiles compare where the
            table says so).
        tiles: the sizes; None: those of `FORWARD_TILES`.
        soft_cap: scores are capped.
        sinks: one logit per head joins the softmax.
        architecture: one of `ARCHITECTURE_NAMES`.

    Raises PlanError on what no device could run.
    """
    if dtype not in FORWARD_DTYPES or head_dims not in FORWARD_TILES:
        raise PlanError(
            f"forward: dtype {dtype!r} with head dimensions {head_dims}; the Blackwell kernel takes "
            f"{', '.join(FORWARD_DTYPES)} with {', '.join(map(str, FORWARD_TILES))}."
        )
    tiles = tiles or tiles_for(architecture, FORWARD_TILES[head_dims])
    try:
        emulated_pairs(tiles.emulated)
    except ValueError as error:
        raise PlanError(f"forward: {error}") from error
    operands = ["query", "key", "value"]
    if sinks:
        operands.append("sinks")
    if mask != "causal" and tiles.ctas == 2:
        raise PlanError(f"forward: mask {mask!r} with ctas 2; pairs of CTAs take 'causal'.")
    if mask in ("intervals", "ids"):
        operands += ["item_table", "lo", "hi"]
    if mask == "ids":
        operands += ["query_ids", "key_ids"]
    query_tiles = Extent((("query_length", tiles.rows), ("ctas", 1)))
    grid = (Extent((("section_heads", 1),)), query_tiles, Extent((("sections", 1),)))
    if mask in ("intervals", "ids"):
        grid = (Extent((("items", 1),)), Extent(), Extent())
    if tiles.scheduling == "persistent":
        grid = (Extent((("workers", 1),)), Extent((("ctas", 1),)), Extent())
    head_dim, value_dim = head_dims
    query_bytes = TILE_ROWS * head_dim * DTYPES[dtype]
    key_bytes, value_bytes = (KEY_TILE // tiles.ctas * dim * DTYPES[dtype] for dim in head_dims)
    return KernelPlan(
        kernel="forward",
        architecture=architecture,
        source="jax_fa4.kernels.blackwell.forward",
        options=(
            ("dtype", dtype),
            ("head_dim", head_dim),
            ("value_dim", value_dim),
            ("mask", mask),
            ("soft_cap", soft_cap),
            ("sinks", sinks),
            ("key_stages", tiles.key_stages),
            ("value_stages", tiles.value_stages),
            ("emulated", tiles.emulated),
            ("own_probs", tiles.has_own_probs),
            ("ctas", tiles.ctas),
            ("scheduling", tiles.scheduling),
        ),
        operands=tuple(operands),
        results=("out", "lse"),
        integers=(*SCALARS, *SIZES),
        floats=FLOATS,
        parameters=(
            *(Parameter("tensor_map", name) for name in ("query", "key", "value", "out")),
            Parameter("result", "lse"),
            *(Parameter("operand", name) for name in operands[3:]),
            *(Parameter("int32", name) for name in SCALARS),
            *((Parameter("int32", "items"),) if tiles.scheduling == "persistent" else ()),
            *(Parameter("float32", name) for name in FLOATS),
        ),
        grid=grid,
        roles=_roles(tiles),
        tensor_maps=_tensor_maps(dtype, head_dim, value_dim, tiles),
        cluster=(1, tiles.ctas, 1),
        shared=_shared(tiles, query_bytes, key_bytes, value_bytes),
        tensor_memory=_tensor_memory(value_dim, tiles),
        events=_events(tiles, query_bytes * tiles.ctas, key_bytes * tiles.ctas, value_bytes * tiles.ctas),
    )


def bundled_plans() -> Iterator[KernelPlan]:
    """Plans whose binaries the wheel carries: every mask, without a cap and sinks; and the persistent form of those
    that dense masks take."""
    for architecture, dtype in itertools.product(ARCHITECTURE_NAMES, FORWARD_DTYPES):
        for dims, mask in itertools.product(FORWARD_TILES, MASKS):
            yield forward_plan(dtype, dims, mask, architecture=architecture)
        for dims, tiles in PAIR_TILES.items():
            yield forward_plan(dtype, dims, "causal", tiles=tiles_for(architecture, tiles), architecture=architecture)
        for dims, tiles in (*FORWARD_TILES.items(), *PAIR_TILES.items()):
            chosen = dataclasses.replace(tiles_for(architecture, tiles), scheduling="persistent")
            yield forward_plan(dtype, dims, "causal", tiles=chosen, architecture=architecture)
