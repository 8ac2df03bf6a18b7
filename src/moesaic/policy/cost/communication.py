"""Seconds of one collective operation over a link: measured, or by the usual algorithms.

Without a measurement an operation is a number of turns, each of a latency, in which a share of the
bytes passes the narrowest link (alpha and beta): rings for sums and gathers, pairwise turns for
exchanges, a tree for a broadcast. Ranks that share a link share its bandwidth.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from moesaic.facts.cluster import Link


@dataclass(frozen=True)
class Turns:
    """An operation as turns: how many, and what share of its bytes a rank sends in all."""

    turns: float
    share: float


def algorithm(operation: str, ranks: int) -> Turns:
    """How `operation` is carried out by `ranks` ranks; sizes count as in `Message.num_bytes`."""
    others = ranks - 1
    ring = others / ranks
    if operation == "all_reduce":
        return Turns(2 * others, 2 * ring)
    if operation in ("all_gather", "reduce_scatter", "all_to_all"):
        return Turns(others, ring)
    if operation in ("broadcast", "send"):
        return Turns(math.ceil(math.log2(ranks)), math.ceil(math.log2(ranks)))
    raise AssertionError(f"no algorithm for {operation}")


def collective_s(
    link: Link, operation: str, ranks: int, num_bytes: float, sharing: int = 1
) -> float:
    """Seconds of `operation` by `ranks` ranks over `link`.

    Args:
        link: the narrowest link between them.
        operation: which.
        ranks: how many take part.
        num_bytes: see `Message.num_bytes`.
        sharing: equal operations that pass the link at the same time.
    """
    if ranks < 2:
        return 0.0
    for measured in link.collectives:
        if sharing == 1 and (measured.name, measured.ranks) == (operation, ranks):
            return measured.times.at(max(num_bytes, 1.0))
    how = algorithm(operation, ranks)
    return how.turns * link.latency_s + how.share * num_bytes * sharing / link.bandwidth
