"""What `moesaic generate` can be told. No torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from moesaic.base.config import Section
from moesaic.facts.job.train import GroupedMM


class GenerateConfig(Section):
    """How text is continued."""

    max_tokens: int = Field(default=128, ge=1)
    """Most tokens that are added to a prompt."""
    temperature: float = Field(default=0.8, ge=0)
    """0: always the most likely token; higher values even out the odds."""
    top_p: float = Field(default=0.95, gt=0, le=1)
    """Only the likeliest tokens whose odds add up to this share are drawn from."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of the draws: the same call gives the same text."""
    device: str = "auto"
    """auto: a GPU where there is one, else cpu."""
    precision: Literal["keep", "fp32", "bf16", "fp64"] = "keep"
    """What weights are held and computed in; keep: that of the embedding on file."""
    grouped_mm: Literal["auto"] | GroupedMM = "auto"
    """Kernels of the expert matmuls on a GPU, as in a job's `kernels.grouped_mm`."""
    system: str | None = None
    """With --chat: what the model is told before each prompt; unset: nothing."""
    tokenizer: str | None = None
    """`bytes`, or the path of a tokenizer.json or of its directory; unset: the model's own."""
