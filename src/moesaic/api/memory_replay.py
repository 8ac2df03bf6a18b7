"""A memory budget without a model: what a run with recorded loads, or a planned job, would read and
write.

The cache and its policy are those of training, over a file that moves nothing. A step follows
`train.micro_batches`: every micro-batch is taken to use the experts that the whole step used.
Checkpoints and validation are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moesaic.api.loads import latest_loads
from moesaic.base.config import parse
from moesaic.base.errors import ConfigError, StoreError
from moesaic.facts.expert_blocks import STATE, BlockKind, ExpertBlocks, waves
from moesaic.facts.job import Job
from moesaic.facts.job.job import parse_language_model
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
from moesaic.store.expert_order import ExpertOrder
from moesaic.store.expert_state import ExpertState

_FORECAST_STEPS = 3
"""Most steps until the traffic of a step repeats."""
_REPEATING = ("next-use", "lru")
"""Policies that do the same again if contents and accesses are the same again."""
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
    job = parse_language_model(raw, f"--memory {memory} with {run / 'job.json'}")
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
    step = _Replay(job, blocks, budget.num_blocks).forecast(everything)
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
    is_read_only = False

    def has(self, block: int) -> bool:
        """Return False: nothing was written before the run."""
        del block
        return False

    def read(self, block: int, memory: NDArray[np.uint8]) -> None:
        """Read nothing."""

    def write(self, block: int, memory: NDArray[np.uint8]) -> None:
        """Write nothing."""

    def close(self) -> None:
        """Close nothing."""


class _Replay:
    """Accesses of a run's steps to a cache."""

    def __init__(self, job: Job, blocks: ExpertBlocks, num_places: int) -> None:
        assert job.memory is not None
        self._job, self._blocks, self._period = job, blocks, job.memory.period
        self._residency = make_residency(job.memory.residency)
        self._cache = BlockCache(_NoFile(), num_places, self._residency, num_threads=0)
        self._num_places = num_places
        self._states = {
            layer: ExpertState(self._cache, blocks.first_blocks[layer], number)
            for layer, number in blocks.experts.items()
        }
        for state in self._states.values():
            state.apply_skipped = partial(_apply_skipped, state)
        self._order = ExpertOrder(self._cache, blocks, self._states)
        self._may_repeat, self._skips_repeats = job.memory.residency in _REPEATING, False
        """True if groups of micro-batches that repeat earlier ones are not replayed."""

    def run(
        self, steps: Sequence[tuple[int, dict[int, list[int]]]]
    ) -> list[dict[str, Counter[str]]]:
        """Return the accesses, reads and writes of each step by phase."""
        with self._cache:
            self._fill()
            return [self._step(number, slots) for number, (_, slots) in enumerate(steps, 1)]

    def forecast(self, slots: dict[int, list[int]]) -> dict[str, Counter[str]]:
        """Return the traffic of a step after many that use `slots`, which are all, by phase."""
        self._skips_repeats = self._may_repeat
        with self._cache:
            self._fill()
            before = None
            for number in range(1, _FORECAST_STEPS + 1):
                phases, contents = self._step(number, slots), self._cache.contents()
                if self._skips_repeats and contents == before:
                    break
                before = contents
        return phases

    def _fill(self) -> None:
        """Make the accesses of initial values."""
        for state in self._states.values():
            for kind in STATE:
                for slot in range(state.num_slots):
                    for _ in ("gate", "up", "down"):
                        with self._cache.hold([state.block(slot, kind)]) as held:
                            for block in held if kind is BlockKind.PARAMETERS else ():
                                self._cache.mark_dirty(block)
        self._cache.take_stats()

    def _step(self, number: int, slots: dict[int, list[int]]) -> dict[str, Counter[str]]:
        num_groups = self._job.train.micro_batches // self._blocks.num_micro_batches
        groups, ends = list[dict[str, Counter[str]]](), list[Any]()
        while len(groups) < num_groups - 1:
            groups.append(self._group(number, slots, is_last=False))
            contents = self._cache.contents()
            if self._skips_repeats and contents in ends:
                period = groups[ends.index(contents) + 1 :]
                groups += period * ((num_groups - 1 - len(groups)) // len(period))
            ends.append(contents)
        groups.append(self._group(number, slots, is_last=True))
        if not self._blocks.updates_early:
            self._order.begin_update()
            for state in self._states.values():
                _update(state, number)
        if self._period and number % self._period == 0:
            self._cache.flush()
        phases = {
            name: sum((group[name] for group in groups), Counter[str]())
            for name in ("forward", "backward")
        }
        phases["optimizer"] = self._take_traffic()
        whole = _whole(phases)
        self._residency.end_step(
            ResidencyFacts("", self._num_places, whole["accesses"], whole["reads"])
        )
        return phases

    def _take_traffic(self) -> Counter[str]:
        stats = self._cache.take_stats()
        return Counter(accesses=stats.accesses, reads=stats.reads, writes=stats.writes)

    def _group(
        self, number: int, slots: dict[int, list[int]], *, is_last: bool
    ) -> dict[str, Counter[str]]:
        """Pass through all layers, and back; return the traffic by phase."""
        layers = list(self._blocks.experts)
        self._order.begin_group(is_last=is_last)
        for layer in [-1, *layers, 1 << 30]:  # Embedding, layers, head.
            self._forward_block(layer, slots)
        forward = self._take_traffic()
        for layer in [1 << 30, *reversed(layers), -1]:
            self._backward_block(layer, slots)
            if is_last and layer in slots:
                self._end_layer(self._states[layer], number)
        return {"forward": forward, "backward": self._take_traffic()}

    def _forward_block(self, layer: int, slots: dict[int, list[int]]) -> None:
        self._order.begin_forward(layer)
        if layer in slots:
            for _ in range(self._blocks.num_micro_batches):
                self._forward(self._states[layer], slots[layer])

    def _backward_block(self, layer: int, slots: dict[int, list[int]]) -> None:
        self._order.begin_backward(layer, slots.get(layer))
        if layer in slots:
            for _ in range(self._blocks.num_micro_batches):
                self._backward(self._states[layer], slots[layer])

    def _end_layer(self, state: ExpertState, number: int) -> None:
        if self._blocks.updates_early:
            _update(state, number)
            return
        for slot in sorted(state.touched):  # For the norm.
            with state.hold_gradient(slot):
                pass

    def _forward(self, state: ExpertState, slots: Sequence[int]) -> None:
        for wave in waves(slots, self._num_places):
            with state.hold(wave):
                pass

    def _backward(self, state: ExpertState, slots: Sequence[int]) -> None:
        if self._blocks.recomputes:
            self._forward(state, slots)
        for wave in waves(slots, self._num_places):
            with state.hold(wave), state.change_gradients(wave):
                pass


def _update(state: ExpertState, number: int) -> None:
    """Take update `number` of the experts with a gradient."""
    state.num_updates = number
    for slot in sorted(state.touched):
        with state.update(slot):
            pass


def _apply_skipped(state: ExpertState, slot: int) -> None:
    state.num_applied[slot] = state.num_updates
    with state.change_kinds(slot, STATE):
        pass
