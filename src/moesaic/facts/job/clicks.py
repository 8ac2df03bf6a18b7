"""Settings of click data: files or a built-in stream, and their columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from moesaic.base.config import Section

CRITEO_DENSE, CRITEO_SLOTS = 13, 26
"""Dense features and slots of a line of Criteo TSV, after its label."""


class StreamConfig(Section):
    """Built-in stream of samples whose true click probabilities are known."""

    days: int = Field(default=4, ge=1)
    """Days of training samples. The day after them is for validation."""
    samples_per_day: int = Field(default=100_000, ge=1)
    """Samples of a day."""
    slots: int = Field(default=8, ge=1, le=1024)
    """Slots of a sample."""
    dense: int = Field(default=4, ge=0, le=1024)
    """Dense features of a sample."""
    keys: int = Field(default=100_000, ge=2)
    """Keys of a slot."""
    zipf: float = Field(default=1.05, ge=0)
    """Exponent of the frequencies of keys; 0: all keys are equally frequent."""
    multi_hot: int = Field(default=1, ge=1)
    """Most keys of one slot in a sample. Every second slot has from 0 to this many; the others
    have one."""
    drift: float = Field(default=0.02, ge=0, le=1)
    """Share of the keys that others replace from one day to the next."""
    users: int = Field(default=1000, ge=1)
    """Users, for GAUC."""


class ClicksConfig(Section):
    """Samples of clicks: a label, dense features, and keys by slot."""

    path: str | None = None
    """Training samples: a file, a directory or a glob, whose files are days in the order of their
    names (day_2 before day_10). Unset: `data.stream`."""
    format: Literal["auto", "criteo", "parquet"] = "auto"
    """Format of the files; auto: parquet if `path` ends with .parquet or .pq, else criteo. criteo:
    TSV of a label, 13 dense features and 26 slots, also gzipped. parquet: columns that `label`,
    `dense` and `slots` name."""
    label: str = "label"
    """Column of the label, 0 or 1 (parquet)."""
    dense: list[str] = Field(default=[])
    """Columns of dense features (parquet); missing values and NaN are 0."""
    slots: list[str] = Field(default=[])
    """Columns of slots (parquet): integers, strings, or lists of them. Missing values and empty
    strings are no key. The integer 7 and the string "7" are different keys."""
    weight: str | None = None
    """Column of sample weights (parquet); unset or missing: 1."""
    user: str | None = None
    """Column of users, for GAUC (parquet); unset: no GAUC. Missing users count as one user."""
    log_dense: bool = True
    """Replace each dense feature x by the sign of x times log(1 + |x|)."""
    max_bad_lines: int = Field(default=0, ge=0)
    """Malformed lines that are left out before the run fails; each is counted and shown."""
    validation_path: str | None = None
    """Samples for validation, in the format of `path`; unset: none."""
    shuffle: bool = True
    """Shuffle the samples of a day anew in each epoch. Days keep their order."""
    cache: str | None = None
    """Directory for samples in binary form, safe to delete; unset: ~/.cache/moesaic/clicks."""
    stream: StreamConfig | None = None
    """Built-in stream, in place of files."""

    def conflicts(self) -> Iterator[str]:
        """Yield settings that contradict the source of the samples, or have no effect with it."""
        if (self.path is None) == (self.stream is None):
            both = self.path is not None
            yield (
                f'data.path = "{self.path}" and [data.stream] exclude each other: remove one'
                if both
                else "data names no samples: set data.path to files, or add [data.stream]"
            )
        elif self.stream is not None:
            yield from self._unused_conflicts(
                type(self).model_fields.keys() - {"stream", "shuffle", "cache"}
            )
        elif self.is_parquet and not self.slots:
            yield (
                f'data.path = "{self.path}" is Parquet, and data.slots names no columns: list the '
                "columns of keys"
            )
        elif not self.is_parquet:
            yield from self._unused_conflicts({"label", "dense", "slots", "weight", "user"})

    def _unused_conflicts(self, names: set[str]) -> Iterator[str]:
        """Yield given settings among `names` that have no effect with the source of the samples."""
        for name in sorted(self.non_default_fields & names):
            if self.stream is not None:
                yield f"data.{name} has no effect with [data.stream]: remove it"
                continue
            is_known = self.format == "criteo"
            why = "" if is_known else f', and data.path = "{self.path}" is no Parquet'
            yield (
                f"data.{name} has no effect with Criteo TSV{why}: remove it, or set "
                'data.format = "parquet"'
            )

    @property
    def is_parquet(self) -> bool:
        """True if the files are Parquet."""
        if self.format == "auto":
            return str(self.path).endswith((".parquet", ".pq"))
        return self.format == "parquet"

    @property
    def num_slots(self) -> int:
        """Slots of a sample."""
        if self.stream is not None:
            return self.stream.slots
        return len(self.slots) if self.is_parquet else CRITEO_SLOTS

    @property
    def num_dense(self) -> int:
        """Dense features of a sample."""
        if self.stream is not None:
            return self.stream.dense
        return len(self.dense) if self.is_parquet else CRITEO_DENSE

    @property
    def has_users(self) -> bool:
        """True if samples have users, as GAUC needs."""
        return self.stream is not None or self.user is not None
