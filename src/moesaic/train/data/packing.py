"""Packing of whole documents into samples.

Best fit, longest first, leaves little room. The rest of a sample repeats it from the beginning
without targets, so routers see text instead of padding.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np

from moesaic.nn.loss import IGNORE_INDEX
from moesaic.train.data.batch import Batch, Integers, enumerate_segments, to_tensor


def fill_samples(
    samples: Integers,
    inputs: Integers,
    targets: Integers,
    lengths: Integers,
    counts: Integers,
    sequence: int,
) -> Batch:
    """Return samples of whole documents, filled up with repetitions.

    Args:
        samples: global indices of the samples.
        inputs: tokens of all their documents.
        targets: token after each input.
        lengths: inputs of each document.
        counts: documents of each sample.
        sequence: tokens of a sample.
    """
    row, number = enumerate_segments(counts)
    part, position = enumerate_segments(lengths)
    # From here on [B, S]: column c of a row with `used` tokens is its token c % used.
    used = np.bincount(row[part], minlength=len(samples))[:, None]
    column = np.arange(sequence)
    source = (np.cumsum(used) - used[:, 0])[:, None] + column % used
    documents = number[part][source] + column // used * counts[:, None]
    return Batch(
        samples=to_tensor(samples),
        inputs=to_tensor(inputs[source]),
        targets=to_tensor(np.where(column < used, targets[source], IGNORE_INDEX)),
        documents=to_tensor(documents.astype(np.int32)),
        positions=to_tensor(position[source]),
    )


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
