"""What `moesaic bench` can be told. No torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from moesaic.base import keys
from moesaic.base.config import Section
from moesaic.facts.job.model import ModelConfig
from moesaic.facts.job.train import GroupedMM

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
    grouped_mm: Literal["auto"] | GroupedMM = "auto"
    """Kernels of the expert matmuls on a GPU, as in a job's `kernels.grouped_mm`."""
    tokens: list[Annotated[int, Field(ge=1, le=1 << 20)]] = Field(
        default_factory=lambda: [1, 16, 128, 512, 2048], min_length=1
    )
    """Tokens of each batch."""
    seconds: float = Field(default=20.0, gt=0, le=3600)
    """About how long it takes; batches that take too long for that are left out, and it says how
    many seconds would be enough. What the device does at best takes a few in any case."""

    @model_validator(mode="after")
    def _each_once(self) -> BenchConfig:
        for key, values in (("dtypes", self.dtypes), ("tokens", self.tokens)):
            twice = [value for place, value in enumerate(values) if value in values[:place]]
            if twice:
                raise ValueError(
                    f"{key} has {keys.show(twice[0])} more than once: leave all but one of them out"
                )
        return self

    @model_validator(mode="after")
    def _has_experts(self) -> BenchConfig:
        if not self.model.experts:
            raise ValueError(
                "model.experts = 0: a dense model has no expert layer, choose one that has experts"
            )
        return self
