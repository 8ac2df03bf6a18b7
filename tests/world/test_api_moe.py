"""The expert layer in a user's own loop on several ranks: DDP, FSDP2, and plain loops."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import moesaic
from moesaic.dist.state import is_dtensor
from moesaic.dist.world import World
from moesaic.testing.ranks import RankPool

HIDDEN, FFN, EXPERTS, TOP_K, TOKENS = 12, 20, 8, 2, 24


class Model(nn.Module):
    """Two expert layers between linear layers."""

    def __init__(self, group: Any, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        make = {"group": group, "z_loss": 0.1, "dtype": torch.float64, **options}
        self.first = nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64)
        self.moes = nn.ModuleList(
            moesaic.MoE(HIDDEN, FFN, EXPERTS, TOP_K, **make) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for moe in self.moes:
            x = x + moe(x)
        return x


def loss_of(model: nn.Module, moes: nn.ModuleList, x: Tensor) -> Tensor:
    return model(x).square().mean() + sum(one.aux_loss for one in moes)


def batch() -> Tensor:
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(5)).double()


def experts_of(model: Model) -> dict[str, Tensor]:
    """Return the gradients of this rank's experts by name."""
    named = model.named_parameters()
    return {name: p.grad.clone() for name, p in named if "experts" in name and p.grad is not None}


def alone(
    world: World, micro_batches: int, options: dict[str, Any]
) -> tuple[dict[str, Tensor], Any, float]:
    """Return gradients, the gradient norm and the loss of one process."""
    del world
    options.pop("hosts", None)
    model = Model(None, **options)
    loss = torch.zeros(())
    for x in batch().chunk(micro_batches):
        loss = loss_of(model, model.moes, x) / micro_batches
        loss.backward()
    grads = experts_of(model) | {
        name: p.grad.clone() for name, p in model.named_parameters() if "experts" not in name
    }
    return grads, float(moesaic.clip_grad_norm_(model, 1e-3)), float(loss.detach())


def make_group(world: World, replicas: int, hosts: int = 1) -> Any:
    if hosts > 1:
        with mock.patch("platform.node", return_value=f"host {world.rank % hosts}"):
            group = make_group(world, replicas)
            assert group.deduplicates(TOP_K)
            return group
    if replicas == 1:
        return moesaic.ExpertGroup(world.group)
    shape = (replicas, world.size // replicas)
    return moesaic.ExpertGroup(init_device_mesh("cpu", shape, mesh_dim_names=("same", "expert")))


def together(
    world: World, wrapper: str, replicas: int, micro_batches: int, options: dict[str, Any]
) -> tuple[dict[str, Tensor], float, float]:
    """Return gradients, the gradient norm and the loss of ranks with a part of the batch each."""
    model = Model(make_group(world, replicas, options.pop("hosts", 1)), **options)
    wrapped: nn.Module = model
    if wrapper == "ddp":
        moesaic.exclude_experts(model)
        wrapped = DistributedDataParallel(model)
    elif wrapper == "fsdp":
        mesh = init_device_mesh("cpu", (world.size,))
        fully_shard(model, mesh=mesh, ignored_params=moesaic.expert_parameters(model))
    loss = torch.zeros(())
    for x in batch().chunk(micro_batches):
        loss = loss_of(wrapped, model.moes, x.chunk(world.size)[world.rank]) / micro_batches
        loss.backward()
    grads = experts_of(model)
    for name, p in model.named_parameters():
        if "experts" not in name:
            assert p.grad is not None
            grads[name] = p.grad.full_tensor() if is_dtensor(p.grad) else p.grad.clone()
    loss = loss.detach()
    dist.all_reduce(loss)
    norm = moesaic.clip_grad_norm_(model, 1e-3)
    torch.testing.assert_close(
        moesaic.clip_grad_norm_(model, 1.0), norm.new_tensor(1e-3), rtol=1e-3, atol=0.0
    )
    return grads, float(norm), float(loss) / world.size


@pytest.mark.parametrize(
    ("size", "replicas", "wrapper", "micro_batches", "options"),
    [
        (2, 1, "ddp", 1, {}),
        (4, 2, "ddp", 3, {}),
        (4, 4, "ddp", 1, {}),
        (2, 1, "fsdp", 3, {}),
        (4, 2, "fsdp", 1, {}),
        (4, 2, "ddp", 1, {"capacity_factor": 0.8}),
        (4, 2, "ddp", 2, {"activation": "gelu", "bias": True}),
        (2, 1, "ddp", 2, {"hosts": 2}),
    ],
)
def test_gradients_equal_one_process(
    ranks: RankPool, size: int, replicas: int, wrapper: str, micro_batches: int,
    options: dict[str, Any],
) -> None:  # fmt: skip
    ((expected, norm, loss),) = ranks.run(1, alone, micro_batches, options)
    seen = set[str]()
    found = ranks.run(size, together, wrapper, replicas, micro_batches, options)
    for grads, actual_norm, actual_loss in found:
        assert actual_norm == pytest.approx(norm, rel=1e-9)
        assert actual_loss == pytest.approx(loss, rel=1e-9)
        for name, grad in grads.items():
            torch.testing.assert_close(grad, expected[name], rtol=1e-9, atol=1e-12)
        seen |= set(grads)
    assert seen == set(expected)


def step_with_replicas(world: World, balance: str) -> tuple[int, Tensor, Tensor]:
    """Return the replicas of a skewed step, the output, and the arena's gradient."""
    torch.manual_seed(0)
    layer = moesaic.MoE(
        64, 128, EXPERTS, TOP_K, group=world.group, balance=balance, dtype=torch.float64
    )
    with torch.no_grad():
        layer.router.weight[0] += 1.0
    x = torch.randn(2000, 64, dtype=torch.float64).abs()
    out = layer(x)
    (out.square().mean() + layer.aux_loss).backward()
    grads = [p.grad.flatten() for p in layer.experts.parameters() if p.grad is not None]
    return layer.num_replicas, out.detach(), torch.cat(grads)


def test_replicas_change_no_result(ranks: RankPool) -> None:
    plain, balanced = (ranks.run(2, step_with_replicas, name) for name in ("none", "quota"))
    for (none, out, grad), (some, *found) in zip(plain, balanced, strict=True):
        assert (none, some > 0) == (0, True)
        torch.testing.assert_close(found, [out, grad], rtol=1e-9, atol=1e-12)


def save_and_load(world: World, directory: Path, loading: bool) -> dict[str, Tensor]:
    """Save layer and optimizer after a step, or load them into others, over the ranks of this
    world; return all tensors."""
    torch.manual_seed(9 if loading else 2)
    group = None if world.size == 1 else make_group(world, 1)
    layer = moesaic.MoE(HIDDEN, FFN, EXPERTS, TOP_K, group=group)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    x = torch.randn(TOKENS, HIDDEN)
    (layer(x).square().mean() + layer.aux_loss).backward()
    if world.size > 1:  # As DDP does.
        dist.all_reduce(layer.router.weight.grad)
    optimizer.step()
    model_state, optimizer_state = get_state_dict(layer, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    if loading:
        dcp.load(state, checkpoint_id=directory, process_group=world.group)
        set_state_dict(
            layer, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state
        )
    else:
        dcp.save(state, checkpoint_id=directory, process_group=world.group)
    tensors = dict(layer.state_dict())
    for name, parameter in layer.named_parameters():
        tensors[f"{name}, first moment"] = optimizer.state[parameter]["exp_avg"]
    return {key: value.clone() for key, value in tensors.items()}


@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 2), (2, 1)])
def test_a_checkpoint_loads_in_another_size(
    ranks: RankPool, tmp_path: Path, before: int, after: int
) -> None:
    saved: dict[str, Tensor] = {}
    for state in ranks.run(before, save_and_load, tmp_path, False):
        saved |= state
    assert len(saved) == 2 * (1 + 3 * EXPERTS)
    for state in ranks.run(after, save_and_load, tmp_path, True):
        assert len(state) == 2 * (1 + 3 * EXPERTS // after)
        assert all(torch.equal(value, saved[key]) for key, value in state.items())


def sharded_without_group(world: World) -> None:
    """Check that FSDP may shard a layer without a group: outputs, gradients and state dict."""
    torch.manual_seed(0)
    layer = moesaic.MoE(HIDDEN, FFN, EXPERTS, TOP_K, dtype=torch.float64)
    plain = copy.deepcopy(layer)
    fully_shard(layer, mesh=init_device_mesh("cpu", (world.size,)))
    for one in (layer, plain):
        loss = one(batch()).square().mean() + one.aux_loss
        loss.backward()
    for actual, expected in zip(layer.parameters(), plain.parameters(), strict=True):
        assert is_dtensor(actual.grad)
        torch.testing.assert_close(actual.grad.full_tensor(), expected.grad, rtol=1e-9, atol=1e-12)
    sizes = {name: value.shape for name, value in plain.state_dict().items()}
    assert {name: value.shape for name, value in layer.state_dict().items()} == sizes


def test_fsdp_shards_a_layer_without_a_group(ranks: RankPool) -> None:
    ranks.run(2, sharded_without_group)


def copied_gradients(world: World) -> bool:
    """Return whether a copied and a thawed layer average the gradients of their experts."""
    group = make_group(world, world.size)
    torch.manual_seed(0)
    layer = moesaic.MoE(HIDDEN, FFN, EXPERTS, TOP_K, group=group)
    layer.requires_grad_(False)
    copied = copy.deepcopy(layer).requires_grad_(True)
    layer.requires_grad_(True)
    for one in (layer, copied):
        one(torch.randn(TOKENS, HIDDEN) + world.rank).sum().backward()
        for parameter in one.experts.parameters():
            assert parameter.grad is not None
            mean = parameter.grad.clone()
            dist.all_reduce(mean)
            torch.testing.assert_close(mean / world.size, parameter.grad)
    return True


def test_copied_and_thawed_layers_average_gradients(ranks: RankPool) -> None:
    assert ranks.run(2, copied_gradients) == [True, True]


def load_whole(world: World, state: dict[str, Tensor]) -> list[str]:
    layer = moesaic.MoE(HIDDEN, FFN, EXPERTS, TOP_K, group=world.group)
    layer.load_state_dict(state)
    own = layer.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in own.items())
    return list(own)


def test_a_rank_takes_its_experts_from_a_whole_state_dict(ranks: RankPool) -> None:
    state = moesaic.MoE(HIDDEN, FFN, EXPERTS, TOP_K).state_dict()
    found = ranks.run(2, load_whole, state)
    assert set(found[0]) | set(found[1]) == set(state)


def mistake(world: World, name: str) -> str:
    """Make a mistake, and return what the error says."""
    x = batch()
    try:
        if name == "small group":
            moesaic.MoE(8, 8, 4, 2, group=dist.new_group([0, 1]))
        elif name == "experts":
            moesaic.MoE(8, 8, 3, 2, group=world.group)
        elif name == "mesh":
            moesaic.MoE(8, 8, 4, 2, group=init_device_mesh("cpu", (1, 2, 2)))
        elif name == "part of a mesh":
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))
            moesaic.MoE(8, 8, 4, 2, group=mesh["expert"])
        elif name == "names":
            names = ("expert", "replicate")
            moesaic.MoE(8, 8, 4, 2, group=init_device_mesh("cpu", (1, 4), mesh_dim_names=names))
        elif name == "ddp":
            DistributedDataParallel(Model(world.group))(x)
        elif name == "ddp around":
            model = Model(world.group)
            moesaic.exclude_experts(model)
            DistributedDataParallel(nn.Sequential(model))(x)
        elif name == "fsdp":
            model = Model(world.group)
            fully_shard(model, mesh=init_device_mesh("cpu", (world.size,)))
            model(x)
    except moesaic.ConfigError as error:
        dist.barrier(
            world.group
        )  # A rank that leaves early closes connections that others still make.
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("small group", "group is a process group "),
        (
            "part of a mesh",
            "of 2 of the 4 ranks, so other ranks hold the same experts: "
            'give a device mesh of all of them, such as init_device_mesh("cpu", (2, 2), ',
        ),
        ("names", "('expert', 'replicate'), but its last dimension splits the experts"),
        ("ddp around", "with the same model"),
        ("experts", "experts = 3 do not split evenly over 4 ranks"),
        ("mesh", "group is a device mesh of 3 dimensions"),
        ("ddp", "moesaic.exclude_experts(model) before DistributedDataParallel"),
        ("fsdp", "ignored_params=moesaic.expert_parameters(model)"),
    ],
)
def test_mistakes_are_errors(ranks: RankPool, name: str, said: str) -> None:
    for found in ranks.run(4, mistake, name):
        assert said in found
