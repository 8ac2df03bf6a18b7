"""What `moesaic bench` can be told. No torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from moesaic.base.config import Section
from moesaic.facts.job.model import ModelConfig

Number = Literal["fp32", "bf16", "fp16"]


def _numbers() -> list[Number]:
    return ["fp32", "bf16"]


class BenchConfig(Section):
    """What is measured, and for how long."""

    model: ModelConfig
    """The model whose expert layer it is, as in a job; `--model` names a preset."""
    device: str = "auto"
    """What computes: auto (a GPU where there is one), or as in `train.device`."""
    dtypes: list[Number] = Field(default_factory=_numbers, min_length=1)
    """Types of numbers that products take; weights are fp32, as in training."""
    tokens: list[Annotated[int, Field(ge=1, le=1 << 20)]] = Field(
        default_factory=lambda: [1, 16, 128, 512, 2048], min_length=1
    )
    """Tokens of each batch."""
    seconds: float = Field(default=20.0, gt=0, le=3600)
    """About how long it takes; batches that take too long for that are left out."""

    @model_validator(mode="after")
    def _has_experts(self) -> BenchConfig:
        if not self.model.experts:
            raise ValueError(
                "model.experts = 0: a dense model has no expert layer, choose one that has experts"
            )
        return self
