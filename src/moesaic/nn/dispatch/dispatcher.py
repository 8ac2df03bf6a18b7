"""Dispatcher of one layer: counts, slots, and the exchange of tokens with their experts.

`count` gathers the counts of the EP group; with capacity in training, first those of all ranks,
which drop tokens in global order. `assign_slots` finds the slot of each choice: its expert's, or a
replica's.
`start_dispatch` starts the exchange. Rows have the order of (slot, global token) in every layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import islice
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.dist.collectives import all_gather
from moesaic.facts.balance import BalanceDecision
from moesaic.facts.job.train import MatmulBackend
from moesaic.facts.workload.loads import split_evenly
from moesaic.kernels import fused
from moesaic.nn.dispatch.all_to_all import (
    AllToAll,
    DispatchGroups,
    ExpertInputs,
    LocalDispatch,
    OutgoingTokens,
    TokenDispatch,
    make_permutation,
)
from moesaic.nn.dispatch.dedup import DedupAllToAll, DedupTraffic, destination_mask
from moesaic.nn.dispatch.hierarchical import HierarchicalAllToAll, HierarchicalDedup
from moesaic.nn.dispatch.permute import Permutation
from moesaic.nn.dispatch.placement import ReplicaPlacement
from moesaic.nn.experts.bank import ExpertFunction
from moesaic.nn.experts.replicas import ExpertPlacement
from moesaic.nn.router import NO_EXPERT


@dataclass(frozen=True)
class DispatchCounts:
    """Assignments of one layer and micro-batch; R ranks of the EP group, C chunks, K choices,
    E experts."""

    experts_TK: Tensor
    """Experts of this rank's tokens; NO_EXPERT where the router or capacity dropped the choice."""
    requested_KE: Tensor
    """Assignments that this rank's tokens requested, on their device; [1, E] (all choices) if
    `token_slots` is set."""
    counts_RCE: Tensor
    """Assignments of each rank and chunk after drops; on the host, or on the tokens' device if
    counted there (`token_slots` is set)."""
    dedup: list[DedupTraffic]
    """Destinations of deduplicated tokens by chunk; empty without deduplication."""
    token_slots: TokenSlots | None = None
    """Slots of the choices, if counting on the device has found them already."""

    @property
    def counts_RE(self) -> Tensor:
        """Assignments of each rank after drops."""
        return self.counts_RCE.sum(1) if self.token_slots is None else self.counts_RCE[:, 0]


@dataclass(frozen=True)
class TokenSlots:
    """Slots of the choices; S slots of the EP group."""

    slots_TK: Tensor
    """Slot of each choice of this rank's tokens; S for none."""
    counts_RCS: Tensor
    """Rows of each rank and chunk for each slot; on the host, or with the tokens if `permutation`
    is set."""
    dedup: list[DedupTraffic]
    """Destinations of deduplicated tokens by chunk; empty without deduplication."""
    permutation: Permutation | None = None
    """Permutation of all tokens to rows, if one rank alone has found it on the device."""

    @property
    def num_slots(self) -> int:
        """Slots of the EP group."""
        return self.counts_RCS.shape[-1]


class Dispatcher:
    """Token dispatch of one layer. It has no trainable tensors."""

    def __init__(
        self,
        num_experts: int,
        groups: DispatchGroups,
        capacity: float | None = None,
        slot_experts: Sequence[int] | None = None,
        *,
        dedup: bool = False,
        num_chunks: int = 1,
        overlap_local: bool = False,
    ) -> None:
        """Set up the dispatch method.

        Args:
            num_experts: experts of the layer.
            groups: process groups and transports.
            capacity: capacity factor of training; None: no token is dropped.
            slot_experts: expert of each slot of the EP group, rank by rank; by default in order.
            dedup: send each token once per destination rank instead of once per expert.
            num_chunks: chunks of a rank's tokens; one is computed while another is exchanged.
            overlap_local: compute local rows, split in pieces, while chunks are exchanged.
        """
        self.num_chunks, self._num_local_pieces = num_chunks, (num_chunks + 1) * overlap_local
        self.num_experts, self.groups, self.capacity = num_experts, groups, capacity
        self._allows_device_counts = (
            groups.ep_group is None
            and self.num_expert_calls == 1
            and num_experts <= fused.MAX_SORT_SLOTS
        )
        self.set_slot_experts(slot_experts or range(num_experts))
        self._num_destinations = _count_destinations(groups) if dedup else []

    def set_slot_experts(self, slot_experts: Sequence[int]) -> None:
        """Set the expert of each slot of the EP group, rank by rank."""
        self._slot_experts = (
            None if list(slot_experts) == list(range(self.num_experts)) else list(slot_experts)
        )
        self.placement = ExpertPlacement(tuple(slot_experts), self.groups.ep_size)
        self._slot_of_expert_E: Tensor | None = None

    def drops_tokens(self, *, training: bool) -> bool:
        """Return whether capacity may drop choices."""
        return training and self.capacity is not None

    def keeps_counts_on_device(self, *, training: bool) -> bool:
        """Return whether counts may stay on the device if all choices are complete."""
        return self._allows_device_counts and not self.drops_tokens(training=training)

    @property
    def num_expert_calls(self) -> int:
        """Calls of the expert function in one forward pass."""
        return self.num_chunks + self._num_local_pieces

    def count(
        self,
        experts_TK: Tensor,
        *,
        training: bool,
        allow_device_counts: bool = False,
        backend: MatmulBackend = "torch",
    ) -> DispatchCounts:
        """Count assignments in the EP group; in training first drop those beyond capacity.

        Without other EP ranks, counts stay on the device, without a host sync, if choices are
        complete and the matmul kernels allow it.

        Args:
            experts_TK: chosen experts of this rank's tokens.
            training: whether capacity applies.
            allow_device_counts: no choice is NO_EXPERT, and neither balancing nor a
                loss distinguishes choices.
            backend: matmul kernels of the experts; "torch" needs counts on the host.
        """
        if (
            allow_device_counts
            and backend != "torch"
            and self.keeps_counts_on_device(training=training)
        ):
            return self.count_on_device(experts_TK)
        requested_CKE = self._count_choices(experts_TK)
        counts_CE = requested_CKE.sum(1)
        if self.drops_tokens(training=training):
            experts_TK = self._drop_beyond_capacity(experts_TK, requested_CKE.sum(0))
            counts_CE = self._count_choices(experts_TK).sum(1)
        slots_TK = self._to_slots(_replace_missing(experts_TK, self.num_experts))
        destinations = self._destinations(slots_TK, self.num_experts)
        sent = torch.cat((counts_CE.flatten(), *destinations.counts))
        gathered_R = all_gather(sent, self.groups.ep_group).cpu()
        counts_R, dedup_R = gathered_R.split([counts_CE.numel(), destinations.num_counts], dim=1)
        counts_RCE = counts_R.view(-1, *counts_CE.shape)
        dedup = destinations.dedup_traffic(dedup_R)
        return DispatchCounts(experts_TK, requested_CKE.sum(0), counts_RCE, dedup)

    def _count_choices(self, experts_TK: Tensor) -> Tensor:
        """Return the assignments of this rank's tokens by chunk, choice and expert, [C, K, E]."""
        top_k, num_bins = experts_TK.shape[1], self.num_experts + 1
        bin_TK = _replace_missing(experts_TK, self.num_experts)
        bin_TK = bin_TK + torch.arange(top_k, device=bin_TK.device) * num_bins
        counts = [
            torch.bincount(chunk.reshape(-1), minlength=top_k * num_bins)
            for chunk in self._split_chunks(bin_TK)
        ]
        return torch.stack(counts).view(-1, top_k, num_bins)[..., : self.num_experts]

    def _drop_beyond_capacity(self, experts_TK: Tensor, requested_KE: Tensor) -> Tensor:
        """Return the choices without those beyond capacity, in the global order of tokens."""
        assert self.capacity is not None
        groups, (num_tokens, top_k) = self.groups, experts_TK.shape
        sent = torch.cat((requested_KE.flatten(), requested_KE.new_tensor([num_tokens])))
        gathered_R = all_gather(sent, groups.all_group).cpu()
        total = int(gathered_R[:, -1].sum())
        share = round(self.capacity * total * top_k / self.num_experts, 9)
        limit = math.ceil(min(share, total * top_k))
        kept_RKE = _fit_capacity(gathered_R[:, :-1].view(-1, *requested_KE.shape), limit)
        rank = 0 if groups.all_group is None else groups.all_group.rank()
        return _drop_overflow(experts_TK, kept_RKE[rank], self.num_experts)

    def count_on_device(self, experts_TK: Tensor) -> DispatchCounts:
        """Count assignments and find slots on the device, without a host sync or other EP
        ranks."""
        slots_TK = self._to_slots(experts_TK)
        counts_S, order, rows = fused.sort_by_slot(slots_TK.reshape(-1), self.num_experts)
        permutation = Permutation(counts_S, order, rows.view(slots_TK.shape))
        counts_E = counts_S
        if self._slot_of_expert_E is not None:
            counts_E = counts_S[self._slot_of_expert_E[:-1]]
        token_slots = TokenSlots(slots_TK, counts_S.view(1, 1, -1), [], permutation)
        return DispatchCounts(
            experts_TK, counts_E.view(1, -1), counts_E.view(1, 1, -1), [], token_slots
        )

    def assign_slots(
        self, counts: DispatchCounts, balance: BalanceDecision | None = None
    ) -> TokenSlots:
        """Return the slot of each choice, on the owner rank or where `balance` reroutes it."""
        if counts.token_slots is not None:
            assert balance is None, "slots were assigned on the device before balancing"
            return counts.token_slots
        experts_TK = _replace_missing(counts.experts_TK, self.num_experts)
        if balance is None or not len(balance.replicas):
            counts_RCS = counts.counts_RCE
            if self._slot_experts is not None:
                counts_RCS = counts_RCS[..., self._slot_experts]
            return TokenSlots(self._to_slots(experts_TK), counts_RCS, counts.dedup)
        placement = ReplicaPlacement(self.placement, balance, counts.counts_RCE.numpy())
        counts_RCS, ep_rank = torch.from_numpy(placement.slot_counts()), self.groups.ep_rank
        chunks = enumerate(self._split_chunks(experts_TK))
        slots_TK = torch.cat(
            [placement.assign_slots(part, ep_rank, chunk) for chunk, part in chunks]
        )
        destinations = self._destinations(slots_TK, counts_RCS.shape[-1])
        dedup_R = counts_RCS.new_zeros((len(counts_RCS), 0))
        if destinations.num_counts:
            dedup_R = all_gather(torch.cat(destinations.counts), self.groups.ep_group).cpu()
        return TokenSlots(slots_TK, counts_RCS, destinations.dedup_traffic(dedup_R))

    def _destinations(self, slots_TK: Tensor, num_slots: int) -> _Destinations:
        """Return the destinations of this rank's deduplicated tokens, given their slots."""
        if self._num_destinations and self._num_local_pieces:
            slots_TK = slots_TK.masked_fill(self.groups.is_local(slots_TK, num_slots), num_slots)
        masks = [destination_mask(slots_TK, num_slots, number) for number in self._num_destinations]
        return _Destinations(
            counts=[part.sum(0) for one in masks for part in self._split_chunks(one)],
            masks=self._split_chunks(torch.cat(masks, dim=1)) if masks else (),
            sizes=[self.num_chunks * number for number in self._num_destinations],
            num_chunks=self.num_chunks,
        )

    def start_dispatch(
        self, tokens_TH: Tensor, weights_TK: Tensor, token_slots: TokenSlots
    ) -> ChunkedDispatch:
        """Start the exchange of the first chunk, and return the dispatch of all chunks."""
        if token_slots.permutation is not None:
            inputs = tokens_TH, token_slots.permutation, weights_TK.to(tokens_TH.dtype)
            return ChunkedDispatch([partial(LocalDispatch, inputs)])
        slots_TK, counts_RCS, num_slots = (
            token_slots.slots_TK,
            token_slots.counts_RCS,
            token_slots.num_slots,
        )
        present_TK = slots_TK < num_slots
        local_inputs: Iterator[ExpertInputs] = iter(())
        if self._num_local_pieces:
            is_local_TK = self.groups.is_local(slots_TK, num_slots)
            local_inputs = self._local_inputs(
                tokens_TH, weights_TK, slots_TK, is_local_TK, num_slots
            )
            slots_TK = slots_TK.masked_fill(is_local_TK, num_slots)
            present_TK = present_TK & ~is_local_TK
            counts_RCS = self.groups.remote_counts(counts_RCS)
        columns = tokens_TH, _mask_weights(weights_TK, present_TK, tokens_TH), slots_TK, present_TK
        chunks = zip(
            *(self._split_chunks(column) for column in columns), counts_RCS.unbind(1), strict=True
        )
        dedup: Sequence[DedupTraffic | None] = token_slots.dedup or [None] * self.num_chunks
        chunk_starts = [
            partial(self._start_chunk, OutgoingTokens(*chunk), traffic)
            for chunk, traffic in zip(chunks, dedup, strict=True)
        ]
        return ChunkedDispatch(chunk_starts, local_inputs)

    def _local_inputs(
        self,
        tokens_TH: Tensor,
        weights_TK: Tensor,
        slots_TK: Tensor,
        is_local_TK: Tensor,
        num_slots: int,
    ) -> Iterator[ExpertInputs]:
        """Yield the inputs of this rank's own experts in pieces with equal numbers of rows.

        A piece may end within a slot; most slots lie in one piece. The permutation is built when
        the first piece is requested.
        """
        local = self.groups.local_slots(num_slots)
        slots_TK = torch.where(is_local_TK, slots_TK - local.start, len(local))
        counts_S = torch.bincount(slots_TK.reshape(-1), minlength=len(local) + 1)[:-1].cpu()
        permutation, first = make_permutation(slots_TK, is_local_TK, counts_S), 0
        for num_rows in split_evenly(int(counts_S.sum()), self._num_local_pieces):
            piece = permutation.slice_rows(first, first + num_rows)
            assert piece.present_NK is not None
            yield tokens_TH, piece, _mask_weights(weights_TK, piece.present_NK, tokens_TH)
            first += num_rows

    def _start_chunk(self, outgoing: OutgoingTokens, dedup: DedupTraffic | None) -> TokenDispatch:
        if not self.groups.transports:
            return LocalDispatch(
                (outgoing.tokens_TH, outgoing.permutation(self.groups.ep_rank), outgoing.weights_TK)
            )
        is_flat = len(self.groups.transports) == 1
        if dedup is None:
            return (AllToAll if is_flat else HierarchicalAllToAll)(outgoing, self.groups)
        return (DedupAllToAll if is_flat else HierarchicalDedup)(outgoing, self.groups, dedup)

    def _split_chunks(self, tokens: Tensor) -> Sequence[Tensor]:
        return (
            (tokens,)
            if self.num_chunks == 1
            else tokens.split(split_evenly(len(tokens), self.num_chunks))
        )

    def _to_slots(self, experts: Tensor) -> Tensor:
        """Return the slot of each expert; `num_experts` maps to the number of slots (none)."""
        if self._slot_experts is None:
            return experts
        if self._slot_of_expert_E is None or self._slot_of_expert_E.device != experts.device:
            slots = torch.tensor([*self._slot_experts, self.num_experts], device=experts.device)
            self._slot_of_expert_E = slots.argsort()
        return self._slot_of_expert_E[experts]


class _Destinations(NamedTuple):
    """Destinations of this rank's deduplicated tokens, before counts are gathered."""

    counts: list[Tensor]
    """Tokens for each destination: by level (ranks, hosts), then by chunk."""
    masks: Sequence[Tensor]
    """Mask of the destinations by chunk, [T, P]; empty without deduplication."""
    sizes: list[int]
    """Counts per level, over all chunks."""
    num_chunks: int

    @property
    def num_counts(self) -> int:
        """Number of counts that each rank contributes to the all-gather."""
        return sum(self.sizes)

    def dedup_traffic(self, counts_R: Tensor) -> list[DedupTraffic]:
        """Return the traffic of each chunk, given the `counts` of all ranks."""
        if not self.masks:
            return []
        levels = counts_R.split(self.sizes, dim=1)
        counts_RCP = torch.cat([one.view(len(one), self.num_chunks, -1) for one in levels], dim=2)
        chunks = zip(self.masks, counts_RCP.unbind(1), strict=True)
        return [DedupTraffic(*chunk) for chunk in chunks]


class ChunkedDispatch:
    """Dispatch of one layer's tokens in chunks.

    While experts compute one chunk, the next one arrives and the results of the previous one
    return. Backward overlaps in the same way. At most one chunk travels in each direction, so that
    the awaited one has the links to itself. Local inputs are computed during the first exchange,
    between chunks, and during the last exchange.
    """

    def __init__(
        self,
        chunk_starts: Sequence[Callable[[], TokenDispatch]],
        local_inputs: Iterable[ExpertInputs] = (),
    ) -> None:
        """Start the first chunk; `local_inputs` is empty or has one piece more than chunks."""
        first, *self._chunk_starts = chunk_starts
        self._local_inputs = iter(local_inputs)
        self._incoming = first()

    def run_experts(self, compute: ExpertFunction) -> Tensor:
        """Run the experts on all chunks, and return the weighted sum of each token's results."""
        remote, local, previous = list[Tensor](), list[Tensor](), list[TokenDispatch]()
        for start_next in (*self._chunk_starts, None):
            current = self._incoming
            local += self._run_local(compute)
            inputs = current.finish_dispatch()
            if start_next is not None:
                self._incoming = start_next()
            results = compute(*inputs)
            remote += [one.finish_combine() for one in previous]
            current.start_combine(results)
            previous = [current]
        local += self._run_local(compute)
        remote.append(current.finish_combine())
        combined = remote[0] if len(remote) == 1 else torch.cat(remote)
        return reduce(torch.add, local, combined)

    def _run_local(self, compute: ExpertFunction) -> list[Tensor]:
        """Run the experts on the next piece of local inputs, if there is one."""
        return [compute(*piece) for piece in islice(self._local_inputs, 1)]


def _replace_missing(experts_TK: Tensor, value: int) -> Tensor:
    """Return the experts, with `value` where a choice has none."""
    return torch.where(experts_TK == NO_EXPERT, value, experts_TK)


def _mask_weights(weights_TK: Tensor, present_TK: Tensor, like: Tensor) -> Tensor:
    """Return the weights in the dtype of `like`, 0 where a choice has no slot."""
    return torch.where(present_TK, weights_TK, 0.0).to(like.dtype)


def _count_destinations(groups: DispatchGroups) -> list[int]:
    """Return the number of EP ranks and, if dispatch has two levels, of hosts."""
    if not groups.transports:
        return []
    first, *more = groups.transports
    return [groups.ep_size, *([first.group.size()] if more else [])]


def _fit_capacity(requested_RKE: Tensor, limit: int) -> Tensor:
    """Return the kept assignments, [R, K, E]: first choices of all ranks before second choices."""
    ranks, top_k, experts = requested_RKE.shape
    queue = requested_RKE.transpose(0, 1).reshape(top_k * ranks, experts)
    before = queue.cumsum(0) - queue
    kept = torch.minimum(queue, (limit - before).clamp(min=0))
    return kept.view(top_k, ranks, experts).transpose(0, 1)


def _drop_overflow(experts_TK: Tensor, kept_KE: Tensor, num_experts: int) -> Tensor:
    """Return the choices, with all but the first `kept_KE` tokens of a (choice, expert) dropped."""
    result = experts_TK.clone()
    for choice in range(experts_TK.shape[1]):
        column = _replace_missing(experts_TK[:, choice], num_experts)
        order = column.argsort(stable=True)
        ordered = column[order]
        starts = torch.searchsorted(ordered, torch.arange(num_experts + 1, device=column.device))
        position = torch.arange(len(column), device=column.device) - starts[ordered]
        limits = F.pad(kept_KE[choice], (0, 1)).to(column.device)
        result[order[position >= limits[ordered]], choice] = NO_EXPERT
    return result
