"""The expert layer: router, dispatch, experts, combine, and what every token visits."""

from __future__ import annotations

from torch import Tensor, nn

from moesaic.nn.attention import FeedForward
from moesaic.nn.bank import Bank
from moesaic.nn.context import Context, LayerFacts, compute_dtype
from moesaic.nn.dispatch import Counted, Dispatcher
from moesaic.nn.router import Router, Routing, balance_share, z_share


class MoE(nn.Module):
    """A feed-forward network of experts, beside one that is `shared` by all tokens.

    Where the experts' matrices are cut, the slices' tokens are joined on their way to them, and
    what comes back are sums over the slices, of each slice's own tokens.
    """

    def __init__(
        self,
        router: Router,
        bank: Bank,
        dispatcher: Dispatcher,
        shared: FeedForward | None = None,
    ) -> None:
        super().__init__()
        self.router, self.bank, self.dispatcher = router, bank, dispatcher
        self.shared = shared

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Each token through its experts."""
        tokens_TH = x.reshape(-1, x.shape[-1])
        routing, slices = self.router(tokens_TH, context), self.bank.slices
        experts_TK, weights_TK = slices.rows(routing.experts_TK), slices.rows(routing.weights_TK)
        counted = self.dispatcher.count(experts_TK, training=context.training)
        # A layer that is recomputed in backward must not leave its second graph here.
        context.layers.setdefault(self.router.layer, self._facts(routing, counted))
        tokens_TH = slices.rows(tokens_TH.to(compute_dtype(x)))
        sent = self.dispatcher.start(tokens_TH, weights_TK, counted)
        shared = None if self.shared is None else self.shared(x, context)  # While tokens travel.
        with self.bank.at_work(self.dispatcher.computations) as compute:
            combined = slices.sum_runs(sent.through(compute)).view(x.shape)
        return combined if shared is None else combined + shared

    def _facts(self, routing: Routing, counted: Counted) -> LayerFacts:
        asked_E = counted.asked_KE.sum(0)
        first_E = counted.asked_KE[0] if self.router.kind == "gshard" else asked_E
        return LayerFacts(
            balance=balance_share(routing, first_E, counted.num_tokens),
            z=z_share(routing, counted.num_tokens),
            asked=asked_E,
            counts=counted.counts_RE,
            dropped=counted.dropped,
            visits=counted.visits_RP,
            flips=routing.flips,
        )
