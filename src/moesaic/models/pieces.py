"""A model's tensors as pieces of state: where layout ends and logical names begin."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor, nn

from moesaic.dist.state import PARAMETER, Piece
from moesaic.facts.plan import Plan
from moesaic.models.lm import LanguageModel
from moesaic.nn.bank import Bank
from moesaic.nn.lora import Adapters

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Held:
    """One parameter as this rank holds it: what the optimizer updates in one go."""

    block: str
    """The block it belongs to."""
    name: str
    parameter: nn.Parameter
    bank: Bank | Adapters | None
    """The bank, if this is an arena, or what is beside it."""
    owners: tuple[int, ...]
    """Ranks that hold the same values, in order."""

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
                shape = tuple(view.shape)
                yield Piece(kind, name, shape, (0,) * len(shape), view, self.owners)
            return
        shape = tuple(self.parameter.shape)
        offset = (self._first_row(rank),) + (0,) * (len(shape) - 1)
        yield Piece(kind, self.name, shape, offset, values, self.owners)

    def _first_row(self, rank: int) -> int:
        if not _is_sharded(self.parameter):
            return 0
        mesh = self.parameter.device_mesh
        rows, parts = self.parameter.shape[0], mesh.size(mesh.ndim - 1)
        return min(rows, rank % parts * -(-rows // parts))


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a parameter or gradient, detached, sharing memory."""
    tensor = tensor.detach()
    return tensor.to_local() if _is_sharded(tensor) else tensor


def _is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether FSDP has shared it out; runs without FSDP never import its slow modules."""
    return hasattr(tensor, "device_mesh")


def held(model: LanguageModel, plan: Plan, rank: int) -> list[Held]:
    """Every parameter of `model` as `rank` holds it under `plan`, in the order of the blocks."""
    everyone = tuple(range(plan.ranks))
    dense = tuple(r for r in everyone if r % plan.shard == rank % plan.shard)
    copies = tuple(r for r in everyone if r % plan.ep == rank % plan.ep)
    result: list[Held] = []
    seen: set[int] = set()
    for block, module in model.blocks():
        banks = {id(m.arena): m for m in module.modules() if isinstance(m, Bank | Adapters)}
        for name, parameter in module.named_parameters():
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            bank = banks.get(id(parameter))
            owners = copies if bank is not None else dense
            result.append(Held(block, f"{block}.{name}", parameter, bank, owners))
    return result


def biases(model: LanguageModel, plan: Plan) -> Iterator[Piece]:
    """Biases of routers, which every rank has whole and no gradient reaches."""
    for layer, router in model.sigmoid_routers():
        name, shape = f"layers.{layer}.moe.router.bias", tuple(router.bias.shape)
        yield Piece(PARAMETER, name, shape, (0,), router.bias, tuple(range(plan.ranks)))


def pieces(model: LanguageModel, plan: Plan | None = None, rank: int = 0) -> list[Piece]:
    """The model's parameters as pieces of state."""
    plan = plan or Plan(ranks=1, ep=1, shard=1, experts=model.config.experts)
    learnt = [
        piece
        for item in held(model, plan, rank)
        for piece in item.pieces(PARAMETER, item.local, rank)
    ]
    return [*learnt, *biases(model, plan)]
