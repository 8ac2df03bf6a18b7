"""World: the ranks that train together, their device, groups, store and timeout.

A process can join and leave worlds repeatedly; each generation uses its own prefix of one store.
torch needs a default process group for device meshes, but moesaic takes its groups from here.
"""

from __future__ import annotations

import os
import re
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from importlib import import_module
from operator import attrgetter

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore

from moesaic.base import errors
from moesaic.base.errors import ConfigError, UserError
from moesaic.dist.all_to_all import GroupAllToAll, Transport
from moesaic.dist.shm_all_to_all import make_transport
from moesaic.kernels import device as devices

_DTENSOR_MODULE = "torch.distributed.tensor"
_DTENSOR_CACHES = (
    ("debug", "_clear_sharding_prop_cache"),
    ("_redistribute", "clear_redistribute_planner_cache"),
    ("_redistribute", "_gen_transform_infos.cache_clear"),
    ("_collective_utils", "MeshTopoInfo.build_from_mesh.cache_clear"),
)
"""Caches of torch that keep meshes alive, and the functions that clear them."""
Group = dist.ProcessGroup
"""Process group of several ranks; None means one rank."""

_PEER_LOST = re.compile(
    r"closed by peer|reset by peer|broken pipe|connection was likely closed|failed to recv"
    r"|remote process exited|connection refused",
    re.IGNORECASE,
)


def is_peer_lost(error: BaseException) -> bool:
    """Return whether `error` is how gloo, NCCL or the store report a lost peer."""
    return isinstance(error, RuntimeError) and _PEER_LOST.search(str(error)) is not None


@dataclass
class World:
    """One generation of ranks."""

    rank: int
    size: int
    device: torch.device
    generation: int
    timeout: timedelta
    store: Store
    group: Group | None = None
    ranks: Sequence[int] = ()
    """Ranks in torch's default process group, by rank of this world."""
    is_subset: bool = False
    """True for some ranks of a world, see `subset`."""
    _groups: dict[tuple[str, tuple[int, ...]], Group] = field(default_factory=dict)
    """Groups by purpose and ranks; all ranks have the same keys, except for groups that exclude
    them."""
    _transports: dict[Group, Transport] = field(default_factory=dict)
    _subsets: list[World] = field(default_factory=list)
    """Subsets of this world, which end with it."""

    def __post_init__(self) -> None:
        """Number the ranks as torch does, unless they are given."""
        self.ranks = self.ranks or range(self.size)

    @classmethod
    def solo(cls, device: torch.device | None = None) -> World:
        """Return a world of one rank, without a process group."""
        device = device or torch.device("cpu")
        devices.activate(device)
        return cls(0, 1, device, 0, timedelta(minutes=10), HashStore())

    @classmethod
    def join(
        cls,
        rank: int,
        size: int,
        store: Store,
        device: torch.device | None = None,
        generation: int = 0,
        timeout: timedelta = timedelta(minutes=10),
    ) -> World:
        """Return the world after all `size` ranks of `generation` have joined."""
        device = device or torch.device("cpu")
        devices.activate(device)
        prefixed = PrefixStore(f"generation-{generation}", store)
        dist.init_process_group(
            devices.collective_backend(device), store=prefixed, rank=rank, world_size=size,
            timeout=timeout, device_id=device if device.type != "cpu" else None,
        )  # fmt: skip
        world_group = dist.group.WORLD
        if device.type == "cpu":  # A rank that left at once would be missed by ranks still joining.
            dist.barrier()
        return cls(rank, size, device, generation, timeout, prefixed, world_group)

    @classmethod
    def from_launcher(
        cls,
        device_name: str = "auto",
        timeout: timedelta | None = None,
        key: str = "train.device",
    ) -> World:
        """Return the world that torchrun set up in the environment, or a solo world.

        `key` is the setting that named the device, for error messages.
        """
        size = int(os.environ.get("WORLD_SIZE", "1"))
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        device = devices.resolve(device_name, local_rank, key)
        if size == 1:
            return cls.solo(device)
        timeout = timeout or timedelta(minutes=10)
        try:
            rank, host = int(os.environ["RANK"]), os.environ["MASTER_ADDR"]
            port = int(os.environ["MASTER_PORT"])
        except KeyError as missing:
            raise ConfigError(
                f"WORLD_SIZE = {size} without {missing.args[0]} in the environment; start the "
                "ranks with torchrun or --nproc"
            ) from None
        # torchrun's agent may serve the store; then rank 0 is a client too.
        served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        store = TCPStore(
            host, port, size, is_master=rank == 0 and not served, timeout=timeout,
            multi_tenant=True,
        )  # fmt: skip
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        prefixed = PrefixStore(f"attempt-{attempt}", store)
        return cls.join(rank, size, prefixed, device, timeout=timeout)

    @property
    def is_rank_zero(self) -> bool:
        """True on the rank that writes shared files and draws the progress bar."""
        return self.rank == 0

    def partition(self, groups: Sequence[Sequence[int]], purpose: str = "") -> Group | None:
        """Return the group of this rank among sets of ranks, created on first use; None for a set
        of one.

        Collective over the world: all ranks pass the same sets, in the same order. Collectives that
        ranks issue at unrelated times need separate groups, named by `purpose`. A subset only has
        the groups that it was made with.
        """
        own: Group | None = None
        for ranks in groups:
            if len(ranks) < 2:
                continue
            if len(ranks) == self.size and not purpose:
                own = self.group
                continue
            group = self._find_group(ranks, purpose)
            if self.rank in ranks:
                own = group
        return own

    def _find_group(self, ranks: Sequence[int], purpose: str) -> Group:
        """Return the group of two or more `ranks`, created on first use."""
        key = purpose, tuple(ranks)
        if key not in self._groups:
            if self.is_subset:
                raise ValueError(
                    f"the subset of ranks {list(self.ranks)} has no group {list(ranks)} for "
                    f'purpose "{purpose}": add it to the partitions of World.subset'
                )
            self._groups[key] = dist.new_group(list(ranks), timeout=self.timeout)
        return self._groups[key]

    def subset(
        self, ranks: Sequence[int], partitions: Sequence[tuple[Sequence[Sequence[int]], str]]
    ) -> World | None:
        """Return the world of some `ranks`, numbered from 0; None on the other ranks.

        Collective over this world: all ranks make the same subsets, in the same order. torch names
        a group by how many a rank has made, and NCCL splits a communicator of all ranks. The subset
        ends with this world. It has no subsets of its own.

        Args:
            ranks: ranks of this world, ascending; all of them give this world itself.
            partitions: sets of ranks of the subset, each with its purpose, that `partition` will be
                called with.
        """
        if not ranks or list(ranks) != sorted(set(ranks).intersection(range(self.size))):
            raise ValueError(
                f"ranks = {list(ranks)} in a world of {self.size} ranks: list some of 0 to "
                f"{self.size - 1}, each once, in ascending order"
            )
        if self.is_subset and len(ranks) < self.size:
            raise ValueError("a subset has no subsets: make them from the whole world")
        if self.is_subset:
            return self
        self._check_same_subset(ranks, partitions)
        if len(ranks) == self.size:
            return self
        group = self._find_group(ranks, "") if len(ranks) > 1 else None
        groups: dict[tuple[str, tuple[int, ...]], Group] = {}
        for sets, purpose in partitions:
            for one in sets:
                if len(one) > 1 and (len(one) < len(ranks) or purpose):
                    members = [ranks[index] for index in one]
                    groups[purpose, tuple(one)] = self._find_group(members, purpose)
        if self.rank not in ranks:
            return None
        store = PrefixStore(f"ranks-{'-'.join(map(str, ranks))}", self.store)
        subset = World(
            ranks.index(self.rank), len(ranks), self.device, self.generation, self.timeout, store,
            group, tuple(ranks), True, groups, self._transports,
        )  # fmt: skip
        self._subsets.append(subset)
        return subset

    def _check_same_subset(self, *arguments: object) -> None:
        """Raise ValueError on every rank if ranks pass different arguments to `subset`, which would
        wait for each other until the timeout."""
        if self.group is None:
            return
        found, digest = [0] * self.size, zlib.crc32(repr(arguments).encode())
        dist.all_gather_object(found, digest, group=self.group)
        others = [rank for rank, other in enumerate(found) if other != digest]
        if others:
            raise ValueError(
                f"ranks {others} make another subset than rank {self.rank}: make the same ones on "
                "all ranks of the world, in the same order"
            )

    def transport(self, groups: Sequence[Sequence[int]]) -> Transport | None:
        """Return the transport in the group of this rank among sets of ranks; None for a set of
        one.

        Collective over the world: all ranks pass the same sets, in the same order.
        """
        group = self.partition(groups)
        if group is None:
            return None
        if group not in self._transports:
            transport: Transport = GroupAllToAll(group)
            if self.device.type == "cpu":
                transport = make_transport(group, self.timeout.total_seconds())
            self._transports[group] = transport
        return self._transports[group]

    def barrier(self) -> None:
        """Wait for every rank."""
        if self.group is not None:
            dist.barrier(group=self.group)

    def run_on_rank_zero(self, work: Callable[[], str]) -> str:
        """Return the result of `work` on rank 0 to every rank, or raise its UserError on every
        rank."""
        if self.group is None:
            return work()
        reply = ["", "", ""]
        if self.is_rank_zero:
            try:
                reply[0] = work()
            except UserError as error:
                reply[1:] = type(error).__name__, str(error)
        dist.broadcast_object_list(reply, group_src=0, group=self.group)
        if reply[1]:
            kind: type[UserError] = getattr(errors, reply[1])
            raise kind(reply[2])
        return reply[0]

    def wait_for_keys(self, store: Store, keys: list[str]) -> bool:
        """Wait for `keys` in `store`; return False after the timeout.

        It polls, because the store's own wait would delay an interrupt until its end.
        """
        until, pause_s = time.monotonic() + self.timeout.total_seconds(), 0.001
        while not store.check(keys):
            if time.monotonic() > until:
                return False
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, 0.05)
        return True

    def close_transports(self) -> None:
        """Close the transports after an error, so that peers waiting for this rank fail too.

        The process must end next. `leave` would wait for collectives that may never finish."""
        for transport in self._transports.values():
            transport.close()
        self._transports.clear()

    def leave(self) -> None:
        """Leave this generation, with all subsets of this world."""
        assert not self.is_subset, "only the whole world leaves"
        self.close_transports()
        if self.group is not None:
            dist.destroy_process_group()
            _clear_mesh_caches()
        for world in (self, *self._subsets):  # A group has threads as long as anything names it.
            world.group = None
            world._groups.clear()
        self._subsets.clear()


def _clear_mesh_caches() -> None:
    """Clear torch's DTensor caches, which keep meshes and their groups alive.

    Each leftover group has threads that wake a hundred times a second. The next world's meshes over
    the same ranks would also reuse it."""
    if _DTENSOR_MODULE not in sys.modules:
        return
    for module, clear in _DTENSOR_CACHES:
        with suppress(AttributeError):  # Other versions of torch lack this cache.
            attrgetter(clear)(import_module(f"{_DTENSOR_MODULE}.{module}"))()
