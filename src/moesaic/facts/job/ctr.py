"""Job that trains a recommender to predict clicks, and the checks between its tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from itertools import pairwise
from typing import ClassVar, Literal

from pydantic import Field

from moesaic.base.config import Section
from moesaic.facts.job.balance import no_effect
from moesaic.facts.job.clicks import ClicksConfig
from moesaic.facts.job.other_names import CTR_NAMES, CTR_WAYS
from moesaic.facts.job.recommender import RecommenderConfig
from moesaic.facts.job.table import RecordLayout, RowDType, TableConfig
from moesaic.facts.job.train import (
    CheckpointConfig,
    LogConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrainConfig,
    warmup_conflicts,
)


class CtrTrainConfig(TrainConfig):
    """Length, batch and precision of a job of kind "ctr"."""

    validation_samples: int = Field(default=100_000, ge=1)
    """Samples of one validation pass."""


class CtrJob(Section):
    """One training job of kind "ctr", with every default filled in."""

    other_names: ClassVar[Mapping[str, str]] = CTR_NAMES
    other_ways: ClassVar[Mapping[str, str]] = CTR_WAYS

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
    train: CtrTrainConfig
    """Length, batch and precision."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW of the network; rows have their own optimizer, in `table`."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Learning rate of the network over steps; rows keep theirs."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints that a run writes and keeps."""
    log: LogConfig = LogConfig()
    """Loggers besides the run's own events."""

    def conflicts(self) -> Iterator[str]:
        """Yield settings that recommenders lack, and those that do not go together."""
        train = self.train
        refused = {
            f'train.precision = "{train.precision}"': train.precision not in ("fp32", "fp64"),
            "train.recompute = true": train.recompute,
            'train.micro_batch_order = "by_block"': train.micro_batch_order == "by_block",
            f'optimizer.moments = "{self.optimizer.moments}"': self.optimizer.moments != "full",
        }
        for setting, is_refused in refused.items():
            if is_refused:
                yield f'{setting} does not work with kind = "ctr": remove it'
        yield from warmup_conflicts(self.schedule, train)
        has_data = not any(self.data.conflicts())
        if has_data and self.model.family == "dlrm" and not self.data.num_dense:
            yield (
                'model.family = "dlrm" needs dense features, and data has none: name some, or '
                'choose "ctr-dnn" or "dcn-v2"'
            )

    @property
    def has_validation(self) -> bool:
        """True if there are samples for validation."""
        return self.data.stream is not None or self.data.validation_path is not None

    def ineffective_settings(self, layout_keys: AbstractSet[str] | None = None) -> list[str]:
        """Return one sentence for each setting that was given, is not a default, and has no effect.

        The job has no layout, so `layout_keys` say nothing.
        """
        del layout_keys
        found = list[str]()
        if not self.has_validation:
            reason = "there are no samples for validation (data.validation_path)"
            given = self.train.non_default_fields & {"validate_every", "validation_samples"}
            found += no_effect("train", given, reason)
        if self.schedule.kind == "constant":
            given = self.schedule.non_default_fields & {"final"}
            found += no_effect("schedule", given, 'schedule.kind = "constant" does not decay')
        found += self._unused_table_settings()
        if self.checkpoint.every > self.train.steps:
            found.append(
                f"checkpoint.every = {self.checkpoint.every} is more than train.steps = "
                f"{self.train.steps}: the run saves only at the end"
            )
        return found

    def _unused_table_settings(self) -> list[str]:
        table = self.table
        given, found = table.non_default_fields, list[str]()
        if table.optimizer != "adam":
            reason = f'table.optimizer = "{table.optimizer}" has no moments'
            found += no_effect("table", given & {"betas"}, reason)
        if table.optimizer == "sgd":
            reason = 'table.optimizer = "sgd" divides by nothing'
            found += no_effect("table", given & {"epsilon"}, reason)
        return found

    @property
    def row_dtype(self) -> RowDType:
        """Type of values and optimizer state of rows."""
        return "float64" if self.train.precision == "fp64" else "float32"

    @property
    def row_bytes(self) -> int:
        """Bytes of a row with its optimizer state, counts and day."""
        return RecordLayout(self.model.dim, self.row_dtype, self.table.optimizer).record_bytes

    @property
    def num_network_parameters(self) -> int:
        """Parameters of the network: weights and biases of all its linear layers."""
        stacks = self.model.stack_widths(self.data.num_slots, self.data.num_dense)
        return sum((n + 1) * m for widths in stacks.values() for n, m in pairwise(widths))
