"""The whole job and what must hold between its parts."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from moesaic.base.config import Section
from moesaic.base.errors import ConfigError
from moesaic.facts.job.data import DataConfig
from moesaic.facts.job.model import PRESETS, ModelConfig
from moesaic.facts.job.routing import RoutingConfig
from moesaic.facts.job.train import (
    CheckpointConfig,
    LayoutConfig,
    LogConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrainConfig,
)


class Job(Section):
    """One training job, every default filled in."""

    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of everything random: initial weights, order of samples, noise."""
    source: str | None = None
    """Hugging Face model directory that the weights come from (`[model] from` in the file)."""
    model: ModelConfig
    """The model: `preset = NAME` and changes to it, `from = DIR`, or every size."""
    routing: RoutingConfig = RoutingConfig()
    """How tokens find experts."""
    layout: LayoutConfig = LayoutConfig()
    """How the ranks share the model."""
    data: DataConfig
    """Text, tokenizer and packing."""
    train: TrainConfig
    """Length, batch and precision."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer."""
    schedule: ScheduleConfig = ScheduleConfig()
    """The learning rate over steps."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When the run saves, and what it keeps."""
    log: LogConfig = LogConfig()
    """Where figures go."""

    @model_validator(mode="after")
    def _consistent(self) -> Job:
        model, ep = self.model, self.layout.ep
        if model.experts % ep or (ep > 1 and not model.experts):
            raise ValueError(
                f"layout.ep = {ep} does not divide model.experts = {model.experts}: "
                "choose a divisor of the number of experts"
            )
        needs = {"switch": 1, "gshard": 2}.get(self.routing.router)
        if needs is not None and model.top_k != needs:
            raise ValueError(
                f"routing.router = '{self.routing.router}' chooses {needs} of the experts, "
                f"but model.top_k = {model.top_k}: set model.top_k = {needs}"
            )
        if self.schedule.warmup > self.train.steps:
            raise ValueError(
                f"schedule.warmup = {self.schedule.warmup} is longer than "
                f"train.steps = {self.train.steps}"
            )
        if self.data.sequence > model.max_positions:
            raise ValueError(
                f"data.sequence = {self.data.sequence} is longer than "
                f"model.max_positions = {model.max_positions}: shorten it, or raise the latter"
            )
        return self


def fill_preset(raw: dict[str, Any], origin: str) -> dict[str, Any]:
    """`raw` with `[model] preset = NAME` replaced by the preset's sizes under the user's own keys."""
    model = raw.get("model")
    if not isinstance(model, dict) or "preset" not in model:
        return raw
    chosen = dict(model)
    name = chosen.pop("preset")
    if name not in PRESETS:
        raise ConfigError(
            f"{origin}: model.preset = {name!r} is unknown: choose one of {', '.join(PRESETS)}"
        )
    return {**raw, "model": {**PRESETS[name], **chosen}}
