"""Experts of a whole model: kept out of DDP and FSDP, and counted once in the gradient norm."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moesaic.api.ddp import exclude_from_ddp
from moesaic.api.moe import MoE
from moesaic.base.errors import ConfigError


def _split_layers(model: nn.Module) -> list[MoE]:
    """Return the MoE layers of `model` whose experts are split over ranks."""
    return [one for one in model.modules() if isinstance(one, MoE) and one.group is not None]


def expert_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Return the expert parameters that a group splits, for `fully_shard(ignored_params=...)`.

    Their gradients are averaged over all ranks by the layers themselves.
    """
    return {one for layer in _split_layers(model) for one in layer.experts.parameters()}


def exclude_experts(model: nn.Module) -> None:
    """Make DDP leave the experts alone that a group splits; call it before you wrap `model`."""
    experts = expert_parameters(model)
    names = [name for name, parameter in model.named_parameters() if parameter in experts]
    exclude_from_ddp(model, names)


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float) -> Tensor:
    """Scale all gradients so that their norm is at most `max_norm`; return the norm before.

    It replaces `torch.nn.utils.clip_grad_norm_` where a group splits experts: each expert counts
    once. Every rank must call it.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError("clip_grad_norm_ takes the model, not its parameters: give the module")
    layers = _split_layers(model)
    experts = expert_parameters(model)
    dense = [p.grad for p in model.parameters() if p.grad is not None and p not in experts]
    total = torch.nn.utils.get_total_norm(dense)
    if isinstance(total, DTensor):
        total = total.full_tensor()
    total = total.double().square()
    for layer in layers:
        grads = [one.grad for one in layer.experts.parameters() if one.grad is not None]
        squared = torch.nn.utils.get_total_norm(grads).to(total).square()
        assert layer.group is not None
        dist.all_reduce(squared, group=layer.group.ep_group)
        total = total + squared
    norm = total.sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(factor.to(parameter.grad.dtype))
    return norm
