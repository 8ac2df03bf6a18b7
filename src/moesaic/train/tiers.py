"""Memory tiers: expert state on a drive, its part in memory, and the order in which steps need it.

The walk goes block by block (`train.micro_batches`), so the coming accesses of a step are known:
parameters of each layer in forward and backward, then the whole state for the update. Without
clipping, a layer's experts are updated right behind its backward. With it, gradients wait in the
cache, and on the drive if they do not fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from moesaic.base.decisions import Decision, decide
from moesaic.base.errors import ConfigError, StoreError
from moesaic.base.host_memory import free_memory_bytes
from moesaic.base.lock import LockHeld, fail_if_locked, file_lock
from moesaic.dist.collectives import all_gather
from moesaic.dist.state import TensorShard
from moesaic.dist.world import World
from moesaic.facts.expert_blocks import ExpertBlocks
from moesaic.facts.job import Job, MemoryConfig
from moesaic.facts.plan import Plan
from moesaic.kernels import device as devices
from moesaic.nn.experts.bank import MatrixLender
from moesaic.nn.experts.places import StatePlaces
from moesaic.policy.plan.budget import (
    Budget,
    BudgetFacts,
    budget_bytes,
    budget_facts,
    check_budget,
    check_rank_device,
    divide_budget,
    expert_blocks,
)
from moesaic.policy.residency import (
    Residency,
    ResidencyDecision,
    ResidencyFacts,
    make_residency,
)
from moesaic.store.cache import BlockCache, CacheStats
from moesaic.store.expert_order import ExpertOrder
from moesaic.store.file import BlockFile
from moesaic.train.optim import AdamW
from moesaic.train.topology import gather_places


def make_tiers(job: Job, plan: Plan, world: World, dtype: torch.dtype) -> ExpertTiers | None:
    """Return the tiers of this rank, whose state has `dtype`, or None if the job has no `[memory]`
    table. Every rank of the world must call this."""
    if job.memory is None:
        return None
    check_rank_device(world.device.type, f'with train.device = "{world.device.type}"')
    # All ranks must divide alike, and the last one has the most samples.
    facts = budget_facts(job, plan, plan.ranks - 1, _host_bytes(job.memory, world))
    check_budget(job.memory, facts)
    decisions = list[Decision[BudgetFacts, Budget]]()
    budget = decide(divide_budget, facts, decisions)
    devices.limit_compiled_kernels()
    directory = Path(job.memory.ssd).expanduser()
    tiers = ExpertTiers(
        directory / f"experts-rank-{world.rank}.blocks",
        expert_blocks(job, plan, facts, budget),
        facts.width,
        dtype,
        num_places=budget.num_blocks,
        residency=job.memory.residency,
        period=job.memory.period,
    )
    tiers.decisions = decisions
    return tiers


def _host_bytes(config: MemoryConfig, world: World) -> int:
    """Return the smallest budget of any rank; raise if a host has less memory than its ranks may
    use."""
    hosts = [place.host for place in gather_places(world)]
    num_ranks = hosts.count(hosts[world.rank])
    free = free_memory_bytes() // num_ranks
    # All ranks must raise, or none.
    free = int(all_gather(torch.tensor([free]), world.group).min())
    return budget_bytes(config, free)


ResidencyLog = Decision[ResidencyFacts, ResidencyDecision]
"""Blocks that left memory in one step."""


class TierStats(NamedTuple):
    """Traffic between memory and drive in one step of this rank."""

    traffic: CacheStats
    decision: ResidencyLog

    def figures(self) -> dict[str, float]:
        """Return the traffic as figures of the step."""
        traffic = self.traffic
        return {
            "memory_accesses": traffic.accesses, "memory_reads": traffic.reads,
            "memory_hit_rate": 1 - traffic.misses / max(traffic.accesses, 1),
            "memory_stall_s": traffic.stall_s,
            "memory_read_bytes": traffic.read_bytes, "memory_written_bytes": traffic.written_bytes,
            "memory_read_s": traffic.read_s, "memory_write_s": traffic.write_s,
        }  # fmt: skip

    def record(self) -> dict[str, Any]:
        """Return the policy's decision as JSON."""
        return {
            **self.decision.facts._asdict(), **self.decision.outcome._asdict(),
            "planning_s": self.decision.seconds,
        }  # fmt: skip


class ExpertTiers:
    """Expert state of one rank, in memory and on a drive, as the observer of a walk."""

    def __init__(
        self,
        path: Path,
        blocks: ExpertBlocks,
        width: int,
        dtype: torch.dtype,
        *,
        num_places: int,
        residency: str,
        period: int = 0,
    ) -> None:
        """Create an empty scratch file, and the cache over it.

        Args:
            path: scratch file on a drive, of this rank alone.
            blocks: the blocks of expert state.
            width: numbers in a block.
            dtype: dtype of parameters, moments and gradients.
            num_places: blocks in memory.
            residency: name of the policy that chooses the blocks that leave memory.
            period: steps between writes of all changed blocks; 0: none.
        """
        self._blocks, self._period, self._num_steps = blocks, period, 0
        self._residency: Residency = make_residency(residency)
        self._residency_name = residency
        self._update: tuple[AdamW, int, float] | None = None
        self.decisions = list[Decision[BudgetFacts, Budget]]()
        """Division of the budget, if it was decided from a job."""
        with ExitStack() as stack:
            stack.enter_context(_locked(path))
            file = _create_file(path, blocks.num_blocks, width * dtype.itemsize)
            stack.callback(file.close)
            self.is_direct = file.is_direct
            """False if reads and writes go through the page cache."""
            num_places = min(num_places, blocks.num_blocks)
            self.cache = BlockCache(file, num_places, self._residency)
            stack.callback(self.cache.close)
            self._resources = stack.pop_all()
        self.places = {
            layer: StatePlaces(self.cache, first, blocks.experts[layer], width, dtype)
            for layer, first in blocks.first_blocks.items()
        }
        self._order = ExpertOrder(self.cache, blocks, self.places)

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches that pass through a layer together."""
        return self._blocks.num_micro_batches

    def begin_step(self, optimizer: AdamW, number: int, lr: float) -> None:
        """Begin a step, which takes update `number` with learning rate `lr`."""
        optimizer.begin_update(number, lr)
        self._update = optimizer, number, lr
        self._num_steps += 1
        # Drop the traffic of checkpoints and validation.
        self.cache.take_stats()
        self._residency.begin_step()

    def begin_group(self, *, is_last: bool) -> None:
        """Begin the passes of a group of micro-batches, the `is_last` or not of a step."""
        self._order.begin_group(is_last=is_last)

    def begin_validation(self) -> None:
        """Begin the forward passes of a validation batch."""
        self._order.begin_validation()

    def begin_forward(self, block: str) -> None:
        """Read ahead for the forward passes of a block and what follows."""
        devices.release_freed_memory()
        self._order.begin_forward(_layer(block))

    def begin_backward(self, block: str) -> None:
        """Read ahead for the backward passes of a block and what follows."""
        devices.release_freed_memory()
        places, slots = self.places.get(_layer(block)), None
        if places is not None:
            # Earlier groups of micro-batches have touched others.
            slots = sorted({*(+places.leased), *places.touched})
        self._order.begin_backward(_layer(block), slots)

    def end_backward(self, block: str, *, is_last: bool) -> None:
        """Update the experts of a block whose gradients are complete, or compute their norms."""
        places = self.places.get(_layer(block))
        if places is None or not is_last:
            return
        if self._update is None:  # Only gradients are wanted.
            return
        if not self._blocks.updates_early:
            places.keep_norms()
            return
        optimizer, number, lr = self._update
        optimizer.update_places(places, number, lr=lr, clip=1.0, keep_norms=True)

    def begin_update(self) -> None:
        """Read ahead for the update of experts that were not updated behind their backward."""
        if not self._blocks.updates_early:
            self._order.begin_update()

    def expect_reads(self, shards: Iterable[TensorShard]) -> None:
        """Read ahead for borrowing `shards` in this order."""
        lenders = (shard.lender for shard in shards)
        self.cache.expect([one.block for one in lenders if isinstance(one, MatrixLender)])

    def end_step(self) -> TierStats:
        """Write changed blocks if it is due, and return the traffic of the step."""
        if self._period and self._num_steps % self._period == 0:
            self.cache.flush()
        self._update = None
        traffic, log = self.cache.take_stats(), list[ResidencyLog]()
        facts = ResidencyFacts(
            self._residency_name, self.cache.num_slots, traffic.accesses, traffic.misses
        )
        decide(self._residency.end_step, facts, log)
        return TierStats(traffic, log[0])

    @property
    def updates_early(self) -> bool:
        """True if experts are updated before the gradient's norm is known."""
        return self._blocks.updates_early

    def close(self) -> None:
        """Free the memory and the space on the drive."""
        for places in self.places.values():
            places.close()
        self._resources.close()


def _layer(block: str) -> int:
    """Return the layer of a block; -1 for the embedding, and a large number for the head."""
    if block.startswith("layers."):
        return int(block.removeprefix("layers."))
    return -1 if block == "embed" else 1 << 30


def _create_file(path: Path, num_blocks: int, block_bytes: int) -> BlockFile:
    try:
        return BlockFile(path, num_blocks, block_bytes)
    except StoreError as error:
        raise StoreError(f"memory.ssd: {error}") from error


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a scratch file, in a directory that is created if it is missing."""
    directory = path.parent
    with ExitStack() as stack:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            stack.enter_context(file_lock(path.with_suffix(".lock"), fail_if_locked))
        except LockHeld as error:
            raise ConfigError(
                f"memory.ssd = '{directory}' is in use by {error}: give each run a directory of "
                "its own"
            ) from None
        except OSError as error:
            raise ConfigError(
                f"memory.ssd = '{directory}' cannot be written ({error.strerror}): give a "
                "directory on a drive of this machine"
            ) from None
        yield
