"""The plan of each kernel, and the list of plans whose binaries the wheel carries.

The device code of a kernel lies in the module that its plan names as `source`; that module is imported only to build.
"""

from __future__ import annotations

from collections.abc import Iterator

from jax_fa4.kernels import planning_plans
from jax_fa4.kernels.blackwell import backward_plans
from jax_fa4.kernels.blackwell import plans as blackwell
from jax_fa4.kernels.hopper import backward_plans as hopper_backward
from jax_fa4.kernels.hopper.plans import (
    FORWARD_DTYPES,
    FORWARD_TILES,
    MASKS,
    SHORT_TILES,
    SINGLE_TILES,
    forward_plan,
    padded_head_dim,
)
from jax_fa4.kernels.plan import (
    DTYPES,
    HEAD_DIMS,
    Extent,
    KernelPlan,
    Parameter,
    PlanError,
    Role,
    SharedBuffer,
    general_architectures,
)

VECTOR_BYTES = 16  # the widest load and store of a thread
PREPROCESS_WARPS = 8
POSTPROCESS_WARPS = 8
TURNED_ROWS, TURNED_WIDTH = 8, 128  # rows of a warp, and columns, of sums that lie transposed
POSTPROCESS_ROWS = 64  # of a block: at D = 128 each thread has 4 stores of 16 bytes, 8 loads in flight before them


def _by_sections(row_tiles: Extent) -> tuple[Extent, Extent, Extent]:
    """Sections of heads one after the other, in each its row tiles, for each all its heads, which share sectors of the
    LSE: (batch, row, head)."""
    return Extent((("section_heads", 1),)), row_tiles, Extent((("sections", 1),))


def preprocess_plan(
    architecture: str, dtype: str, value_dim: int, accumulator_width: int, rows_per_thread: int | None = None
) -> KernelPlan:
    """The backward's preprocess for rows of `value_dim` elements, zeroing `accumulator_width` float32 per row (0:
    none).

    Raises PlanError where a row is not whole vectors of 16 bytes.
    """
    if dtype not in DTYPES:
        raise PlanError(f"preprocess: dtype is {dtype!r}; it takes one of {', '.join(DTYPES)}.")
    for name, width, element_bytes in (
        ("value_dim", value_dim, DTYPES[dtype]),
        ("accumulator_width", accumulator_width, DTYPES["float32"]),
    ):
        if width < 0 or width * element_bytes % VECTOR_BYTES or width > 1024 or (name == "value_dim" and width == 0):
            step = VECTOR_BYTES // element_bytes
            raise PlanError(f"preprocess: {name} is {width}; it takes multiples of {step} up to 1024.")
    vectors = value_dim * DTYPES[dtype] // VECTOR_BYTES
    # Lanes that share a row: as many as divide it evenly, so that none idles, but 4 at least, so that a warp's load
    # touches whole sectors of 32 bytes and more.
    lanes = max(4, min(32, vectors & -vectors))
    loads = -(-vectors // lanes)
    # Rows per thread: at least 4 loads of 16 bytes in flight for each thread, 128 KiB for an SM of 2048 threads, well
    # over the bandwidth-latency product of HBM3e per SM (4.8 TB/s * 0.7 us / 132 = 25 KiB). On an H200 1, 2 and 4 rows
    # make no difference (docs/performance.md).
    rows_per_thread = rows_per_thread or max(1, 2 // loads)
    rows = PREPROCESS_WARPS * 32 // lanes * rows_per_thread
    return KernelPlan(
        kernel="preprocess",
        architecture=architecture,
        source="jax_fa4.kernels.preprocess",
        options=(
            ("dtype", dtype),
            ("value_dim", value_dim),
            ("accumulator_width", accumulator_width),
            ("lanes", lanes),
            ("rows", rows),
        ),
        operands=("out", "grad_out", "lse", "grad_lse"),
        results=("lse_log2", "delta", "accumulator"),
        integers=("section_heads", "sections", "heads", "query_length", "padded_length"),
        parameters=(
            Parameter("operand", "out"),
            Parameter("operand", "grad_out"),
            Parameter("operand", "lse"),
            Parameter("operand", "grad_lse"),
            Parameter("result", "lse_log2"),
            Parameter("result", "delta"),
            Parameter("result", "accumulator"),
            Parameter("int32", "heads"),
            Parameter("int32", "query_length"),
            Parameter("int32", "padded_length"),
        ),
        grid=_by_sections(Extent((("padded_length", rows),))),
        roles=(Role("rows", PREPROCESS_WARPS),),
    )


def postprocess_plan(
    architecture: str,
    dtype: str,
    head_dim: int,
    accumulator_width: int,
    fragment_parts: int = 0,
    turned_rows: int = 0,
) -> KernelPlan:
    """The backward's postprocess: sums of `accumulator_width` float32 a row to gradients of `head_dim` elements.

    `fragment_parts` 0: rows as they are; 1 or 2: in the order of registers, in as many parts
    (`kernels/postprocess.py`); with `turned_rows`, transposed in blocks of so many rows
    (`kernels/postprocess_turned.py`). Raises PlanError where a row is not whole vectors of 16 bytes.
    """
    if dtype not in DTYPES:
        raise PlanError(f"postprocess: dtype is {dtype!r}; it takes one of {', '.join(DTYPES)}.")
    step = VECTOR_BYTES // DTYPES[dtype]
    if head_dim % step or not 0 < head_dim <= 1024:
        raise PlanError(f"postprocess: head_dim is {head_dim}; it takes multiples of {step} up to 1024.")
    if accumulator_width % 4 or accumulator_width < head_dim:
        raise PlanError(
            f"postprocess: accumulator_width is {accumulator_width}; it takes multiples of 4 from head_dim, "
            f"{head_dim}, on."
        )
    order: tuple[str, int] = ("fragment_parts", fragment_parts)
    if turned_rows:
        order = ("tile_rows", turned_rows)
        if turned_rows % TURNED_ROWS or accumulator_width != TURNED_WIDTH or DTYPES[dtype] != 2:
            raise PlanError(
                f"postprocess: turned_rows is {turned_rows} with accumulator_width {accumulator_width} and dtype "
                f"{dtype!r}; it takes multiples of {TURNED_ROWS} with {TURNED_WIDTH} and types of 16 bits."
            )
    return KernelPlan(
        kernel="postprocess_turned" if turned_rows else "postprocess",
        architecture=architecture,
        source=f"jax_fa4.kernels.postprocess{'_turned' if turned_rows else ''}",
        options=(
            ("dtype", dtype),
            ("head_dim", head_dim),
            ("accumulator_width", accumulator_width),
            ("rows", POSTPROCESS_ROWS),
            order,
        ),
        operands=("accumulator",),
        results=("grad_query",),
        integers=("section_heads", "sections", "heads", "query_length", "padded_length"),
        floats=("scale",),
        parameters=(
            Parameter("operand", "accumulator"),
            Parameter("result", "grad_query"),
            Parameter("int32", "heads"),
            Parameter("int32", "query_length"),
            Parameter("int32", "padded_length"),
            Parameter("float32", "scale"),
        ),
        grid=_by_sections(Extent((("query_length", POSTPROCESS_ROWS),))),
        roles=(Role("rows", POSTPROCESS_WARPS),),
        shared=(SharedBuffer("rows", POSTPROCESS_ROWS * (TURNED_WIDTH * 2 + 16)),) if turned_rows else (),
    )


def around_backward(
    architecture: str,
    dtype: str,
    head_dim: int,
    value_dim: int,
    width: int,
    fragment_parts: int = 0,
    turned_rows: int = 0,
) -> tuple[KernelPlan, KernelPlan]:
    """What runs before and after a backward whose sums of query gradients have `width` columns."""
    return (
        preprocess_plan(architecture, dtype, value_dim, width),
        postprocess_plan(architecture, dtype, head_dim, width, fragment_parts, turned_rows),
    )


def bundled_plans() -> Iterator[KernelPlan]:
    """Plans whose binaries the wheel carries, each once."""
    yield from dict.fromkeys(_bundled_plans())


def _bundled_plans() -> Iterator[KernelPlan]:
    for architecture in general_architectures():
        for dtype in DTYPES:
            for head_dim in HEAD_DIMS:
                yield preprocess_plan(architecture, dtype, head_dim, head_dim)
                if dtype in FORWARD_DTYPES:
                    yield postprocess_plan(architecture, dtype, head_dim, head_dim)
    yield from _around_backwards()
    yield from planning_plans.bundled_plans()
    for dtype in FORWARD_DTYPES:
        for head_dim in FORWARD_TILES:
            for tiles in (FORWARD_TILES[head_dim], SINGLE_TILES[head_dim], SHORT_TILES[head_dim]):
                for mask in MASKS:
                    yield forward_plan(dtype, head_dim, mask, tiles=tiles)
    yield from hopper_backward.bundled_plans()
    yield from blackwell.bundled_plans()
    yield from backward_plans.bundled_plans()


def _around_backwards() -> Iterator[KernelPlan]:
    """For every head dimension that the backward kernels take: multiples of a vector."""
    for dtype in FORWARD_DTYPES:
        step = VECTOR_BYTES // DTYPES[dtype]
        for dim in range(step, max(hopper_backward.BACKWARD_TILES) + 1, step):
            padded = padded_head_dim(dim)
            width = hopper_backward.sum_columns(padded)
            parts = hopper_backward.sum_parts(hopper_backward.BACKWARD_TILES[padded])
            yield from around_backward(hopper_backward.ARCHITECTURE, dtype, dim, dim, width, parts)
            width, _ = backward_plans.padded_head_dims(dim, dim)
            yield from around_backward(backward_plans.ARCHITECTURE, dtype, dim, dim, width)
        widest, most = max(backward_plans.BACKWARD_TILES)
        for dim in range(most + step, widest + 1, step):
            for value_dim in range(step, most + 1, step):
                yield from around_backward(backward_plans.ARCHITECTURE, dtype, dim, value_dim, widest)
