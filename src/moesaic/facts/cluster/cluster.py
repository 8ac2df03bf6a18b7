"""The cluster: what there is to run on, measured or written by hand.

A host has devices (those of one kind in one entry) and disks; a link joins two hosts, or the
devices of one. Speeds stand in it as they were measured; what was not measured is worked out from
peaks by whoever asks for a time. Units are bytes, seconds, flops.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from moesaic.base import keys
from moesaic.base.config import Section
from moesaic.base.errors import ClusterError
from moesaic.facts.cluster.calibration import Calibration
from moesaic.facts.cluster.curves import Curve, Grid, Heads

DType = Literal["fp64", "fp32", "tf32", "bf16", "fp16", "fp8"]


class Matmul(Section):
    """How fast a device multiplies matrices of one type."""

    dtype: DType
    """Type of the factors."""
    flops: float = Field(gt=0)
    """Flops a second of large products, two for each multiplication."""
    products: Grid | None = None
    """Measured times; unset: large products run at `flops`, small ones are bound by memory."""
    slots: Grid | None = None
    """Measured times of each of many products that are done together, as those of experts are;
    unset: as any product's."""
    attention: Heads | None = None
    """Measured times of attention; unset: by its products."""


class Passes(Section):
    """How fast kernels of one kind pass over memory."""

    kind: Literal["norm", "scale", "adamw"]
    """norm: sums of squares; scale: numbers multiplied in place; adamw: its update, fused."""
    times: Curve
    """Measured seconds by the bytes that are read and written."""


class Collective(Section):
    """Measured times of one operation of several ranks."""

    name: Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"]
    """Which operation; send: a message from one rank to another."""
    ranks: int = Field(ge=2)
    """Ranks that took part."""
    times: Curve
    """Seconds by the bytes that a rank holds before it (all_gather: after it; send: who sends)."""


class Device(Section):
    """Devices of one kind on one host."""

    kind: Literal["cpu", "gpu", "npu", "xpu"]
    """cpu: a share of the host's cores; npu: Ascend and its like; xpu: Kunlun and its like."""
    model: str
    """What it is called."""
    count: int = Field(default=1, ge=1, le=1 << 16)
    """How many there are; of a CPU, how many ranks share its cores."""
    threads: int = Field(default=1, ge=1)
    """Threads of a rank, of a CPU."""
    memory_bytes: float = Field(gt=0)
    """Memory of one, in bytes; of a CPU, the share of one rank."""
    memory_bandwidth: float = Field(gt=0)
    """Bytes a second between one and its memory, read and written, while all are busy."""
    streams: Curve | None = None
    """Measured seconds to read and write bytes, what is read having just been written; unset: by
    `memory_bandwidth`."""
    passes: list[Passes] = Field(default_factory=list)
    """Measured times of kernels that are unlike most; unset: by `streams`."""
    call_s: float = Field(default=5e-6, ge=0)
    """Seconds that any operation takes, however small."""
    special_s: float = Field(default=0.0, ge=0)
    """Seconds that an exponential, or the like, of one number takes beyond a pass over it."""
    matmul: list[Matmul] = Field(min_length=1)
    """Speeds of one while all are busy, an entry for each type of number."""
    price_per_hour: float = Field(default=0.0, ge=0)
    """Of one, for an hour, in any one currency."""

    @model_validator(mode="after")
    def _consistent(self) -> Device:
        twice = _twice([one.dtype for one in self.matmul])
        if twice is not None:
            raise ValueError(f"matmul has two speeds for {twice}: keep one")
        twice = _twice([one.kind for one in self.passes])
        if twice is not None:
            raise ValueError(f"passes has two curves for {twice}: keep one")
        return self

    def times_of(self, kind: str) -> Curve | None:
        """Measured times of passes of `kind`."""
        for one in self.passes:
            if one.kind == kind:
                return one.times
        return self.streams

    def speed(self, dtype: str) -> Matmul:
        """How fast this device multiplies `dtype`."""
        for one in self.matmul:
            if one.dtype == dtype:
                return one
        known = ", ".join(one.dtype for one in self.matmul)
        raise ClusterError(
            f"{dtype} products are asked of device '{self.model}', which has speeds for {known} "
            f'alone: add a [[hosts.devices.matmul]] with dtype = "{dtype}" to those, for a list '
            "of your own goes in the place of a preset's, or plan for another device"
        )


class Disk(Section):
    """A disk, by what was measured on it without the page cache."""

    path: str
    """A directory on it."""
    read: float = Field(gt=0)
    """Bytes a second, one after another."""
    write: float = Field(gt=0)
    """Bytes a second, one after another, on disk when done."""
    random_read: float = Field(gt=0)
    """Bytes a second of blocks of `block_bytes` in no order."""
    random_write: float = Field(gt=0)
    """Bytes a second of such blocks written, on disk when done."""
    mixed: float = Field(gt=0)
    """Bytes a second of half reads, half writes, in no order."""
    block_bytes: int = Field(default=4096, ge=1)
    """Size of a block, in bytes."""


class Host(Section):
    """One machine."""

    name: str
    """Its name, unique."""
    memory_bytes: float = Field(gt=0)
    """Its main memory, in bytes."""
    devices: list[Device] = Field(min_length=1)
    """What it computes with. Several entries of kind cpu are ways to share the same cores."""
    disks: list[Disk] = Field(default_factory=list)
    """Its disks."""
    price_per_hour: float = Field(default=0.0, ge=0)
    """Of the machine, for an hour, whatever part of it is used; its devices' prices come on top."""

    @model_validator(mode="after")
    def _consistent(self) -> Host:
        if "*" in self.name:
            raise ValueError(
                f'name = "{self.name}" holds a *, by which links name many: leave it out'
            )
        shares = _twice([device.count for device in self.devices if device.kind == "cpu"])
        if shares is not None:
            raise ValueError(f"two devices of kind cpu have count = {shares}: keep one")
        return self


class Wire(Section):
    """What joins the devices of one host, or two hosts."""

    kind: str
    """A word for what it is, such as nvlink, pcie, ethernet, infiniband or loopback."""
    latency_s: float = Field(ge=0)
    """Seconds that the smallest message takes."""
    bandwidth: float = Field(gt=0)
    """Bytes a second, one way: of one device inside a host, of a whole host between hosts."""
    duplex: bool = True
    """Whether both ways run at once at that speed."""
    shared: bool = False
    """Whether all that it joins share that speed, as on a bus or behind a narrow switch."""
    collectives: list[Collective] = Field(default_factory=list)
    """Measured times of whole operations over it, from when the last rank comes; unset: by latency
    and bandwidth."""
    skew_s: float = Field(default=0.0, ge=0)
    """Seconds by which the last of equal ranks is later than computing alone takes, where they
    compute for one second between operations; of other times it is as their square root."""

    @model_validator(mode="after")
    def _measured_once(self) -> Self:
        twice = _twice([f"{one.name} of {one.ranks} ranks" for one in self.collectives])
        if twice is not None:
            raise ValueError(f"collectives has two curves for {twice}: keep one")
        return self


class Link(Wire):
    """A wire and what it joins, the same both ways."""

    ends: list[str] = Field(min_length=2, max_length=2)
    """Names of two hosts; the same name twice: between the devices of that host. A name with `*`
    stands for all hosts that match: each of the first end is joined to each other of the second."""


class Cluster(Section):
    """Everything there is to run on."""

    name: str
    """What it is called."""
    hosts: list[Host] = Field(min_length=1)
    """Its machines."""
    links: list[Link] = Field(default_factory=list)
    """What joins them."""
    calibration: Calibration | None = None
    """What runs have shown of these figures."""

    @model_validator(mode="after")
    def _consistent(self) -> Cluster:
        twice = _twice([host.name for host in self.hosts])
        if twice is not None:
            raise ValueError(f'two hosts are called "{twice}": give each a name of its own')
        for index, link in enumerate(self.links):
            for end in link.ends:
                if not self.matches[end]:
                    names = list(self.by_name)
                    remedy = keys.choose(end, names, f"one of {keys.show(names)}")
                    raise ValueError(
                        f"links[{index}].ends = {keys.show(link.ends)}: "
                        f"no host is called {keys.show(end)}: {remedy}"
                    )
        return self

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with other hosts or links, say: it works out anew what follows from them."""
        copied = super().model_copy(update=update, deep=deep)
        for worked_out in ("by_name", "matches", "touching"):
            copied.__dict__.pop(worked_out, None)
        return copied

    @cached_property
    def by_name(self) -> dict[str, Host]:
        """The hosts by their names."""
        return {host.name: host for host in self.hosts}

    @cached_property
    def matches(self) -> dict[str, dict[str, None]]:
        """Names of hosts, in their order, by the ends of links that stand for them."""
        ends = dict.fromkeys(end for link in self.links for end in link.ends)
        exact = {end: {end: None} for end in ends if end in self.by_name}  # Mostly, and fast.
        patterns = {
            end: dict.fromkeys(filter(_pattern(end).fullmatch, self.by_name))
            for end in ends
            if end not in exact
        }
        return {**exact, **patterns}

    @cached_property
    def touching(self) -> dict[str, list[Link]]:
        """The links that end at each host, in their order."""
        found: dict[str, list[Link]] = {name: [] for name in self.by_name}
        for link in self.links:
            first, second = (self.matches[end] for end in link.ends)
            for name in {**first, **second}:
                found[name].append(link)
        return found


def _pattern(end: str) -> re.Pattern[str]:
    """What `end` of a link stands for, in which only `*` is more than itself."""
    first, *rest = map(re.escape, end.split("*"))
    if not rest:
        return re.compile(first)
    # What lies between is found where it comes first, and not sought again: it would take forever.
    between = "".join(f"(?>.*?{part})" for part in rest[:-1])
    return re.compile(f"{first}{between}.*{rest[-1]}", re.DOTALL)


def _twice(values: Sequence[str | int]) -> str | int | None:
    """A value that stands among `values` more than once, if there is one."""
    return next((value for value, times in Counter(values).items() if times > 1), None)
