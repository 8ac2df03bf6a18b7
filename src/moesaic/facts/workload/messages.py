"""Every collective of a step as one rank takes part in it: which operation, whose, how many bytes.

Sizes are exact but for those of a token exchange, which follow the loads. What travels over which
link, and how long it takes, is for whoever knows the cluster.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from moesaic.facts.job import Job
from moesaic.facts.plan import Plan
from moesaic.facts.workload.parameters import Parameter, local_size

BUCKET_BYTES = 32 << 20
"""Gradients travel in flat buckets of at most so much; a larger one travels alone."""

_COUNT_BYTES = 8

Operation = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]


@dataclass(frozen=True)
class Message:
    """One collective operation, seen from one rank."""

    name: str
    """What it is for."""
    operation: Operation
    ranks: tuple[int, ...]
    """Who takes part."""
    num_bytes: int
    """What this rank brings; of an all-gather, what it has when all is done."""
    send: tuple[int, ...] = ()
    """Bytes to each of `ranks`, itself included; of an all_to_all only."""
    receive: tuple[int, ...] = ()
    """Bytes from each of `ranks`, itself included; of an all_to_all only."""


def group_of(groups: Sequence[Sequence[int]], rank: int) -> tuple[int, ...]:
    """The ranks of `groups` that `rank` is among."""
    return next(tuple(group) for group in groups if rank in group)


def counts(job: Job, plan: Plan) -> Iterator[Message]:
    """How many tokens go where: an all-gather before each exchange."""
    if plan.ranks > 1:
        own = _COUNT_BYTES * (job.model.top_k * (job.model.experts + 1) + 1)
        yield Message("counts", "all_gather", tuple(range(plan.ranks)), plan.ranks * own)


def exchange(
    name: str, plan: Plan, rank: int, send: Sequence[int], receive: Sequence[int]
) -> Iterator[Message]:
    """Rows to the ranks that share out the experts, in bytes to and from each."""
    if plan.ep > 1:
        ranks = group_of(plan.expert_groups(), rank)
        yield Message(name, "all_to_all", ranks, sum(send), tuple(send), tuple(receive))


def sharded(
    held: Sequence[Parameter], plan: Plan, rank: int, width: int
) -> tuple[Message, Message, tuple[Message, ...]]:
    """What FSDP sends for one group of dense parameters, of `width` bytes an element.

    Returns: parameters put together; gradients summed and shared out; and, once a step, their sum
    over the ranks that hold copies.
    """
    first = rank - rank % plan.shard
    ranks = tuple(range(first, first + plan.shard))
    own = sum(local_size(p, plan.shard) for p in held) * width
    copies = tuple(range(rank % plan.shard, plan.ranks, plan.shard))
    summed = (Message("copies", "all_reduce", copies, own),) if len(copies) > 1 else ()
    return (
        Message("parameters", "all_gather", ranks, own * plan.shard),
        Message("gradients", "reduce_scatter", ranks, own * plan.shard),
        summed,
    )


def buckets(sizes: Sequence[int]) -> Iterator[list[int]]:
    """Tensors of `sizes` bytes as they share messages."""
    bucket: list[int] = []
    for size in sizes:
        if bucket and sum(bucket) + size > BUCKET_BYTES:
            yield bucket
            bucket = []
        bucket.append(size)
    if bucket:
        yield bucket


def scalars(plan: Plan) -> Iterator[Message]:
    """Sums of single numbers: targets, the gradient's norm, what the log says of a step."""
    if plan.ranks > 1:
        everyone = tuple(range(plan.ranks))
        for name, num_bytes in (("targets", 8), ("norm", 8), ("losses", 4 * 8)):
            yield Message(name, "all_reduce", everyone, num_bytes)
