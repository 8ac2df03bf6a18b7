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


def test_sizes_where_some_ranks_have_no_sample() -> None:
    one, two = (tiny_job(train={"batch": batch}) for batch in (1, 2))
    assert job_sizes(one, ranks=2) == job_sizes(two, ranks=2)


def test_sizes_of_a_dense_model() -> None:
    """The probe needs some rows for grouped matmuls, which the model does not have."""
    job = tiny_job(
        model={"family": "llama", "experts": 0, "top_k": 0},
        routing={"balance_loss": 0, "z_loss": 0},
    )
    found = job_sizes(job, ranks=2)
    assert found.grouped_rows == [1, 2]
    assert {job.model.hidden, job.model.ffn} <= {*found.columns}
