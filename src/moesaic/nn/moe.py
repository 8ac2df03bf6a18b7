"""Mixture-of-experts layer: router, dispatch, experts, combine, and an optional shared expert."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from moesaic.dist.clock import Clock
from moesaic.facts.balance import BalanceDecision, IntArray
from moesaic.nn.attention import FeedForward
from moesaic.nn.dispatch.dispatcher import DispatchCounts, Dispatcher
from moesaic.nn.experts.bank import ExpertBank
from moesaic.nn.experts.replicas import Replicas
from moesaic.nn.inputs import Inputs, compute_dtype
from moesaic.nn.reports import MoEReport
from moesaic.nn.router import Router, Routing


class ReplicaChooser(Protocol):
    """Choice of an expert layer's replicas; all EP ranks choose the same."""

    prefetches: bool
    """True if replicas are chosen before counts are known."""

    def prefetched_replicas(self) -> BalanceDecision:
        """Return the replicas of this step, without rerouted rows."""

    def place_next_replicas(self) -> None:
        """Choose the next pass's replicas, if the policy prefetches; overlaps the exchange of
        tokens."""

    def __call__(self, counts: IntArray) -> BalanceDecision:
        """Return the decision for the assignment counts, [ranks, experts]; a prefetching policy
        keeps its replicas."""

    def set_owners(self, owners: IntArray) -> None:
        """Set the owner rank of each expert, [experts]."""


@dataclass
class BalancePass:
    """Balancing of one forward pass of a layer and of its recomputation."""

    decision: BalanceDecision | None = None
    """Decision of the first pass, which the recomputation repeats; None without balancing."""
    replicas: Replicas | None = None
    """Replicas in transfer to this rank, until the experts take them."""
    is_prefetched: bool = False
    """True if the previous layer began to send the replicas, or found that there are none."""


class MoE(nn.Module):
    """Mixture-of-experts feed-forward network, with an optional `shared` network for all tokens.

    With expert tensor parallelism, TP ranks gather their tokens before dispatch. The results are
    sums over TP ranks, reduce-scattered to each rank's own tokens.
    """

    def __init__(
        self,
        router: Router,
        bank: ExpertBank,
        dispatcher: Dispatcher,
        shared: FeedForward | None = None,
    ) -> None:
        super().__init__()
        self.router, self.bank, self.dispatcher = router, bank, dispatcher
        self.shared = shared
        self.balancer: ReplicaChooser | None = None
        """Balancing policy; None: every row is computed on its expert's owner rank."""
        self.next_layers: tuple[MoE, ...] = ()
        """Next MoE layer, if any; its replicas may be prefetched under this layer's experts. A
        tuple, so that `nn.Module` does not register it."""
        self.clock: Clock | None = None
        """Timer of training: seconds of the experts, and seconds that replicas block this rank."""
        self._next_pass: BalancePass | None = None

    def begin_pass(self) -> BalancePass:
        """Return the balancing of the coming forward pass, which the previous layer may have
        begun."""
        begun, self._next_pass = self._next_pass, None
        return BalancePass() if begun is None else begun

    def forward(
        self, x: Tensor, inputs: Inputs, balancing: BalancePass | None = None
    ) -> tuple[Tensor, MoEReport]:
        """Return the output of the layer, in the shape of `x`, and its report.

        The caller passes `balancing` if it has started the replicas already.
        """
        if balancing is None:
            balancing = self.begin_pass()
            self.start_replicas(balancing, inputs, compute_dtype(x))
        balancer = self._active_balancer(inputs)
        prefetches = balancer is not None and balancer.prefetches
        replicas, balancing.replicas = balancing.replicas, None
        tokens_TH = x.reshape(-1, x.shape[-1])
        routing, tp = self.router(tokens_TH, inputs), self.bank.tp
        experts_TK, weights_TK = (
            tp.gather_rows(routing.experts_TK),
            tp.gather_rows(routing.weights_TK),
        )
        allow_device_counts = routing.is_complete and balancer is None
        backend = self.bank.matmul_backend(compute_dtype(x))
        counts = self.dispatcher.count(
            experts_TK,
            training=inputs.training,
            allow_device_counts=allow_device_counts,
            backend=backend,
        )
        if balancer is not None and balancing.decision is None:
            balancing.decision = balancer(counts.counts_RE.numpy())
        balance = balancing.decision
        token_slots = self.dispatcher.assign_slots(counts, balance)
        report = None
        if counts.token_slots is None:
            report = self._make_report(inputs, routing, counts, balance)
        tokens_TH = tp.gather_rows(tokens_TH.to(compute_dtype(x)))
        dispatch = self.dispatcher.start_dispatch(tokens_TH, weights_TK, token_slots)
        # Tokens go first; they are on the critical path.
        if balance is not None and not prefetches:
            replicas = self._send_replicas(balance, tokens_TH.dtype)
        for layer in self.next_layers:
            layer.start_prefetch(inputs, tokens_TH.dtype)
        if balancer is not None and prefetches:
            balancer.place_next_replicas()
        shared = None if self.shared is None else self.shared(x)  # Overlaps the exchange.
        clock = self.clock if inputs.training else None
        with self.bank.expert_function(
            self.dispatcher.num_expert_calls, replicas, clock
        ) as compute:
            combined = tp.reduce_scatter(dispatch.run_experts(compute)).view(x.shape)
        # Counts on the device: this launches kernels, so do it while the experts compute.
        if report is None:
            report = self._make_report(inputs, routing, counts, balance)
        return combined if shared is None else combined + shared, report

    def set_slot_experts(self, slot_experts: Sequence[int]) -> None:
        """Set the expert of each slot of the EP group, between two steps.

        The caller has moved the parameters of this rank's slots.
        """
        self.dispatcher.set_slot_experts(slot_experts)
        groups, placement = self.dispatcher.groups, self.dispatcher.placement
        first = groups.ep_rank * placement.slots_per_rank
        self.bank.set_experts(placement.slot_experts[first : first + placement.slots_per_rank])
        if self.balancer is not None:
            self.balancer.set_owners(placement.slot_of_expert // placement.slots_per_rank)

    def _active_balancer(self, inputs: Inputs) -> ReplicaChooser | None:
        """Return the balancer; None in evaluation, which never uses replicas."""
        return self.balancer if inputs.training else None

    def start_replicas(self, balancing: BalancePass, inputs: Inputs, dtype: torch.dtype) -> None:
        """Send the replicas of a prefetching policy: all, or those that the previous layer has not
        sent yet.

        The transfer overlaps whatever is computed until the experts.
        """
        balancer = self._active_balancer(inputs)
        if balancer is None or not balancer.prefetches:
            return
        if balancing.decision is not None:  # Recomputation in backward.
            balancing.replicas = self._send_replicas(balancing.decision, dtype)
        elif balancing.is_prefetched:
            self._send_remaining_replicas(balancing.replicas)
        else:
            balancing.replicas = self._send_replicas(balancer.prefetched_replicas(), dtype)

    def start_prefetch(self, inputs: Inputs, dtype: torch.dtype) -> None:
        """Begin the coming pass: send the prefetched replicas, during the experts of the previous
        layer."""
        balancer = self._active_balancer(inputs)
        if balancer is not None and balancer.prefetches:
            replicas = self._make_replicas(balancer.prefetched_replicas(), dtype)
            if replicas is not None:
                replicas.send(prefetched=True)
            self._next_pass = BalancePass(replicas=replicas, is_prefetched=True)

    def _send_replicas(self, balance: BalanceDecision, dtype: torch.dtype) -> Replicas | None:
        replicas = self._make_replicas(balance, dtype)
        if replicas is not None:
            replicas.send(prefetched=True)
        self._send_remaining_replicas(replicas)
        return replicas

    def _make_replicas(self, balance: BalanceDecision, dtype: torch.dtype) -> Replicas | None:
        """Return the replicas of this rank, not yet sent; None if the group has none."""
        groups = self.dispatcher.groups
        if not len(balance.replicas):
            return None
        assert groups.replica_transport is not None
        arena, placement = self.bank.whole_arena(), self.dispatcher.placement
        return Replicas(
            arena, balance, placement, groups.ep_rank, groups.replica_transport, dtype, self.clock
        )

    @staticmethod
    def _send_remaining_replicas(replicas: Replicas | None) -> None:
        if replicas is not None:
            replicas.send(prefetched=False)

    def _make_report(
        self,
        inputs: Inputs,
        routing: Routing,
        counts: DispatchCounts,
        balance: BalanceDecision | None,
    ) -> MoEReport:
        requested_E, counts_RE = counts.requested_KE.sum(0), counts.counts_RE
        first_E = counts.requested_KE[0] if self.router.kind == "gshard" else requested_E
        kept_E = requested_E
        if self.dispatcher.drops_tokens(training=inputs.training):
            kept_E = counts_RE[self.dispatcher.groups.ep_rank].to(requested_E.device)
        return MoEReport(
            layer=self.router.layer,
            num_tokens=len(counts.experts_TK),
            probability_sum=routing.probabilities_TE.sum(0),
            z_sum=routing.scores_TE.logsumexp(dim=-1).square().sum(),
            requested=requested_E,
            balanced=first_E,
            kept=kept_E,
            counts=counts_RE,
            num_replay_mismatches=routing.num_replay_mismatches,
            balance_decision=balance,
            router_logits=routing.scores_TE if "router_logits" in inputs.keep else None,
            router_choices=routing.recorded_TK if "router_choices" in inputs.keep else None,
        )
