"""Few queries against many keys on the emulated GPU: parts of keys, heads as rows, merged, against float64."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fa4
from jax_fa4 import arguments
from tests.kernels.forward_checks import compare, draw

pytestmark = pytest.mark.usefixtures("hopper")

LAST = {"is_causal": True, "causal_alignment": "bottom_right"}


@pytest.mark.parametrize(
    ("length", "keys", "heads", "head_dim", "options"),
    [
        (1, 640, (8, 2), 128, {"key_splits": 4}),
        (5, 640, (4, 2), 64, {"key_splits": 5, **LAST}),
        (16, 333, (2, 2), 128, {"key_splits": 3, **LAST}),
        (3, 400, (6, 2), 64, {"key_splits": 4, "local_window_size": (150, 0), "causal_alignment": "bottom_right"}),
        (2, 320, (4, 1), 128, {"key_splits": 2, "key_value_seq_lengths": np.array([100, 250])}),
        (4, 300, (6, 6), 64, {"key_splits": 3}),
        (1, 1200, (3, 1), 96, {"key_splits": 20}),
    ],
    ids=str,
)
def test_parts_are_merged_exactly(
    length: int, keys: int, heads: tuple[int, int], head_dim: int, options: dict[str, Any]
) -> None:
    tensors = draw(length, (2, length, heads[0], head_dim), keys, heads[1], "bfloat16")
    run = jax.jit(
        lambda *tensors: jax_fa4.attention(*tensors, return_residual=True, implementation="emulated", **options)
    )
    out, lse = run(*tensors)
    whole = {name: value for name, value in options.items() if name != "key_splits"}
    compare(arguments.read_call(*tensors, **whole), out, lse)


@pytest.mark.parametrize("kind", ["known", "traced"])
@pytest.mark.parametrize(("batch", "length", "heads"), [(3, 1, (8, 2)), (5, 4, (6, 2)), (3, 4, (8, 1))], ids=str)
def test_every_part_reads_the_queries_of_its_batch_row(batch: int, length: int, heads: Any, kind: str) -> None:
    """A cache of which each row has filled a share, NaN in the rest; parts that see nothing; one KV head."""
    query, key, value = draw(batch, (batch, length, heads[0], 64), 384, heads[1], "bfloat16")
    lengths = np.array([130, 384, 1, 256, 7])[:batch].astype(np.int32)
    for row, filled in enumerate(lengths):
        key, value = key.at[row, filled:].set(jnp.nan), value.at[row, filled:].set(jnp.inf)

    def run(query: Any, key: Any, value: Any, given: Any) -> Any:
        options: dict[str, Any] = {"key_value_seq_lengths": lengths if kind == "known" else given}
        options |= {"key_splits": 3, "return_residual": True, "implementation": "emulated"}
        return jax_fa4.attention(query, key, value, **options)

    out, lse = jax.jit(run)(query, key, value, jnp.asarray(lengths))
    compare(arguments.read_call(query, key, value, key_value_seq_lengths=lengths), out, lse)


def operations(batch: int, length: int, lengths: str, keys: int = 32768, **options: Any) -> Counter[str]:
    """What a compiled program of 64 query heads over 8 does, apart from naming its arrays."""
    shapes = [(batch, length, 64, 128), *[(batch, keys, 8, 128)] * 2]
    tensors = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]

    def run(query: Any, key: Any, value: Any, given: Any) -> Any:
        filled = {"none": None, "known": np.arange(1, batch + 1) * (keys // (batch + 1)), "traced": given}[lengths]
        options["key_value_seq_lengths"] = filled
        return jax_fa4.attention(query, key, value, implementation="emulated", **options)

    text = jax.jit(run).lower(*tensors, jax.ShapeDtypeStruct((batch,), jnp.int32)).compile().as_text()
    lines = text[text.index("ENTRY") :].splitlines()[1:]
    found = Counter(match[1] for match in (re.search(r" = .*? ([a-z-]+)\(", line) for line in lines) if match)
    return Counter({name: found[name] for name in found if name not in NAMES})


NAMES = ("parameter", "constant", "bitcast", "tuple", "get-tuple-element")


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    ("length", "lengths", "options", "calls", "fusions"),
    [
        (1, "none", {}, 2, 0),  # attention and merge, and nothing else at all
        (1, "none", LAST, 2, 0),
        (4, "none", {}, 2, 1),  # heads to rows
        (4, "none", LAST, 2, 1),
        (1, "known", {}, 3, 0),  # a copy of the tiles with keys that nobody sees
        (4, "known", {}, 3, 1),
        (1, "traced", {}, 5, 1),  # lengths of the parts; rows, table, hidden tiles
        (1, "traced", LAST, 5, 1),
        (4, "traced", {}, 5, 2),
    ],
    ids=str,
)
def test_nothing_runs_that_is_not_needed(
    batch: int, length: int, lengths: str, options: dict[str, Any], calls: int, fusions: int
) -> None:
    """Spreading one query over the parts took as long as half the merge."""
    found = operations(batch, length, lengths, **options)
    assert found["custom-call"] == calls
    assert found.total() - calls <= fusions, found


@pytest.mark.parametrize(
    ("length", "lengths", "calls", "fusions"),
    [(1, "none", 1, 0), (1, "known", 2, 0), (1, "traced", 4, 3), (4, "none", 1, 2)],
)
def test_packed_heads_of_one_query_stay_where_they_are(length: int, lengths: str, calls: int, fusions: int) -> None:
    """Enough batch rows for every multiprocessor: no parts; one call reads the queries and writes the results by their
    strides. Of more queries the heads are turned before and after."""
    found = operations(32, length, lengths, 8192)
    assert found["custom-call"] == calls
    assert found.total() - calls <= fusions, found


def test_sinks_and_ids_join_once() -> None:
    """Sinks join in the merge, so that the kernel needs none; ids that lie scattered are compared in every part."""
    tensors = draw(9, (1, 2, 4, 64), 300, 2, "float16")
    ids = (np.array([[1, 0]]), np.arange(300)[None] % 3)
    options: dict[str, Any] = {"segment_ids": ids, "sinks": jnp.array([0.5, -2.0, 1.0, 0.0])}
    out, lse = jax_fa4.attention(*tensors, return_residual=True, implementation="emulated", key_splits=3, **options)
    compare(arguments.read_call(*tensors, **options), out, lse)


def test_explain_says_how_keys_are_cut() -> None:
    query, key = (
        jax.ShapeDtypeStruct((1, length, heads, 128), jnp.bfloat16) for length, heads in ((1, 64), (32768, 8))
    )
    report = str(jax_fa4.explain(query, key, key, implementation="emulated", **LAST))
    assert "16 parts of 2048" in report
    assert "packed" in report
    report = str(jax_fa4.explain(query, key, key, implementation="emulated", key_splits=1, **LAST))
    assert "parts of" not in report
