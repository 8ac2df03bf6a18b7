"""Samples of packed documents: cut from one stream of tokens, gathered a batch at a time.

Sample i of a stream is its tokens [i * S, i * S + S] : S inputs and, one further, S targets. With
`documents` packing every position carries the number of its document within the sample and its
place in the part of that document that the sample holds, and the target after a document's last
token is ignored. With `stream` packing a sample is one document. Everything is one gather over
the batch; nothing loops over samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moesaic.nn.loss import IGNORED
from moesaic.train.data.corpus import Corpus
from moesaic.train.data.order import Order

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Batch:
    """B samples of S tokens, by row."""

    samples: Tensor
    """int64 [B]: global sample indices."""
    inputs: Tensor
    """int64 [B, S]: token ids."""
    targets: Tensor
    """int64 [B, S]: the token after each input; -100 where there is nothing to learn."""
    documents: Tensor
    """int32 [B, S]: number of the document within the sample, from 0 upwards."""
    positions: Tensor
    """int64 [B, S]: place within the part of the document that the sample holds."""


def documents_of(batch: Batch, row: int) -> Iterator[tuple[list[int], list[bool]]]:
    """The documents of one sample: the tokens of each, and which of them are targets."""
    every, inputs, targets = batch.documents[row], batch.inputs[row], batch.targets[row]
    for number in range(int(every.max()) + 1):
        given, asked = inputs[every == number].tolist(), targets[every == number].tolist()
        counted = [False, *(target != IGNORED for target in asked)]
        # The last input's target is a token of the document too, unless it is another's.
        tokens = [*given, asked[-1]] if counted[-1] else given
        yield tokens, counted[: len(tokens)]


class Samples(Protocol):
    """An endless sequence of samples over a finite text."""

    def __len__(self) -> int:
        """Samples of one epoch."""

    def batch(self, indices: Sequence[int], *, shuffled: bool = True) -> Batch:
        """The samples of the global `indices`: shuffled anew each epoch, or in the text's order."""


class Stream(NamedTuple):
    """Chosen documents of a corpus, one after another, as one sequence of tokens."""

    tokens: NDArray[Any]
    bounds: Integers
    """Document d spans [bounds[d], bounds[d + 1]) of the stream."""
    shifts: Integers | None
    """What to add to a place in document d for its place in `tokens`; None: nothing."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the stream."""
        return int(self.bounds[-1])


def make_stream(corpus: Corpus, chosen: NDArray[np.bool_] | None = None) -> Stream:
    """The documents of `corpus` for which `chosen` is true, in order; None chooses all."""
    if chosen is None:
        return Stream(corpus.tokens, corpus.bounds, None)
    starts = corpus.bounds[:-1][chosen]
    bounds = np.zeros(len(starts) + 1, np.int64)
    np.cumsum(np.diff(corpus.bounds)[chosen], out=bounds[1:])
    return Stream(corpus.tokens, bounds, starts - bounds[:-1])


class PackedSamples:
    """`Samples` cut from a stream."""

    def __init__(
        self, stream: Stream, sequence: int, packing: Literal["documents", "stream"], seed: int
    ) -> None:
        self._stream, self._sequence, self._packing = stream, sequence, packing
        self._length = max(0, stream.num_tokens - 1) // sequence
        self._order = Order(max(1, self._length), seed)

    def __len__(self) -> int:
        """See `Samples`."""
        return self._length

    def batch(self, indices: Sequence[int], *, shuffled: bool = True) -> Batch:
        """See `Samples`."""
        samples = np.asarray(indices, np.int64).reshape(-1)
        if len(samples) and (samples.min() < 0 or (not shuffled and samples.max() >= self._length)):
            raise IndexError(f"samples {samples.min()} to {samples.max()} of {self._length}")
        windows = self._order(samples) if shuffled else samples
        tokens, documents, positions = self._gather(windows)
        targets = tokens[:, 1:].copy()  # inputs share the memory
        if self._packing == "documents":
            targets[documents[:, 1:] != documents[:, :-1]] = IGNORED
        else:
            documents = np.zeros_like(documents)
            positions = np.broadcast_to(np.arange(self._sequence + 1), documents.shape)
        return Batch(
            samples=to_tensor(samples),
            inputs=to_tensor(tokens[:, :-1]),
            targets=to_tensor(targets),
            documents=to_tensor(documents[:, :-1].astype(np.int32)),
            positions=to_tensor(positions[:, :-1]),
        )

    def _gather(self, windows: Integers) -> tuple[Integers, Integers, Integers]:
        """Tokens, documents and positions [B, S + 1] of the samples number `windows`."""
        width, bounds = self._sequence + 1, self._stream.bounds
        begins = windows * self._sequence
        first = np.searchsorted(bounds, begins, side="right") - 1
        last = np.searchsorted(bounds, begins + self._sequence, side="right") - 1
        # A part is what one sample holds of one document; `row` is its sample.
        row, number = enumerate_parts(last - first + 1)
        document = first[row] + number
        start = np.maximum(bounds[document], begins[row])
        stop = np.minimum(bounds[document + 1], begins[row] + width)
        part, position = enumerate_parts(stop - start)
        if self._stream.shifts is not None:
            start = start + self._stream.shifts[document]
        tokens = self._stream.tokens[start[part] + position].astype(np.int64)
        shape = (len(windows), width)
        return tokens.reshape(shape), number[part].reshape(shape), position.reshape(shape)


def enumerate_parts(counts: Integers) -> tuple[Integers, Integers]:
    """For counts (2, 3): owners (0, 0, 1, 1, 1) and numbers (0, 1, 0, 1, 2)."""
    owners = np.repeat(np.arange(len(counts)), counts)
    before = np.cumsum(counts) - counts
    return owners, np.arange(len(owners)) - before[owners]


def to_tensor(values: NDArray[Any]) -> Tensor:
    """`values` in memory of their own."""
    return torch.from_numpy(values.copy())
