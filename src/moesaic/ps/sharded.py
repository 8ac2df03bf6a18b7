"""Table whose rows are shared among the ranks of a world by key, without servers.

The owner of a key is its hash modulo the number of ranks. A look-up sends each distinct key of a
rank to its owner once, and the row comes back. A step sends the sums of the keys' gradients the
same way. Owners merge them in rank order. Ranks hold consecutive samples, so gradients are summed
in the order of global samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from moesaic.dist.collectives import all_reduce_
from moesaic.dist.world import World
from moesaic.ps.index import Int64s, hash_keys
from moesaic.ps.records import Floats
from moesaic.ps.table import Lookup, Table, as_keys
from moesaic.ps.update import BagGradients, KeyBags

_OWNER_SHIFT = np.uint64(24)
"""First bit of a hash that decides the owner. The index uses higher bits, look-ups lower ones."""


@dataclass(frozen=True)
class _Route:
    """Way of a look-up's distinct keys to the ranks that own them."""

    bags: KeyBags
    """Bags of this rank."""
    order: Int64s
    """Distinct keys by owner, [distinct]."""
    send: list[int]
    """Number of distinct keys by owner."""
    receive: list[int]
    """Number of keys from each rank that this one owns."""


class ShardedLookup:
    """Rows of one batch, summed per bag."""

    def __init__(self, sums: Floats, owned: Lookup, route: _Route | None) -> None:
        self.sums = sums
        """Sums of rows, [bags, dim]; an empty bag has zeros."""
        self.owned = owned
        """Look-up of the keys that this rank owns: a bag for each key received, in rank order."""
        self.route = route
        """Way of the keys to their owners; None on a single rank, whose bags are `owned`."""
        self.pushed: tuple[ArrayLike, ArrayLike | None] | None = None
        """Gradients of `sums`, and clicked samples of each bag, until the next step."""

    def push(self, grad_sums: ArrayLike, clicks: ArrayLike | None = None) -> None:
        """Keep gradients for the table's next step.

        Args:
            grad_sums: gradients of `sums`, [bags, dim].
            clicks: clicked samples of each bag, [bags]; None: none.
        """
        self.pushed = grad_sums, clicks


class ShardedTable:
    """Rows of one table over the ranks of a world; every rank calls each method."""

    def __init__(self, table: Table, world: World) -> None:
        """Share keys among the ranks of `world`; `table` has the rows of this rank's keys."""
        self.table, self._world = table, world
        self._transport = world.transport([range(world.size)])
        self._pending: list[ShardedLookup] = []
        self.dim = table.dim
        """Numbers of a row."""
        self.bytes_sent = 0
        """Bytes of keys, rows and gradients that this rank has sent to others."""

    def look_up(self, keys: ArrayLike, offsets: ArrayLike, *, training: bool) -> ShardedLookup:
        """Return the sums of rows in bags.

        Args:
            keys: keys of all bags, [n].
            offsets: first key of each bag, and at the end n, [bags + 1].
            training: True if gradients follow, which the next `step` applies.
        """
        if self._transport is None:
            owned = self.table.look_up(keys, offsets, training=training)
            lookup = ShardedLookup(owned.sums, owned, None)
        else:
            lookup = self._look_up_over_ranks(as_keys(keys), offsets, training)
        if training:
            self._pending.append(lookup)
        return lookup

    def _look_up_over_ranks(
        self, keys: Int64s, offsets: ArrayLike, training: bool
    ) -> ShardedLookup:
        bags = KeyBags.of(keys, np.ascontiguousarray(offsets, np.int64))
        owners = owners_of(bags.hashes, self._world.size)
        order = np.argsort(owners, kind="stable")
        counts = np.bincount(owners, minlength=self._world.size)
        ones = [1] * self._world.size
        receive = self._exchange(counts[:, None], ones, ones).ravel().tolist()
        route = _Route(bags, order, counts.tolist(), receive)
        received = self._exchange(bags.distinct[order], route.send, route.receive)
        owned = self.table.look_up(received, np.arange(len(received) + 1), training=training)
        rows = self._exchange(owned.sums, route.receive, route.send)
        places = np.empty_like(order)
        places[order] = np.arange(len(order))
        sums = bags.sum_rows(rows, rows[:0], places, self.dim)
        return ShardedLookup(sums, owned, route)

    def step(self) -> None:
        """Send the gradients of look-ups to the owners of their keys, and update each row once.

        Raises:
            DivergedError: a gradient is not finite.
        """
        pending, self._pending = self._pending, []
        for lookup in pending:
            if lookup.route is not None:
                self._push_over_ranks(lookup, lookup.route)
            elif lookup.pushed is not None:
                lookup.owned.push(*lookup.pushed)
        self.table.step()

    def _push_over_ranks(self, lookup: ShardedLookup, route: _Route) -> None:
        """Send sums of gradients, shows and clicks of each distinct key to its owner."""
        merged = np.zeros((len(route.order), self.dim + 2), lookup.sums.dtype)
        if lookup.pushed is not None:
            grads, clicks = lookup.pushed
            shows = np.ones(route.bags.num_bags, np.float32)
            clicked = np.zeros_like(shows)
            if clicks is not None:
                clicked = np.ascontiguousarray(clicks, np.float32)
            given = BagGradients(np.ascontiguousarray(grads, merged.dtype), shows, clicked)
            sums = route.bags.merge(given)
            merged[:, :-2] = sums.grads[route.order]
            merged[:, -2], merged[:, -1] = sums.shows[route.order], sums.clicks[route.order]
        received = self._exchange(merged, route.send, route.receive)
        lookup.owned.push(received[:, :-2], received[:, -1], received[:, -2])

    def _exchange(
        self, rows: NDArray[np.generic], send: Sequence[int], receive: Sequence[int]
    ) -> NDArray[np.generic]:
        """Return the rows that all ranks send to this one, in rank order."""
        assert self._transport is not None
        self.bytes_sent += (len(rows) - send[self._world.rank]) * rows[:1].nbytes
        tensor = torch.from_numpy(rows).to(self._world.device)
        received, work = self._transport.start(tensor, list(send), list(receive))
        work.wait()
        result: NDArray[np.generic] = received.cpu().numpy()
        return result

    def owns(self, keys: Int64s) -> NDArray[np.bool_]:
        """Return which keys this rank owns."""
        owned: NDArray[np.bool_] = owners_of(hash_keys(keys), self._world.size) == self._world.rank
        return owned

    def take_bytes_sent(self) -> int:
        """Return the bytes that this rank has sent since the last call."""
        taken, self.bytes_sent = self.bytes_sent, 0
        return taken

    def num_rows(self) -> int:
        """Return the number of rows over all ranks."""
        return self._sum(self.table.num_rows)

    def end_day(self) -> int:
        """End the day: counts decay, and rows are evicted; return the evicted rows of all ranks.

        Which rows are evicted does not depend on the ranks.
        """
        return self._sum(self.table.end_day(self._sum))

    def _sum(self, number: int) -> int:
        """Return the sum of a number over all ranks."""
        total = torch.tensor([number], device=self._world.device)
        return int(all_reduce_(total, self._world.group))


def owners_of(hashes: NDArray[np.uint64], ranks: int) -> NDArray[np.uint16]:
    """Return the rank that owns each key, by the keys' hashes."""
    return ((hashes >> _OWNER_SHIFT) % np.uint64(ranks)).astype(np.uint16)
