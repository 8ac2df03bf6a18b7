"""Samples of whole texts behind prompts, which are put together when a batch is made.

In each epoch, a text has a prompt with probability 0.5. Then each of its attributes is kept with
probability 0.5, and the number of soft prompts is uniform from 0 to 64. The draws are functions of
seed, epoch and text, so no rank and no layout changes them. They give the lengths by which an epoch
is packed, so epochs differ in their number of samples. Targets are in the text alone.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from moesaic.facts.job.control import ATTRIBUTES, SOFT_PROMPTS
from moesaic.kernels.randomness import uniform
from moesaic.models.control import ControlPrompts
from moesaic.nn.loss import IGNORE_INDEX
from moesaic.train.data.batch import Batch, Integers, enumerate_segments
from moesaic.train.data.corpus import Corpus
from moesaic.train.data.packing import best_fit_pack, fill_samples
from moesaic.train.data.shuffle import Shuffle

_SWITCH, _COUNT = 0, len(ATTRIBUTES) + 1
"""Draws of a text: the switch, one for each attribute, and the number of soft prompts."""
_SOFT, _BEHIND = 1, len(ATTRIBUTES) + 1
"""Pieces of a document: the tokenizer's start, soft prompts, other attributes, and the text: its
first tokens behind a prompt, those without one, and the rest."""
_PLAIN = _BEHIND + 1


@dataclass(frozen=True)
class _Epoch:
    """Texts of one epoch as samples."""

    lengths: Integers
    """Length of each piece after dropout, [texts, pieces], in the order of the corpus."""
    texts: Integers
    """Texts, sample by sample."""
    bounds: Integers
    """First of the `texts` of each sample, and the end."""


class ControlSamples:
    """`Samples` of the texts of a corpus for which `selected` is true; None selects all."""

    def __init__(
        self,
        corpus: Corpus,
        selected: NDArray[np.bool_] | None,
        prompts: ControlPrompts,
        sequence: int,
        seed: int,
    ) -> None:
        assert corpus.segments is not None, "a corpus of texts behind prompts"
        self._tokens, self._sequence, self._seed = corpus.tokens, sequence, seed
        # Start and soft prompts are in a table of ids, all other pieces among the tokens.
        self._ids = np.concatenate((prompts.start_ids, prompts.soft_ids.ravel())).astype(np.int64)
        self._texts = np.arange(corpus.num_documents)[slice(None) if selected is None else selected]
        starts, lengths = _locate_pieces(corpus, len(prompts.start_ids))
        self._starts, self._lengths = starts[self._texts], lengths[self._texts]
        whole, prompt = self._lengths.sum(axis=1), self._lengths[:, _SOFT:_PLAIN].sum(axis=1)
        needed = whole - np.minimum(self._lengths[:, _PLAIN], prompt) - 1
        self.longest = int(needed.max(initial=0))
        """Inputs of the longest text with its longest prompt."""
        self.num_texts, self.num_too_long = len(needed), int((needed > sequence).sum())
        self._first_samples = [0]
        """First global index of each epoch that is packed, and the next one's."""
        self._epochs: dict[int, _Epoch] = {}
        self._num_samples = 0 if self.num_too_long else len(self._epoch(0).bounds) - 1

    def __len__(self) -> int:
        """Return the number of samples of the first epoch."""
        return self._num_samples

    def batch(self, indices: Sequence[int], *, shuffled: bool = True) -> Batch:
        """Return the samples of the global `indices`; see `Samples`."""
        given = np.asarray(indices, np.int64).reshape(-1)
        if len(given) and (given.min() < 0 or (not shuffled and given.max() >= len(self))):
            raise IndexError(f"samples {given.min()} to {given.max()} of {len(self)}")
        while len(given) and self._first_samples[-1] <= given.max():
            self._epoch(len(self._first_samples) - 1)
        epoch_of = np.array([bisect_right(self._first_samples, one) - 1 for one in given], np.int64)
        found: list[tuple[Integers, Integers, Integers]] = []
        for number in np.unique(epoch_of).tolist():
            rows = np.flatnonzero(epoch_of == number)
            text, counts = self._choose(number, given[rows], shuffled=shuffled)
            found.append((np.repeat(rows, counts), text, self._epoch(number).lengths[text]))
        if not found:
            return fill_samples(given, given, given, given, given, self._sequence)
        row, text, lengths = (np.concatenate(part) for part in zip(*found, strict=True))
        order = np.argsort(row, kind="stable")
        counts = np.bincount(row, minlength=len(given))
        return self._assemble(given, text[order], lengths[order], counts)

    def _choose(
        self, number: int, indices: Integers, *, shuffled: bool
    ) -> tuple[Integers, Integers]:
        """Return the texts of samples of one epoch, and how many each sample has."""
        epoch, first = self._epoch(number), self._first_samples[number]
        samples, size = indices - first, len(epoch.bounds) - 1
        if shuffled:
            samples = Shuffle(size, self._seed)(samples + number * size)
        begins = epoch.bounds[samples]
        counts = epoch.bounds[samples + 1] - begins
        row, place = enumerate_segments(counts)
        return epoch.texts[begins[row] + place], counts

    def _assemble(
        self, samples: Integers, text: Integers, lengths: Integers, counts: Integers
    ) -> Batch:
        """Return samples of texts with pieces of these lengths."""
        piece, place = enumerate_segments(lengths.ravel())
        kind = piece % lengths.shape[1]
        index = self._starts[text].ravel()[piece] + place
        tokens = np.empty(len(index), np.int64)
        in_table = kind <= _SOFT
        tokens[in_table] = self._ids[index[in_table]]
        tokens[~in_table] = self._tokens[index[~in_table]]
        # The last token of a document is a target alone.
        sizes = lengths.sum(axis=1)
        last = np.cumsum(sizes) - 1
        targets = np.where(kind >= _BEHIND, tokens, IGNORE_INDEX)
        return fill_samples(
            samples, np.delete(tokens, last), np.delete(np.roll(targets, -1), last), sizes - 1,
            counts, self._sequence,
        )  # fmt: skip

    def _epoch(self, number: int) -> _Epoch:
        """Return an epoch, packed; earlier ones are packed before it."""
        if number not in self._epochs:
            lengths = self._drop(number)
            samples = best_fit_pack(lengths.sum(axis=1) - 1, self._sequence)
            texts = np.argsort(samples, kind="stable")
            bounds = np.searchsorted(samples[texts], np.arange(samples.max(initial=-1) + 2))
            if number == len(self._first_samples) - 1:
                self._first_samples.append(self._first_samples[-1] + len(bounds) - 1)
            if len(self._epochs) > 1:
                del self._epochs[min(self._epochs)]
            self._epochs[number] = _Epoch(lengths, texts, bounds)
        return self._epochs[number]

    def _drop(self, epoch: int) -> Integers:
        """Return the lengths of pieces, [texts, pieces], that dropout leaves in an epoch."""
        text = torch.from_numpy(self._texts)[:, None]
        draws = uniform(self._seed, "prompt", epoch, text, torch.arange(_COUNT + 1)).numpy()
        kept = (draws[:, _SWITCH, None] > 0.5) & (draws[:, _SWITCH + 1 : _COUNT] > 0.5)
        soft = (draws[:, _COUNT] * (SOFT_PROMPTS + 1)).astype(np.int64)
        lengths = self._lengths.copy()
        lengths[:, _SOFT] = np.minimum(lengths[:, _SOFT], soft)
        lengths[:, _SOFT:_BEHIND] *= kept
        has_prompt = lengths[:, _SOFT:_BEHIND].any(axis=1)
        lengths[:, _BEHIND] *= has_prompt
        lengths[:, _PLAIN] *= ~has_prompt
        return lengths


def _locate_pieces(corpus: Corpus, num_start_ids: int) -> tuple[Integers, Integers]:
    """Return starts and lengths of the pieces of each text, [texts, pieces]."""
    assert corpus.segments is not None, "a corpus of texts behind prompts"
    genres, segments = (
        corpus.segments[:, :1].astype(np.int64),
        corpus.segments[:, 1:].astype(np.int64),
    )
    before = np.cumsum(segments, axis=1) - segments
    bounds, shape = corpus.bounds.astype(np.int64), genres.shape
    text = bounds[:-1, None] + segments.sum(axis=1, keepdims=True)
    starts = np.hstack(
        (np.zeros(shape, np.int64), num_start_ids + np.maximum(genres, 0) * SOFT_PROMPTS,
         bounds[:-1, None] + before, text)
    )  # fmt: skip
    lengths = np.hstack(
        (np.full(shape, num_start_ids), np.where(genres < 0, 0, SOFT_PROMPTS), segments,
         bounds[1:, None] - text)
    )  # fmt: skip
    return starts, lengths
