"""What the attention benchmark measures: dense, causal and packed calls, and their floating-point operations."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

PASSES = ("forward", "forward+backward")


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of attention.

    Attributes:
      batch: batch rows.
      length: queries and keys; keys alone where `queries` says otherwise.
      heads: query heads.
      kv_heads: key and value heads.
      head_dim: of queries, keys and values.
      is_causal: causal.
      documents: for packed rows, the documents' lengths in each batch row.
      queries: queries of a step of decoding, which see all keys; 0: as many as keys.
    """

    batch: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    is_causal: bool = False
    documents: tuple[tuple[int, ...], ...] | None = None
    queries: int = 0

    @property
    def name(self) -> str:
        """For tables."""
        if self.documents is not None:
            lengths = [length for row in self.documents for length in row]
            return f"packed, {len(lengths)} documents of {int(np.median(lengths))} in the median"
        if self.queries:
            return f"{self.queries} of {self.length}, {self.batch} x {self.heads} heads over {self.kv_heads}"
        return f"d{self.head_dim} {'causal' if self.is_causal else 'full'} {self.length}"

    @property
    def segment_ids(self) -> np.ndarray | None:
        """(batch, length) int32 of packed rows; None for others."""
        if self.documents is None:
            return None
        return np.stack([np.repeat(np.arange(len(row)), row) for row in self.documents]).astype(np.int32)

    def flop(self, passes: str) -> float:
        """4 D for each pair of a query and a key that sees it, halved for causal ones, in each head; 2.5 times as much
        backward."""
        if self.queries:
            return 4.0 * self.queries * self.length * self.head_dim * self.heads * self.batch
        rows = self.documents if self.documents is not None else ((self.length,),) * self.batch
        pairs = sum(float(length) ** 2 for row in rows for length in row) / (2 if self.is_causal else 1)
        return 4 * pairs * self.head_dim * self.heads * (1.0 if passes == "forward" else 3.5)


def dense_cases(
    head_dims: Sequence[int], lengths: Sequence[int], tokens: int, hidden: int, group: int = 1
) -> Iterator[Case]:
    """Full and causal calls of as many tokens and heads as `tokens` and `hidden` say."""
    for head_dim in head_dims:
        for is_causal in (False, True):
            for length in lengths:
                heads = max(hidden // head_dim, 1)
                yield Case(max(tokens // length, 1), length, heads, max(heads // group, 1), head_dim, is_causal)


def packed_case(median: int, rows: int, length: int, heads: int, head_dim: int) -> Case:
    """Causal rows filled with documents of log-normal lengths (sigma 1, at least 16 tokens), the last of a row cut."""
    rng, documents = np.random.default_rng(0), []
    for _ in range(rows):
        left, row = length, []
        while left:
            row.append(int(min(left, max(16, rng.lognormal(np.log(median), 1.0)))))
            left -= row[-1]
        documents.append(tuple(row))
    return Case(rows, length, heads, heads, head_dim, True, tuple(documents))
