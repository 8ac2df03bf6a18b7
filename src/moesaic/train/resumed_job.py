"""Job of a resumed run: its own job file and `--set` items, and what a new start changes in them.

They come from the checkpoint, which holds them beside the state: the run's newest one, unless an
older one is named. The files in the run's directory tell of its last start, which may have ended
before it saved anything. Only a run without a checkpoint is read from them. Nothing here imports
torch unless there is a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Any

from moesaic.base import keys
from moesaic.base.config import parse_toml, read_json, read_text, tables_to_toml
from moesaic.base.errors import ConfigError, StoreError
from moesaic.base.units import plural

JOB_TEXT, RESOLVED_JOB, PLAN, VERSIONS = "job.toml", "job.json", "plan.json", "versions.json"
"""Files of a start: the job as written and with every default, the plan, and the command. The last
one is written last, with hashes of the others."""
START = "start"
"""Fact of a checkpoint: `--set` items, plan and text of the job of the start that wrote it."""
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
    [f"train.{key}" for key in ("steps", "batch", "micro_batches", "clip", "precision")]
    + ["data.sequence", "data.format", "data.packing", "data.column", "data.validation_share"]
)
_HARMLESS_KEYS = FIXED_KEYS | {
    "routing.record", "table.host", "table.ssd", "table.demote_days", "table.pass_steps",
}  # fmt: skip
"""Keys of the tables above that are no change of the learning, or that no resume accepts."""


@dataclass(frozen=True)
class RunSource:
    """Job that a run goes on with."""

    text: str
    """Text of the job file."""
    tables: Mapping[str, Any]
    """Tables of the job file."""
    sets: Sequence[str]
    """Items of `--set`, those of earlier resumes included."""
    has_plan: bool
    """True if the run obeys a plan: that of `--plan`, or of a search."""
    job: Mapping[str, Any]
    """Job with every default; empty if unknown."""
    plan: Mapping[str, Any] | None
    """Content of the plan; None if unknown."""
    checkpoint: Path | None
    """Checkpoint that holds all this; None: the files of the run do."""

    @classmethod
    def read(cls, origin: Path) -> RunSource | None:
        """Return the job of `origin`, a run or a checkpoint; None if it has neither a checkpoint
        with a job nor a job file."""
        found = _newest_facts(origin) if run_of(origin) == origin else _facts(origin)
        if found is not None:
            path, facts = found
            return cls._of(facts[START], facts["job"], path, f"job of '{path}'")
        run = run_of(origin)
        path = run / JOB_TEXT
        if not path.is_file():
            return None
        started = {**_read_metadata(run / VERSIONS, "its --set items and its plan")}
        plan = _read_metadata(run / PLAN, "its ranks and its plan") or None
        record = {**started, "text": read_text(path), "plan": plan}
        job = _read_metadata(run / RESOLVED_JOB, "a comparison with its earlier job")
        return cls._of(record, job, None, str(path))

    @classmethod
    def _of(
        cls, record: Mapping[str, Any], job: Mapping[str, Any], path: Path | None, origin: str
    ) -> RunSource:
        text = str(record["text"])
        sets = [str(item) for item in record.get("sets") or ()]
        return cls(
            _without_comments(text), parse_toml(text, origin), sets, bool(record.get("has_plan")),
            job, record["plan"], path,
        )  # fmt: skip

    def merged_sets(self, tables: Mapping[str, Any], sets: Sequence[str]) -> list[str]:
        """Return the run's items of `--set`, then `sets`.

        An item ends where `sets` have its key, or where the job file, now `tables`, has another
        value for it than at the start.
        """
        now = parse_toml(tables_to_toml(tables), "the job")
        ended = {*_edited_keys(self.tables, now), *map(_key_of, sets)}
        kept = [one for one in self.sets if not any(_overlaps(_key_of(one), key) for key in ended)]
        return [*kept, *sets]


def run_of(origin: Path) -> Path:
    """Return the run that the checkpoint `origin` belongs to; a run is its own."""
    return origin.absolute().parent.parent if (origin / "COMMIT").is_file() else origin


def job_name(origin: Path) -> str:
    """Return the name of the job of a run or of a checkpoint, for messages."""
    return str(origin / JOB_TEXT) if run_of(origin) == origin else f"job of '{origin}'"


def run_source(origin: Path) -> RunSource:
    """Return the job of a run or of a checkpoint; raise if it has none."""
    source = RunSource.read(origin)
    if source is None and run_of(origin) != origin:
        raise ConfigError(f"'{origin}' belongs to no run and holds no job: give the job file")
    if source is None:
        raise ConfigError(
            f"'{origin}' has no {JOB_TEXT}, so there is no run to continue: name its directory, or "
            f"start one (moesaic train JOB.toml --out {shlex.quote(str(origin))} --resume)"
        )
    return source


def start_record(
    text: str, sets: Sequence[str], plan_json: str, *, has_plan: bool
) -> dict[str, Any]:
    """Return what a checkpoint keeps of a start, so that a resume needs nothing else."""
    return {"text": text, "sets": list(sets), "has_plan": has_plan, "plan": json.loads(plan_json)}


def _facts(checkpoint: Path) -> tuple[Path, dict[str, Any]] | None:
    """Return a checkpoint and its facts; None if they have no job to go on with."""
    from moesaic.dist.checkpoint import Checkpoint

    facts = Checkpoint.open(checkpoint).facts
    return (checkpoint, facts) if START in facts else None


def _newest_facts(run: Path) -> tuple[Path, dict[str, Any]] | None:
    """Return the newest checkpoint whose manifest is whole, and its facts; None if there is none
    with a job to go on with."""
    if not any((run / "checkpoints").glob("step-*/COMMIT")):
        return None
    from moesaic.dist.checkpoint import resume_candidates

    for path in resume_candidates(run / "checkpoints"):
        with suppress(StoreError):  # A resume that needs this one reports the damage.
            return _facts(path)
    return None


def resolved_job(origin: Path) -> Mapping[str, Any]:
    """Return the job of a run or of a checkpoint with every default; empty if it is unknown."""
    source = RunSource.read(origin)
    if source is not None:
        return source.job
    return _read_metadata(run_of(origin) / RESOLVED_JOB, "a comparison with its earlier job")


def unkept_changes(
    origin: Path,
    job: Mapping[str, Any],
    ranks: int,
    given: Sequence[Path] = (),
    sets: Sequence[str] = (),
) -> list[str]:
    """Return a sentence for each difference between the files of a run and the checkpoint that it
    goes on from: edits by hand, and changes by a start that saved nothing or by a later one.

    A resume with the resolved `job` takes the edits in files that are `given`, and what `sets` say.
    """
    source, run = RunSource.read(origin), run_of(origin)
    if source is None:
        return []
    taken = {one.resolve() for one in given}
    edited = [name for name in _edited_files(run) if (run / name).resolve() not in taken]
    if source.checkpoint is None:
        return [
            f"'{run / name}' was edited after the start: it counts as it stands" for name in edited
        ]
    where = f"a resume goes on with the settings of '{source.checkpoint}'"
    remedies = {JOB_TEXT: f"moesaic train {run / JOB_TEXT} ...", PLAN: f"--plan {run / PLAN}"}
    texts = [
        f"'{run / name}' was edited after the start, and {where}: "
        + (
            f"to take the edits, give {remedies[name]}"
            if name in remedies
            else "give changes with --set"
        )
        for name in edited
    ]
    if RESOLVED_JOB in edited or not (run / RESOLVED_JOB).is_file():
        return texts
    last = dict(flatten(_read_metadata(run / RESOLVED_JOB, "a comparison with its earlier job")))
    kept, now = dict(flatten(source.job)), dict(flatten(job))
    lost = [
        f"{key} = {show_value(last.get(key))}" for key in changed_keys(kept, last)
        if now.get(key) == kept.get(key) and not any(_overlaps(_key_of(one), key) for one in sets)
    ]  # fmt: skip
    earlier = (source.plan or {}).get("ranks")
    latest = _read_metadata(run / PLAN, "a comparison with its earlier plan").get("ranks", earlier)
    if latest != earlier == ranks:
        lost.append(f"{plural(int(latest or 1), 'rank')} (--nproc {latest})")
    if lost and origin == run:
        where = f"the last start of '{run}' saved nothing, and {where}"
    if lost:
        texts.append(
            f"{where}, so without the last start's {', '.join(lost)}: give what you want to keep "
            "again"
        )
    return texts


def _edited_files(run: Path) -> list[str]:
    """Return the names of files of a start that differ from their hashes in the last one."""
    try:
        versions = json.loads((run / VERSIONS).read_bytes())
        hashes = versions.get("sha256", {})  # Older runs have none.
        return [
            name for name, digest in hashes.items()
            if (run / name).is_file() and file_hash((run / name).read_bytes()) != digest
        ]  # fmt: skip
    except (OSError, ValueError, TypeError, AttributeError):
        return [VERSIONS] if (run / VERSIONS).exists() else []


def file_hash(content: bytes) -> str:
    """Return the hash of a file of a start."""
    return hashlib.sha256(content).hexdigest()


def check_learning(origin: Path, job: Mapping[str, Any]) -> None:
    """Raise if `job` would change what a run learns that goes on from `origin`."""
    before = resolved_job(origin)
    changes = list(learning_changes(before, job))
    if changes:
        old, new = dict(flatten(before)), dict(flatten(job))
        changes += [_change(key, old, new) for key in changed_keys(old, new) if _is_of_text(key)]
        words = ["--resume", str(origin)]
        if run_of(origin) == origin:
            words = ["--out", str(origin), "--resume"]
        raise ConfigError(
            f"resume: {'; '.join(changes)}: this changes what '{run_of(origin)}' learns; add "
            "--change (change=True in Python) to take it, or leave it out to go on as before "
            f"(moesaic train {shlex.join(words)} needs no job file)"
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
            yield _change(key, old, new)


def _is_of_text(key: str) -> bool:
    """Return whether a key may change the text, which only reading it tells."""
    return key.startswith("data.") and key != "data.cache" and key not in _LEARNING_KEYS


def _change(key: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    return f"{key} = {show_value(new.get(key))}, was {show_value(old.get(key))}"


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


def place_of_path(origin: Path, job: Mapping[str, Any], key: str) -> str:
    """Return a clause that ends a mistake about the path `key` of the resolved `job` of a run that
    goes on from `origin`.

    It is empty unless the run had this relative path before, and finds it from the directory of its
    start alone.
    """
    versions = _read_metadata(run_of(origin) / VERSIONS, "its --set items and its plan")
    started = versions.get("directory")
    value = dict(flatten(job)).get(key)
    if not isinstance(value, str) or not isinstance(started, str):
        return ""
    if dict(flatten(resolved_job(origin))).get(key) != value:
        return ""
    if Path(value).expanduser().is_absolute() or glob(value, recursive=True):
        return ""
    path = Path(started, value)
    if not glob(str(path), recursive=True):
        return ""
    return (
        f"; '{value}' is relative to the current directory, and the run was started in "
        f"'{started}': resume it there, or with --set {shlex.quote(f'{key}={path}')}"
    )


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
