"""Where tokens stop on the way to experts, and how many of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.facts.plan import lay_out
from moesaic.facts.workload.loads import Routed, routed
from moesaic.testing.jobs import tiny_job

FIRST = {"local": "first"}
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, {"ep": 2}), (4, {"ep": 4}), (8, {"ep": 4}), (4, {"ep": 4, "hosts": 2}),
    (8, {"ep": 8, "hosts": 2}), (8, {"ep": 8, "hosts": 4}), (16, {"ep": 8, "hosts": 2, "tp": 2}),
    (8, {"ep": 4, "hosts": 4}), (8, {"ep": 4, "hosts": 2, "tp": 2, "etp": 2}),
    (8, {"ep": 4, **FIRST}), (8, {"ep": 8, "hosts": 2, **FIRST}),
    (8, {"ep": 4, "hosts": 2, "tp": 2, "etp": 2, "chunks": 2, **FIRST}),
]  # fmt: skip


def everywhere(size: int, layout: dict[str, Any], load: Any) -> tuple[list[Routed], int]:
    """What each rank sends in the one expert layer, and how many tokens all of them have."""
    model = {"layers": 1, "kv_heads": 4, "vocab": 64, "top_k": 3}
    job = tiny_job(model=model, layout=layout, train={"batch": 16})
    plan = lay_out(job.layout, job.model, size)
    found = [routed(job, plan, rank, load)[0] for rank in range(size)]
    return found, 16 * job.data.sequence * plan.etp


@pytest.mark.parametrize("dispatch", ["rows", "visits"])
@pytest.mark.parametrize(("size", "layout"), LAYOUTS)
@given(
    weights=st.lists(st.integers(0, 40), min_size=8, max_size=8).filter(
        lambda weights: 0 < 3 * max(weights) <= sum(weights)
    )
)
def test_what_one_sends_another_gets(
    size: int, layout: dict[str, Any], dispatch: str, weights: list[int]
) -> None:
    found, tokens = everywhere(size, {**layout, "dispatch": dispatch}, [weights])
    for rank, one in enumerate(found):
        for number, trip in enumerate(one.trips):
            assert rank in trip.group
            for other, rows in zip(trip.group, trip.to, strict=True):
                assert found[other].trips[number].back[trip.group.index(rank)] == rows
            if dispatch == "visits":  # Which are expected, and so rounded, one by one.
                assert max(trip.to) <= trip.tokens + size
                if "local" not in layout:
                    assert trip.leaving >= trip.tokens * (number > 0) - size
        if dispatch == "rows":
            assert one.trips[-1].arriving == sum(one.slots)
        if "local" in layout:
            straight = one.trips[-1] if len(one.trips) == 1 else one.trips[0]
            assert len(one.trips) > 1 or straight.to[straight.group.index(rank)] == 0
            turns = one.turns()
            assert len(turns) == 2 * one.chunks + 1
            assert sum(sum(turn.slots) for turn in turns) == one.num_rows
            number = [sum(turn.slots) for turn in turns[::2]]
            assert max(number) - min(number) <= 1
            each = np.array([turn.slots for turn in turns[::2]])
            assert each.sum(axis=0).tolist() == list(one.local)
            # Slot after slot: of a piece that has begun, no slot before it is in a later one.
            assert all(
                not each[at + 1 :, : int(np.flatnonzero(row)[-1])].any()
                for at, row in enumerate(each)
                if row.any()
            )
    firsts = [one.trips[0] for one in found]
    away = sum(one.leaving for one in found)
    assert away + sum(sum(one.local) for one in found) == tokens * 3
    if dispatch == "rows":
        assert sum(trip.tokens for trip in firsts) == away
    else:
        assert sum(trip.tokens for trip in firsts) == tokens


def test_even_visits_are_those_of_experts_drawn_at_random() -> None:
    (one, *_), tokens = everywhere(4, {"ep": 4, "hosts": 2, "dispatch": "visits"}, None)
    across, within = one.trips
    # Of eight experts four are on a host, two on a rank; three are chosen.
    none_on_host = 4 * 3 * 2 / (8 * 7 * 6)
    assert across.to == [round(tokens / 4 * (1 - none_on_host))] * 2
    assert across.group == (0, 2)
    assert within.group == (0, 1)
    none_on_rank = 6 * 5 * 4 / (8 * 7 * 6)
    assert within.to == [2 * round(tokens / 4 * (1 - none_on_rank))] * 2


def test_even_visits_beside_local_tokens_are_those_to_others() -> None:
    layout = {"ep": 4, "hosts": 2, "dispatch": "visits", **FIRST}
    (one, *_), tokens = everywhere(4, layout, None)
    across, within = one.trips
    # To this host: whose choices are among the two of the other rank there.
    none_on_host, none_on_rank = 4 * 3 * 2 / (8 * 7 * 6), 6 * 5 * 4 / (8 * 7 * 6)
    here, there = (round(tokens / 4 * (1 - none)) for none in (none_on_rank, none_on_host))
    assert across.to == across.back == [here, there]
    # Of the other host's tokens to both ranks, of this one's to the other rank.
    assert within.to == [here, 2 * here]


def test_visits_that_are_known_are_taken_as_they_are() -> None:
    # Two hosts of two ranks: assignments to eight experts, visits to four ranks and two hosts.
    rows = np.array([[2, 1, 0, 0, 3, 0, 0, 0]] * 4)
    visits = np.array([[2, 0, 3, 0, 2, 3]] * 4)
    load = np.concatenate([rows, visits], axis=1)
    found, _ = everywhere(4, {"ep": 4, "hosts": 2, "dispatch": "visits"}, [load])
    across, within = found[0].trips
    assert (across.to, across.back) == ([2, 3], [2, 2])
    assert (within.to, within.back) == ([4, 0], [4, 4])
    across, within = found[3].trips
    assert (across.to, across.back) == ([2, 3], [3, 3])
    assert (within.to, within.back) == ([6, 0], [0, 0])


@pytest.mark.parametrize("recorded", ["along", "first"])
@pytest.mark.parametrize("local", ["along", "first"])
def test_visits_to_other_ranks_are_known_whatever_becomes_of_local_ones(
    local: str, recorded: str
) -> None:
    # Four choices of each of 40 tokens are on one rank: half of them on the own one.
    rows = np.full((2, 8), 20)
    visits = np.full((2, 2), 20)
    if recorded == "first":
        visits[[0, 1], [0, 1]] = 0
    job = tiny_job(
        model={"layers": 1, "top_k": 4}, layout={"ep": 2, "dispatch": "visits", "local": local}
    )
    plan = lay_out(job.layout, job.model, 2)
    (trip,) = routed(job, plan, 0, [np.concatenate([rows, visits], axis=1)])[0].trips
    assert (trip.to[1], trip.back[1]) == (20, 20)
    if local == "first":
        assert trip.to[0] == 0
    elif recorded == "along":
        assert trip.to[0] == 20
