"""Plans of the small kernels around attention: planning of masks, rows that nobody sees, and parts of the keys."""

from __future__ import annotations

from collections.abc import Iterator

from jax_fa4.kernels.plan import (
    HEAD_DIMS,
    Extent,
    KernelPlan,
    Parameter,
    PlanError,
    Role,
    SharedBuffer,
    general_architectures,
)

MOST_COLUMNS = 1 << 18  # three words of shared memory for 32 columns: 96 KiB
MOST_BATCH, MOST_SECTIONS = 1024, 2048
HIDE_WARPS = 8  # a thread for each row of a tile
MERGE_WARPS = 4  # with four parts each, 16 are loaded at once
MERGED_DTYPES = ("bfloat16", "float16")
SIDES = ("query", "key")
ROW_RESULTS = ("lo", "hi", "exact", "bounds", "clocks")
ROW_INTEGERS = (
    *("query_length", "key_length", "hash_entries"),
    *(
        f"{side}_{name}"
        for side in SIDES
        for name in ("lower", "upper", "row_tile", "column_tile", "full_clocks", "partial_clocks", "overhead")
    ),
)
ORDER_INTEGERS = (
    "batch",
    *(
        f"{side}_{name}"
        for side in SIDES
        for name in ("row_tiles", "heads", "section_heads", "sections", "slots", "dropped")
    ),
)


def rows_plan(architecture: str, *, ids: bool, lengths: bool) -> KernelPlan:
    """What each query sees and each key is seen by, with ids, lengths, or both."""
    operands = [f"{side}_ids" for side in SIDES] if ids else []
    operands += [f"{side}_lengths" for side in SIDES] if lengths else []
    results = [f"{side}_{name}" for side in SIDES for name in ROW_RESULTS] + (["hash_table"] if ids else [])
    return KernelPlan(
        kernel="plan_rows",
        architecture=architecture,
        source="jax_fa4.kernels.plan_rows",
        options=(("ids", ids), ("lengths", lengths), ("most_columns", MOST_COLUMNS)),
        operands=tuple(operands),
        results=tuple(results),
        integers=("batch", *ROW_INTEGERS, "sides", "shares"),
        parameters=(
            *(Parameter("operand", name) for name in operands),
            *(Parameter("result", name) for name in results),
            *(Parameter("int32", name) for name in ROW_INTEGERS),
        ),
        grid=(Extent((("batch", 1),)), Extent((("sides", 1),)), Extent((("shares", 1),))),
        roles=(Role("rows", 32),),
        shared=(
            SharedBuffer("runs", MOST_COLUMNS // 32 * 4, 3, alignment=4),
            SharedBuffer("sums", 32 * 4, alignment=4),
            SharedBuffer("flag", 4, alignment=4),
        ),
    )


def order_plan(architecture: str) -> KernelPlan:
    """The order of work items of both passes."""
    operands = tuple(f"{side}_{name}" for side in SIDES for name in ("exact", "bounds", "clocks"))
    results = ("forward_items", "backward_items")
    return KernelPlan(
        kernel="plan_order",
        architecture=architecture,
        source="jax_fa4.kernels.plan_order",
        options=(("most_batch", MOST_BATCH), ("most_sections", MOST_SECTIONS)),
        operands=operands,
        results=results,
        integers=(*ORDER_INTEGERS, "blocks", "sides"),
        parameters=(
            *(Parameter("operand", name) for name in operands),
            *(Parameter("result", name) for name in results),
            *(Parameter("int32", name) for name in ORDER_INTEGERS),
        ),
        grid=(Extent((("blocks", 1),)), Extent(), Extent((("sides", 1),))),
        roles=(Role("order", 8),),
        shared=(
            SharedBuffer("by_batch_row", MOST_BATCH * 8, 2, alignment=8),
            SharedBuffer("places", MOST_BATCH * 4, 2, alignment=4),
            SharedBuffer("sections", MOST_SECTIONS * 4, 2, alignment=4),
        ),
    )


def bundled_plans() -> Iterator[KernelPlan]:
    """Plans whose binaries the wheel carries."""
    for architecture in general_architectures():
        yield rows_plan(architecture, ids=True, lengths=False)
        yield rows_plan(architecture, ids=False, lengths=True)
        yield rows_plan(architecture, ids=True, lengths=True)
        yield order_plan(architecture)
        for dtype in MERGED_DTYPES:
            for value_dim in HEAD_DIMS:
                yield merge_parts_plan(architecture, dtype, value_dim, sinks=False)
    for tensors in (1, 2):
        yield hide_rows_plan("sm_90a", tensors)


def hide_rows_plan(architecture: str, tensors: int) -> KernelPlan:
    """Copies of as many tensors of the same rows, in which rows that take no part are zeros."""
    operands = tuple(f"tensor_{number}" for number in range(tensors))
    results = tuple(f"hidden_{number}" for number in range(tensors))
    intervals = ("lo", "hi", "other_lo", "other_hi")
    sizes = ("length", "others", "tile_rows", "interval_stride", "other_stride")
    vectors = tuple(f"vectors_{number}" for number in range(tensors))
    return KernelPlan(
        kernel="hide_rows",
        architecture=architecture,
        source="jax_fa4.kernels.hide_rows",
        options=(("tensors", tensors),),
        operands=(*operands, *intervals),
        results=(*results, "flags"),
        integers=(*sizes, *vectors, "tiles", "batch"),
        parameters=(
            *(Parameter("operand", name) for name in operands),
            *(Parameter("result", name) for name in results),
            *(Parameter("operand", name) for name in intervals),
            Parameter("result", "flags"),
            *(Parameter("int32", name) for name in (*sizes, *vectors)),
        ),
        grid=(Extent((("tiles", 1),)), Extent((("batch", 1),)), Extent()),
        roles=(Role("rows", HIDE_WARPS),),
        shared=(
            SharedBuffer("seen", HIDE_WARPS * 32 * 4, alignment=4),
            SharedBuffer("found", 3 * 4, alignment=4),
        ),
    )


def merge_parts_plan(architecture: str, dtype: str, value_dim: int, *, sinks: bool) -> KernelPlan:
    """The mean of parts of the keys, weighted by their log-sum-exps. Raises PlanError on other widths."""
    if dtype not in MERGED_DTYPES or value_dim % 8 or not 0 < value_dim <= 256:
        raise PlanError(
            f"merge_parts: dtype {dtype!r} with value_dim {value_dim}; it takes {' and '.join(MERGED_DTYPES)} with "
            "multiples of 8 up to 256."
        )
    operands = ("parts_out", "parts_lse", *(["sinks"] if sinks else []))
    sizes, strides, divisors = ("parts", "group", "kv_heads"), ("part_rows", "batch_rows"), ("queries", "group")
    return KernelPlan(
        kernel="merge_parts",
        architecture=architecture,
        source="jax_fa4.kernels.merge_parts",
        options=(("dtype", dtype), ("value_dim", value_dim), ("sinks", sinks)),
        operands=operands,
        results=("out", "lse"),
        integers=(*sizes, *strides, "batch", "queries", "heads"),
        parameters=(
            *(Parameter("operand", name) for name in operands),
            Parameter("result", "out"),
            Parameter("result", "lse"),
            *(Parameter("int32", name) for name in sizes),
            *(Parameter("int64", name) for name in strides),
            *(Parameter("divisor", name) for name in divisors),
        ),
        grid=(Extent((("batch", 1), ("queries", 1))), Extent((("heads", 1),)), Extent()),
        roles=(Role("parts", MERGE_WARPS),),
        shared=(
            SharedBuffer("shares", MERGE_WARPS * -(-value_dim // 128) * 128 * 4),
            SharedBuffer("statistics", MERGE_WARPS * 2 * 4),
        ),
    )
