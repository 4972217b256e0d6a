"""Plans of the two kernels that plan a mask on the device."""

from __future__ import annotations

from collections.abc import Iterator

from jax_fa4.kernels.plan import Extent, KernelPlan, Parameter, Role, SharedBuffer, general_architectures

MOST_COLUMNS = 1 << 18  # three words of shared memory for 32 columns: 96 KiB
MOST_BATCH, MOST_SECTIONS = 1024, 2048
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
        integers=("batch", *ROW_INTEGERS, "sides"),
        parameters=(
            *(Parameter("operand", name) for name in operands),
            *(Parameter("result", name) for name in results),
            *(Parameter("int32", name) for name in ROW_INTEGERS),
        ),
        grid=(Extent((("batch", 1),)), Extent((("sides", 1),)), Extent()),
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
