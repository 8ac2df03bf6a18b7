"""Order of a pipeline rank's forward and backward passes, for the schedules of PyTorch.

All schedules start with some warm-up forwards, then alternate forward and backward, then finish the
remaining backwards. They differ in the number of warm-up forwards, in stages per rank, and in a
split backward.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from moesaic.facts.job.train import PipelineSchedule

ActionKind = Literal["forward", "backward", "input", "weight"]


class Action(NamedTuple):
    """One pass of one micro-batch through one stage."""

    kind: ActionKind
    """Type of the pass. `backward`: the whole backward. `input`: gradients of the stage's inputs,
    which the previous stage waits for. `weight`: the rest. The inputs of the model's first stage
    have no gradients: its `input` does nothing, and its `weight` is a whole backward."""
    stage: int
    """Index among all stages; those of one pipeline rank are `pp` apart."""
    micro_batch: int
    """Index of the micro-batch."""


def pipeline_actions(
    schedule: PipelineSchedule, pp: int, stages_per_rank: int, micro_batches: int, pp_rank: int
) -> list[Action]:
    """Return the passes of pipeline rank `pp_rank` in a step, in order.

    Args:
        schedule: Name of the schedule; `checks.pipeline_error` checks that it fits.
        pp: Number of pipeline ranks.
        stages_per_rank: 1, except for `interleaved`.
        micro_batches: Micro-batches of a step.
        pp_rank: Pipeline rank, from 0.
    """
    work = micro_batches * stages_per_rank
    round_size = micro_batches // max(1, micro_batches // pp)
    splits_backward = schedule == "zero-bubble"
    passes = [_stage_and_micro_batch(index, round_size, stages_per_rank) for index in range(work)]
    forwards = [Action("forward", pp_rank + pp * local, batch) for local, batch in passes]
    backwards = [(pp_rank + pp * (stages_per_rank - 1 - local), batch) for local, batch in passes]
    num_warmup = min(
        work,
        _num_warmup_forwards(schedule, pp - 1 - pp_rank, (stages_per_rank - 1) * round_size, work),
    )
    actions = forwards[:num_warmup]
    for index, (stage, batch) in enumerate(backwards):
        actions += forwards[num_warmup + index : num_warmup + index + 1]
        actions.append(Action("input" if splits_backward else "backward", stage, batch))
        if (
            splits_backward and index >= pp_rank
        ):  # Later ranks have more idle time at the end to fill.
            actions.append(Action("weight", *backwards[index - pp_rank]))
    if splits_backward:
        actions += [Action("weight", *back) for back in backwards[max(0, work - pp_rank) :]]
    return actions


def _num_warmup_forwards(
    schedule: PipelineSchedule, ranks_after: int, inner_forwards: int, num_forwards: int
) -> int:
    """Return the number of forwards before the first backward.

    `ranks_after` pipeline ranks follow this one. `inner_forwards` are those that the last rank
    needs before a micro-batch reaches its last stage.
    """
    if schedule == "gpipe":
        return num_forwards
    return inner_forwards + ranks_after * (2 if schedule == "interleaved" else 1)


def _stage_and_micro_batch(index: int, round_size: int, stages_per_rank: int) -> tuple[int, int]:
    """Return the local stage and the micro-batch of the `index`-th pass.

    `round_size` micro-batches go through a stage before as many go through the next.
    """
    turn, within = divmod(index, round_size)
    return turn % stages_per_rank, turn // stages_per_rank * round_size + within
