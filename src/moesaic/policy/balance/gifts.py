"""The search for gifts, compiled: a thousand ranks are decided on in milliseconds.

Numbers and ties are those of the plain way to write it, which tests hold it against.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from moesaic.facts.balance import Balance, Ints, Setting, unchanged
from moesaic.policy.balance.compiled import compiled
from moesaic.policy.balance.model import Rows, moved

WAYS = range(4)
"""How much of the busiest rank's rows another takes; or, the last of them, all rows of a rank for
an expert, of those that travel from or to the rank with the most of these."""
_TO_THE_MEAN, _HALF, _GIVEN_ON, OWN_ROWS = WAYS


class State(NamedTuple):
    """Who computes what so far; D ranks, E experts."""

    counts_ED: Any
    left_ED: Any
    """Rows that are still to be computed at home, of experts that have been given."""
    has_ED: Any
    """Copies that are there, or may not be made."""
    given_E: Any
    """Which have been given."""
    homes_E: Ints
    at_home_E: Ints
    computed: Ints
    sent: Ints
    received: Ints
    out: Ints
    """Copies that a rank sends."""
    come: Ints
    """Copies that it gets."""
    own: Ints
    """Rows of experts that are at home there, which can be given on."""
    room: Ints
    takes: Ints
    """What each rank would take of a gift, while that is looked for."""
    saves: Any
    """What it would save."""
    by_home: Ints
    """Experts, rank by rank of their homes."""
    starts: Ints
    """Where those of each rank begin, and where the last ones end."""

    @classmethod
    def of(cls, counts: Ints, setting: Setting, start: Rows) -> State:
        """Everything is at home, by `start`."""
        counts_ED = np.ascontiguousarray(counts.T, np.int32)  # Narrow, for there are many.
        experts = len(setting.homes)
        room = experts if setting.room is None else setting.room
        return cls(
            counts_ED, np.empty_like(counts_ED), np.zeros(counts_ED.shape, np.bool_),
            np.zeros(experts, np.bool_), np.ascontiguousarray(setting.homes, np.int64),
            counts.sum(axis=0), *start, *moved(unchanged(), setting), start.computed.copy(),
            np.full(setting.ranks, room, np.int64), np.empty(setting.ranks, np.int64),
            np.empty(setting.ranks), np.argsort(setting.homes, kind="stable"),
            np.searchsorted(np.sort(setting.homes), np.arange(setting.ranks + 1)),
        )  # fmt: skip

    def again(self) -> State:
        """The beginning, once more, given that this is it."""
        fresh = [one.copy() for one in self[4:]]
        return State(
            self.counts_ED, np.empty_like(self.left_ED), self.has_ED.copy(),
            np.zeros_like(self.given_E), *fresh,
        )  # fmt: skip


class Terms(NamedTuple):
    """What gifts cost and save."""

    mean: int
    least_rows: int
    rows_per_s: float
    row_bytes: float
    bytes_per_s: float
    expert_bytes: float
    gradient_bytes: float
    latency_s: float
    beside_s: float
    matrices_s: float
    own: float
    hides: bool
    handling_s: float
    forwards: int
    passes: int
    exchanges: int
    relays: bool
    sends: int
    """Copies that a rank sends at most."""

    @classmethod
    def of(cls, counts: Ints, setting: Setting) -> Terms:
        """Of a setting."""
        return cls(
            -(-int(counts.sum()) // setting.ranks), max(setting.least_rows, 1),
            float(setting.rows_per_s), float(setting.row_bytes), float(setting.bytes_per_s),
            float(setting.expert_bytes), float(setting.gradient_bytes), float(setting.latency_s),
            float(setting.beside_s), float(setting.matrices_s), setting.own, setting.hides,
            float(setting.handling_s) * setting.hides, setting.forwards, setting.passes,
            setting.exchanges, setting.relays,
            counts.size if setting.sends is None else setting.sends,
        )  # fmt: skip


@compiled
def search(state: State, terms: Terms, way: int, least_s: float, most: int) -> Any:
    """All gifts (expert, rank, rows), `most` of them at most, how many of them are best, and
    seconds then; 0 if none are better than `least_s`."""
    gifts, best = [(0, 0, 0)][:0], 0
    top = _most(state.computed)
    while len(gifts) < most:
        if way == OWN_ROWS:
            expert, rank, number = _own_rows(state, terms, top)
        else:
            expert, rank, number = _next(state, terms, way, top)
        if expert < 0:
            break
        _give(state, expert, rank, number)
        gifts.append((expert, rank, number))
        top = _most(state.computed)
        step_s, later_s = _step_s(state, terms, len(gifts))
        if step_s < least_s:
            least_s, best = step_s, len(gifts)
        if later_s >= least_s:
            break
    found = np.zeros((len(gifts), 3), np.int64)
    for at, gift in enumerate(gifts):
        found[at, 0], found[at, 1], found[at, 2] = gift
    return found, best, least_s


def balance_of(gifts: Ints, state: State) -> Balance:
    """What these come to, from the beginning."""
    diverted = _taken(gifts, state.again())
    copies = gifts[:, :2]
    return Balance(copies[np.lexsort(copies.T[::-1])], diverted)


@compiled
def _taken(gifts: Ints, state: State) -> Any:
    """By source, the rows of each gift: those of its own rank first, then those of others, and of
    the home last."""
    ranks = len(state.computed)
    # What is not written to costs nothing.
    found, size = np.empty((256 * len(gifts) + ranks, 4), np.int64), 0
    for at in range(len(gifts)):
        expert, rank, rest = gifts[at]
        home, left = state.homes_E[expert], _left(state, expert)
        if size + ranks > len(found):
            larger = np.empty((2 * len(found) + ranks, 4), np.int64)
            larger[:size] = found[:size]
            found = larger
        for turn in range(ranks + 2):
            source = rank if turn == 0 else home if turn > ranks else turn - 1
            part = min(rest, left[source])
            if part > 0 and (turn in (0, ranks + 1) or source not in (rank, home)):
                left[source] -= part
                rest -= part
                found[size, 0], found[size, 1] = expert, source
                found[size, 2], found[size, 3] = rank, part
                size += 1
            if rest == 0:
                break
    return found[:size]


@compiled
def _left(state: State, expert: int) -> Any:
    """Rows of an expert that are still to be computed at home, by source."""
    left = state.left_ED[expert]
    if not state.given_E[expert]:
        state.given_E[expert] = True
        left[:] = state.counts_ED[expert]
    return left


@compiled
def _next(state: State, terms: Terms, way: int, top: int) -> tuple[int, int, int]:
    """What the busiest rank, which has `top` rows, had best give to whom, and how much; (-1, -1,
    0): nothing."""
    busiest, excess = _place_of(top, state.computed), top - terms.mean
    if state.out[busiest] >= terms.sends:
        return -1, -1, 0
    own = state.by_home[state.starts[busiest] : state.starts[busiest + 1]]
    tried = np.zeros(len(own), np.bool_)
    while excess >= terms.least_rows:
        largest = -1
        for one in range(len(own)):
            if tried[one]:
                continue
            if largest < 0 or state.at_home_E[own[one]] > state.at_home_E[own[largest]]:
                largest = one
        if largest < 0:
            break
        tried[largest] = True
        expert = own[largest]
        offered = min(excess, state.at_home_E[expert])
        rank, number = _receiver(state, terms, way, expert, offered, top)
        if rank >= 0:
            return expert, rank, number
    return -1, -1, 0


@compiled
def _receiver(
    state: State, terms: Terms, way: int, expert: int, number: int, top: int
) -> tuple[int, int]:
    """Who had best take some of so many rows, and how many; (-1, 0): nobody."""
    counts_D, has_D, saves = state.counts_ED[expert], state.has_ED[expert], state.saves
    each_row = terms.passes / terms.rows_per_s
    each_local = terms.exchanges * terms.row_bytes / terms.bytes_per_s
    computed, own, room, mean = state.computed, state.own, state.room, terms.mean
    takes, most = state.takes, 0.0
    for rank in range(len(takes)):  # Loops without branches: several ranks at a time.
        takes[rank] = mean - computed[rank]
    if way == _HALF:
        for rank in range(len(takes)):
            takes[rank] = max(takes[rank], (top - computed[rank]) >> 1)
    elif way == _GIVEN_ON:
        for rank in range(len(takes)):
            more = takes[rank] + min(own[rank], mean)
            takes[rank] = more if computed[rank] + min(more, number) < top else takes[rank]
    for rank in range(len(takes)):
        one = min(takes[rank], number)
        fits = (one >= terms.least_rows) & (room[rank] > 0) & (not has_D[rank])
        takes[rank] = one
        saved = one * each_row + min(counts_D[rank], one) * each_local
        saves[rank] = saved if fits else 0.0
    for saved in saves:
        most = max(most, saved)
    if most <= 0:
        return -1, 0
    found = _place_of(most, saves)
    return found, takes[found]


@compiled
def _own_rows(state: State, terms: Terms, top: int) -> tuple[int, int, int]:
    """The copy that saves the most of what travels from or to the rank where that is most, if the
    copy's rank computes its own rows; (-1, -1, 0): none."""
    each_row = terms.passes / terms.rows_per_s
    each_local = terms.exchanges * terms.row_bytes / terms.bytes_per_s
    source, home = state.sent.argmax(), state.received.argmax()
    leaves = state.sent[source] >= state.received[home]
    found, copy, number, most = -1, -1, 0, 0.0
    for expert in range(len(state.homes_E)):
        at = state.homes_E[expert]
        if at == source if leaves else at != home:
            continue
        if state.out[at] >= terms.sends:
            continue
        left = state.left_ED[expert] if state.given_E[expert] else state.counts_ED[expert]
        has_D = state.has_ED[expert]
        for rank in range(source, source + 1) if leaves else range(len(left)):
            one = left[rank]
            if rank == at or has_D[rank] or one < terms.least_rows or state.room[rank] <= 0:
                continue
            more = max(state.computed[rank] + one - top, 0)
            saved = one * each_local - more * each_row
            if saved > most:
                found, copy, number, most = expert, rank, one, saved
    return found, copy, number


@compiled
def _most(numbers: Ints) -> int:
    """The largest, none of which is negative."""
    most = 0
    for one in numbers:
        most = max(most, one)
    return most


@compiled
def _place_of(value: Any, values: Any) -> int:
    """The first place of what is there."""
    place = 0
    while values[place] != value:
        place += 1
    return place


@compiled
def _give(state: State, expert: int, rank: int, number: int) -> None:
    """Rows are taken in the order of `_taken`, which counts here by source only as far as they
    travel or not."""
    home, left = state.homes_E[expert], _left(state, expert)
    rest = number
    part = min(rest, left[rank])
    left[rank] -= part
    rest -= part
    state.sent[rank] -= part
    state.received[home] -= part
    for source in range(len(left)):
        if rest == 0:
            break
        if source in (rank, home):
            continue
        part = min(rest, left[source])
        left[source] -= part
        rest -= part
        state.received[home] -= part
        state.received[rank] += part
    left[home] -= rest
    state.sent[home] += rest
    state.received[rank] += rest
    state.computed[home] -= number
    state.computed[rank] += number
    state.at_home_E[expert] -= number
    state.own[home] -= number
    state.out[home] += 1
    state.come[rank] += 1
    state.room[rank] -= 1
    state.has_ED[expert, rank] = True


@compiled
def _step_s(state: State, terms: Terms, number: int) -> tuple[float, float]:
    """What the layer takes, as `times_of` has it; and what it takes at least after more gifts, of
    which each is a copy more and leaves less to hide copies under. There are so many now."""
    busiest = _carried(state.sent, state.received, terms)
    exchange = busiest * terms.row_bytes / terms.bytes_per_s
    exchange += terms.latency_s * (busiest > 0)
    experts = 0.0
    for rank in range(len(state.computed)):
        matrices_s = terms.matrices_s * (1 + state.come[rank] / terms.own)
        experts = max(experts, state.computed[rank] / terms.rows_per_s + matrices_s)
    most = _carried(state.out, state.come, terms)
    if terms.hides:
        most = float(_most(state.come)) if terms.relays else most
        most = max(most, float(-(-number // len(state.out))))
    out_s = most * terms.expert_bytes / terms.bytes_per_s + terms.latency_s * (most > 0)
    back_s = most * terms.gradient_bytes / terms.bytes_per_s + terms.latency_s * (most > 0)
    hidden = (experts + terms.beside_s) * terms.hides
    each_s = 0.0
    if terms.handling_s > 0:
        through = 2 * _most(state.come) if terms.relays else _in_and_out(state.out, state.come)
        each_s = through * terms.handling_s
    busy_out_s, busy_back_s = each_s * terms.expert_bytes, each_s * terms.gradient_bytes
    handled = terms.forwards * busy_out_s + busy_back_s
    exposed = terms.forwards * max(0.0, out_s - hidden - busy_out_s)
    exposed += max(0.0, back_s - 2 * hidden - busy_back_s)
    whole = terms.exchanges * exchange + terms.passes * experts + handled + exposed
    least = terms.mean / terms.rows_per_s + terms.matrices_s
    return whole, terms.passes * least + handled + exposed


@compiled
def _carried(sent: Ints, received: Ints, terms: Terms) -> float:
    """As the model has it."""
    if terms.hides:
        return float(max(_most(sent), _most(received)))
    return float(_in_and_out(sent, received)) / 2


@compiled
def _in_and_out(sent: Ints, received: Ints) -> int:
    """The most that a rank sends and receives."""
    both = 0
    for rank in range(len(sent)):
        both = max(both, sent[rank] + received[rank])
    return both
