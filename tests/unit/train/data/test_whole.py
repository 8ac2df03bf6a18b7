"""Samples of whole conversations, against doing it token by token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moesaic.dist.world import World
from moesaic.facts.plan import lay_out
from moesaic.models.initial import InitialSource
from moesaic.testing.jobs import tiny_job
from moesaic.train.assemble import assemble
from moesaic.train.data import Batch, documents_of
from moesaic.train.data.corpus import Corpus
from moesaic.train.data.order import Order
from moesaic.train.data.whole import WholeSamples, pack
from moesaic.train.objectives import lm

Talk = list[bool]
"""What counts of a conversation; its tokens are their places in the corpus."""

TALK = st.lists(st.booleans(), min_size=1, max_size=12).map(lambda rest: [False, *rest])
TALKS = st.lists(TALK, min_size=1, max_size=20)


def make_corpus(talks: list[Talk], vocab: int = 1 << 16) -> Corpus:
    bounds = np.concatenate([[0], np.cumsum([len(talk) for talk in talks])]).astype(np.int64)
    counted = np.concatenate([np.array(talk, np.bool_) for talk in talks])
    tokens = (np.arange(bounds[-1]) % vocab).astype(np.uint16)
    return Corpus(tokens, bounds, "", counted, {"messages": len(talks)})


def slow_fit(talks: list[Talk], corpus: Corpus, sequence: int) -> list[list[tuple[int, int]]]:
    """(input, target) of each conversation that is kept; how many are cut, and left out."""
    kept = []
    for talk, start in zip(talks, corpus.bounds, strict=False):
        last = max((i for i, counts in enumerate(talk[: sequence + 1]) if counts), default=0)
        tokens = corpus.tokens[start:].tolist()
        pairs = [(tokens[i], tokens[i + 1] if talk[i + 1] else -100) for i in range(last)]
        if pairs:
            kept.append(pairs)
    return kept


def slow_pack(lengths: list[int], room: int) -> list[int]:
    """Best fit, the longest first; of equals the sample that was touched last."""
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
    homes = slow_pack([len(talk) for talk in talks], room)
    samples = []
    for sample in range(max(homes, default=-1) + 1):
        row: list[tuple[int, int, int, int]] = []
        members = [talk for talk, home in zip(talks, homes, strict=True) if home == sample]
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
def test_samples_equal_the_slow_ones(talks: list[Talk], sequence: int, data: st.DataObject) -> None:
    corpus = make_corpus(talks)
    choice = data.draw(st.lists(st.booleans(), min_size=len(talks), max_size=len(talks)))
    for chosen in (None, np.array(choice)):
        samples = WholeSamples(corpus, chosen, sequence, seed=3)
        every = [slow_fit([t], make_slice(corpus, i), sequence) for i, t in enumerate(talks)]
        picked = [kept for kept, c in zip(every, choice, strict=True) if c or chosen is None]
        expected = slow_samples([pairs for kept in picked for pairs in kept], sequence)
        assert len(samples) == len(expected)
        assert rows(samples.batch(range(len(samples)), shuffled=False)) == expected
        assert samples.num_conversations == len(picked)
        assert samples.num_left_out == sum(not kept for kept in picked)
        cut = [
            any(t[sequence + 1 :]) and any(t[: sequence + 1])
            for t, c in zip(talks, choice, strict=True)
            if c or chosen is None
        ]
        assert samples.num_cut == sum(cut)


def make_slice(corpus: Corpus, index: int) -> Corpus:
    """A corpus whose first conversation is the one at `index`."""
    start = corpus.bounds[index]
    return Corpus(corpus.tokens[start:], corpus.bounds[index:] - start, "")


@given(st.lists(st.integers(1, 30), max_size=60))
def test_packing_equals_the_slow_one(lengths: list[int]) -> None:
    assert pack(np.array(lengths, np.int64), 30).tolist() == slow_pack(lengths, 30)


def test_order_and_bounds() -> None:
    talks = [[False, *[True] * (n % 5 + 1)] for n in range(40)]
    samples = WholeSamples(make_corpus(talks), None, 8, seed=9)
    indices = [3, 77, 3, 1_000_000]
    batch = samples.batch(indices)
    order = Order(len(samples), 9)(indices)
    assert batch.samples.tolist() == indices
    assert rows(batch) == rows(samples.batch(order.tolist(), shuffled=False))
    assert rows(batch) == [row for i in indices for row in rows(samples.batch([i]))]
    assert samples.batch([]).inputs.shape == (0, 8)
    for wrong in ([len(samples)], [0, -1]):
        with pytest.raises(IndexError):
            samples.batch(wrong, shuffled=False)
    assert 0.8 < samples.filled <= 1


def test_documents_of_a_sample() -> None:
    talks = [[False, False, True, True], [False, True], [False, True, False, False]]
    batch = WholeSamples(make_corpus(talks), None, 7, seed=0).batch([0], shuffled=False)
    assert list(documents_of(batch, 0)) == [
        ([0, 1, 2, 3], [False, False, True, True]),
        ([4, 5], [False, True]),
        ([6, 7], [False, True]),
        ([0, 1], [False, False]),
    ]


def test_the_loss_is_that_of_every_conversation_alone() -> None:
    talks = [[False, *[(i * n) % 3 != 1 for i in range(1, n)]] for n in (4, 14, 9, 2, 30, 6, 7, 3)]
    corpus = make_corpus(talks, vocab=61)
    job = tiny_job(routing={"balance_loss": 0.0, "z_loss": 0.0})
    sequence = job.data.sequence
    samples = WholeSamples(corpus, None, sequence, seed=0)
    assert samples.num_cut == 2
    plan = lay_out(job.layout, job.model, 1)
    run = assemble(job, plan, World.solo(), InitialSource(job.seed, job.model.init_std))
    loss, targets = run.validate(samples, 100)
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
            context = lm.make_context(run.model, alone, job, 0)
            logits = run.model(tokens, context)[0].log_softmax(-1)
        for place in range(1, length):
            if talk[place]:
                total -= float(logits[place - 1, tokens[0, place]])
                count += 1
    assert targets == count
    assert loss == pytest.approx(total / count, abs=1e-9)
