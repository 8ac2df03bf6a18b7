"""The bubble of a pipeline: how much of it ranks do nothing, for want of what other stages do."""

from __future__ import annotations

import numpy as np

from moesaic.facts.job.train import Schedule
from moesaic.policy.cost.event import PIPELINE
from moesaic.sim.timeline import Timeline


def bubble(timeline: Timeline) -> float:
    """The share of a step's pipeline that ranks wait for other stages, mean over ranks.

    It lasts from when the first rank begins to when the last one is done. A rank waits while it
    neither computes nor speaks with others of its part: what other stages hand on is on its way
    then. 0 of a step without a pipeline.
    """
    spans = [span for span in timeline.spans if span.event.phase == PIPELINE]
    if not spans:
        return 0.0
    busy = np.zeros_like(timeline.end_s)
    for span in spans:
        if span.event.takes is None:
            busy += span.end_s - span.start_s
    whole_s = float(spans[-1].end_s.max() - spans[0].start_s.min())
    return 1.0 - float(busy.mean()) / whole_s if whole_s else 0.0


def closed_form(schedule: Schedule, parts: int, stages_per_part: int, micro_batches: int) -> float:
    """The same share where stages are equal and nothing takes time between them.

    For `interleaved` and `zero-bubble` there are as many micro-batches as parts, or more; for
    `zero-bubble` forward and both halves of backward take equally long.
    """
    pieces = 3 if schedule == "zero-bubble" else 1
    waiting = parts - 1
    return waiting / (pieces * stages_per_part * micro_batches + waiting)
