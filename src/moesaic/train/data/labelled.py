"""Samples of texts with labels: whole texts, several in a sample, with a label at the last token.

Texts without a label train the language model alone. They may be longer than a sample, and are then
cut into pieces. A text with a label is classified as a whole, so it must fit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moesaic.base.errors import DataError
from moesaic.nn.loss import IGNORE_INDEX
from moesaic.train.data.batch import (
    Integers,
    LabelledBatch,
    enumerate_segments,
    to_tensor,
)
from moesaic.train.data.chat_packing import WholeDocuments
from moesaic.train.data.corpus import Corpus
from moesaic.train.data.text import NO_LABEL


class LabelledSamples(WholeDocuments):
    """`Samples` of the texts of a corpus for which `selected` is true; None selects all."""

    def __init__(
        self, corpus: Corpus, selected: NDArray[np.bool_] | None, sequence: int, seed: int
    ) -> None:
        assert corpus.labels is not None, "a corpus of labelled texts"
        index = np.arange(corpus.num_documents) if selected is None else np.flatnonzero(selected)
        starts, lengths = corpus.bounds[index], corpus.bounds[index + 1] - corpus.bounds[index] - 1
        labels = corpus.labels[index]
        too_long = (labels != NO_LABEL) & (lengths > sequence)
        if too_long.any():
            raise DataError(
                f"has {int(too_long.sum())} of {len(index)} texts with a label and more than "
                f"data.sequence = {sequence} tokens, up to {int(lengths.max())}: raise "
                "data.sequence, or build shorter ones (moesaic generate --adversarial --set "
                f"max_tokens={sequence})"
            )
        kept = lengths > 0  # A file of bytes may have a text of an end token alone.
        counts = -(-lengths[kept] // sequence)
        document, number = enumerate_segments(counts)
        self._labels = labels[kept][document]
        self.counts = {label: int((self._labels == label).sum()) for label in (0, 1, NO_LABEL)}
        """Texts by label; those without one by piece."""
        rest = lengths[kept][document] - number * sequence
        super().__init__(
            corpus, starts[kept][document] + number * sequence, np.minimum(rest, sequence),
            sequence, seed,
        )  # fmt: skip
        self._labels = self._labels[self._order]
        has_label = np.concatenate(([0], np.cumsum(self._labels != NO_LABEL)))
        self._num_labels = has_label[self._bounds[1:]] - has_label[self._bounds[:-1]]

    def batch(self, indices: Sequence[int], *, shuffled: bool = True) -> LabelledBatch:
        """Return the samples of the global `indices`; see `Samples`."""
        batch = super().batch(indices, shuffled=shuffled)
        _, windows = self._shuffle.windows(indices, shuffled=shuffled)
        labels = np.full(tuple(batch.inputs.shape), IGNORE_INDEX, np.int64)
        row, number = enumerate_segments(self._bounds[windows + 1] - self._bounds[windows])
        document = self._bounds[windows][row] + number
        ends = _ends_in_rows(self._lengths[document], row, len(windows))
        has_label = self._labels[document] != NO_LABEL
        labels[row[has_label], ends[has_label] - 1] = self._labels[document][has_label]
        return LabelledBatch(
            **vars(batch), labels=to_tensor(labels), num_labels=int(has_label.sum())
        )

    def count_labels(self, indices: Sequence[int], *, shuffled: bool = True) -> int:
        """Return the texts with a label in the samples of the global `indices`."""
        _, windows = self._shuffle.windows(indices, shuffled=shuffled)
        return int(self._num_labels[windows].sum())


def _ends_in_rows(lengths: Integers, row: Integers, num_rows: int) -> Integers:
    """Return the column after each document, which follow each other in their rows."""
    ends = np.cumsum(lengths)
    used = np.bincount(row, weights=lengths, minlength=num_rows).astype(np.int64)
    return ends - (np.cumsum(used) - used)[row]
