"""The slot of every row, against a loop over rows."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import torch
from hypothesis import given, settings

from moesaic.facts.balance import Balance
from moesaic.nn.guests import Homes
from moesaic.nn.placement import Placement

Case = tuple[Homes, Balance, list[list[np.ndarray]], np.ndarray]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Homes in any order, rows of every rank by chunk, any balance of them, and how many there are
    for each expert."""
    seed = draw(st.integers(0, 2**32 - 1))
    ranks, each, chunks = (draw(st.integers(1, most)) for most in (4, 3, 3))
    rng = np.random.default_rng(seed)
    experts = ranks * each
    homes = Homes(tuple(rng.permutation(experts).tolist()), ranks)
    rows = [
        [rng.integers(0, experts + 1, (rng.integers(0, 6), 2)) for _ in range(chunks)]
        for _ in range(ranks)
    ]
    counts = np.array(
        [[np.bincount(c.ravel(), minlength=experts + 1)[:-1] for c in own] for own in rows]
    )
    at_home = homes.places // each
    copied = rng.random((experts, ranks)) < rng.choice([0.0, 0.3, 1.0])
    copied[np.arange(experts), at_home] = False
    diverted = []
    for expert, source in np.ndindex(experts, ranks):
        number = counts[source, :, expert].sum()
        targets = np.flatnonzero(copied[expert])
        odds = rng.dirichlet([0.5] * (len(targets) + 1))
        for target, part in zip(targets, rng.multinomial(number, odds), strict=False):
            diverted += [(expert, source, int(target), int(part))] * bool(part)
    order = rng.permutation(len(diverted))
    table = np.array(diverted, np.int64).reshape(-1, 4)[order]
    copies = np.argwhere(copied)
    leaving = draw(st.sampled_from([None, rng.random(len(copies)) < 0.5]))
    return homes, Balance(copies, table, leaving), rows, counts


@settings(max_examples=200, deadline=None)
@given(cases())
def test_rows_go_where_a_loop_puts_them(case: Case) -> None:
    homes, balance, rows, counts = case
    placement, experts = Placement(homes, balance, counts), len(homes.slots)
    found, each = placement.counts(), placement.each
    assert each == homes.each + max(np.bincount(balance.copies[:, 1]).tolist(), default=0)
    owner = _owners(homes, balance, each)
    moved: dict[tuple[int, int, int], int] = {}
    for rank, own in enumerate(rows):
        for chunk, asked in enumerate(own):
            slots = placement.slots(torch.from_numpy(asked), rank, chunk).numpy()
            assert slots.shape == asked.shape
            seen = np.bincount(slots.ravel(), minlength=len(owner) + 1)
            assert np.array_equal(seen[:-1], found[rank, chunk])
            for slot, expert in zip(slots.ravel().tolist(), asked.ravel().tolist(), strict=True):
                assert (owner[slot] if slot < len(owner) else experts) == expert
                if expert < experts and slot % each >= homes.each:
                    key = expert, rank, slot // each
                    moved[key] = moved.get(key, 0) + 1
    wanted = {(e, source, target): rows for e, source, target, rows in balance.diverted.tolist()}
    assert moved == wanted


@settings(max_examples=100, deadline=None)
@given(cases())
def test_every_chunk_has_its_share(case: Case) -> None:
    """To within a row for each place that rows go to."""
    homes, balance, _, counts = case
    placement = Placement(homes, balance, counts)
    each, found = placement.each, placement.counts()
    for slot, expert in enumerate(_owners(homes, balance, each)):
        if expert < 0 or slot % each < homes.each:
            continue
        for rank in range(homes.ranks):
            whole, asked = found[rank, :, slot].sum(), counts[rank, :, expert]
            share = asked * whole / max(asked.sum(), 1)
            assert (abs(found[rank, :, slot] - share) <= homes.ranks).all()


def _owners(homes: Homes, balance: Balance, each: int) -> list[int]:
    """The expert of every slot, -1 of none: homes, then guests by their homes, but those that leave
    ahead of others before these."""
    ahead = [False] * len(balance.copies) if balance.ahead is None else balance.ahead.tolist()
    found = []
    for rank in range(homes.ranks):
        own = list(homes.slots[rank * homes.each : (rank + 1) * homes.each])
        for turn in (True, False):
            of_turn = zip(balance.copies.tolist(), ahead, strict=True)
            guests = [int(e) for (e, r), first in of_turn if (r, first) == (rank, turn)]
            own += sorted(guests, key=homes.slots.index)
        found += own + [-1] * (each - len(own))
    return found
