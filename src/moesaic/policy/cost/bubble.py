"""Pipeline bubble: the fraction of the pipeline's time in which ranks idle."""

from __future__ import annotations

import numpy as np

from moesaic.facts.job.train import PipelineSchedule
from moesaic.policy.cost.event import PIPELINE
from moesaic.policy.cost.timeline import Timeline


def bubble_fraction(timeline: Timeline) -> float:
    """Return the mean fraction of a step's pipeline that ranks wait for other stages.

    The pipeline lasts from the first rank's start to the last rank's end. A rank waits while it
    neither computes nor runs collectives inside its stage; stage transfers count as waiting. The
    result is 0 without a pipeline.
    """
    spans = [span for span in timeline.spans if span.event.phase == PIPELINE]
    if not spans:
        return 0.0
    busy = np.zeros_like(timeline.end_s)
    for span in spans:
        if span.event.receives is None:
            busy += span.end_s - span.arrive_s
    pipeline_s = float(spans[-1].end_s.max() - spans[0].arrive_s.min())
    return 1.0 - float(busy.mean()) / pipeline_s if pipeline_s else 0.0


def ideal_bubble_fraction(
    schedule: PipelineSchedule, pp: int, stages_per_rank: int, num_micro_batches: int
) -> float:
    """Return the bubble fraction for equal stages and instant transfers.

    `interleaved` and `zero-bubble` need at least as many micro-batches as pipeline ranks.
    `zero-bubble` also assumes that forward and both halves of backward take equally long.
    """
    passes = 3 if schedule == "zero-bubble" else 1
    idle = pp - 1
    return idle / (passes * stages_per_rank * num_micro_batches + idle)
