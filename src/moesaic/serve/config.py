"""Settings of `moesaic generate`. Does not import torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from moesaic.base.config import Section
from moesaic.facts.job.train import MatmulBackend


class GenerateConfig(Section):
    """Settings of text generation."""

    max_tokens: int = Field(default=128, ge=1)
    """Maximum number of tokens to generate per prompt."""
    temperature: float = Field(default=0.8, ge=0)
    """Sampling temperature; 0 always picks the most likely token, higher values flatten the
    distribution."""
    top_p: float = Field(default=0.95, gt=0, le=1)
    """Nucleus sampling: draw from the likeliest tokens whose probabilities sum to this."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Random seed; the same seed and prompt give the same text."""
    device: str = "auto"
    """torch device; auto: a GPU if there is one, else cpu."""
    precision: Literal["keep", "fp32", "bf16", "fp64"] = "keep"
    """Dtype of weights and computation; keep: the dtype of the embedding on file."""
    grouped_mm: Literal["auto"] | MatmulBackend = "auto"
    """Kernels of the expert matmuls on a GPU, as in a job's `kernels.grouped_mm`."""
    system: str | None = None
    """System message before each prompt, with --chat; unset: none."""
    tokenizer: str | None = None
    """`bytes`, or the path of a tokenizer.json or its directory; unset: the model's own."""
