"""Settings of `moesaic convert`. Does not import torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from moesaic.base.config import Section

ModelFormat = Literal["huggingface", "packed", "checkpoint", "adapter"]
Precision = Literal["keep", "fp64", "fp32", "bf16", "fp16"]


class ConvertConfig(Section):
    """Settings of model conversion."""

    to: ModelFormat = "huggingface"
    """Format to write. huggingface: config.json, safetensors and tokenizer files. packed: the same,
    with each expert in one piece and hashes, which is served fastest from a drive. checkpoint:
    parameters only. adapter: the LoRA adapters of a run, in the format of peft."""
    dtype: Precision = "keep"
    """Dtype of the weights on file; keep: the dtype of each tensor."""
    max_shard_bytes: int = Field(default=5_000_000_000, ge=1)
    """Maximum bytes of a weight file; one larger tensor still fills one file, and an adapter is
    always one file."""
    student: str | None = None
    """Student of a run to write instead of its teacher; unset: the teacher."""
