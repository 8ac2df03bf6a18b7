"""Samples of texts with labels, against a text-by-text reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.base.config import parse
from moesaic.base.errors import DataError
from moesaic.dist.world import World
from moesaic.facts.job import DataConfig
from moesaic.train.data.batch import split_documents
from moesaic.train.data.corpus import Corpus
from moesaic.train.data.labelled import LabelledSamples
from moesaic.train.data.text_data import TextData

SEQUENCE = 8
TEXTS = st.lists(st.tuples(st.integers(1, SEQUENCE), st.sampled_from([0, 1, -1])), min_size=1)


def make_corpus(texts: list[tuple[int, int]]) -> Corpus:
    """Return texts of so many tokens before the end, whose tokens are their indices."""
    lengths = np.array([length + 1 for length, _ in texts])
    bounds = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    labels = np.array([label for _, label in texts], np.int8)
    return Corpus(np.arange(bounds[-1], dtype=np.uint32), bounds, "", labels=labels)


@given(TEXTS)
def test_each_text_has_its_label_at_its_last_token(texts: list[tuple[int, int]]) -> None:
    corpus = make_corpus(texts)
    samples = LabelledSamples(corpus, None, SEQUENCE, seed=0)
    batch = samples.batch(range(len(samples)), shuffled=False)
    ends = {
        int(end) - 2: label
        for end, (_, label) in zip(corpus.bounds[1:], texts, strict=True) if label != -1
    }  # fmt: skip
    at = batch.labels != -100
    found = dict(zip(batch.inputs[at].tolist(), batch.labels[at].tolist(), strict=True))
    assert found == ends
    assert batch.num_labels == int(at.sum()) == len(ends)
    assert samples.count_labels(range(len(samples)), shuffled=False) == len(ends)
    learnt = [
        token
        for start, (length, label) in zip(corpus.bounds, texts, strict=False) if label != 0
        for token in range(start + 1, start + length + 1)
    ]  # fmt: skip
    assert sorted(batch.targets[batch.targets != -100].tolist()) == learnt
    documents = [tokens for row in range(len(samples)) for tokens, _ in split_documents(batch, row)]
    starts = {tokens[0] for tokens in documents}
    assert starts == {*corpus.bounds[:-1].tolist()}


def test_long_texts_without_a_label_are_cut_into_pieces() -> None:
    samples = LabelledSamples(make_corpus([(20, -1), (3, 1), (4, 0)]), None, SEQUENCE, seed=0)
    batch = samples.batch(range(len(samples)), shuffled=False)
    trained = sorted(batch.targets[batch.targets != -100].tolist())
    assert trained == [*range(1, 21), *range(22, 25)]
    assert samples.counts == {0: 1, 1: 1, -1: 3}


def test_shuffled_samples_are_counted_too() -> None:
    samples = LabelledSamples(make_corpus([(7, i % 2) for i in range(9)]), None, SEQUENCE, seed=1)
    for indices in (range(3, 7), range(9, 20)):
        batch = samples.batch(indices)
        assert batch.num_labels == samples.count_labels(indices) == len(indices)
    assert samples.batch(range(0)).num_labels == 0


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def open_data(path: Path, **changes: Any) -> TextData:
    raw = {
        "path": str(path), "format": "labelled", "sequence": 16,
        "cache": str(path.parent / "cache"), **changes,
    }  # fmt: skip
    return TextData.open(parse(DataConfig, raw, "test"), 0, World.solo())


ROWS: list[dict[str, Any]] = [
    {"text": "One.", "label": 1}, {"text": "Two.", "label": 0, "source": "x"}, {"text": "Three."},
    {"text": "", "label": 1},
]  # fmt: skip


def test_labels_are_read_and_cached(tmp_path: Path) -> None:
    path = write(tmp_path / "pairs.jsonl", ROWS)
    for _ in range(2):
        samples = open_data(path).train
        assert isinstance(samples, LabelledSamples)
        assert samples.counts == {0: 1, 1: 1, -1: 1}
    plain = open_data(path, format="jsonl").train
    assert not isinstance(plain, LabelledSamples)


def test_a_validation_share_holds_out_whole_pairs(tmp_path: Path) -> None:
    rows = [{"text": "It rains."}]
    for number in range(100):
        rows += [{"text": f"{number:03}", "label": label} for label in (1, 0)]
    data = open_data(write(tmp_path / "pairs.jsonl", rows), validation_share=0.3)
    found = []
    for samples in (data.train, data.validation):
        assert isinstance(samples, LabelledSamples)
        batch = samples.batch(range(len(samples)), shuffled=False)
        texts = [
            bytes(tokens[:3]) for row in range(len(samples))
            for tokens, _ in split_documents(batch, row)
        ]  # fmt: skip
        found.append({text for text in texts if len(text) == 3 and text.isdigit()})
        assert samples.counts[0] == samples.counts[1] == len(found[-1]) > 20
    assert not found[0] & found[1]
    assert len(found[0] | found[1]) == 100


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([*ROWS, {"text": "Bad.", "label": 2}], r"line 5 of .*: 'label' holds 2: give 1 \(orig"),
        ([*ROWS, {"text": "Bad.", "label": True}], "'label' holds True"),
        ([*ROWS, {"text": "So long. " * 9, "label": 0}], "1 of 4 texts with a label and more than"),
        (ROWS[:1], "has 1 original and 0 generated texts: give some of both"),
        ([{"label": 1}], "has no 'text'"),
    ],
)
def test_mistakes_are_explained(tmp_path: Path, rows: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(DataError, match=words):
        open_data(write(tmp_path / "pairs.jsonl", rows))
