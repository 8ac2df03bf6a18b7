"""Division of a rank's memory budget: micro-batches that go together, and expert state in memory.

Micro-batches that pass through a block together read its experts once, but keep their activations.
"""

from __future__ import annotations

from typing import NamedTuple

from moesaic.base.errors import ConfigError
from moesaic.base.host_memory import AUTO_FRACTION
from moesaic.base.units import format_bytes
from moesaic.facts.expert_blocks import MIN_BLOCKS, BlockKind, ExpertBlocks
from moesaic.facts.job import Job, MemoryConfig
from moesaic.facts.plan import Plan
from moesaic.facts.workload import memory
from moesaic.facts.workload.sizes import STORED_BYTES, Sizes

_ALIGNMENT = 4096
_LIBRARY_BYTES, _MIN_LIBRARY_MACS = 96 << 20, 1 << 20
"""Compiled kernels of oneDNN (up to 128 of 0.6 MB) and buffers of MKL, as measured; and
multiply-accumulates of an expert's larger matmul from which on they are used."""
_NUMBA_BYTES, _MIN_NUMBA_ELEMENTS = 32 << 20, 1 << 19
"""numba with its kernels, as measured; and elements of a matrix from which on they are used."""
_HEAP_FACTOR = 1.2
"""Memory that tensors take from the system, over that of the tensors alone. The rest is between
them, too small or too late to be reused."""


class BudgetFacts(NamedTuple):
    """Sizes of one rank."""

    host_bytes: int
    """The budget."""
    other_bytes: dict[int, int]
    """Peak of everything but expert state and the interpreter, by micro-batches that pass through a
    block together."""
    width: int
    """Numbers in one block: the parameters of an expert."""
    block_bytes: int
    """Bytes of one block in memory and on the drive."""
    experts_per_layer: int
    num_experts: int
    """Experts of all layers."""


class Budget(NamedTuple):
    """Division of the budget."""

    group_size: int
    """Micro-batches that pass through a block together."""
    num_blocks: int
    """Blocks of expert state in memory."""


def budget_facts(job: Job, plan: Plan, rank: int, host_bytes: int) -> BudgetFacts:
    """Return the sizes of `rank` for a job with a `[memory]` table."""
    if plan.ep * plan.etp != plan.ranks:
        raise ConfigError(
            f"layout.ep = {plan.ep} on {plan.ranks} ranks with [memory]: each expert must have one "
            f"owner, set layout.ep = {plan.ranks // plan.etp}"
        )
    per_layer = plan.experts // plan.ep
    width = 3 * job.model.hidden * job.model.ffn // plan.etp
    num_bytes = width * STORED_BYTES[job.train.precision]
    groups = [n for n in range(1, job.train.micro_batches + 1) if job.train.micro_batches % n == 0]
    working_bytes = _working_bytes(Sizes(job, plan, rank))
    return BudgetFacts(
        host_bytes,
        {
            n: int(_HEAP_FACTOR * memory(job, plan, rank, group_size=n).peak_bytes) + working_bytes
            for n in groups
        },
        width,
        -(-num_bytes // _ALIGNMENT) * _ALIGNMENT,
        per_layer,
        per_layer * len(job.model.expert_layers),
    )


def _working_bytes(sizes: Sizes) -> int:
    """Return what kernels need beyond the memory of even routing: libraries, and the backward pass
    of an expert that gets every token of a micro-batch."""
    hidden, ffn, tokens = sizes.model.hidden, sizes.expert_width, sizes.tokens
    matrix = 2 * ffn * hidden
    libraries = _LIBRARY_BYTES * (matrix * tokens >= _MIN_LIBRARY_MACS)
    libraries += _NUMBA_BYTES * (matrix >= _MIN_NUMBA_ELEMENTS)
    # Two inputs, gate and up with their gradients, and three results between the matmuls.
    elements = tokens * (2 * hidden + 7 * ffn)
    return libraries + elements * sizes.compute_bytes


def divide_budget(facts: BudgetFacts) -> Budget:
    """Return the largest group of micro-batches beside which the parameters of two layers fit, for
    computing one while the other is read; else the group that leaves most blocks."""
    all_blocks = len(BlockKind) * facts.num_experts
    wanted = min(2 * facts.experts_per_layer + MIN_BLOCKS, all_blocks)
    budgets = [
        Budget(group_size, min((facts.host_bytes - other) // facts.block_bytes, all_blocks))
        for group_size, other in sorted(facts.other_bytes.items(), reverse=True)
    ]
    roomy = (one for one in budgets if one.num_blocks >= wanted)
    return next(roomy, max(budgets, key=lambda one: one.num_blocks))


def smallest_budget(facts: BudgetFacts) -> int:
    """Return the bytes of the smallest budget that works."""
    return min(facts.other_bytes.values()) + MIN_BLOCKS * facts.block_bytes


def expert_blocks(job: Job, plan: Plan, facts: BudgetFacts, budget: Budget) -> ExpertBlocks:
    """Return the expert state of a rank and its order of use. fp16 updates experts late, because an
    overflow anywhere skips the update."""
    return ExpertBlocks(
        dict.fromkeys(job.model.expert_layers, facts.experts_per_layer),
        budget.group_size,
        recomputes=plan.recomputes(job),
        updates_early=not job.train.clip and job.train.precision != "fp16",
    )


def check_rank_device(kind: str, where: str) -> None:
    """Raise if ranks on devices of `kind` cannot keep expert state on a drive."""
    if kind != "cpu":
        raise ConfigError(
            f"[memory] {where}: expert state on a drive is for CPU ranks, use these or remove the "
            "table"
        )


def budget_bytes(config: MemoryConfig, free_bytes: int) -> int:
    """Return the budget of a rank that may take `free_bytes`; raise if that is less."""
    given = config.host_bytes
    if given is None:
        return int(AUTO_FRACTION * free_bytes)
    if given > free_bytes:
        raise ConfigError(
            f'memory.host = "{config.host}" is more than the {format_bytes(free_bytes)} that each '
            f'rank can have: set it to "{free_bytes >> 20}MiB" or less, or use fewer ranks per host'
        )
    return given


def check_budget(config: MemoryConfig, facts: BudgetFacts) -> None:
    """Raise if a budget is too small for the job."""
    smallest = smallest_budget(facts)
    if facts.host_bytes < smallest:
        raise ConfigError(
            f'memory.host = "{config.host}" is too small for this job, which needs '
            f'{format_bytes(smallest)}: set memory.host = "{-(-smallest >> 20)}MiB" or more; '
            "train.recompute and more train.micro_batches need less"
        )
