"""Settings of loading a model, of the inference engine and of generating text. Does not import
torch."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from moesaic.base.config import Section
from moesaic.base.units import parse_bytes
from moesaic.facts.job.control import ControlValues
from moesaic.facts.job.train import MatmulBackend
from moesaic.policy.serving.budget import PAGE_TOKENS

MAX_CHOICES = 128
"""Texts of one prompt that a request may ask for, as in OpenAI's API."""
MAX_TOP_LOGPROBS = 20
"""Most likely tokens per position that a request may ask for, as in OpenAI's API."""


class LoadConfig(Section):
    """Settings of loading a model."""

    device: str = "auto"
    """torch device; auto: a GPU if there is one, else cpu."""
    precision: Literal["keep", "fp32", "bf16", "fp64"] = "keep"
    """Dtype of weights and computation; keep: the dtype of the embedding on file."""
    grouped_mm: Literal["auto"] | MatmulBackend = "auto"
    """Kernels of the expert matmuls on a GPU, as in a job's `kernels.grouped_mm`."""
    tokenizer: str | None = None
    """`bytes`, or the path of a tokenizer.json or its directory; unset: the model's own."""


class EngineConfig(LoadConfig):
    """Settings of the inference engine."""

    memory: str | None = None
    """Memory of the process, such as "4GB" or "1500MiB", if the model is larger: experts that do
    not fit are read from its files. Unset: as much as the model needs."""
    max_running: int = Field(default=32, ge=1)
    """Texts that are generated at a time; further ones wait."""
    cache_tokens: int | None = Field(default=None, ge=PAGE_TOKENS)
    """Positions of the key-value cache over all texts; unset: as many as `max_running` texts
    need, within a quarter of the free memory or of `memory`."""
    tokens_per_pass: int = Field(default=512, ge=1)
    """Tokens of a forward pass at most; longer prompts take several passes."""

    @field_validator("memory")
    @classmethod
    def _check_memory(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                parse_bytes(value)
            except ValueError as error:
                raise ValueError(f"memory = {error}") from None
        return value

    @model_validator(mode="after")
    def _check_pass(self) -> Self:
        if self.tokens_per_pass < self.max_running:
            raise ValueError(
                f"tokens_per_pass = {self.tokens_per_pass} is less than max_running = "
                f"{self.max_running}, and a pass has a token of each text: raise tokens_per_pass, "
                "or lower max_running"
            )
        return self


class SamplingConfig(Section):
    """Settings of one text."""

    max_tokens: int = Field(default=128, ge=1)
    """Maximum number of tokens to generate per text."""
    temperature: float = Field(default=0.8, ge=0)
    """Sampling temperature; 0 always picks the most likely token, higher values flatten the
    distribution."""
    top_p: float = Field(default=0.95, gt=0, le=1)
    """Nucleus sampling: draw from the likeliest tokens whose probabilities sum to this."""
    top_k: int = Field(default=0, ge=0)
    """Draw from this many likeliest tokens; 0: all."""
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    """Subtracted from the score of each token that is among the new ones already."""
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    """Subtracted from the score of a token for each time that it is among the new ones."""
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] = Field(default_factory=dict)
    """Numbers to add to the scores of tokens, by token id."""
    control: ControlValues = ControlValues()
    """Attributes that the text should have, for models trained with [control]."""
    stop: str | list[str] = Field(default_factory=list)
    """Strings that end a text."""
    include_stop: bool = False
    """Keep the string that ends a text as part of it."""
    ignore_eos: bool = False
    """Go on after an end token, until `max_tokens` or a stop string."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Random seed; the same seed and prompt give the same text."""
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    """Texts per prompt; each has its own random draws."""
    logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    """Return the log-probability of each token, and of this many most likely ones."""

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _read_ids(cls, value: object) -> object:
        """Return integer keys: TOML and JSON have strings."""
        if not isinstance(value, dict):
            return value
        return {
            int(key) if isinstance(key, str) and key.isdecimal() else key: bias
            for key, bias in value.items()
        }


class GenerateConfig(EngineConfig, SamplingConfig):
    """Settings of `moesaic generate`."""

    system: str | None = None
    """System message before each prompt, in a chat."""


class AdversarialConfig(EngineConfig, SamplingConfig):
    """Settings of `moesaic generate --adversarial`."""

    resolved_keys: ClassVar[frozenset[str]] = frozenset({"n", "logprobs"})

    max_tokens: int = Field(default=512, ge=2)
    """Most tokens of a text, original or generated, prefix included."""
    text_key: str = "text"
    """Column of the text in JSON lines and Parquet."""

    @field_validator("n")
    @classmethod
    def _has_one(cls, n: int) -> int:
        if n != 1:
            raise ValueError(f"n = {n}: a paragraph has one continuation, remove n")
        return n


class EvalConfig(EngineConfig):
    """Settings of `moesaic eval`."""

    shots: int | None = Field(default=None, ge=0)
    """Examples in front of each question, drawn from the task's data; unset: as the task says."""
    limit: int | None = Field(default=None, ge=1)
    """Documents per task, the first ones; unset: all."""
    chat: bool = False
    """Send each question as a user message, by the model's chat template."""


class ServeConfig(EngineConfig):
    """Settings of `moesaic serve`."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 or :: lets other machines connect."""
    port: int = Field(default=8000, ge=0, lt=2**16)
    """Port to listen on; 0: any free one."""
    name: str | None = None
    """Name of the model for clients; unset: the name of its directory."""
    api_key: str | None = None
    """Key that clients must send; unset: none. Other users of the machine can read the command
    line, so `api_key_file` is safer."""
    api_key_file: str | None = None
    """Path of a file that holds the key."""
    context: int | None = Field(default=None, ge=1)
    """Most tokens of a prompt and its continuation; unset: as many as the model has positions and
    the key-value cache has room for."""
    max_waiting: int = Field(default=256, ge=1)
    """Texts that wait; further ones are answered with status 429."""
    drain_s: int = Field(default=60, ge=0)
    """Seconds that open answers may take after SIGTERM."""
    events: str | None = None
    """File to append decisions to, as JSON lines: how memory is divided, and each time that experts
    begin to be read in another way; unset: none."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe log lines on stderr; debug: also a line for each request."""
