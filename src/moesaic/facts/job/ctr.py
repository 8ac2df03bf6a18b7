"""Job that trains a recommender to predict clicks, and the checks between its tables."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

from pydantic import Field, model_validator

from moesaic.base.config import Section
from moesaic.facts.job.clicks import ClicksConfig
from moesaic.facts.job.recommender import RecommenderConfig
from moesaic.facts.job.table import TableConfig
from moesaic.facts.job.train import (
    CheckpointConfig,
    LogConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrainConfig,
)


class CtrJob(Section):
    """One training job of kind "ctr", with every default filled in."""

    kind: Literal["ctr"]
    """Kind of job. ctr: a recommender that predicts clicks."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of all randomness: initial weights and rows, order of samples, the built-in stream."""
    model: RecommenderConfig
    """Network over embedding rows and dense features."""
    table: TableConfig = TableConfig()
    """Embedding rows by key."""
    data: ClicksConfig
    """Samples of clicks."""
    train: TrainConfig
    """Length, batch and precision."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW of the network; rows have their own optimizer, in `table`."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Learning rate of the network over steps; rows keep theirs."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints that a run writes and keeps."""
    log: LogConfig = LogConfig()
    """Loggers besides the run's own events."""

    @model_validator(mode="after")
    def _consistent(self) -> CtrJob:
        train = self.train
        refused = {
            f'train.precision = "{train.precision}"': train.precision not in ("fp32", "fp64"),
            "train.recompute = true": train.recompute,
            'train.micro_batch_order = "by_block"': train.micro_batch_order == "by_block",
            f'optimizer.moments = "{self.optimizer.moments}"': self.optimizer.moments != "full",
        }
        for setting, is_refused in refused.items():
            if is_refused:
                raise ValueError(f'{setting} does not work with kind = "ctr": remove it')
        if self.schedule.warmup > train.steps:
            raise ValueError(
                f"schedule.warmup = {self.schedule.warmup} is longer than "
                f"train.steps = {train.steps}: shorten the warm-up, or train longer"
            )
        if self.model.family == "dlrm" and not self.data.num_dense:
            raise ValueError(
                'model.family = "dlrm" needs dense features, and data has none: name some, or '
                'choose "ctr-dnn" or "dcn-v2"'
            )
        return self

    @property
    def has_validation(self) -> bool:
        """True if there are samples for validation."""
        return self.data.stream is not None or self.data.validation_path is not None

    @property
    def num_network_parameters(self) -> int:
        """Parameters of the network: weights and biases of all its linear layers."""
        stacks = self.model.stack_widths(self.data.num_slots, self.data.num_dense)
        return sum((n + 1) * m for widths in stacks.values() for n, m in pairwise(widths))
