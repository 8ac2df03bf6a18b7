"""Settings of an embedding table: optimizer, admission and eviction of keys, memory and drive.

With them, the layout of a row's record."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, field_validator

from moesaic.base.config import Section
from moesaic.base.units import parse_bytes

TableOptimizer = Literal["rowwise-adagrad", "adagrad", "adam", "sgd"]
"""Optimizers of embedding rows; each key has a state of its own."""
RowDType = Literal["float32", "float64"]
"""Types of values and optimizer state of rows."""


class TableConfig(Section):
    """Embedding rows by key: their optimizer, which keys have a row, and where rows are stored."""

    optimizer: TableOptimizer = "rowwise-adagrad"
    """Optimizer of the rows. rowwise-adagrad: one accumulator per row. adagrad: one per number.
    adam: two moments per number, and a step count per row. sgd: no state."""
    lr: float = Field(default=0.05, gt=0)
    """Learning rate of the rows."""
    epsilon: float = Field(default=1e-8, gt=0)
    """Term that keeps divisors above zero (rowwise-adagrad, adagrad, adam)."""
    betas: list[float] = Field(default=[0.9, 0.999], min_length=2, max_length=2)
    """Decay of the first and second moment (adam)."""
    init_std: float = Field(default=0.01, ge=0)
    """Standard deviation of first values, each a function of seed, key and column."""
    admit_count: int = Field(default=1, ge=1)
    """Samples with a key until the key gets a row. Earlier gradients of the key are dropped. The
    number decays by day; below 1, the key starts anew."""
    admit_score: float = Field(default=0.0, ge=0)
    """Score that a key needs to get a row; 0: any."""
    click_weight: float = Field(default=1.0, ge=0)
    """Share of a clicked sample in a key's score."""
    nonclick_weight: float = Field(default=0.1, ge=0)
    """Share of another sample in a key's score."""
    decay: float = Field(default=0.98, gt=0, le=1)
    """Factor on the score at the end of a day."""
    evict_score: float = Field(default=0.0, ge=0)
    """Score below which a key is evicted at the end of a day; 0: never."""
    evict_days: int = Field(default=0, ge=0)
    """Days without a sample after which a key is evicted; 0: never."""
    max_rows: int = Field(default=0, ge=0)
    """Rows of all ranks together at the end of a day; those with the lowest scores are evicted.
    0: no limit."""
    host: str = "auto"
    """Memory of a rank for rows and their index, such as "2GB". auto: no limit without
    `table.ssd`, else half of the memory that is free at the start, divided among the ranks of the
    host."""
    ssd: str | None = None
    """Directory on a drive for rows beyond `table.host`; unset: all rows are in memory."""
    demote_days: int = Field(default=0, ge=0)
    """Days without a sample after which a row moves to the drive; 0: only for lack of memory."""
    pass_steps: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Steps of a pass. While one pass trains, rows of the next are read from the drive. auto: as
    many as need half of the memory for rows, at most 64."""

    @field_validator("host")
    @classmethod
    def _is_size(cls, value: str) -> str:
        if value != "auto":
            parse_bytes(value)
        return value

    def conflicts(self) -> Iterator[str]:
        """Yield settings that are out of range, or need a drive."""
        if not all(0 <= beta < 1 for beta in self.betas):
            yield f"table.betas = {self.betas}: each is from 0 and below 1"
        if self.ssd is None and self.host != "auto":
            yield (
                f'table.host = "{self.host}" bounds the rows in memory, and the others need a '
                "drive: set table.ssd, or remove table.host (table.max_rows bounds their number)"
            )
        if self.ssd is None and self.demote_days:
            yield (
                f"table.demote_days = {self.demote_days} moves rows to a drive: set table.ssd, or "
                "remove the key"
            )

    @property
    def host_bytes(self) -> int | None:
        """Bytes of the budget; None: auto."""
        return None if self.host == "auto" else parse_bytes(self.host)


@dataclass(frozen=True)
class RecordLayout:
    """Places of the fields in a record: values, optimizer state, show, click, last day, steps."""

    dim: int
    """Numbers of a row."""
    dtype: RowDType
    """Type of values and optimizer state."""
    optimizer: TableOptimizer
    """Optimizer, which decides the state of a row."""

    @property
    def itemsize(self) -> int:
        """Bytes of one number."""
        return 4 if self.dtype == "float32" else 8

    @property
    def numbers(self) -> int:
        """Values and optimizer state of a record."""
        state = {"rowwise-adagrad": 1, "adagrad": self.dim, "adam": 2 * self.dim, "sgd": 0}
        return self.dim + state[self.optimizer]

    @property
    def counters(self) -> int:
        """Index of show among the record's 4-byte words; click, last day and steps follow."""
        return self.numbers * self.itemsize // 4

    @property
    def record_bytes(self) -> int:
        """Bytes of a record, a multiple of `itemsize`."""
        words = self.counters + (4 if self.optimizer == "adam" else 3)
        return -(-words * 4 // self.itemsize) * self.itemsize
