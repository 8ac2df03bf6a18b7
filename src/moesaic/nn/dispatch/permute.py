"""Permutation of tokens to rows sorted by slot, and back.

N tokens have up to K rows each; experts compute with R rows. Rows are gathered from tokens, and
from gradients of tokens, as experts need them. A copy of all rows is never kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.facts.job.train import MatmulBackend
from moesaic.kernels import fused


class Permutation(NamedTuple):
    """Map between (token, choice) pairs and rows sorted by slot."""

    counts: Tensor
    """Rows of each slot, [slots]; on the host, or on the device if the host has not waited."""
    order_R: Tensor
    """Flat (token, choice) index of each row; rows are sorted by slot."""
    rows_NK: Tensor | None = None
    """Row of each (token, choice), 0 where there is none; None: each token has one row."""
    present_NK: Tensor | None = None
    """Mask of the (token, choice) pairs that have a row; None: all have."""

    @classmethod
    def from_tensors(cls, tensors: Sequence[Any]) -> Permutation:
        """Return the permutation that was unpacked into `tensors`."""
        return cls(*tensors)

    @property
    def tokens_R(self) -> Tensor:
        """Token of each row."""
        return self.order_R if self.rows_NK is None else self.order_R // self.rows_NK.shape[1]

    def slice_rows(self, start: int, stop: int) -> Permutation:
        """Return the permutation of the rows from `start` to `stop` alone."""
        assert self.rows_NK is not None
        assert self.present_NK is not None
        ends = self.counts.cumsum(0)
        counts = ends.clamp(start, stop) - (ends - self.counts).clamp(start, stop)
        present_NK = self.present_NK & (self.rows_NK >= start) & (self.rows_NK < stop)
        rows_NK = torch.where(present_NK, self.rows_NK - start, 0)
        return Permutation(counts, self.order_R[start:stop], rows_NK, present_NK)

    def unpermute(
        self, rows_RH: Tensor, weights_NK: Tensor | None = None, backend: MatmulBackend = "torch"
    ) -> Tensor:
        """Return the sum of each token's rows in the order of its choices, weighted if given."""
        assert self.rows_NK is not None
        if weights_NK is None and self.present_NK is not None:
            weights_NK = self.present_NK.to(rows_RH.dtype)
        return unpermute(rows_RH, self.rows_NK, weights_NK, backend)


def unpermute(
    rows_RH: Tensor, rows_NK: Tensor, weights_NK: Tensor | None, backend: MatmulBackend = "torch"
) -> Tensor:
    """Return the sum over k of weights[n, k] * rows[rows_NK[n, k]], [N, H].

    Weights default to 1. The [N, K, H] intermediate is never formed.
    """
    if rows_RH.shape[0] == 0 or rows_NK.shape[0] == 0:
        return rows_RH.new_zeros((rows_NK.shape[0], rows_RH.shape[1]))
    if fused.is_supported(rows_RH, backend):
        return fused.unpermute(rows_RH, rows_NK, weights_NK)
    return F.embedding_bag(rows_NK, rows_RH, mode="sum", per_sample_weights=weights_NK)


def invert_permutation(order: Tensor, size: int) -> Tensor:
    """Return the position of each of `size` indices in `order`; 0 if absent."""
    positions = torch.zeros(size, dtype=order.dtype, device=order.device)
    positions[order] = torch.arange(len(order), device=order.device)
    return positions
