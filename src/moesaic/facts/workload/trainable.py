"""Trainable parts of a model, for counting gradients."""

from __future__ import annotations

from dataclasses import dataclass

from moesaic.facts.job import ModelConfig
from moesaic.facts.job.finetune import AdapterTarget, FinetuneConfig


@dataclass(frozen=True)
class Trainable:
    """Parts of a model that have gradients; by default all."""

    weights: bool = True
    """True if parameters other than experts and routers are trainable."""
    routers: bool = True
    experts: bool = True
    targets: frozenset[AdapterTarget] = frozenset()
    """Matrices with adapters."""
    adapter_rank: int = 0
    """Rank of the adapters."""

    @classmethod
    def from_finetune(cls, finetune: FinetuneConfig | None) -> Trainable:
        """Return the parts that `finetune` trains."""
        if finetune is None:
            return cls()
        routers = finetune.router == "train"
        if finetune.method == "full":
            return cls(routers=routers)
        return cls(False, routers, False, frozenset(finetune.targets), finetune.rank)

    def rank_of_target(self, target: AdapterTarget) -> int:
        """Return the rank of the adapters of `target`; 0 if it has none."""
        return self.adapter_rank * (target in self.targets)

    def first_trainable_block(self, model: ModelConfig) -> str:
        """Return the first block with trainable parameters, where backward ends."""
        if self.weights:
            return "embed"
        for layer in range(model.layers):
            if "attention" in self.targets:
                return f"layers.{layer}.attention"
            if layer not in model.expert_layers:
                if "ffn" in self.targets:
                    return f"layers.{layer}.ffn"
            elif self.routers or "experts" in self.targets or self._has_shared_adapters(model):
                return f"layers.{layer}.moe"
        raise AssertionError("the job trains no parameter")

    def _has_shared_adapters(self, model: ModelConfig) -> bool:
        return model.shared_experts > 0 and "shared" in self.targets
