"""Runs: what a training run recorded, as tables, a report, and replays of balance policies."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesaic.api.loads import latest_loads
from moesaic.base.config import parse
from moesaic.base.errors import ConfigError, StoreError
from moesaic.base.events import RUN_LOG, find_run_log, read_events

if TYPE_CHECKING:
    import pyarrow as pa

    from moesaic.report import RunStats


_FAILURES = ("diverged", "all_skipped")


def failure_in(summary: Mapping[str, Any]) -> str | None:
    """Return how the run of a summary diverged or learnt nothing, the likely cause and what to do;
    None if it did neither."""
    for one in summary["findings"]:
        if one["kind"] in _FAILURES:
            return f"{one['title'][0].lower()}{one['title'][1:]}. {one['text']}"
    return None


class Run:
    """The directory of one training run; tables are Arrow tables (`.to_pandas()` converts one)."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @classmethod
    def open(cls, directory: str | Path) -> Run:
        """Return the run in a directory, finished or not."""
        path = Path(directory)
        try:
            find_run_log(path)
        except StoreError as error:
            raise ConfigError(str(error)) from None
        return cls(path)

    @property
    def job(self) -> dict[str, Any]:
        """Job of the run, with every default filled in."""
        return self._stats().job

    def steps(self) -> pa.Table:
        """Return a row per step: loss, learning rate, seconds, other figures such as the AUC of
        clicks, and seconds of each phase. Columns that no step has are left out."""
        import numpy as np
        import pyarrow as pa

        stats = self._stats()
        columns = dict(vars(stats.steps))
        phases, figures = columns.pop("phases"), columns.pop("figures")
        units = {"tokens": stats.unit, "tokens_per_s": f"{stats.unit}_per_s"}
        named = {
            units.get(name, name): values
            for name, values in columns.items()
            if not len(values) or not np.isnan(values).all()
        }
        named["step"] = columns["step"].astype(int)
        return pa.table(
            {**named, **figures, **{f"{name}_s": values for name, values in phases.items()}}
        )

    def loads(self) -> pa.Table:
        """Return a row per recorded step and layer: `counts` has the tokens of each expert.

        `counts_by_rank` has them by rank, [ranks of the stage x experts]. A dense model has no row.
        """
        import pyarrow as pa

        table = latest_loads(self.directory)
        return pa.table({"step": [], "layer": [], "counts": []}) if table is None else table

    def decisions(self) -> pa.Table:
        """Return a row per decision: `kind` is "balance" (replicas) or "migration" (owners)."""
        import pyarrow as pa

        by_step: dict[int, Mapping[str, Sequence[Mapping[str, Any]]]] = {}
        for event in read_events(self.directory / RUN_LOG):
            if event["event"] == "decisions":
                by_step[event["step"]] = event
        rows = [
            {"step": step, "kind": kind, **decision}
            for step, event in sorted(by_step.items())
            for kind in ("balance", "migration")
            for decision in event.get(kind, ())
        ]
        names = dict.fromkeys(["step", "kind", "layer", *(name for row in rows for name in row)])
        return pa.table({name: [row.get(name) for row in rows] for name in names})

    def summary(self) -> dict[str, Any]:
        """Return headline figures and findings, as `moesaic report --json` prints them."""
        from moesaic.report import summary

        return summary(self._stats())

    def failure_since(self, time_s: float) -> str | None:
        """Return how the run diverged, the likely cause and what to do, if it took a step after a
        time, in seconds since the epoch; else None."""
        stats = self._stats()
        began = stats.launches[-1] if stats.launches else None
        if began is None or began.start_s < time_s or stats.last_step <= began.step:
            return None
        if stats.status != "diverged":  # The first steps in fp16 may all be skipped.
            return None
        from moesaic.report import summary

        return failure_in(summary(stats))

    def report(self, out: str | Path | None = None) -> Path:
        """Write a page of charts and findings, and return its path; None: RUN/report.html."""
        from moesaic.report import write_report

        page = self.directory / "report.html" if out is None else Path(out)
        write_report(self.directory, page)
        return page

    def replay(self, policy: str = "quota", **settings: Any) -> dict[str, Any]:
        """Return the predicted effect of a balance policy on the recorded expert loads.

        `settings` are those of `moesaic replay`, such as `max_replicas=2`.
        """
        from moesaic.api.replay import ReplayConfig, replay_run

        config = parse(ReplayConfig, {"policy": policy, **settings}, "replay")
        for text in config.ineffective_settings():
            warnings.warn(text, stacklevel=2)
        return replay_run(self.directory, config)

    def replay_memory(self, memory: str, residency: str = "next-use") -> dict[str, Any]:
        """Return what rank 0 would have read and written with a memory budget, such as "2GB"; see
        `moesaic replay --memory`."""
        from moesaic.api.memory_replay import replay_memory

        return replay_memory(self.directory, memory, residency)

    def _stats(self) -> RunStats:
        from moesaic.report import RunStats

        return RunStats.read(self.directory)
