"""Texts with labels: encoded with them, and packed whole, with a label at the last token.

Texts without a label train the language model alone. They may be longer than a sample, and are then
cut into pieces. A text with a label is classified as a whole, so it must fit. Targets are in all
texts but the generated ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from moesaic.base.errors import DataError
from moesaic.models.tokenizer import Tokenizer
from moesaic.nn.loss import IGNORE_INDEX
from moesaic.train.data.batch import LabelledBatch, enumerate_segments, to_tensor
from moesaic.train.data.corpus import (
    BATCH_CHARACTERS,
    Corpus,
    EncodedDocuments,
    Extra,
    split_batches,
)
from moesaic.train.data.packing import best_fit_pack, fill_samples
from moesaic.train.data.shuffle import Shuffle
from moesaic.train.data.sources import TextSource
from moesaic.train.data.text import NO_LABEL, read_labelled


class LabelEncoder:
    """Encoder of texts with labels; see `DocumentEncoder`."""

    extra: ClassVar[Extra] = "labels"
    digest = "labels-1"
    """Version of the encoding."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, source: TextSource) -> Iterator[EncodedDocuments]:
        """Yield the texts of `source`, some at a time."""
        texts = read_labelled(source)
        for batch in split_batches(texts, lambda one: len(one[0]), BATCH_CHARACTERS):
            labels = np.array([label for _, label in batch], np.int8)
            tokens, lengths = self._tokenizer.encode_documents([text for text, _ in batch])
            yield EncodedDocuments(tokens, lengths, labels)


class LabelledSamples:
    """`Samples` of the texts of a corpus for which `selected` is true; None selects all."""

    def __init__(
        self, corpus: Corpus, selected: NDArray[np.bool_] | None, sequence: int, seed: int
    ) -> None:
        assert corpus.labels is not None, "a corpus of labelled texts"
        self._tokens, self._sequence = corpus.tokens, sequence
        index = np.arange(corpus.num_documents) if selected is None else np.flatnonzero(selected)
        starts, lengths = corpus.bounds[index], corpus.bounds[index + 1] - corpus.bounds[index] - 1
        labels = corpus.labels[index]
        too_long = (labels != NO_LABEL) & (lengths > sequence)
        if too_long.any():
            raise DataError(
                f"has {int(too_long.sum())} of {len(index)} texts with a label and more than "
                f"data.sequence = {sequence} tokens, up to {int(lengths[too_long].max())}: raise "
                "data.sequence, or build shorter ones (moesaic generate --adversarial --set "
                f"max_tokens={sequence})"
            )
        text, number = enumerate_segments(-(-lengths // sequence))
        piece_lengths = np.minimum(lengths[text] - number * sequence, sequence)
        rows = best_fit_pack(piece_lengths, sequence)
        order = np.argsort(rows, kind="stable")
        self._starts = (starts[text] + number * sequence)[order]
        self._lengths, self._labels = piece_lengths[order], labels[text][order]
        # Sample i holds texts [bounds[i], bounds[i + 1]) of these.
        self._bounds = np.searchsorted(rows[order], np.arange(rows.max(initial=-1) + 2))
        self._shuffle = Shuffle(max(1, len(self)), seed)
        self.counts = {label: int((self._labels == label).sum()) for label in (0, 1, NO_LABEL)}
        """Texts by label; those without one by piece."""

    def __len__(self) -> int:
        """Return the number of samples per epoch."""
        return len(self._bounds) - 1

    @property
    def fill_ratio(self) -> float:
        """Fraction of the samples' tokens that belongs to texts."""
        return float(self._lengths.sum()) / (self._sequence * max(1, len(self)))

    def batch(self, indices: Sequence[int], *, shuffled: bool = True) -> LabelledBatch:
        """Return the samples of the global `indices`; see `Samples`."""
        samples, windows = self._shuffle.windows(indices, shuffled=shuffled)
        first = self._bounds[windows]
        counts = self._bounds[windows + 1] - first
        row, number = enumerate_segments(counts)
        text = first[row] + number
        lengths, labels = self._lengths[text], self._labels[text]
        part, position = enumerate_segments(lengths)
        index = self._starts[text][part] + position
        targets = self._tokens[index + 1].astype(np.int64)
        targets[labels[part] == 0] = IGNORE_INDEX
        batch = fill_samples(
            samples, self._tokens[index].astype(np.int64), targets, lengths, counts, self._sequence
        )
        found = np.full(tuple(batch.inputs.shape), IGNORE_INDEX, np.int64)
        # Texts follow each other in their row from its first column on.
        ends = np.cumsum(lengths)
        used = np.bincount(row, weights=lengths, minlength=len(windows)).astype(np.int64)
        columns = ends - (np.cumsum(used) - used)[row] - 1
        has_label = labels != NO_LABEL
        found[row[has_label], columns[has_label]] = labels[has_label]
        return LabelledBatch(
            **vars(batch), labels=to_tensor(found), num_labels=int(has_label.sum())
        )

    def count_labels(self, indices: Sequence[int], *, shuffled: bool = True) -> int:
        """Return the texts with a label in the samples of the global `indices`."""
        _, windows = self._shuffle.windows(indices, shuffled=shuffled)
        has_label = np.concatenate(([0], np.cumsum(self._labels != NO_LABEL)))
        counts = has_label[self._bounds[windows + 1]] - has_label[self._bounds[windows]]
        return int(counts.sum())
