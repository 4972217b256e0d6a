"""The benchmark of blockwise, at sizes that take seconds."""

from benchmarks import blockwise_cpu


def test_every_case_gives_rows_and_keeps_count():
    calls = []
    lengths = {"causal": 16, "packed": 24, "memory": 4096}
    cases = ["causal", "packed", "memory"]
    rows = blockwise_cpu.measure(cases, lengths, 3, 1, 0, lambda: calls.append(1))
    assert len(rows) == 2 + 4 + 1
    assert len(calls) == blockwise_cpu.steps(cases, 1)
    assert all(row.baseline > 0 and row.ours > 0 for row in rows)
    assert rows[-1].unit == "bytes"
    assert rows[-1].ratio > 8  # memory is linear in the length, the baseline's is not
