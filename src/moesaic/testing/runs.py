"""Runs of tiny jobs for tests, and gradients that overflow in them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from moesaic.dist.world import World
from moesaic.facts.job import Job
from moesaic.facts.plan import plan_from_layout
from moesaic.models.init import InitialSource
from moesaic.train.assemble import LMRun, assemble


def start_run(
    job: Job, world: World | None = None, counters: dict[str, int] | None = None
) -> LMRun:
    """Return a run from initial values in the job's layout; `world` is one rank by default."""
    world = world or World.solo()
    plan = plan_from_layout(job.layout, job.model, world.size)
    return assemble(job, plan, world, InitialSource(job.seed, job.model.init_std), counters)


def overflow_gradients(layer: nn.Module) -> RemovableHandle:
    """Make a gradient infinite in each backward through a decoder layer, until the handle is
    removed."""
    return layer.register_forward_hook(
        lambda layer, args, out: (_InfiniteGradient.apply(out[0]), out[1])
    )


class _InfiniteGradient(torch.autograd.Function):
    """Identity whose backward makes one gradient infinite."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return a copy of `x`."""
        del ctx
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """Return the gradient with one infinite element."""
        del ctx
        grad = grads[0].clone()
        grad.view(-1)[0] = torch.inf
        return grad
