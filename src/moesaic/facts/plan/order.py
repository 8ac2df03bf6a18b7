"""What a part of a pipeline computes, and in which order: the schedules of torch.

Under all of them a part first goes some forwards ahead, then takes a forward and a backward in
turn, then what is left of backward. They differ in how far a part goes ahead, in how many stages it
has, and in whether backward is one piece or two.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from moesaic.facts.job.train import Schedule

Kind = Literal["forward", "backward", "input", "weight"]


class Action(NamedTuple):
    """One micro-batch through one stage, one way."""

    kind: Kind
    """`backward`: all of it; `input`: gradients for what the stage took in, without which the stage
    before it cannot go on; `weight`: the rest. The model's first stage takes in nothing that has a
    gradient: its `input` does nothing, and its `weight` is a whole backward."""
    stage: int
    """Which of all stages: those of a part are `parts` apart."""
    batch: int
    """Which micro-batch."""


def order(
    schedule: Schedule, parts: int, stages_per_part: int, micro_batches: int, part: int
) -> list[Action]:
    """What `part` computes in a step, first to last.

    Args:
        schedule: the order's name; what keeps it from a plan is for `layout.pipeline_fault`.
        parts: of the pipeline.
        stages_per_part: one, but for `interleaved`.
        micro_batches: of a step.
        part: which of the parts, from 0.
    """
    work = micro_batches * stages_per_part
    at_a_time = micro_batches // max(1, micro_batches // parts)
    halves = schedule == "zero-bubble"
    passes = [_visit(index, at_a_time, stages_per_part) for index in range(work)]
    forwards = [Action("forward", part + parts * local, batch) for local, batch in passes]
    backs = [(part + parts * (stages_per_part - 1 - local), batch) for local, batch in passes]
    ahead = min(work, _ahead(schedule, parts - 1 - part, (stages_per_part - 1) * at_a_time, work))
    found = forwards[:ahead]
    for index, (stage, batch) in enumerate(backs):
        found += forwards[ahead + index : ahead + index + 1]
        found.append(Action("input" if halves else "backward", stage, batch))
        if halves and index >= part:  # Later parts have the longer wait at the end to fill.
            found.append(Action("weight", *backs[index - part]))
    if halves:
        found += [Action("weight", *back) for back in backs[max(0, work - part) :]]
    return found


def _ahead(schedule: Schedule, after: int, inner: int, work: int) -> int:
    """Forwards before the first backward, with `after` parts behind this one.

    `inner` are those that the last part needs until a micro-batch is through its last stage.
    """
    if schedule == "gpipe":
        return work
    return inner + after * (2 if schedule == "interleaved" else 1)


def _visit(index: int, at_a_time: int, stages_per_part: int) -> tuple[int, int]:
    """The stage of a part, and the micro-batch, that a pass is the `index`-th through.

    `at_a_time` micro-batches go through a stage before as many go through the next.
    """
    turn, within = divmod(index, at_a_time)
    return turn % stages_per_part, turn // stages_per_part * at_a_time + within
