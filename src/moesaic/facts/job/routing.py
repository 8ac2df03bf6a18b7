"""Settings of routing: the router, its losses, capacity, and recorded choices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from moesaic.base.config import Section


class RoutingConfig(Section):
    """The router of every expert layer."""

    router: Literal["top-k", "switch", "gshard", "balanced"] = "top-k"
    """Router. top-k: the model's own, with softmax or sigmoid scores as its family has them.
    switch: top-1, with optional noise on the scores in training. gshard: top-2 with capacity, where
    the second expert is kept at random in proportion to its weight. balanced: for debugging;
    experts in turn, whatever the scores."""
    balance_loss: float = Field(default=0.01, ge=0)
    """Weight of the load-balance loss: experts * sum(share * probability), averaged over expert
    layers."""
    z_loss: float = Field(default=0.0, ge=0)
    """Weight of the mean squared log-sum-exp of router logits, averaged over expert layers."""
    capacity_factor: float | None = Field(default=None, gt=0)
    """Most tokens of a global micro-batch per expert, as a multiple of the even share. Assignments
    beyond it are dropped and counted. Unset: nothing is dropped."""
    bias_update_rate: float = Field(default=0.001, ge=0)
    """Change of an expert's bias per step, up or down, if its load was below or above the mean
    (deepseek_v3 only)."""
    noise: float = Field(default=0.0, ge=0, lt=1)
    """Noise in training (switch only): scores are multiplied by uniform values from [1 - noise, 1 +
    noise]."""
    record: str | None = None
    """Directory for the chosen experts of every token of this run (Parquet)."""
    replay: str | None = None
    """File written by `record`: its choices replace the router's, and differences are counted."""

    def conflicts(self) -> Iterator[str]:
        """Yield settings of another router, and those that exclude each other."""
        if self.noise and self.router != "switch":
            yield (
                f'routing.noise = {self.noise} belongs to routing.router = "switch", '
                f'not "{self.router}": set it to 0'
            )
        if self.record and self.replay:
            yield (
                f'routing.record = "{self.record}" and routing.replay = "{self.replay}" exclude '
                "each other: remove one"
            )
