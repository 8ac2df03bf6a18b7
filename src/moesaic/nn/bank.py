"""The expert bank: a layer's experts in one arena of equally strided slots, outside FSDP.

Home slots own parameters; their gradient is one tensor of the arena's shape. `acquire` begins a
layer's forward pass and returns the slots, `release` ends it. Every home expert is always in place,
so neither has anything to do yet; backward reads the arena after `release`. Experts of other ranks
may be there as guests, after the home slots, for one pass and its backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from moesaic.dist.clock import Clock, during
from moesaic.dist.products import choose
from moesaic.facts.job.train import GroupedMM
from moesaic.nn.grouped import FORWARD, GatedExperts, Total, arena_views, gated_experts
from moesaic.nn.guests import Guests
from moesaic.nn.lora import AdaptedExperts, Adapters, Shape
from moesaic.nn.routes import Routes
from moesaic.nn.slices import WHOLE, Slices

Compute = Callable[[Tensor, Routes, Tensor | None], Tensor]
"""Tokens through their experts along their routes, weighted if there are weights."""


class Bank(nn.Module):
    """The home slots of one layer on this rank; of several slices each has inner channels of its
    own of every expert."""

    def __init__(
        self,
        experts: Sequence[int],
        hidden: int,
        ffn: int,
        slices: Slices = WHOLE,
        by: Literal["auto"] | GroupedMM = "auto",
    ) -> None:
        """Create the slots of `experts`; on a GPU the kernels `by` multiply (see `choose`)."""
        super().__init__()
        self.experts, self.slices, self.by = list(experts), slices, by
        self.hidden, self.ffn = hidden, ffn // slices.count
        self.arena = nn.Parameter(torch.empty(len(self.experts), 3 * self.ffn * hidden))
        self.adapters: Adapters | None = None

    def adapt(self, rank: int, scale: float) -> None:
        """Put low-rank adapters beside the experts."""
        shape = Shape(self.hidden, self.ffn, rank, scale)
        self.adapters = Adapters(self.experts, shape)

    def grouped_mm(self, dtype: torch.dtype) -> GroupedMM:
        """Return the kernels that multiply tokens of `dtype` here."""
        return choose(self.by, self.arena.device, dtype)

    def rehome(self, experts: Sequence[int]) -> None:
        """Other experts are in the slots from now on; whoever says so has put them there."""
        self.experts = list(experts)
        if self.adapters is not None:
            self.adapters.experts = list(experts)

    def acquire(self) -> Tensor:
        """The arena, with every home expert in its slot, to be used until `release`."""
        return self.arena

    def release(self) -> None:
        """Forward is through with the slots; backward may not be."""

    @contextmanager
    def at_work(
        self, times: int = 1, guests: Guests | None = None, clock: Clock | None = None
    ) -> Iterator[Compute]:
        """What computes so many times in one forward pass of the layer, with `guests` or none; what
        it takes, backward too, goes to `clock`."""
        if guests is None:
            total = Total(times, clock=clock)
            yield partial(self._compute, self.acquire(), None, total)
        else:
            total = Total(times, guests.flights, clock)
            yield partial(self._compute, guests.arena, guests.guests, total)
        self.release()

    def _compute(
        self,
        arena: Tensor,
        guests: Tensor | None,
        total: Total,
        tokens: Tensor,
        routes: Routes,
        weights_NK: Tensor | None,
    ) -> Tensor:
        results: Tensor
        total.by = self.grouped_mm(tokens.dtype)
        if self.adapters is None:
            if guests is not None:  # Other ranks may have more of them.
                num_slots = len(arena) + len(guests)
                routes = routes._replace(counts=routes.counts[:num_slots])
            apply = GatedExperts.apply if torch.is_grad_enabled() else gated_experts
            with during(total.clock, FORWARD):
                results = apply(tokens, arena, guests, weights_NK, self.ffn, total, *routes)
        else:
            assert guests is None, "adapters have no guests"
            own, shape = self.adapters.arena, self.adapters.shape._replace(by=total.by)
            results = AdaptedExperts.apply(tokens, arena, own, weights_NK, shape, *routes)
        return results

    def matrices(self, arena: Tensor) -> Iterator[tuple[int, str, Tensor]]:
        """(expert, gate | up | down, view) of all of `arena`, a tensor of the arena's shape."""
        gate_up, down = arena_views(arena, self.ffn, self.hidden)
        for slot, expert in enumerate(self.experts):
            yield expert, "gate", gate_up[slot, : self.ffn]
            yield expert, "up", gate_up[slot, self.ffn :]
            yield expert, "down", down[slot]

    def place(self, part: str, view: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shape of a whole matrix, and where in it the `view` of this rank begins."""
        cut = 1 if part == "down" else 0
        shape, first = list(view.shape), [0, 0]
        first[cut] = self.slices.index * shape[cut]
        shape[cut] *= self.slices.count
        return tuple(shape), tuple(first)
