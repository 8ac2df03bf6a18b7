"""Checks of a resume: the job may change, but not the samples, the model or the state it stores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from moesaic.base import keys
from moesaic.base.errors import ConfigError
from moesaic.dist.checkpoint import Checkpoint
from moesaic.dist.state import PARAMETER
from moesaic.facts.job import Job
from moesaic.facts.job.distill import student_prefix
from moesaic.facts.workload.parts import auxiliary_parameters
from moesaic.train.assemble import DTYPES
from moesaic.train.kinds import AnyJob

_FIXED_KEYS = frozenset({"seed", "optimizer.moments", "table.optimizer", "table.init_std"})
"""Keys that a resume must not change: they decide which state a checkpoint holds, or the initial
values of table rows."""


class KindWords(Protocol):
    """Parts of messages that differ between kinds of jobs."""

    data_change: str
    """Reason for other samples if no key of the job has changed."""
    new_run: str
    """Remedy for a resume that cannot go on."""


def check_same_run(checkpoint: Checkpoint, job: AnyJob, digest: str, kind: KindWords) -> list[str]:
    """Return a sentence for each harmless change of the job since `checkpoint`.

    Raise if the job is of another model, or of other samples: then `digest` does not start with the
    digest of the checkpoint.
    """
    facts, path = checkpoint.facts, checkpoint.path
    before, now = dict(_flatten(facts["job"])), dict(_flatten(job.model_dump(mode="json")))
    messages = [
        f'student "{name}" is no longer in the job: its weights stay in earlier checkpoints'
        for name in _student_names(before)
        if name not in _student_names(now)
    ]
    if before.get("kind", "lm") != job.kind:
        raise ConfigError(
            f"resume: '{path}' is of a job of kind = {_format_value(before['kind'])}, the job has "
            f"{_format_value(job.kind)}: resume it with its own job"
        )
    if not f"{digest} ".startswith(f"{facts.get('data')} "):
        changes = [
            f"{key} = {_format_value(now.get(key))}, was {_format_value(before.get(key))}"
            for key in _changed_keys(before, now)
            if key == "seed" or (key.startswith(("data.", "control")) and key != "data.cache")
        ]
        reason = "; ".join(changes) or kind.data_change
        raise ConfigError(
            f"resume: '{path}' was trained on other samples ({reason}): restore them, or "
            f"{kind.new_run}"
        )
    for key in _changed_keys(before, now):
        old, new = before.get(key), now.get(key)
        change = f"{key} = {_format_value(old)}, the job has {_format_value(new)}"
        table, _, name = _without_student(key).partition(".")
        if table == "finetune" or key in _FIXED_KEYS or _lacks_state(key, old, new):
            raise ConfigError(
                f"resume: '{path}' was trained with {change}: restore it, or {kind.new_run}"
            )
        may_change = name in ("init_std", "max_positions") or name.startswith("extras.")
        if table == "model" and not may_change:
            raise ConfigError(
                f"resume: '{path}' is of a model with {change}: restore it, or start a new run"
            )
        messages.append(
            f"changed since the checkpoint: {key} = {_format_value(new)}, was {_format_value(old)}"
        )
    if isinstance(job, Job):
        _check_auxiliary(checkpoint, job)
    return messages


def _check_auxiliary(checkpoint: Checkpoint, job: Job) -> None:
    """Raise if a student of the checkpoint now needs other auxiliary weights."""
    stored = checkpoint.tensors
    for student in job.student:
        prefix = f"{PARAMETER}/{student_prefix(student.name)}"
        if not any(name.startswith(prefix) for name in stored):
            continue  # It joins now.
        for one in auxiliary_parameters(student, job.model_of(student.teacher)):
            record = stored.get(f"{prefix}{one.name}")
            if record is None or record.shape != one.shape:
                raise ConfigError(
                    f"resume: '{checkpoint.path}' has no {one.name} {list(one.shape)} of student "
                    f'"{student.name}", which its losses or its teacher need now: restore both, '
                    "or give the student another name, so that it starts anew"
                )


def _student_names(keys_of_job: Mapping[str, Any]) -> list[str]:
    """Return the names of the students of a flattened job."""
    return [str(value) for key, value in keys_of_job.items() if key == f"student.{value}.name"]


def _without_student(key: str) -> str:
    """Return "model.hidden" for "student.small.model.hidden", and other keys as they are."""
    parts = key.split(".")
    return ".".join(parts[2:]) if parts[0] == "student" and len(parts) > 2 else key


def _lacks_state(key: str, old: Any, new: Any) -> bool:
    """Return whether a checkpoint lacks state that this change needs: weights of another dtype,
    moments of a teacher that was frozen, or an auxiliary layer."""
    has_new_layer = _without_student(key) == "auxiliary_layer" and new
    was_frozen = key == "distill.frozen" and old
    changes_dtype = key == "train.precision" and DTYPES[old] != DTYPES[new]
    return has_new_layer or was_frozen or changes_dtype


def _changed_keys(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yield keys whose values differ, including those of a table that only one of the jobs has.

    A key that an older version did not know is skipped.
    """
    for key in dict.fromkeys((*now, *before)):
        table = key.rpartition(".")[0]
        is_known = (key in before and key in now) or table in before or table in now
        if is_known and before.get(key) != now.get(key):
            yield key


def _format_value(value: object) -> str:
    return "unset" if value is None else keys.show(value)


def _flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        elif key == "student":
            for one in value:
                yield from _flatten(one, f"{prefix}{key}.{one['name']}.")
        else:
            yield f"{prefix}{key}", value
