"""Sizes that a run's probe measures: those of the job's matmuls and attention."""

from __future__ import annotations

from moesaic.testing.jobs import tiny_job
from moesaic.train.layout_search import job_sizes


def test_sizes_of_a_job() -> None:
    job = tiny_job()
    found, model = job_sizes(job, ranks=2), job.model
    tokens = job.train.batch // 2 * job.data.sequence
    assert tokens in found.rows
    assert {model.hidden, model.ffn, model.experts} <= {*found.columns}
    assert found.head_dim == model.head_dim
    assert found.lengths[-1] == job.data.sequence
    per_expert = tokens * model.top_k // model.experts
    assert found.grouped_rows == [per_expert // 4, per_expert, 2 * per_expert]
