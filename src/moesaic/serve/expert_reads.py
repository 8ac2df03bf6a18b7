"""Reading of experts during the passes of an inference engine.

Before a pass, `choose_regime` decides whether the experts of coming layers are read ahead. After
it, the seconds of the pass and of its reads become facts for the next ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from moesaic.base.decisions import Decision, decide
from moesaic.nn.experts.places import Places
from moesaic.policy.serving.regime import PassFacts, RegimeDecision, choose_regime
from moesaic.store.cache import BlockCache

RegimeChoice = Decision[PassFacts, RegimeDecision]

_LAST_WEIGHT = 0.3
"""Weight of the last pass in running means."""


class ExpertReads:
    """Decides for each pass how experts are read, and starts to read ahead."""

    def __init__(self, cache: BlockCache, places: Mapping[int, Places], top_k: int) -> None:
        """Read the experts of `places` into `cache`; a token chooses `top_k` in each layer."""
        self._cache, self._places, self._top_k = cache, list(places.values()), top_k
        self.policy: Callable[[PassFacts], RegimeDecision] = choose_regime
        self._blocks = [[one.block(slot) for slot in range(one.num_slots)] for one in self._places]
        self._compute_s = dict[int, float]()
        """Seconds of computing by the number of tokens, in powers of two."""
        self._read_bytes_per_s = self._miss_share = 0.0
        self._before = cache.stats
        self.decision: RegimeChoice | None = None
        """The last pass's facts and decision."""
        self.on_change: Callable[[RegimeChoice], None] | None = None
        """Called with the facts and the decision of a pass whose regime differs from the last."""
        self.num_passes = dict.fromkeys(("stream", "fetch"), 0)
        """Passes by regime."""

    def begin(self, num_tokens: int) -> None:
        """Decide on a pass of `num_tokens`, and start reading if it streams."""
        log, last = list[RegimeChoice](), self.decision
        regime = decide(self.policy, self._facts(num_tokens), log).regime
        self.decision, self._before = log[0], self._cache.stats
        self.num_passes[regime] += 1
        if self.on_change is not None and (last is None or last.outcome.regime != regime):
            self.on_change(log[0])
        streams = regime == "stream"
        for index, one in enumerate(self._places):
            one.segment = index if streams else None
        self._cache.expect(*self._blocks if streams else (), distance=len(self._blocks[0]))

    def end(self, num_tokens: int, seconds: float) -> None:
        """Record a pass that took `seconds`."""
        before, now = self._before, self._cache.stats
        compute_s = max(seconds - (now.stall_s - before.stall_s), 0.0)
        bucket = num_tokens.bit_length()
        self._compute_s[bucket] = _mean(self._compute_s.get(bucket), compute_s)
        if now.read_s > before.read_s:
            bandwidth = (now.read_bytes - before.read_bytes) / (now.read_s - before.read_s)
            self._read_bytes_per_s = _mean(self._read_bytes_per_s or None, bandwidth)
        accesses = now.accesses - before.accesses
        if accesses and self.decision and self.decision.outcome.regime == "fetch":
            share = (now.misses - before.misses) / accesses
            self._miss_share = _mean(self._miss_share or None, share)

    def _facts(self, num_tokens: int) -> PassFacts:
        return PassFacts(
            num_tokens=num_tokens, layers=len(self._places), experts=self._places[0].num_slots,
            top_k=self._top_k, num_slots=self._cache.num_slots,
            expert_bytes=self._cache.memory.shape[1],
            read_bytes_per_s=self._read_bytes_per_s,
            compute_s=self._expected_compute_s(num_tokens.bit_length()),
            miss_share=self._miss_share,
        )  # fmt: skip

    def _expected_compute_s(self, bucket: int) -> float:
        """Return the seconds of passes with about as many tokens, or of the next smaller ones."""
        known = [one for one in self._compute_s if one <= bucket]
        return self._compute_s[max(known)] if known else 0.0


def _mean(mean: float | None, value: float) -> float:
    return value if mean is None else mean + _LAST_WEIGHT * (value - mean)
