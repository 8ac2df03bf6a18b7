"""What of a model has gradients, for those who count what is computed with it."""

from __future__ import annotations

from dataclasses import dataclass

from moesaic.facts.job import ModelConfig
from moesaic.facts.job.finetune import FinetuneConfig, Target


@dataclass(frozen=True)
class Learning:
    """Which gradients there are; by default all."""

    weights: bool = True
    """Those of all that is neither an expert's nor a router's."""
    routers: bool = True
    experts: bool = True
    targets: frozenset[Target] = frozenset()
    """What has adapters."""
    rank: int = 0
    """Of those."""

    @classmethod
    def of(cls, finetune: FinetuneConfig | None) -> Learning:
        """What `finetune` lets learn."""
        if finetune is None:
            return cls()
        routers = finetune.router == "train"
        if finetune.method == "full":
            return cls(routers=routers)
        return cls(False, routers, False, frozenset(finetune.targets), finetune.rank)

    def beside(self, target: Target) -> int:
        """The rank of adapters of `target`; 0: it has none."""
        return self.rank * (target in self.targets)

    def first_block(self, model: ModelConfig) -> str:
        """Where gradients end: before it nothing learns."""
        if self.weights:
            return "embed"
        for layer in range(model.layers):
            if "attention" in self.targets:
                return f"layers.{layer}.attention"
            if layer not in model.expert_layers:
                if "ffn" in self.targets:
                    return f"layers.{layer}.ffn"
            elif self.routers or "experts" in self.targets or self._shared(model):
                return f"layers.{layer}.moe"
        raise AssertionError("a job that learns nothing")

    def _shared(self, model: ModelConfig) -> bool:
        return model.shared > 0 and "shared" in self.targets
