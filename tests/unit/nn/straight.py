"""Routes of rows that stand in the order of their slots already."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moesaic.nn.bank import Bank
from moesaic.nn.grouped import GatedExperts, Total
from moesaic.nn.routes import Routes


def straight(counts: Sequence[int]) -> Routes:
    """Each row for itself; slot s has `counts[s]` of them."""
    return Routes(torch.tensor(counts), torch.arange(sum(counts)))


def experts_of(rows: Tensor, arena: Tensor, counts: Sequence[int], ffn: int) -> Tensor:
    """Every row through the expert of its slot."""
    result: Tensor = GatedExperts.apply(rows, arena, None, None, ffn, Total(), *straight(counts))
    return result


def through(bank: Bank, tokens: Tensor, routes: Routes, weights_NK: Tensor | None = None) -> Tensor:
    """Tokens through the experts of `bank`, all at once."""
    with bank.at_work() as compute:
        return compute(tokens, routes, weights_NK)
