"""Algorithms of collectives, as rounds of messages between ranks.

Sums and gathers use rings, all-to-all pairwise rounds, broadcasts a binomial tree with the longest
edges first. Pipeline stages use sends. `network` computes the time of these messages on links.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class CommRound:
    """Messages that share their latencies and do not wait for one another otherwise."""

    num_latencies: int
    """Number of successive latencies."""
    size_fraction: float
    """Bytes per edge over the whole round, as a fraction of the collective's size."""
    edges: Sequence[tuple[int, int]] | None
    """Pairs (from, to) as positions in the group; None for all ordered pairs."""


def collective_rounds(operation: str, num_ranks: int) -> list[CommRound]:
    """Return the rounds of `operation` on `num_ranks` ranks; sizes are in
    `CollectiveCall.num_bytes`."""
    if num_ranks < 2:
        return []
    others = num_ranks - 1
    ring = [(rank, (rank + 1) % num_ranks) for rank in range(num_ranks)]
    if operation == "all_reduce":
        return [CommRound(2 * others, 2 * others / num_ranks, ring)]
    if operation in ("all_gather", "reduce_scatter"):
        return [CommRound(others, others / num_ranks, ring)]
    if operation == "all_to_all":
        return [CommRound(others, 1.0 / num_ranks, None)]
    if operation == "broadcast":
        return [CommRound(1, 1.0, edges) for edges in _broadcast_tree(num_ranks)]
    if operation == "send":
        return [CommRound(1, 1.0, [(0, others)])]
    raise AssertionError(f"no algorithm for {operation}")


def _broadcast_tree(num_ranks: int) -> Iterator[list[tuple[int, int]]]:
    """Yield the rounds of a binomial tree from the first of `num_ranks`.

    In each round, every rank that has the bytes sends them to one that does not.
    """
    span = 1 << (num_ranks - 1).bit_length()
    while span > 1:
        half = span // 2
        yield [(rank, rank + half) for rank in range(0, num_ranks - half, span)]
        span = half
