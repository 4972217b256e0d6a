"""Plans: what the constructor refuses, the shared-memory map, the grid, and the table of architectures."""

from __future__ import annotations

import dataclasses

import pytest

from jax_fa4.kernels.plan import (
    ARCHITECTURES,
    Event,
    Extent,
    KernelPlan,
    Parameter,
    PlanError,
    Role,
    SharedBuffer,
    TensorBuffer,
    TensorMap,
    architecture_for,
)
from jax_fa4.kernels.plans import bundled_plans, preprocess_plan

GOOD = KernelPlan(
    kernel="example",
    architecture="sm_100f",
    source="jax_fa4.kernels.preprocess",
    options=(("tile", 128),),
    operands=("query",),
    results=("out",),
    integers=("rows", "stride"),
    floats=("scale",),
    parameters=(Parameter("tensor_map", "query_tiles"), Parameter("result", "out"), Parameter("float32", "scale")),
    tensor_maps=(TensorMap("query_tiles", "query", "bfloat16", ("rows", "rows"), ("stride",), (64, 128)),),
    grid=(Extent((("rows", 128),)), Extent(), Extent()),
    roles=(Role("softmax", 4, 192), Role("load", 1, 48), Role("mma", 1, 48)),
    shared=(
        SharedBuffer("query", 32768, stages=2),
        SharedBuffer("out", 32768, over="query"),
        SharedBuffer("sums", 512),
    ),
    tensor_memory=(TensorBuffer("scores", 0, 128), TensorBuffer("probs", 0, 64, over=("scores",))),
    events=(Event("scores_ready", (("mma", 1),), ("softmax",), count=1, stages=2),),
)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "sm_80"}, "'sm_80'; it takes one of sm_90a, sm_100f"),
        ({"shared": (SharedBuffer("query", 232449),)}, "bytes of shared memory; a block has 232448"),
        ({"tensor_memory": (TensorBuffer("scores", 400, 113),)}, r"columns \[400, 513\); sm_100f has 512"),
        ({"tensor_memory": (TensorBuffer("a", 0, 65), TensorBuffer("b", 64, 8))}, "'b' and 'a' share columns"),
        ({"architecture": "sm_90a"}, "sm_90a has 0"),
        ({"roles": (Role("softmax", 33),)}, "1056 threads"),
        ({"roles": (Role("softmax", 4, 100), Role("mma", 1))}, "100 registers; multiples of 8"),
        (
            {"roles": (Role("softmax", 16, 136), Role("mma", 1))},
            "69632 registers per block; a launch of its threads allots 65280",
        ),
        ({"events": (Event("ready", (("mma", 1),), ("softmax",), count=2),)}, "counts 2 arrivals and its roles make 1"),
        ({"events": (Event("ready", (("mma", 1),), (), count=1),)}, "nobody waits for event 'ready'"),
        ({"events": (Event("ready", (("store", 1),), ("mma",), count=1),)}, "names store, no roles"),
        ({"events": (Event("ready", (("mma", 33),), ("softmax",), count=33),)}, "fewer threads than its 33"),
        ({"shared": (SharedBuffer("out", 8, over="query"),)}, "over 'query', which is not declared before"),
        ({"shared": (SharedBuffer("a", 8), SharedBuffer("b", 9, over="a"))}, "'b' is larger than 'a'"),
        ({"parameters": (Parameter("operand", "key"),)}, "'key' is no operand"),
        ({"grid": (Extent((("columns", 1),)), Extent(), Extent())}, "use columns, no integers"),
        ({"operands": ("query", "query")}, "buffer query named more than once"),
    ],
)
def test_refuses(changes: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        dataclasses.replace(GOOD, **changes)  # type: ignore[arg-type]


def test_shared_map_and_description() -> None:
    assert GOOD.shared_offsets == {"query": 0, "out": 0, "sums": 65536}
    assert GOOD.dynamic_shared_bytes == 65536 + 512 + 2 * 8
    assert GOOD.threads == 192
    text = GOOD.describe()
    for word in ("scores_ready", "1 mma -> softmax", "[0, 64) over scores", "2 x 32768 bytes at 0", "ceil(rows/128)"):
        assert word in text


def test_plans_hash_by_content() -> None:
    again = preprocess_plan("sm_90a", "bfloat16", 128, 128)
    assert again == preprocess_plan("sm_90a", "bfloat16", 128, 128)
    assert again.digest != preprocess_plan("sm_90a", "float16", 128, 128).digest
    keys = [plan.key for plan in bundled_plans()]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    ("capability", "name"),
    [
        ((8, 0), None),
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100f"),
        ((10, 1), None),
        ((10, 3), "sm_100f"),
        ((11, 0), None),
        ((12, 0), None),
    ],
)
def test_architecture_for(capability: tuple[int, int], name: str | None) -> None:
    assert architecture_for(capability) is (ARCHITECTURES[name] if name else None)


@pytest.mark.parametrize("value_dim", [8, 16, 40, 64, 72, 96, 128, 192, 256, 512, 1024])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_preprocess_covers_every_row(dtype: str, value_dim: int) -> None:
    plan = preprocess_plan("sm_90a", dtype, value_dim, value_dim)
    rows, lanes = int(plan.option("rows")), int(plan.option("lanes"))
    assert 128 % rows == 0, "row tiles must divide the padded length"
    assert rows % (plan.threads // lanes) == 0
    assert plan.grid[1].evaluate({"padded_length": 384}) * rows == 384


@pytest.mark.parametrize(("dtype", "value_dim"), [("bfloat16", 60), ("bfloat16", 0), ("float32", 1028), ("int8", 64)])
def test_preprocess_refuses(dtype: str, value_dim: int) -> None:
    with pytest.raises(PlanError, match=f"is {value_dim}|is '{dtype}'"):
        preprocess_plan("sm_90a", dtype, value_dim, 64)
