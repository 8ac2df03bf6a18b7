"""All-to-all dispatch: each token travels once per chosen expert, straight to the expert's rank.

The module also holds the types and permutation builders that all dispatch methods share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from moesaic.dist.all_to_all import PendingRows, Transport
from moesaic.dist.world import Group
from moesaic.nn.dispatch.permute import Permutation, invert_permutation, unpermute
from moesaic.nn.tensor_parallel import NO_TP, TensorParallel

_BLOCK_ROWS = 1024


@dataclass(frozen=True)
class DispatchGroups:
    """Process groups and transports of dispatch, as this rank sees them.

    With expert tensor parallelism, the TP ranks of an expert gather their tokens before dispatch.
    All groups then have only ranks with this rank's TP index.
    """

    ep_rank: int = 0
    ep_size: int = 1
    ep_group: Group | None = None
    all_group: Group | None = None
    """All ranks that dispatch tokens of the layer: EP groups one after the other."""
    transports: tuple[Transport, ...] = ()
    """Transports between EP ranks, in order: none (one rank), one (flat), or two (inter-host, then
    intra-host)."""
    replica_transport: Transport | None = None
    """Transport of expert replicas between EP ranks; None without balancing."""
    tp: TensorParallel = NO_TP
    """Ranks that shard the matrices of the same experts."""

    def __deepcopy__(self, memo: object) -> DispatchGroups:
        """Return this object: copies of a layer share its groups."""
        return self

    def local_slot_counts(self, counts_RS: Tensor) -> Tensor:
        """Return the rows of each rank for each slot of this rank, [ranks, slots]."""
        local = self.local_slots(counts_RS.shape[1])
        return counts_RS[:, local.start : local.stop]

    def local_slots(self, num_slots: int) -> range:
        """Return this rank's slots among the group's `num_slots`."""
        return self._slots_of_rank(self.ep_rank, num_slots)

    def _slots_of_rank(self, rank: int, num_slots: int) -> range:
        slots_per_rank = num_slots // self.ep_size
        return range(rank * slots_per_rank, (rank + 1) * slots_per_rank)

    def is_local(self, slots_TK: Tensor, num_slots: int) -> Tensor:
        """Return a mask of the slots that are on this rank; the group has `num_slots`."""
        local = self.local_slots(num_slots)
        return (slots_TK >= local.start) & (slots_TK < local.stop)

    def remote_counts(self, counts_RCS: Tensor) -> Tensor:
        """Return a copy of the counts, with zeros where a rank sends to its own slots."""
        counts_RCS = counts_RCS.clone()
        for rank in range(self.ep_size):
            local = self._slots_of_rank(rank, counts_RCS.shape[-1])
            counts_RCS[rank, :, local.start : local.stop] = 0
        return counts_RCS


class OutgoingTokens(NamedTuple):
    """Tokens of this rank and their slots; T tokens, K choices, R ranks and S slots of the EP
    group."""

    tokens_TH: Tensor
    weights_TK: Tensor
    slots_TK: Tensor
    """Slot of each choice; S for none."""
    present_TK: Tensor
    """Mask of the choices that have a slot."""
    counts_RS: Tensor
    """Rows of each rank for each slot, on the host."""

    def permutation(self, rank: int) -> Permutation:
        """Return the permutation from this rank's tokens to rows sorted by slot."""
        counts_S = self.counts_RS[rank]
        return make_permutation(self.slots_TK, self.present_TK, counts_S)


def make_permutation(
    slots_NK: Tensor, present_NK: Tensor, counts_S: Tensor, order_N: Tensor | None = None
) -> Permutation:
    """Return the permutation from tokens to rows sorted by (slot, token).

    Args:
        slots_NK: slot of each choice; the number of slots for none.
        present_NK: mask of the choices that have a slot.
        counts_S: rows of each slot.
        order_N: order in which tokens rank within a slot; by default their index.
    """
    ranked_NK = slots_NK if order_N is None else slots_NK[order_N]
    order = ranked_NK.reshape(-1).argsort(stable=True)[: int(counts_S.sum())]
    if order_N is not None:
        choices = slots_NK.shape[1]
        order = order_N[order // choices] * choices + order % choices
    rows_NK = invert_permutation(order, slots_NK.numel()).view(slots_NK.shape)
    return Permutation(counts_S, order, rows_NK, present_NK)


ExpertInputs = tuple[Tensor, Permutation, Tensor | None]
"""Tokens or rows for experts, their permutation, and weights if experts sum results by token."""


class TokenDispatch(Protocol):
    """Exchange of tokens with their experts; the constructor starts it."""

    def finish_dispatch(self) -> ExpertInputs:
        """Wait for the tokens, and return the inputs of this rank's experts."""

    def start_combine(self, results: Tensor) -> None:
        """Start to send back the results of the inputs."""

    def finish_combine(self) -> Tensor:
        """Wait, and return the weighted sum of each token's results, [T, H]."""


class LocalDispatch:
    """Token dispatch on a single rank. Experts read the tokens in place and sum their results."""

    def __init__(self, inputs: ExpertInputs) -> None:
        self._inputs = inputs

    def finish_dispatch(self) -> ExpertInputs:
        """Return the tokens, uncopied."""
        return self._inputs

    def start_combine(self, results: Tensor) -> None:
        """Keep the results, which the experts have summed by token."""
        self._results = results

    def finish_combine(self) -> Tensor:
        """Return the results, [T, H]."""
        return self._results


class AllToAll:
    """Flat dispatch that sends each token once per chosen expert."""

    def __init__(self, outgoing: OutgoingTokens, groups: DispatchGroups) -> None:
        """Start the exchange of tokens."""
        (self._transport,), self._weights_TK = groups.transports, outgoing.weights_TK
        self._permutation = outgoing.permutation(groups.ep_rank)
        received_RS = groups.local_slot_counts(outgoing.counts_RS)
        self._send = self._permutation.counts.view(-1, received_RS.shape[1]).sum(1).tolist()
        self._receive = received_RS.sum(1).tolist()
        rows = Gather.apply(outgoing.tokens_TH, *self._permutation[1:])
        self._pending_tokens = PendingRows(rows, self._transport, self._send, self._receive)
        order = block_transpose_index(received_RS, 1, 0).to(outgoing.tokens_TH.device)
        self._received_permutation = Permutation(received_RS.sum(0), order)

    def finish_dispatch(self) -> ExpertInputs:
        """Wait, and return rows with one expert each."""
        return self._pending_tokens.wait(), self._received_permutation, None

    def start_combine(self, results: Tensor) -> None:
        """Start to send back the result of each row."""
        self._pending_results = PendingRows(results, self._transport, self._receive, self._send)

    def finish_combine(self) -> Tensor:
        """Wait, and return the weighted sum of each token's results, [T, H]."""
        results = self._pending_results.wait()
        combined: Tensor = Combine.apply(results, self._weights_TK, *self._permutation[1:3])
        return combined


def block_transpose_index(sizes: Tensor, *dims: int) -> Tensor:
    """Return the row index that reorders consecutive blocks as `sizes.permute(dims)`, on the host.

    `sizes` has the rows of each block.
    """
    flat = sizes.reshape(-1)
    starts = (flat.cumsum(0) - flat).view(sizes.shape)
    permuted, starts = sizes.permute(dims).reshape(-1), starts.permute(dims).reshape(-1)
    offset = starts - (permuted.cumsum(0) - permuted)
    return torch.arange(int(flat.sum())) + offset.repeat_interleave(permuted)


class Gather(torch.autograd.Function):
    """Copy of each token for each of its experts."""

    @staticmethod
    def forward(
        ctx: Any, tokens_TH: Tensor, order: Tensor, rows_TK: Tensor, present_TK: Tensor
    ) -> Tensor:
        """Return rows sorted by slot, [R, H]."""
        ctx.save_for_backward(rows_TK, present_TK)
        return tokens_TH.index_select(0, order // rows_TK.shape[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        """Sum the gradients of each token's rows, in the order of its choices."""
        rows_TK, present_TK = ctx.saved_tensors
        return unpermute(grads[0], rows_TK, present_TK.to(grads[0].dtype)), None, None, None


class Combine(torch.autograd.Function):
    """Weighted sum of each token's results, in the order of its choices."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weights_TK: Tensor, order: Tensor, rows_TK: Tensor
    ) -> Tensor:
        """Return tokens, [T, H], from rows."""
        ctx.save_for_backward(rows, weights_TK, order)
        return unpermute(rows, rows_TK, weights_TK)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Return the gradients of rows and weights."""
        rows, weights_TK, order = ctx.saved_tensors
        weights = weights_TK.view(-1)[order]
        grad_rows, products = torch.empty_like(rows), torch.empty_like(weights)
        # On the CPU, blocks keep the data of the three passes in the cache.
        size = _BLOCK_ROWS if rows.device.type == "cpu" else max(len(rows), 1)
        sources = order // weights_TK.shape[1]
        split = (t.split(size) for t in (sources, rows, weights, grad_rows, products))
        for source, row, weight, grad_row, product in zip(*split, strict=True):
            token_grad = grads[0].index_select(0, source)
            torch.mul(token_grad, weight[:, None], out=grad_row)
            torch.sum(token_grad.mul_(row), dim=1, out=product)
        grad_weights = torch.zeros_like(weights_TK).view(-1)
        grad_weights[order] = products
        return grad_rows, grad_weights.view(weights_TK.shape), None, None
