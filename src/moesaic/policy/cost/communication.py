"""Collective operations as messages between ranks: who sends to whom, how much, in how many turns.

The usual algorithms: rings for sums and gathers, pairwise turns for exchanges, a tree whose first
branches are the longest for a broadcast. Stages of a pipeline send; broadcasts are of no step yet:
copies of experts will ask for them. What the messages cost on links is for `traffic`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Burst:
    """Messages that need not wait for one another, but for the latencies of their turns."""

    turns: int
    """Latencies, one after another."""
    share: float
    """What each edge carries in all its turns, as a share of the operation's size."""
    edges: Sequence[tuple[int, int]] | None
    """From and to, as positions in the group; None: from each to each other."""


def bursts(operation: str, ranks: int) -> list[Burst]:
    """How `operation` is carried out by `ranks` ranks; sizes count as in `Message.num_bytes`."""
    if ranks < 2:
        return []
    others = ranks - 1
    ring = [(rank, (rank + 1) % ranks) for rank in range(ranks)]
    if operation == "all_reduce":
        return [Burst(2 * others, 2 * others / ranks, ring)]
    if operation in ("all_gather", "reduce_scatter"):
        return [Burst(others, others / ranks, ring)]
    if operation == "all_to_all":
        return [Burst(others, 1.0 / ranks, None)]
    if operation == "broadcast":
        return [Burst(1, 1.0, edges) for edges in _branches(ranks)]
    if operation == "send":
        return [Burst(1, 1.0, [(0, others)])]
    raise AssertionError(f"no algorithm for {operation}")


def _branches(ranks: int) -> Iterator[list[tuple[int, int]]]:
    """A tree from the first of `ranks`: all who have the bytes send to as many who do not."""
    span = 1 << (ranks - 1).bit_length()
    while span > 1:
        half = span // 2
        yield [(rank, rank + half) for rank in range(0, ranks - half, span)]
        span = half
