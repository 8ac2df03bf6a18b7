"""Slots of rows with expert replicas, against a loop over rows."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import torch
from hypothesis import given, settings

from moesaic.facts.balance import BalanceDecision
from moesaic.nn.dispatch.placement import ReplicaPlacement
from moesaic.nn.experts.replicas import ExpertPlacement

Case = tuple[ExpertPlacement, BalanceDecision, list[list[np.ndarray]], np.ndarray]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw owners, choices by rank and chunk, a balance decision, and the counts by expert."""
    seed = draw(st.integers(0, 2**32 - 1))
    ranks, slots_per_rank, chunks = (draw(st.integers(1, most)) for most in (4, 3, 3))
    rng = np.random.default_rng(seed)
    experts = ranks * slots_per_rank
    placement = ExpertPlacement(tuple(rng.permutation(experts).tolist()), ranks)
    rows = [
        [rng.integers(0, experts + 1, (rng.integers(0, 6), 2)) for _ in range(chunks)]
        for _ in range(ranks)
    ]
    counts = np.array(
        [[np.bincount(c.ravel(), minlength=experts + 1)[:-1] for c in local] for local in rows]
    )
    owner_ranks = placement.slot_of_expert // slots_per_rank
    has_replica = rng.random((experts, ranks)) < rng.choice([0.0, 0.3, 1.0])
    has_replica[np.arange(experts), owner_ranks] = False
    reroutes = []
    for expert, source in np.ndindex(experts, ranks):
        number = counts[source, :, expert].sum()
        targets = np.flatnonzero(has_replica[expert])
        odds = rng.dirichlet([0.5] * (len(targets) + 1))
        for target, part in zip(targets, rng.multinomial(number, odds), strict=False):
            reroutes += [(expert, source, int(target), int(part))] * bool(part)
    order = rng.permutation(len(reroutes))
    table = np.array(reroutes, np.int64).reshape(-1, 4)[order]
    replicas = np.argwhere(has_replica)
    prefetched = draw(st.sampled_from([None, rng.random(len(replicas)) < 0.5]))
    return placement, BalanceDecision(replicas, table, prefetched), rows, counts


@settings(max_examples=200, deadline=None)
@given(cases())
def test_slots_equal_loop(case: Case) -> None:
    owners, balance, rows, counts = case
    placement, experts = ReplicaPlacement(owners, balance, counts), len(owners.slot_experts)
    actual, slots_per_rank = placement.slot_counts(), placement.slots_per_rank
    assert slots_per_rank == owners.slots_per_rank + max(
        np.bincount(balance.replicas[:, 1]).tolist(), default=0
    )
    slot_experts = expert_of_slots(owners, balance, slots_per_rank)
    rerouted: dict[tuple[int, int, int], int] = {}
    for rank, local in enumerate(rows):
        for chunk, requested in enumerate(local):
            slots = placement.assign_slots(torch.from_numpy(requested), rank, chunk).numpy()
            assert slots.shape == requested.shape
            seen = np.bincount(slots.ravel(), minlength=len(slot_experts) + 1)
            assert np.array_equal(seen[:-1], actual[rank, chunk])
            for slot, expert in zip(
                slots.ravel().tolist(), requested.ravel().tolist(), strict=True
            ):
                assert (slot_experts[slot] if slot < len(slot_experts) else experts) == expert
                if expert < experts and slot % slots_per_rank >= owners.slots_per_rank:
                    key = expert, rank, slot // slots_per_rank
                    rerouted[key] = rerouted.get(key, 0) + 1
    expected = {(e, source, target): rows for e, source, target, rows in balance.rerouted.tolist()}
    assert rerouted == expected


@settings(max_examples=100, deadline=None)
@given(cases())
def test_chunks_reroute_proportional_shares(case: Case) -> None:
    """Each chunk is within one row per rank of its proportional share."""
    owners, balance, _, counts = case
    placement = ReplicaPlacement(owners, balance, counts)
    slots_per_rank, actual = placement.slots_per_rank, placement.slot_counts()
    for slot, expert in enumerate(expert_of_slots(owners, balance, slots_per_rank)):
        if expert < 0 or slot % slots_per_rank < owners.slots_per_rank:
            continue
        for rank in range(owners.num_ranks):
            total, requested = actual[rank, :, slot].sum(), counts[rank, :, expert]
            share = requested * total / max(requested.sum(), 1)
            assert (abs(actual[rank, :, slot] - share) <= owners.num_ranks).all()


def expert_of_slots(
    placement: ExpertPlacement, balance: BalanceDecision, slots_per_rank: int
) -> list[int]:
    """Return the expert of every slot, -1 for none.

    Own experts come first, then prefetched replicas, then the others, each by owner slot.
    """
    prefetched = (
        [False] * len(balance.replicas)
        if balance.prefetched is None
        else balance.prefetched.tolist()
    )
    actual = []
    for rank in range(placement.num_ranks):
        local = list(
            placement.slot_experts[
                rank * placement.slots_per_rank : (rank + 1) * placement.slots_per_rank
            ]
        )
        for is_first in (True, False):
            flagged = zip(balance.replicas.tolist(), prefetched, strict=True)
            replicas = [int(e) for (e, r), first in flagged if (r, first) == (rank, is_first)]
            local += sorted(replicas, key=placement.slot_experts.index)
        actual += local + [-1] * (slots_per_rank - len(local))
    return actual
