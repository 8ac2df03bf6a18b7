"""Steps on ranks that wait for no other rank of their stage: lower bounds of simulated steps.

Times are those of one rank of each stage, block by block. Collectives of FSDP and reductions of
gradients run beside computing, one after another; all else takes its time in sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moesaic.facts.job.train import PipelineSchedule
from moesaic.facts.plan import Action
from moesaic.policy.cost.event import Seconds
from moesaic.policy.cost.pipeline import EAGER_SCHEDULES, prerequisite


class BlockTimes(NamedTuple):
    """Seconds of a model's block without a pipeline."""

    forward_s: float
    backward_s: float
    gather_s: float = 0.0
    """All-gather of its parameters; 0 without FSDP."""
    unshard_s: float = 0.0
    scatter_s: float = 0.0
    """Reduce-scatter of its gradients."""
    reshard_s: float = 0.0
    replicas_s: float = 0.0
    """All-reduce over replicas, once per step."""


Reductions = Mapping[int, Sequence[tuple[str, float]]]
"""Channel and seconds of reductions that start during the backward of a block, by its position."""


def forward_seconds(blocks: Sequence[BlockTimes], *, is_async: bool) -> float:
    """Return the seconds of forward; the head is gathered with the embedding.

    The all-gather of a block starts when the parameters of the block two before it are in place.
    """
    now = busy = 0.0
    ready: list[float] = []
    for number, one in enumerate(blocks[:-1]):
        launched = now if not is_async else ready[number - 2] if number > 1 else 0.0
        busy = max(busy, launched) + one.gather_s
        now = max(now, busy) + one.unshard_s
        ready.append(now)
        now += one.forward_s
    return now + blocks[-1].forward_s


def backward_seconds(
    blocks: Sequence[BlockTimes],
    *,
    is_async: bool,
    reductions: Reductions | None = None,
    then_s: float = 0.0,
) -> float:
    """Return the seconds of backward; with `reductions` those of the last one, with `then_s` of
    computing before the step waits for them.

    The all-gather of a layer starts when the parameters of the layer after it are in place.
    """
    now, busy, scattered, channels = blocks[-1].backward_s, 0.0, 0.0, {"": 0.0}
    if reductions:
        _launch(reductions.get(len(blocks) - 1, ()), 0.0, channels)
    gathered = busy = (0.0 if is_async else now) + blocks[-2].gather_s
    for at in reversed(range(len(blocks) - 1)):
        one = blocks[at]
        if at:
            now = max(now, gathered if is_async else busy) + one.unshard_s
            if at > 1 and is_async:
                gathered = busy = max(busy, now) + blocks[at - 1].gather_s
        if reductions is not None:
            _launch(reductions.get(at, ()), now, channels)
        now = max(now + one.backward_s, scattered) + one.reshard_s
        busy = scattered = max(busy, now) + one.scatter_s
        if reductions is not None:
            busy += one.replicas_s
        if not is_async:
            now = busy = max(now, busy) + (blocks[at - 1].gather_s if at > 1 else 0.0)
    return max(max(now, busy) + then_s, *channels.values())


def _launch(some: Sequence[tuple[str, float]], now: float, channels: dict[str, float]) -> None:
    for channel, seconds in some:
        channels[channel] = max(channels.get(channel, 0.0), now) + seconds


class StageTimes(NamedTuple):
    """Seconds of a stage of a pipeline."""

    passes: Mapping[str, float]
    """Seconds of a micro-batch by kind of action."""
    before_s: float
    """Seconds before its first forward."""
    after_s: float
    """Seconds after its last backward."""


def pipeline_seconds(
    actions: Sequence[Action],
    schedule: PipelineSchedule,
    stages: Sequence[StageTimes],
    sends: Mapping[tuple[int, int], float],
    pp: int,
) -> list[float]:
    """Return the end of each pipeline rank.

    Args:
        actions: actions of all pipeline ranks, in an order that respects all dependencies.
        schedule: the schedule.
        stages: the stages.
        sends: seconds of a transfer by the pipeline ranks at its ends.
        pp: pipeline ranks.
    """
    now, done, last = [0.0] * pp, dict[Action, float](), len(stages) - 1
    finals = max(one.micro_batch for one in actions)
    is_eager = schedule in EAGER_SCHEDULES
    for action in actions:
        stage, rank = action.stage, action.stage % pp
        begin, times = now[rank], stages[stage]
        is_first = action.kind == "forward" and not action.micro_batch
        if is_first and is_eager:
            begin += times.before_s
        before = prerequisite(action, last)
        if before is not None:
            sent, seconds = done[before], sends[before.stage % pp, rank]
            begin = max(begin, sent + seconds) if is_eager else max(begin, sent) + seconds
        if is_first and not is_eager:
            begin += times.before_s
        now[rank] = done[action] = begin + times.passes[action.kind]
        if action.kind in ("backward", "weight") and action.micro_batch == finals:
            now[rank] += times.after_s
    return now


def least_pipeline_seconds(
    own_s: Seconds,
    front_s: Seconds,
    transfer_s: float,
    micro_batches: int,
    *,
    receives: bool,
    fits: NDArray[np.bool_] | None = None,
) -> float:
    """Return the seconds that no contiguous stages beat, with one stage on each pipeline rank.

    Before a rank's first forward and after its last backward, the stages before it work.

    Args:
        own_s: seconds of a micro-batch by pipeline rank and block, [pp, blocks].
        front_s: seconds of these that the ranks after it wait for, at least, [pp, blocks].
        transfer_s: seconds of a round trip of a micro-batch between two stages; 0: unknown.
        micro_batches: micro-batches of a step.
        receives: whether a rank does nothing else while it receives.
        fits: ranges of blocks that may be a rank's stage, [pp, blocks + 1, blocks + 1]; None: all.
    """
    pp, num_blocks = own_s.shape
    sums = np.concatenate([np.zeros((pp, 1)), own_s.cumsum(axis=1)], axis=1)
    before_s = np.concatenate([[0.0], front_s.min(axis=0).cumsum()])
    is_stage = np.tri(num_blocks + 1, k=-1, dtype=bool).T  # A stage has at least one block.
    best = np.full(num_blocks + 1, np.inf)
    best[0] = 0.0
    for rank in range(pp):
        waits_s = rank * transfer_s
        if receives:
            waits_s += micro_batches * transfer_s / (1 if 0 < rank < pp - 1 else 2)
            waits_s -= transfer_s / 2 if rank else 0.0  # The rank's own first receive.
        each_s = micro_batches * (sums[rank][None, :] - sums[rank][:, None])
        each_s += before_s[:, None] + waits_s
        may_be = is_stage if fits is None else is_stage & fits[rank]
        best = np.where(may_be, np.maximum(best[:, None], each_s), np.inf).min(axis=0)
    return float(best[num_blocks])
