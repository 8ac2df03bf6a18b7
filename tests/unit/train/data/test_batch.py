from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.train.data.batch import Batch, PackedSamples
from moesaic.train.data.corpus import Corpus
from moesaic.train.data.shuffle import Shuffle

LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=30)


def make_corpus(lengths: list[int], dtype: type = np.uint16) -> Corpus:
    """Return documents of distinct tokens: each token is its index in the corpus."""
    bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return Corpus(np.arange(bounds[-1], dtype=dtype), bounds, "")


def slow_samples(
    documents: list[list[int]], sequence: int, packing: str
) -> list[tuple[list[int], ...]]:
    """Return (inputs, targets, documents, positions) of every sample, token by token."""
    stream = [(token, number) for number, document in enumerate(documents) for token in document]
    samples = []
    for begin in range(0, len(stream) - sequence, sequence):
        inputs, targets, numbers, positions = [], [], [], []
        for place in range(begin, begin + sequence):
            (token, document), (following, next_document) = stream[place], stream[place + 1]
            fresh = place == begin or stream[place - 1][1] != document
            inputs.append(token)
            if packing == "stream":
                targets.append(following)
                numbers.append(0)
                positions.append(place - begin)
            else:
                targets.append(following if next_document == document else -100)
                numbers.append(0 if place == begin else numbers[-1] + fresh)
                positions.append(0 if fresh else positions[-1] + 1)
        samples.append((inputs, targets, numbers, positions))
    return samples


def rows(batch: Batch) -> list[tuple[list[int], ...]]:
    columns = (batch.inputs, batch.targets, batch.documents, batch.positions)
    return list(zip(*(column.tolist() for column in columns), strict=True))


@settings(max_examples=200, deadline=None)
@given(LENGTHS, st.integers(2, 9), st.sampled_from(["documents", "stream"]), st.data())
def test_samples_equal_the_reference(
    lengths: list[int], sequence: int, packing: str, data: st.DataObject
) -> None:
    corpus = make_corpus(lengths)
    chosen = np.array(
        data.draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)))
    )
    parts = [part.tolist() for part in np.split(corpus.tokens, corpus.bounds[1:-1])]
    kept = [part for part, choice in zip(parts, chosen, strict=True) if choice]
    for selected, documents in ((None, parts), (chosen, kept)):
        samples = PackedSamples(corpus, selected, sequence, packing, 3)  # type: ignore[arg-type]
        expected = slow_samples(documents, sequence, packing)
        assert len(samples) == len(expected)
        assert rows(samples.batch(range(len(samples)), shuffled=False)) == expected


def test_shuffled_samples_never_end() -> None:
    samples = PackedSamples(make_corpus([50, 51]), None, 5, "documents", seed=9)
    assert len(samples) == 20
    indices = [3, 47, 3, 1_000_000]
    batch = samples.batch(indices)
    order = Shuffle(20, 9)(indices)
    assert batch.samples.tolist() == indices
    assert rows(batch) == rows(samples.batch(order.tolist(), shuffled=False))
    epochs = [samples.batch(range(20 * e, 20 * e + 20)).inputs[:, 0].tolist() for e in range(3)]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert {tuple(sorted(epoch)) for epoch in epochs} == {tuple(range(0, 100, 5))}


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
@pytest.mark.parametrize("indices", [[], range(4), np.array([2, 1])])
def test_types_and_shapes(dtype: type, indices: list[int]) -> None:
    samples = PackedSamples(make_corpus([40], dtype), None, 6, "documents", seed=1)
    batch = samples.batch(indices)
    size = len(indices)
    assert batch.samples.shape == (size,)
    for field, kind in (
        (batch.inputs, torch.int64),
        (batch.targets, torch.int64),
        (batch.documents, torch.int32),
        (batch.positions, torch.int64),
    ):
        assert (field.shape, field.dtype) == ((size, 6), kind)
        assert field.is_contiguous()
        field += 0  # Memory is writable and not shared.
    assert batch.samples.dtype == torch.int64


def test_indices_out_of_range() -> None:
    samples = PackedSamples(make_corpus([13]), None, 6, "documents", seed=1)
    assert len(samples) == 2
    for indices in ([2], [0, -1]):
        with pytest.raises(IndexError):
            samples.batch(indices, shuffled=False)
    with pytest.raises(IndexError):
        samples.batch([-1])
