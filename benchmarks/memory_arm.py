"""Training run in a process of its own: `python -m benchmarks.memory_arm SETTINGS-AS-JSON`.

It assembles a model of Mixtral's shape, prints a line, and takes a step for each line that it
reads. `memory_group` starts it in a control group. It imports little, as its interpreter counts.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks.memory_traffic import Shape, touched_experts
from moesaic.base.config import parse
from moesaic.dist.state import PARAMETER, TensorShard
from moesaic.dist.world import World
from moesaic.facts.job import Job
from moesaic.facts.plan import plan_from_layout
from moesaic.models import lm
from moesaic.nn.experts.lease import Lease
from moesaic.policy.plan.budget import Budget, BudgetFacts
from moesaic.testing.jobs import RandomSamples
from moesaic.train import optim, tiers
from moesaic.train.assemble import LMRun, assemble


@dataclass(frozen=True)
class Settings:
    """What a process trains, and where its expert state lies."""

    shape: Shape
    directory: str
    """Scratch directory on the drive."""
    host: str = ""
    """Memory budget; empty: no tiers."""
    mapped: bool = False
    """Without tiers: parameters, moments and gradients of experts are mapped from files."""
    clip: float = 0.0
    recompute: bool = False
    """Compute layers again in backward, and keep only their inputs."""
    third: bool = False
    """Route tokens to a third of the experts of a step."""
    residency: str = "next-use"
    num_blocks: int = 0
    """Blocks in memory; 0: as many as the budget holds."""
    traced: bool = False
    """Print the uses of blocks with the figures of a step."""

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """Return the settings that `to_json` wrote."""
        raw = json.loads(text)
        return cls(**{**raw, "shape": Shape(**raw["shape"])})

    def to_json(self) -> str:
        """Return the settings as JSON."""
        return json.dumps(asdict(self))

    def job(self) -> Job:
        """Return the job."""
        shape = self.shape
        raw: dict[str, object] = {
            "model": {
                "family": "mixtral", "vocab": shape.vocab, "hidden": shape.hidden,
                "layers": shape.layers, "heads": shape.heads, "kv_heads": shape.kv_heads,
                "head_dim": shape.hidden // shape.heads, "ffn": shape.ffn,
                "experts": shape.experts, "top_k": shape.top_k,
            },
            "routing": {"balance_loss": 0.0}, "balance": {"policy": "none"},
            "data": {"path": "unused", "sequence": shape.sequence},
            "train": {
                "steps": 1_000_000, "batch": shape.micro_batches, "clip": self.clip,
                "micro_batches": shape.micro_batches, "micro_batch_order": "by_block",
                "recompute": self.recompute, "device": "cpu",
            },
            "schedule": {"kind": "constant"},
        }  # fmt: skip
        if self.host:
            raw["memory"] = {
                "host": self.host, "ssd": self.directory, "residency": self.residency,
            }  # fmt: skip
        return parse(Job, raw, "benchmark")


class FastSource:
    """Source of normal values; the project's own, which depend on no layout, take minutes."""

    def __init__(self, std: float) -> None:
        self._std, self._draws = std, torch.Generator().manual_seed(0)

    def fill(self, shards: Sequence[TensorShard]) -> None:
        """Write values into `shards` in place."""
        for shard in shards:
            with shard.borrow(writes=True) as tensor:
                if shard.kind != PARAMETER:
                    tensor.zero_()
                elif len(shard.shape) == 1:
                    tensor.fill_(1.0)
                else:
                    tensor.normal_(0.0, self._std, generator=self._draws)


class ThirdOfExperts:
    """Recorded routing in which each step uses a third of the experts."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape

    def read_expert_ids(self, step: int, samples: Tensor) -> dict[int, Tensor]:
        """Return expert ids by layer, [tokens, top_k], for the samples of one micro-batch."""
        shape, result = self._shape, dict[int, Tensor]()
        token = torch.arange(len(samples) * shape.sequence)
        for layer, experts in enumerate(touched_experts(shape, step)):
            choices = torch.tensor(experts)
            ranks = token[:, None] + torch.arange(shape.top_k)
            result[layer] = choices[ranks % len(experts)]
        return result


class MappedMemory:
    """Expert state that is mapped from files, and left to the kernel."""

    def __init__(self, shape: Shape, directory: Path) -> None:
        self._shape, self._directory = shape, directory

    def new(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a tensor for one layer's experts over a new file, which the tensor alone holds."""
        shape = self._shape
        size = shape.experts, shape.expert_parameters
        handle, path = tempfile.mkstemp(dir=self._directory)
        os.posix_fallocate(handle, 0, size[0] * size[1] * dtype.itemsize)
        os.close(handle)
        values = torch.from_file(path, shared=True, size=size[0] * size[1], dtype=dtype)
        os.unlink(path)
        return values.view(size)

    def is_arena(self, tensor: Tensor) -> bool:
        """Return whether a tensor has one layer's experts."""
        return tensor.shape == (self._shape.experts, self._shape.expert_parameters)

    def patches(self) -> Iterator[Any]:
        """Yield patches that allocate the arenas of an untiered run, while they are in force."""
        allocate, zeros, start = lm._allocate_like, optim.zero_moments, Lease.start_backward
        gradients = dict[int, Tensor]()

        def allocate_like(tensor: Tensor, device: torch.device) -> Tensor:
            return self.new() if self.is_arena(tensor) else allocate(tensor, device)

        def zero_moments(values: Tensor) -> tuple[Tensor, Tensor]:
            return (self.new(), self.new()) if self.is_arena(values) else zeros(values)

        def start_backward(lease: Lease) -> None:
            arena, is_first = lease.arena, not lease._num_backward
            start(lease)
            if is_first and isinstance(arena, nn.Parameter) and arena.grad is None:
                # Autograd adds the gradients of later micro-batches to this one.
                mine = gradients.setdefault(id(arena), self.new())
                lease._grads[0] = mine.view(mine.shape)
                lease._grad_gate_up, lease._grad_down = lease._views(lease._grads)

        yield mock.patch.object(lm, "_allocate_like", allocate_like)
        yield mock.patch.object(optim, "zero_moments", zero_moments)
        yield mock.patch.object(Lease, "start_backward", start_backward)


def _divide(settings: Settings, facts: BudgetFacts) -> Budget:
    """Return a budget for the number of blocks that the settings name."""
    return Budget(settings.shape.micro_batches, settings.num_blocks)


def trace(run: LMRun) -> list[tuple[int, int]]:
    """Return a list to which uses of blocks are added: the block, and how often it was dropped
    before."""
    assert run.part.tiers is not None
    cache, uses, dropped = run.part.tiers.cache, list[tuple[int, int]](), Counter[int]()
    access, discard = cache._residency.access, cache.discard

    def on_access(block: int) -> None:
        uses.append((block, dropped[block]))
        access(block)

    def on_discard(block: int) -> None:
        dropped[block] += 1
        discard(block)

    mock.patch.object(cache._residency, "access", on_access).start()
    mock.patch.object(cache, "discard", on_discard).start()
    return uses


def make_run(settings: Settings) -> LMRun:
    """Return the run."""
    job = settings.job()
    if settings.mapped:
        for patch in MappedMemory(settings.shape, Path(settings.directory)).patches():
            patch.start()
    if settings.num_blocks:
        mock.patch.object(tiers, "divide_budget", partial(_divide, settings)).start()
    world = World.solo()
    run = assemble(
        job, plan_from_layout(job.layout, job.model, 1), world,
        FastSource(job.model.init_std),
    )  # fmt: skip
    if settings.third:
        run.objective.routing_replay = ThirdOfExperts(settings.shape)  # type: ignore[assignment]
    return run


def cpu_s() -> float:
    """Return the processor seconds of this process."""
    times = os.times()
    return times.user + times.system


def make_step(run: LMRun, settings: Settings) -> Callable[[], Mapping[str, Any]]:
    """Return a function that takes a step and returns its figures."""
    samples = RandomSamples(settings.shape.vocab, settings.shape.sequence, packed=False)

    uses = trace(run) if settings.traced else []

    def step() -> Mapping[str, Any]:
        uses.clear()
        cpu, began = cpu_s(), time.perf_counter()
        stats = run.step(samples)
        seconds, cpu = time.perf_counter() - began, cpu_s() - cpu
        figures = {key: value for key, value in stats.figures(seconds).items() if "memory" in key}
        phases = {f"phase_{name}": spent for name, spent in stats.phases.items()}
        traced = {"uses": uses} if settings.traced else {}
        return {
            "seconds": seconds, "cpu_s": cpu, "loss": stats.loss, **phases, **figures, **traced
        }  # fmt: skip

    return step


def main() -> int:
    """Assemble, and take steps until the input ends."""
    settings = Settings.from_json(sys.argv[1])
    began = time.perf_counter()
    run = make_run(settings)
    ready: dict[str, float] = {"assemble_s": time.perf_counter() - began}
    if run.part.tiers is not None:
        ready["num_blocks"] = run.part.tiers.cache.num_slots
        ready["group_size"] = run.part.tiers.num_micro_batches
    print(json.dumps(ready), flush=True)
    step = make_step(run, settings)
    for _ in sys.stdin:
        print(json.dumps(step()), flush=True)
    run.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
