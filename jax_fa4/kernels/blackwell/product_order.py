"""The order of the five matrix products of the backward, as tables that the kernel's issuing warp walks.

For a tile of keys and the t-th of the tiles of queries that it meets, all with keys as rows:

    scores        S  = K Q^T       into tensor memory; becomes probs P in place
    grad_probs    dP = V dO^T      into tensor memory; becomes grad_scores dS in place, and in shared memory
    grad_value    dV += P dO       P from tensor memory
    grad_key      dK += dS Q       dS from tensor memory
    grad_query    dQ = dS^T K      dS from shared memory; taken away tile by tile

The products of tile t + 1 that come before the softmax of tile t + 1 are issued between those that come after the
softmax of tile t, so that the tensor core has work while the softmax runs. The tensor core does products in the order
in which they are issued; so one that overwrites what an earlier one reads needs no event, and a wait says only that
other warps have written an operand, or have read what is overwritten.

A table is the body of the loop over t. Before the loop come its products of tile t + 1, with t = -1; after it those of
tile t, with t the last. Nothing here needs a compiler: a model checker runs the same tables.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Wait:
    """Wait for an event of the product's tile, or of the tile `behind` it (negative: ahead of it)."""

    event: str
    behind: int = 0


@dataclass(frozen=True)
class Issue:
    """One product of tile t, or of tile t + 1 (`is_next`); then commits, which make their events happen when all
    products so far are done."""

    product: str
    is_next: bool
    waits: tuple[Wait, ...] = ()
    commits: tuple[str, ...] = ()


SINGLE = {
    "S": Issue("scores", True, (Wait("query_landed"),), ("scores_ready",)),
    "dP": Issue("grad_probs", True, (Wait("grad_out_landed"),), ("grad_probs_ready",)),
    "dV": Issue("grad_value", True, (Wait("probs_ready"),), ("grad_out_free",)),
    "dK": Issue("grad_key", False, (Wait("grad_scores_ready"),), ("query_free",)),
    "dQ": Issue("grad_query", False, (), ("grad_query_ready",)),
}
# A CTA of a pair loads half of the rows of queries and output gradients, for S and dP, and half of their columns, for
# dK and dV; and each gets the half of dS that belongs to its half of the queries from both.
PAIR = {
    "S": Issue("scores", True, (Wait("query_landed"),), ("scores_ready", "query_free")),
    "dP": Issue("grad_probs", True, (Wait("grad_out_landed"),), ("grad_probs_ready", "grad_out_free")),
    "dV": Issue("grad_value", True, (Wait("probs_ready"), Wait("grad_out_columns_landed")), ("grad_out_columns_free",)),
    "dK": Issue("grad_key", False, (Wait("grad_scores_ready"), Wait("query_columns_landed")), ("query_columns_free",)),
    "dQ": Issue("grad_query", False, (Wait("grad_scores_exchanged"),), ("grad_query_ready",)),
}


# Where S, dP and dQ share columns, dP waits for probs, and dV after it need not.
SERIAL = SINGLE | {"dV": Issue("grad_value", True, (), ("grad_out_free",))}
# As a pair, but where shared memory is full: rows and columns of queries take turns in one buffer, and the half of dS
# that leaves lies over the rows of output gradients, which are loaded anew when dQ has both halves.
SHARING_PAIR = PAIR | {
    "dP": Issue("grad_probs", True, (Wait("grad_out_landed"),), ("grad_probs_ready",)),
    "dV": Issue("grad_value", True, (Wait("grad_out_columns_landed"),), ("grad_out_columns_free",)),
    "dQ": Issue("grad_query", False, (Wait("grad_scores_exchanged"),), ("grad_query_ready", "grad_out_free")),
}


def _body(order: str, waits: dict[str, tuple[Wait, ...]], products: dict[str, Issue] = SINGLE) -> tuple[Issue, ...]:
    """A table from the products' short names in order, and what each waits for besides its operands."""
    return tuple(
        Issue(one.product, one.is_next, one.waits + waits.get(name, ()), one.commits)
        for name, one in ((name, products[name]) for name in order.split())
    )


ORDERS: dict[str, tuple[Issue, ...]] = {
    # dQ has columns of its own: it only waits until those are read.
    "apart": _body("S dK dQ dP dV", {"dQ": (Wait("grad_query_drained", 1),)}),
    # dQ lies over dP and dS: the next dP waits until it is read.
    "over_grad_probs": _body("S dK dQ dP dV", {"dP": (Wait("grad_query_drained", 1),)}),
    # dQ lies over the scores beside the probs: it waits until the next scores are read, and the scores after those
    # until dQ is. That leaves dS the time of two products to reach both CTAs of a pair.
    "pair": _body(
        "S dK dP dQ dV",
        {
            "S": (Wait("grad_query_drained", 2),),
            "dQ": (Wait("grad_query_drained", 1), Wait("probs_ready", -1)),
        },
        PAIR,
    ),
    # S, dP and dQ share columns: one tile after the other.
    "serial": _body("dK dQ S dP dV", {"S": (Wait("grad_query_drained", 1),), "dP": (Wait("probs_ready"),)}, SERIAL),
    "pair_serial": _body(
        "dK dQ S dP dV", {"S": (Wait("grad_query_drained", 1),), "dP": (Wait("probs_ready"),)}, SHARING_PAIR
    ),
}


def refill(order: tuple[Issue, ...], name: str, stages: int) -> Wait:
    """What a copy into a ring of that many stages waits for: what has read the stage before."""
    if order == ORDERS["pair_serial"] and name in ("query", "query_columns"):
        return Wait("query_columns_free", 1) if name == "query" else Wait("query_free", 0)
    return Wait(f"{name}_free", stages)


def before_loop(order: tuple[Issue, ...]) -> tuple[Issue, ...]:
    """The products of the first tile that precede the loop, without waits for tiles before it."""
    return tuple(
        Issue(one.product, True, tuple(wait for wait in one.waits if wait.behind <= 0), one.commits)
        for one in order
        if one.is_next
    )


def after_loop(order: tuple[Issue, ...]) -> tuple[Issue, ...]:
    """The products of the last tile that follow the loop, without waits for tiles after it."""
    return tuple(
        Issue(one.product, False, tuple(wait for wait in one.waits if wait.behind >= 0), one.commits)
        for one in order
        if not one.is_next
    )
