"""Samples of whole conversations: as many as fit into each, none in two parts.

A conversation ends with its last answer: nothing is learnt from what follows. One that is longer
than a sample is cut there, and left out if that leaves no answer. Conversations find their samples
by best fit, the longest first, so that little room is left. What room there is begins the sample
anew, and what comes twice is no target: routers see text there, and no padding.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moesaic.nn.loss import IGNORED
from moesaic.train.data.batch import Batch, Integers, enumerate_parts, to_tensor
from moesaic.train.data.corpus import Corpus
from moesaic.train.data.order import Order

_NONE = np.int8(0)


class WholeSamples:
    """`Samples` of the conversations of a corpus for which `chosen` is true; None chooses all."""

    def __init__(
        self, corpus: Corpus, chosen: NDArray[np.bool_] | None, sequence: int, seed: int
    ) -> None:
        assert corpus.counted is not None, "a corpus of conversations"
        self._tokens, self._counted, self._sequence = corpus.tokens, corpus.counted, sequence
        index = np.arange(corpus.num_documents) if chosen is None else np.flatnonzero(chosen)
        starts, lengths, cut = _fit(corpus.bounds, corpus.counted, sequence)
        starts, lengths, cut = starts[index], lengths[index], cut[index]
        kept = lengths > 0
        self.num_conversations, self.num_cut, self.num_left_out = (
            len(index), int((cut & kept).sum()), int((~kept).sum()),
        )  # fmt: skip
        rows = pack(lengths[kept], sequence)
        order = np.argsort(rows, kind="stable")
        self._starts, self._lengths = starts[kept][order], lengths[kept][order]
        # Sample i holds the conversations [bounds[i], bounds[i + 1]) of these.
        self._bounds = np.searchsorted(rows[order], np.arange(rows.max(initial=-1) + 2))
        self._order = Order(max(1, len(self)), seed)

    def __len__(self) -> int:
        """See `Samples`."""
        return len(self._bounds) - 1

    @property
    def filled(self) -> float:
        """Share of the samples that conversations fill."""
        return float(self._lengths.sum()) / (self._sequence * max(1, len(self)))

    def batch(self, indices: Sequence[int], *, shuffled: bool = True) -> Batch:
        """See `Samples`."""
        samples = np.asarray(indices, np.int64).reshape(-1)
        if len(samples) and (samples.min() < 0 or (not shuffled and samples.max() >= len(self))):
            raise IndexError(f"samples {samples.min()} to {samples.max()} of {len(self)}")
        windows = self._order(samples) if shuffled else samples
        first = self._bounds[windows]
        counts = self._bounds[windows + 1] - first
        row, number = enumerate_parts(counts)
        talk = first[row] + number
        part, position = enumerate_parts(self._lengths[talk])
        place = self._starts[talk][part] + position
        # From here on [B, S]: column c of a row that holds `used` tokens is its token c % used.
        used = np.bincount(row[part], minlength=len(samples))[:, None]
        column = np.arange(self._sequence)
        source = (np.cumsum(used) - used[:, 0])[:, None] + column % used
        targets = self._tokens[place[source] + 1].astype(np.int64)
        targets[(column >= used) | ~self._counted[place[source] + 1]] = IGNORED
        documents = number[part][source] + column // used * counts[:, None]
        return Batch(
            samples=to_tensor(samples),
            inputs=to_tensor(self._tokens[place[source]].astype(np.int64)),
            targets=to_tensor(targets),
            documents=to_tensor(documents.astype(np.int32)),
            positions=to_tensor(position[source]),
        )


def _fit(
    bounds: Integers, counted: NDArray[np.bool_], sequence: int
) -> tuple[Integers, Integers, NDArray[np.bool_]]:
    """Where each conversation begins, how many inputs it gives, and whether that cuts answers."""
    starts, limits = bounds[:-1], np.minimum(bounds[1:], bounds[:-1] + sequence + 1)
    # Answers as stretches of counted tokens; none goes beyond its conversation.
    edges = np.flatnonzero(np.diff(counted.view(np.int8), prepend=_NONE, append=_NONE))
    begins, ends = edges[::2], edges[1::2]
    before = np.searchsorted(begins, limits)  # answers that begin before the limit
    stops = np.minimum(np.concatenate(([0], ends))[before], limits)
    lost = np.concatenate(([0], ends))[np.searchsorted(begins, bounds[1:])] > limits
    return starts, np.maximum(stops - starts - 1, 0), lost


def pack(lengths: Integers, room: int) -> Integers:
    """The sample of each conversation: best fit, the longest first.

    Samples are numbered by the place of the conversation that opened them, the longest in them.
    """
    samples = np.empty(len(lengths), np.int64)
    openers: list[int] = []
    with_room: list[list[int]] = [[] for _ in range(room + 1)]
    rooms: list[int] = []  # The rooms that some sample has left, in ascending order.
    sizes = lengths.tolist()
    for index in np.argsort(-lengths, kind="stable").tolist():
        length = sizes[index]
        place = bisect_left(rooms, length)
        if place == len(rooms):
            sample, left = len(openers), room - length
            openers.append(index)
        else:
            sample, left = with_room[rooms[place]].pop(), rooms[place] - length
            if not with_room[rooms[place]]:
                del rooms[place]
        samples[index] = sample
        if not with_room[left]:
            insort(rooms, left)
        with_room[left].append(sample)
    rank = np.empty(len(openers), np.int64)
    rank[np.argsort(openers)] = np.arange(len(openers))
    return rank[samples]
