"""Residency of experts in inference: which expert leaves memory when another one needs its slot."""

from __future__ import annotations

from typing import NamedTuple

from moesaic.policy.residency import Residency

_PASS_DECAY = 0.5 ** (1 / 16)
"""Factor, for each later pass, on the weight of a pass in the frequency of use."""
_PRIOR_PASSES = 0.5
"""Passes without use that every expert is taken to have had: one use alone proves little."""


class _Usage(NamedTuple):
    """Uses of one expert."""

    weight: float
    """Sum of the weights of the passes that used it, as of the last of them."""
    last_pass: int


class ExpectedUse(Residency):
    """Evict the expert whose next use is expected last.

    A pass visits the layers in order. It uses an expert of a layer with a probability p, which
    follows from recent passes; so its next use is expected 1 / p passes after the last visit of its
    layer. LRU evicts the experts of the next layers, and LFU follows new texts late. On recorded
    routing of small models it had 0.83 to 1.02 of the misses of the better one.
    """

    def __init__(self, num_experts: int, num_layers: int) -> None:
        """Create the policy.

        Args:
            num_experts: experts of each layer; blocks are numbered layer by layer.
            num_layers: layers with experts.
        """
        super().__init__()
        self._num_experts, self._num_layers = num_experts, num_layers
        self._usage: dict[int, _Usage] = {}
        self._pass, self._layer = 0, 0
        """Present pass and layer."""
        self._weight = 1.0
        """Sum of the weights of all passes, with the present one."""
        self._in_memory: list[set[int]] = [set() for _ in range(num_layers)]
        """Blocks in memory that were used, by layer."""
        self._next_use: dict[int, float] = {}
        """Expected pass of the next use of those blocks; layers are fractions of a pass."""

    def access(self, block: int) -> None:
        """Record a use of `block`."""
        super().access(block)
        layer, usage = block // self._num_experts, self._usage.get(block)
        is_new_pass = layer < self._layer or (usage and usage.last_pass == self._pass)
        if is_new_pass:
            self.begin_step()
            self._pass += 1
            self._weight = 1.0 + self._weight * _PASS_DECAY
        if is_new_pass or layer != self._layer:
            self._layer = layer
            for other in self._in_memory[layer]:  # Their layer comes again in the next pass.
                self._next_use[other] = self._expect(other)
                if other in self._next_access:
                    self._queue.put(other, self._key(other))
        weight = 1.0 if usage is None else 1.0 + self._decayed(usage)
        self._usage[block] = _Usage(weight, self._pass)
        self._in_memory[layer].add(block)
        self._next_use[block] = self._expect(block)

    def removed(self, block: int) -> None:
        """Record that `block` left memory; its uses still count when it returns."""
        super().removed(block)
        self._in_memory[block // self._num_experts].discard(block)
        self._next_use.pop(block, None)

    def _key(self, block: int) -> tuple[float, ...]:
        """Rank blocks with an expected access last, the one that is needed first at the end."""
        next_access = self._next_access[block]
        if next_access is not None:
            return True, -next_access, 0
        return False, -self._next_use.get(block, float("inf")), -block

    def _expect(self, block: int) -> float:
        """Return the pass in which a block of the present layer is expected next."""
        passes = (self._weight + _PRIOR_PASSES) / self._decayed(self._usage[block])
        return self._pass + passes + block // self._num_experts / self._num_layers

    def _decayed(self, usage: _Usage) -> float:
        return usage.weight * _PASS_DECAY ** (self._pass - usage.last_pass)
