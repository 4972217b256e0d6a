"""Packing keeps every byte once, documents whole and apart, and rows nearly full."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.train_lm import data

documents_and_length = st.tuples(st.lists(st.binary(max_size=40), max_size=30), st.integers(1, 16))


@given(documents_and_length)
def test_every_byte_is_packed_exactly_once(drawn):
    documents, row_length = drawn
    rows = data.pack(documents, row_length)
    packed = rows.tokens[rows.segment_ids != data.PADDING_ID]
    expected = np.frombuffer(b"".join(documents), np.uint8)
    np.testing.assert_array_equal(np.bincount(packed, minlength=256), np.bincount(expected, minlength=256))


@given(documents_and_length)
def test_each_segment_is_one_piece_of_one_document(drawn):
    documents, row_length = drawn
    rows = data.pack(documents, row_length)
    found = []
    for tokens, ids, positions in zip(*rows, strict=True):
        runs = [(key, list(group)) for key, group in itertools.groupby(range(row_length), key=lambda i: ids[i])]
        assert len({key for key, _ in runs}) == len(runs), "an id appears in two places of a row"
        assert [key for key, _ in runs if key >= 0] == list(range(ids.max() + 1))
        assert all(key >= 0 for key, _ in runs[:-1]), "padding before a document"
        for key, places in runs:
            expected_positions = range(len(places)) if key >= 0 else [0] * len(places)
            assert positions[places].tolist() == list(expected_positions)
            if key >= 0:
                found.append(bytes(tokens[places].astype(np.uint8)))
    pieces = [piece for document in documents for piece in data.cut(document, row_length)]
    assert sorted(found) == sorted(pieces)


@given(st.lists(st.integers(1, 64), max_size=60))
def test_rows_are_nearly_full(lengths):
    rows = data.assign_rows(lengths, 64)
    assert sorted(itertools.chain(*rows)) == list(range(len(lengths)))
    fill = [sum(lengths[index] for index in row) for row in rows]
    assert all(total <= 64 for total in fill)
    # No two rows could be merged: a later row would have gone into the earlier one.
    assert all(first + second > 64 for first, second in itertools.combinations(fill, 2))


def test_shared_rows_come_with_short_documents_first():
    rows = data.pack([b"a" * 9, b"b", b"c" * 5, b"d" * 5, b"e" * 10], 10)
    shared = rows.shared()
    assert (shared.documents_per_row == 2).all()
    assert [bytes(row[:6].astype(np.uint8)) for row in shared.tokens] == [b"cccccd", b"aaaaaa"]
    with pytest.raises(ValueError, match="no row holds two documents"):
        data.pack([b"alone"], 8).shared()


def test_split_depends_on_names_alone():
    sources = {f"module{index}.py": str(index).encode() for index in range(1000)}
    training, held_out = data.split_by_file(sources, 5)
    assert len(training) + len(held_out) == 1000
    assert 20 <= len(held_out) <= 80
    fewer = {name: content for name, content in sources.items() if name < "module5"}
    assert set(data.split_by_file(fewer, 5)[1]) == set(held_out) & set(fewer.values())


def test_library_sources_are_found():
    sources = data.library_sources()
    assert {"argparse.py", "json/decoder.py"} <= set(sources)
    assert not any(name.startswith(("site-packages/", "test/")) for name in sources)


def test_batches_visit_every_row_once_an_epoch():
    rows = data.pack([bytes([index]) * 4 for index in range(10)], 4)
    stream = data.batches(rows, 5, seed=0)
    epoch = [next(stream).tokens[:, 0] for _ in range(2)]
    assert sorted(np.concatenate(epoch)) == list(range(10))
    with pytest.raises(ValueError, match="batch_size 11"):
        next(data.batches(rows, 11, seed=0))


def test_unigram_entropy():
    rows = data.pack([b"ab" * 8, b"c"], 32)
    share = np.array([8, 8, 1]) / 17
    assert data.unigram_entropy(rows) == pytest.approx(-(share * np.log2(share)).sum())
