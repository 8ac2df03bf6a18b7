"""Checkpoint that a run resumes from, and its checks: the job may change, but not the samples, the
model or the state it stores."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from moesaic.base.errors import ConfigError, StoreError
from moesaic.base.units import plural
from moesaic.dist.checkpoint import Checkpoint, resume_candidates, set_head
from moesaic.dist.state import PARAMETER
from moesaic.dist.world import World
from moesaic.facts.job import Job
from moesaic.facts.job.distill import student_prefix
from moesaic.facts.workload.parts import auxiliary_parameters
from moesaic.models.tokenizer import TOKENIZER_FILE
from moesaic.train.assemble import DTYPES
from moesaic.train.kinds import AnyJob
from moesaic.train.resumed_job import (
    FIXED_KEYS,
    changed_keys,
    flatten,
    show_value,
    student_names,
)


class KindWords(Protocol):
    """Parts of messages that differ between kinds of jobs."""

    data_change: str
    """Reason for other samples if no key of the job has changed."""
    restarts_data: bool
    """True if a resumed run may go on with other data."""
    new_run: str
    """Remedy for a resume that cannot go on."""


def newest_checkpoint(directory: Path) -> Path:
    """Return the checkpoint to resume from; raise if there is none."""
    candidates = resume_candidates(directory)
    if not candidates:
        raise StoreError(
            f"resume: '{directory}' holds no complete checkpoint: start a new run, "
            "in another directory"
        )
    return candidates[0]


def open_to_resume(path: Path, job: AnyJob) -> Checkpoint:
    """Return the checkpoint at `path`, unverified; raise if `job` has no step left after it."""
    checkpoint = Checkpoint.open(path)
    if checkpoint.step >= job.train.steps:
        word = ""
        if job.schedule.kind != "constant":
            word = " and add --change (change=True in Python), as the learning rate changes with it"
        raise ConfigError(
            f"train.steps = {job.train.steps} counts from the start of the run, and '{path}' has "
            f"done {checkpoint.step} steps already: to train on, set train.steps above "
            f"{checkpoint.step}{word}"
        )
    return checkpoint


def open_checkpoint(
    job: AnyJob, out: Path, resume: str, world: World, say: Callable[[str], None]
) -> Checkpoint:
    """Return the checkpoint to resume from, verified in part."""
    path = Path(resume)
    if resume == "auto":
        path = Path(world.run_on_rank_zero(lambda: str(newest_checkpoint(out / "checkpoints"))))
    say(f"resuming from {path}")
    checkpoint = open_to_resume(path, job)
    checkpoint.verify_shared(world)
    return checkpoint


def set_resume_point(origin: Path, out: Path, world: World, say: Callable[[str], None]) -> None:
    """Make the checkpoint that the run resumed from the newest one for `resume`."""

    def select_origin() -> str:
        directory = out / "checkpoints"
        if origin.resolve().parent != directory.resolve():
            return ""
        names = [path.name for path in resume_candidates(directory)]
        newer = names[: names.index(origin.name)]
        if newer:
            set_head(origin)
        return ", ".join(newer)

    newer_names = world.run_on_rank_zero(select_origin)
    if newer_names:
        say(f"going back to {origin.name}: resume now continues from it, not from {newer_names}")


class OpenedData(Protocol):
    """Data of a run, as far as they identify themselves."""

    @property
    def digest(self) -> str:
        """Digest of everything that fixes the samples."""

    def files(self) -> dict[str, bytes]:
        """Return files for the run's directory, such as those of a tokenizer."""


def is_same_data(checkpoint: Checkpoint, data: OpenedData) -> bool:
    """Return whether `data` are those of `checkpoint`, perhaps with more behind them."""
    return f"{data.digest} ".startswith(f"{checkpoint.facts.get('data')} ")


def check_same_run(
    checkpoint: Checkpoint,
    job: AnyJob,
    data: OpenedData | None,
    kind: KindWords,
    ranks: int,
    *,
    takes_data: bool = False,
) -> list[str]:
    """Return a sentence for each accepted change of the job or its ranks since `checkpoint`.

    Raise if the job is of another model, or of other samples unless `takes_data` is true. Without
    `data` the samples are not compared.
    """
    facts, path = checkpoint.facts, checkpoint.path
    before, now = dict(flatten(facts["job"])), dict(flatten(job.model_dump(mode="json")))
    messages = [
        f'student "{name}" is no longer in the job: its weights stay in earlier checkpoints'
        for name in student_names(before)
        if name not in student_names(now)
    ]
    earlier = facts.get("plan", {}).get("ranks", ranks)
    if earlier != ranks:
        messages.append(f"changed since the checkpoint: {plural(ranks, 'rank')}, was {earlier}")
    if before.get("kind", "lm") != job.kind:
        raise ConfigError(
            f"resume: '{path}' is of a job of kind = {show_value(before['kind'])}, the job has "
            f"{show_value(job.kind)}: resume it with its own job"
        )
    if data is not None and not is_same_data(checkpoint, data):
        messages.append(_new_data(checkpoint, before, now, data, kind, takes_data=takes_data))
    for key in changed_keys(before, now):
        old, new = before.get(key), now.get(key)
        change = f"{key} = {show_value(old)}, the job has {show_value(new)}"
        table, _, name = _without_student(key).partition(".")
        if table == "finetune" or key in FIXED_KEYS or _lacks_state(key, old, new):
            raise ConfigError(
                f"resume: '{path}' was trained with {change}: restore it, or {kind.new_run}"
            )
        may_change = name in ("init_std", "max_positions") or name.startswith("extras.")
        if table == "model" and not may_change:
            raise ConfigError(
                f"resume: '{path}' is of a model with {change}: restore it, or start a new run"
            )
        messages.append(
            f"changed since the checkpoint: {key} = {show_value(new)}, was {show_value(old)}"
        )
    if isinstance(job, Job):
        _check_auxiliary(checkpoint, job)
    return messages


def _new_data(
    checkpoint: Checkpoint,
    before: dict[str, Any],
    now: dict[str, Any],
    data: OpenedData,
    kind: KindWords,
    *,
    takes_data: bool,
) -> str:
    """Return a sentence about other data than those of `checkpoint`; raise if they are refused."""
    changed = [
        key for key in changed_keys(before, now)
        if key == "seed" or (key.startswith(("data.", "control")) and key != "data.cache")
    ]  # fmt: skip
    changes = [
        f"{key} = {show_value(now.get(key))}, was {show_value(before.get(key))}" for key in changed
    ]
    run = checkpoint.path.absolute().parent.parent
    has_other_tokenizer = any(
        (run / name).is_file() and (run / name).read_bytes() != content
        for name, content in data.files().items()
        if Path(name).name == TOKENIZER_FILE
    )
    if has_other_tokenizer and "data.tokenizer" not in changed:
        changes.append("the tokenizer has other tokens")
    reason = "; ".join(changes) or kind.data_change
    is_fixed = has_other_tokenizer or any(
        key == "seed" or key.startswith(("control", "data.tokenizer", "data.end_token"))
        for key in changed
    )
    if is_fixed or not takes_data:
        may = not is_fixed and kind.restarts_data
        remedy = (
            "add --change (change=True in Python) to go on with the new ones from their first "
            "sample"
            if may
            else kind.new_run
        )
        raise ConfigError(
            f"resume: '{checkpoint.path}' was trained on other samples ({reason}): restore them, "
            f"or {remedy}"
        )
    step = checkpoint.step + 1
    return f"other data since the checkpoint: step {step} begins with their first sample"


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
