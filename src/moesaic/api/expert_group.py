"""Ranks that share experts: the expert-parallel group of a layer, and its replicas."""

from __future__ import annotations

import logging
import platform
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from moesaic.api.arguments import explains_arguments
from moesaic.base.config import parse
from moesaic.base.errors import ConfigError
from moesaic.dist.all_to_all import GroupAllToAll, Transport
from moesaic.dist.collectives import all_reduce_
from moesaic.dist.shm_all_to_all import make_transport
from moesaic.dist.world import Group
from moesaic.facts.job import Job
from moesaic.facts.plan import Plan
from moesaic.kernels import device as devices
from moesaic.nn.dispatch.all_to_all import DispatchGroups
from moesaic.policy.balance import (
    BalanceCostFacts,
    LayerBalancer,
    RankDevice,
    default_balance_costs,
    layer_problem,
)
from moesaic.policy.plan.dispatch import DispatchFacts, default_dispatch

PRECISIONS = {
    torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16",
}  # fmt: skip
"""Precision of a job by dtype of the experts: the dtypes that a layer may have."""
_EXPERT_NAMES = ("expert", "experts", "ep")
"""Usual names of the dimension of a mesh that splits the experts."""
_REPLICA_NAMES = ("replicate", "replica", "dp_replicate")
"""Usual names of the dimension of a mesh whose ranks hold the same experts."""


class ExpertGroup:
    """Ranks that split the experts of MoE layers, and ranks that hold copies of them.

    Layers given one object share its connections and buffers. Every rank must create it.
    """

    @explains_arguments
    def __init__(self, group: dist.ProcessGroup | DeviceMesh, timeout_s: float = 600.0) -> None:
        """Take the ranks of `group`.

        Args:
            group: a process group of all ranks, which split the experts; or a device mesh of one or
                two dimensions. The last dimension splits the experts. Ranks along the first of two
                hold the same experts.
            timeout_s: seconds after which a rank that waits for another one raises an error.
        """
        self._timeout_s = timeout_s
        self._transports = dict[str, Transport]()
        self._hosts = list[str]()
        if isinstance(group, DeviceMesh):
            _check_mesh(group)
            self.ep_group: Group = group.get_group(group.ndim - 1)
            self.replicate_group: Group | None = group.get_group(0) if group.ndim == 2 else None
            self.all_group: Group = _group_of(group.mesh)
        else:
            _check_group(group)
            self.ep_group = self.all_group = group
            self.replicate_group = None

    @property
    def ep_size(self) -> int:
        """Ranks that split the experts of a layer."""
        return self.ep_group.size()

    @property
    def num_ranks(self) -> int:
        """All ranks: those that split the experts, times their replicas."""
        return self.all_group.size()

    def dispatch_groups(self, device: torch.device) -> DispatchGroups:
        """Return groups and transport of the dispatch of tokens on `device`."""
        transport = self._transport(device.type) if self.ep_size > 1 else None
        return DispatchGroups(
            ep_rank=self.ep_group.rank(),
            ep_size=self.ep_size,
            ep_group=self.ep_group if self.ep_size > 1 else None,
            all_group=self.all_group if self.num_ranks > 1 else None,
            transports=() if transport is None else (transport,),
            replica_transport=transport,
        )

    def make_balancer(
        self, model: Mapping[str, int], policy: str, device: torch.device, dtype: torch.dtype
    ) -> LayerBalancer:
        """Return the balancer of one layer; every rank must call this.

        Args:
            model: hidden, ffn, experts and top_k of the layer.
            policy: the policy.
            device: device of the experts.
            dtype: dtype of the experts.
        """
        attention = {"vocab": 1, "layers": 1, "heads": 1, "kv_heads": 1, "head_dim": 2}
        job = parse(
            Job,
            {
                "model": {"family": "mixtral", **attention, **model},
                "balance": {"policy": policy},
                "data": {"path": "none", "sequence": 2},
                "train": {"steps": 1, "batch": 1, "precision": PRECISIONS[dtype]},
            },
            "the layer",
        )
        plan = Plan(ranks=self.num_ranks, ep=self.ep_size, dp_shard=1, experts=job.model.experts)
        local = RankDevice(platform.node(), devices.kind(device), torch.get_num_threads())
        ranks = [local] * self.num_ranks
        dist.all_gather_object(ranks, local, group=self.all_group)
        costs = default_balance_costs(BalanceCostFacts.of_job(job, plan, ranks))
        balancer = LayerBalancer(job.balance, layer_problem(job, plan, job.balance, costs, 0))
        balancer.warm_up(logging.getLogger(__name__).warning)
        return balancer

    def __deepcopy__(self, memo: object) -> ExpertGroup:
        """Return this object: copies of a layer share its ranks."""
        return self

    def deduplicates(self, top_k: int) -> bool:
        """Return whether a token travels once per rank instead of once per expert, which pays
        between hosts."""
        if not self._hosts:
            self._hosts = [platform.node()] * self.ep_size
            dist.all_gather_object(self._hosts, platform.node(), group=self.ep_group)
        facts = DispatchFacts([list(range(self.ep_size))], self._hosts, top_k)
        return default_dispatch(facts).dispatch == "dedup"

    def _transport(self, device_type: str) -> Transport:
        """Return the transport of all layers on such a device, created on first use."""
        if device_type not in self._transports:
            self._transports[device_type] = (
                make_transport(self.ep_group, self._timeout_s)
                if device_type == "cpu"
                else GroupAllToAll(self.ep_group)
            )
        return self._transports[device_type]

    def close(self) -> None:
        """Close connections; layers with this group compute no more."""
        for transport in self._transports.values():
            transport.close()
        self._transports.clear()

    def average_gradient(self, gradient: Tensor) -> Tensor:
        """Return an expert gradient averaged over all ranks, as data parallelism does for dense
        parameters.

        The exchange of tokens has summed it over the ranks that split the experts.
        """
        return all_reduce_(gradient / self.num_ranks, self.replicate_group)

    def broadcast_seed(self) -> int:
        """Return a seed from torch's generator on the first rank."""
        seed = [int(torch.randint(2**62, ()))]
        dist.broadcast_object_list(seed, group=self.all_group, group_src=0)
        return seed[0]


def _check_group(group: object) -> None:
    """Raise unless `group` is a process group of all ranks."""
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ConfigError(
            "group is a process group that this rank is not in: create the layer on ranks of the "
            "group only"
        )
    if not isinstance(group, dist.ProcessGroup):
        raise ConfigError(
            f"group = {group!r} is not a process group: give one of all ranks, such as "
            "torch.distributed.group.WORLD, or a device mesh, such as "
            f"{_example_mesh('replicas', 'ranks')}"
        )
    if group.size() < dist.get_world_size():
        raise _partial("a process group", group.size())


def _check_mesh(mesh: DeviceMesh) -> None:
    """Raise unless the dimensions of `mesh` are replicas, if there are any, and ranks that split
    the experts."""
    names = mesh.mesh_dim_names or ()
    if mesh.ndim > 2:
        shown = f" ({', '.join(names)})" if names else ""
        raise ConfigError(
            f"group is a device mesh of {mesh.ndim} dimensions{shown}: give two of them, that of "
            'replicas and that of ranks that split the experts, such as mesh["replicate", "expert"]'
        )
    if mesh.ndim == 1 and mesh.size() < dist.get_world_size():
        raise _partial("a device mesh", mesh.size())
    if mesh.ndim == 2 and names and (names[0] in _EXPERT_NAMES or names[1] in _REPLICA_NAMES):
        raise ConfigError(
            f"group is a device mesh with the dimensions {names}, but its last dimension splits "
            f"the experts, and ranks along the first hold replicas: give {(names[1], names[0])}"
        )


def _partial(kind: str, size: int) -> ConfigError:
    """Return the error for a group of `size` ranks, which does not say who holds replicas."""
    ranks = dist.get_world_size()
    replicas = "replicas" if ranks % size else ranks // size
    return ConfigError(
        f"group is {kind} of {size} of the {ranks} ranks, so other ranks hold the same experts: "
        f"give a device mesh of all of them, such as {_example_mesh(replicas, size)}"
    )


def _example_mesh(replicas: object, ranks: object) -> str:
    names = 'mesh_dim_names=("replicate", "expert")'
    return f'init_device_mesh("cpu", ({replicas}, {ranks}), {names})'


def _group_of(ranks: Tensor) -> Group:
    """Return the process group of all `ranks`."""
    if ranks.numel() == dist.get_world_size():
        world: Group | None = dist.group.WORLD
        assert world is not None
        return world
    group: Group = dist.new_group(ranks.flatten().tolist(), use_local_synchronization=True)
    return group
