"""Collectives of a step on one rank: operation, group and bytes.

Byte counts are exact, except those of token exchanges, which follow the expert loads. Links and
durations belong to the cost model, which knows the cluster.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from moesaic.facts.job import Job, ModelConfig
from moesaic.facts.plan import Plan
from moesaic.facts.workload.loads import destination_counts
from moesaic.facts.workload.parameters import Parameter, local_size
from moesaic.facts.workload.sizes import BUCKET_BYTES, Sizes

ALIGNMENT_BYTES = 256
"""Alignment of gradients in a bucket, in bytes."""

TOKENS, RESULTS = "tokens", "results"
"""Names of the collectives that send tokens to experts and return their results."""

_SCALAR_BYTES = 8

Operation = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]


@dataclass(frozen=True)
class CollectiveCall:
    """One collective, as one rank takes part in it."""

    name: str
    """Purpose of the collective."""
    operation: Operation
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


@dataclass(frozen=True)
class BlockCollectives:
    """Collectives of one part of a block, forward and backward, each in issue order."""

    forward: tuple[CollectiveCall, ...] = ()
    backward: tuple[CollectiveCall, ...] = ()

    def followed_by(self, *others: BlockCollectives) -> BlockCollectives:
        """Return these collectives followed by `others`; backward runs in reverse order."""
        forward, backward = self.forward, self.backward
        for other in others:
            forward, backward = (*forward, *other.forward), (*other.backward, *backward)
        return BlockCollectives(forward, backward)

    def without_backward(self, drop_backward: bool) -> BlockCollectives:
        """Return the same collectives, without backward if `drop_backward`."""
        return BlockCollectives(self.forward) if drop_backward else self


@dataclass(frozen=True)
class TensorParallelCollectives:
    """Collectives within one tensor-parallel group; none for a group of one."""

    sizes: Sizes
    ranks: tuple[int, ...]
    etp_ranks: tuple[int, ...]
    """Ranks of the expert TP group, which split the same experts."""

    @classmethod
    def of_rank(cls, s: Sizes, plan: Plan, rank: int) -> TensorParallelCollectives:
        """Return the collectives of the groups that contain `rank`."""
        groups = plan.tp_groups(), plan.etp_groups()
        return cls(s, *(group_of(group, rank) for group in groups))

    def gather_sequence(self, width: int) -> BlockCollectives:
        """Gather `width` channels of all tokens from the sequence shards."""
        num_bytes = self.sizes.tokens * width * self.sizes.compute_bytes
        return BlockCollectives(
            self._all_gather(num_bytes), self._reduce_scatter(num_bytes)
        ).without_backward(self.sizes.input_has_no_grad)

    def reduce_scatter_sequence(self, element_bytes: int) -> BlockCollectives:
        """Reduce-scatter the residual stream into sequence shards, `element_bytes` per number."""
        num_bytes = self.sizes.gathered_elements * element_bytes
        return BlockCollectives(self._reduce_scatter(num_bytes), self._all_gather(num_bytes))

    def qk_norms(self) -> BlockCollectives:
        """All-reduce one sum of squares per token for queries, and one for keys."""
        if self.sizes.model.qk_norm != "whole":
            return BlockCollectives()
        squares = self._within_tp(
            "qk norm", "all_reduce", self.sizes.tokens * self.sizes.stored_bytes
        )
        return BlockCollectives(2 * squares, 2 * squares)

    def head(self) -> BlockCollectives:
        """Gather the tokens, and then one log-sum-exp per token of this TP rank's logits."""
        sums: tuple[CollectiveCall, ...] = ()
        for rows, times in self.sizes.loss_chunks:
            num_bytes = rows * self.sizes.tp * self.sizes.stored_bytes
            sums += times * self._within_tp("log-sum-exp", "all_gather", num_bytes)
        return self.gather_sequence(self.sizes.model.hidden).followed_by(BlockCollectives(sums))

    def gather_routing(self) -> BlockCollectives:
        """Gather the chosen experts and weights of all tokens in the expert TP group."""
        choices = self.sizes.dispatched_tokens * self.sizes.model.top_k
        weights = self._within_etp("all_gather", choices * self.sizes.stored_bytes)
        weight_gradients = self._within_etp("reduce_scatter", choices * self.sizes.stored_bytes)
        calls = BlockCollectives(
            (*self._within_etp("all_gather", choices * _SCALAR_BYTES), *weights), weight_gradients
        )
        return calls.without_backward(
            self.sizes.input_has_no_grad and not self.sizes.trainable.routers
        )

    def gather_dispatched(self) -> BlockCollectives:
        """Gather the tokens of the expert TP group before dispatch."""
        num_bytes = (
            self.sizes.dispatched_tokens * self.sizes.model.hidden * self.sizes.compute_bytes
        )
        calls = BlockCollectives(
            self._within_etp("all_gather", num_bytes),
            self._within_etp("reduce_scatter", num_bytes),
        )
        return calls.without_backward(self.sizes.input_has_no_grad)

    def reduce_scatter_results(self) -> BlockCollectives:
        """Reduce-scatter expert results, so that each expert TP rank gets the sums of its own
        tokens."""
        num_bytes = (
            self.sizes.dispatched_tokens * self.sizes.model.hidden * self.sizes.compute_bytes
        )
        return BlockCollectives(
            self._within_etp("reduce_scatter", num_bytes),
            self._within_etp("all_gather", num_bytes),
        )

    def _within_etp(self, operation: Operation, num_bytes: int) -> tuple[CollectiveCall, ...]:
        if self.sizes.etp == 1:
            return ()
        name = (
            "gather dispatched tokens"
            if operation == "all_gather"
            else "reduce-scatter expert results"
        )
        return (CollectiveCall(name, operation, self.etp_ranks, num_bytes),)

    def _all_gather(self, num_bytes: int) -> tuple[CollectiveCall, ...]:
        return self._within_tp("gather sequence", "all_gather", num_bytes)

    def _reduce_scatter(self, num_bytes: int) -> tuple[CollectiveCall, ...]:
        return self._within_tp("reduce-scatter sequence", "reduce_scatter", num_bytes)

    def _within_tp(
        self, name: str, operation: Operation, num_bytes: int
    ) -> tuple[CollectiveCall, ...]:
        if self.sizes.tp == 1:
            return ()
        return (CollectiveCall(name, operation, self.ranks, num_bytes),)


def group_of(groups: Sequence[Sequence[int]], rank: int) -> tuple[int, ...]:
    """Return the group of `groups` that contains `rank`."""
    return next(tuple(group) for group in groups if rank in group)


def stage_ranks(plan: Plan, rank: int) -> tuple[int, ...]:
    """Return all ranks on the pipeline rank of `rank`; without a pipeline, all ranks."""
    first = plan.pp_rank(rank) * plan.ranks_per_stage
    return tuple(range(first, first + plan.ranks_per_stage))


def count_exchange(job: Job, plan: Plan, rank: int) -> BlockCollectives:
    """All-gather the token counts that an exchange needs."""
    ranks = group_of(plan.same_etp_rank_groups(), rank)
    if len(ranks) == 1:
        return BlockCollectives()
    destinations = sum(destination_counts(plan)) if plan.dispatch == "dedup" and plan.ep > 1 else 0
    counts_per_chunk = job.model.top_k * (job.model.experts + 1) + destinations
    num_bytes = _SCALAR_BYTES * (plan.chunks * counts_per_chunk + 1)
    return BlockCollectives(
        (CollectiveCall("counts", "all_gather", ranks, len(ranks) * num_bytes),)
    )


def all_to_all(
    name: str, ranks: tuple[int, ...], send_bytes: Sequence[int], receive_bytes: Sequence[int]
) -> BlockCollectives:
    """Exchange tokens among `ranks`, with `send_bytes` to and `receive_bytes` from each.

    Backward swaps the two directions.
    """
    if len(ranks) == 1:
        return BlockCollectives()
    sent, received = tuple(send_bytes), tuple(receive_bytes)
    return BlockCollectives(
        (CollectiveCall(name, "all_to_all", ranks, sum(sent), sent, received),),
        (CollectiveCall(name, "all_to_all", ranks, sum(received), received, sent),),
    )


def embedding_lookup(s: Sizes, plan: Plan, rank: int) -> BlockCollectives:
    """Exchange token counts, token ids and looked-up columns for a column-sharded embedding.

    Every rank sends its ids to all ranks, and receives its tokens' columns from each.
    """
    if s.embedding_shards == 1:
        return BlockCollectives()
    ranks, count = stage_ranks(plan, rank), s.embedding_shards
    tokens = [
        len(plan.sample_range(peer, s.lookup_tokens // s.sequence)) * s.sequence for peer in ranks
    ]
    row = s.model.hidden // count * s.stored_bytes
    counts = CollectiveCall("counts", "all_gather", ranks, count * _SCALAR_BYTES)
    ids = all_to_all(
        "ids", ranks, [s.tokens * _SCALAR_BYTES] * count, [n * _SCALAR_BYTES for n in tokens]
    )
    columns = all_to_all("columns", ranks, [n * row for n in tokens], [s.tokens * row] * count)
    backward = columns.backward if s.trainable.weights else ()
    return BlockCollectives((counts, *ids.forward, *columns.forward), backward)


def gather_tied_embedding(s: Sizes, plan: Plan, rank: int) -> BlockCollectives:
    """Gather the column shards of a tied weight for the head, and reduce-scatter its gradient."""
    if not s.gathers_tied_embedding:
        return BlockCollectives()
    ranks = stage_ranks(plan, rank)
    gathers = tuple(
        CollectiveCall("gather tied embedding", "all_gather", ranks, size)
        for size in s.table_message_bytes
    )
    scatters = tuple(
        CollectiveCall("reduce-scatter tied embedding", "reduce_scatter", ranks, size)
        for size in s.table_message_bytes
        if s.trainable.weights
    )
    return BlockCollectives(gathers, scatters)


def fsdp_all_gather(
    parameters: Sequence[Parameter], ranks: tuple[int, ...], element_bytes: int
) -> CollectiveCall:
    """Return the all-gather that unshards one FSDP group.

    Args:
        parameters: parameters of the group, full or TP-sharded.
        ranks: ranks that shard them.
        element_bytes: bytes per element.
    """
    shard_bytes = sum(local_size(p, len(ranks)) for p in parameters) * element_bytes
    return CollectiveCall(
        "parameters", "all_gather", ranks, shard_bytes * len(ranks), precedes_compute=True
    )


def fsdp_reduce_scatter(
    trainable: Sequence[Parameter],
    ranks: tuple[int, ...],
    dp_replicate_ranks: tuple[int, ...],
    element_bytes: int,
) -> tuple[CollectiveCall, tuple[CollectiveCall, ...]]:
    """Return the reduce-scatter of the gradients of `trainable`, and the all-reduce over replicas.

    The all-reduce runs once a step, over `dp_replicate_ranks`, which hold the same shard.
    """
    shard_bytes = sum(local_size(p, len(ranks)) for p in trainable) * element_bytes
    replica_reduce = (
        (CollectiveCall("replicas", "all_reduce", dp_replicate_ranks, shard_bytes),)
        if len(dp_replicate_ranks) > 1
        else ()
    )
    return CollectiveCall(
        "gradients", "reduce_scatter", ranks, shard_bytes * len(ranks)
    ), replica_reduce


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
        ("targets", stage_ranks(plan, rank), 1), ("norm", all_ranks, 1), ("losses", all_ranks, 4),
        ("loads", pipeline_ranks, loads),
    ):  # fmt: skip
        if len(ranks) > 1:
            yield CollectiveCall(name, "all_reduce", ranks, numbers * _SCALAR_BYTES)
