"""Homes of experts that change between steps: a policy is asked where they should live, and those
that move take along all that there is of them.

All ranks know how many rows came to each expert, so that each works out the same by itself, of
layers of other parts of a pipeline too. Of a layer everything that one rank has for another is one
message: expert by expert its parameters, adapters and moments, byte by byte.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from moesaic.dist import device as devices
from moesaic.dist.exchange import Carrier
from moesaic.dist.state import PARAMETER, ROWS, Piece
from moesaic.dist.world import World
from moesaic.facts.job import Job
from moesaic.facts.moves import ExpertMoves, Share
from moesaic.facts.plan import Plan
from moesaic.facts.workload import expert_bytes, expert_name
from moesaic.models.lm import LanguageModel
from moesaic.models.pieces import Held
from moesaic.nn.moe import MoE
from moesaic.policy import balance as policies
from moesaic.train.optim import AdamW


class Moved(NamedTuple):
    """Experts of one layer that have changed their ranks."""

    layer: int
    to: policies.Rehomed
    num_bytes: int
    """That have travelled, over all groups of ranks."""
    seconds: float | None
    """That this rank was at it; None: the layer is of another part of the pipeline."""


class Rehoming:
    """Of one run."""

    def __init__(
        self, job: Job, plan: Plan, world: World, model: LanguageModel, items: Sequence[Held],
        optimizer: AdamW,
    ) -> None:  # fmt: skip
        """Of a `model` whose parameters are `items`, of which some are the optimizer's."""
        self._job, self._world, self._items, self._optimizer = job, world, items, optimizer
        self._layers = dict(model.expert_layers())
        self._expert_bytes = expert_bytes(job, plan)
        none = torch.zeros(plan.experts, dtype=torch.int64)
        self._rows = {layer: none.clone() for layer in job.model.expert_layers}

    def pieces(self) -> Iterator[Piece]:
        """What is to be decided by: every rank has all of it."""
        owners = tuple(range(self._world.size))
        for layer, rows in self._rows.items():
            yield Piece(ROWS, f"layers.{layer}.moe", tuple(rows.shape), (0,), rows, owners)

    def add(self, counts: Mapping[int, Tensor]) -> None:
        """Rows of one step more, by layer and expert."""
        for layer, rows in counts.items():
            self._rows[layer] += rows

    def due(self, step: int) -> bool:
        """Whether homes are decided on after so many steps."""
        return step % self._job.balance.rehome_every == 0

    def settle(self, plan: Plan) -> tuple[Plan, list[Moved]]:
        """Decide by all rows that are there, obey, and begin anew; the plan is that of the homes to
        come. Every rank must call this."""
        found, slots = list[Moved](), dict[int, tuple[int, ...]]()
        for layer, rows in self._rows.items():
            to = self._decided(plan, layer, rows)
            rows.zero_()
            if not to.moves:
                continue
            moe, seconds = self._layers.get(layer), None
            if moe is not None:
                began = devices.now(self._world.device)
                self._move(layer, moe, to)
                seconds = devices.now(self._world.device) - began
            slots[layer] = to.slots
            num_bytes = len(to.moves) * self._expert_bytes * plan.span // plan.ep
            found.append(Moved(layer, to, num_bytes, seconds))
        return plan.with_slots(slots), found

    def _decided(self, plan: Plan, layer: int, rows: Tensor) -> policies.Rehomed:
        assert plan.prices is not None
        job, groups = self._job, plan.span // (plan.ep * plan.etp)
        setting = policies.setting_of(job, plan, job.balance, plan.prices, layer)
        cost = policies.moving(setting, self._expert_bytes, groups)
        return policies.rehomed(rows.numpy(), plan.slots(layer), plan.ep, cost)

    @torch.no_grad()
    def _move(self, layer: int, moe: MoE, to: policies.Rehomed) -> None:
        """Exchange experts until those of `to` are there."""
        ranks, homes = moe.dispatcher.ranks, moe.dispatcher.homes
        assert ranks.straight is not None
        me = ranks.group_ranks.index(ranks.rank)
        share = ExpertMoves(*np.array(to.moves).T).share(me, homes.ranks)
        items = [one for one in self._items if one.bank and one.block == f"layers.{layer}"]
        state = [piece for item in items for piece in self._state(item)]
        parts = {expert: _of_expert(state, layer, expert) for expert in share.leaves.tolist()}
        arrived = _exchange(ranks.straight, share, list(parts.values()), moe.bank.arena.device)
        for row, expert in zip(arrived, share.comes.tolist(), strict=True):
            # Whoever was in its slot has left.
            _unpack(row, parts[homes.slots[to.slots.index(expert)]])
        names = [piece.name for item in items for piece in self._parameters(item)]
        moe.rehome(to.slots)
        new = [piece.name for item in items for piece in self._parameters(item)]
        self._optimizer.rename(dict(zip(names, new, strict=True)))

    def _parameters(self, item: Held) -> Iterator[Piece]:
        return item.pieces(PARAMETER, item.local, self._world.rank)

    def _state(self, item: Held) -> Iterator[Piece]:
        """All that there is of a parameter."""
        yield from self._parameters(item)
        if item.parameter.requires_grad:
            yield from self._optimizer.pieces(item, self._world.rank)


def _of_expert(state: Sequence[Piece], layer: int, expert: int) -> list[Tensor]:
    begins = expert_name(layer, expert, "")
    return [piece.tensor for piece in state if piece.name.startswith(begins)]


def _exchange(
    carrier: Carrier, share: Share, leaving: Sequence[list[Tensor]], device: torch.device
) -> Tensor:
    """Experts as rows of bytes, those that come for those that are `leaving`. A rank that gives
    none gets none, and says so."""
    width = sum(one.nbytes for one in leaving[0]) if leaving else 1
    rows = torch.empty((len(leaving), width), dtype=torch.uint8, device=device)
    for row, parts in zip(rows, leaving, strict=True):
        for place, one in zip(row.split([one.nbytes for one in parts]), parts, strict=True):
            place.copy_(_bytes(one))
    arriving, work = carrier.start(rows, share.send, share.receive)
    work.wait()
    return arriving


def _bytes(values: Tensor) -> Tensor:
    return values.contiguous().view(-1).view(torch.uint8)


def _unpack(row: Tensor, parts: Sequence[Tensor]) -> None:
    """Write what has arrived over whoever has left."""
    for place, one in zip(row.split([one.nbytes for one in parts]), parts, strict=True):
        one.copy_(place.clone().view(one.dtype).view(one.shape))  # A copy is aligned.
