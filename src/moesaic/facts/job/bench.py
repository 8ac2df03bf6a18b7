"""Settings of `moesaic bench`. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from moesaic.base import keys
from moesaic.base.config import Section
from moesaic.facts.job.model import ModelConfig
from moesaic.facts.job.train import MatmulBackend

ComputeDType = Literal["fp32", "bf16", "fp16"]


def _default_dtypes() -> list[ComputeDType]:
    return ["fp32", "bf16"]


class BenchConfig(Section):
    """Sizes and duration of a benchmark of one expert layer."""

    model: ModelConfig
    """Model whose expert layer is measured, as in a job: `preset` or `from`, and changes."""
    device: str = "auto"
    """Device: auto (a GPU if there is one, else cpu), or as in `train.device`."""
    dtypes: list[ComputeDType] = Field(default_factory=_default_dtypes, min_length=1)
    """Dtypes of the matmuls; weights are fp32, as in training."""
    grouped_mm: Literal["auto"] | MatmulBackend = "auto"
    """Kernels of the expert matmuls on a GPU, as in a job's `kernels.grouped_mm`."""
    tokens: list[Annotated[int, Field(ge=1, le=1 << 20)]] = Field(
        default_factory=lambda: [1, 16, 128, 512, 2048], min_length=1
    )
    """Tokens of each measured batch."""
    seconds: float = Field(default=20.0, gt=0, le=3600)
    """Approximate duration, in seconds. Batches that need longer are skipped. Measuring the peak of
    the device takes a few seconds in any case."""

    def conflicts(self) -> Iterator[str]:
        """Yield values that stand twice, and a model without experts."""
        for key, values in (("dtypes", self.dtypes), ("tokens", self.tokens)):
            duplicates = [value for index, value in enumerate(values) if value in values[:index]]
            if duplicates:
                yield (
                    f"{key} has {keys.show(duplicates[0])} more than once: leave all but one "
                    "of them out"
                )
        if not self.model.experts and not any(self.model.conflicts()):
            yield "model.experts = 0: a dense model has no expert layer, choose one with experts"
