"""How tokens had best travel: what there is to choose from, and what is usual."""

from __future__ import annotations

from typing import Any

import pytest

from moesaic.facts.job import LayoutConfig
from moesaic.facts.plan import Plan, in_words, lay_out
from moesaic.policy.dispatch import usual, ways
from moesaic.testing.jobs import tiny_job


def plan_of(ranks: int, **layout: Any) -> Plan:
    return lay_out(
        LayoutConfig(**layout), tiny_job(model={"kv_heads": 4, "vocab": 64}).model, ranks
    )


def on(*sizes: int) -> list[str]:
    """Hosts of ranks, so many in a row on each."""
    return [f"host-{host}" for host, size in enumerate(sizes) for _ in range(size)]


@pytest.mark.parametrize(
    ("plan", "hosts", "dispatch", "num"),
    [
        (plan_of(4, ep=4), on(4), "rows", 1),
        (plan_of(4, ep=4), on(2, 2), "visits", 2),
        (plan_of(4, ep=4), on(1, 1, 1, 1), "visits", 1),
        (plan_of(4, ep=4), on(3, 1), "visits", 1),
        (plan_of(4, ep=4), ["a", "b", "a", "b"], "visits", 1),
        (plan_of(8, ep=4), on(4, 4), "rows", 1),
        (plan_of(8, ep=8), on(2, 2, 2, 2), "visits", 4),
        (plan_of(8, ep=4), on(2, 2, 4), "visits", 1),
        (plan_of(8, ep=4), on(6, 2), "visits", 1),
        (plan_of(8, ep=4, tp=2, etp=2), on(4, 4), "visits", 2),
        (plan_of(4), on(2, 2), "rows", 1),
    ],
    ids=str,
)
def test_what_is_usual(plan: Plan, hosts: list[str], dispatch: str, num: int) -> None:
    found = usual(plan, hosts, 2)
    assert (found.dispatch, found.hosts) == (dispatch, num)
    assert usual(plan, hosts, 1) == plan
    assert found in ways(plan, hosts)
    assert ways(plan, hosts)[0] == plan


def test_all_ways_are_tried() -> None:
    told = [(one.dispatch, one.hosts) for one in ways(plan_of(8, ep=8), on(4, 4))]
    assert told == [("rows", 1), ("visits", 1), ("rows", 2), ("visits", 2)]
    assert len(ways(plan_of(8, ep=8), on(8))) == 2
    assert len(ways(plan_of(8), on(8))) == 1


def test_a_person_reads_what_is_computed_meanwhile() -> None:
    plan = plan_of(8, ep=8)
    for update, words in (
        ({"local": "first"}, "expert while local ones are computed"),
        ({"local": "first", "chunks": 2}, "expert in 2 parts while local ones are computed"),
    ):
        assert f"tokens once to each {words}, dense" in in_words(plan.model_copy(update=update))


def test_a_person_reads_it() -> None:
    words = [in_words(one) for one in ways(plan_of(8, ep=8), on(4, 4))]
    assert words == [
        f"8 ranks, experts over 8, tokens once to each {travel}, dense parameters on every rank"
        for travel in ("expert", "rank", "expert by way of 2 hosts", "of 2 hosts")
    ]  # fmt: skip
