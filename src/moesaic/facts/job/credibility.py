"""Settings of the credibility head: a classifier that tells written text from generated text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field

from moesaic.base.config import Section

if TYPE_CHECKING:
    from moesaic.facts.job.job import Job

LABELS = ("generated", "original")
"""Names of the head's classes, by label."""


class CredibilityConfig(Section):
    """Training of a head that tells original from generated text, on texts with labels."""

    weight: float = Field(default=1.0, gt=0)
    """Weight of the cross-entropy of labels: 1 for an original text, 0 for a generated one."""
    text: float = Field(default=1.0, ge=0)
    """Weight of the next-token loss on texts that are not generated. 0: train the classifier alone;
    the model then forgets how to write."""


def fill_labels(raw: dict[str, Any]) -> dict[str, Any]:
    """Return `raw` with the classifier of [credibility] in its model, if the job has that table."""
    model = raw.get("model")
    if "credibility" not in raw or not isinstance(model, dict):
        return raw
    return {**raw, "model": {**model, "labels": len(LABELS)}}


def check_credibility(job: Job) -> None:
    """Raise ValueError for settings that do not go with [credibility], or need it."""
    is_labelled, labels = job.data.format == "labelled", job.model.labels
    if job.credibility is None:
        if is_labelled:
            raise ValueError(
                'data.format = "labelled" is for jobs that learn the labels: add [credibility], or '
                'set data.format = "auto" to read the text alone'
            )
        if labels:
            raise ValueError(f"model.labels = {labels} without [credibility]: remove it")
        return
    if not is_labelled:
        raise ValueError(
            f'data.format = "{job.data.format}" with [credibility], which learns labels: set '
            'data.format = "labelled", with files of moesaic generate --adversarial'
        )
    if labels != len(LABELS):
        raise ValueError(f"model.labels = {labels} with [credibility]: set it to {len(LABELS)}")
    for setting, is_refused in _refused(job).items():
        if is_refused:
            raise ValueError(f"{setting} does not work with [credibility]: remove one of them")


def _refused(job: Job) -> dict[str, bool]:
    """Return for each setting that needs other passes if the job has it."""
    layout = {name: getattr(job.layout, name) for name in ("tp", "etp", "pp")}
    return {
        **{f"layout.{name} = {size}": size > 1 for name, size in layout.items()},
        "[memory]": job.memory is not None,
        'train.micro_batch_order = "by_block"': job.is_by_block,
        "[[student]]": bool(job.student),
        "[control]": job.control is not None,
    }
