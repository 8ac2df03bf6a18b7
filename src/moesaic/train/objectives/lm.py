"""Next-token prediction with attention inside documents, and the routers' auxiliary losses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.facts.job import Job
from moesaic.models.lm import LanguageModel
from moesaic.nn.context import Context
from moesaic.nn.loss import IGNORED
from moesaic.train.data import Batch


@dataclass(frozen=True)
class Losses:
    """One micro-batch's losses on this rank; every rank's add up to the global ones."""

    loss: Tensor
    """Cross-entropy, already divided by the number of targets of the whole batch."""
    balance: Tensor
    z: Tensor
    """Means over expert layers and micro-batches."""
    context: Context


def make_context(model: LanguageModel, batch: Batch, job: Job, step: int) -> Context:
    """The context of one micro-batch, without targets."""
    device = next(model.parameters()).device
    context = Context(model.rotary(batch.positions.to(device)))
    context.mask = visible(batch.documents.to(device), model.config.window)
    context.seed, context.step = job.seed, step
    context.samples = batch.samples.to(device)
    context.positions = torch.arange(batch.inputs.shape[1], device=device)
    context.run = model.slices.run(batch.inputs.numel())
    return context


def visible(documents: Tensor, window: int | None) -> Tensor | None:
    """Causal attention that ends at document boundaries and looks back on `window` tokens.

    None where there are no boundaries and no sequence is longer than the window.
    """
    length = documents.shape[1]
    mask = None
    if not bool((documents == documents[:, :1]).all()):
        mask = (documents[:, None, :, None] == documents[:, None, None, :]).tril()
    if window is not None and window < length:
        every = documents.new_ones(1, 1, length, length, dtype=torch.bool)
        mask = (every.tril() if mask is None else mask).triu(1 - window)
    return mask


def num_targets(batch: Batch) -> int:
    """Tokens of a batch that count towards the loss."""
    return int((batch.targets != IGNORED).sum())


def compute(
    model: LanguageModel,
    batch: Batch,
    context: Context,
    job: Job,
    targets_total: int,
    scale: float = 1.0,
) -> tuple[Tensor, Losses]:
    """What backward starts from for one of the job's micro-batches, and its losses.

    The first is all of them, weighed, times `scale`.

    Args:
        model: the model.
        batch: this rank's rows of the micro-batch.
        context: from `make_context`, with whatever the run adds.
        job: the job.
        targets_total: targets of the whole global batch.
        scale: a power of two on what backward starts from. The head forms its gradient in forward,
            in narrow types too, so it has to have it there.
    """
    device = next(model.parameters()).device
    aim(context, batch, targets_total, device, scale)
    loss = model(batch.inputs.to(device), context)
    balance, z = auxiliary(context, job.model.expert_layers, loss.new_zeros(()), job)
    routing = job.routing
    total = loss + scale * routing.balance_loss * balance + scale * routing.z_loss * z
    return total, Losses(loss.detach() / scale, balance.detach(), z.detach(), context)


def aim(
    context: Context, batch: Batch, targets_total: int, device: torch.device, scale: float
) -> None:
    """Have the head return `scale` times the loss of `batch`, of a global batch with
    `targets_total` targets."""
    context.targets = batch.targets.to(device)
    context.loss_scale = scale / max(targets_total, 1)


def auxiliary(
    context: Context, layers: Sequence[int], zero: Tensor, job: Job
) -> tuple[Tensor, Tensor]:
    """What `layers` add to the balance loss and the z-loss of the job; `zero` if there are none."""
    parts = job.train.micro_batches * max(len(job.model.expert_layers), 1)
    balance = sum((context.layers[layer].balance for layer in layers), start=zero) / parts
    return balance, sum((context.layers[layer].z for layer in layers), start=zero) / parts
