from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.base.config import parse
from moesaic.base.errors import ConfigError
from moesaic.facts.job import LayoutConfig, ModelConfig
from moesaic.facts.job.model import PRESETS
from moesaic.facts.plan import Plan, lay_out

MODEL = parse(ModelConfig, PRESETS["tiny-olmoe"], "preset")


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    ep, shard = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    ranks = ep * shard * draw(st.integers(1, 3))
    return Plan(ranks=ranks, ep=ep, shard=shard, experts=ep * draw(st.integers(0, 4)))


@given(plans())
def test_every_expert_lives_once_in_a_group(plan: Plan) -> None:
    for group in plan.expert_groups():
        assert [expert for rank in group for expert in plan.homes(rank)] == list(
            range(plan.experts)
        )
    for group in plan.replica_groups():
        assert len({plan.homes(rank) for rank in group}) == 1
    for groups in (plan.expert_groups(), plan.replica_groups()):
        assert sorted(rank for group in groups for rank in group) == list(range(plan.ranks))


@given(plans(), st.integers(0, 100))
def test_every_sample_is_held_once_and_in_order(plan: Plan, batch: int) -> None:
    rows = [row for rank in range(plan.ranks) for row in plan.rows(rank, batch)]
    assert rows == list(range(batch))
    sizes = {len(plan.rows(rank, batch)) for rank in range(plan.ranks)}
    assert max(sizes) - min(sizes) <= 1


def test_a_layout_is_resolved() -> None:
    assert lay_out(LayoutConfig(ep=2, shard="all"), MODEL, 4) == Plan(
        ranks=4, ep=2, shard=4, experts=16
    )
    assert lay_out(LayoutConfig(), MODEL, 3) == Plan(ranks=3, ep=1, shard=1, experts=16)


@pytest.mark.parametrize(
    ("layout", "ranks", "sentence"),
    [
        (
            LayoutConfig(ep=4), 2,
            "layout.ep = 4 does not divide the number of ranks (2): "
            "choose a divisor of 2, or start another number of ranks (--nproc)",
        ),
        (
            LayoutConfig(shard=3), 4,
            "layout.shard = 3 does not divide the number of ranks (4): "
            "choose a divisor of 4, or start another number of ranks (--nproc)",
        ),
        (
            LayoutConfig(ep=3), 3,
            "layout.ep = 3 does not divide model.experts = 16: "
            "choose a divisor of the number of experts",
        ),
    ],
)  # fmt: skip
def test_a_layout_that_does_not_fit(layout: LayoutConfig, ranks: int, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        lay_out(layout, MODEL, ranks)
    assert str(caught.value) == sentence
