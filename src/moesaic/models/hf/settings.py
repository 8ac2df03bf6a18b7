"""What `moesaic convert` can be told. No torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from moesaic.base.config import Section

Form = Literal["huggingface", "checkpoint", "adapter"]
Precision = Literal["keep", "fp64", "fp32", "bf16", "fp16"]


class ConvertConfig(Section):
    """The form of what is written."""

    to: Form = "huggingface"
    """huggingface: config.json, safetensors, tokenizer files. checkpoint: parameters only.
    adapter: what a LoRA run learnt and nothing else, as peft has it."""
    dtype: Precision = "keep"
    """Type of the weights on file; keep: each as it is."""
    max_shard_bytes: int = Field(default=5_000_000_000, ge=1)
    """Size of one weight file, unless one tensor alone is larger; an adapter is always one file."""

    def idle(self) -> list[str]:
        """A sentence for each setting that was given and has no effect."""
        if self.to == "adapter" and "max_shard_bytes" in self.model_fields_set:
            return ['max_shard_bytes has no effect: to = "adapter" writes one file']
        return []
