"""Changes of a job that a resumed run accepts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from moesaic.base.config import parse
from moesaic.base.errors import ConfigError
from moesaic.dist.checkpoint import Checkpoint
from moesaic.dist.checkpoint.manifest import Manifest
from moesaic.facts.job import CtrJob
from moesaic.facts.job.control import ControlConfig
from moesaic.testing.jobs import TINY, tiny_job
from moesaic.train.ctr import CtrKind
from moesaic.train.kinds import AnyJob
from moesaic.train.lm import LanguageModelKind
from moesaic.train.resume_checks import KindWords, check_same_run
from moesaic.train.resumed_job import learning_changes


class Data(NamedTuple):
    """Data that a job has opened."""

    digest: str

    def files(self) -> dict[str, bytes]:
        """Return files for the run's directory."""
        return {}


def compare(
    before: AnyJob, now: AnyJob, kind: KindWords, digest: str = "same", ranks: int = 2,
    *, takes_data: bool = False,
) -> list[str]:  # fmt: skip
    facts = {"data": "same", "job": before.model_dump(mode="json"), "plan": {"ranks": ranks}}
    manifest = Manifest(serial=1, step=1, counters={}, facts=facts, tensors={}, files={})
    checkpoint = Checkpoint(Path("step"), manifest)
    return check_same_run(checkpoint, now, Data(digest), kind, 2, takes_data=takes_data)


def compare_models(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return compare(tiny_job(model=before), tiny_job(model=now), LanguageModelKind())


def ctr_job(**tables: dict[str, Any]) -> CtrJob:
    raw: dict[str, Any] = {
        "kind": "ctr", "model": {"family": "ctr-dnn"}, "data": {"stream": {}},
        "train": {"steps": 2, "batch": 2}, **tables,
    }  # fmt: skip
    return parse(CtrJob, raw, "job")


def test_a_change_of_the_learning_is_told_from_others() -> None:
    students = [
        {"name": name, "model": {**TINY["model"], "layers": 1}} for name in ("old", "kept", "new")
    ]
    before = tiny_job(
        student=students[:2], optimizer={"lr": 0.1}, routing={"record": "here"},
        checkpoint={"every": 2}, schedule={"kind": "cosine"},
    )  # fmt: skip
    now = tiny_job(
        student=[{**students[1], "interval": 2}, students[2]], train={"steps": 20, "batch": 4},
        layout={"ep": 2}, data={"cache": "there", "sequence": 6}, schedule={"kind": "constant"},
    )  # fmt: skip
    jobs = [one.model_dump(mode="json") for one in (before, now)]
    assert set(learning_changes(*jobs)) == {
        'student "old" leaves', 'student "new" joins',
        "student.kept.interval = 2, was 1", "train.steps = 20, was 10",
        "train.batch = 4, was 8", "data.sequence = 6, was 12",
        "optimizer.lr = 0.003, was 0.1",
        'schedule.kind = "constant", was "cosine"',
    }  # fmt: skip
    constant = [
        tiny_job(train={"steps": steps}, schedule={"kind": "constant"}).model_dump(mode="json")
        for steps in (10, 20)
    ]
    assert list(learning_changes(*constant)) == []
    assert list(learning_changes({}, jobs[1])) == []
    kind = LanguageModelKind()
    assert compare(tiny_job(), tiny_job(), kind, ranks=3) == [
        "changed since the checkpoint: 2 ranks, was 3"
    ]


def test_extras_may_change_on_resume() -> None:
    versions = [{"extras": {"transformers_version": one}} for one in ("4.40.0", "4.57.0")]
    assert compare_models(*versions) == [
        'changed since the checkpoint: model.extras.transformers_version = "4.57.0", was "4.40.0"'
    ]
    with pytest.raises(ConfigError, match=r"is of a model with model\.hidden = 32, the job has 64"):
        compare_models({"hidden": 32}, {"hidden": 64})


def test_a_table_that_is_gone_is_no_reason_to_fail() -> None:
    """Other samples, because the job has no [control] any more."""
    now = tiny_job()
    before = now.model_copy(update={"control": ControlConfig(topic="subject")})
    with pytest.raises(ConfigError, match=r'control\.topic = unset, was "subject".* start a new'):
        compare(before, now, LanguageModelKind(), "other")


def test_a_recommender_keeps_its_rows_on_resume() -> None:
    kind, job = CtrKind(), ctr_job()
    assert compare(job, ctr_job(table={"lr": 0.5}), kind) == [
        "changed since the checkpoint: table.lr = 0.5, was 0.05"
    ]
    refused = {
        r"trained with table\.optimizer = .*, the job has \"adam\".* start a new run$": ctr_job(
            table={"optimizer": "adam"}
        ),
        r"trained with table\.init_std = 0\.01, the job has 0\.1": ctr_job(table={"init_std": 0.1}),
        r"trained with seed = 0, the job has 4": ctr_job().model_copy(update={"seed": 4}),
        r"trained with train\.precision = \"fp32\"": ctr_job(
            train={"steps": 2, "batch": 2, "precision": "fp64"}
        ),
        r"of a model with model\.dim = 16, the job has 8": ctr_job(
            model={"family": "ctr-dnn", "dim": 8}
        ),
    }
    for sentence, other in refused.items():
        with pytest.raises(ConfigError, match=sentence):
            compare(job, other, kind)
    with pytest.raises(ConfigError, match=r"other samples \(the files of its samples have chang"):
        compare(job, job, kind, "other")
    with pytest.raises(ConfigError, match=r'is of a job of kind = "lm", the job has "ctr"'):
        compare(tiny_job(), job, kind)


def test_other_data_are_taken_if_the_user_says_so() -> None:
    """A seed or a tokenizer decides more than the samples, and stays."""
    kind, job, longer = LanguageModelKind(), tiny_job(), tiny_job(data={"sequence": 24})
    way = r"\(data\.sequence = 24, was 12\): restore them, or add --change \(change=True in"
    with pytest.raises(ConfigError, match=way):
        compare(job, longer, kind, "other")
    assert compare(job, longer, kind, "other", takes_data=True) == [
        "other data since the checkpoint: step 2 begins with their first sample",
        "changed since the checkpoint: data.sequence = 24, was 12",
    ]
    for changes in ({"seed": 8}, {"data": {"tokenizer": "other"}}):
        with pytest.raises(ConfigError, match=r"restore them, or start a new run from its weights"):
            compare(job, tiny_job(**changes), kind, "other", takes_data=True)
