"""Samples of whole documents, such as conversations: best-fit packing without splits.

A conversation ends with its last answer, because nothing after it is trained. Longer ones are
truncated to a sample, and dropped if no answer remains. Best fit, longest first, leaves little
room. The rest of a sample repeats it from the beginning without targets, so routers see text
instead of padding.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moesaic.nn.loss import IGNORE_INDEX
from moesaic.train.data.batch import Batch, Integers, enumerate_segments, to_tensor
from moesaic.train.data.corpus import Corpus
from moesaic.train.data.shuffle import Shuffle

_NONE = np.int8(0)


class WholeDocuments:
    """`Samples` of whole documents, several in each."""

    def __init__(
        self, corpus: Corpus, starts: Integers, lengths: Integers, sequence: int, seed: int
    ) -> None:
        """Pack documents with `lengths` inputs from token `starts` of the corpus on."""
        assert corpus.loss_mask is not None, "a corpus with a loss mask"
        self._tokens, self._loss_mask, self._sequence = corpus.tokens, corpus.loss_mask, sequence
        rows = best_fit_pack(lengths, sequence)
        self._order = np.argsort(rows, kind="stable")
        self._starts, self._lengths = starts[self._order], lengths[self._order]
        # Sample i holds documents [bounds[i], bounds[i + 1]) of these.
        self._bounds = np.searchsorted(rows[self._order], np.arange(rows.max(initial=-1) + 2))
        self._shuffle = Shuffle(max(1, len(self)), seed)

    def __len__(self) -> int:
        """Return the number of samples per epoch."""
        return len(self._bounds) - 1

    @property
    def fill_ratio(self) -> float:
        """Fraction of the samples' tokens that belongs to documents."""
        return float(self._lengths.sum()) / (self._sequence * max(1, len(self)))

    def batch(self, indices: Sequence[int], *, shuffled: bool = True) -> Batch:
        """Return the samples of the global `indices`; see `Samples`."""
        samples, windows = self._shuffle.windows(indices, shuffled=shuffled)
        first = self._bounds[windows]
        counts = self._bounds[windows + 1] - first
        row, number = enumerate_segments(counts)
        document = first[row] + number
        part, position = enumerate_segments(self._lengths[document])
        token_index = self._starts[document][part] + position
        # From here on [B, S]: column c of a row with `used` tokens is its token c % used.
        used = np.bincount(row[part], minlength=len(samples))[:, None]
        column = np.arange(self._sequence)
        source = (np.cumsum(used) - used[:, 0])[:, None] + column % used
        targets = self._tokens[token_index[source] + 1].astype(np.int64)
        targets[(column >= used) | ~self._loss_mask[token_index[source] + 1]] = IGNORE_INDEX
        documents = number[part][source] + column // used * counts[:, None]
        return Batch(
            samples=to_tensor(samples),
            inputs=to_tensor(self._tokens[token_index[source]].astype(np.int64)),
            targets=to_tensor(targets),
            documents=to_tensor(documents.astype(np.int32)),
            positions=to_tensor(position[source]),
        )


class ConversationSamples(WholeDocuments):
    """`Samples` of the conversations of a corpus for which `selected` is true; None selects all."""

    def __init__(
        self, corpus: Corpus, selected: NDArray[np.bool_] | None, sequence: int, seed: int
    ) -> None:
        assert corpus.loss_mask is not None, "a corpus of conversations"
        index = np.arange(corpus.num_documents) if selected is None else np.flatnonzero(selected)
        starts, lengths, cut = _truncate_to_answers(corpus.bounds, corpus.loss_mask, sequence)
        starts, lengths, cut = starts[index], lengths[index], cut[index]
        kept = lengths > 0
        self.num_conversations, self.num_truncated, self.num_dropped = (
            len(index), int((cut & kept).sum()), int((~kept).sum()),
        )  # fmt: skip
        super().__init__(corpus, starts[kept], lengths[kept], sequence, seed)


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


def best_fit_pack(lengths: Integers, capacity: int) -> Integers:
    """Return the sample of each conversation by best fit, longest first.

    Samples are numbered in the order of their first, and longest, conversations.
    """
    samples = np.empty(len(lengths), np.int64)
    openers: list[int] = []
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms: list[int] = []  # Sizes of the free room in open samples, ascending.
    sizes = lengths.tolist()
    for index in np.argsort(-lengths, kind="stable").tolist():
        length = sizes[index]
        slot = bisect_left(rooms, length)
        if slot == len(rooms):
            sample, left = len(openers), capacity - length
            openers.append(index)
        else:
            sample, left = with_room[rooms[slot]].pop(), rooms[slot] - length
            if not with_room[rooms[slot]]:
                del rooms[slot]
        samples[index] = sample
        if not with_room[left]:
            insort(rooms, left)
        with_room[left].append(sample)
    rank = np.empty(len(openers), np.int64)
    rank[np.argsort(openers)] = np.arange(len(openers))
    return rank[samples]
