"""Permutations of rows, and experts over them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moesaic.nn.dispatch.permute import Permutation, invert_permutation
from moesaic.nn.experts.bank import ExpertBank
from moesaic.nn.experts.grouped import GatedExperts
from moesaic.nn.experts.lease import Lease


def identity_permutation(counts: Sequence[int]) -> Permutation:
    """Return the permutation of rows of which slot s has `counts[s]`."""
    return Permutation(torch.tensor(counts), torch.arange(sum(counts)))


def random_permutation(tokens: int, slots: int, choices: int) -> Permutation:
    """Return random slots of each token; every fifth (token, choice) has none."""
    chosen = torch.rand(tokens, slots).topk(choices).indices
    present = torch.arange(tokens * choices).view(tokens, choices) % 5 != 3
    flat = torch.where(present, chosen, slots).view(-1)
    order = flat.argsort(stable=True)[: int(present.sum())]
    rows = invert_permutation(order, len(flat)).view(tokens, choices)
    return Permutation(torch.bincount(flat, minlength=slots)[:slots], order, rows, present)


def run_experts(rows: Tensor, arena: Tensor, counts: Sequence[int], ffn: int) -> Tensor:
    """Return each row's output of the expert in its slot."""
    result: Tensor = GatedExperts.apply(
        rows, arena, None, Lease(arena, ffn), None, *identity_permutation(counts)
    )
    return result


def run_bank(
    bank: ExpertBank, tokens: Tensor, routes: Permutation, weights_NK: Tensor | None = None
) -> Tensor:
    """Return the tokens' outputs of the experts of `bank`, in one call."""
    with bank.expert_function() as compute:
        return compute(tokens, routes, weights_NK)
