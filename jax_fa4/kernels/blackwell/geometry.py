"""Sizes that the Blackwell forward's plans and device code share: what a tile is, and what a fragment of it."""

STAGES = 2  # tiles of query rows of a CTA, each with a softmax warpgroup of its own
TILE_ROWS = 128  # query rows of a tile: lanes of tensor memory, threads of a warpgroup
KEY_TILE = 128
WARPS_PER_GROUP = 4
ANSWERS = 2  # of cluster launch control that shared memory holds: the loads may be an item ahead of the rest
FRAGMENT = 32  # columns of a row that are exponentiated and stored together
FRAGMENTS = KEY_TILE // FRAGMENT
HEAD_FRAGMENTS = 3  # fragments of probs that suffice for the product with the values to start


def emulated_pairs(elements: int) -> tuple[int, ...]:
    """Pairs that the polynomial computes in each fragment of a row, of `elements` in all.

    The inner fragments come first: early in a row the special-function unit is idle anyway, and at its end the tensor
    core waits for the last fragment. Raises ValueError where `elements` is odd or more than half of a row.
    """
    pairs, counts, most = elements // 2, [0] * FRAGMENTS, FRAGMENT // 4
    for group in ((1, 2), (0,), (3,)):
        share = min(pairs, most * len(group))
        for place, fragment in enumerate(group):
            counts[fragment] = (share + len(group) - 1 - place) // len(group)
        pairs -= share
    if pairs or elements % 2 or elements < 0:
        raise ValueError(f"emulated is {elements}; it takes even numbers up to {KEY_TILE // 2}.")
    return tuple(counts)
