"""Objective of the credibility head: cross-entropy of labels at the last token of each text, beside
next-token prediction on the texts that are not generated.

Both losses are means over the whole batch: over its labelled texts, and over its targets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.dist.collectives import all_reduce_
from moesaic.facts.job import CredibilityConfig
from moesaic.nn.inputs import ByProduct, Inputs
from moesaic.nn.loss import IGNORE_INDEX
from moesaic.nn.reports import Reports, moe_reports
from moesaic.train.click_metrics import ClickScores
from moesaic.train.data.batch import Batch, LabelledBatch
from moesaic.train.data.labelled import LabelledSamples
from moesaic.train.lm_stats import LMStepStats
from moesaic.train.objectives.lm import LanguageModelObjective, Losses, detach_all
from moesaic.train.objectives.objective import StepContext, StepResult
from moesaic.train.phases import PhaseTimer


@dataclass(frozen=True)
class LabelScores:
    """Scores of the labelled texts of a micro-batch on this rank."""

    loss: Tensor
    """Cross-entropy, summed over texts; in training over the labelled texts of the whole batch."""
    labels: Tensor
    """Label of each text, [texts]."""
    logits: Tensor
    """Log-odds that each text is original, [texts]."""


@dataclass(frozen=True)
class CredibilityLosses(Losses):
    """Losses of one micro-batch on this rank."""

    scores: LabelScores = field(kw_only=True)


@dataclass(frozen=True)
class CredibilityStepStats(LMStepStats):
    """Statistics of one step."""

    credibility_loss: float = field(kw_only=True)
    """Mean cross-entropy of the labels."""

    def figures(self, step_s: float) -> dict[str, float]:
        """Return scalars of the step, which took `step_s` seconds."""
        return {**super().figures(step_s), "credibility_loss": self.credibility_loss}


class CredibilityObjective(LanguageModelObjective):
    """Classification of texts by one part, beside next-token prediction."""

    @property
    def config(self) -> CredibilityConfig:
        """Weights of the losses."""
        assert self.job.credibility is not None, "the job trains a classifier"
        return self.job.credibility

    def load(  # type: ignore[override]
        self, samples: LabelledSamples, indices: range, *, shuffled: bool
    ) -> LabelledBatch:
        """Return this rank's batch of a global micro-batch."""
        batch = samples.batch(self.part.local_samples(indices), shuffled=shuffled)
        return replace(batch, num_labels=samples.count_labels(indices, shuffled=shuffled))

    def training_inputs(self, batch: Batch, context: StepContext) -> Inputs:
        """Return the training inputs of a micro-batch, with targets if the text is learnt."""
        return self._with_labels(super().training_inputs(batch, context))

    def validation_inputs(self, batch: Batch) -> Inputs:
        """Return the inputs of a validation batch, whose losses are sums."""
        return self._with_labels(super().validation_inputs(batch))

    def _with_labels(self, inputs: Inputs) -> Inputs:
        """Return inputs for which the head keeps the logits of labels."""
        keep: frozenset[ByProduct] = inputs.keep | frozenset[ByProduct]({"label_logits"})
        if not self.config.text:
            return replace(inputs, keep=keep, targets=None, project=False)
        return replace(inputs, keep=keep)

    def compute_loss(  # type: ignore[override]
        self, batch: LabelledBatch, context: StepContext
    ) -> tuple[Tensor, Losses]:
        """Return a tensor whose backward gives the gradients of one micro-batch, times the scale,
        and the losses."""
        config, scale = self.config, context.scale
        total, reports = self.part.model(
            batch.inputs.to(self.world.device), self.training_inputs(batch, context)
        )
        num_labels = sum(one.num_labels for one in context.batches)
        scores = _score(batch, reports)
        scores = replace(scores, loss=scores.loss / max(num_labels, 1))
        root, loss = scores.loss * (config.weight * scale), torch.zeros_like(scores.loss)
        if config.text:
            root, loss = root + config.text * total, total.detach() / scale
        root, aux_losses = self.attach_aux_losses(root, reports.values(), scale)
        return root, CredibilityLosses(
            loss, aux_losses, detach_all(moe_reports(reports.values())), scores=_detach(scores)
        )

    def evaluate(self, batch: LabelledBatch) -> Losses:  # type: ignore[override]
        """Return the losses of a validation batch."""
        loss, reports = self.part.model(
            batch.inputs.to(self.world.device), self.validation_inputs(batch)
        )
        scores = _score(batch, reports)
        if not self.config.text:  # The head returned hidden states, which a pass must not keep.
            loss = torch.zeros_like(scores.loss)
        return CredibilityLosses(loss, scores=scores)

    def validation_loss(  # type: ignore[override]
        self, batch: Batch, losses: CredibilityLosses
    ) -> tuple[Tensor, int]:
        """Return the loss of a validation batch and its targets; if the text is not learnt, that of
        the labels and their number."""
        if self.config.text:
            return super().validation_loss(batch, losses)
        return losses.scores.loss, len(losses.scores.labels)

    def validation_figures(  # type: ignore[override]
        self, losses: Sequence[CredibilityLosses]
    ) -> dict[str, float]:
        """Return the loss, AUC and accuracy of the labels of a validation pass."""
        scores, right = ClickScores(has_users=False), torch.zeros(2, dtype=torch.float64)
        for one in (each.scores for each in losses):
            scores.add(one.labels.numpy(), one.logits.float().cpu().numpy())
            is_right = (one.logits > 0).cpu() == (one.labels > 0)
            right += torch.tensor([is_right.sum(), len(is_right)], dtype=torch.float64)
        metrics = scores.metrics(self.world)
        num_right, number = all_reduce_(right.to(self.world.device), self.world.group).tolist()
        found = {"credibility_loss": metrics.log_loss, "auc": metrics.auc}
        figures = {name: value for name, value in found.items() if value is not None}
        return {**figures, "accuracy": num_right / number} if number else figures

    def _reduce_losses(
        self,
        losses: Sequence[CredibilityLosses],  # type: ignore[override]
    ) -> tuple[float, float, float, float, float]:
        """Return the total loss, its terms, and the replay mismatches, each summed over all
        ranks."""
        total, loss, balance, z, mismatches = super()._reduce_losses(losses)
        labels_loss, config = self._sum_label_losses(losses), self.config
        total += (config.text - 1.0) * loss + config.weight * labels_loss
        return total, loss if config.text else labels_loss, balance, z, mismatches

    def finish_step(self, result: StepResult, phases: PhaseTimer) -> CredibilityStepStats:
        """Return the statistics of a step; record its routing and move experts if that is due."""
        stats = super().finish_step(result, phases)
        with phases("log"):
            loss = self._sum_label_losses(result.losses)
        values = {one.name: getattr(stats, one.name) for one in fields(stats)}
        return CredibilityStepStats(**values, credibility_loss=loss)

    def _sum_label_losses(self, losses: Sequence[CredibilityLosses]) -> float:
        """Return the labels' loss of a step over all ranks."""
        local = torch.stack([one.scores.loss.double() for one in losses]).sum()
        return float(all_reduce_(local[None], self.world.group))


def _score(batch: LabelledBatch, reports: Reports) -> LabelScores:
    """Return the classifier's scores of the texts that end in `batch`."""
    logits = reports["head"].label_logits
    assert logits is not None, "the head keeps them"
    labels = batch.labels.flatten()
    ends = (labels != IGNORE_INDEX).nonzero()[:, 0]
    labels, logits = labels[ends], logits.flatten(0, 1)[ends.to(logits.device)]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    loss = F.cross_entropy(logits, labels.to(logits.device), reduction="sum")
    return LabelScores(loss, labels, logits[:, 1] - logits[:, 0])


def _detach(scores: LabelScores) -> LabelScores:
    return replace(scores, loss=scores.loss.detach(), logits=scores.logits.detach())
