"""The cluster: what there is to run on, in one TOML file that `moesaic probe` writes or a hand.

A host has devices (those of one kind in one entry) and disks; a link joins two hosts, or the
devices of one. Speeds stand in it as they were measured; what was not measured is worked out from
peaks by whoever asks for a time (`policy.cost`). Units are bytes, seconds, flops.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from moesaic.base.config import Section
from moesaic.base.errors import ConfigError
from moesaic.facts.cluster.curves import Curve, Grid

DType = Literal["fp64", "fp32", "tf32", "bf16", "fp16", "fp8"]


class Matmul(Section):
    """How fast a device multiplies matrices of one type."""

    dtype: DType
    """Type of the factors."""
    flops: float = Field(gt=0)
    """Flops a second of large products, two for each multiplication."""
    products: Grid | None = None
    """Measured times; unset: large products run at `flops`, small ones are bound by memory."""


class Collective(Section):
    """Measured times of one collective operation."""

    name: Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"]
    """Which."""
    ranks: int = Field(ge=2)
    """Ranks that took part."""
    times: Curve
    """Seconds by bytes that a rank holds before it (all_gather: after it)."""


class Device(Section):
    """Devices of one kind on one host."""

    kind: Literal["cpu", "cuda", "npu", "xpu"]
    """cpu: a share of the host's cores."""
    model: str
    """What it is called."""
    count: int = Field(default=1, ge=1)
    """How many there are; of a CPU, how many ranks share its cores."""
    threads: int = Field(default=1, ge=1)
    """Threads of a rank, of a CPU."""
    memory_bytes: float = Field(gt=0)
    """Memory of one."""
    memory_bandwidth: float = Field(gt=0)
    """Bytes a second between it and its memory, read and written."""
    streams: Curve | None = None
    """Measured seconds to read and write bytes; unset: by `memory_bandwidth`."""
    call_s: float = Field(default=5e-6, ge=0)
    """Seconds that any operation takes, however small."""
    matmul: list[Matmul] = Field(min_length=1)
    """Speeds, one for each type of number."""
    price_per_hour: float = Field(default=0.0, ge=0)
    """Of one, in any currency."""

    def speed(self, dtype: str) -> Matmul:
        """How fast this device multiplies `dtype`."""
        for one in self.matmul:
            if one.dtype == dtype:
                return one
        known = ", ".join(one.dtype for one in self.matmul)
        raise ConfigError(
            f"device '{self.model}' has no speed for {dtype} (it has {known}): add a [[matmul]] "
            "with that dtype, or choose another train.precision"
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
    """The same, written."""
    mixed: float = Field(gt=0)
    """Bytes a second of half reads, half writes, in no order."""
    block_bytes: int = Field(default=4096, ge=1)
    """Size of a block."""


class Host(Section):
    """One machine."""

    name: str
    """Its name, unique."""
    memory_bytes: float = Field(gt=0)
    """Its main memory."""
    devices: list[Device] = Field(min_length=1)
    """What it computes with. Several entries of kind cpu are ways to share the same cores."""
    disks: list[Disk] = Field(default_factory=list)
    """Its disks."""


class Link(Section):
    """What joins two hosts, or the devices of one."""

    ends: list[str] = Field(min_length=2, max_length=2)
    """Names of two hosts; the same name twice: between the devices of that host."""
    kind: str
    """What it is: nvlink, pcie, ethernet, infiniband, loopback."""
    latency_s: float = Field(ge=0)
    """Seconds that the smallest message takes."""
    bandwidth: float = Field(gt=0)
    """Bytes a second, one way."""
    duplex: bool = True
    """Whether both ways run at once at that speed."""
    collectives: list[Collective] = Field(default_factory=list)
    """Measured times of whole operations over it; unset: by latency and bandwidth."""


class Cluster(Section):
    """Everything there is to run on."""

    name: str
    """What it is called."""
    hosts: list[Host] = Field(min_length=1)
    """Its machines."""
    links: list[Link] = Field(default_factory=list)
    """What joins them."""

    @model_validator(mode="after")
    def _consistent(self) -> Cluster:
        names = [host.name for host in self.hosts]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f'two hosts are called "{twice}": give each a name of its own')
        for link in self.links:
            unknown = next((end for end in link.ends if end not in names), None)
            if unknown is not None:
                raise ValueError(
                    f'a link ends at "{unknown}", which is no host: name one of {", ".join(names)}'
                )
        return self
