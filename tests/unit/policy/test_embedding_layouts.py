"""Embedding layouts: the candidates."""

from __future__ import annotations

from typing import Any

import pytest

from moesaic.facts.plan import plan_from_layout
from moesaic.policy.plan.choices import embedding_layouts
from moesaic.testing.jobs import tiny_job


@pytest.mark.parametrize(
    ("ranks", "layout", "more", "num"),
    [
        (1, {}, {}, 1),
        (4, {}, {}, 2),
        (4, {"embedding": "columns"}, {}, 2),
        (4, {"tp": 2}, {"model": {"vocab": 64}}, 1),
        (3, {}, {}, 1),
        (2, {"pp": 2}, {"train": {"micro_batches": 2}}, 1),
        (4, {"pp": 2}, {"train": {"micro_batches": 2}}, 2),
        (2, {}, {"optimizer": {"moments": "8bit"}}, 1),
    ],
)
def test_column_sharding_is_a_candidate_where_possible(
    ranks: int, layout: dict[str, Any], more: dict[str, Any], num: int
) -> None:
    job = tiny_job(**more, layout=layout)
    found = [
        plan.embedding
        for plan in embedding_layouts(plan_from_layout(job.layout, job.model, ranks), job)
    ]
    assert found == ["whole", "columns"][:num]
