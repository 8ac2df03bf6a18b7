"""Regime of one inference pass: read the experts of coming layers ahead, or only those that miss.

- resident: all experts are in memory.
- fetch: a layer's missing experts are read once its router has chosen them. Reading is exposed.
- stream: all experts of the next layer are read while a layer computes. Reading is hidden behind
  computing, but reads experts that no token chooses.

Streaming pays for prompts, whose tokens choose most experts of every layer.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Regime = Literal["resident", "stream", "fetch"]


class PassFacts(NamedTuple):
    """A pass that is about to start, and the machine as the last passes have shown it."""

    num_tokens: int
    """Tokens of the pass."""
    layers: int
    """Layers with experts."""
    experts: int
    """Experts of a layer."""
    top_k: int
    """Experts that a token chooses in each layer."""
    num_slots: int
    """Experts that fit in memory."""
    expert_bytes: int
    read_bytes_per_s: float
    """Bandwidth of the drive; 0: not known yet."""
    compute_s: float
    """Seconds that such a pass computes; 0: not known yet."""
    miss_share: float
    """Share of the experts that the last passes used and had to read."""


class RegimeDecision(NamedTuple):
    """The regime of a pass, and the seconds that each way would take; 0 if they are not known."""

    regime: Regime
    fetch_s: float
    stream_s: float | None
    """None if memory does not hold two layers."""


def choose_regime(facts: PassFacts) -> RegimeDecision:
    """Return the regime with the least expected seconds."""
    num_experts = facts.layers * facts.experts
    if facts.num_slots >= num_experts:
        return RegimeDecision("resident", facts.compute_s, facts.compute_s)
    if not facts.read_bytes_per_s:
        return RegimeDecision("fetch", 0.0, 0.0)
    read_s = facts.expert_bytes / facts.read_bytes_per_s
    missing = 1.0 - facts.num_slots / num_experts
    used = num_experts * touched_share(facts)
    fetch_s = facts.compute_s + used * min(facts.miss_share, 1.0) * read_s
    # One layer computes while another is read, so the slots of both are used in every layer.
    in_motion = 2 / facts.layers
    streamed = num_experts * min(missing + in_motion, 1.0) * read_s
    first_layer_s = streamed / facts.layers
    stream_s = first_layer_s + max(facts.compute_s, streamed - first_layer_s)
    if not _can_stream(facts):
        return RegimeDecision("fetch", fetch_s, None)
    return RegimeDecision("stream" if stream_s < fetch_s else "fetch", fetch_s, stream_s)


def touched_share(facts: PassFacts) -> float:
    """Return the share of a layer's experts that a pass uses, if all are equally likely."""
    return 1.0 - (1.0 - facts.top_k / facts.experts) ** facts.num_tokens


def _can_stream(facts: PassFacts) -> bool:
    """Return whether two layers fit in memory: one computes while the other is read."""
    return facts.num_slots >= 2 * facts.experts
