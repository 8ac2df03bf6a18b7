"""Samples of whole conversations, against a token-by-token reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moesaic.testing.jobs import tiny_job
from moesaic.testing.runs import start_run
from moesaic.train.data.batch import Batch, split_documents
from moesaic.train.data.chat_packing import ConversationSamples
from moesaic.train.data.corpus import Corpus
from moesaic.train.data.shuffle import Shuffle
from moesaic.train.objectives import lm

Talk = list[bool]
"""Loss mask of a conversation, whose tokens are their indices in the corpus."""

TALK = st.lists(st.booleans(), min_size=1, max_size=12).map(lambda rest: [False, *rest])
TALKS = st.lists(TALK, min_size=1, max_size=20)


def make_corpus(talks: list[Talk], vocab: int = 1 << 16) -> Corpus:
    bounds = np.concatenate([[0], np.cumsum([len(talk) for talk in talks])]).astype(np.int64)
    counted = np.concatenate([np.array(talk, np.bool_) for talk in talks])
    tokens = (np.arange(bounds[-1]) % vocab).astype(np.uint16)
    return Corpus(tokens, bounds, "", counted)


def slow_fit(talks: list[Talk], corpus: Corpus, sequence: int) -> list[list[tuple[int, int]]]:
    """Return (input, target) pairs of each conversation that is kept."""
    kept = []
    for talk, start in zip(talks, corpus.bounds, strict=False):
        last = max((i for i, counts in enumerate(talk[: sequence + 1]) if counts), default=0)
        tokens = corpus.tokens[start:].tolist()
        pairs = [(tokens[i], tokens[i + 1] if talk[i + 1] else -100) for i in range(last)]
        if pairs:
            kept.append(pairs)
    return kept


def slow_pack(lengths: list[int], room: int) -> list[int]:
    """Pack by best fit, longest first; among equals take the sample changed last."""
    lefts: list[int] = []
    touched: list[int] = []
    openers: list[int] = []
    found = [0] * len(lengths)
    for time, index in enumerate(sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))):
        fits = [s for s, left in enumerate(lefts) if left >= lengths[index]]
        if fits:
            sample = min(fits, key=lambda s: (lefts[s], -touched[s]))
        else:
            sample = len(lefts)
            lefts.append(room)
            touched.append(time)
            openers.append(index)
        lefts[sample] -= lengths[index]
        touched[sample] = time
        found[index] = sample
    return [sorted(openers).index(openers[sample]) for sample in found]


def slow_samples(talks: list[list[tuple[int, int]]], room: int) -> list[Any]:
    sample_ids = slow_pack([len(talk) for talk in talks], room)
    samples = []
    for sample in range(max(sample_ids, default=-1) + 1):
        row: list[tuple[int, int, int, int]] = []
        members = [
            talk for talk, sample_id in zip(talks, sample_ids, strict=True) if sample_id == sample
        ]
        for number, talk in enumerate(members):
            row += [(token, target, number, place) for place, (token, target) in enumerate(talk)]
        used = len(row)
        while len(row) < room:
            token, _, number, place = row[len(row) - used]
            row.append((token, -100, number + len(members), place))
        samples.append(tuple(map(list, zip(*row, strict=True))))
    return samples


def rows(batch: Batch) -> list[Any]:
    columns = (batch.inputs, batch.targets, batch.documents, batch.positions)
    return list(zip(*(column.tolist() for column in columns), strict=True))


@given(TALKS, st.integers(2, 14), st.data())
def test_samples_equal_the_reference(talks: list[Talk], sequence: int, data: st.DataObject) -> None:
    corpus = make_corpus(talks)
    choice = data.draw(st.lists(st.booleans(), min_size=len(talks), max_size=len(talks)))
    for chosen in (None, np.array(choice)):
        samples = ConversationSamples(corpus, chosen, sequence, seed=3)
        every = [slow_fit([t], make_slice(corpus, i), sequence) for i, t in enumerate(talks)]
        picked = [kept for kept, c in zip(every, choice, strict=True) if c or chosen is None]
        expected = slow_samples([pairs for kept in picked for pairs in kept], sequence)
        assert len(samples) == len(expected)
        assert rows(samples.batch(range(len(samples)), shuffled=False)) == expected
        assert samples.num_conversations == len(picked)
        assert samples.num_dropped == sum(not kept for kept in picked)
        cut = [
            any(t[sequence + 1 :]) and any(t[: sequence + 1])
            for t, c in zip(talks, choice, strict=True)
            if c or chosen is None
        ]
        assert samples.num_truncated == sum(cut)


def make_slice(corpus: Corpus, index: int) -> Corpus:
    """Return a corpus whose first conversation is the one at `index`."""
    start = corpus.bounds[index]
    return Corpus(corpus.tokens[start:], corpus.bounds[index:] - start, "")


def test_order_and_bounds() -> None:
    talks = [[False, *[True] * (n % 5 + 1)] for n in range(40)]
    samples = ConversationSamples(make_corpus(talks), None, 8, seed=9)
    indices = [3, 77, 3, 1_000_000]
    batch = samples.batch(indices)
    order = Shuffle(len(samples), 9)(indices)
    assert batch.samples.tolist() == indices
    assert rows(batch) == rows(samples.batch(order.tolist(), shuffled=False))
    assert rows(batch) == [row for i in indices for row in rows(samples.batch([i]))]
    assert samples.batch([]).inputs.shape == (0, 8)
    for wrong in ([len(samples)], [0, -1]):
        with pytest.raises(IndexError):
            samples.batch(wrong, shuffled=False)
    assert 0.8 < samples.fill_ratio <= 1


def test_documents_of_a_sample() -> None:
    talks = [[False, False, True, True], [False, True], [False, True, False, False]]
    batch = ConversationSamples(make_corpus(talks), None, 7, seed=0).batch([0], shuffled=False)
    assert list(split_documents(batch, 0)) == [
        ([0, 1, 2, 3], [False, False, True, True]),
        ([4, 5], [False, True]),
        ([6, 7], [False, True]),
        ([0, 1], [False, False]),
    ]


def test_the_loss_equals_that_of_single_conversations() -> None:
    talks = [[False, *[(i * n) % 3 != 1 for i in range(1, n)]] for n in (4, 14, 9, 2, 30, 6, 7, 3)]
    corpus = make_corpus(talks, vocab=61)
    job = tiny_job(routing={"balance_loss": 0.0, "z_loss": 0.0})
    sequence = job.data.sequence
    samples = ConversationSamples(corpus, None, sequence, seed=0)
    assert samples.num_truncated == 2
    run = start_run(job)
    loss, targets, _ = run.validate(samples, 100)
    total, count = 0.0, 0
    for talk, start in zip(talks, corpus.bounds.tolist(), strict=False):
        length = min(len(talk), sequence + 1)
        tokens = torch.from_numpy(corpus.tokens[start : start + length].astype(np.int64))[None]
        alone = Batch(
            samples=torch.zeros(1, dtype=torch.int64), inputs=tokens, targets=tokens,
            documents=torch.zeros(tokens.shape, dtype=torch.int32),
            positions=torch.arange(length)[None],
        )  # fmt: skip
        with torch.no_grad():
            inputs = lm.make_inputs(run.part.model, alone, job, 0)
            logits = run.part.model(tokens, inputs)[0][0].log_softmax(-1)
        for place in range(1, length):
            if talk[place]:
                total -= float(logits[place - 1, tokens[0, place]])
                count += 1
    assert targets == count
    assert loss == pytest.approx(total / count, abs=1e-9)
