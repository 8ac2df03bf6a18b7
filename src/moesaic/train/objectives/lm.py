"""Language-modelling objective: next-token prediction with attention inside documents, plus the
routers' auxiliary losses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.facts.job import Job
from moesaic.models.lm import LanguageModel
from moesaic.nn.attention_backends import AttentionMetadata
from moesaic.nn.context import Context
from moesaic.nn.loss import IGNORE_INDEX
from moesaic.train.data import Batch


@dataclass(frozen=True)
class Losses:
    """Losses of one micro-batch on this rank; their sums over ranks are the global losses."""

    loss: Tensor
    """Cross-entropy, divided by the number of targets of the whole batch."""
    balance_loss: Tensor
    z_loss: Tensor
    """Mean over expert layers and micro-batches, as is `balance_loss`."""
    context: Context


def make_context(model: LanguageModel, batch: Batch, job: Job, step: int) -> Context:
    """Return the context of one micro-batch, without targets."""
    device = next(model.parameters()).device
    context = Context(model.rotary(batch.positions.to(device)))
    context.attention = AttentionMetadata.packed(batch.documents, model.config.window, device)
    context.seed, context.step = job.seed, step
    context.samples = batch.samples.to(device)
    context.positions = torch.arange(batch.inputs.shape[1], device=device)
    context.token_slice = model.tp.shard_slice(batch.inputs.numel())
    return context


def num_targets(batch: Batch) -> int:
    """Return the number of tokens that count towards the loss."""
    return int((batch.targets != IGNORE_INDEX).sum())


def compute_loss(
    model: LanguageModel,
    batch: Batch,
    context: Context,
    job: Job,
    targets_total: int,
    scale: float = 1.0,
) -> tuple[Tensor, Losses]:
    """Return the loss to backpropagate for one of the job's micro-batches, and its losses.

    The first is the weighted sum of all losses, times `scale`.

    Args:
        model: the model.
        batch: this rank's samples of the micro-batch.
        context: from `make_context`, plus additions of the run.
        job: the job.
        targets_total: targets of the whole global batch.
        scale: loss scale, a power of two. The head computes its gradient in forward, in fp16 too,
            so the scale has to apply there already.
    """
    device = next(model.parameters()).device
    set_targets(context, batch, targets_total, device, scale)
    loss = model(batch.inputs.to(device), context)
    balance, z = auxiliary_losses(context, job.model.expert_layers, loss.new_zeros(()), job)
    routing = job.routing
    total = loss + scale * routing.balance_loss * balance + scale * routing.z_loss * z
    return total, Losses(loss.detach() / scale, balance.detach(), z.detach(), context)


def set_targets(
    context: Context, batch: Batch, targets_total: int, device: torch.device, scale: float
) -> None:
    """Make the head return `scale` times the loss of `batch`, divided by the global batch's
    `targets_total`."""
    context.targets = batch.targets.to(device)
    context.loss_scale = scale / max(targets_total, 1)


def auxiliary_losses(
    context: Context, layers: Sequence[int], zero: Tensor, job: Job
) -> tuple[Tensor, Tensor]:
    """Return the contribution of `layers` to the balance loss and the z-loss; `zero` without
    layers."""
    parts = job.train.micro_batches * max(len(job.model.expert_layers), 1)
    balance = sum((context.layer_facts[layer].balance_loss for layer in layers), start=zero) / parts
    return balance, sum((context.layer_facts[layer].z_loss for layer in layers), start=zero) / parts
