"""Model parameters as tensor shards: local tensors with their logical names and offsets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moesaic.dist.state import PARAMETER, TensorShard, is_dtensor, local_tensor
from moesaic.facts.expert_blocks import BlockKind
from moesaic.facts.job import ModelConfig
from moesaic.facts.plan import Plan
from moesaic.models.lm import LanguageModel
from moesaic.nn.experts.bank import ExpertBank
from moesaic.nn.experts.lora import Adapters
from moesaic.nn.experts.places import Places, StatePlaces

TP_DIM = "tp"
"""Name of the tensor-parallel dimension of a device mesh."""
EMBED_WEIGHT = "embed.weight"
"""Logical name of the embedding, which a tied head uses too, on the last pipeline rank if there are
several."""


@dataclass(frozen=True)
class LocalParam:
    """Local part of one parameter: the unit of the optimizer's update."""

    block: str
    """Name of its block, such as "layers.3"."""
    name: str
    parameter: nn.Parameter
    bank: ExpertBank | Adapters | None
    """The bank whose arena this is, or the adapters of a bank; None for a dense parameter."""
    global_shape: tuple[int, ...]
    """Shape over all ranks."""
    owners: tuple[int, ...]
    """Ranks that hold the same values, ascending."""
    is_column_sharded: bool = False
    """True for this rank's columns of the embedding; their gradient needs no reduction."""
    losses: frozenset[str] | None = None
    """Names of the losses with a gradient in it; None: all losses of the model."""

    @property
    def is_tp_sharded(self) -> bool:
        """True if tensor parallelism shards it."""
        return is_tp_sharded(self.parameter)

    @property
    def places(self) -> StatePlaces | None:
        """Places of the experts' state in training; None if all of it is always in memory."""
        places = self._lent_places
        return places if isinstance(places, StatePlaces) else None

    @property
    def _lent_places(self) -> Places | None:
        """Places that lend the values; None if they are always in memory."""
        return self.bank.places if isinstance(self.bank, ExpertBank) else None

    @property
    def local(self) -> Tensor:
        """This rank's values, writable in place; without rows if there are `places`."""
        return local_tensor(self.parameter)

    @property
    def grad(self) -> Tensor:
        """This rank's gradient; zeros if backward did not reach the parameter."""
        if self.parameter.grad is None:
            self.parameter.grad = torch.zeros_like(self.parameter)
        return local_tensor(self.parameter.grad)

    def grads(self) -> list[Tensor]:
        """Return this rank's gradient: one tensor for each expert, or one in all. `places` have
        their own."""
        return [self.grad] if self.bank is None else list(self.grad.unbind())

    def clear_grad(self) -> None:
        """Remove the gradient."""
        self.parameter.grad = None
        if self.places is not None:
            for slot in list(self.places.touched):
                self.places.drop_gradient(slot)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's values, whether they are in memory or not."""
        if self._lent_places is not None:
            return self._lent_places.num_slots, *self.parameter.shape[1:]
        return tuple(self.local.shape)

    @property
    def has_weight_decay(self) -> bool:
        """True for matrices, false for norms and biases."""
        return self.parameter.dim() > 1

    def parameter_shards(self, rank: int) -> Iterator[TensorShard]:
        """Yield the values as tensor shards."""
        if self._lent_places is None:
            yield from self.tensor_shards(PARAMETER, self.local, rank)
        else:
            yield from self.borrowed_shards(PARAMETER, BlockKind.PARAMETERS)

    def borrowed_shards(self, kind: str, block: BlockKind) -> Iterator[TensorShard]:
        """Yield the blocks of `places` as tensor shards of `kind`."""
        assert isinstance(self.bank, ExpertBank)
        for expert, matrix, size, lend in self.bank.borrowed_matrices(block):
            boxes = self.bank.global_shape_and_offset(matrix, size)
            name, dtype = self._expert_name(expert, matrix), self.parameter.dtype
            yield TensorShard(kind, name, *boxes, size, dtype, self.owners, lend)

    def grad_shards(self, rank: int) -> Iterator[TensorShard]:
        """Yield the gradient as tensor shards."""
        if self.places is None:
            yield from self.tensor_shards(PARAMETER, self.grad, rank)
        else:
            yield from self.borrowed_shards(PARAMETER, BlockKind.GRADIENT)

    def tensor_shards(
        self, kind: str, values: Tensor | Sequence[Tensor], rank: int
    ) -> Iterator[TensorShard]:
        """Yield `values`, which have this parameter's local layout, as tensor shards of `kind`.

        Values of experts may be one tensor for each.
        """
        if self.bank is not None:
            for expert, matrix, view in self.bank.matrices(values):
                boxes = self.bank.global_shape_and_offset(matrix, view.shape)
                name = self._expert_name(expert, matrix)
                yield TensorShard.of_tensor(kind, name, *boxes, view, self.owners)
            return
        assert isinstance(values, Tensor)
        yield TensorShard.of_tensor(
            kind, self.name, self.global_shape, self._global_offset(rank), values, self.owners
        )

    def _expert_name(self, expert: int, matrix: str) -> str:
        layer = self.block.removeprefix("layers.")
        return f"layers.{layer}.moe.experts.{expert}.{matrix}"

    def _global_offset(self, rank: int) -> tuple[int, ...]:
        """Return the offset of this rank's shard in the global shape."""
        if is_dtensor(self.parameter):
            from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

            mesh, placements = self.parameter.device_mesh, self.parameter.placements
            return compute_local_shape_and_global_offset(self.global_shape, mesh, placements)[1]
        sizes = zip(self.global_shape, self.parameter.shape, strict=True)
        return tuple(rank % (full // local) * local for full, local in sizes)


def is_tp_sharded(parameter: Tensor) -> bool:
    """Return whether tensor parallelism shards `parameter`."""
    return is_dtensor(parameter) and TP_DIM in (parameter.device_mesh.mesh_dim_names or ())


def logical_name(config: ModelConfig, name: str) -> str:
    """Return the logical name of the parameter `name`; a tied head maps to the embedding."""
    return EMBED_WEIGHT if config.tied and name == "head.weight" else name


def local_params(model: LanguageModel, plan: Plan, rank: int) -> list[LocalParam]:
    """Return every parameter that `rank` holds under `plan`, in the order of the blocks."""
    stage_ranks = plan.stage_groups()[plan.pp_rank(rank)]
    shard = plan.dp_rank(rank) % plan.dp_shard
    dense_owners = tuple(r for r in stage_ranks if plan.dp_rank(r) % plan.dp_shard == shard)
    tp_dense_owners = tuple(r for r in dense_owners if r % plan.tp == rank % plan.tp)
    expert_owners = plan.expert_dp_groups().of(rank)
    result: list[LocalParam] = []
    seen: set[int] = set()
    for block, module in model.blocks():
        banks = {id(m.arena): m for m in module.modules() if isinstance(m, ExpertBank | Adapters)}
        for name, parameter in module.named_parameters():
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            bank = banks.get(id(parameter))
            logical, shape = logical_name(model.config, f"{block}.{name}"), tuple(parameter.shape)
            owners = tp_dense_owners if is_tp_sharded(parameter) else dense_owners
            owners = owners if bank is None else expert_owners
            is_column_sharded = logical == EMBED_WEIGHT and plan.embedding_shards > 1
            if is_column_sharded:
                shape, owners = (model.config.vocab, model.config.hidden), (rank,)
            if model.config.tied and plan.pp > 1 and logical == EMBED_WEIGHT:
                owners = _first_and_last_stage(owners, plan)
            result.append(
                LocalParam(block, logical, parameter, bank, shape, owners, is_column_sharded)
            )
    return result


def _first_and_last_stage(ranks: tuple[int, ...], plan: Plan) -> tuple[int, ...]:
    """Return the counterparts of `ranks` on the first and the last pipeline rank."""
    offsets = [rank % plan.ranks_per_stage for rank in ranks]
    return tuple(
        start + offset for start in (0, plan.ranks - plan.ranks_per_stage) for offset in offsets
    )


def router_biases(model: LanguageModel, plan: Plan, rank: int) -> Iterator[TensorShard]:
    """Yield the router biases: replicated on every rank of a pipeline stage, without gradients."""
    owners = tuple(plan.stage_groups()[plan.pp_rank(rank)])
    for layer, router in model.sigmoid_routers():
        name, shape = f"layers.{layer}.moe.router.bias", tuple(router.bias.shape)
        yield TensorShard.of_tensor(PARAMETER, name, shape, (0,), router.bias, owners)


def tensor_shards(
    model: LanguageModel, plan: Plan | None = None, rank: int = 0
) -> list[TensorShard]:
    """Return the parameters and router biases of `model` as tensor shards."""
    plan = plan or Plan(ranks=1, ep=1, dp_shard=1, experts=model.config.experts)
    trained = [
        shard for param in local_params(model, plan, rank) for shard in param.parameter_shards(rank)
    ]
    return [*trained, *router_biases(model, plan, rank)]
