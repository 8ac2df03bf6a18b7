"""A model's tensors as pieces of state: where layout ends and logical names begin."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor, nn

from moesaic.dist.state import PARAMETER, Piece
from moesaic.facts.job import ModelConfig
from moesaic.facts.plan import Plan
from moesaic.facts.workload import parameters
from moesaic.facts.workload.finetune import A, B
from moesaic.models.lm import LanguageModel
from moesaic.nn.bank import Bank
from moesaic.nn.lora import Adapters

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


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
    """Its whole shape; the parameter is narrower in the dimension that slices have cut, if any."""
    place: int
    """Which of the shards of its slice this rank has, if it is shared out."""
    owners: tuple[int, ...]
    """Ranks that hold the same values, in order."""
    columns: bool = False
    """Whether these are this rank's own columns of a table, whose gradient is whole already."""

    @property
    def sliced(self) -> bool:
        """Whether this rank has a slice of it alone."""
        return self.bank is None and self.shape != tuple(self.parameter.shape)

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
        here = zip(self.shape, self.parameter.shape, strict=True)
        first, *rest = (rank % (whole // part) * part for whole, part in here)
        offset = (first + self._first_row(), *rest)
        yield Piece(kind, self.name, self.shape, offset, values, self.owners)

    def _first_row(self) -> int:
        """Of this rank's shard of its slice."""
        if not _is_sharded(self.parameter):
            return 0
        mesh = self.parameter.device_mesh
        rows, parts = self.parameter.shape[0], mesh.size(mesh.ndim - 1)
        return min(rows, self.place * -(-rows // parts))


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a parameter or gradient, detached, sharing memory."""
    tensor = tensor.detach()
    return tensor.to_local() if _is_sharded(tensor) else tensor


def _is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether FSDP has shared it out; runs without FSDP never import its slow modules."""
    return hasattr(tensor, "device_mesh")


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
    shapes = {p.name: p.shape for p in parameters(model.config) if p.expert is None}
    result: list[Held] = []
    seen: set[int] = set()
    for block, module in model.blocks():
        banks = {id(m.arena): m for m in module.modules() if isinstance(m, Bank | Adapters)}
        for name, parameter in module.named_parameters():
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            bank = banks.get(id(parameter))
            full, here = logical(model.config, f"{block}.{name}"), tuple(parameter.shape)
            shape = here if bank is not None else _whole(full, here, shapes)
            owners = dense if shape == here else alike
            owners = owners if bank is None else copies
            columns = full == EMBED and plan.columns > 1
            owners = (rank,) if columns else owners
            if model.config.tied and plan.pp > 1 and full == EMBED:
                owners = _on_both_ends(owners, plan)
            result.append(Held(block, full, parameter, bank, shape, shard, owners, columns))
    return result


def _whole(
    name: str, here: tuple[int, ...], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[int, ...]:
    """The whole shape of a parameter of which a rank has `here`; an adapter is cut as its matrix.

    So slices of rows of W [outputs, inputs] have their rows of B and all of A, and slices of
    columns their columns of A and all of B.
    """
    stem, _, half = name.rpartition(".")
    if f".{half}" == A:
        return here[0], shapes[f"{stem}.weight"][1]
    if f".{half}" == B:
        return shapes[f"{stem}.weight"][0], here[1]
    return shapes[name]


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
