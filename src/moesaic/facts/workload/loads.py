"""How many rows each expert gets from each rank, where routing is even or a load was recorded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moesaic.base.errors import ConfigError
from moesaic.facts.job import Job
from moesaic.facts.plan import Plan

Counts = NDArray[np.int64]

SLOT_BYTES = 4
_ALIGNED = 16
"""Bytes of a visit are a multiple of it."""


def expert_counts(job: Job, plan: Plan, load: ArrayLike | None) -> Counts:
    """Assignments [ranks, experts] of one layer over one global micro-batch, none dropped.

    In a pipeline the ranks are those of the part that has the layer, by their place in it; slices
    of the same experts are one, as their tokens are joined.

    Args:
        job: the job.
        plan: which rank has which samples, and which run of their tokens.
        load: by expert, how its share of assignments compares to others': tokens of all ranks
            spread alike, and the job says how many there are. By rank and expert: assignments as
            they are, and behind them, if they are known, tokens that visit each rank of a group,
            and then each host. None: even.
    """
    given = np.ones(plan.experts, np.int64) if load is None else np.asarray(load)
    places = plan.span // plan.etp
    if given.shape in ((places, plan.experts), (places, plan.experts + sum(stops(plan)))):
        return given[:, : plan.experts].astype(np.int64)
    if given.shape != (plan.experts,):
        raise ConfigError(
            f"a load of shape {given.shape} does not fit {plan.experts} experts on {places} "
            f"ranks: give it by expert [{plan.experts}], or [{places}, {plan.experts}]"
        )
    if not (given.sum() > 0 and given.min() >= 0):
        raise ConfigError("a load of no assignments, or of less than none: give some above 0")
    reached = _shared_out(_ends(job, plan) * job.model.top_k, given.astype(np.float64))
    counts: Counts = np.diff(reached, axis=0, prepend=0)
    return counts


def stops(plan: Plan) -> list[int]:
    """Where tokens can stop on the way to experts: how many ranks of a group, how many hosts."""
    return [plan.ep, plan.hosts] if plan.trips > 1 else [plan.ep]


def _visits(
    plan: Plan, layer: int, load: ArrayLike | None, places: Sequence[int], expected: list[Counts]
) -> list[Counts]:
    """Tokens [ranks, stops] of the ranks at `places` that visit each stop, as far as `load` tells;
    `expected`, where it does not.

    What is local is among visits of a rank to itself, and to its host, alone: where the run had it
    otherwise than the plan, those are what to expect.
    """
    given = np.zeros(0) if load is None else np.asarray(load)
    if given.ndim != 2 or given.shape[1] != plan.experts + sum(stops(plan)):
        return expected
    told = given[places].astype(np.int64)
    found: list[Counts] = np.split(told[:, plan.experts :], stops(plan)[:-1], axis=1)
    ranks, own = np.arange(len(places)), np.array(places) % plan.ep
    apart = not found[0][ranks, own].any()
    at_home = _by_stop(plan, layer, told[:, : plan.experts], plan.ep)[ranks, own]
    if at_home.any() and apart != (plan.local == "first"):
        for visits, guess in zip(found, expected, strict=True):
            at = own * visits.shape[1] // plan.ep
            visits[ranks, at] = guess[ranks, at]
    return found


def _by_stop(plan: Plan, layer: int, counts: Counts, stops: int) -> Counts:
    """Assignments [ranks, stops] where so many share out the experts."""
    rows: Counts = counts[:, plan.slots(layer)].reshape(len(counts), stops, -1).sum(axis=2)
    return rows


def _expected_visits(
    job: Job, plan: Plan, layer: int, counts: Counts, everything: Counts, stops: int
) -> Counts:
    """Tokens [ranks, stops] that visit each of so many stops for what is in `counts`.

    It is what to expect of tokens whose choices follow `everything`, independently but for that no
    expert is chosen twice.
    """
    top_k, each = job.model.top_k, plan.experts // stops
    rows = _by_stop(plan, layer, counts, stops)
    total = everything.sum(axis=1, keepdims=True)
    share, none = rows / np.maximum(total, 1), np.ones(rows.shape)
    for choice in range(top_k):  # Experts that are left, of those of other ranks.
        none *= 1 - np.minimum(share * plan.experts / (plan.experts - choice), 1.0)
    tokens = total // top_k
    expected = np.rint(tokens * (1 - none)).astype(np.int64)
    least, most = -(-rows // min(top_k, each)), np.minimum(rows, tokens)
    found: Counts = np.clip(expected, least, np.maximum(most, least))
    return found


def _expected_stops(
    job: Job, plan: Plan, layer: int, counts: Counts, everything: Counts
) -> list[Counts]:
    """The same of ranks, and of hosts: a host gets as many as any of its ranks, and no more than
    all of them."""
    first, *more = (
        _expected_visits(job, plan, layer, counts, everything, num) for num in stops(plan)
    )
    ranks = first.reshape(len(counts), plan.hosts, -1)
    return [first, *(np.clip(one, ranks.max(axis=2), ranks.sum(axis=2)) for one in more)]


def visit_bytes(hidden: int, choices: int, each: int) -> tuple[int, int]:
    """Bytes of a visit, a token's numbers and weights of `each` bytes and its slots; and where in
    it slots begin."""
    slots_at = _up((hidden + choices) * each, SLOT_BYTES)
    return _up(slots_at + choices * SLOT_BYTES, _ALIGNED), slots_at


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _ends(job: Job, plan: Plan) -> Counts:
    """Where the tokens of each place end among those of a global micro-batch, one after another."""
    batch, sequence = job.train.batch // job.train.micro_batches, job.data.sequence
    bounds = np.array(plan.bounds(batch), np.int64)
    ranks = np.arange(plan.etp - 1, plan.span, plan.etp)
    replica, run = np.divmod(ranks, plan.tp)
    rows = np.diff(bounds)[replica]
    ends: Counts = sequence * bounds[replica] + (run + 1) * rows * sequence // plan.tp
    return ends


def _shared_out(totals: NDArray[np.int64], weights: NDArray[np.float64]) -> Counts:
    """Each of `totals` shared out in whole numbers by `weights`; a larger total takes from nobody.

    This is the method of Sainte-Lague: who gets the next one is who has the least for its weight.
    Of equals it is the first, so that equal weights are served in turn.
    """
    taken = weights > 0
    held: Counts = np.floor(totals[:, None] / weights.sum() * weights + 0.5).astype(np.int64)
    over = held.sum(axis=1) - totals
    with np.errstate(divide="ignore"):
        while over.any():
            more, less = np.flatnonzero(over < 0), np.flatnonzero(over > 0)
            next_one = np.where(taken, (2 * held[more] + 1) / weights, np.inf)
            held[more, next_one.argmin(axis=1)] += 1
            last_one = np.where(taken, (2 * held[less] - 1) / weights, -np.inf)
            held[less, last_one.shape[1] - 1 - last_one[:, ::-1].argmax(axis=1)] -= 1
            over = held.sum(axis=1) - totals
    return held


def slots_of(counts: Counts, plan: Plan, layer: int, rank: int, group: Sequence[int]) -> list[int]:
    """Rows of each of the slots of `rank`, from all of `group`."""
    return _slots(plan, layer, rank, _arriving(counts, plan, group))


def slots_by_rank(counts: Counts, plan: Plan, layer: int) -> dict[int, list[int]]:
    """The same of all ranks."""
    groups = [(group, _arriving(counts, plan, group)) for group in plan.expert_groups()]
    return {
        rank: _slots(plan, layer, rank, arriving) for group, arriving in groups for rank in group
    }


def _arriving(counts: Counts, plan: Plan, group: Sequence[int]) -> Counts:
    """Rows of each expert, from all of `group`."""
    arriving: Counts = counts[_places(plan, group)].sum(axis=0)
    return arriving


def _slots(plan: Plan, layer: int, rank: int, arriving: Counts) -> list[int]:
    rows: list[int] = arriving[list(plan.homes(rank, layer))].tolist()
    return rows


def leaving(counts: Counts, plan: Plan, rank: int) -> int:
    """Assignments of the tokens that go to experts from `rank`."""
    return int(counts[_places(plan, [rank])].sum())


def _of_others(counts: Counts, plan: Plan, layer: int, group: Sequence[int]) -> Counts:
    """Without what ranks of the group have for experts of their own."""
    found = counts.copy()
    for rank, place in zip(group, _places(plan, group), strict=True):
        found[place, list(plan.homes(rank, layer))] = 0
    return found


def _places(plan: Plan, group: Sequence[int]) -> list[int]:
    """Of ranks in their part of the pipeline; those that have the same experts are one."""
    return [rank % plan.span // plan.etp for rank in group]


def even(total: int, parts: int) -> list[int]:
    """`total` in so many parts, the larger ones first."""
    return [total // parts + (at < total % parts) for at in range(parts)]


class Trip(NamedTuple):
    """Tokens of one expert layer that one rank exchanges with others: each once for every expert
    there, or once."""

    group: tuple[int, ...]
    """The ranks."""
    to: list[int]
    """To each of them."""
    back: list[int]
    """From each of them."""
    tokens: int
    """That set out: of this rank, or that have come to it."""

    def chunk(self, at: int, chunks: int) -> Trip:
        """One of so many chunks, as if all were alike."""
        to, back = ([even(one, chunks)[at] for one in way] for way in (self.to, self.back))
        return Trip(self.group, to, back, even(self.tokens, chunks)[at])

    @property
    def leaving(self) -> int:
        """To all."""
        return sum(self.to)

    @property
    def arriving(self) -> int:
        """From all."""
        return sum(self.back)


class Routed(NamedTuple):
    """Rows of one rank in one expert layer."""

    leaving: int
    """Assignments of the tokens that go to experts from it, but for what is `local`."""
    slots: list[int]
    """Rows that arrive at each of its slots, but for what is `local`."""
    trips: tuple[Trip, ...]
    """How tokens travel; none: they stay."""
    visits: bool
    """Whether they travel once to each rank."""
    chunks: int = 1
    """Parts in which they do, one after another."""
    local: tuple[int, ...] = ()
    """Rows of its own tokens at each of its slots, where those are computed by themselves."""
    partly: bool = False
    """Whether tokens have choices that are not among its rows."""

    @property
    def by_rows(self) -> bool:
        """Whether each token travels once for every expert."""
        return bool(self.trips) and not self.visits

    @property
    def pieces(self) -> int:
        """In which what is local is computed: before, between and after chunks."""
        return (self.chunks + 1) * bool(self.local)

    @property
    def num_rows(self) -> int:
        """That are computed on the rank."""
        return sum(self.slots) + sum(self.local)

    def apart(self) -> list[Routed]:
        """Each chunk, as if all were alike."""
        if self.chunks == 1:
            return [self._replace(local=())]
        found = []
        for at, chunk in enumerate(_cut(self.slots, self.chunks)):
            trips = tuple(trip.chunk(at, self.chunks) for trip in self.trips)
            leaving = even(self.leaving, self.chunks)[at]
            found.append(Routed(leaving, chunk, trips, self.visits))
        return found

    def all_local(self) -> Routed:
        """All that is local, as if nothing else were there."""
        rows = list(self.local)
        return Routed(sum(rows), rows, (), False, self.pieces, partly=True)

    def local_pieces(self) -> list[Routed]:
        """Each piece of what is local, slot after slot."""
        found, before = [], 0
        ends = np.cumsum(self.local)
        for number in even(sum(self.local), self.pieces) if self.local else []:
            cut = np.clip(ends, before, before + number)
            rows = np.diff(cut, prepend=before).tolist()
            found.append(Routed(number, rows, (), visits=False, partly=True))
            before += number
        return found

    def turns(self) -> list[Routed]:
        """What is computed, in that order."""
        pieces, found = self.local_pieces(), list[Routed]()
        for at, chunk in enumerate(self.apart()):
            found += [*pieces[at : at + 1], chunk]
        return [*found, *pieces[self.chunks :]]


def _cut(slots: Sequence[int], parts: int) -> list[list[int]]:
    return [list(one) for one in zip(*(even(rows, parts) for rows in slots), strict=True)]


def routed(job: Job, plan: Plan, rank: int, loads: Sequence[ArrayLike] | None) -> list[Routed]:
    """Rows of `rank` in each expert layer; `loads` as `expert_counts` takes each, None: even."""
    group = next(group for group in plan.expert_groups() if rank in group)

    def rows(load: ArrayLike | None, layer: int) -> Routed:
        counts, local = expert_counts(job, plan, load), tuple[int, ...]()
        trips = _trips(job, plan, layer, rank, load, counts)
        if plan.local == "first":
            local = tuple(slots_of(counts, plan, layer, rank, [rank]))
            counts = _of_others(counts, plan, layer, group)
        slots = slots_of(counts, plan, layer, rank, group)
        visits = plan.dispatch == "visits" and plan.ep > 1
        away = leaving(counts, plan, rank)
        return Routed(away, slots, trips, visits, plan.chunks, local, partly=bool(local))

    layers = job.model.expert_layers
    if loads is None:
        if not plan.homes_of_layers:
            return [rows(None, layers[0])] * len(layers)
        return [rows(None, layer) for layer in layers]
    return [rows(load, layer) for load, layer in zip(loads, layers, strict=True)]


def _trips(
    job: Job, plan: Plan, layer: int, rank: int, load: ArrayLike | None, counts: Counts
) -> tuple[Trip, ...]:
    """Those of `rank`; none where all tokens stay."""
    if plan.ep == 1:
        return ()
    group, *ways = [
        next(ranks for ranks in groups if rank in ranks)
        for groups in (plan.expert_groups(), *plan.trip_groups())
    ]
    places, me = _places(plan, group), group.index(rank)
    everything, where = counts[places], stops(plan)
    if plan.local == "first":
        counts = _of_others(counts, plan, layer, group)
    own = counts[places]
    if plan.dispatch == "rows":
        stopping, tokens = (
            [_by_stop(plan, layer, own, each) for each in where],
            leaving(counts, plan, rank),
        )
    else:
        expected = _expected_stops(job, plan, layer, own, everything)
        stopping = _visits(plan, layer, load, places, expected)
        tokens = int(np.diff(_ends(job, plan), prepend=0)[places[me]])
    if len(ways) == 1:
        to, back = stopping[0][me], stopping[0][:, me]
        return (Trip(tuple(group), to.tolist(), back.tolist(), tokens),)
    across, within = ways
    host, place = divmod(me, len(within))
    to_ranks = stopping[0].reshape(plan.hosts, -1, plan.hosts, len(within))
    to_hosts = stopping[1].reshape(plan.hosts, -1, plan.hosts)
    there, back = to_hosts[host, place], to_hosts[:, place, host]
    on, from_ = to_ranks[:, place, host].sum(axis=0), to_ranks[:, :, host, place].sum(axis=0)
    return (
        Trip(tuple(across), there.tolist(), back.tolist(), tokens),
        Trip(tuple(within), on.tolist(), from_.tolist(), int(back.sum())),
    )
