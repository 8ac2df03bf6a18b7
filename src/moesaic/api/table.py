"""Embedding tables by key, for anyone's own training loop and for serving."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, get_args

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from moesaic.base.config import parse, read_json
from moesaic.base.errors import ConfigError, write_error
from moesaic.base.files import atomic_replace
from moesaic.base.host_memory import free_memory_bytes
from moesaic.base.safetensors_file import sync_directory
from moesaic.facts.job.table import RowDType, TableConfig
from moesaic.policy.table_rows import choose_leaving
from moesaic.ps.snapshots import TableSnapshots
from moesaic.ps.stored_rows import EXPORT_MANIFEST, StoredRows
from moesaic.ps.table import Table as Rows
from moesaic.ps.table import TableStats
from moesaic.ps.table_shard import TableShard
from moesaic.ps.tiers import TableTiers

if TYPE_CHECKING:
    from moesaic.ps.table import Lookup

HEAD = "HEAD.json"
"""File that names the last snapshot of a saved table."""
_FORMAT, _VERSION = "moesaic-table", 1
_MACHINE_SETTINGS = ("host", "ssd", "demote_days")
"""Settings of the machine, which a stored table does not keep."""


class Table:
    """Embedding rows by key. A key is any int64; a key without a row has its first value."""

    def __init__(self, rows: Rows) -> None:
        """Take an empty table; `open` makes one."""
        self._open_rows: Rows | None = rows
        self.dim = rows.dim
        """Numbers per row."""
        self._path: Path | None = None
        self._facts: dict[str, dict[str, Any]] = {}
        """Facts of the last snapshot, by shard; empty before the first."""
        self._snapshots: TableSnapshots | None = None
        self._stack = ExitStack()
        if rows.config.ssd is not None:
            budget = rows.config.host_bytes or free_memory_bytes() // 2
            directory = Path(rows.config.ssd).expanduser()
            self._stack.callback(TableTiers(rows, directory, budget, choose_leaving).close)

    @classmethod
    def open(
        cls,
        path: str | Path | None = None,
        *,
        dim: int | None = None,
        seed: int | None = None,
        dtype: RowDType | None = None,
        read_only: bool = False,
        **settings: Any,
    ) -> Table:
        """Return a table; `save` writes it to its directory.

        Args:
            path: directory of the table, which need not exist; None: in memory alone. The
                directory of an exported recommender (`moesaic convert`) is read-only.
            dim: numbers per row; a new table needs it.
            seed: seed of first values; 0 for a new table.
            dtype: type of rows and of their optimizer state; "float32" for a new table.
            read_only: refuse changes, and leave the directory as it is.
            settings: keys of the table [table] of a job, such as `optimizer="adam"` or `lr=0.01`.
                A stored table keeps those that are not given, except for `host` and `ssd`.
        """
        if isinstance(settings.get("ssd"), Path):
            settings["ssd"] = str(settings["ssd"])
        given = _OpenArguments({"dim": dim, "seed": seed, "dtype": dtype}, settings)
        if path is None:
            if read_only:
                raise ConfigError("read_only needs path, the directory of a table")
            return cls(given.make_rows())
        place = Path(path).expanduser()
        if (place / EXPORT_MANIFEST).is_file():
            if not read_only:
                raise ConfigError(
                    f"'{place}' is an exported table, which does not change: open it with "
                    "read_only=True"
                )
            stored = StoredRows.open_export(place)
            return cls._restore(stored, place, given, read_only=True)
        return cls._open_saved(place, given, read_only)

    @classmethod
    def _open_saved(cls, path: Path, given: _OpenArguments, read_only: bool) -> Table:
        """Return the table that was saved in a directory, or a new one for it."""
        facts = _read_head(path, read_only)
        if facts:
            stored = StoredRows.open_snapshot(path, facts)
            table = cls._restore(stored, path, given, read_only=read_only)
        else:
            table = cls(given.make_rows(path))
        if not read_only:
            try:
                table._watch(path, facts)
            except BaseException:
                table.close()
                raise
        return table

    @classmethod
    def open_stored(
        cls, stored: StoredRows, path: Path, settings: dict[str, Any], *, read_only: bool
    ) -> Table:
        """Return a table with stored rows, which came from `path`; `settings` as in `open`."""
        return cls._restore(stored, path, _OpenArguments({}, settings), read_only=read_only)

    @classmethod
    def _restore(
        cls, stored: StoredRows, path: Path, given: _OpenArguments, *, read_only: bool
    ) -> Table:
        table = cls(given.make_equal_rows(stored, path, read_only=read_only))
        try:
            TableShard(table._rows).restore(stored)
        except BaseException:
            table.close()
            raise
        return table

    @property
    def _rows(self) -> Rows:
        """Rows of the table; raise if it is closed, as rows on its drive are gone."""
        if self._open_rows is None:
            raise ConfigError("the table is closed: open it again")
        return self._open_rows

    def _watch(self, path: Path, facts: dict[str, dict[str, Any]]) -> None:
        """Lock the directory and note changes for `save`."""
        self._path, self._facts = path, facts
        self._snapshots = self._stack.enter_context(
            TableSnapshots(path, TableShard(self._rows), 0, 1, lambda: [self._facts])
        )
        if facts:
            self._snapshots.resume(facts)

    def __len__(self) -> int:
        return self._rows.num_rows

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def pull(self, keys: ArrayLike | Tensor) -> Any:
        """Return the rows of keys, [keys, dim]: a torch tensor for a torch tensor of keys, else a
        numpy array. Nothing is stored."""
        values = self._rows.pull(_to_numpy(keys))
        return torch.from_numpy(values) if isinstance(keys, Tensor) else values

    def push(
        self,
        keys: ArrayLike | Tensor,
        grads: ArrayLike | Tensor,
        clicks: ArrayLike | Tensor | None = None,
    ) -> None:
        """Update the rows of keys by gradients. Those of equal keys are summed first.

        Args:
            keys: a key per sample, [n].
            grads: gradients, [n, dim].
            clicks: 1 for a clicked sample, else 0, [n]; None: none was clicked.
        """
        self._rows.push(_to_numpy(keys), _to_numpy(grads), _to_numpy(clicks))

    def _check_writable(self) -> None:
        """Raise ConfigError if the table is read-only."""
        if self._rows.read_only:
            raise ConfigError("the table is read-only: open it without read_only")

    def _check_stepped(self, call: str) -> None:
        """Raise ConfigError if the table is read-only, or gradients wait for `step`."""
        self._check_writable()
        if self._rows.num_pending:
            raise ConfigError(
                f"gradients of {self._rows.num_pending} look-ups wait for step(): call it before "
                f"{call}()"
            )

    def look_up(
        self, keys: NDArray[np.int64], offsets: NDArray[np.int64], *, training: bool
    ) -> Lookup:
        """Return the sums of rows in bags, for `TableBag`."""
        return self._rows.look_up(keys, offsets, training=training)

    def step(self) -> None:
        """Update the rows by the gradients that `TableBag` collected since the last call."""
        self._check_writable()
        self._rows.step()

    def end_day(self) -> int:
        """End a day: scores decay, rows are evicted by the settings. Return how many were."""
        self._check_stepped("end_day")
        return self._rows.end_day()

    def stats(self) -> TableStats:
        """Return rows, bytes in memory, and counts since the table was opened."""
        return self._rows.stats()

    def save(self) -> None:
        """Write what changed since the last save; the directory holds the old or the new table."""
        self._check_stepped("save")
        if self._path is None or self._snapshots is None:
            raise ConfigError("the table is in memory alone: open it with path, a directory")
        number = 1 + max((int(one["step"]) for one in self._facts.values()), default=0)
        facts = {"0": {**self._snapshots.begin(number)(), "step": number}}
        content = {"format": _FORMAT, "version": _VERSION, "shards": facts}
        head = self._path / HEAD
        try:
            with atomic_replace(head) as partial, partial.open("w", encoding="utf-8") as file:
                file.write(json.dumps(content))
                file.flush()
                os.fsync(file.fileno())
            sync_directory(self._path)
        except OSError as error:
            raise write_error(f"'{head}'", error) from error
        self._facts = facts

    def close(self) -> None:
        """Unlock the directory; what was not saved is lost."""
        self._stack.close()
        self._open_rows = self._snapshots = None


class _OpenArguments(NamedTuple):
    """Arguments of `Table.open`."""

    identity: dict[str, Any]
    """`dim`, `seed` and `dtype`; None: not given."""
    settings: dict[str, Any]
    """Keys of [table]."""

    def make_rows(self, path: Path | None = None) -> Rows:
        """Return the rows of a new table for a directory."""
        dim, seed, dtype = self.identity.values()
        if dim is None:
            where = "" if path is None else f"'{path}' holds no table yet: check the path, or pass "
            raise ConfigError(
                f"{where or 'dim is missing: pass '}dim, the numbers per row of a new table"
            )
        if type(dim) is not int or dim < 1:
            raise ConfigError(f"dim = {dim!r}: a row needs an integer from 1")
        if dtype not in (None, *get_args(RowDType)):
            raise ConfigError(
                f"dtype = {dtype!r}: use {' or '.join(map(repr, get_args(RowDType)))}"
            )
        config = parse(TableConfig, self.settings, "Table.open")
        return Rows(config, dim, seed=seed or 0, dtype=dtype or "float32")

    def make_equal_rows(self, stored: StoredRows, path: Path, *, read_only: bool) -> Rows:
        """Return the empty rows of a stored table; raise for a setting that it does not have."""
        kept, layout = stored.manifests[0].facts["config"], stored.layout
        fixed = {**layout.model_dump(include={"dim", "seed", "dtype"}),
                 "optimizer": layout.optimizer, "init_std": kept["init_std"]}  # fmt: skip
        for name, value in {**self.identity, **self.settings}.items():
            if name in fixed and value not in (None, fixed[name]):
                raise ConfigError(
                    f"{name} = {value}, but the table in '{path}' has {fixed[name]}: remove "
                    f"{name}, or name another directory"
                )
        kept = {name: value for name, value in kept.items() if name not in _MACHINE_SETTINGS}
        config = parse(TableConfig, {**kept, **self.settings}, "Table.open")
        return Rows(
            config, layout.dim, seed=layout.seed, name=layout.table,
            dtype=layout.dtype,
            read_only=read_only,
        )  # fmt: skip


def open_saved_rows(path: Path) -> StoredRows:
    """Return the rows that `Table.save` wrote to a directory."""
    return StoredRows.open_snapshot(path, _read_head(path, read_only=True))


def _read_head(path: Path, read_only: bool) -> dict[str, dict[str, Any]]:
    """Return the facts of the last snapshot in a directory, by shard; none for a new table."""
    if (path / HEAD).is_file():
        content = read_json(path / HEAD, f"table '{path}'", "restore the directory from a backup")
        if (content.get("format"), content.get("version")) != (_FORMAT, _VERSION):
            raise ConfigError(
                f"'{path / HEAD}' is of another format or version: open it with the moesaic that "
                "wrote it"
            )
        shards: dict[str, dict[str, Any]] = content["shards"]
        return shards
    if (path / "job.json").is_file():
        raise ConfigError(
            f"'{path}' is a run: write its table out (moesaic convert {path} --out DIR), and open "
            "DIR with read_only=True"
        )
    others = [one for one in path.iterdir() if one.name != "shard-0"] if path.is_dir() else []
    if read_only or others or path.is_file():
        raise ConfigError(
            f"'{path}' holds no table: give the directory of one"
            + ("" if read_only else ", or an empty one for a new table")
        )
    return {}


def _to_numpy(values: Any) -> Any:
    if not isinstance(values, Tensor):
        return values
    narrow = values.dtype in (torch.bfloat16, torch.float16)  # numpy has no bfloat16.
    return (values.detach().float() if narrow else values.detach()).cpu().numpy()
