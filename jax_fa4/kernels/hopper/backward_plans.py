"""Plans of the Hopper backward: which sizes it takes, and why those."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from jax_fa4.kernels.hopper.plans import (
    ARCHITECTURE,
    FORWARD_DTYPES,
    GROUP_ROWS,
    ITEM_BYTES,
    PLACES,
    WARPS_PER_GROUP,
    Mask,
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
    TensorMap,
)

GROUPS = 2  # computing warpgroups, of 64 keys each
KEY_TILE = GROUPS * GROUP_ROWS
# Launched with 168 registers for each of 384 threads; setmaxnreg moves them: 4 * 24 + 8 * 240 = 12 * 168 (a warp each).
LOAD_REGISTERS, COMPUTE_REGISTERS = 24, 240
# Integers of a call that the kernel takes, in order, and those that only its tensor maps and grid need.
SCALARS = (
    *("query_length", "key_length", "heads", "item_heads", "splits", "offset", "left", "right"),
    *("section_heads", "interval_stride", "rank_stride", "query_tiles", "head_dim", "value_dim", "items"),
)
SIZES = (
    *("batch", "sections", "workers", "kv_heads"),
    *(f"{name}_{unit}_bytes" for name in ("query", "key", "value", "grad_out") for unit in ("head", "row", "batch")),
)
FLOATS = ("scale", "scale_log2", "cap_log2")


@dataclass(frozen=True)
class BackwardTiles:
    """Sizes of a backward kernel, and choices between registers and time.

    Attributes:
        query_tile: queries per step, 64, 80 or 128. With 80, at head_dim 128 alone, the query gradients are computed
            transposed, since 80 is no multiple of the 64 rows of a product.
        query_stages: stages of the ring of queries; 3 where scores are ahead, since a stage then lives for two steps.
        grad_stages: stages of the ring of output gradients.
        ahead: the scores of the next step are issued before the query gradients of this one.
        turned_scores: dK takes dS from shared memory, not from registers.
        persistent: as many blocks as multiprocessors, each doing one item after the other: what an item reads first is
            loaded while the one before ends.
        grad_score_stages: stages of dS; with 1 a warpgroup waits until the other has read the step before.
    """

    query_tile: int
    query_stages: int
    grad_stages: int
    ahead: bool = True
    turned_scores: bool = True
    persistent: bool = False
    grad_score_stages: int = 2

    @property
    def sums_by_columns(self) -> bool:
        """A warpgroup computes columns of the query gradients and not rows: their sums lie transposed."""
        return self.query_tile % GROUP_ROWS != 0


# Measured on one H200 (docs/performance.md). Two warpgroups of 240 registers hold gradients of 64 keys each, and beside
# them 64 queries at head_dim 96 and 128 and 128 at 64, which halves what a step costs apart from its products.
BACKWARD_TILES = {
    64: BackwardTiles(128, 2, 2, ahead=False, turned_scores=False),
    96: BackwardTiles(64, 3, 3),
    128: BackwardTiles(64, 3, 3),
}
# For items of few steps, which gain 1 to 7% by the same sizes (docs/performance.md, from item to item, backward).
PERSISTENT_TILES = {head_dim: replace(tiles, persistent=True) for head_dim, tiles in BACKWARD_TILES.items()}
# Capped scores need registers for their slopes.
CAPPED_TILES = {**BACKWARD_TILES, 64: BackwardTiles(64, 3, 3)}


def sum_columns(head_dim: int) -> int:
    """Columns of the query gradients' sums: whole pieces of a product for each warpgroup where they share columns."""
    return 128 if head_dim == 96 else head_dim


def sum_parts(tiles: BackwardTiles) -> int:
    """Parts in columns of a block of sums: each warpgroup has half the columns, or 64 of 128 queries."""
    return 1 if tiles.query_tile == GROUPS * GROUP_ROWS else GROUPS


def turned_rows(tiles: BackwardTiles) -> int:
    """Rows of the blocks in which sums lie transposed; 0: they lie by rows."""
    return tiles.query_tile if tiles.sums_by_columns else 0


def _tensor_maps(dtype: str, head_dim: int, tiles: BackwardTiles, split: bool, is_table: bool) -> tuple[TensorMap, ...]:
    """(head_dim, row, head, batch) of each tensor, in boxes of a swizzled piece of a row by the rows of one copy."""
    box_columns = 64 if head_dim % 64 == 0 else 32
    copies = [
        ("query", "query", tiles.query_tile),
        ("key", "key", KEY_TILE),
        ("value", "value", KEY_TILE),
        ("grad_out", "grad_out", tiles.query_tile),
    ]
    if not split:
        copies += [("grad_key", "key", GROUP_ROWS), ("grad_value", "value", GROUP_ROWS)]
    if is_table:
        copies += [(f"hidden_{name}", like, rows) for name, like, rows in copies[:4]]
    dims = {"query": "head_dim", "key": "head_dim", "value": "value_dim", "grad_out": "value_dim"}
    lengths = {"query": "query_length", "key": "key_length", "value": "key_length", "grad_out": "query_length"}
    heads = {"query": "heads", "key": "kv_heads", "value": "kv_heads", "grad_out": "heads"}
    return tuple(
        TensorMap(
            name=name,
            buffer=name,
            element=dtype,
            extents=(dims[like], lengths[like], heads[like], "batch"),
            strides_bytes=(f"{like}_row_bytes", f"{like}_head_bytes", f"{like}_batch_bytes"),
            box=(box_columns, rows, 1, 1),
            swizzle_bytes=box_columns * DTYPES[dtype],
        )
        for name, like, rows in copies
    )


def _events(tiles: BackwardTiles, row_bytes: int) -> tuple[Event, ...]:
    """One copy fills a stage; one lane of each computing warp frees it."""
    readers, step_bytes = GROUPS * WARPS_PER_GROUP, tiles.query_tile * (row_bytes + 4)
    stages = {"keys": 1, "values": 1, "queries": tiles.query_stages, "grads": tiles.grad_stages}
    rings = [
        event
        for ring, count in stages.items()
        for event in (
            Event(
                f"{ring}_landed",
                (("load", 1),),
                ("compute",),
                1,
                count,
                step_bytes if ring in ("queries", "grads") else KEY_TILE * row_bytes,
            ),
            Event(f"{ring}_free", (("compute", readers),), ("load",), readers, count),
        )
    ]
    items = (
        Event("item_known", (("load", 1),), ("add", "compute"), 1, PLACES),
        Event("item_taken", (("add", 1), ("compute", readers)), ("load",), 1 + readers, PLACES),
    )
    return (*rings, *(items if tiles.persistent else ()))


def _shared(head_dim: int, tiles: BackwardTiles, row_bytes: int, element_bytes: int) -> tuple[SharedBuffer, ...]:
    grad_score_bytes = tiles.query_tile * KEY_TILE * element_bytes
    row_values = tiles.query_tile * 4
    key_bytes = KEY_TILE * row_bytes
    over = ("keys", "values")
    gradients = [
        SharedBuffer(f"staged_grad_{name.removesuffix('s')}", key_bytes, alignment=1024, over=name) for name in over
    ]
    entries = [SharedBuffer("entries", ITEM_BYTES, PLACES)]
    return (
        SharedBuffer("keys", key_bytes, alignment=1024),
        SharedBuffer("values", key_bytes, alignment=1024),
        *([] if tiles.persistent else gradients),
        SharedBuffer("queries", tiles.query_tile * row_bytes, tiles.query_stages, alignment=1024),
        SharedBuffer("grads", tiles.query_tile * row_bytes, tiles.grad_stages, alignment=1024),
        SharedBuffer("grad_scores", grad_score_bytes, tiles.grad_score_stages, alignment=1024),
        SharedBuffer("staged_sums", tiles.query_tile * sum_columns(head_dim) * 4),
        SharedBuffer("lse", row_values, tiles.query_stages),
        SharedBuffer("delta", row_values, tiles.grad_stages),
        *(entries if tiles.persistent else []),
    )


def _check_tiles(tiles: BackwardTiles, head_dim: int, soft_cap: bool) -> None:
    if tiles.query_tile not in (64, 80, 128):
        raise PlanError(f"backward: query_tile is {tiles.query_tile}; it takes 64, 80 or 128.")
    if tiles.grad_score_stages not in (1, 2):
        raise PlanError(f"backward: grad_score_stages is {tiles.grad_score_stages}; it takes 1 or 2.")
    staging_bytes = tiles.query_tile * (tiles.grad_score_stages * KEY_TILE * 2 + sum_columns(head_dim) * 4)
    if tiles.persistent and staging_bytes < 2 * KEY_TILE * head_dim * 2:
        raise PlanError(
            "backward: persistent blocks stage their results over dS and sums, for which these are too small."
        )
    # What else there is spills: slopes of capped scores, and scores that are ahead beside dS in registers.
    has_registers = not soft_cap and (tiles.turned_scores or not tiles.ahead)
    if tiles.sums_by_columns and (head_dim != GROUPS * GROUP_ROWS or not has_registers):
        raise PlanError(
            f"backward: query_tile is {tiles.query_tile} with head_dim {head_dim}; it takes head_dim 128 without a "
            "soft cap, and turned_scores where scores are ahead."
        )


def backward_plan(
    dtype: str,
    head_dim: int,
    mask: Mask,
    *,
    tiles: BackwardTiles | None = None,
    soft_cap: bool = False,
    ordered: bool = False,
    split: bool = False,
) -> KernelPlan:
    """The backward for one padded head dimension.

    Args:
        dtype: one of `FORWARD_DTYPES`, of queries, keys, values and output gradients.
        head_dim: padded, a key of `BACKWARD_TILES`; smaller ones are filled with zeros by the tensor maps.
        mask: as `forward_plan` takes it; both edges are always computed.
        tiles: the sizes; None: those of `BACKWARD_TILES` or `CAPPED_TILES`.
        soft_cap: scores are capped.
        ordered: the sums of query gradients are added in a fixed order.
        split: several items share the query heads of their keys; they write float32 parts.

    Raises PlanError on what no device could run.
    """
    if dtype not in FORWARD_DTYPES or head_dim not in BACKWARD_TILES:
        raise PlanError(
            f"backward: dtype {dtype!r} with head_dim {head_dim}; the Hopper kernel takes {', '.join(FORWARD_DTYPES)} "
            f"with {', '.join(map(str, BACKWARD_TILES))}."
        )
    tiles = tiles or (CAPPED_TILES if soft_cap else BACKWARD_TILES)[head_dim]
    _check_tiles(tiles, head_dim, soft_cap)
    is_table = mask in ("intervals", "ids")
    row_bytes = head_dim * DTYPES[dtype]
    pointers = [Parameter("operand", "lse"), Parameter("operand", "delta"), Parameter("result", "sums")]
    operands = ["query", "key", "value", "grad_out", "lse", "delta", "zeros"]
    results = ["grad_key", "grad_value", "sums"]
    counts = [("zero_flags", "flags")] if ordered else []
    counts += [("zero_counter", "counter")] if tiles.persistent else []
    for zeros, counted in counts:
        operands.append(zeros)
        results.append(counted)
        pointers.append(Parameter("result", counted))
    extra = []
    maps = ["query", "key", "value", "grad_out"]
    hidden = [f"hidden_{name}" for name in maps] if is_table else []
    if is_table:
        extra += ["item_table", "lo", "hi", "hidden_queries", "hidden_keys"]
    if mask == "ids":
        extra += ["key_ids", "query_ids"]
    if ordered and is_table:
        extra.append("ranks")
    gradients = [Parameter("result" if split else "tensor_map", name) for name in ("grad_key", "grad_value")]
    grid = (Extent((("section_heads", 1),)), Extent((("key_length", KEY_TILE),)), Extent((("sections", 1),)))
    if is_table:
        grid = (Extent((("items", 1),)), Extent(), Extent())
    if tiles.persistent:
        grid = (Extent((("workers", 1),)), Extent(), Extent())
    return KernelPlan(
        kernel="backward",
        architecture=ARCHITECTURE,
        source="jax_fa4.kernels.hopper.backward",
        options=(
            ("dtype", dtype),
            ("head_dim", head_dim),
            ("mask", "window" if mask == "causal" else mask),
            ("soft_cap", soft_cap),
            ("ordered", ordered),
            ("split", split),
            ("query_tile", tiles.query_tile),
            ("query_stages", tiles.query_stages),
            ("grad_stages", tiles.grad_stages),
            ("ahead", tiles.ahead),
            ("sum_columns", sum_columns(head_dim)),
            ("turned_scores", tiles.turned_scores),
            ("persistent", tiles.persistent),
            ("grad_score_stages", tiles.grad_score_stages),
        ),
        operands=(*operands, *extra, *hidden),
        results=tuple(results),
        integers=(*SCALARS, *SIZES),
        floats=FLOATS,
        parameters=(
            *(Parameter("tensor_map", name) for name in maps),
            *gradients,
            *(Parameter("tensor_map", name) for name in hidden),
            *pointers,
            *(Parameter("operand", name) for name in extra),
            *(Parameter("int32", name) for name in SCALARS),
            *(Parameter("float32", name) for name in FLOATS),
        ),
        grid=grid,
        roles=(
            Role("load", 1, LOAD_REGISTERS),
            Role("add", 1, LOAD_REGISTERS),
            Role("idle", 2, LOAD_REGISTERS),
            Role("compute", GROUPS * WARPS_PER_GROUP, COMPUTE_REGISTERS),
        ),
        tensor_maps=_tensor_maps(dtype, head_dim, tiles, split, is_table),
        shared=_shared(head_dim, tiles, row_bytes, DTYPES[dtype]),
        events=_events(tiles, row_bytes),
    )


def bundled_plans() -> Iterator[KernelPlan]:
    """Plans whose binaries the wheel carries: without caps and without parts of groups, in free order by blocks of one
    item and by persistent ones, and in fixed order by the former."""
    for dtype in FORWARD_DTYPES:
        for head_dim in BACKWARD_TILES:
            for mask in ("window", "intervals", "ids"):
                for ordered in (False, True):
                    yield backward_plan(dtype, head_dim, mask, ordered=ordered)
                yield backward_plan(dtype, head_dim, mask, tiles=PERSISTENT_TILES[head_dim])
