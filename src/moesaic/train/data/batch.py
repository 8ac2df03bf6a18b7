"""Samples of packed documents, cut from one token stream and gathered into batches.

Sample i of a stream is its tokens [i * S, i * S + S], S inputs and, shifted by one, S targets. With
`documents` packing, each position has the number of its document within the sample. It also has its
index in the part of the document that the sample holds. The target after a document's last token is
ignored. With `stream` packing, a sample is one document. A batch is one gather without a loop over
samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moesaic.nn.loss import IGNORE_INDEX
from moesaic.train.data.corpus import Corpus
from moesaic.train.data.shuffle import Shuffle

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Batch:
    """Batch of B samples of S tokens."""

    samples: Tensor
    """Global sample indices, int64 [B]."""
    inputs: Tensor
    """Token ids, int64 [B, S]."""
    targets: Tensor
    """Token after each input, int64 [B, S]; -100 where nothing is trained."""
    documents: Tensor
    """Document number within the sample, from 0, int32 [B, S]."""
    positions: Tensor
    """Index within the part of the document that the sample holds, int64 [B, S]."""


@dataclass(frozen=True)
class LabelledBatch(Batch):
    """Batch whose texts have labels."""

    labels: Tensor
    """Label of the text that ends at each input, int64 [B, S]; -100 elsewhere and for none."""
    num_labels: int
    """Texts with a label in the whole global micro-batch."""


def split_documents(batch: Batch, row: int) -> Iterator[tuple[list[int], list[bool]]]:
    """Yield the documents of one sample: the tokens of each, and a flag per token that is a
    target."""
    documents, inputs, targets = batch.documents[row], batch.inputs[row], batch.targets[row]
    for number in range(int(documents.max()) + 1):
        input_ids, target_ids = (
            inputs[documents == number].tolist(),
            targets[documents == number].tolist(),
        )
        is_target = [False, *(target != IGNORE_INDEX for target in target_ids)]
        # The last input's target belongs to the document too, unless it is ignored.
        tokens = [*input_ids, target_ids[-1]] if is_target[-1] else input_ids
        yield tokens, is_target[: len(tokens)]


class Samples(Protocol):
    """Endless sequence of samples over a finite text."""

    def __len__(self) -> int:
        """Return the number of samples per epoch."""

    def batch(self, indices: Sequence[int], *, shuffled: bool = True) -> Batch:
        """Return the samples of the global `indices`, shuffled anew each epoch or in text order."""


class PackedSamples:
    """`Samples` cut from the documents of a corpus for which `selected` is true, concatenated; None
    selects all."""

    def __init__(
        self,
        corpus: Corpus,
        selected: NDArray[np.bool_] | None,
        sequence: int,
        packing: Literal["documents", "stream"],
        seed: int,
    ) -> None:
        self._tokens, self._bounds = corpus.tokens, corpus.bounds
        # Number to add to a position in the stream, by document, for its index in the tokens.
        self._offsets: Integers | None = None
        if selected is not None:
            lengths = np.diff(corpus.bounds)[selected]
            self._bounds = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
            self._offsets = corpus.bounds[:-1][selected] - self._bounds[:-1]
        self.num_tokens = int(self._bounds[-1])
        """Tokens of the stream."""
        self._sequence, self._packing = sequence, packing
        self._length = max(0, self.num_tokens - 1) // sequence
        self._shuffle = Shuffle(max(1, self._length), seed)

    def __len__(self) -> int:
        """Return the number of samples per epoch."""
        return self._length

    def batch(self, indices: Sequence[int], *, shuffled: bool = True) -> Batch:
        """Return the samples of the global `indices`; see `Samples`."""
        samples, windows = self._shuffle.windows(indices, shuffled=shuffled)
        tokens, documents, positions = self._gather(windows)
        targets = tokens[:, 1:].copy()  # Inputs share the memory.
        if self._packing == "documents":
            targets[documents[:, 1:] != documents[:, :-1]] = IGNORE_INDEX
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
        """Return tokens, documents and positions [B, S + 1] of the samples number `windows`."""
        width, bounds = self._sequence + 1, self._bounds
        begins = windows * self._sequence
        first = np.searchsorted(bounds, begins, side="right") - 1
        last = np.searchsorted(bounds, begins + self._sequence, side="right") - 1
        # A part is the piece of one document in one sample; `row` is its sample.
        row, number = enumerate_segments(last - first + 1)
        document = first[row] + number
        start = np.maximum(bounds[document], begins[row])
        stop = np.minimum(bounds[document + 1], begins[row] + width)
        part, position = enumerate_segments(stop - start)
        if self._offsets is not None:
            start = start + self._offsets[document]
        tokens = self._tokens[start[part] + position].astype(np.int64)
        shape = (len(windows), width)
        return tokens.reshape(shape), number[part].reshape(shape), position.reshape(shape)


def enumerate_segments(counts: Integers) -> tuple[Integers, Integers]:
    """Return the segment and the index within it of each element: counts (2, 3) give (0, 0, 1, 1,
    1) and (0, 1, 0, 1, 2)."""
    owners = np.repeat(np.arange(len(counts)), counts)
    before = np.cumsum(counts) - counts
    return owners, np.arange(len(owners)) - before[owners]


def to_tensor(values: NDArray[Any]) -> Tensor:
    """Return a tensor with a copy of `values`."""
    return torch.from_numpy(values.copy())
