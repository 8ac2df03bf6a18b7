"""Objective of a recommender: cross-entropy of clicks, on the sums of rows of an embedding table.

Rows are updated after the network, once per step, by the gradients of all its micro-batches.
Logits of samples that are not trained on yet are collected for metrics by day.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from moesaic.dist.collectives import all_reduce_
from moesaic.dist.state import TensorShard
from moesaic.dist.world import World
from moesaic.facts.job import CtrJob
from moesaic.models.recommender import Recommender
from moesaic.nn.embedding import TableBag
from moesaic.ps.passes import PassStats, TablePasses
from moesaic.ps.sharded import ShardedTable
from moesaic.train.click_metrics import ClickScores
from moesaic.train.ctr_stats import CtrStepStats, DayStats
from moesaic.train.data.clicks import ClickBatch, ClickSamples
from moesaic.train.objectives.objective import StepContext, StepResult
from moesaic.train.parts import Part
from moesaic.train.phases import PhaseTimer
from moesaic.train.table_passes import PassDecision


@dataclass(frozen=True)
class LocalClicks:
    """Samples of a global micro-batch on this rank."""

    samples: ClickBatch
    """Samples of this rank."""
    indices: range
    """Global indices of the whole micro-batch."""


@dataclass(frozen=True)
class ClickLosses:
    """Losses of one micro-batch on this rank."""

    loss: Tensor
    """Sum of the weighted losses, divided by the units of the step; in evaluation by nothing."""
    logits: Tensor
    """Logits, [samples]."""
    samples: ClickBatch
    """The samples."""


class ClickObjective:
    """Prediction of clicks by one part and one table of rows."""

    unit = "samples"

    def __init__(
        self,
        job: CtrJob,
        world: World,
        part: Part[Recommender],
        rows: ShardedTable,
        samples: ClickSamples,
    ) -> None:
        """Train `part` and `rows` on `samples`.

        Args:
            job: the job.
            world: the ranks.
            part: the network.
            rows: rows of all keys.
            samples: samples to train on, whose days end while training moves on.
        """
        self.job, self.world, self.part, self.rows = job, world, part, rows
        self._bag = TableBag(rows, include_last_offset=True)
        self._day_of = samples.day_of
        self.passes: TablePasses | None = None
        """Passes that read rows from a drive ahead of their step; None: all are in memory."""
        self.pass_decisions: list[PassDecision] = []
        """Decisions on passes since the last step."""
        self._begun_step = -1
        """Finished steps when the present step began."""
        self._shown_pass: PassStats | None = None
        """Last pass that the statistics of a step have shown."""
        self._scores: dict[int, ClickScores] = {}
        """Scores of samples before training on them, by day."""

    def load(self, samples: ClickSamples, indices: range, *, shuffled: bool) -> LocalClicks:
        """Return this rank's samples of a global micro-batch."""
        local = samples.load(self.part.local_samples(indices), shuffled=shuffled)
        return LocalClicks(local, indices)

    def num_units(self, batch: LocalClicks) -> int:
        """Return the samples of a batch."""
        return len(batch.samples)

    def compute_loss(self, batch: LocalClicks, context: StepContext) -> tuple[Tensor, ClickLosses]:
        """Return the loss to backpropagate, and what to report."""
        if self.passes is not None and context.step != self._begun_step:
            self.passes.begin_step()
        self._begun_step = context.step
        logits = self._predict(batch.samples)
        loss = self._cross_entropy(logits, batch.samples) / max(context.units, 1)
        losses = ClickLosses(loss.detach(), logits.detach(), batch.samples)
        return loss * context.scale, losses

    def evaluate(self, batch: LocalClicks) -> ClickLosses:
        """Return the losses of a validation batch, summed over samples."""
        logits = self._predict(batch.samples)
        return ClickLosses(self._cross_entropy(logits, batch.samples), logits, batch.samples)

    def _predict(self, samples: ClickBatch) -> Tensor:
        """Return the logits of samples; look up their rows for training if gradients follow."""
        network, size = self.part.model, len(samples)
        clicks = torch.from_numpy(samples.labels).repeat(network.num_slots)
        keys, offsets = torch.from_numpy(samples.keys), torch.from_numpy(samples.offsets)
        sums = self._bag(keys, offsets, clicks=clicks)
        pooled = sums.view(network.num_slots, size, self.rows.dim).transpose(0, 1)
        logits: Tensor = network(self._to_device(pooled), self._to_device(samples.dense))
        return logits

    def _cross_entropy(self, logits: Tensor, samples: ClickBatch) -> Tensor:
        """Return the sum of the weighted losses."""
        labels, weights = self._to_device(samples.labels), self._to_device(samples.weights)
        return F.binary_cross_entropy_with_logits(logits, labels, weights, reduction="sum")

    def _to_device(self, values: Tensor | np.ndarray) -> Tensor:
        """Return numbers on this rank's device, in the network's dtype."""
        tensor = values if isinstance(values, Tensor) else torch.from_numpy(values)
        return tensor.to(self.world.device, next(self.part.model.parameters()).dtype)

    def validation_loss(self, batch: LocalClicks, losses: ClickLosses) -> tuple[Tensor, int]:
        """Return the loss of a validation batch and its samples."""
        return losses.loss, len(batch.samples)

    def validation_figures(self, losses: Sequence[ClickLosses]) -> dict[str, float]:
        """Return metrics of all samples of a validation pass."""
        return self._metrics_of(losses)

    def total_loss(self, losses: Sequence[ClickLosses]) -> float:
        """Return the loss of a step over all ranks."""
        (loss,) = self._sum_over_ranks(_sum_losses(losses))
        return loss

    def _sum_over_ranks(self, *numbers: float | Tensor) -> list[float]:
        """Return the sums of numbers over all ranks."""
        local = [
            torch.as_tensor(one, dtype=torch.float64, device=self.world.device) for one in numbers
        ]
        sums: list[float] = all_reduce_(torch.stack(local), self.world.group).tolist()
        return sums

    def after_update(self, losses: Sequence[ClickLosses]) -> None:
        """Update rows by the gradients of all micro-batches."""
        del losses
        self.rows.step()

    def finish_step(self, result: StepResult, phases: PhaseTimer) -> CtrStepStats:
        """Return the statistics of a step, after the end of the days that it finishes."""
        with phases("log"):
            figures = {}
            if self.job.log.is_sampled(result.step):
                figures = self._metrics_of(result.losses)
            loss, num_rows = self._sum_over_ranks(
                _sum_losses(result.losses), self.rows.table.num_rows
            )
            self._collect_scores(result.losses)
        with phases("days"):
            days = self._end_days(result.batches)
        return CtrStepStats(
            step=result.step, loss=loss, grad_norm=result.grad_norm, lr=result.lr,
            samples=result.units, rows=int(num_rows), bytes_sent=self.rows.take_bytes_sent(),
            metrics=figures, phases=phases.seconds, days=days, new_pass=self._take_new_pass(),
            decisions=self._take_decisions(),
        )  # fmt: skip

    def _take_decisions(self) -> list[PassDecision]:
        taken = list(self.pass_decisions)
        self.pass_decisions.clear()
        return taken

    def _take_new_pass(self) -> PassStats | None:
        """Return the figures of a pass of this rank's rows that began with this step."""
        newest = None if self.passes is None else self.passes.stats
        if newest is self._shown_pass:
            return None
        self._shown_pass = newest
        return newest

    def _metrics_of(self, losses: Sequence[ClickLosses]) -> dict[str, float]:
        """Return metrics of micro-batches over all ranks."""
        scores = self._new_scores()
        for one in losses:
            _add(scores, one, slice(None))
        return scores.metrics(self.world).figures()

    def _collect_scores(self, losses: Sequence[ClickLosses]) -> None:
        """Keep scores of the step's samples for the metrics of their day."""
        for one in losses:
            for day in np.unique(one.samples.days).tolist():
                chosen = one.samples.days == day
                _add(self._scores.setdefault(day, self._new_scores()), one, chosen)

    def _end_days(self, batches: Sequence[LocalClicks]) -> list[DayStats]:
        """End the days before that of the next sample, on all ranks at the same step."""
        first, after = batches[0].indices.start, batches[-1].indices.stop
        ended = []
        for day in range(self._day_of(first), self._day_of(after)):
            metrics = self._scores.pop(day, self._new_scores()).metrics(self.world)
            evicted = self.rows.end_day()
            ended.append(DayStats(day, metrics, self.rows.num_rows(), evicted))
        return ended

    def _new_scores(self) -> ClickScores:
        return ClickScores(has_users=self.job.data.has_users)

    def state_shards(self) -> list[TensorShard]:
        """Return nothing: snapshots of the table hold the rows."""
        return []

    def flush(self) -> None:
        """Do nothing."""


def _sum_losses(losses: Sequence[ClickLosses]) -> Tensor:
    """Return the sum of the micro-batches' losses on this rank."""
    return torch.stack([one.loss.double() for one in losses]).sum()


def _add(scores: ClickScores, losses: ClickLosses, chosen: slice | np.ndarray) -> None:
    """Add chosen samples of a micro-batch."""
    samples = losses.samples
    scores.add(
        samples.labels[chosen], losses.logits.cpu().numpy()[chosen], samples.weights[chosen],
        None if samples.users is None else samples.users[chosen],
    )  # fmt: skip
