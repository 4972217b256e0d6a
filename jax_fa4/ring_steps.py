r"""Which queries of a ring's devices meet which keys, step by step, and through what mask.

Each device's share of the sequence consists of one chunk ("contiguous") or of two ("zigzag": one from the front, one
from the back, so that all devices have the same work under a causal mask). Chunk a of queries and chunk b of keys are a
problem of their own, whose diagonal lies elsewhere. Chunks that lie side by side on a device are computed as one block
wherever one mask describes them together, also where they are far apart in the sequence: under a causal mask, layout
"zigzag", every step is one block on every device.

    own keys    0 0 7 7        keys of an earlier device    1 1 6 6      of a later one    0 0 7 7
             0  \ . . .                                  0  | | . .                    1   . . . .
             0  | \ . .                                  0  | | . .                    1   . . . .
             7  | | \ .                                  7  | | . .                    6   | | | |
             7  | | | \                                  7  | | . .                    6   | | | |

All of this is known when a call is traced. Steps in which no device sees anything are left out.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jax_fa4.schedule.tiles import MaskRule

Chunks = tuple[tuple[int, ...], ...]  # for each device, the chunks of the sequence that it holds, in ascending order
Sizes = tuple[int, int]  # the lengths of a chunk of queries and of one of keys

LAYOUTS = ("contiguous", "zigzag")


def chunks_of(layout: str, devices: int) -> Chunks:
    """Which chunks of a sequence each device holds.

    Args:
      layout: "contiguous": device d holds chunk d of `devices`; "zigzag": chunks d and 2 * devices - 1 - d of twice as
        many.
      devices: how many there are.

    Raises:
      ValueError: the layout is neither.
    """
    if layout == "contiguous":
        return tuple((device,) for device in range(devices))
    if layout == "zigzag":
        return tuple((device, 2 * devices - 1 - device) for device in range(devices))
    raise ValueError(f"layout is {layout!r}. One of {', '.join(map(repr, LAYOUTS))} is accepted.")


class Slots(NamedTuple):
    """Chunks `first` to `last` (not counted) of those that a device holds, in its own order."""

    first: int
    last: int

    @property
    def all(self) -> range:
        """Each of them."""
        return range(self.first, self.last)


class Block(NamedTuple):
    """Slots of a device's queries with slots of the keys that it holds in a step, as one problem with one mask."""

    queries: Slots
    keys: Slots
    rule: MaskRule


Work = tuple[Block, ...]  # what one device computes in one step


class Step(NamedTuple):
    """What devices do with the keys of the device `shift` places before them.

    Attributes:
      shift: how far these keys have come.
      works: what occurs on some device; () where nothing is seen.
      choice: for each device, which of `works` is its own.
    """

    shift: int
    works: tuple[Work, ...]
    choice: tuple[int, ...]


def chunk_rule(rule: MaskRule, query_chunk: int, key_chunk: int, sizes: Sizes) -> MaskRule | None:
    """The mask between two chunks, in its plainest form; None where nothing is visible.

    `rule` is that of the whole sequence; its lengths are not read.
    """
    queries, keys = sizes
    offset = rule.diagonal_offset + query_chunk * queries - key_chunk * keys
    lowest, highest = -(queries - 1) - offset, keys - 1 - offset  # of j - i - offset over the pairs of the chunks
    left, right = rule.band
    if (left is not None and highest < -left) or (right is not None and lowest > right):
        return None
    left = None if left is None or lowest >= -left else left
    right = None if right is None or highest <= right else right
    if left is None and right is None:
        return MaskRule(queries, keys)
    is_causal = right == 0
    return MaskRule(queries, keys, is_causal, (left, None if is_causal else right), offset)


class _Share(NamedTuple):
    """The chunks of queries and of keys that one device holds in one step, and the mask of the whole sequence."""

    rule: MaskRule
    query_chunks: Sequence[int]
    key_chunks: Sequence[int]
    sizes: Sizes

    def between(self, query_slot: int, key_slot: int) -> MaskRule | None:
        """The mask of a slot of queries with a slot of keys."""
        return chunk_rule(self.rule, self.query_chunks[query_slot], self.key_chunks[key_slot], self.sizes)

    def cover(self, queries: Slots, keys: Slots) -> Work:
        """The blocks, as few as there may be, that are together what these queries see of these keys."""
        visible = [(i, j) for i in queries.all for j in keys.all if self.between(i, j) is not None]
        if not visible:
            return ()
        queries, keys = (Slots(min(slots), max(slots) + 1) for slots in zip(*visible, strict=True))
        joined = self._joined(queries, keys)
        if joined is not None:
            return (Block(queries, keys, joined),)
        cuts = [[(Slots(i, i + 1), keys) for i in queries.all], [(queries, Slots(j, j + 1)) for j in keys.all]]
        covers = [sum((self.cover(*part) for part in cut), ()) for cut in cuts if len(cut) > 1]
        return min(covers, key=len)

    def _joined(self, queries: Slots, keys: Slots) -> MaskRule | None:
        """The mask of slots as if their chunks lay side by side in the sequence; None where no mask is that of all."""
        candidates = [MaskRule(0, 0)]
        for i, j in ((queries.first, keys.first), (queries.last - 1, keys.last - 1)):
            # The diagonal as it lies between these two, drawn on through the others.
            place = self.query_chunks[i] - i + queries.first, self.key_chunks[j] - j + keys.first
            offset = self.rule.diagonal_offset + place[0] * self.sizes[0] - place[1] * self.sizes[1]
            candidates.append(MaskRule(0, 0, self.rule.is_causal, self.rule.window, offset))
        for candidate in candidates:
            if all(
                chunk_rule(candidate, i - queries.first, j - keys.first, self.sizes) == self.between(i, j)
                for i in queries.all
                for j in keys.all
            ):
                lengths = len(queries.all) * self.sizes[0], len(keys.all) * self.sizes[1]
                return chunk_rule(candidate, 0, 0, lengths)
        return None


def work_of(rule: MaskRule, query_chunks: Sequence[int], key_chunks: Sequence[int], sizes: Sizes) -> Work:
    """What a device that holds these chunks computes."""
    share = _Share(rule, query_chunks, key_chunks, sizes)
    return share.cover(Slots(0, len(query_chunks)), Slots(0, len(key_chunks)))


@functools.lru_cache(maxsize=256)
def plan_steps(rule: MaskRule, query_chunks: Chunks, key_chunks: Chunks, sizes: Sizes) -> tuple[Step, ...]:
    """The steps in which something is visible.

    Args:
      rule: the mask of the whole sequence; its lengths are not read.
      query_chunks: the chunks of queries that each device holds.
      key_chunks: the same for keys, before they travel.
      sizes: length of a chunk of queries and of one of keys.
    """
    devices = len(query_chunks)
    steps = []
    for shift in range(1 if len(set(key_chunks)) == 1 else devices):
        own = [work_of(rule, query_chunks[d], key_chunks[(d - shift) % devices], sizes) for d in range(devices)]
        works = tuple(dict.fromkeys(own))
        if any(works):
            steps.append(Step(shift, works, tuple(works.index(one) for one in own)))
    return tuple(steps)


def visible_pairs_of(rule: MaskRule) -> int:
    """How many pairs of a query and a key a band leaves, counted row by row."""
    rows = np.arange(rule.query_length, dtype=np.int64) + rule.diagonal_offset
    left, right = rule.band
    begin = np.zeros_like(rows) if left is None else np.clip(rows - left, 0, rule.key_length)
    end = np.full_like(rows, rule.key_length) if right is None else np.clip(rows + right + 1, 0, rule.key_length)
    return int(np.maximum(end - begin, 0).sum())


def slowest_work(steps: Sequence[Step]) -> int:
    """Pairs of a query and a key that the slowest device of each step computes, summed: what a call waits for."""
    return sum(max(sum(visible_pairs_of(block.rule) for block in work) for work in step.works) for step in steps)
