"""How tokens find experts: the router, its losses, capacity, and recorded routing."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from moesaic.base.config import Section


class RoutingConfig(Section):
    """The router of every expert layer."""

    router: Literal["top-k", "switch", "gshard", "balanced"] = "top-k"
    """top-k: the model's own, by softmax or sigmoid as its family has it. switch: top-1, optional
    noise on the scores while training. gshard: top-2, the second expert kept at random in
    proportion to its weight, with capacity. balanced: debugging; experts in turn whatever the
    scores say."""
    balance_loss: float = Field(default=0.01, ge=0)
    """Weight of the load-balance loss: experts * sum(share * probability), averaged over expert
    layers."""
    z_loss: float = Field(default=0.0, ge=0)
    """Weight of the mean squared log-sum-exp of router scores, averaged over expert layers."""
    capacity: float | None = Field(default=None, gt=0)
    """Tokens that one expert takes from a global micro-batch, as a multiple of the even share;
    assignments beyond it are dropped and counted. Unset: nothing is dropped."""
    bias_step: float = Field(default=0.001, ge=0)
    """deepseek_v3 only: by how much a step moves the bias of an expert that took more, or fewer,
    tokens than the mean."""
    noise: float = Field(default=0.0, ge=0, lt=1)
    """switch only: uniform noise in [1 - noise, 1 + noise] multiplies scores while training."""
    record: str | None = None
    """Directory that receives the experts chosen for every token of this run (Parquet)."""
    replay: str | None = None
    """File written by `record`: its choices replace the router's, and differences are counted."""

    @model_validator(mode="after")
    def _consistent(self) -> RoutingConfig:
        if self.noise and self.router != "switch":
            raise ValueError(
                f'routing.noise = {self.noise} belongs to routing.router = "switch", '
                f'not "{self.router}": set it to 0'
            )
        if self.record and self.replay:
            raise ValueError(
                f'routing.record = "{self.record}" and routing.replay = "{self.replay}" exclude '
                "each other: remove one"
            )
        return self
