"""Auxiliary losses of MoE layers over the tokens of all ranks: load balance and z-loss.

A layer reports sums over this rank's tokens. One asynchronous all-reduce adds up the counts of all
layers; backward waits for it, because the gradient of the balance loss depends on global counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moesaic.dist.world import Group
from moesaic.nn.reports import MoEReport


@dataclass(frozen=True)
class GlobalCounts:
    """Assignments of a micro-batch over all ranks; L layers, E experts."""

    requested_LE: Tensor
    """Assignments before drops by capacity."""
    kept_LE: Tensor
    """Assignments after drops."""
    balanced_LE: Tensor
    """Assignments that the balance loss counts."""
    num_tokens: Tensor
    """Tokens of the micro-batch."""


class AuxLoss:
    """Auxiliary losses of consecutive MoE layers for one micro-batch."""

    def __init__(self, reports: Sequence[MoEReport], group: Group | None) -> None:
        """Start to sum the counts of `reports` over `group`, whose ranks dispatch each token
        once."""
        self.layers = [report.layer for report in reports]
        self._probability_LE = torch.stack([report.probability_sum for report in reports])
        self._z_L = torch.stack([report.z_sum for report in reports])
        self._fields = ["requested"] + [
            name
            for name in ("kept", "balanced")
            if any(getattr(one, name) is not one.requested for one in reports)
        ]
        counts = [torch.stack([getattr(one, name) for one in reports]) for name in self._fields]
        num_tokens = counts[0].new_full((1,), reports[0].num_tokens)
        self._summed = torch.cat((*(one.flatten() for one in counts), num_tokens))
        self._work: Any = None
        if group is not None:
            self._work = dist.all_reduce(self._summed, group=group, async_op=True)

    def wait(self) -> GlobalCounts:
        """Wait for the sums of all ranks, and return them."""
        if self._work is not None:
            self._work.wait()
        tables = self._summed[:-1].view(len(self._fields), *self._probability_LE.shape)
        found = dict(zip(self._fields, tables, strict=True))
        requested = found["requested"]
        return GlobalCounts(
            requested,
            found.get("kept", requested),
            found.get("balanced", requested),
            self._summed[-1],
        )

    def gradients(self) -> tuple[Tensor, Tensor]:
        """Return the gradients of the summed losses: of the balance losses in the probability sums,
        [L, E], and of the z-losses in the z-sums, [L].

        A layer's balance loss is E * sum(fraction of assignments * mean probability): 1 when even.
        Its z-loss is a mean over tokens.
        """
        counts = self.wait()
        balanced_LE = counts.balanced_LE.to(self._probability_LE.dtype)
        fraction_LE = balanced_LE / balanced_LE.sum(1, keepdim=True).clamp(min=1)
        num_tokens = counts.num_tokens.clamp(min=1)
        balance_LE = fraction_LE * balanced_LE.shape[1] / num_tokens
        return balance_LE, torch.ones_like(self._z_L) / num_tokens

    def losses(self) -> tuple[Tensor, Tensor]:
        """Return this rank's terms of the balance losses and z-losses, summed over layers. They
        have a gradient, unless it is attached to another tensor."""
        balance_LE, z_L = self.gradients()
        return (self._probability_LE * balance_LE).sum(), (self._z_L * z_L).sum()

    @property
    def has_gradient(self) -> bool:
        """True if the losses have a gradient."""
        return self._probability_LE.requires_grad

    def attach(self, x: Tensor, balance_weight: float, z_weight: float) -> Tensor:
        """Return `x`; its backward adds the gradients of the weighted losses.

        Afterwards this object does not keep the graph alive.
        """
        if balance_weight or z_weight:
            x = _AddGradients.apply(
                x, self._probability_LE, self._z_L, self, balance_weight, z_weight
            )
        self._probability_LE, self._z_L = self._probability_LE.detach(), self._z_L.detach()
        return x


class _AddGradients(torch.autograd.Function):
    """Function that returns `x` and adds gradients of other tensors when that of `x` arrives."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        probability_LE: Tensor,
        z_L: Tensor,
        losses: AuxLoss,
        balance_weight: float,
        z_weight: float,
    ) -> Tensor:
        """Return `x` detached, not as a view of itself, which could not be cut off its graph
        afterwards."""
        del probability_LE, z_L
        ctx.losses, ctx.weights = losses, (balance_weight, z_weight)
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Wait for the counts of all ranks; return the gradient of `x` unchanged, and those of the
        losses."""
        balance_weight, z_weight = ctx.weights
        balance_LE, z_L = ctx.losses.gradients()
        return grads[0], balance_weight * balance_LE, z_weight * z_L, None, None, None
