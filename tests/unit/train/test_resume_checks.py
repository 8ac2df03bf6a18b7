"""Changes of a job that a resumed run accepts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moesaic.base.config import parse
from moesaic.base.errors import ConfigError
from moesaic.dist.checkpoint import Checkpoint
from moesaic.dist.checkpoint.manifest import Manifest
from moesaic.facts.job import CtrJob
from moesaic.testing.jobs import tiny_job
from moesaic.train.ctr import CtrKind
from moesaic.train.kinds import AnyJob
from moesaic.train.lm import LanguageModelKind
from moesaic.train.resume_checks import KindWords, check_same_run


def compare(before: AnyJob, now: AnyJob, kind: KindWords, digest: str = "same") -> list[str]:
    facts = {"data": "same", "job": before.model_dump(mode="json")}
    manifest = Manifest(serial=1, step=1, counters={}, facts=facts, tensors={}, files={})
    return check_same_run(Checkpoint(Path("step"), manifest), now, digest, kind)


def compare_models(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return compare(tiny_job(model=before), tiny_job(model=now), LanguageModelKind())


def ctr_job(**tables: dict[str, Any]) -> CtrJob:
    raw: dict[str, Any] = {
        "kind": "ctr", "model": {"family": "ctr-dnn"}, "data": {"stream": {}},
        "train": {"steps": 2, "batch": 2}, **tables,
    }  # fmt: skip
    return parse(CtrJob, raw, "job")


def test_extras_may_change_on_resume() -> None:
    versions = [{"extras": {"transformers_version": one}} for one in ("4.40.0", "4.57.0")]
    assert compare_models(*versions) == [
        'changed since the checkpoint: model.extras.transformers_version = "4.57.0", was "4.40.0"'
    ]
    with pytest.raises(ConfigError, match=r"is of a model with model\.hidden = 32, the job has 64"):
        compare_models({"hidden": 32}, {"hidden": 64})


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
