"""Settings of the credibility head: a classifier that tells written text from generated text."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from moesaic.base.config import Section

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
