"""Plans of the Blackwell backward: which sizes it takes, and why those."""

from __future__ import annotations

import itertools
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
FRAGMENT = 32  # columns of tensor memory that a thread loads at once
WARP_ROWS = 32
ITEM_BYTES = 32  # what all roles know of their item
Mask = Literal["band", "intervals", "ids"]
MASKS: tuple[Mask, ...] = ("band", "intervals", "ids")
# Integers of a call that the kernel takes, in order, and those that only its tensor maps and grid need. Offset, left
# and right are those of the transposed mask: which queries a key is seen by. Items are made for `kv_heads` heads with
# `group` query heads each, `splits` to a head of keys; with `last_first` not 0 those of the last keys come first.
SCALARS = (
    *("query_length", "key_length", "padded_length", "group", "kv_heads", "splits", "offset", "left", "right"),
    *("section_heads", "interval_stride", "rank_stride", "last_first"),
)
SIZES = (
    *("batch", "heads", "key_heads", "sections", "items", "ctas", "head_dim", "value_dim"),
    *("head_bytes", "value_head_bytes", "grad_head_bytes", "grad_value_head_bytes"),
    *("query_row_bytes", "key_row_bytes", "value_row_bytes", "grad_out_row_bytes"),
    *("query_batch_bytes", "key_batch_bytes", "value_batch_bytes", "grad_out_batch_bytes"),
    *("grad_key_row_bytes", "grad_value_row_bytes", "grad_key_batch_bytes", "grad_value_batch_bytes"),
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
        staged_columns: of such a box, float32.
    """

    order: str
    query_stages: int
    grad_out_stages: int
    columns: tuple[tuple[str, int], ...]
    ctas: int = 1
    staged_slots: int = 2
    staged_columns: int = 32

    @property
    def rows(self) -> int:
        """Keys of an item."""
        return self.ctas * TILE


def _columns(scores: int, probs: int, grad_probs: int, value: int, key: int, query: int) -> tuple[tuple[str, int], ...]:
    names = ("scores", "probs", "grad_probs", "grad_value", "grad_key", "grad_query")
    return tuple(zip(names, (scores, probs, grad_probs, value, key, query), strict=True))


# Registers of a thread of the reduction, of the computation and of the other warps: 512 for each column of one thread
# per warpgroup, computation twice. A reducing thread holds up to 96 sums, a computing one 64 probs and 32 or 64 scores.
# Of the splits that were compiled this one spills nothing (docs/sass.md); (112, 152, 96), (96, 160, 96) and, with caps,
# (104, 160, 88) do: with more registers the compiler does more at a time.
REGISTERS = (120, 152, 88)
# (head_dim, value_dim), padded. At 64 query gradients have columns of their own; at 96 they lie over the gradients of
# the probs. At 128 all 512 columns are used; a pair computes 64 rows of query gradients each, 64 columns, which fit
# between the probs of the two warpgroups, and reads half of B and adds half of the sums: 2560 clocks of shared memory
# per tile in place of 3328 (product_order.py). At 192 the sums of keys and values leave 192 columns: scores and
# gradients of probs share 128, and query gradients, 96 of a pair, lie over the probs and what is read before. Shared
# memory is full too: there each query buffer holds rows first and columns then, what leaves lies over output gradients.
BACKWARD_TILES: dict[tuple[int, int], Tiles] = {
    (64, 64): Tiles("apart", 2, 2, _columns(0, 0, 128, 256, 320, 384)),
    (96, 96): Tiles("over_grad_probs", 2, 1, _columns(0, 0, 128, 256, 352, 128)),
    (128, 128): Tiles("pair", 1, 1, _columns(0, 0, 128, 256, 384, 32), ctas=2, staged_slots=1),
    (192, 128): Tiles(
        "pair_serial", 1, 1, _columns(320, 448, 320, 0, 128, 416), ctas=2, staged_slots=1, staged_columns=16
    ),
}
# One CTA to an item where a pair is usual, for comparison.
SINGLE_TILES: dict[tuple[int, int], Tiles] = {
    (128, 128): Tiles("over_grad_probs", 2, 1, _columns(0, 0, 128, 256, 384, 128)),
    (192, 128): Tiles("serial", 1, 1, _columns(320, 448, 320, 0, 128, 320)),
}


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


def grad_columns(dim: int, split: bool) -> int:
    """Columns of a box of a gradient of keys or values, 16 bits an element, or of a part of it in float32."""
    return FRAGMENT if split else box_columns(dim)


def loaded_columns(dim: int, ctas: int) -> int:
    """Columns of a box of an operand: boxes divide the half of the columns that a CTA of a pair loads by itself."""
    return box_columns(dim // ctas)


def bundled_plans() -> Iterator[KernelPlan]:
    """Plans whose binaries the wheel carries: without caps and splits."""
    for dtype, dims, mask, ordered in itertools.product(BACKWARD_DTYPES, BACKWARD_TILES, MASKS, (False, True)):
        yield backward_plan(dtype, dims, mask, ordered=ordered)


def _tensor_maps(dtype: str, head_dim: int, value_dim: int, tiles: Tiles, split: bool) -> tuple[TensorMap, ...]:
    """(column, row, head, batch) of each tensor, in boxes of a swizzled piece of a row by the rows of one copy."""
    ctas, grad_dtype = tiles.ctas, "float32" if split else dtype
    head, value = ("head_dim", loaded_columns(head_dim, ctas)), ("value_dim", loaded_columns(value_dim, ctas))
    grads = (("head_dim", grad_columns(head_dim, split)), ("value_dim", grad_columns(value_dim, split)))
    maps = tuple(
        TensorMap(
            name=name,
            buffer=name,
            element=element,
            extents=(dim_name, f"{side}_length", heads, "batch"),
            strides_bytes=(f"{name}_row_bytes", head_bytes, f"{name}_batch_bytes"),
            box=(width, rows, 1, 1),
            swizzle_bytes=width * DTYPES[element],
        )
        for name, element, rows, side, heads, (dim_name, width), head_bytes in (
            ("query", dtype, TILE // ctas, "query", "heads", head, "head_bytes"),
            ("key", dtype, TILE, "key", "key_heads", head, "head_bytes"),
            ("value", dtype, TILE, "key", "key_heads", value, "value_head_bytes"),
            ("grad_out", dtype, TILE // ctas, "query", "heads", value, "value_head_bytes"),
            ("grad_key", grad_dtype, WARP_ROWS, "key", "kv_heads", grads[0], "grad_head_bytes"),
            ("grad_value", grad_dtype, WARP_ROWS, "key", "kv_heads", grads[1], "grad_value_head_bytes"),
        )
    )
    sums = TensorMap(
        name="grad_query_sums",
        buffer="grad_query_sums",
        element="float32",
        extents=("sum_columns", "padded_length", "heads", "batch"),
        strides_bytes=("sum_row_bytes", "sum_head_bytes", "sum_batch_bytes"),
        box=(tiles.staged_columns, WARP_ROWS, 1, 1),
        swizzle_bytes=tiles.staged_columns * DTYPES["float32"],
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


def _roles(ctas: int) -> tuple[Role, ...]:
    reduce, compute, other = REGISTERS
    return (
        Role("reduce", WARPS_PER_GROUP, reduce),
        Role("compute", COMPUTE_GROUPS * WARPS_PER_GROUP, compute),
        Role("mma", 1, other),
        Role("load", 1, other),
        *((Role("relay", 1, other), Role("item", 1, other)) if ctas == 2 else (Role("item", 2, other),)),
    )


def _shared(tiles: Tiles, query_bytes: int, value_bytes: int) -> tuple[SharedBuffer, ...]:
    """Tiles of 128 rows, key gradients over the keys; what a row's softmax needs; staging of the reduction."""
    row_bytes, half = tiles.staged_columns * DTYPES["float32"], COMPUTE_GROUPS
    of_pair: tuple[SharedBuffer, ...] = ()
    of_query = query_bytes, value_bytes
    if tiles.ctas == 2:
        of_query = query_bytes // half, value_bytes // half
        over = ("query", "grad_out") if tiles.order == "pair_serial" else (None, None)
        of_pair = (
            SharedBuffer("key_columns", query_bytes, alignment=1024),
            SharedBuffer("query_columns", of_query[0], alignment=1024, over=over[0]),
            SharedBuffer("grad_out_columns", of_query[1], alignment=1024),
            SharedBuffer("leaving_grad_scores", TILE * TILE // half * 2, alignment=1024, over=over[1]),
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
        SharedBuffer("work_item", ITEM_BYTES, alignment=16),
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
    split: bool = False,
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
        split: several items share the query heads of a KV head; each leaves a part of its gradients in float32.

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
            ("split", split),
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
        roles=_roles(tiles.ctas),
        tensor_maps=_tensor_maps(dtype, *head_dims, tiles, split),
        cluster=(tiles.ctas, 1, 1),
        shared=_shared(tiles, query_bytes, value_bytes),
        tensor_memory=_tensor_memory(*head_dims, tiles),
        events=_events(tiles, query_bytes, query_bytes, value_bytes),
    )
