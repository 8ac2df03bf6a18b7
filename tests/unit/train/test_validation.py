"""Validation loss: the mean over targets in the run's precision, for any batch size."""

from __future__ import annotations

import pytest
import torch

from moesaic.testing.jobs import RandomSamples, tiny_job
from moesaic.testing.runs import start_run
from moesaic.train.objectives import lm


@pytest.mark.parametrize("batch", [1, 8, 20])
def test_validation_is_the_mean_over_targets(batch: int) -> None:
    job = tiny_job(train={"batch": batch})
    run = start_run(job)
    samples = RandomSamples(job.model.vocab, job.data.sequence)
    loss, targets, _ = run.validate(samples, 20)
    sums, counts = [], 0
    with torch.no_grad():
        for index in range(20):
            one = samples.batch([index], shuffled=False)
            sums.append(run.objective.evaluate(one).loss.item())
            counts += lm.num_targets(one)
    assert targets == counts
    assert loss == pytest.approx(sum(sums) / counts, rel=1e-13)
