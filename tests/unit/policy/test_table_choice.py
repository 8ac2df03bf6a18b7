"""What of the embedding ranks may have: what there is to choose from."""

from __future__ import annotations

from typing import Any

import pytest

from moesaic.facts.plan import lay_out
from moesaic.policy.table import tables
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
def test_columns_are_there_where_they_can_be_shared_out(
    ranks: int, layout: dict[str, Any], more: dict[str, Any], num: int
) -> None:
    job = tiny_job(**more, layout=layout)
    found = [plan.embedding for plan in tables(lay_out(job.layout, job.model, ranks), job)]
    assert found == ["whole", "columns"][:num]
