"""Language-modelling objective: next-token prediction with attention inside documents, plus the
routers' auxiliary losses."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moesaic.facts.job import Job
from moesaic.models.lm import LanguageModel
from moesaic.nn.attention_backends import AttentionMetadata
from moesaic.nn.inputs import Inputs
from moesaic.nn.loss import IGNORE_INDEX
from moesaic.nn.reports import MoEReport, moe_reports
from moesaic.train.data import Batch


@dataclass(frozen=True)
class Losses:
    """Losses of one micro-batch on this rank; their sums over ranks are the global losses."""

    loss: Tensor
    """Cross-entropy, divided by the number of targets of the whole batch."""
    balance_loss: Tensor
    z_loss: Tensor
    """Mean over expert layers and micro-batches, as is `balance_loss`."""
    moe_reports: Mapping[int, MoEReport]
    """Reports of this rank's MoE layers, without gradients."""


def make_inputs(model: LanguageModel, batch: Batch, job: Job, step: int) -> Inputs:
    """Return the inputs of evaluation for one micro-batch, without targets."""
    device = next(model.parameters()).device
    return Inputs(
        model.rotary(batch.positions.to(device)),
        attention=AttentionMetadata.packed(batch.documents, model.config.window, device),
        seed=job.seed,
        step=step,
        samples=batch.samples.to(device),
        positions=torch.arange(batch.inputs.shape[1], device=device),
        token_slice=model.tp.shard_slice(batch.inputs.numel()),
    )


def num_targets(batch: Batch) -> int:
    """Return the number of tokens that count towards the loss."""
    return int((batch.targets != IGNORE_INDEX).sum())


def compute_loss(
    model: LanguageModel,
    batch: Batch,
    inputs: Inputs,
    job: Job,
    targets_total: int,
    scale: float = 1.0,
) -> tuple[Tensor, Losses]:
    """Return the loss to backpropagate for one of the job's micro-batches, and its losses.

    The first is the weighted sum of all losses, times `scale`.

    Args:
        model: the model.
        batch: this rank's samples of the micro-batch.
        inputs: from `make_inputs`, plus additions of the run.
        job: the job.
        targets_total: targets of the whole global batch.
        scale: loss scale, a power of two. The head computes its gradient in forward, in fp16 too,
            so the scale has to apply there already.
    """
    device = next(model.parameters()).device
    inputs = add_targets(inputs, batch, targets_total, scale)
    loss, block_reports = model(batch.inputs.to(device), inputs)
    reports = moe_reports(block_reports.values())
    balance, z = auxiliary_losses(reports.values(), loss.new_zeros(()), job)
    routing = job.routing
    total = loss + scale * routing.balance_loss * balance + scale * routing.z_loss * z
    return total, Losses(loss.detach() / scale, balance.detach(), z.detach(), detach_all(reports))


def add_targets(inputs: Inputs, batch: Batch, targets_total: int, scale: float) -> Inputs:
    """Return inputs for which the head returns `scale` times the loss of `batch`, divided by the
    global batch's `targets_total`."""
    targets = batch.targets.to(inputs.rotary.cosine.device)
    return replace(inputs, targets=targets, loss_scale=scale / max(targets_total, 1))


def auxiliary_losses(
    reports: Collection[MoEReport], zero: Tensor, job: Job
) -> tuple[Tensor, Tensor]:
    """Return the contribution of layers to the balance loss and the z-loss; `zero` without
    layers."""
    parts = job.train.micro_batches * max(len(job.model.expert_layers), 1)
    balance = sum((report.balance_loss for report in reports), start=zero) / parts
    return balance, sum((report.z_loss for report in reports), start=zero) / parts


def detach_all(reports: Mapping[int, MoEReport]) -> dict[int, MoEReport]:
    """Return the reports without gradients, which would keep the graph alive."""
    return {layer: report.detach() for layer, report in reports.items()}
