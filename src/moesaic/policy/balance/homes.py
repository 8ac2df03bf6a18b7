"""Where experts should live for good, by the rows of the steps before.

Every rank has as many experts as before. Those of the busiest rank change places with others', pair
by pair, the pair first that brings it down most (as SmartMoE does), or all are packed anew, largest
first to whoever has the least (as EPLB does): whichever is modelled to save most in as many steps
to come, less what moving costs. If nothing saves anything, nobody moves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from moesaic.facts.balance import Ints, Setting
from moesaic.facts.job import Job
from moesaic.facts.plan import Plan
from moesaic.policy.balance.model import busiest


class Moving(NamedTuple):
    """What homes cost."""

    row_s: float
    """Seconds of a row more of the busiest rank, forward and backward."""
    expert_s: float
    """Of an expert that leaves a rank, with its moments, while another comes."""
    exchange_s: float
    """Of an exchange, however few leave."""


class Rehomed(NamedTuple):
    """Where the experts of a layer are to live."""

    slots: tuple[int, ...]
    """The experts of all slots of a group of ranks, rank by rank; whoever stays keeps its slot."""
    moves: tuple[tuple[int, int, int], ...]
    """(expert, from, to) of those that change their rank, in that order."""
    gain_s: float
    """What that saves in as many steps to come, less what it costs."""
    before: float
    """Rows of the busiest rank over the mean, where experts were."""
    after: float
    """The same, where they are to be."""


def rehomes(job: Job, plan: Plan) -> bool:
    """Whether experts may change their homes."""
    return job.balance.rehome_every > 0 and plan.ep > 1 and job.model.experts > 0


def moving(setting: Setting, expert_bytes: float, groups: int) -> Moving:
    """Where so many `groups` of ranks share a layer's rows alike, and each of their ranks sends as
    many of them: what it receives then counts, of all but its own."""
    away = (1 - 1 / setting.ranks) * (1.0 if setting.hides else 0.5)
    row_s = setting.passes / setting.rows_per_s
    row_s += setting.exchanges * away * setting.row_bytes / setting.bytes_per_s
    return Moving(row_s / groups, expert_bytes / setting.bytes_per_s, setting.latency_s)


def rehomed(totals: Ints, slots: Sequence[int], ranks: int, cost: Moving) -> Rehomed:
    """Where experts with such rows [experts], which live in `slots` of two ranks or more, are to
    live."""
    each = len(slots) // ranks
    homes: Ints = np.argsort(slots) // each
    found, most_s = homes, 0.0
    for other in (*_swapped(totals, homes, ranks), _packed(totals, homes, ranks)):
        saved_s = gain_s(totals, homes, other, ranks, cost)
        if saved_s > most_s:
            found, most_s = other, saved_s
    left = np.flatnonzero(found != homes)
    moves = zip(left.tolist(), homes[left].tolist(), found[left].tolist(), strict=True)
    spread = (busiest(_loads(totals, one, ranks)) for one in (homes, found))
    return Rehomed(_arranged(slots, found, each), tuple(moves), most_s, *spread)


def gain_s(totals: Ints, homes: Ints, others: Ints, ranks: int, cost: Moving) -> float:
    """What `others` save over `homes` in as many steps, less what moving there costs."""
    left = np.bincount(homes[homes != others], minlength=ranks).max()
    if not left:
        return 0.0
    fewer = _loads(totals, homes, ranks).max() - _loads(totals, others, ranks).max()
    return float(fewer * cost.row_s - left * cost.expert_s - cost.exchange_s)


def _loads(totals: Ints, homes: Ints, ranks: int) -> Ints:
    found = np.zeros(ranks, np.int64)
    np.add.at(found, homes, totals)
    return found


def _swapped(totals: Ints, homes: Ints, ranks: int) -> Iterator[Ints]:
    """Homes after one swap, after two, and so on, as long as each brings the busiest rank down and
    nobody up to it; no assignment is more swaps away than there are experts."""
    homes, loads = homes.copy(), _loads(totals, homes, ranks)
    for _ in range(len(homes)):
        rank = int(loads.argmax())
        own, others = np.flatnonzero(homes == rank), np.flatnonzero(homes != rank)
        fewer = totals[own][:, None] - totals[others]
        worse = np.maximum(loads[rank] - fewer, loads[homes[others]] + fewer)
        place = int(worse.argmin())
        if worse.flat[place] >= loads[rank]:
            return
        mine, theirs = own[place // len(others)], others[place % len(others)]
        loads[rank] -= totals[mine] - totals[theirs]
        loads[homes[theirs]] += totals[mine] - totals[theirs]
        homes[mine], homes[theirs] = homes[theirs], rank
        yield homes.copy()


def _packed(totals: Ints, homes: Ints, ranks: int) -> Ints:
    """Homes anew: the largest first to whoever has the least, and is not full; which rank has which
    part is such that many stay."""
    each = len(homes) // ranks
    loads, number, parts = np.zeros(ranks), np.zeros(ranks, np.int64), np.zeros_like(homes)
    for expert in np.argsort(-totals, kind="stable").tolist():
        part = int(np.where(number < each, loads, np.inf).argmin())
        parts[expert] = part
        loads[part] += totals[expert]
        number[part] += 1
    stay = np.zeros((ranks, ranks), np.int64)
    np.add.at(stay, (parts, homes), 1)
    named = np.zeros(ranks, np.int64)
    for _ in range(ranks):
        part, rank = divmod(int(stay.argmax()), ranks)
        named[part] = rank
        stay[part], stay[:, rank] = -1, -1
    found: Ints = named[parts]
    return found


def _arranged(slots: Sequence[int], homes: Ints, each: int) -> tuple[int, ...]:
    """The slots of `homes`: whoever stays on its rank keeps its slot, who comes takes a free one,
    in the order of experts."""
    stays = [int(homes[expert]) == at // each for at, expert in enumerate(slots)]
    coming = sorted(expert for at, expert in enumerate(slots) if not stays[at])
    found = list(slots)
    for at, stay in enumerate(stays):
        if not stay:
            found[at] = next(expert for expert in coming if homes[expert] == at // each)
            coming.remove(found[at])
    return tuple(found)
