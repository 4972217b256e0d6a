"""Documents into rows: the sources of Python's own standard library, packed so that no document is padded to a row.

A row holds several documents one after the other. `segment_ids` says which is which, and attention must keep them
apart; padding at a row's end has the id -1. Everything here is NumPy, and the same files always give the same rows.
"""

import bisect
import hashlib
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

PADDING_ID = -1
# Test suites are two thirds of the library's bytes and read unlike the rest; the others are not part of the library.
SKIPPED_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})


class Rows(NamedTuple):
    """Packed documents; three int32 arrays of shape (rows, row length)."""

    tokens: np.ndarray  # bytes, 0 in padding
    segment_ids: np.ndarray  # 0, 1, 2, ... within a row, PADDING_ID in padding
    positions: np.ndarray  # 0, 1, 2, ... within a document, 0 in padding

    def take(self, rows: np.ndarray | slice) -> "Rows":
        """The given rows only."""
        return Rows(*(field[rows] for field in self))

    @property
    def documents_per_row(self) -> np.ndarray:
        """How many documents (or pieces of long ones) each row holds, shape (rows,)."""
        return self.segment_ids.max(axis=1) + 1

    def shared(self) -> "Rows":
        """The rows of two documents or more, those without a long document first.

        Raises:
          ValueError: there is none.
        """
        rows = np.flatnonzero(self.documents_per_row >= 2)
        if not rows.size:
            raise ValueError("no row holds two documents: pack more files, or shorter ones, or longer rows")
        longest_document = self.positions[rows].max(axis=1)
        return self.take(rows[np.argsort(longest_document, kind="stable")])


def library_sources() -> dict[str, bytes]:
    """Name and content of every module of the standard library that runs this program, sorted by name."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = (path for path in root.rglob("*.py") if not SKIPPED_FOLDERS.intersection(path.relative_to(root).parts))
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in sorted(paths)}


def split_by_file(sources: dict[str, bytes], held_out_percent: int) -> tuple[list[bytes], list[bytes]]:
    """Training and held-out documents.

    A file's side depends on a hash of its name alone, so it never changes when other files come or go.
    """
    training: list[bytes] = []
    held_out: list[bytes] = []
    for name, content in sources.items():
        bucket = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % 100
        (held_out if bucket < held_out_percent else training).append(content)
    return training, held_out


def cut(document: bytes, row_length: int) -> list[bytes]:
    """The document in pieces of at most `row_length` bytes, in order; an empty document has none."""
    return [document[start : start + row_length] for start in range(0, len(document), row_length)]


def assign_rows(lengths: Sequence[int], row_length: int) -> list[list[int]]:
    """Best-fit decreasing: which pieces share a row, as lists of indices into `lengths`.

    Longest pieces first; each goes into the fullest row that still has room for it, or opens a new one.
    """
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []  # (free bytes, row), sorted
    for piece in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        place = bisect.bisect_left(open_rows, (lengths[piece], 0))
        if place == len(open_rows):
            free, row = row_length, len(rows)
            rows.append([])
        else:
            free, row = open_rows.pop(place)
        rows[row].append(piece)
        if free > lengths[piece]:
            bisect.insort(open_rows, (free - lengths[piece], row))
    return rows


def pack(documents: Sequence[bytes], row_length: int) -> Rows:
    """Every byte of every document once, in rows of `row_length`; longer documents are cut into row-size pieces."""
    pieces = [piece for document in documents for piece in cut(document, row_length)]
    assignment = assign_rows([len(piece) for piece in pieces], row_length)
    shape = (len(assignment), row_length)
    rows = Rows(np.zeros(shape, np.int32), np.full(shape, PADDING_ID, np.int32), np.zeros(shape, np.int32))
    for row, members in enumerate(assignment):
        start = 0
        for segment_id, member in enumerate(members):
            place = (row, slice(start, start + len(pieces[member])))
            rows.tokens[place] = np.frombuffer(pieces[member], np.uint8)
            rows.segment_ids[place] = segment_id
            rows.positions[place] = np.arange(len(pieces[member]))
            start += len(pieces[member])
    return rows


def batches(rows: Rows, batch_size: int, seed: int) -> Iterator[Rows]:
    """Batches without end: a new order of the rows each epoch, the last incomplete batch of an epoch left out."""
    if batch_size > len(rows.tokens):
        raise ValueError(f"batch_size {batch_size} is more than the {len(rows.tokens)} rows there are")
    generator = np.random.default_rng(seed)
    while True:
        order = generator.permutation(len(rows.tokens))
        for start in range(0, len(order) - batch_size + 1, batch_size):
            yield rows.take(order[start : start + batch_size])


def unigram_entropy(rows: Rows) -> float:
    """Bits per byte of the best model that looks at no context: what training has to beat by far."""
    counts = np.bincount(rows.tokens[rows.segment_ids != PADDING_ID], minlength=256)
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log2(share)).sum())
