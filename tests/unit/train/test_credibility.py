"""A classifier of texts: its loss against one text at a time, what it learns, and bad jobs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.base.config import parse
from moesaic.base.errors import ConfigError
from moesaic.dist.world import World
from moesaic.facts.job import Job
from moesaic.testing.jobs import tiny_job
from moesaic.testing.runs import start_run, train_text
from moesaic.train.assemble import LMRun
from moesaic.train.data.batch import split_documents
from moesaic.train.data.corpus import Corpus
from moesaic.train.data.labelled import LabelledSamples
from moesaic.train.job_file import load_job
from moesaic.train.objectives import lm
from moesaic.train.objectives.credibility import CredibilityStepStats

TABLES: dict[str, dict[str, Any]] = {"model": {"labels": 2}, "data": {"format": "labelled"}}


def credibility_job(**tables: dict[str, Any]) -> Job:
    merged = {key: {**TABLES.get(key, {}), **tables.get(key, {})} for key in {*TABLES, *tables}}
    return tiny_job(**{"credibility": {}, **merged})


def make_samples(job: Job, num_texts: int = 30) -> LabelledSamples:
    """Return texts of random tokens with random labels."""
    generator = np.random.default_rng(3)
    lengths = generator.integers(2, job.data.sequence + 1, num_texts)
    bounds = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    labels = generator.integers(-1, 2, num_texts).astype(np.int8)
    tokens = generator.integers(0, job.model.vocab, bounds[-1]).astype(np.uint32)
    return LabelledSamples(Corpus(tokens, bounds, "", labels=labels), None, job.data.sequence, 0)


def slow_losses(run: LMRun, samples: LabelledSamples, job: Job) -> tuple[Tensor, Tensor]:
    """Return the means of both losses over a batch, from one forward pass for each text."""
    texts, labels = list[Tensor](), list[Tensor]()
    num_targets = num_labels = 0
    for index in range(job.train.batch):
        batch = samples.batch([index])
        for number, (tokens, is_target) in enumerate(split_documents(batch, 0)):
            inputs = torch.tensor([tokens])
            at = (batch.documents[0] == number).nonzero()[:, 0]
            one = type(batch)(
                batch.samples, inputs, torch.full_like(inputs, -100),
                torch.zeros_like(inputs, dtype=torch.int32),
                torch.arange(len(tokens))[None], batch.labels, 0,
            )  # fmt: skip
            context = lm.make_inputs(run.part.model, one, job, 0)
            logits, _ = run.part.model(inputs, context)
            for place in np.flatnonzero(is_target):
                texts.append(F.cross_entropy(logits[0, place - 1], inputs[0, place]))
                num_targets += 1
            label = batch.labels[0, at[-1]]
            if label != -100:
                hidden = run.part.model.head.norm(_last_hidden(run, inputs[:, : len(at)], job))
                score = run.part.model.head.score
                assert score is not None
                labels.append(F.cross_entropy(score(hidden)[0, len(at) - 1], label))
                num_labels += 1
    return torch.stack(texts).sum() / num_targets, torch.stack(labels).sum() / num_labels


def _last_hidden(run: LMRun, inputs: Tensor, job: Job) -> Tensor:
    """Return the output of the last layer."""
    positions = torch.arange(inputs.shape[1])[None]
    documents = torch.zeros_like(inputs, dtype=torch.int32)
    batch = lm.Batch(torch.zeros(1, dtype=torch.int64), inputs, inputs, documents, positions)
    x, context = inputs, lm.make_inputs(run.part.model, batch, job, 0)
    for name, block in run.part.model.blocks():
        if name != "head":
            x, _ = block(x, context)
    return x


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("text", [1.0, 0.5, 0.0])
def test_losses_and_gradients_are_those_of_single_texts(text: float, micro_batches: int) -> None:
    job = credibility_job(
        credibility={"weight": 0.7, "text": text}, train={"micro_batches": micro_batches},
        model={"experts": 0, "top_k": 0, "family": "llama"},
    )  # fmt: skip
    samples = make_samples(job)
    run, slow = start_run(job), start_run(job)
    text_loss, loss = slow_losses(slow, samples, job)
    (text * text_loss + 0.7 * loss).backward()
    expected_text, expected = text_loss.item(), loss.item()
    run.compute_gradients(samples)
    gradients = dict(run.part.model.named_parameters())
    for name, parameter in slow.part.model.named_parameters():
        found = gradients[name].grad
        if parameter.grad is None or found is None:
            assert text == 0.0
            assert name == "head.weight"
            continue
        torch.testing.assert_close(found, parameter.grad, rtol=1e-9, atol=1e-12)
    stats = start_run(job).step(samples)
    assert isinstance(stats, CredibilityStepStats)
    assert stats.credibility_loss == pytest.approx(expected, rel=1e-9)
    assert stats.loss == pytest.approx(expected_text if text else expected, rel=1e-9)
    assert stats.total_loss == pytest.approx(text * expected_text + 0.7 * expected, rel=1e-9)
    assert stats.figures(1.0)["credibility_loss"] == stats.credibility_loss


@pytest.mark.parametrize("text", [1.0, 0.0])
def test_validation_keeps_no_hidden_states(text: float) -> None:
    """Losses of all batches stay until the end of a validation."""
    job = credibility_job(credibility={"text": text})
    run, samples = start_run(job), make_samples(job)
    assert run.objective.evaluate(samples.batch(range(3))).loss.dim() == 0
    loss, number, figures = run.validate(samples, 8)
    assert number > 0
    if not text:
        assert loss == pytest.approx(figures["credibility_loss"], rel=1e-6)
    run.close()


def write_texts(path: Path, number: int, seed: int) -> Path:
    """Write texts of words; generated ones repeat their last word."""
    words, draw = ["sun", "moon", "tree", "sea"], np.random.default_rng(seed)
    with path.open("w") as file:
        for index in range(number):
            chosen = draw.choice(words, 3, replace=False).tolist()
            if index % 2 == 0:
                chosen[2] = chosen[1]
            text = f"{' '.join(chosen)}."
            file.write(json.dumps({"text": text, "label": index % 2, "source": str(index)}) + "\n")
    return path


def test_a_classifier_learns_to_tell_texts_apart(tmp_path: Path) -> None:
    """AUC and accuracy of validation texts are far above chance after some steps."""
    train = write_texts(tmp_path / "train.jsonl", 200, 1)
    validation = write_texts(tmp_path / "validation.jsonl", 60, 2)
    progress = train_text(
        World.solo(), train, tmp_path / "run",
        model={"labels": 2, "experts": 0, "top_k": 0, "family": "llama"},
        data={
            "path": str(train), "validation_path": str(validation), "format": "labelled",
            "sequence": 32, "cache": str(tmp_path / "cache"),
        },
        credibility={"text": 0.2},
        train={"steps": 40, "batch": 16, "precision": "fp32", "validate_every": 20},
        optimizer={"lr": 0.02}, checkpoint={"every": 0},
    )  # fmt: skip
    found = [line for line in progress.messages if "validation loss" in line]
    assert len(found) == 2
    events = [json.loads(line) for line in (tmp_path / "run/events/rank-0.jsonl").open()]
    last = [event for event in events if event["event"] == "validation"][-1]
    assert last["auc"] > 0.9
    assert last["accuracy"] > 0.8
    assert last["credibility_loss"] < 0.5
    assert f"auc {last['auc']:.4f}" in found[-1]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data": {"format": "jsonl"}}, 'set data.format = "labelled", with files of moesaic gen'),
        ({"layout": {"tp": 2}}, "layout.tp = 2 does not work with"),
        ({"layout": {"pp": 2}}, "layout.pp = 2 does not work with"),
        ({"train": {"micro_batch_order": "by_block"}}, '"by_block" does not work with'),
        ({"credibility": {"weight": 0.0}}, "credibility.weight"),
        ({"credibility": None}, r'"labelled" is for jobs that learn the labels: add \[credib'),
        ({"data": {"packing": "stream"}}, 'data.packing = "stream" cuts one long text, and'),
    ],
)
def test_bad_jobs_are_refused(changes: dict[str, Any], words: str) -> None:
    raw: dict[str, Any] = {
        "model": {"preset": "tiny-mixtral"}, "credibility": {},
        "data": {"path": "pairs.jsonl", "format": "labelled", "sequence": 32},
        "train": {"steps": 2, "batch": 2},
    }  # fmt: skip
    for key, value in changes.items():
        raw[key] = None if value is None else {**raw.get(key, {}), **value}
    raw = {key: value for key, value in raw.items() if value is not None}
    with pytest.raises(ConfigError, match=words):
        load_job(raw)


def test_the_classifier_follows_from_the_table() -> None:
    raw = {
        "model": {"preset": "tiny-mixtral"}, "credibility": {},
        "data": {"path": "pairs.jsonl", "format": "labelled", "sequence": 32},
        "train": {"steps": 2, "batch": 2},
    }  # fmt: skip
    job = load_job(raw).job
    assert isinstance(job, Job)
    assert job.model.labels == 2
    assert parse(Job, json.loads(job.to_json()), "job.json") == job
