"""A model's tensors as pieces of state: where layout ends and logical names begin."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moesaic.dist.state import PARAMETER, Piece, is_shared_out, local
from moesaic.facts.job import ModelConfig
from moesaic.facts.plan import Plan
from moesaic.models.lm import LanguageModel
from moesaic.nn.bank import Bank
from moesaic.nn.lora import Adapters

SLICES = "slice"
"""The dimension of a mesh that slices are along."""
EMBED = "embed.weight"
"""What a tied head multiplies by too, on a part of its own if there is a pipeline."""


@dataclass(frozen=True)
class Held:
    """One parameter as this rank holds it: what the optimizer updates in one go."""

    block: str
    """The block it belongs to."""
    name: str
    parameter: nn.Parameter
    bank: Bank | Adapters | None
    """The bank, if this is an arena, or what is beside it."""
    shape: tuple[int, ...]
    """Its whole shape; of columns the parameter is narrower."""
    owners: tuple[int, ...]
    """Ranks that hold the same values, in order."""
    columns: bool = False
    """Whether these are this rank's own columns of a table, whose gradient is whole already."""

    @property
    def sliced(self) -> bool:
        """Whether this rank has a slice of it alone."""
        return is_sliced(self.parameter)

    @property
    def local(self) -> Tensor:
        """The values on this rank, to be written in place."""
        return local(self.parameter)

    @property
    def grad(self) -> Tensor:
        """The gradient on this rank; zeros where nothing reached the parameter."""
        if self.parameter.grad is None:
            self.parameter.grad = torch.zeros_like(self.parameter)
        return local(self.parameter.grad)

    @property
    def decays(self) -> bool:
        """Whether weight decay applies: to matrices, not to norms."""
        return self.parameter.dim() > 1

    def pieces(self, kind: str, values: Tensor, rank: int) -> Iterator[Piece]:
        """`values`, laid out as the parameter is on this rank, as pieces of state."""
        if self.bank is not None:
            layer = self.block.removeprefix("layers.")
            for expert, part, view in self.bank.matrices(values):
                name = f"layers.{layer}.moe.experts.{expert}.{part}"
                yield Piece(kind, name, *self.bank.place(part, view), view, self.owners)
            return
        yield Piece(kind, self.name, self.shape, self._offset(rank), values, self.owners)

    def _offset(self, rank: int) -> tuple[int, ...]:
        """Where in the whole this rank's part begins."""
        if is_shared_out(self.parameter):
            from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

            mesh, placements = self.parameter.device_mesh, self.parameter.placements
            return compute_local_shape_and_global_offset(self.shape, mesh, placements)[1]
        here = zip(self.shape, self.parameter.shape, strict=True)
        return tuple(rank % (whole // part) * part for whole, part in here)


def is_sliced(parameter: Tensor) -> bool:
    """Whether slices have parts of it."""
    return is_shared_out(parameter) and SLICES in (parameter.device_mesh.mesh_dim_names or ())


def logical(config: ModelConfig, name: str) -> str:
    """The logical name of the parameter that a model calls `name`: a tied head's is another."""
    return EMBED if config.tied and name == "head.weight" else name


def held(model: LanguageModel, plan: Plan, rank: int) -> list[Held]:
    """Every parameter of `model` as `rank` holds it under `plan`, in the order of the blocks."""
    part = plan.part_groups()[plan.part(rank)]
    shard = plan.replica(rank) % plan.shard
    dense = tuple(r for r in part if plan.replica(r) % plan.shard == shard)
    alike = tuple(r for r in dense if r % plan.tp == rank % plan.tp)
    copies = next(tuple(group) for group in plan.replica_groups() if rank in group)
    result: list[Held] = []
    seen: set[int] = set()
    for block, module in model.blocks():
        banks = {id(m.arena): m for m in module.modules() if isinstance(m, Bank | Adapters)}
        for name, parameter in module.named_parameters():
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            bank = banks.get(id(parameter))
            full, shape = logical(model.config, f"{block}.{name}"), tuple(parameter.shape)
            owners = alike if is_sliced(parameter) else dense
            owners = owners if bank is None else copies
            columns = full == EMBED and plan.columns > 1
            if columns:
                shape, owners = (model.config.vocab, model.config.hidden), (rank,)
            if model.config.tied and plan.pp > 1 and full == EMBED:
                owners = _on_both_ends(owners, plan)
            result.append(Held(block, full, parameter, bank, shape, owners, columns))
    return result


def _on_both_ends(ranks: tuple[int, ...], plan: Plan) -> tuple[int, ...]:
    """Ranks of the first part and of the last with the places of `ranks` in theirs."""
    places = [rank % plan.span for rank in ranks]
    return tuple(first + at for first in (0, plan.ranks - plan.span) for at in places)


def biases(model: LanguageModel, plan: Plan, rank: int) -> Iterator[Piece]:
    """Biases of routers, which every rank of a part has whole and no gradient reaches."""
    owners = tuple(plan.part_groups()[plan.part(rank)])
    for layer, router in model.sigmoid_routers():
        name, shape = f"layers.{layer}.moe.router.bias", tuple(router.bias.shape)
        yield Piece(PARAMETER, name, shape, (0,), router.bias, owners)


def pieces(model: LanguageModel, plan: Plan | None = None, rank: int = 0) -> list[Piece]:
    """The model's parameters as pieces of state."""
    plan = plan or Plan(ranks=1, ep=1, shard=1, experts=model.config.experts)
    learnt = [
        piece
        for item in held(model, plan, rank)
        for piece in item.pieces(PARAMETER, item.local, rank)
    ]
    return [*learnt, *biases(model, plan, rank)]
