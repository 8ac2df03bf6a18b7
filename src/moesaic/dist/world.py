"""The world: which ranks work together, in which generation, with what patience.

A world is joined and left explicitly, any number of times in one process; each generation meets
under its own prefix of one store. torch keeps a default process group for its own use (device
meshes need it); nothing of ours reads it: groups come from here.
"""

from __future__ import annotations

import os
import re
import sys
import time
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
from moesaic.dist import device as devices
from moesaic.dist.exchange import ByGroup, Carrier
from moesaic.dist.shared import carrier_of

_TENSORS = "torch.distributed.tensor"
_REMEMBERED = (
    ("debug", "_clear_sharding_prop_cache"),
    ("_redistribute", "clear_redistribute_planner_cache"),
    ("_redistribute", "_gen_transform_infos.cache_clear"),
    ("_collective_utils", "MeshTopoInfo.build_from_mesh.cache_clear"),
)
"""Where torch remembers meshes, and what makes it forget them."""
Group = dist.ProcessGroup
"""A set of ranks that collectives run over; None stands for a set of one."""

_LOST = re.compile(
    r"closed by peer|reset by peer|broken pipe|connection was likely closed|failed to recv"
    r"|remote process exited|connection refused",
    re.IGNORECASE,
)


def lost_peer(error: BaseException) -> bool:
    """Whether `error` is what gloo, NCCL or the store say on a rank whose peer is gone."""
    return isinstance(error, RuntimeError) and _LOST.search(str(error)) is not None


@dataclass
class World:
    """One generation of ranks."""

    rank: int
    size: int
    device: torch.device
    generation: int
    deadline: timedelta
    store: Store
    everyone: Group | None = None
    _groups: dict[tuple[str, tuple[int, ...]], Group] = field(default_factory=dict)
    """Groups made so far, by purpose and ranks; the same on every rank but for membership."""
    _carriers: dict[Group, Carrier] = field(default_factory=dict)

    @classmethod
    def solo(cls, device: torch.device | None = None) -> World:
        """A world of one rank, without any process group."""
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
        deadline: timedelta = timedelta(minutes=10),
    ) -> World:
        """Meet `size - 1` others in `generation`; returns when all have come."""
        device = device or torch.device("cpu")
        devices.activate(device)
        prefixed = PrefixStore(f"generation-{generation}", store)
        dist.init_process_group(
            devices.backend(device), store=prefixed, rank=rank, world_size=size, timeout=deadline,
            device_id=device if device.type != "cpu" else None,
        )  # fmt: skip
        everyone = dist.group.WORLD
        if device.type == "cpu":  # Others may still be joining theirs, and miss who leaves at once.
            dist.barrier()
        return cls(rank, size, device, generation, deadline, prefixed, everyone)

    @classmethod
    def from_launcher(
        cls,
        device_name: str = "auto",
        deadline: timedelta | None = None,
        key: str = "train.device",
    ) -> World:
        """The world that torchrun set up in the environment; a solo world where it did not.

        `key` is the setting that named the device.
        """
        size = int(os.environ.get("WORLD_SIZE", "1"))
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        device = devices.resolve(device_name, local_rank, key)
        if size == 1:
            return cls.solo(device)
        deadline = deadline or timedelta(minutes=10)
        try:
            rank, host = int(os.environ["RANK"]), os.environ["MASTER_ADDR"]
            port = int(os.environ["MASTER_PORT"])
        except KeyError as missing:
            raise ConfigError(
                f"WORLD_SIZE = {size} without {missing.args[0]} in the environment: start the "
                "ranks with torchrun, or with --nproc"
            ) from None
        # torchrun's agent may serve the store itself; then rank 0 joins as a client too.
        served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        store = TCPStore(
            host, port, size, is_master=rank == 0 and not served, timeout=deadline,
            multi_tenant=True,
        )  # fmt: skip
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        prefixed = PrefixStore(f"attempt-{attempt}", store)
        return cls.join(rank, size, prefixed, device, deadline=deadline)

    @property
    def leads(self) -> bool:
        """Whether this rank speaks for all (writes shared files, draws the progress bar)."""
        return self.rank == 0

    def partition(self, groups: Sequence[Sequence[int]], purpose: str = "") -> Group | None:
        """The group of this rank among sets of ranks, made on first use; None for a set of one.

        Every rank of the world must call this with the same sets, in the same order. What is said
        beside all else, at times that ranks need not agree on, has groups for a `purpose` of its
        own.
        """
        mine: Group | None = None
        for ranks in groups:
            if len(ranks) < 2:
                continue
            if len(ranks) == self.size and not purpose:
                mine = self.everyone
                continue
            key = purpose, tuple(ranks)
            if key not in self._groups:
                self._groups[key] = dist.new_group(list(ranks), timeout=self.deadline)
            if self.rank in ranks:
                mine = self._groups[key]
        return mine

    def carrier(self, groups: Sequence[Sequence[int]]) -> Carrier | None:
        """What carries rows in the group of this rank among sets of ranks; None for a set of one.

        Every rank of the world must call this with the same sets, in the same order.
        """
        group = self.partition(groups)
        if group is None:
            return None
        if group not in self._carriers:
            carrier: Carrier = ByGroup(group)
            if self.device.type == "cpu":
                carrier = carrier_of(group, self.deadline.total_seconds())
            self._carriers[group] = carrier
        return self._carriers[group]

    def barrier(self) -> None:
        """Wait for every rank."""
        if self.everyone is not None:
            dist.barrier(group=self.everyone)

    def led(self, work: Callable[[], str]) -> str:
        """What `work` returns on rank 0, on every rank; what it refuses is raised on every rank."""
        if self.everyone is None:
            return work()
        word = ["", "", ""]
        if self.leads:
            try:
                word[0] = work()
            except UserError as error:
                word[1:] = type(error).__name__, str(error)
        dist.broadcast_object_list(word, src=0, group=self.everyone)
        if word[1]:
            kind: type[UserError] = getattr(errors, word[1])
            raise kind(word[2])
        return word[0]

    def await_words(self, store: Store, names: list[str]) -> bool:
        """Wait for `names` to be set in `store`; whether that was before the deadline.

        The store's own wait would not hear signals: an interrupt would come through at its end.
        """
        until, pause_s = time.monotonic() + self.deadline.total_seconds(), 0.001
        while not store.check(names):
            if time.monotonic() > until:
                return False
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, 0.05)
        return True

    def abandon(self) -> None:
        """Let go of what peers would wait for, after an error: whoever has said so much is to end
        its process. Sums may be under way that will never end, and leaving would wait for them."""
        for carrier in self._carriers.values():
            carrier.close()
        self._carriers.clear()

    def leave(self) -> None:
        """End this generation in this process."""
        self.abandon()
        if self.everyone is not None:
            dist.destroy_process_group()
            _forget_meshes()
        self.everyone = None
        self._groups.clear()


def _forget_meshes() -> None:
    """Torch remembers what it has worked out for DTensors, and with that their meshes, whose groups
    live on: threads that wake a hundred times in a second each, and are taken for those of the next
    world's meshes of the same ranks."""
    if _TENSORS not in sys.modules:
        return
    for where, forget in _REMEMBERED:
        with suppress(AttributeError):  # A version that has no such memory, or another name for it.
            attrgetter(forget)(import_module(f"{_TENSORS}.{where}"))()
