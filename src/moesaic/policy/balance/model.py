"""What a step of an expert layer takes, given who computes what.

Every policy is held against this model. Its parts are those of Pro-Prophet's performance model:
rows travel four times (to experts and back, forward and backward), experts compute forward and
twice as long backward, and what copies cost is hidden under experts and what is between layers.
Where backward computes a layer again, all that is forward happens twice.
What a rank sends counts as well as what it receives, and so do latencies, who sends copies, and
what computing has to wait while a processor handles them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moesaic.facts.balance import Balance, Ints, Setting, unchanged


class Rows(NamedTuple):
    """By rank."""

    computed: Ints
    sent: Ints
    """To others; results take the way back."""
    received: Ints
    """From others."""


class Times(NamedTuple):
    """Seconds of a layer, forward and backward."""

    exchange: float
    """Of one of the four."""
    experts: float
    """Forward."""
    out: float
    """Parameters to copies, hidden or not."""
    back: float
    """Gradients from copies, hidden or not."""
    handled: float
    """That computing is slowed by both."""
    exposed: float
    """What of both nothing hides."""
    whole: float


def rows(counts: Ints, homes: Ints, balance: Balance) -> Rows:
    """Where rows `counts` [D, E] of each rank for each expert are computed."""
    ranks, (experts, sources, targets, number) = len(counts), balance.diverted.T
    computed = np.zeros(ranks, np.int64)
    np.add.at(computed, homes, counts.sum(axis=0))
    received = computed.copy()
    np.subtract.at(received, homes, counts[homes, np.arange(len(homes))])
    sent = counts.sum(axis=1)
    np.subtract.at(sent, homes, counts[homes, np.arange(len(homes))])
    at_home = homes[experts]
    np.subtract.at(computed, at_home, number)
    np.add.at(computed, targets, number)
    travelled, travels = sources != at_home, sources != targets
    np.subtract.at(received, at_home[travelled], number[travelled])
    np.subtract.at(sent, sources[travelled], number[travelled])
    np.add.at(received, targets[travels], number[travels])
    np.add.at(sent, sources[travels], number[travels])
    return Rows(computed, sent, received)


def busiest(computed: Ints) -> float:
    """The most rows that a rank computes, over the mean; 1 where there are none."""
    total = int(computed.sum())
    return float(computed.max() * len(computed) / total) if total else 1.0


def moved(balance: Balance, setting: Setting) -> tuple[Ints, Ints]:
    """Copies that each rank sends, and receives."""
    sent, received = (np.zeros(setting.ranks, np.int64) for _ in range(2))
    experts, ranks = balance.copies.T
    np.add.at(sent, setting.homes[experts], 1)
    np.add.at(received, ranks, 1)
    return sent, received


def times(counts: Ints, setting: Setting, balance: Balance) -> Times:
    """What the layer takes then."""
    return times_of(rows(counts, setting.homes, balance), *moved(balance, setting), setting)


def unless_worse(counts: Ints, setting: Setting, balance: Balance) -> Balance:
    """Return `balance`, or no copies if the model rates these slower than none."""
    if not len(balance.copies):
        return balance
    return min((balance, unchanged()), key=lambda one: times(counts, setting, one).whole)


def times_of(rows: Rows, sent: Ints, received: Ints, setting: Setting) -> Times:
    """The same, given rows and copies."""
    busiest = _carried(rows.sent, rows.received, setting)
    exchange = busiest * setting.row_bytes / setting.bytes_per_s
    exchange += setting.latency_s * (busiest > 0)
    # A copy's matrices are read as well, by the rank that has it.
    matrices_s = setting.matrices_s * (1 + received / setting.own)
    experts = float((rows.computed / setting.rows_per_s + matrices_s).max())
    most = _carried(sent, received, setting)
    if setting.hides:
        all_in_turn = -(-int(sent.sum()) // setting.ranks)
        most = max(int(received.max()) if setting.relays else most, all_in_turn)
    out, back = (  # All that one rank has for another is one message.
        most * size / setting.bytes_per_s + setting.latency_s * (most > 0)
        for size in (setting.expert_bytes, setting.gradient_bytes)
    )
    hidden = (experts + setting.beside_s) * setting.hides
    each_s = int(_in_and_out(sent, received, setting).max()) * setting.handling_s * setting.hides
    out_s, back_s = each_s * setting.expert_bytes, each_s * setting.gradient_bytes
    handled = setting.forwards * out_s + back_s
    exposed = setting.forwards * max(0.0, out - hidden - out_s)
    exposed += max(0.0, back - 2 * hidden - back_s)
    whole = setting.exchanges * exchange + setting.passes * experts + handled + exposed
    return Times(exchange, experts, out, back, handled, exposed, whole)


def handled_s(rank: int, sent: Ints, received: Ints, setting: Setting) -> float:
    """As long as handling copies and gradients that travel keeps one rank from computing."""
    num_bytes = setting.forwards * setting.expert_bytes + setting.gradient_bytes
    number = int(_in_and_out(sent, received, setting)[rank])
    return number * num_bytes * setting.handling_s * setting.hides


def _in_and_out(sent: Ints, received: Ints, setting: Setting) -> Ints:
    """Copies that go through each rank; one that is relayed goes on from where it came to."""
    return 2 * received if setting.relays else sent + received


def _carried(sent: Ints, received: Ints, setting: Setting) -> float:
    """The most that a rank sends or receives, for links go both ways at a time; where it moves
    bytes itself, in and out, half of both."""
    if setting.hides:
        return max(int(sent.max()), int(received.max()))
    return int((sent + received).max()) / 2


def copy_rows(setting: Setting) -> float:
    """As many rows as a copy costs, if nothing of it is hidden: one that takes fewer off the
    busiest rank does not pay, unless it spares messages."""
    part = 1.0 if setting.hides else 0.5

    def copy_s(size: float) -> float:
        travelling = part * size / setting.bytes_per_s + setting.latency_s
        return max(travelling, size * setting.handling_s * setting.hides)

    whole_s = setting.forwards * copy_s(setting.expert_bytes) + copy_s(setting.gradient_bytes)
    return whole_s * setting.rows_per_s / setting.passes


def at_copies(counts: Ints, copies: Ints) -> Balance:
    """Where each rank that has a copy computes all of its own rows for that expert with it."""
    ordered = copies[np.lexsort((copies[:, 1], copies[:, 0]))]
    experts, ranks = ordered.T
    number = counts[ranks, experts]
    diverted = np.stack((experts, ranks, ranks, number), axis=1)
    return Balance(ordered, diverted[number > 0])
