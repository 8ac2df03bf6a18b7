"""Samples of whole conversations: best-fit packing without splits.

A conversation ends with its last answer, because nothing after it is trained. Longer ones are
truncated to a sample, and dropped if no answer remains.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moesaic.nn.loss import IGNORE_INDEX
from moesaic.train.data.batch import Batch, Integers, enumerate_segments
from moesaic.train.data.corpus import Corpus
from moesaic.train.data.packing import best_fit_pack, fill_samples
from moesaic.train.data.shuffle import Shuffle

_NONE = np.int8(0)


class ConversationSamples:
    """`Samples` of the conversations of a corpus for which `selected` is true; None selects all."""

    def __init__(
        self, corpus: Corpus, selected: NDArray[np.bool_] | None, sequence: int, seed: int
    ) -> None:
        assert corpus.loss_mask is not None, "a corpus of conversations"
        self._tokens, self._loss_mask, self._sequence = corpus.tokens, corpus.loss_mask, sequence
        index = np.arange(corpus.num_documents) if selected is None else np.flatnonzero(selected)
        starts, lengths, cut = _truncate_to_answers(corpus.bounds, corpus.loss_mask, sequence)
        starts, lengths, cut = starts[index], lengths[index], cut[index]
        kept = lengths > 0
        self.num_conversations, self.num_truncated, self.num_dropped = (
            len(index), int((cut & kept).sum()), int((~kept).sum()),
        )  # fmt: skip
        rows = best_fit_pack(lengths[kept], sequence)
        order = np.argsort(rows, kind="stable")
        self._starts, self._lengths = starts[kept][order], lengths[kept][order]
        # Sample i holds conversations [bounds[i], bounds[i + 1]) of these.
        self._bounds = np.searchsorted(rows[order], np.arange(rows.max(initial=-1) + 2))
        self._shuffle = Shuffle(max(1, len(self)), seed)

    def __len__(self) -> int:
        """Return the number of samples per epoch."""
        return len(self._bounds) - 1

    @property
    def fill_ratio(self) -> float:
        """Fraction of the samples' tokens that belongs to conversations."""
        return float(self._lengths.sum()) / (self._sequence * max(1, len(self)))

    def batch(self, indices: Sequence[int], *, shuffled: bool = True) -> Batch:
        """Return the samples of the global `indices`; see `Samples`."""
        samples, windows = self._shuffle.windows(indices, shuffled=shuffled)
        first = self._bounds[windows]
        counts = self._bounds[windows + 1] - first
        row, number = enumerate_segments(counts)
        conversation = first[row] + number
        lengths = self._lengths[conversation]
        part, position = enumerate_segments(lengths)
        index = self._starts[conversation][part] + position
        targets = self._tokens[index + 1].astype(np.int64)
        targets[~self._loss_mask[index + 1]] = IGNORE_INDEX
        inputs = self._tokens[index].astype(np.int64)
        return fill_samples(samples, inputs, targets, lengths, counts, self._sequence)


def _truncate_to_answers(
    bounds: Integers, loss_mask: NDArray[np.bool_], sequence: int
) -> tuple[Integers, Integers, NDArray[np.bool_]]:
    """Return each conversation's start, number of inputs, and if truncation loses answers."""
    starts, limits = bounds[:-1], np.minimum(bounds[1:], bounds[:-1] + sequence + 1)
    # Answers are runs of trained tokens; none extends beyond its conversation.
    edges = np.flatnonzero(np.diff(loss_mask.view(np.int8), prepend=_NONE, append=_NONE))
    begins, ends = edges[::2], edges[1::2]
    num_answers = np.searchsorted(begins, limits)  # Answers that begin before the limit.
    stops = np.minimum(np.concatenate(([0], ends))[num_answers], limits)
    is_cut = np.concatenate(([0], ends))[np.searchsorted(begins, bounds[1:])] > limits
    return starts, np.maximum(stops - starts - 1, 0), is_cut
