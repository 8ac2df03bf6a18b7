"""Experts in memory and on the drive, as JSON for the chat page and for monitoring."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from moesaic.serve.http.api_model import ApiModel


class ExpertFacts(NamedTuple):
    """Experts in memory, and how often passes found them there."""

    in_memory: Mapping[int, Sequence[int]]
    """Experts in memory by layer."""
    hits: int
    """Experts that passes used without a read, once for each pass and layer."""
    misses: int
    """Experts that were read, for a pass or ahead of one."""


def experts_content(model: ApiModel, facts: Callable[[], ExpertFacts] | None) -> dict[str, Any]:
    """Return the experts of each layer as JSON; without `facts` all are in memory."""
    everything = range(model.num_experts)
    found = (
        ExpertFacts(dict.fromkeys(model.expert_layers, everything), 0, 0)
        if facts is None
        else facts()
    )
    in_memory = {layer: sorted(found.in_memory.get(layer, ())) for layer in model.expert_layers}
    return {
        "object": "experts",
        "experts_per_layer": model.num_experts,
        "all_in_memory": all(len(one) == model.num_experts for one in in_memory.values()),
        "layers": [{"layer": layer, "in_memory": one} for layer, one in in_memory.items()],
        "hits": found.hits,
        "misses": found.misses,
    }
