"""Classes of ranks that behave alike in every event of a step, so that one stands for all.

The classes are the coarsest partition of the ranks with three properties:

- Ranks of a class take equally long in every event.
- Their groups in a collective have the same set of classes.
- They receive transfers from ranks of one class.

By induction over the events, ranks of a class then have equal clocks at all times: a simulation of
classes is exact. Hosts, links, devices and loads matter only through the events.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from moesaic.policy.cost.event import Event, RankGroups, Ranks, Seconds, StageTransfer


@dataclass(frozen=True)
class RankClasses:
    """Partition of the ranks into classes, in the order of their first ranks."""

    of_rank: Ranks
    """Class of each rank, [ranks]."""
    first_rank: Ranks
    """First rank of each class, [classes]."""
    _sets: dict[int, list[list[int]]] = field(default_factory=dict)
    """Cached sets of classes, by identity of the groups."""
    _transfers: dict[StageTransfer, tuple[Ranks, Ranks]] = field(default_factory=dict)

    def __len__(self) -> int:
        """Return the number of classes."""
        return len(self.first_rank)

    def class_groups(self, groups: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return the distinct sets of classes in `groups`, which must outlive this object."""
        if id(groups) not in self._sets:
            sets = {frozenset(self.of_rank[list(group)].tolist()) for group in groups}
            self._sets[id(groups)] = sorted(map(sorted, sets))
        return self._sets[id(groups)]

    def transfer(self, transfer: StageTransfer) -> tuple[Ranks, Ranks]:
        """Return the classes of senders and receivers, with a pair for each class of receivers."""
        if transfer not in self._transfers:
            receivers, first = np.unique(self.of_rank[transfer.receivers], return_index=True)
            self._transfers[transfer] = self.of_rank[transfer.senders[first]], receivers
        return self._transfers[transfer]


def rank_classes(events: Iterable[Event], num_ranks: int) -> RankClasses:
    """Return the classes of ranks that behave alike in `events`."""
    partition, events = _Partition(num_ranks), list(events)
    for seconds in {id(event.seconds): event.seconds for event in events}.values():
        partition.split(seconds)
    groupings = {id(event.groups): event.groups for event in events if event.groups}
    grouped = [RankGroups(groups) for groups in groupings.values()]
    transfers = {event.receives for event in events if event.receives is not None}
    num_classes = 0
    while num_classes != partition.num_classes:
        num_classes = partition.num_classes
        for groups in grouped:
            partition.split(partition.class_sets(groups))
        for transfer in transfers:
            partition.split(partition.sender_classes(transfer))
    return partition.classes()


class _Partition:
    """Partition of the ranks, which gets finer."""

    def __init__(self, num_ranks: int) -> None:
        self._classes = np.zeros(num_ranks, np.int64)
        self._first_rank = np.zeros(1, np.int64)

    @property
    def num_classes(self) -> int:
        return len(self._first_rank)

    def classes(self) -> RankClasses:
        """Return the classes, numbered by their first ranks."""
        order = self._first_rank.argsort()
        numbers = np.empty_like(order)
        numbers[order] = np.arange(len(order))
        return RankClasses(numbers[self._classes], self._first_rank[order])

    def split(self, values: Seconds | Ranks) -> None:
        """Separate ranks with unequal `values`."""
        if (values[self._first_rank][self._classes] == values).all():
            return
        distinct, indices = np.unique(values, return_inverse=True)
        _, self._first_rank, self._classes = np.unique(
            self._classes * len(distinct) + indices, return_index=True, return_inverse=True
        )

    def class_sets(self, groups: RankGroups) -> Ranks:
        """Return a number by rank that is equal for groups with the same set of classes.

        It is -1 outside all groups.
        """
        lowest, highest = -groups.group_max(-self._classes), groups.group_max(self._classes)
        if (lowest == highest).all():
            found = highest.tolist()
        else:
            sets: dict[frozenset[int], int] = {}
            found = [
                sets.setdefault(frozenset(self._classes[ranks].tolist()), len(sets))
                for ranks in groups
            ]
        return groups.scatter(found, np.full(len(self._classes), -1))

    def sender_classes(self, transfer: StageTransfer) -> Ranks:
        """Return the class of the sender of each rank, or -1."""
        found = np.full(len(self._classes), -1)
        found[transfer.receivers] = self._classes[transfer.senders]
        return found
