"""Runs of tiny jobs for tests, and gradients that overflow in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from moesaic.dist.world import World
from moesaic.facts.job import Job
from moesaic.facts.plan import Plan, plan_from_layout
from moesaic.models.init import InitialSource
from moesaic.testing.jobs import tiny_job
from moesaic.testing.progress import RecordingProgress
from moesaic.train.assemble import LMRun, assemble
from moesaic.train.job_file import LoadedJob
from moesaic.train.lm import LanguageModelKind
from moesaic.train.trainer import Resume, train


def start_run(
    job: Job, world: World | None = None, counters: dict[str, int] | None = None
) -> LMRun:
    """Return a run from initial values in the job's layout; `world` is one rank by default."""
    world = world or World.solo()
    plan = plan_from_layout(job.layout, job.model, world.size)
    return assemble(job, plan, world, InitialSource(job.seed, job.model.init_std), counters)


def train_text(
    world: World,
    text: Path,
    out: Path,
    resume: str | None = None,
    plan: Plan | None = None,
    **tables: Any,
) -> RecordingProgress:
    """Train the job of `text_job`; return its progress."""
    progress = RecordingProgress()
    loaded = LoadedJob(text_job(text, **tables), "", [], plan)
    start = None if resume is None else Resume(resume)
    train(loaded, out, start, world, progress, LanguageModelKind())
    return progress


def text_job(text: Path, **tables: Any) -> Job:
    """Return the tiny job over `text`, with the given keys of its tables changed, or lists of
    tables set."""
    keys: dict[str, Any] = {
        "model": {"vocab": 260},
        "data": {"path": str(text), "sequence": 16, "cache": str(text.parent / "cache")},
        "train": {"steps": 4, "batch": 8, "micro_batches": 2},
        "checkpoint": {"every": 2}, "log": {"tensorboard": False},
    }  # fmt: skip
    for table, changes in tables.items():
        keys[table] = {**keys.get(table, {}), **changes} if isinstance(changes, dict) else changes
    return tiny_job(**keys)


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
