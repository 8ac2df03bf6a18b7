"""Expert migration: a policy reassigns experts to owner ranks between steps; their parameters and
moments move along.

All ranks know the token counts of all experts, in layers of other pipeline ranks too, so each
computes the same decision by itself. Per layer, one message carries everything that a rank sends to
another: each expert's parameters, adapters and moments, as bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from moesaic.base.decisions import Decision, decide
from moesaic.dist.all_to_all import Transport
from moesaic.dist.state import EXPERT_TOKENS, TensorShard
from moesaic.dist.world import World
from moesaic.facts.job import Job
from moesaic.facts.moves import ExpertMoves, RankMoves
from moesaic.facts.plan import Plan
from moesaic.facts.workload import expert_bytes, expert_name
from moesaic.kernels import device as devices
from moesaic.models.lm import LanguageModel
from moesaic.models.state import LocalParam
from moesaic.nn.moe import MoE
from moesaic.policy import balance as policies
from moesaic.train.optim import AdamW


class LayerMigration(NamedTuple):
    """Experts of one layer that changed their owner ranks."""

    layer: int
    decision: Decision[policies.MigrationFacts, policies.Migration]
    num_bytes: int
    """Bytes sent, over all EP groups."""
    seconds: float | None
    """Seconds on this rank; None if another pipeline rank has the layer."""


class ExpertMigration:
    """Expert migration of one run."""

    def __init__(
        self,
        job: Job,
        plan: Plan,
        world: World,
        model: LanguageModel,
        params: Sequence[LocalParam],
        optimizer: AdamW,
    ) -> None:
        """Take the parameters `params` of `model`, some of which `optimizer` updates."""
        self._job, self._world, self._params, self._optimizer = job, world, params, optimizer
        self._layers = dict(model.expert_layers())
        self._expert_bytes = expert_bytes(job, plan)
        none = torch.zeros(plan.experts, dtype=torch.int64)
        self._token_counts = {layer: none.clone() for layer in job.model.expert_layers}

    def state_shards(self) -> Iterator[TensorShard]:
        """Yield the token counts that decide, which every rank has in full."""
        owners = tuple(range(self._world.size))
        for layer, rows in self._token_counts.items():
            yield TensorShard.of_tensor(
                EXPERT_TOKENS, f"layers.{layer}.moe", tuple(rows.shape), (0,), rows, owners
            )

    def add_counts(self, counts: Mapping[int, Tensor]) -> None:
        """Add the token counts of one more step, by layer, [experts]."""
        for layer, rows in counts.items():
            self._token_counts[layer] += rows

    def is_due(self, step: int) -> bool:
        """Return true if placement is decided after this many steps."""
        return step % self._job.balance.migrate_every == 0

    def migrate(self, plan: Plan) -> tuple[Plan, list[LayerMigration]]:
        """Decide by the token counts so far, move experts and reset the counts. Return the plan
        with the new placement. Every rank must call this."""
        migrations, slots = list[LayerMigration](), dict[int, tuple[int, ...]]()
        decisions = list[Decision[policies.MigrationFacts, policies.Migration]]()
        for layer, rows in self._token_counts.items():
            decision = decide(
                policies.plan_migration, self._facts(plan, layer, rows.clone()), decisions
            )
            rows.zero_()
            if not decision.moves:
                continue
            moe, seconds = self._layers.get(layer), None
            if moe is not None:
                began = devices.synchronized_time_s(self._world.device)
                self._move_experts(layer, moe, decision)
                seconds = devices.synchronized_time_s(self._world.device) - began
            slots[layer] = decision.slots
            num_bytes = len(decision.moves) * self._expert_bytes * plan.ranks_per_stage // plan.ep
            migrations.append(LayerMigration(layer, decisions[-1], num_bytes, seconds))
        return plan.with_expert_placement(slots), migrations

    def _facts(self, plan: Plan, layer: int, token_counts: Tensor) -> policies.MigrationFacts:
        assert plan.balance_costs is not None
        job, groups = self._job, plan.ranks_per_stage // (plan.ep * plan.etp)
        problem = policies.layer_problem(job, plan, job.balance, plan.balance_costs, layer)
        costs = policies.migration_costs(problem, self._expert_bytes, groups)
        return policies.MigrationFacts(
            token_counts.numpy(), plan.slot_experts(layer), plan.ep, costs
        )

    @torch.no_grad()
    def _move_experts(self, layer: int, moe: MoE, decision: policies.Migration) -> None:
        """Exchange experts with other ranks as `decision` says."""
        groups, placement = moe.dispatcher.groups, moe.dispatcher.placement
        assert groups.replica_transport is not None
        moves = ExpertMoves(*np.array(decision.moves).T)
        rank_moves = moves.rank_moves(groups.ep_rank, groups.ep_size)
        items = [param for param in self._params if param.bank and param.block == f"layers.{layer}"]
        state = [shard for item in items for shard in self._all_shards(item)]
        shards = {
            expert: _expert_shards(state, layer, expert)
            for expert in rank_moves.send_experts.tolist()
        }
        received = _exchange(
            groups.replica_transport, rank_moves, list(shards.values()), moe.bank.arena.device
        )
        for row, expert in zip(received, rank_moves.receive_experts.tolist(), strict=True):
            # The expert that was in this slot has been sent.
            _unpack(row, shards[placement.slot_experts[decision.slots.index(expert)]])
        old_names = [shard.name for item in items for shard in self._parameter_shards(item)]
        moe.set_slot_experts(decision.slots)
        new_names = [shard.name for item in items for shard in self._parameter_shards(item)]
        self._optimizer.rename_params(dict(zip(old_names, new_names, strict=True)))

    def _parameter_shards(self, param: LocalParam) -> Iterator[TensorShard]:
        return param.parameter_shards(self._world.rank)

    def _all_shards(self, param: LocalParam) -> Iterator[TensorShard]:
        """Yield a parameter and, if it is trained, its moments."""
        yield from self._parameter_shards(param)
        if param.parameter.requires_grad:
            yield from self._optimizer.moment_shards(param, self._world.rank)


def _expert_shards(state: Sequence[TensorShard], layer: int, expert: int) -> list[TensorShard]:
    prefix = expert_name(layer, expert, "")
    return [shard for shard in state if shard.name.startswith(prefix)]


def _exchange(
    transport: Transport,
    moves: RankMoves,
    outgoing: Sequence[list[TensorShard]],
    device: torch.device,
) -> Tensor:
    """Send `outgoing` experts as rows of bytes; return the received ones. A rank that sends none
    receives none, but must take part."""
    width = sum(shard.num_bytes for shard in outgoing[0]) if outgoing else 1
    rows = torch.empty((len(outgoing), width), dtype=torch.uint8, device=device)
    for row, shards in zip(rows, outgoing, strict=True):
        for target, shard in zip(
            row.split([shard.num_bytes for shard in shards]), shards, strict=True
        ):
            with shard.borrow() as tensor:
                target.copy_(_as_bytes(tensor))
    received, work = transport.start(rows, moves.send_counts, moves.receive_counts)
    work.wait()
    return received


def _as_bytes(values: Tensor) -> Tensor:
    return values.contiguous().view(-1).view(torch.uint8)


def _unpack(row: Tensor, shards: Sequence[TensorShard]) -> None:
    """Write a received expert over the shards of one that was sent."""
    for source, shard in zip(row.split([shard.num_bytes for shard in shards]), shards, strict=True):
        values = source.clone().view(shard.dtype).view(shard.size)  # A clone is aligned.
        with shard.borrow(writes=True) as tensor:
            tensor.copy_(values)
