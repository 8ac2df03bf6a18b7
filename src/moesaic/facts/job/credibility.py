"""Settings of the credibility head: a classifier that tells written text from generated text."""

from __future__ import annotations

from typing import TYPE_CHECKING

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


def check_credibility(job: Job) -> None:
    """Raise ValueError for settings that do not go with [credibility], or need it."""
    is_labelled = job.data.format == "labelled"
    if job.credibility is None:
        if is_labelled:
            raise ValueError(
                'data.format = "labelled" is for jobs that learn the labels: add [credibility], or '
                'set data.format = "auto" to read the text alone'
            )
        return
    if not is_labelled:
        raise ValueError(
            f'data.format = "{job.data.format}" with [credibility], which learns labels: set '
            'data.format = "labelled", with files of moesaic generate --adversarial'
        )
    if job.model.labels != len(LABELS):
        raise ValueError(
            f"model.labels = {job.model.labels} with [credibility], whose head has "
            f"{len(LABELS)} classes: remove model.labels"
        )
    layout = job.layout
    for name in ("tp", "etp", "pp"):
        if getattr(layout, name) > 1:
            raise ValueError(
                f"layout.{name} = {getattr(layout, name)} with [credibility], which works with "
                f"data, expert and FSDP parallelism only: set layout.{name} = 1"
            )
    if job.is_by_block:
        key = "[memory]" if job.memory is not None else 'train.micro_batch_order = "by_block"'
        raise ValueError(
            f"{key} with [credibility], which needs whole passes of a micro-batch: remove one"
        )
