"""A memory budget without a model: what a run with recorded loads, or a planned job, would read and
write.

The cache and its policy are those of training, over a file that moves nothing. A step follows
`train.micro_batches`: every micro-batch is taken to use the experts that the whole step used.
Checkpoints and validation are left out.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moesaic.api.loads import latest_loads
from moesaic.base.config import parse
from moesaic.base.errors import ConfigError, StoreError
from moesaic.facts.expert_blocks import STATE, BlockKind, ExpertBlocks, lookahead, wave_size
from moesaic.facts.job import Job
from moesaic.facts.plan import Plan
from moesaic.policy.plan.budget import (
    BudgetFacts,
    budget_bytes,
    budget_facts,
    check_budget,
    divide_budget,
    expert_blocks,
    smallest_budget,
)
from moesaic.policy.residency import ResidencyFacts, make_residency
from moesaic.store.cache import BlockCache

_FORECAST_STEPS = 3
"""Steps until the traffic of a step repeats."""
_RANK = 0
"""Rank whose memory is replayed."""


def replay_memory(run: Path, memory: str, residency: str) -> dict[str, Any]:
    """Return the traffic between memory and drive of rank 0 on the loads of `run`, as plain data.

    Args:
        run: the run's directory.
        memory: budget of the rank, such as "2GB".
        residency: name of the policy that chooses the blocks that leave memory.
    """
    from moesaic.report import RunStats  # Slow to import.

    stats = RunStats.read(run)
    raw = {**stats.job, "memory": {"host": memory, "ssd": "unused", "residency": residency}}
    raw["train"] = {**raw["train"], "micro_batch_order": "auto"}
    job = parse(Job, raw, f"--memory {memory} with {run / 'job.json'}")
    plan = parse(Plan, stats.plan, str(run / "plan.json"))
    assert job.memory is not None
    host_bytes = job.memory.host_bytes
    if host_bytes is None:
        raise ConfigError('--memory auto: give a size, such as "2GB"')
    facts = budget_facts(job, plan, plan.ranks - 1, host_bytes)
    try:
        check_budget(job.memory, facts)
    except ConfigError as error:
        raise ConfigError(f"--memory {memory}: {error}") from None
    budget = divide_budget(facts)
    steps = list(_read_slots(run, plan))
    if not steps:
        raise StoreError(
            f"'{run}' has no loads under loads/, like every run of a dense model: replay a run "
            "with experts, and log.loads_every not above its steps"
        )
    traffic = _Replay(job, expert_blocks(job, plan, facts, budget), budget.num_blocks).run(steps)
    rows = [
        {
            "step": number, "accesses": one["accesses"], "reads": one["reads"],
            **_num_bytes(one, facts),
        }
        for (number, _), one in zip(steps, map(_whole, traffic), strict=True)
    ]  # fmt: skip
    return {
        "run": str(run), "memory": memory, "residency": residency, "simulated": True,
        "blocks_in_memory": budget.num_blocks, "block_bytes": facts.block_bytes,
        "micro_batches_together": budget.group_size, "steps": rows,
    }  # fmt: skip


def forecast(job: Job, plan: Plan, free_bytes: int) -> dict[str, Any] | None:
    """Return what lives where under a job's budget, and the traffic of a step; None without a
    budget.

    It describes the rank with the most samples, of `free_bytes` of memory, in a step in which all
    experts have tokens.
    """
    if job.memory is None:
        return None
    host_bytes = budget_bytes(job.memory, free_bytes)
    facts = budget_facts(job, plan, plan.ranks - 1, host_bytes)
    check_budget(job.memory, facts)
    budget = divide_budget(facts)
    blocks = expert_blocks(job, plan, facts, budget)
    everything = {layer: list(range(number)) for layer, number in blocks.experts.items()}
    steps = [(number, everything) for number in range(_FORECAST_STEPS)]
    step = _Replay(job, blocks, budget.num_blocks).run(steps)[-1]
    whole = _num_bytes(_whole(step), facts)
    return {
        "host_bytes": host_bytes, "smallest_budget_bytes": smallest_budget(facts),
        "other_bytes": facts.other_bytes[budget.group_size],
        "experts_bytes": budget.num_blocks * facts.block_bytes,
        "expert_state_bytes": len(STATE) * facts.num_experts * facts.block_bytes,
        "drive_bytes": blocks.num_blocks * facts.block_bytes,
        "micro_batches_together": budget.group_size,
        "read_bytes_per_step": whole["read_bytes"],
        "written_bytes_per_step": whole["written_bytes"],
        "bytes_by_phase": {phase: _num_bytes(traffic, facts) for phase, traffic in step.items()},
    }  # fmt: skip


def _whole(step: Mapping[str, Counter[str]]) -> Counter[str]:
    """Return the traffic of all phases of a step."""
    return sum(step.values(), Counter[str]())


def _num_bytes(traffic: Counter[str], facts: BudgetFacts) -> dict[str, int]:
    return {
        "read_bytes": traffic["reads"] * facts.block_bytes,
        "written_bytes": traffic["writes"] * facts.block_bytes,
    }


def _read_slots(run: Path, plan: Plan) -> Iterator[tuple[int, dict[int, list[int]]]]:
    """Yield each recorded step with the rank's slots that have tokens, by layer."""
    table = latest_loads(run)
    if table is None:
        return
    by_step: dict[int, dict[int, list[int]]] = {}
    per_rank = plan.experts // plan.ep
    first = _RANK // plan.etp % plan.ep * per_rank
    columns = (table.column(name).to_pylist() for name in ("step", "layer", "counts"))
    for step, layer, counts in zip(*columns, strict=True):
        own = plan.slot_experts(layer)[first : first + per_rank]
        slots = [slot for slot, expert in enumerate(own) if counts[expert]]
        by_step.setdefault(step, {})[layer] = slots
    yield from sorted(by_step.items())


class _NoFile:
    """Storage that moves nothing."""

    stride_bytes = 8

    def has(self, block: int) -> bool:
        """Return False: nothing was written before the run."""
        del block
        return False

    def read(self, block: int, memory: NDArray[np.uint8]) -> None:
        """Read nothing."""

    def write(self, block: int, memory: NDArray[np.uint8]) -> None:
        """Write nothing."""

    def checksum(self, memory: NDArray[np.uint8]) -> int:
        """Return the same for all contents."""
        del memory
        return 0

    def close(self) -> None:
        """Close nothing."""


class _Replay:
    """Accesses of a run's steps to a cache."""

    def __init__(self, job: Job, blocks: ExpertBlocks, num_places: int) -> None:
        assert job.memory is not None
        self._job, self._blocks, self._period = job, blocks, job.memory.period
        self._residency = make_residency(job.memory.residency)
        self._cache = BlockCache(_NoFile(), num_places, self._residency, num_threads=1)
        self._num_places, self._wave = num_places, wave_size(num_places)
        self._used = {layer: list(range(number)) for layer, number in blocks.experts.items()}
        self._num_updates = 0
        self._num_applied = {layer: [0] * number for layer, number in blocks.experts.items()}

    def run(
        self, steps: Sequence[tuple[int, dict[int, list[int]]]]
    ) -> list[dict[str, Counter[str]]]:
        """Return the accesses, reads and writes of each step by phase."""
        with self._cache:
            for layer, number in self._blocks.experts.items():  # Initial values.
                for kind in STATE:
                    for slot in range(number):
                        for _ in ("gate", "up", "down"):
                            self._hold(layer, [slot], [kind], dirty=kind is BlockKind.PARAMETERS)
            self._cache.take_stats()
            return [self._step(number, slots) for number, (_, slots) in enumerate(steps, 1)]

    def _step(self, number: int, slots: dict[int, list[int]]) -> dict[str, Counter[str]]:
        blocks, phases = self._blocks, defaultdict[str, Counter[str]](Counter)
        num_groups = self._job.train.micro_batches // blocks.num_micro_batches
        for group in range(num_groups):
            is_last = group == num_groups - 1
            for layer in [-1, *blocks.experts, 1 << 30]:  # Embedding, layers, head.
                self._forward_block(layer, slots, is_last)
            phases["forward"].update(self._take_traffic())
            for layer in [1 << 30, *reversed(list(blocks.experts)), -1]:
                self._backward_block(layer, slots, is_last)
                if is_last and layer in slots:
                    self._end_layer(layer, slots[layer], number)
            phases["backward"].update(self._take_traffic())
        if not blocks.updates_early:
            self._update_late(slots, number)
        self._num_updates = number
        if self._period and number % self._period == 0:
            self._cache.flush()
        phases["optimizer"].update(self._take_traffic())
        whole = _whole(phases)
        self._residency.end_step(
            ResidencyFacts("", self._num_places, whole["accesses"], whole["reads"])
        )
        return phases

    def _take_traffic(self) -> dict[str, int]:
        stats = self._cache.take_stats()
        return {"accesses": stats.accesses, "reads": stats.reads, "writes": stats.writes}

    def _forward_block(self, layer: int, slots: dict[int, list[int]], is_last: bool) -> None:
        behind = {
            one: [slot for slot in used if self._is_behind(one, slot)]
            for one, used in self._used.items()
        }
        self._expect(self._blocks.forward_order(layer, self._used, behind, is_last))
        for _ in range(self._blocks.num_micro_batches):
            self._forward(layer, slots.get(layer, ()))

    def _backward_block(self, layer: int, slots: dict[int, list[int]], is_last: bool) -> None:
        if layer in slots:
            self._used[layer] = slots[layer]
        self._expect(self._blocks.backward_order(layer, self._used, is_last))
        for _ in range(self._blocks.num_micro_batches):
            self._backward(layer, slots.get(layer, ()))

    def _end_layer(self, layer: int, used: Sequence[int], number: int) -> None:
        if self._blocks.updates_early:
            self._update(layer, used, number)
            return
        for slot in used:
            self._hold(layer, [slot], [BlockKind.GRADIENT])  # For the norm.

    def _update_late(self, slots: dict[int, list[int]], number: int) -> None:
        self._expect(self._blocks.update_order(self._used))
        for layer, used in slots.items():
            self._update(layer, used, number)

    def _forward(self, layer: int, slots: Sequence[int]) -> None:
        for first in range(0, len(slots), self._wave):
            wave = slots[first : first + self._wave]
            for slot in wave:
                if self._is_behind(layer, slot):
                    self._hold(layer, [slot], STATE, dirty=True)
                    self._num_applied[layer][slot] = self._num_updates
            self._hold(layer, wave, [BlockKind.PARAMETERS])

    def _backward(self, layer: int, slots: Sequence[int]) -> None:
        if self._blocks.recomputes:
            self._forward(layer, slots)
        for first in range(0, len(slots), self._wave):
            wave = slots[first : first + self._wave]
            gradients = partial(self._hold, layer, wave, [BlockKind.GRADIENT], dirty=True)
            self._hold(layer, wave, [BlockKind.PARAMETERS], inside=gradients)

    def _update(self, layer: int, slots: Sequence[int], number: int) -> None:
        for slot in slots:
            self._hold(layer, [slot], list(BlockKind), dirty=True)
            self._cache.discard(self._blocks.block(layer, slot, BlockKind.GRADIENT))
            self._num_applied[layer][slot] = number

    def _is_behind(self, layer: int, slot: int) -> bool:
        return self._num_applied[layer][slot] < self._num_updates

    def _hold(
        self, layer: int, slots: Sequence[int], kinds: Sequence[BlockKind], *, dirty: bool = False,
        inside: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        wanted = [self._blocks.block(layer, slot, kind) for slot in slots for kind in kinds]
        with self._cache.hold(wanted):
            if inside is not None:
                inside()
            for block in wanted if dirty else ():
                self._cache.mark_dirty(block)

    def _expect(self, blocks: Iterator[int]) -> None:
        self._cache.expect(list(islice(blocks, lookahead(self._num_places))))
