"""How tokens become rows sorted by slot, and rows tokens again.

N tokens have up to K rows each; experts compute with R rows. Rows are copied from tokens, and
tokens' gradients, where they are needed: a copy of all of them is never kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.dist import passes
from moesaic.facts.job.train import GroupedMM


class Routes(NamedTuple):
    """Which rows are whose."""

    counts: Tensor
    """Rows of each slot, [slots]; on the host, or where tokens are if nobody has waited for it."""
    order_R: Tensor
    """Flat (token, choice) index of each row; rows are sorted by slot."""
    rows_NK: Tensor | None = None
    """Row of each (token, choice), 0 where there is none; None: each token has one row."""
    present_NK: Tensor | None = None
    """Which (token, choice) have a row; None: all have."""

    @classmethod
    def of(cls, tensors: Sequence[Any]) -> Routes:
        """Routes that were taken apart."""
        return cls(*tensors)

    @property
    def tokens_R(self) -> Tensor:
        """The token that each row is a copy of."""
        return self.order_R if self.rows_NK is None else self.order_R // self.rows_NK.shape[1]

    def piece(self, first: int, stop: int) -> Routes:
        """Of the rows from one to another."""
        assert self.rows_NK is not None
        assert self.present_NK is not None
        ends = self.counts.cumsum(0)
        counts = ends.clamp(first, stop) - (ends - self.counts).clamp(first, stop)
        present_NK = self.present_NK & (self.rows_NK >= first) & (self.rows_NK < stop)
        rows_NK = torch.where(present_NK, self.rows_NK - first, 0)
        return Routes(counts, self.order_R[first:stop], rows_NK, present_NK)

    def add_up(
        self, rows_RH: Tensor, weights_NK: Tensor | None = None, by: GroupedMM = "torch"
    ) -> Tensor:
        """Sums of each token's rows, in the order of its choices, weighted if there are weights; by
        what multiplies."""
        assert self.rows_NK is not None
        if weights_NK is None and self.present_NK is not None:
            weights_NK = self.present_NK.to(rows_RH.dtype)
        return add_up(rows_RH, self.rows_NK, weights_NK, by)


def add_up(
    rows_RH: Tensor, rows_NK: Tensor, weights_NK: Tensor | None, by: GroupedMM = "torch"
) -> Tensor:
    """Sum over k of weights[n, k], or 1, * rows[rows_NK[n, k]], without the [N, K, H] between."""
    if rows_RH.shape[0] == 0 or rows_NK.shape[0] == 0:
        return rows_RH.new_zeros((rows_NK.shape[0], rows_RH.shape[1]))
    if passes.serve(rows_RH, by):
        return passes.add_up(rows_RH, rows_NK, weights_NK)
    return F.embedding_bag(rows_NK, rows_RH, mode="sum", per_sample_weights=weights_NK)


def inverse(order: Tensor, size: int) -> Tensor:
    """Where each of `size` things stands in `order`; 0 if nowhere."""
    places = torch.zeros(size, dtype=order.dtype, device=order.device)
    places[order] = torch.arange(len(order), device=order.device)
    return places
