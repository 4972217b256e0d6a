"""Plans of the Blackwell backward: which sizes it takes, and why those."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
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
    TensorBuffer,
    TensorMap,
)

ARCHITECTURE = "sm_100f"
BACKWARD_DTYPES = ("bfloat16", "float16")
TILE = 128  # keys of an item and queries of a tile: lanes of tensor memory
WARPS_PER_GROUP = 4
COMPUTE_GROUPS = 2  # each has one half of a tile's queries
STATISTICS_STAGES = 2
STAGED_COLUMNS = 32  # float32 of a row of 128 bytes, in which query gradients are added to global memory
WARP_ROWS = 32
Mask = Literal["band", "intervals", "ids"]
MASKS: tuple[Mask, ...] = ("band", "intervals", "ids")
# Integers of a call that the kernel takes, in order, and those that only its tensor maps and grid need. Offset, left
# and right are those of the transposed mask: which queries a key is seen by.
SCALARS = (
    *("query_length", "key_length", "padded_length", "heads", "kv_heads", "offset", "left", "right"),
    *("section_heads", "interval_stride", "rank_stride"),
)
SIZES = (
    *("batch", "sections", "items", "ctas", "head_dim", "value_dim", "head_bytes", "value_head_bytes"),
    *("query_row_bytes", "key_row_bytes", "value_row_bytes", "grad_out_row_bytes"),
    *("query_batch_bytes", "key_batch_bytes", "value_batch_bytes", "grad_out_batch_bytes"),
    *("sum_columns", "sum_row_bytes", "sum_head_bytes", "sum_batch_bytes"),
)
FLOATS = ("scale", "scale_log2", "cap_log2")


@dataclass(frozen=True)
class Tiles:
    """Sizes of a backward kernel.

    Attributes:
        order: a key of `product_order.ORDERS`.
        query_stages: stages of the ring of queries; a power of two.
        grad_out_stages: of the ring of output gradients; a power of two.
        columns: first column of tensor memory of each product, and of the probs.
        ctas: that share an item: 2 for a pair, each with 128 of its keys.
        staged_slots: boxes of query gradients that a reducing warp has on their way.
        registers: of a thread of the reduction, of the computation and of the other warps: 512 for each column of one
            thread per warpgroup, computation twice.
    """

    order: str
    query_stages: int
    grad_out_stages: int
    columns: tuple[tuple[str, int], ...]
    registers: tuple[int, int, int]
    ctas: int = 1
    staged_slots: int = 2

    @property
    def rows(self) -> int:
        """Keys of an item."""
        return self.ctas * TILE


def _columns(scores: int, probs: int, grad_probs: int, value: int, key: int, query: int) -> tuple[tuple[str, int], ...]:
    names = ("scores", "probs", "grad_probs", "grad_value", "grad_key", "grad_query")
    return tuple(zip(names, (scores, probs, grad_probs, value, key, query), strict=True))


# A reducing thread holds up to 96 sums, a computing one 64 probs and 32 or 64 scores. Of the splits of 512 that were
# compiled, (112, 152, 96) and (96, 160, 96) among them, this one spills least: nothing without caps and ids.
REGISTERS = (120, 152, 88)
# (head_dim, value_dim), padded. At 64 query gradients have columns of their own; at 96 they lie over the gradients of
# the probs, and at 192 those share the columns of the scores too. At 128 all 512 columns are used; a pair computes
# 64 rows of query gradients each, 64 columns, which fit between the probs of the two warpgroups, and reads half of B
# and adds half of the sums: 2560 clocks of shared memory per tile in place of 3328 (product_order.py).
BACKWARD_TILES: dict[tuple[int, int], Tiles] = {
    (64, 64): Tiles("apart", 2, 2, _columns(0, 0, 128, 256, 320, 384), REGISTERS),
    (96, 96): Tiles("over_grad_probs", 2, 1, _columns(0, 0, 128, 256, 352, 128), REGISTERS),
    (128, 128): Tiles("pair", 1, 1, _columns(0, 0, 128, 256, 384, 32), REGISTERS, ctas=2, staged_slots=1),
    (192, 128): Tiles("serial", 1, 1, _columns(320, 448, 320, 0, 128, 320), REGISTERS),
}


# head_dim 128 with one CTA to an item, with which the pair is compared.
SINGLE_128 = Tiles("over_grad_probs", 2, 1, _columns(0, 0, 128, 256, 384, 128), REGISTERS)


def padded_head_dims(head_dim: int, value_dim: int) -> tuple[int, int]:
    """The head dimensions a kernel computes with. Raises PlanError where there are none."""
    are_whole = all(dim > 0 and dim % 8 == 0 for dim in (head_dim, value_dim))
    for padded in BACKWARD_TILES:
        if are_whole and head_dim <= padded[0] and value_dim <= padded[1]:
            return padded
    known = ", ".join(str(one) for one in BACKWARD_TILES)
    raise PlanError(
        f"backward: head_dim and value_dim are {head_dim} and {value_dim}; the Blackwell kernel takes multiples of 8 "
        f"up to one of {known}."
    )


def box_columns(dim: int) -> int:
    """Columns of a box: as wide as the widest swizzle that divides the dimension."""
    return 64 if dim % 64 == 0 else 32


def bundled_plans() -> Iterator[KernelPlan]:
    """Plans whose binaries the wheel carries: without caps and fixed orders, of the usual dimensions."""
    for dtype in BACKWARD_DTYPES:
        for dims in ((64, 64), (128, 128)):
            for mask in MASKS:
                yield backward_plan(dtype, dims, mask)


def _tensor_maps(dtype: str, head_dim: int, value_dim: int, ctas: int) -> tuple[TensorMap, ...]:
    """(column, row, head, batch) of each tensor, in boxes of a swizzled piece of a row by the rows of one copy."""
    of_query = ("query", "query", "heads", head_dim, "head_dim", "head_bytes")
    of_key = ("key", "key", "kv_heads", head_dim, "head_dim", "head_bytes")
    of_value = ("value", "key", "kv_heads", value_dim, "value_dim", "value_head_bytes")
    of_grad_out = ("grad_out", "query", "heads", value_dim, "value_dim", "value_head_bytes")
    maps = tuple(
        TensorMap(
            name=name,
            buffer=name,
            element=dtype,
            extents=(dim_name, f"{side}_length", heads, "batch"),
            strides_bytes=(f"{layout}_row_bytes", head_bytes, f"{layout}_batch_bytes"),
            box=(box_columns(dim), rows, 1, 1),
            swizzle_bytes=box_columns(dim) * DTYPES[dtype],
        )
        for name, rows, (layout, side, heads, dim, dim_name, head_bytes) in (
            ("query", TILE // ctas, of_query),
            ("key", TILE, of_key),
            ("value", TILE, of_value),
            ("grad_out", TILE // ctas, of_grad_out),
            ("grad_key", WARP_ROWS, of_key),
            ("grad_value", WARP_ROWS, of_value),
        )
    )
    sums = TensorMap(
        name="grad_query_sums",
        buffer="grad_query_sums",
        element="float32",
        extents=("sum_columns", "padded_length", "heads", "batch"),
        strides_bytes=("sum_row_bytes", "sum_head_bytes", "sum_batch_bytes"),
        box=(STAGED_COLUMNS, WARP_ROWS, 1, 1),
        swizzle_bytes=STAGED_COLUMNS * DTYPES["float32"],
    )
    return (*maps, sums)


def _tensor_memory(head_dim: int, value_dim: int, tiles: Tiles) -> tuple[TensorBuffer, ...]:
    begin = dict(tiles.columns)
    widths = {
        "scores": TILE,
        "probs": TILE if begin["probs"] == begin["scores"] else TILE // 2,
        "grad_probs": TILE,
        "grad_value": value_dim,
        "grad_key": head_dim,
        "grad_query": head_dim // tiles.ctas,
    }
    over = {
        "probs": ("scores",),
        "grad_probs": ("scores",) if begin["grad_probs"] == begin["scores"] else (),
        "grad_query": {"apart": (), "over_grad_probs": ("grad_probs",), "pair": ("scores", "probs")}.get(
            tiles.order, ("scores", "probs", "grad_probs")
        ),
    }
    return tuple(TensorBuffer(name, begin[name], width, over.get(name, ())) for name, width in widths.items())


def _events(tiles: Tiles, query_bytes: int, key_bytes: int, value_bytes: int) -> tuple[Event, ...]:
    """Copies and products arrive once; of the others one lane of each warp does."""
    compute_warps, ctas = COMPUTE_GROUPS * WARPS_PER_GROUP, tiles.ctas
    load, mma = (("load", 1),), (("mma", 1),)
    compute, compute_all = (("compute", compute_warps),), (("compute", ctas * compute_warps),)
    reduce_all = (("reduce", ctas * WARPS_PER_GROUP),)
    statistics_bytes = 2 * TILE * DTYPES["float32"]
    of_pair: tuple[Event, ...] = ()
    if ctas == 2:
        half_of_scores = TILE * TILE // COMPUTE_GROUPS * 2
        landed = (("compute", WARPS_PER_GROUP), ("relay", 1))
        of_pair = (
            Event("key_columns_landed", load, ("mma",), 1, 1, key_bytes * ctas),
            Event("query_columns_landed", load, ("mma",), 1, 1, query_bytes),
            Event("query_columns_free", mma, ("load",), 1, 1),
            Event("grad_out_columns_landed", load, ("mma",), 1, 1, value_bytes),
            Event("grad_out_columns_free", mma, ("load",), 1, 1),
            Event("grad_scores_landed", landed, ("relay",), WARPS_PER_GROUP + 1, 1, half_of_scores),
            Event("grad_scores_exchanged", (("relay", ctas),), ("mma",), ctas),
        )
    return (
        *of_pair,
        Event("keys_landed", load, ("mma",), 1, 1, key_bytes * ctas),
        Event("values_landed", load, ("mma",), 1, 1, value_bytes * ctas),
        Event("query_landed", load, ("mma",), 1, tiles.query_stages, query_bytes),
        Event("query_free", mma, ("load",), 1, tiles.query_stages),
        Event("grad_out_landed", load, ("mma",), 1, tiles.grad_out_stages, value_bytes),
        Event("grad_out_free", mma, ("load",), 1, tiles.grad_out_stages),
        Event("statistics_landed", load, ("compute",), 1, STATISTICS_STAGES, statistics_bytes),
        Event("statistics_free", compute, ("load",), compute_warps, STATISTICS_STAGES),
        Event("scores_ready", mma, ("compute",), 1),
        Event("probs_ready", compute_all, ("mma",), ctas * compute_warps),
        Event("grad_probs_ready", mma, ("compute",), 1),
        Event("grad_scores_ready", compute_all, ("mma",), ctas * compute_warps),
        Event("grad_query_ready", mma, ("reduce", "compute"), 1),
        Event("grad_query_drained", reduce_all, ("mma",), ctas * WARPS_PER_GROUP),
        Event("grads_ready", mma, ("compute",), 1),
    )


def _roles(tiles: Tiles) -> tuple[Role, ...]:
    reduce, compute, other = tiles.registers
    return (
        Role("reduce", WARPS_PER_GROUP, reduce),
        Role("compute", COMPUTE_GROUPS * WARPS_PER_GROUP, compute),
        Role("mma", 1, other),
        Role("load", 1, other),
        *((Role("relay", 1, other), Role("idle", 1, other)) if tiles.ctas == 2 else (Role("idle", 2, other),)),
    )


def _shared(tiles: Tiles, query_bytes: int, value_bytes: int) -> tuple[SharedBuffer, ...]:
    """Tiles of 128 rows, key gradients over the keys; what a row's softmax needs; staging of the reduction."""
    row_bytes, half = STAGED_COLUMNS * DTYPES["float32"], COMPUTE_GROUPS
    of_pair: tuple[SharedBuffer, ...] = ()
    of_query = query_bytes, value_bytes
    if tiles.ctas == 2:
        of_query = query_bytes // half, value_bytes // half
        of_pair = (
            SharedBuffer("key_columns", query_bytes, alignment=1024),
            SharedBuffer("query_columns", of_query[0], alignment=1024),
            SharedBuffer("grad_out_columns", of_query[1], alignment=1024),
            SharedBuffer("leaving_grad_scores", TILE * TILE // half * 2, alignment=1024),
        )
    return (
        SharedBuffer("key", query_bytes, alignment=1024),
        SharedBuffer("staged_grad_key", query_bytes, alignment=1024, over="key"),
        SharedBuffer("value", value_bytes, alignment=1024),
        SharedBuffer("staged_grad_value", value_bytes, alignment=1024, over="value"),
        SharedBuffer("query", of_query[0], tiles.query_stages, alignment=1024),
        SharedBuffer("grad_out", of_query[1], tiles.grad_out_stages, alignment=1024),
        *of_pair,
        SharedBuffer("grad_scores", TILE * TILE // COMPUTE_GROUPS * 2, COMPUTE_GROUPS, alignment=1024),
        SharedBuffer("staged_grad_query", WARP_ROWS * row_bytes, WARPS_PER_GROUP * tiles.staged_slots, alignment=1024),
        SharedBuffer("statistics", 2 * TILE * DTYPES["float32"], STATISTICS_STAGES),
        SharedBuffer("no_row", TILE * DTYPES["float32"]),
        SharedBuffer("tensor_memory_base", 16),
    )


def _parameters(flags: tuple[str, ...], of_mask: tuple[str, ...]) -> tuple[Parameter, ...]:
    maps = ("query", "key", "value", "grad_out", "grad_query_sums", "grad_key", "grad_value")
    return (
        *(Parameter("tensor_map", name) for name in maps),
        *(Parameter("operand", name) for name in ("lse_log2", "delta")),
        *(Parameter("result", name) for name in flags),
        *(Parameter("operand", name) for name in of_mask),
        *(Parameter("int32", name) for name in SCALARS),
        *(Parameter("float32", name) for name in FLOATS),
    )


def backward_plan(
    dtype: str,
    head_dims: tuple[int, int],
    mask: Mask,
    *,
    tiles: Tiles | None = None,
    soft_cap: bool = False,
    ordered: bool = False,
) -> KernelPlan:
    """The backward for one pair of padded head dimensions.

    Args:
        dtype: one of `BACKWARD_DTYPES`, of all tensors but the statistics and sums, which are float32.
        head_dims: of queries and keys, and of values; a key of `BACKWARD_TILES`. Smaller ones are filled with zeros by
            the tensor maps.
        mask: "band" (none, causal, windows: both edges by arithmetic), "intervals" (both from memory, and a table of
            work items), or "ids" (intervals, and ids that masked tiles compare where the table says so).
        tiles: the sizes; None: those of `BACKWARD_TILES`.
        soft_cap: scores are capped.
        ordered: the sums of query gradients are added in a fixed order.

    Raises PlanError on what no device could run.
    """
    if dtype not in BACKWARD_DTYPES or head_dims not in BACKWARD_TILES:
        raise PlanError(
            f"backward: dtype {dtype!r} with head dimensions {head_dims}; the Blackwell kernel takes "
            f"{', '.join(BACKWARD_DTYPES)} with {', '.join(map(str, BACKWARD_TILES))}."
        )
    tiles = tiles or BACKWARD_TILES[head_dims]
    of_mask = ("item_table", "lo", "hi") if mask in ("intervals", "ids") else ()
    of_ids = ("query_ids", "key_ids") if mask == "ids" else ()
    ranks, flags = ("ranks",) if ordered and of_mask else (), ("flags",) if ordered else ()
    zero_flags = ("zero_flags",) if ordered else ()
    first = "items" if of_mask else "section_heads"
    grid = (Extent(((first, 1), ("ctas", 1))), Extent((("key_length", tiles.rows),)), Extent((("sections", 1),)))
    if of_mask:
        grid = (grid[0], Extent(), Extent())
    query_bytes, value_bytes = (TILE * dim * DTYPES[dtype] for dim in head_dims)
    return KernelPlan(
        kernel="backward",
        architecture=ARCHITECTURE,
        source="jax_fa4.kernels.blackwell.backward",
        options=(
            ("dtype", dtype),
            ("head_dim", head_dims[0]),
            ("value_dim", head_dims[1]),
            ("mask", mask),
            ("soft_cap", soft_cap),
            ("ordered", ordered),
            ("order", tiles.order),
            ("ctas", tiles.ctas),
        ),
        # Sums of the query gradients and flags, zeroed, arrive in the buffers of the results of those names.
        operands=(
            *("query", "key", "value", "grad_out", "zeroed_sums", "lse_log2", "delta"),
            *(*zero_flags, *of_mask, *of_ids, *ranks),
        ),
        results=("grad_query_sums", "grad_key", "grad_value", *flags),
        integers=(*SCALARS, *SIZES),
        floats=FLOATS,
        parameters=_parameters(flags, (*of_mask, *of_ids, *ranks)),
        grid=grid,
        roles=_roles(tiles),
        tensor_maps=_tensor_maps(dtype, *head_dims, tiles.ctas),
        cluster=(tiles.ctas, 1, 1),
        shared=_shared(tiles, query_bytes, value_bytes),
        tensor_memory=_tensor_memory(*head_dims, tiles),
        events=_events(tiles, query_bytes, query_bytes, value_bytes),
    )
