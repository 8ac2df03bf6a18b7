"""Memory tiers: expert state on a drive, its part in memory, and the order in which steps need it.

The walk goes block by block (`train.micro_batches`), so the coming accesses of a step are known:
parameters of each layer in forward and backward, then the whole state for the update. Without
clipping, a layer's experts are updated right behind its backward. With it, gradients wait in the
cache, and on the drive if they do not fit.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch

from moesaic.base.decisions import Decision, decide
from moesaic.base.errors import ConfigError, StoreError
from moesaic.base.host_memory import free_memory_bytes
from moesaic.base.lock import LockHeld, fail_if_locked, file_lock
from moesaic.dist.collectives import all_gather
from moesaic.dist.world import World
from moesaic.facts.expert_blocks import ExpertBlocks, lookahead
from moesaic.facts.job import Job, MemoryConfig
from moesaic.facts.plan import Plan
from moesaic.kernels import device as devices
from moesaic.nn.experts.places import Places
from moesaic.policy.plan.budget import (
    Budget,
    BudgetFacts,
    budget_bytes,
    budget_facts,
    check_budget,
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
from moesaic.store.file import BlockFile
from moesaic.train.optim import AdamW
from moesaic.train.topology import gather_places

_MOUNTS = Path("/proc/self/mountinfo")
_SLOW_FILE_SYSTEMS = {
    **dict.fromkeys(("tmpfs", "ramfs"), "which is memory itself"),
    **dict.fromkeys(("overlay", "aufs"), "which copies files between the layers of a container"),
    **dict.fromkeys(
        ("9p", "afs", "ceph", "cifs", "gpfs", "lustre", "nfs", "nfs4", "smb3", "virtiofs"),
        "which reaches its drive over a network or another system",
    ),
    "fuse": "whose reads and writes take a detour through another process",
}  # fmt: skip
"""Reasons against file systems for expert state."""


def make_tiers(job: Job, plan: Plan, world: World, dtype: torch.dtype) -> ExpertTiers | None:
    """Return the tiers of this rank, whose state has `dtype`, or None if the job has no `[memory]`
    table. Every rank of the world must call this."""
    if job.memory is None:
        return None
    if world.device.type != "cpu":
        raise ConfigError(
            f'[memory] with train.device = "{world.device.type}": expert state on a drive is for '
            "CPU ranks, remove the table"
        )
    # All ranks must divide alike, and the last one has the most samples.
    facts = budget_facts(job, plan, plan.ranks - 1, _host_bytes(job.memory, world))
    check_budget(job.memory, facts)
    decisions = list[Decision[BudgetFacts, Budget]]()
    budget = decide(divide_budget, facts, decisions)
    devices.limit_compiled_kernels()
    directory = Path(job.memory.ssd).expanduser()
    _remove_unused(directory, plan.ranks)
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
        self._is_last_group = True
        self.decisions = list[Decision[BudgetFacts, Budget]]()
        """Division of the budget, if it was decided from a job."""
        with ExitStack() as stack:
            stack.enter_context(_locked(path))
            file = _create_file(path, blocks.num_blocks, width * dtype.itemsize)
            stack.callback(file.close)
            self.warnings = list(_drive_warnings(path.parent, is_direct=file.is_direct))
            """Messages for the user about the drive."""
            num_places = min(num_places, blocks.num_blocks)
            self.cache = BlockCache(file, num_places, self._residency)
            stack.callback(self.cache.close)
            self._resources = stack.pop_all()
        self.places = {
            layer: Places(self.cache, first, blocks.experts[layer], width, dtype)
            for layer, first in blocks.first_blocks.items()
        }
        self._used = {layer: list(range(number)) for layer, number in blocks.experts.items()}
        """Slots that each layer used in its last pass; at first all."""

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
        self._is_last_group = is_last

    def begin_forward(self, block: str) -> None:
        """Read ahead for the forward passes of a block and what follows."""
        devices.release_freed_memory()
        behind = {
            layer: [slot for slot in self._used[layer] if places.is_behind(slot)]
            for layer, places in self.places.items()
        }
        self._expect(
            self._blocks.forward_order(_layer(block), self._used, behind, self._is_last_group)
        )

    def begin_backward(self, block: str) -> None:
        """Read ahead for the backward passes of a block and what follows."""
        devices.release_freed_memory()
        places = self.places.get(_layer(block))
        if places is not None:
            # Earlier groups of micro-batches have touched others.
            self._used[_layer(block)] = sorted({*(+places.leased), *places.touched})
        self._expect(self._blocks.backward_order(_layer(block), self._used, self._is_last_group))

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
            self._expect(self._blocks.update_order(self._used))

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
        """Free the memory and remove the scratch file."""
        for places in self.places.values():
            places.close()
        self._resources.close()

    def _expect(self, blocks: Iterable[int]) -> None:
        self.cache.expect(list(islice(blocks, lookahead(self.cache.num_slots))))


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


def _drive_warnings(directory: Path, *, is_direct: bool) -> Iterator[str]:
    """Yield a warning if the directory's file system does not suit expert state, and another one if
    it has no direct I/O."""
    name = file_system(directory, _MOUNTS.read_text() if _MOUNTS.exists() else "")
    reason = _SLOW_FILE_SYSTEMS.get(name.partition(".")[0])
    if reason is not None:
        yield (
            f"memory.ssd = '{directory}' is on {name}, {reason}: name a directory on a drive of "
            "this machine"
        )
    if not is_direct:
        yield (
            f"memory.ssd = '{directory}' has no direct I/O, so the page cache takes memory beyond "
            "memory.host: name a directory on ext4 or xfs"
        )


def file_system(directory: Path, mounts: str) -> str:
    """Return the type of the file system of a directory by the text of /proc/self/mountinfo, or an
    empty string."""
    found, path = ("", ""), directory.resolve()
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        point = re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), before.split(" ")[4])
        if path.is_relative_to(point) and len(point) >= len(found[0]):
            found = point, after.split(" ")[0]  # A later mount hides an earlier one.
    return found[1]


def _remove_unused(directory: Path, num_ranks: int) -> None:
    """Remove the scratch files that a killed run on more ranks has left."""
    for path in directory.glob("experts-rank-*.blocks"):
        rank = path.stem.rpartition("-")[2]
        if rank.isdecimal() and int(rank) >= num_ranks:
            with suppress(LockHeld, OSError), file_lock(path.with_suffix(".lock"), fail_if_locked):
                path.unlink(missing_ok=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a scratch file, in a directory that is created if it is missing, and remove
    what a killed run has left."""
    directory = path.parent
    with ExitStack() as stack:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            stack.enter_context(file_lock(path.with_suffix(".lock"), fail_if_locked))
            path.unlink(missing_ok=True)
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
