"""Job of a resumed run: its own job file and `--set` items, and what a new start changes in them.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moesaic.base import keys
from moesaic.base.config import parse_toml, read_json, read_text, tables_to_toml
from moesaic.base.errors import ConfigError

JOB_TEXT, RESOLVED_JOB, VERSIONS = "job.toml", "job.json", "versions.json"
"""Files of a run: the job as written, with every default, and the command of its start."""
FIXED_KEYS = frozenset({"seed", "optimizer.moments", "table.optimizer", "table.init_std"})
"""Keys that a resume must not change: they decide which state a checkpoint holds, or the initial
values of table rows."""
_START_COMMENTS = ("# --set ", "# --plan ", "# under the plan ")
_LEARNING_TABLES = (
    "schedule",
    "optimizer",
    "routing",
    "distill",
    "student",
    "credibility",
    "table",
)
_LEARNING_KEYS = frozenset(
    f"train.{key}" for key in ("steps", "batch", "micro_batches", "clip", "precision")
)
_HARMLESS_KEYS = FIXED_KEYS | {
    "routing.record", "table.host", "table.ssd", "table.demote_days", "table.pass_steps",
}  # fmt: skip
"""Keys of the tables above that are no change of the learning, or that no resume accepts."""


@dataclass(frozen=True)
class RunSource:
    """Job that a run was started with."""

    text: str
    """Text of the job file."""
    tables: Mapping[str, Any]
    """Tables of the job file."""
    sets: Sequence[str]
    """Items of `--set`, those of earlier resumes included."""
    has_plan: bool
    """True if the run obeys a plan: that of `--plan`, or of a search."""

    @classmethod
    def read(cls, run: Path) -> RunSource | None:
        """Return the job of the run at `run`; None if it has no job file."""
        path = run / JOB_TEXT
        if not path.is_file():
            return None
        text = read_text(path)
        started = _read_metadata(run / VERSIONS, "its --set items and its plan")
        sets = [str(item) for item in started.get("sets") or ()]
        tables = parse_toml(text, str(path))
        return cls(_without_comments(text), tables, sets, bool(started.get("has_plan")))

    def merged_sets(self, tables: Mapping[str, Any], sets: Sequence[str]) -> list[str]:
        """Return the run's items of `--set`, then `sets`.

        An item ends where `sets` have its key, or where the job file, now `tables`, has another
        value for it than at the start.
        """
        now = parse_toml(tables_to_toml(tables), "the job")
        ended = {*_edited_keys(self.tables, now), *map(_key_of, sets)}
        kept = [one for one in self.sets if not any(_overlaps(_key_of(one), key) for key in ended)]
        return [*kept, *sets]


def run_source(run: Path) -> RunSource:
    """Return the job of the run at `run`; raise if it has none."""
    source = RunSource.read(run)
    if source is None:
        raise ConfigError(
            f"'{run}' has no {JOB_TEXT}, so there is no run to continue: name its directory, or "
            "give the job file"
        )
    return source


def ruled_by_plan(run: Path) -> bool:
    """Return whether the run at `run` obeys a plan."""
    source = RunSource.read(run)
    return source is not None and source.has_plan


def resolved_job(run: Path) -> dict[str, Any]:
    """Return the job of the run at `run` with every default; empty if the file is missing."""
    return _read_metadata(run / RESOLVED_JOB, "a comparison with its earlier job")


def check_learning(run: Path, job: Mapping[str, Any]) -> None:
    """Raise if `job` would change what the run at `run` learns."""
    changes = list(learning_changes(resolved_job(run), job))
    if changes:
        raise ConfigError(
            f"resume: {'; '.join(changes)}: this changes what '{run}' learns; add --change "
            "(change=True) to take it, or leave it out to go on as before (moesaic train --out "
            "DIR --resume needs no job file)"
        )


def learning_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yield a clause for each change from one resolved job to another that alters the learning."""
    old, new = dict(flatten(before)), dict(flatten(now))
    if not old:
        return
    names = [set(student_names(one)) for one in (old, new)]
    yield from (f'student "{name}" leaves' for name in sorted(names[0] - names[1]))
    yield from (f'student "{name}" joins' for name in sorted(names[1] - names[0]))
    is_constant = all(one.get("schedule.kind") == "constant" for one in (old, new))
    for key in changed_keys(old, new):
        is_learning = key in _LEARNING_KEYS or key.partition(".")[0] in _LEARNING_TABLES
        if is_learning and key not in _HARMLESS_KEYS and not (is_constant and key == "train.steps"):
            yield f"{key} = {show_value(new.get(key))}, the run has {show_value(old.get(key))}"


def flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and values of a resolved job; students are named, not numbered."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        elif key == "student":
            for one in value:
                yield from flatten(one, f"{prefix}{key}.{one['name']}.")
        else:
            yield f"{prefix}{key}", value


def changed_keys(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yield keys whose values differ, including those of a table that only one of the jobs has.

    A key that an older version did not know is skipped.
    """
    for key in dict.fromkeys((*now, *before)):
        table = key.rpartition(".")[0]
        is_known = (key in before and key in now) or table in before or table in now
        if is_known and before.get(key) != now.get(key):
            yield key


def student_names(keys_of_job: Mapping[str, Any]) -> list[str]:
    """Return the names of the students of a flattened job."""
    return [str(value) for key, value in keys_of_job.items() if key == f"student.{value}.name"]


def show_value(value: object) -> str:
    """Return a value of a job for a message."""
    return "unset" if value is None else keys.show(value)


def _read_metadata(path: Path, loss: str) -> dict[str, Any]:
    """Return the object in a file of a run, empty if it is missing; without the file a resume does
    not have the `loss`."""
    if not path.exists():
        return {}
    remedy = f"restore it from a copy, or delete it to resume the run without {loss}"
    return read_json(path, f"'{path}'", remedy)


def _without_comments(text: str) -> str:
    """Return a job file without the comments that a start appended."""
    lines = text.splitlines()
    while lines and lines[-1].startswith(_START_COMMENTS):
        lines.pop()
    return "\n".join(lines).rstrip() + "\n"


def _edited_keys(before: Any, now: Any, prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys whose values differ between two files, missing ones included."""
    for key in dict.fromkeys((*before, *now)):
        old, new = before.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from _edited_keys(old, new, f"{prefix}{key}.")
        elif old != new:
            yield f"{prefix}{key}"


def _key_of(item: str) -> str:
    return ".".join(part.strip() for part in item.partition("=")[0].split("."))


def _overlaps(key: str, other: str) -> bool:
    """Return whether one of two keys is the other one, or a table that contains it."""
    return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")
