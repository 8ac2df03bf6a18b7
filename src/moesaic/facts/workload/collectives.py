"""Collectives of a step on one rank: operation, group and bytes.

Byte counts are exact, except those of token exchanges, which follow the expert loads. Links and
durations belong to the cost model, which knows the cluster.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from moesaic.facts.job import Job
from moesaic.facts.plan import Plan, stage_blocks
from moesaic.facts.workload.loads import destination_counts
from moesaic.facts.workload.sizes import BUCKET_BYTES, INDEX_BYTES, Sizes, round_up

ALIGNMENT_BYTES = 256
"""Alignment of gradients in a bucket, in bytes."""

TOKENS, RESULTS = "tokens", "results"
"""Names of the collectives that send tokens to experts and return their results."""

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


def collective(
    name: str, operation: CollectiveKind, ranks: tuple[int, ...], num_bytes: int
) -> tuple[CollectiveCall, ...]:
    """Return a collective; none for a group of one."""
    return (CollectiveCall(name, operation, ranks, num_bytes),) if len(ranks) > 1 else ()


def all_to_all(
    name: str, ranks: tuple[int, ...], send_bytes: Sequence[int], receive_bytes: Sequence[int]
) -> tuple[CollectiveCall, ...]:
    """Return an exchange among `ranks`, with `send_bytes` to and `receive_bytes` from each."""
    calls = collective(name, "all_to_all", ranks, sum(send_bytes))
    sent, received = tuple(send_bytes), tuple(receive_bytes)
    return tuple(replace(one, send_bytes=sent, receive_bytes=received) for one in calls)


def count_exchange(s: Sizes) -> tuple[CollectiveCall, ...]:
    """Return the all-gathers of token counts before an exchange: with capacity, of the choices of
    all ranks; then of the EP group."""
    job, plan, rank = s.job, s.plan, s.rank
    destinations = sum(destination_counts(plan)) if plan.dispatch == "dedup" else 0
    num_bytes = plan.ep * INDEX_BYTES * plan.chunks * (job.model.experts + destinations)
    counts = collective("counts", "all_gather", plan.ep_groups().of(rank), num_bytes)
    if job.routing.capacity_factor is None:
        return counts
    ranks = plan.same_etp_rank_groups().of(rank)
    num_bytes = len(ranks) * INDEX_BYTES * (job.model.top_k * job.model.experts + 1)
    return collective("capacity", "all_gather", ranks, num_bytes) + counts


def scalar_reductions(job: Job, plan: Plan, rank: int) -> tuple[CollectiveCall, ...]:
    """Return the all-reduces of a step that sum numbers over ranks.

    Expert counts have one for each stage and micro-batch. Then come the number of targets, the
    gradient norm with the number of ranks that must stop, and logged values. In a pipeline, the
    log also needs the tokens per expert and the drops of every layer.
    """
    model, found = job.model, tuple[CollectiveCall, ...]()
    expert_blocks = {f"layers.{layer}" for layer in model.expert_layers}
    for names in stage_blocks(plan, model)[plan.pp_rank(rank) :: plan.pp]:
        layers = len(expert_blocks.intersection(names))
        if layers:
            found += count_reduction(job, plan, rank, layers) * job.train.micro_batches
    all_ranks = tuple(range(plan.ranks))
    calls = [
        ("targets", plan.stage_groups().of(rank), 1),
        ("norm", all_ranks, 2),
        ("losses", all_ranks, 4),
        ("loads", plan.pp_groups().of(rank), model.layers * (model.experts + 1)),
    ]
    for name, ranks, numbers in calls:
        found += collective(name, "all_reduce", ranks, numbers * INDEX_BYTES)
    return found


def count_reduction(job: Job, plan: Plan, rank: int, num_layers: int) -> tuple[CollectiveCall, ...]:
    """Return the all-reduce of the expert counts of a stage with `num_layers` expert layers."""
    tables = 1 + (job.routing.router == "gshard") + (job.routing.capacity_factor is not None)
    ranks, numbers = plan.same_etp_rank_groups().of(rank), tables * num_layers * job.model.experts
    return collective("expert counts", "all_reduce", ranks, (numbers + 1) * INDEX_BYTES)


def embedding_exchanges(s: Sizes) -> tuple[tuple[CollectiveCall, ...], tuple[CollectiveCall, ...]]:
    """Return the collectives of a column-sharded embedding, forward and backward.

    Every rank sends its token ids to all ranks, and receives its tokens' columns from each.
    """
    if s.plan.embedding_shards == 1:
        return (), ()
    ranks, count, tokens = s.stage_ranks, s.plan.embedding_shards, s.lookup_tokens
    row = s.model.hidden // count * s.stored_bytes
    looked_up, own = [n * row for n in tokens], [s.tokens * row] * count
    ids = [s.tokens * INDEX_BYTES] * count, [n * INDEX_BYTES for n in tokens]
    return (
        CollectiveCall("counts", "all_gather", ranks, count * INDEX_BYTES),
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
        bucket_bytes += round_up(size, ALIGNMENT_BYTES)
    if sizes:
        yield _make_bucket(range(first, len(sizes)), sizes, at_end)


def _make_bucket(members: range, sizes: Sequence[int], at_end: Container[int]) -> BucketLayout:
    starts, end = dict[int, int](), 0
    for index in sorted(members, key=lambda i: i in at_end):
        starts[index] = round_up(end, ALIGNMENT_BYTES)
        end = starts[index] + sizes[index]
    return BucketLayout(members, tuple(starts[index] for index in members), end)
