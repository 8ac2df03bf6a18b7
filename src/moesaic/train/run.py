"""Run: parts on their ranks that take training steps towards an objective.

A step consists of named phases: data, forward, backward, reduce, clip, optimizer, log, and those of
the objective, such as migrate. Each micro-batch has its own forward and backward; with a pipeline
they interleave in a phase called pipeline.

A global batch is a list of global sample indices; the objective takes a rank's share of each
micro-batch for each part. Losses are divided by counts over all ranks, so gradients are plain sums.
All ranks of a TP group load the same samples and share their loss; only the first of them counts
these samples. A rank may hold some of the parts, or none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Generic, TypeVar

import torch

from moesaic.dist.collectives import all_reduce_
from moesaic.dist.state import State
from moesaic.dist.world import Group, World
from moesaic.facts.plan import Plan
from moesaic.kernels import device as devices
from moesaic.train import loss_scale
from moesaic.train.kinds import AnyJob, StepStats
from moesaic.train.objectives.objective import Objective, StepContext, StepResult
from moesaic.train.optim import learning_rate
from moesaic.train.parts import Part, PartPlacement
from moesaic.train.phases import PhaseTimer
from moesaic.train.stop_request import StopRequest
from moesaic.train.walk import Walk

ObjectiveT = TypeVar("ObjectiveT", bound=Objective[Any])
StatsT = TypeVar("StatsT", bound=StepStats)


@dataclass
class Run(Generic[ObjectiveT, StatsT]):
    """State of a run."""

    job: AnyJob
    world: World
    placements: Sequence[PartPlacement]
    """Ranks of all parts, the same on every rank, in the order of updates."""
    parts: list[Part[Any]]
    """Parts that this rank holds, in the same order."""
    objective: ObjectiveT
    walk: Walk[ObjectiveT]
    unit_group: Group | None
    """Ranks over which units are counted: all, or in a pipeline those with the same blocks."""
    counters: dict[str, int] = field(default_factory=dict)
    """Position in the run: steps, samples, and units of the objective."""
    phase_hook: Callable[[str], None] | None = None
    """Function to call with the name of each phase as it begins."""
    stop: StopRequest = field(default_factory=StopRequest)
    """Request of this rank to end the run."""
    is_stopping: bool = False
    """True once any rank was asked to end the run; all ranks know it after the same step."""
    files: ExitStack = field(default_factory=ExitStack)
    """Files that are open as long as the run."""

    def __post_init__(self) -> None:
        """Add missing counters, and the loss scale if the precision has one."""
        _check_prefixes([part.prefix for part in self.placements])
        placed = [part.prefix for part in self.placements if self.world.rank in part.ranks]
        held = [part.prefix for part in self.parts]
        if placed != held:
            raise ValueError(f"rank {self.world.rank} holds the parts {held}, not {placed}")
        if not held:
            devices.reset_peak_memory(self.world.device)  # As `make_part` does.
        self.counters = {"step": 0, "samples": 0, self.objective.unit: 0} | self.counters
        loss_scale.init_counters(self.counters, is_scaled=self.job.train.precision == "fp16")

    @property
    def part(self) -> Part[Any]:
        """The only part, on a rank that holds it."""
        if len(self.placements) != 1:
            names = ", ".join(f'"{part.prefix}"' for part in self.placements)
            raise ValueError(f"the run has {len(self.placements)} parts, not one: {names}")
        if not self.parts:
            ranks = list(self.placements[0].ranks)
            raise ValueError(f"rank {self.world.rank} does not hold the part, ranks {ranks} do")
        return self.parts[0]

    @property
    def plan(self) -> Plan:
        """Plan of the first part; on ranks without this part, as at the start."""
        first = self.placements[0]
        held = (part.plan for part in self.parts if part.placement is first)
        return next(held, first.plan)

    def state(self) -> State:
        """Return everything that training resumes from, as live shards."""
        shards = [shard for part in self.parts for shard in part.shards()]
        snapshots = {
            part.prefix: part.external_snapshot
            for part in self.parts
            if part.external_snapshot is not None
        }
        tiers = next((part.tiers for part in self.parts if part.tiers is not None), None)
        return State(
            [*shards, *self.objective.state_shards()], dict(self.counters), snapshots,
            None if tiers is None else tiers.expect_reads,
        )  # fmt: skip

    def step(self, samples: Any) -> StatsT:
        """Take one optimizer step on the next global batch of `samples`."""
        phases = PhaseTimer(self.world.device, self.phase_hook)
        with phases("data"):
            batches, context = self._load_global_batch(samples)
        rates = {part.prefix: self._learning_rate(part) for part in self.placements}
        number = loss_scale.num_updates(self.counters) + 1
        for part in self.parts:
            part.begin_step(self._update_number(part, number), rates[part.prefix])
        losses = self._forward_backward(batches, context, phases)
        with phases("reduce"):
            self._reduce_gradients()
        with phases("clip"):
            # All ranks get the same norms, whichever overflowed.
            norms = {prefix: norm / context.scale for prefix, norm in self._grad_norms().items()}
            is_finite = all(map(math.isfinite, norms.values()))
        with phases("optimizer"):
            if is_finite:
                self._update(number, norms, context.scale, rates)
                self.objective.after_update(losses)
            else:
                self._skip_update(norms, losses)
        self.counters["step"] += 1
        self.counters["samples"] += self.job.train.batch
        if self.objective.unit != "samples":
            self.counters[self.objective.unit] += context.units
        is_scaled = loss_scale.EXPONENT in self.counters
        result = StepResult(
            self.counters["step"], batches, losses, context.units, norms, rates,
            loss_scale=context.scale if is_scaled else None, is_skipped=not is_finite,
        )  # fmt: skip
        stats: StatsT = self.objective.finish_step(result, phases)
        return stats

    def compute_gradients(self, samples: Any) -> list[Any]:
        """Compute the gradients of the next global batch, reduce them and leave them in place
        without an update; return the losses of each micro-batch.

        In fp16 they are multiplied by the loss scale.
        """
        batches, context = self._load_global_batch(samples)
        losses = self._forward_backward(batches, context, PhaseTimer(self.world.device))
        self._reduce_gradients()
        return losses

    def _load_global_batch(self, samples: Any) -> tuple[list[Any], StepContext]:
        """Return this rank's samples of every micro-batch of the next global batch, and the
        context of the step."""
        train = self.job.train
        size = train.batch // train.micro_batches
        start = self.counters["samples"]
        batches = [
            self.objective.load(samples, range(first, first + size), shuffled=True)
            for first in range(start, start + train.batch, size)
        ]
        num_local = sum(self.objective.num_units(batch) for batch in batches)
        total = torch.tensor([num_local], device=self.world.device)
        units = int(all_reduce_(total, self.unit_group))
        scale = loss_scale.current_scale(self.counters)
        return batches, StepContext(self.counters["step"], units, scale, batches)

    def _forward_backward(
        self, batches: Sequence[Any], context: StepContext, phases: PhaseTimer
    ) -> list[Any]:
        for part in self.parts:
            part.model.train()
        return self.walk.forward_backward(self.objective, self.parts, batches, context, phases)

    def _reduce_gradients(self) -> None:
        for part in self.parts:
            part.reduce_gradients()

    def _grad_norms(self) -> dict[str, float]:
        """Return the norm of the whole gradient of each part, on all ranks, by its prefix.

        The same sum tells every rank whether one was asked to end the run.
        """
        held = {part.prefix: part for part in self.parts}
        none = torch.zeros(1, dtype=torch.float64, device=self.world.device)
        squares = torch.cat(
            [
                held[prefix].squared_grad_norm() if prefix in held else none
                for prefix in (part.prefix for part in self.placements)
            ]
        )
        stop = none.new_full((1,), float(self.stop.is_made))
        *sums, num_stops = all_reduce_(torch.cat((squares, stop)), self.world.group).tolist()
        self.is_stopping |= num_stops > 0
        return {
            part.prefix: math.sqrt(one) for part, one in zip(self.placements, sums, strict=True)
        }

    def _update(
        self, number: int, norms: Mapping[str, float], scale: float, rates: Mapping[str, float]
    ) -> None:
        """Take update `number`, from 1, by gradients that are `scale` times too large.

        Each part is clipped by its own norm, so a part changes nothing for the others.
        """
        limit = self.job.train.clip
        for part in self.parts:
            clip = min(1.0, limit / (norms[part.prefix] + 1e-6)) if limit else 1.0
            part.update(
                self._update_number(part, number), lr=rates[part.prefix], clip=clip / scale,
                counters=self.counters,
            )  # fmt: skip
        loss_scale.record_update(self.counters)

    def _update_number(self, part: Part[Any], number: int) -> int:
        """Return update `number` of the run, counted from the part's first one."""
        return number - self.counters.get(part.placement.start_counter, 0)

    def _skip_update(self, norms: Mapping[str, float], losses: Sequence[Any]) -> None:
        """Skip the update after an overflow and back off the loss scale."""
        first = next(part for part in self.placements if not math.isfinite(norms[part.prefix]))
        whose = f" of {first.label}" if len(self.placements) > 1 else ""
        is_updated = any(part.tiers is not None and part.tiers.updates_early for part in self.parts)
        loss = self.objective.total_loss(losses)
        norm = norms[first.prefix]
        loss_scale.back_off(self.counters, norm, loss, whose=whose, is_updated=is_updated)
        for part in self.parts:
            part.drop_gradients()

    def _learning_rate(self, part: PartPlacement) -> float:
        """Return this step's learning rate of a part. Skipped steps count, so that the schedule
        ends with the run."""
        step, steps = self.counters["step"] + 1, self.job.train.steps
        peak = self.job.optimizer.lr if part.lr is None else part.lr
        return learning_rate(step, steps, peak, self.job.schedule)

    @torch.no_grad()
    def validate(self, samples: Any, max_samples: int) -> tuple[float, int, dict[str, float]]:
        """Return the mean loss over the first `max_samples` samples, the number of units, and the
        objective's other figures."""
        for part in self.parts:
            part.model.eval()
        count = min(max_samples, len(samples))
        size = max(self.job.train.batch // self.job.train.micro_batches, 1)
        total = torch.zeros(2, dtype=torch.float64, device=self.world.device)
        results = list[Any]()
        for start in range(0, count, size):
            indices = range(start, min(start + size, count))
            batch = self.objective.load(samples, indices, shuffled=False)
            losses = self.walk.evaluate(self.objective, batch)
            loss, units = self.objective.validation_loss(batch, losses)
            total += torch.stack((loss.double(), total.new_tensor(units)))
            results.append(losses)
        loss_sum, all_units = all_reduce_(total, self.world.group).tolist()
        figures = self.objective.validation_figures(results)
        return loss_sum / max(all_units, 1.0), int(all_units), figures

    def flush(self) -> None:
        """Write what the objective has buffered."""
        self.objective.flush()

    def close(self) -> None:
        """Release the parts and files; the world stays."""
        self.files.close()
        for part in self.parts:
            part.close()
        del self.objective, self.walk


def _check_prefixes(prefixes: Sequence[str]) -> None:
    """Raise ValueError if a tensor's name could start with the prefixes of two parts.

    The empty prefix is allowed beside others: a name belongs to its longest prefix.
    """
    for first, second in pairwise(sorted(prefixes)):
        if second.startswith(first) and (first or not second):
            raise ValueError(
                f'the prefix "{second}" of a part starts with that of another, "{first}": choose '
                "prefixes that do not"
            )
