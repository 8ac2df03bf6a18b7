"""Expert loads: tokens that each expert receives from each rank, from a recorded load or even
routing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moesaic.base.errors import ConfigError
from moesaic.facts.job import Job
from moesaic.facts.plan import Plan
from moesaic.facts.workload.sizes import round_up

CountArray = NDArray[np.int64]

SLOT_INDEX_BYTES = 4
_ALIGNMENT_BYTES = 16
"""Alignment of a deduplicated token, in bytes."""


def expert_counts(
    job: Job, plan: Plan, load: ArrayLike | None, ranks: Sequence[int] | None = None
) -> CountArray:
    """Return assignments of one layer over a global micro-batch, without drops, [ranks, experts].

    In a pipeline, the ranks are those that have the layer. An expert TP group counts as one rank,
    as it gathers its tokens.

    Args:
        job: the job.
        plan: placement of samples and sequence shards.
        load: relative load [experts], spread alike over all ranks, or assignments [ranks, experts].
            None for even routing.
        ranks: ranks of one stage to return; None for all that count.
    """
    ranks = range(0, plan.ranks_per_stage, plan.etp) if ranks is None else ranks
    array = np.ones(plan.experts, np.int64) if load is None else np.asarray(load)
    num_ranks = plan.ranks_per_stage // plan.etp
    if array.shape == (num_ranks, plan.experts):
        return array[[rank % plan.ranks_per_stage // plan.etp for rank in ranks]].astype(np.int64)
    if array.shape != (plan.experts,):
        raise ConfigError(
            f"a load of shape {array.shape} does not fit {plan.experts} experts on {num_ranks} "
            f"ranks: give it by expert [{plan.experts}], or [{num_ranks}, {plan.experts}]"
        )
    if not (array.sum() > 0 and array.min() >= 0):
        raise ConfigError(
            "a load has no assignments or a negative count: give counts of at least 0, some above 0"
        )
    batch = job.train.batch // job.train.micro_batches
    choices = job.data.sequence * plan.etp // plan.tp * job.model.top_k
    assignments = [len(plan.sample_range(rank, batch)) * choices for rank in ranks]
    distinct, of_rank = np.unique(assignments, return_inverse=True)
    ends = np.outer(distinct, array.cumsum() / array.sum())
    counts: CountArray = np.diff(np.rint(ends), prepend=0).astype(np.int64)
    return counts[of_rank]


def destination_counts(plan: Plan) -> list[int]:
    """Return the number of destinations: ranks of an EP group, then hosts if dispatch has two
    levels."""
    return [plan.ep, plan.dispatch_hosts] if plan.num_exchanges > 1 else [plan.ep]


def _expected_dedup_tokens(job: Job, assigned: CountArray, totals: CountArray) -> CountArray:
    """Return the expected number of deduplicated tokens, [ranks, destinations].

    Choices follow the load independently, except that no token chooses an expert twice, and that
    it may choose among `model.top_expert_groups` of the groups only; each destination has
    consecutive experts. `assigned` are the assignments that are sent, [ranks, destinations], and
    `totals` all those of each rank, [ranks, 1].
    """
    top_k, groups, chosen = job.model.top_k, job.model.expert_groups, job.model.top_expert_groups
    experts = job.model.experts * chosen // groups
    fraction, probability_none = assigned / np.maximum(totals, 1), np.zeros(assigned.shape)
    own_groups = max(1, groups // assigned.shape[1])
    for own in range(max(0, own_groups + chosen - groups), min(own_groups, chosen) + 1):
        # The token may choose among `own` of the destination's groups.
        ways = math.comb(own_groups, own) * math.comb(groups - own_groups, chosen - own)
        none = np.full(assigned.shape, ways / math.comb(groups, chosen))
        scaled = fraction * groups / chosen * own / own_groups
        for choice in range(top_k):  # Each choice is among the experts not chosen yet.
            none *= 1 - np.minimum(scaled * experts / (experts - choice), 1.0)
        probability_none += none
    tokens = totals // top_k
    expected = np.rint(tokens * (1 - probability_none)).astype(np.int64)
    lower = -(-assigned // min(top_k, job.model.experts // assigned.shape[1]))
    clipped: CountArray = np.clip(expected, lower, np.maximum(np.minimum(assigned, tokens), lower))
    return clipped


def dedup_token_bytes(hidden: int, top_k: int, element_bytes: int) -> tuple[int, int]:
    """Return bytes of a deduplicated token with weights and slots, and the offset of its slots."""
    slots_at = round_up((hidden + top_k) * element_bytes, SLOT_INDEX_BYTES)
    return round_up(slots_at + top_k * SLOT_INDEX_BYTES, _ALIGNMENT_BYTES), slots_at


def split_evenly(total: int, parts: int) -> list[int]:
    """Split `total` into `parts` numbers, the larger ones first."""
    return [total // parts + (index < total % parts) for index in range(parts)]


class Exchange(NamedTuple):
    """Tokens of one expert layer that one rank exchanges: one per expert, or deduplicated."""

    group: tuple[int, ...]
    """Ranks of the exchange."""
    send_tokens: list[int]
    """Tokens sent to each rank of the group."""
    receive_tokens: list[int]
    """Tokens received from each rank of the group."""
    num_tokens: int
    """Tokens before the exchange: the rank's own, or those of the exchange before."""

    def chunk(self, index: int, chunks: int) -> Exchange:
        """Return chunk `index` of `chunks`, of evenly split tokens."""
        send, receive, (num_tokens,) = (
            [split_evenly(number, chunks)[index] for number in counts]
            for counts in (self.send_tokens, self.receive_tokens, [self.num_tokens])
        )
        return Exchange(self.group, send, receive, num_tokens)

    @property
    def num_sent(self) -> int:
        """Tokens sent to all ranks."""
        return sum(self.send_tokens)

    @property
    def num_received(self) -> int:
        """Tokens received from all ranks."""
        return sum(self.receive_tokens)


class RoutedTokens(NamedTuple):
    """Routed tokens of one rank in one expert layer."""

    num_sent: int
    """Assignments that the rank dispatches, without separate local ones."""
    slot_tokens: list[int]
    """Tokens received at each slot, without separate local ones."""
    exchanges: tuple[Exchange, ...]
    """Exchanges of the dispatch; none if tokens stay on the rank."""
    is_dedup: bool
    """True if each token is sent once per destination rank."""
    num_chunks: int = 1
    """Chunks that are dispatched one after another."""
    local_slot_tokens: tuple[int, ...] = ()
    """Local tokens at each slot, if computed separately (`layout.overlap_local`)."""

    @property
    def is_all_to_all(self) -> bool:
        """True if each token is sent once per chosen expert."""
        return bool(self.exchanges) and not self.is_dedup

    @property
    def num_local_chunks(self) -> int:
        """Chunks of local tokens, computed before, between and after the dispatched chunks."""
        return (self.num_chunks + 1) * bool(self.local_slot_tokens)

    def split_chunks(self) -> list[RoutedTokens]:
        """Return each dispatched chunk, of evenly split tokens."""
        if self.num_chunks == 1:
            return [self._replace(local_slot_tokens=())]
        return [
            RoutedTokens(
                split_evenly(self.num_sent, self.num_chunks)[index],
                [split_evenly(tokens, self.num_chunks)[index] for tokens in self.slot_tokens],
                tuple(exchange.chunk(index, self.num_chunks) for exchange in self.exchanges),
                self.is_dedup,
            )
            for index in range(self.num_chunks)
        ]

    def local_chunks(self) -> list[RoutedTokens]:
        """Return each chunk of local tokens, in slot order."""
        chunks, start, ends = [], 0, np.cumsum(self.local_slot_tokens)
        for size in split_evenly(sum(self.local_slot_tokens), self.num_local_chunks):
            bounds = np.clip(ends, start, start + size)
            slots = np.diff(bounds, prepend=start).tolist()
            chunks.append(RoutedTokens(size, slots, (), is_dedup=False))
            start += size
        return chunks

    def compute_order(self) -> list[RoutedTokens]:
        """Return all chunks in the order in which they are computed: local chunks before, between
        and after the others."""
        pairs = zip_longest(self.local_chunks(), self.split_chunks())
        return [chunk for pair in pairs for chunk in pair if chunk is not None]


def routed_by_layer(
    job: Job,
    plan: Plan,
    rank: int,
    loads: Sequence[ArrayLike] | None,
    layers: Sequence[int] | None = None,
) -> list[RoutedTokens]:
    """Return the routed tokens of `rank` in each of `layers` with experts; None for all.

    `loads` has one load per expert layer, as `expert_counts` takes it; None for even routing.
    """
    every = job.model.expert_layers
    layers = every if layers is None else layers
    if layers and loads is None and not plan.expert_placement_by_layer:
        return [_route(job, plan, rank, layers[0], None)] * len(layers)
    by_layer: Sequence[ArrayLike | None] = [None] * len(every) if loads is None else loads
    load_of = dict(zip(every, by_layer, strict=True))
    return [_route(job, plan, rank, layer, load_of[layer]) for layer in layers]


def _route(job: Job, plan: Plan, rank: int, layer: int, load: ArrayLike | None) -> RoutedTokens:
    """Return the routed tokens of `rank` in one layer."""
    group = plan.ep_groups().of(rank)
    index = group.index(rank)
    counts = expert_counts(job, plan, load, group)
    totals = counts.sum(axis=1, keepdims=True)
    # Assignments by source, destination and slot.
    slots = counts[:, plan.slot_experts(layer)].reshape(plan.ep, plan.ep, -1)
    local: list[int] = []
    if plan.overlap_local:
        local = slots[index, index].tolist()
        slots[range(plan.ep), range(plan.ep)] = 0
    is_dedup = plan.dispatch == "dedup" and plan.ep > 1
    num_sent, by_rank = int(slots[index].sum()), slots.sum(axis=2)
    tokens = int(totals[index, 0]) // job.model.top_k if is_dedup else num_sent
    exchanges: tuple[Exchange, ...] = ()
    if plan.ep > 1:
        by_level = [
            by_rank.reshape(plan.ep, number, -1).sum(axis=2) for number in destination_counts(plan)
        ]
        if is_dedup:
            by_level = [_expected_dedup_tokens(job, one, totals) for one in by_level]
            # A host gets at least as many as each of its ranks.
            most = by_level[0].reshape(*by_level[-1].shape, -1).max(axis=2)
            by_level[-1] = np.maximum(by_level[-1], most)
        exchanges = _exchanges(plan, rank, index, by_level, tokens)
    return RoutedTokens(
        num_sent, slots[:, index].sum(axis=0).tolist(), exchanges, is_dedup, plan.chunks,
        tuple(local),
    )  # fmt: skip


def _exchanges(
    plan: Plan, rank: int, index: int, by_level: Sequence[CountArray], tokens: int
) -> tuple[Exchange, ...]:
    """Return the exchanges of `rank`: one, or one between hosts and one inside the host.

    `index` is that of the rank in its EP group. `by_level` are tokens by source and destination
    rank, then by source and destination host. `tokens` are those before the first exchange.
    """
    to_ranks, *to_hosts = by_level
    groups = [groups.of(rank) for groups in plan.exchange_groups()]
    hosts, found = plan.dispatch_hosts if to_hosts else 1, list[Exchange]()
    host, local_rank = divmod(index, plan.ep // hosts)
    for counts in to_hosts:
        receive = counts.reshape(hosts, -1, hosts)[:, local_rank, host].tolist()
        found.append(Exchange(groups[0], counts[index].tolist(), receive, tokens))
        tokens = sum(receive)
    # By source host and rank in it, then by destination host and rank in it.
    ranks = to_ranks.reshape(hosts, -1, hosts, plan.ep // hosts)
    send = ranks[:, local_rank, host].sum(axis=0).tolist()
    receive = ranks[:, :, host, local_rank].sum(axis=0).tolist()
    return (*found, Exchange(groups[-1], send, receive, tokens))
