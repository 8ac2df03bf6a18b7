"""Passes over rows of experts on a GPU, each by kernels of our own: what comes between products,
sums of a token's rows, and rows in the order of their slots.

They are custom ops, so that torch's compiler and profiler see them as one thing. Where experts are
multiplied by torch, or numbers are of a type that kernels are not for, torch's own operations do
the same: who asks for a pass asks first whether it `serves`.
"""

from __future__ import annotations

from functools import cache
from subprocess import CalledProcessError

import torch
from torch import Tensor

from moesaic.dist.device import OF_KERNELS
from moesaic.facts.job.train import GroupedMM

MOST_SLOTS = 1024
"""That rows are sorted by."""
_OPS = torch.library.Library("moesaic", "FRAGMENT")
_OPS.define("activate(Tensor inner) -> Tensor")
_OPS.define(
    "gated_back(Tensor inner, Tensor grad, Tensor? weights, Tensor order, Tensor(a!)? grad_weights)"
    " -> (Tensor, Tensor)"
)
_OPS.define("copies(Tensor tokens, Tensor order, int choices) -> Tensor")
_OPS.define("add_up(Tensor rows, Tensor places, Tensor? weights) -> Tensor")
_OPS.define("sort(Tensor slots, int num_slots) -> (Tensor, Tensor, Tensor)")


def _activate(inner: Tensor) -> Tensor:
    from moesaic.dist import tiles

    return tiles.activate(inner)


def _gated_back(
    inner: Tensor, grad: Tensor, weights: Tensor | None, order: Tensor, grad_weights: Tensor | None
) -> tuple[Tensor, Tensor]:
    from moesaic.dist import tiles

    return tiles.gated_back(inner, grad, weights, order, grad_weights)


def _copies(tokens: Tensor, order: Tensor, choices: int) -> Tensor:
    from moesaic.dist import tiles

    return tiles.copies(tokens, order, choices)


def _add_up(rows: Tensor, places: Tensor, weights: Tensor | None) -> Tensor:
    from moesaic.dist import tiles

    return tiles.add_up(rows, places, weights)


def _sort(slots: Tensor, num_slots: int) -> tuple[Tensor, Tensor, Tensor]:
    from moesaic.dist import tiles

    return tiles.sort(slots, num_slots)


def _like_activate(inner: Tensor) -> Tensor:
    return inner.new_empty((inner.shape[0], inner.shape[1] // 2))


def _like_gated_back(
    inner: Tensor, grad: Tensor, weights: Tensor | None, order: Tensor, grad_weights: Tensor | None
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(inner), torch.empty_like(grad)


def _like_copies(tokens: Tensor, order: Tensor, choices: int) -> Tensor:
    return tokens.new_empty((order.shape[0], tokens.shape[1]))


def _like_add_up(rows: Tensor, places: Tensor, weights: Tensor | None) -> Tensor:
    return rows.new_empty((places.shape[0], rows.shape[1]))


def _like_sort(slots: Tensor, num_slots: int) -> tuple[Tensor, Tensor, Tensor]:
    return slots.new_empty(num_slots), torch.empty_like(slots), torch.empty_like(slots)


_OPS.impl("activate", _activate, "CompositeExplicitAutograd")
_OPS.impl("gated_back", _gated_back, "CompositeExplicitAutograd")
_OPS.impl("copies", _copies, "CompositeExplicitAutograd")
_OPS.impl("add_up", _add_up, "CompositeExplicitAutograd")
_OPS.impl("sort", _sort, "CompositeExplicitAutograd")
torch.library.register_fake("moesaic::activate", _like_activate, lib=_OPS)
torch.library.register_fake("moesaic::gated_back", _like_gated_back, lib=_OPS)
torch.library.register_fake("moesaic::copies", _like_copies, lib=_OPS)
torch.library.register_fake("moesaic::add_up", _like_add_up, lib=_OPS)
torch.library.register_fake("moesaic::sort", _like_sort, lib=_OPS)


@cache
def hindrance() -> str | None:
    """Why kernels of our own cannot run here, if they cannot."""
    try:
        from moesaic.dist import tiles

        tiles.start()
    except (ImportError, AttributeError, RuntimeError, OSError, CalledProcessError) as error:
        return str(error) or type(error).__name__
    return None


def serve(numbers: Tensor, by: GroupedMM) -> bool:
    """Whether these are for such numbers, where experts are multiplied `by` that."""
    return by != "torch" and numbers.dtype in OF_KERNELS


def activate(inner: Tensor) -> Tensor:
    """silu(gate) * up of gate and up side by side."""
    activated: Tensor = torch.ops.moesaic.activate.default(inner)
    return activated


def gated_back(
    inner: Tensor, grad: Tensor, weights: Tensor | None, order: Tensor, grad_weights: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The gradient of `inner`, and silu(gate) * up of it times the weights of rows, which are those
    of `order`; `grad` is the gradient of that product without weights. Their own gradients go to
    their places in `grad_weights`."""
    found: tuple[Tensor, Tensor] = torch.ops.moesaic.gated_back.default(
        inner, grad, weights, order, grad_weights
    )
    return found


def copies(tokens: Tensor, order: Tensor, choices: int) -> Tensor:
    """A row for each place of `order`: of the token that has it among its `choices`."""
    rows: Tensor = torch.ops.moesaic.copies.default(tokens, order, choices)
    return rows


def add_up(rows: Tensor, places: Tensor, weights: Tensor | None) -> Tensor:
    """Sum over k of weights[n, k] * rows[places[n, k]], or of the rows."""
    total: Tensor = torch.ops.moesaic.add_up.default(rows, places, weights)
    return total


def sort(slots: Tensor, num_slots: int) -> tuple[Tensor, Tensor, Tensor]:
    """How many are of each slot; whose each row is, rows being sorted by slot and in the order of
    `slots` there; and the row of each, 0 for what is of none."""
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.moesaic.sort.default(slots, num_slots)
    return found
