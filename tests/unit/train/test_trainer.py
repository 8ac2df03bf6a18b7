"""Changes of a job that a resumed run accepts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moesaic.base.errors import ConfigError
from moesaic.testing.jobs import tiny_job
from moesaic.train.trainer import Progress, _check_same_run


class MessageProgress(Progress):
    def __init__(self) -> None:
        self.messages: list[str] = []

    def message(self, text: str) -> None:
        self.messages.append(text)


def compare(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    facts = {"data": "same", "job": tiny_job(model=before).model_dump(mode="json")}
    progress = MessageProgress()
    _check_same_run(facts, tiny_job(model=now), "same", Path("step"), progress)
    return progress.messages


def test_extras_may_change_on_resume() -> None:
    versions = [{"extras": {"transformers_version": one}} for one in ("4.40.0", "4.57.0")]
    assert compare(*versions) == [
        'changed since the checkpoint: model.extras.transformers_version = "4.57.0", was "4.40.0"'
    ]
    with pytest.raises(ConfigError, match=r"is of a model with model\.hidden = 32, the job has 64"):
        compare({"hidden": 32}, {"hidden": 64})
