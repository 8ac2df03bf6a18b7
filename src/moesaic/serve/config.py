"""Settings of `moesaic generate` and `moesaic serve`. Does not import torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from moesaic.base.config import Section
from moesaic.base.units import parse_bytes
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


class ServeConfig(Section):
    """Settings of the HTTP server and its engine."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 or :: lets other machines connect."""
    port: int = Field(default=8000, ge=0, lt=2**16)
    """Port to listen on; 0: any free one."""
    name: str | None = None
    """Name of the model for clients; unset: the name of its directory."""
    api_key: str | None = None
    """Key that clients must send; unset: none. Other users of the machine can read the command
    line, so api_key_file is safer."""
    api_key_file: str | None = None
    """Path of a file that holds the key."""
    memory: str | None = None
    """Memory of the process, such as "4GB" or "1500MiB"; unset: as much as the model needs."""
    context: int | None = Field(default=None, ge=1)
    """Most tokens of a prompt and its continuation; unset: the model's positions, or as many as
    cache_tokens has room for."""
    cache_tokens: int | None = Field(default=None, ge=16)
    """Positions of the key-value cache over all requests; unset: four times the context."""
    max_running: int = Field(default=32, ge=1)
    """Requests that are computed at a time."""
    max_waiting: int = Field(default=256, ge=1)
    """Requests that wait; further ones are answered with status 429."""
    tokens_per_pass: int = Field(default=512, ge=1)
    """Tokens of a forward pass, of prompts and of running requests."""
    drain_s: int = Field(default=60, ge=0)
    """Seconds that open answers may take after SIGTERM."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe log lines on stderr; debug: also a line for each request."""
    device: str = "auto"
    """torch device; auto: a GPU if there is one, else cpu."""
    precision: Literal["keep", "fp32", "bf16", "fp64"] = "keep"
    """Dtype of weights and computation; keep: the dtype of the embedding on file."""
    grouped_mm: Literal["auto"] | MatmulBackend = "auto"
    """Kernels of the expert matmuls on a GPU, as in a job's `kernels.grouped_mm`."""
    tokenizer: str | None = None
    """`bytes`, or the path of a tokenizer.json or its directory; unset: the model's own."""

    @field_validator("memory")
    @classmethod
    def _is_size(cls, value: str | None) -> str | None:
        if value is not None:
            parse_bytes(value)
        return value
