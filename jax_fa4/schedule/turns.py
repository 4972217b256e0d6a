"""What it costs that items add to shared sums in a fixed order, and which order of a backward pass costs least.

In the backward pass an item is a tile of keys, which adds to the sums of every tile of queries that it visits. For
equal bits in every run each of these has a fixed order of items, and an item waits for its turn. Items wait only for
those that were handed out before them, so nothing hangs; which these are is what an order decides:

    first   those of the first keys come first, as without turns: under a causal mask the longest ones
    last    those of the last keys: under a causal mask the shortest first, and as all rise from the diagonal, of two
            that start together the one with the earlier keys meets each tile a step after the other, so nobody waits

So `last` has no waits, but a long item may start late; `first` ends evenly, but many items of one head at a time wait
for each other. Where there is no causal mask both are the same. (FlashAttention-4, arXiv 2603.05451, section 3.2.)
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import math
from collections.abc import Iterator

import numpy as np

from jax_fa4.schedule.order import WorkGrid

# Clocks from the start of an addition until the next item sees its flag: a bulk reduction into L2, its completion, a
# release and an acquire, each about as long as one trip to L2. Estimated; choices hardly change from 500 to 3000.
LATENCY = 1500
MAX_ROW_TILES = 32  # of a head in a simulation that chooses: longer sequences are taken for shorter ones


@dataclasses.dataclass(frozen=True)
class Band:
    """Columns that a row sees: row + offset - left .. row + offset + right."""

    offset: int
    left: int
    right: int


def walks(grid: WorkGrid, band: Band, row_tiles: int, *, last_first: bool) -> Iterator[tuple[int, np.ndarray, int]]:
    """Items in the order in which they are handed out: head, the column tiles in the order of the kernel's walk, and
    how many of these, the first ones, are masked."""
    column_tiles = -(-grid.columns // grid.column_tile)
    rows = range(row_tiles)
    for section in range(0, grid.heads, grid.section_heads):
        for row in reversed(rows) if last_first else rows:
            first, last = row * grid.row_tile, (row + 1) * grid.row_tile - 1
            begin = max(first + band.offset - band.left, 0) // grid.column_tile
            end = min(-(-(last + band.offset + band.right + 1) // grid.column_tile), column_tiles)
            full_begin = -(-max(last + band.offset - band.left, 0) // grid.column_tile)
            full_end = (first + band.offset + band.right + 1) // grid.column_tile
            tiles = np.arange(begin, max(end, begin))
            is_full = (tiles >= full_begin) & (tiles < full_end)
            walk = np.concatenate([tiles[~is_full], tiles[is_full]])
            for head in range(section, min(section + grid.section_heads, grid.heads)):
                yield head, walk, int((~is_full).sum())


def clocks_in_turn(
    grid: WorkGrid, band: Band, row_tiles: int, *, last_first: bool, latency: int | None = LATENCY
) -> int:
    """Clocks until the last item is done, items handed out in order to whichever slot is free; `latency` None: without
    turns.

    A tile's sums lie in tensor memory until those of the tile before are on their way, which is when their turn comes;
    so a wait of one tile stops the item two tiles later.
    """
    free = [0] * grid.slots
    turn: dict[tuple[int, int], int] = {}
    latest = 0
    for head, walk, masked in walks(grid, band, row_tiles, last_first=last_first):
        computed = heapq.heappop(free) + grid.cost.overhead
        taken = sent = computed
        for place, tile in enumerate(walk.tolist()):
            computed = max(computed + (grid.cost.partial if place < masked else grid.cost.full), taken)
            taken = max(computed, sent)
            if latency is None:
                continue
            begin = max(taken, turn.get((head, tile), 0))
            sent = turn[head, tile] = begin + latency
        end = max(computed, sent)
        heapq.heappush(free, end)
        latest = max(latest, end)
    return latest


@functools.lru_cache(maxsize=256)
def is_last_first_better(grid: WorkGrid, band: Band, rows: int) -> bool:
    """Whether items that add in turn take less time if those of the last of `rows` rows come first."""
    row_tiles = -(-rows // grid.row_tile)
    # Sections come one after the other, so one tells of all; more heads than slots are as good as as many.
    section = dataclasses.replace(grid, heads=min(grid.section_heads, grid.slots), shared_bytes=0)
    if row_tiles > MAX_ROW_TILES:
        shorter = MAX_ROW_TILES / row_tiles
        section = dataclasses.replace(section, columns=math.ceil(grid.columns * shorter))
        band, row_tiles = dataclasses.replace(band, offset=round(band.offset * shorter)), MAX_ROW_TILES
    first, last = (clocks_in_turn(section, band, row_tiles, last_first=is_last) for is_last in (False, True))
    return last <= first
