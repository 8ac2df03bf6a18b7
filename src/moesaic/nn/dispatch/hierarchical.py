"""Two-level dispatch: one all-to-all between hosts, then one between the ranks of each host.

Rank i of a host exchanges only with rank i of the other hosts. There is one message per pair of
hosts and local rank, instead of one per pair of ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moesaic.dist.all_to_all import PendingRows
from moesaic.nn.dispatch.all_to_all import (
    Combine,
    DispatchGroups,
    ExpertInputs,
    Gather,
    OutgoingTokens,
    block_transpose_index,
    make_permutation,
)
from moesaic.nn.dispatch.dedup import DedupTraffic, Exchange, Hop, destination_mask
from moesaic.nn.dispatch.permute import Permutation


class HierarchicalAllToAll:
    """Two-level dispatch that sends each token once per chosen expert."""

    def __init__(self, outgoing: OutgoingTokens, groups: DispatchGroups) -> None:
        """Start the exchange between hosts."""
        self._inter_host, self._intra_host = groups.transports
        self._weights_TK, self._permutation = (
            outgoing.weights_TK,
            outgoing.permutation(groups.ep_rank),
        )
        num_hosts, ranks_per_host = self._inter_host.group.size(), self._intra_host.group.size()
        host, local_rank = divmod(groups.ep_rank, ranks_per_host)
        # From (host, local rank) to (host, local rank, slot).
        counts = outgoing.counts_RS.view(num_hosts, ranks_per_host, num_hosts, ranks_per_host, -1)
        forwarded_HP = counts[:, local_rank, host].sum(2)
        self._received_PHS = counts[:, :, host, local_rank].transpose(0, 1)
        self._inter_host_counts = (
            counts[host, local_rank].sum((1, 2)).tolist(),
            forwarded_HP.sum(1).tolist(),
        )
        self._intra_host_counts = (
            forwarded_HP.sum(0).tolist(),
            self._received_PHS.sum((1, 2)).tolist(),
        )
        device = outgoing.tokens_TH.device
        self._reordering = (
            block_transpose_index(forwarded_HP, 1, 0).to(device),
            block_transpose_index(forwarded_HP.T, 1, 0).to(device),
        )
        rows = Gather.apply(outgoing.tokens_TH, *self._permutation[1:])
        self._pending_tokens = PendingRows(rows, self._inter_host, *self._inter_host_counts)

    def finish_dispatch(self) -> ExpertInputs:
        """Wait for the hosts, exchange within this host, and return rows with one expert each."""
        rows = Reorder.apply(self._pending_tokens.wait(), *self._reordering)
        rows = PendingRows(rows, self._intra_host, *self._intra_host_counts).wait()
        order = block_transpose_index(self._received_PHS, 2, 1, 0).to(rows.device)
        return rows, Permutation(self._received_PHS.sum((0, 1)), order), None

    def start_combine(self, results: Tensor) -> None:
        """Send each row's result back within the host, then start the exchange between hosts."""
        results = PendingRows(results, self._intra_host, *self._intra_host_counts[::-1]).wait()
        results = Reorder.apply(results, *self._reordering[::-1])
        self._pending_results = PendingRows(
            results, self._inter_host, *self._inter_host_counts[::-1]
        )

    def finish_combine(self) -> Tensor:
        """Wait, and return the weighted sum of each token's results, [T, H]."""
        results = self._pending_results.wait()
        combined: Tensor = Combine.apply(results, self._weights_TK, *self._permutation[1:3])
        return combined


class HierarchicalDedup:
    """Two-level dispatch that sends each token once per destination host, then once per rank."""

    def __init__(
        self, outgoing: OutgoingTokens, groups: DispatchGroups, dedup: DedupTraffic
    ) -> None:
        """Start the exchange between hosts."""
        local_RS = groups.local_slot_counts(outgoing.counts_RS)
        self._counts_S, self._inter_host, self._intra_host = local_RS.sum(0), *groups.transports
        num_hosts, ranks_per_host = self._inter_host.group.size(), self._intra_host.group.size()
        host, local_rank = divmod(groups.ep_rank, ranks_per_host)
        to_ranks, to_hosts = dedup.counts_RP.split((groups.ep_size, num_hosts), dim=1)
        # From (host, local rank) to (host, local rank), and to host.
        to_ranks = to_ranks.view(num_hosts, ranks_per_host, num_hosts, ranks_per_host)
        to_hosts = to_hosts.view(num_hosts, ranks_per_host, num_hosts)
        self._forwarded_HP = to_ranks[:, local_rank, host]
        self._received_PH = to_ranks[:, :, host, local_rank].T
        exchange = Exchange(
            self._inter_host,
            to_hosts[host, local_rank].tolist(),
            to_hosts[:, local_rank, host].tolist(),
        )
        host_mask_TH = dedup.destinations_TP[:, groups.ep_size :]
        slots_per_host = ranks_per_host * local_RS.shape[1]
        self._inter_host_hop = Hop(*outgoing[:3], host_mask_TH, slots_per_host, exchange)

    def finish_dispatch(self) -> ExpertInputs:
        """Wait for the hosts, exchange within this host, and return the deduplicated tokens.

        Tokens arrive ordered by source local rank, then host. Expert rows are ordered by source
        host, then local rank, as with every other dispatch method.
        """
        rows, weights_NK, slots_NK = self._inter_host_hop.finish_dispatch()
        slots_per_rank, ranks_per_host = len(self._counts_S), self._intra_host.group.size()
        slots_per_host = slots_per_rank * ranks_per_host
        rank_mask_NP = destination_mask(slots_NK, slots_per_host, ranks_per_host)
        exchange = Exchange(
            self._intra_host, self._forwarded_HP.sum(0).tolist(), self._received_PH.sum(1).tolist()
        )
        self._intra_host_hop = Hop(
            rows, weights_NK, slots_NK, rank_mask_NP, slots_per_rank, exchange
        )
        rows, weights_NK, slots_NK = self._intra_host_hop.finish_dispatch()
        order_N = block_transpose_index(self._received_PH, 1, 0).to(rows.device)
        present_NK = slots_NK < slots_per_rank
        return rows, make_permutation(slots_NK, present_NK, self._counts_S, order_N), weights_NK

    def start_combine(self, results: Tensor) -> None:
        """Sum partial results within the host, then start the exchange between hosts."""
        self._intra_host_hop.start_combine(results)
        self._inter_host_hop.start_combine(self._intra_host_hop.finish_combine())

    def finish_combine(self) -> Tensor:
        """Wait, and return each token's sum over hosts, [T, H]."""
        return self._inter_host_hop.finish_combine()


class Reorder(torch.autograd.Function):
    """Row permutation whose backward applies the inverse."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse_order: Tensor) -> Tensor:
        """Return `rows[order]`; `inverse_order` undoes `order`."""
        ctx.save_for_backward(inverse_order)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient in the original order."""
        return grads[0].index_select(0, *ctx.saved_tensors), None, None
