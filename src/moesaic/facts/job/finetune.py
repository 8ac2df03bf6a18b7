"""Settings of fine-tuning: which weights a run trains."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from moesaic.base.config import Section

AdapterTarget = Literal["attention", "experts", "ffn", "shared"]


class FinetuneConfig(Section):
    """Weights that a run trains; without this table all of them."""

    method: Literal["full", "lora"] = "full"
    """Fine-tuning method. full: train the weights. lora: train only two low-rank matrices A and B
    for each target matrix W. The layer then uses W + alpha / rank * B A."""
    router: Literal["train", "frozen"] = "frozen"
    """Train or freeze the routers and their biases, whatever the method."""
    targets: list[AdapterTarget] = Field(default=["attention", "experts"], min_length=1)
    """Matrices with adapters (lora only): attention projections, experts, dense feed-forward
    networks, shared experts."""
    rank: int = Field(default=8, ge=1)
    """Rank of the adapters (lora only): rows of A and columns of B."""
    alpha: float = Field(default=16.0, gt=0)
    """Scale of the adapters (lora only): B A is multiplied by alpha / rank."""

    @property
    def scale(self) -> float:
        """Factor that B A is multiplied by."""
        return self.alpha / self.rank
