"""Where the experts are: facts for people who watch a server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class LayerExperts(NamedTuple):
    """Experts of one layer, [experts]."""

    in_memory: Sequence[bool]
    """Whether the expert is in memory."""
    hits: Sequence[int]
    """Passes that needed the expert and found it in memory."""
    misses: Sequence[int]
    """Passes that needed the expert and waited for the drive."""


ExpertFacts = Callable[[], Sequence[LayerExperts]]
"""Function that returns the present state of each expert layer; it may run on any thread."""


def experts_content(experts: Sequence[int], facts: ExpertFacts | None) -> dict[str, Any]:
    """Return the state of all experts as JSON.

    Args:
        experts: number of experts of each expert layer.
        facts: their state; None: all of them are in memory, and nothing is counted.
    """
    if facts is None:
        layers: list[dict[str, Any]] = [
            {"in_memory": [True] * number, "hits": None, "misses": None} for number in experts
        ]
    else:
        layers = [
            {
                "in_memory": list(layer.in_memory), "hits": list(layer.hits),
                "misses": list(layer.misses),
            }
            for layer in facts()
        ]  # fmt: skip
    return {
        "object": "experts",
        "all_in_memory": all(all(layer["in_memory"]) for layer in layers),
        "layers": layers,
    }
