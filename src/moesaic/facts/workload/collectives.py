"""Collectives of a step on one rank: operation, group and bytes.

Byte counts are exact, except those of token exchanges, which follow the expert loads. Links and
durations belong to the cost model, which knows the cluster.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from moesaic.facts.job import Job, ModelConfig
from moesaic.facts.plan import Plan, stage_blocks
from moesaic.facts.workload.loads import destination_counts
from moesaic.facts.workload.sizes import BUCKET_BYTES, Sizes, group_of

ALIGNMENT_BYTES = 256
"""Alignment of gradients in a bucket, in bytes."""

TOKENS, RESULTS = "tokens", "results"
"""Names of the collectives that send tokens to experts and return their results."""

SCALAR_BYTES = 8

CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]


@dataclass(frozen=True)
class CollectiveCall:
    """One collective, as one rank takes part in it."""

    name: str
    """Purpose of the collective."""
    operation: CollectiveKind
    ranks: tuple[int, ...]
    """Participating ranks."""
    num_bytes: int
    """Bytes that this rank contributes; for an all-gather, bytes of the gathered result."""
    send_bytes: tuple[int, ...] = ()
    """Bytes to each of `ranks`, itself included; only for all_to_all."""
    receive_bytes: tuple[int, ...] = ()
    """Bytes from each of `ranks`, itself included; only for all_to_all."""
    precedes_compute: bool = False
    """True if its block waits for the result before it computes."""


def all_to_all(
    name: str, ranks: tuple[int, ...], send_bytes: Sequence[int], receive_bytes: Sequence[int]
) -> tuple[CollectiveCall, ...]:
    """Return an exchange among `ranks`, with `send_bytes` to and `receive_bytes` from each.

    A single rank has none.
    """
    if len(ranks) == 1:
        return ()
    sent, received = tuple(send_bytes), tuple(receive_bytes)
    return (CollectiveCall(name, "all_to_all", ranks, sum(sent), sent, received),)


def count_exchange(job: Job, plan: Plan, rank: int) -> tuple[CollectiveCall, ...]:
    """Return the all-gathers of token counts before an exchange: with capacity, of the choices of
    all ranks; then of the EP group."""
    calls = list[CollectiveCall]()
    all_ranks = group_of(plan.same_etp_rank_groups(), rank)
    if job.routing.capacity_factor is not None and len(all_ranks) > 1:
        num_bytes = SCALAR_BYTES * (job.model.top_k * job.model.experts + 1)
        calls.append(
            CollectiveCall("capacity", "all_gather", all_ranks, len(all_ranks) * num_bytes)
        )
    if plan.ep > 1:
        destinations = sum(destination_counts(plan)) if plan.dispatch == "dedup" else 0
        num_bytes = plan.ep * SCALAR_BYTES * plan.chunks * (job.model.experts + destinations)
        ep_ranks = group_of(plan.ep_groups(), rank)
        calls.append(CollectiveCall("counts", "all_gather", ep_ranks, num_bytes))
    return tuple(calls)


def count_reductions(job: Job, plan: Plan, rank: int) -> Iterator[CollectiveCall]:
    """Yield the all-reduces of a step that sum expert counts over ranks: one for each stage and
    micro-batch."""
    ranks = group_of(plan.same_etp_rank_groups(), rank)
    tables = 1 + (job.routing.router == "gshard") + (job.routing.capacity_factor is not None)
    expert_blocks = {f"layers.{layer}" for layer in job.model.expert_layers}
    for names in stage_blocks(plan, job.model)[plan.pp_rank(rank) :: plan.pp]:
        layers = len(expert_blocks.intersection(names))
        num_bytes = SCALAR_BYTES * (tables * layers * job.model.experts + 1)
        if layers and len(ranks) > 1:
            call = CollectiveCall("expert counts", "all_reduce", ranks, num_bytes)
            yield from [call] * job.train.micro_batches


def embedding_exchanges(s: Sizes) -> tuple[tuple[CollectiveCall, ...], tuple[CollectiveCall, ...]]:
    """Return the collectives of a column-sharded embedding, forward and backward.

    Every rank sends its token ids to all ranks, and receives its tokens' columns from each.
    """
    if s.embedding_shards == 1:
        return (), ()
    ranks, count, tokens = s.stage_ranks, s.embedding_shards, s.lookup_tokens_by_rank
    row = s.model.hidden // count * s.stored_bytes
    looked_up, own = [n * row for n in tokens], [s.tokens * row] * count
    ids = [s.tokens * SCALAR_BYTES] * count, [n * SCALAR_BYTES for n in tokens]
    return (
        CollectiveCall("counts", "all_gather", ranks, count * SCALAR_BYTES),
        *all_to_all("token ids", ranks, *ids),
        *all_to_all("embedding columns", ranks, looked_up, own),
    ), all_to_all("embedding columns", ranks, own, looked_up)


@dataclass(frozen=True)
class BucketLayout:
    """Layout of a bucket: consecutive tensors that share one collective."""

    members: range
    """Indices of the tensors."""
    offsets: tuple[int, ...]
    """Byte offset of each tensor."""
    num_bytes: int
    """Bytes of the bucket, with gaps for alignment."""


def split_into_buckets(
    sizes: Sequence[int], max_bytes: int = BUCKET_BYTES, at_end: Container[int] = ()
) -> Iterator[BucketLayout]:
    """Yield buckets of at most `max_bytes` for tensors of `sizes` bytes, in order.

    Within a bucket, tensors with an index in `at_end` come last.
    """
    first, bucket_bytes = 0, 0
    for index, size in enumerate(sizes):
        if index > first and bucket_bytes + size > max_bytes:
            yield _make_bucket(range(first, index), sizes, at_end)
            first, bucket_bytes = index, 0
        bucket_bytes += _align(size)
    if sizes:
        yield _make_bucket(range(first, len(sizes)), sizes, at_end)


def _make_bucket(members: range, sizes: Sequence[int], at_end: Container[int]) -> BucketLayout:
    starts, end = dict[int, int](), 0
    for index in sorted(members, key=lambda i: i in at_end):
        starts[index] = _align(end)
        end = starts[index] + sizes[index]
    return BucketLayout(members, tuple(starts[index] for index in members), end)


def _align(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def scalar_reductions(model: ModelConfig, plan: Plan, rank: int) -> Iterator[CollectiveCall]:
    """Yield the all-reduces of scalars: number of targets, gradient norm, and logged values.

    In a pipeline, the log also needs the tokens per expert and the drops of every layer.
    """
    all_ranks = tuple(range(plan.ranks))
    pipeline_ranks = tuple(range(rank % plan.ranks_per_stage, plan.ranks, plan.ranks_per_stage))
    loads = model.layers * (model.experts + 1)
    for name, ranks, numbers in (
        ("targets", group_of(plan.stage_groups(), rank), 1), ("norm", all_ranks, 1),
        ("losses", all_ranks, 4),
        ("loads", pipeline_ranks, loads),
    ):  # fmt: skip
        if len(ranks) > 1:
            yield CollectiveCall(name, "all_reduce", ranks, numbers * SCALAR_BYTES)
