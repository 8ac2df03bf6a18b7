"""Dispatch methods: candidates and defaults."""

from __future__ import annotations

from typing import Any

import pytest

from moesaic.facts.job import LayoutConfig
from moesaic.facts.plan import Plan, describe_plan, plan_from_layout
from moesaic.policy.plan.dispatch import DispatchFacts, default_dispatch, dispatch_methods
from moesaic.testing.jobs import tiny_job


def plan_of(ranks: int, **layout: Any) -> Plan:
    return plan_from_layout(
        LayoutConfig(**layout), tiny_job(model={"kv_heads": 4, "vocab": 64}).model, ranks
    )


def on(*sizes: int) -> list[str]:
    """Return the host of each rank, with `sizes` consecutive ranks per host."""
    return [f"host-{host}" for host, size in enumerate(sizes) for _ in range(size)]


@pytest.mark.parametrize(
    ("plan", "hosts", "dispatch", "num"),
    [
        (plan_of(4, ep=4), on(4), "all_to_all", 1),
        (plan_of(4, ep=4), on(2, 2), "dedup", 2),
        (plan_of(4, ep=4), on(1, 1, 1, 1), "dedup", 1),
        (plan_of(4, ep=4), on(3, 1), "dedup", 1),
        (plan_of(4, ep=4), ["a", "b", "a", "b"], "dedup", 1),
        (plan_of(8, ep=4), on(4, 4), "all_to_all", 1),
        (plan_of(8, ep=8), on(2, 2, 2, 2), "dedup", 4),
        (plan_of(8, ep=4), on(2, 2, 4), "dedup", 1),
        (plan_of(8, ep=4), on(6, 2), "dedup", 1),
        (plan_of(8, ep=4, tp=2, etp=2), on(4, 4), "dedup", 2),
        (plan_of(4), on(2, 2), "all_to_all", 1),
    ],
    ids=str,
)
def test_default_dispatch(plan: Plan, hosts: list[str], dispatch: str, num: int) -> None:
    found = default_dispatch(DispatchFacts(list(plan.ep_groups()), hosts, 2))
    assert found == (dispatch, num)
    assert default_dispatch(DispatchFacts(list(plan.ep_groups()), hosts, 1)) == ("all_to_all", 1)
    methods = dispatch_methods(plan, hosts)
    assert plan.model_copy(update=found._asdict()) in methods
    assert methods[0] == plan


def test_all_dispatch_methods_are_candidates() -> None:
    methods = [
        (one.dispatch, one.dispatch_hosts) for one in dispatch_methods(plan_of(8, ep=8), on(4, 4))
    ]
    assert methods == [("all_to_all", 1), ("dedup", 1), ("all_to_all", 2), ("dedup", 2)]
    assert len(dispatch_methods(plan_of(8, ep=8), on(8))) == 2
    assert len(dispatch_methods(plan_of(8), on(8))) == 1


def test_a_description_names_dispatch_and_overlap() -> None:
    plans = dispatch_methods(plan_of(8, ep=8), on(4, 4))
    for overlap in ({"overlap_local": True}, {"overlap_local": True, "chunks": 2}):
        plans.append(plan_of(8, ep=8).model_copy(update=overlap))
    assert [describe_plan(one) for one in plans] == [
        f"8 ranks, experts over 8, tokens once per {method}, dense parameters on every rank"
        for method in (
            "expert", "rank", "expert via 2 hosts", "host (2 hosts)",
            "expert while local ones are computed",
            "expert in 2 chunks while local ones are computed",
        )
    ]  # fmt: skip
