"""The cluster model: hosts, devices, disks and links, measured or written by hand.

A host has devices (one entry for each kind) and disks. A link joins two hosts, or the devices of
one. Measured times are stored as measured; without them, the cost model derives times from peaks.
Units are bytes, seconds and flops.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from moesaic.base import keys
from moesaic.base.config import Section
from moesaic.base.errors import ClusterError
from moesaic.base.units import about_range, about_seconds, round_text
from moesaic.facts.cluster.curves import AttentionTimes, Curve, Grid

DType = Literal["fp64", "fp32", "tf32", "bf16", "fp16", "fp8"]
MIN_FACTOR, MAX_FACTOR = 0.25, 4.0
"""Range of a factor; beyond it, something other than a measured figure is wrong."""
_RESERVED_BYTES, _RESERVED_SHARE, _MAX_RESERVED_SHARE = 2 * 1024**3, 0.05, 0.2
"""Memory of an accelerator that is kept free: bytes for the driver's context and the buffers of
collectives, a share for fragmentation, and the largest share that both may take."""


class Matmul(Section):
    """Matmul speed of a device for one dtype."""

    dtype: DType
    """Dtype of the factors."""
    flops: float = Field(gt=0)
    """Flops a second of large matmuls, two for each multiply-add."""
    times: Grid | None = None
    """Measured times; unset: `flops` for large matmuls, memory bandwidth for small ones."""
    grouped_times: Grid | None = None
    """Measured times of one matmul in a grouped matmul, as of experts; unset: those of a single
    matmul."""
    attention: AttentionTimes | None = None
    """Measured times of attention; unset: those of its matmuls."""


class ElementwiseKernel(Section):
    """Measured speed of one kind of elementwise kernel."""

    kind: Literal["norm", "scale", "adamw"]
    """Kind of kernel. norm: sum of squares; scale: multiplication in place; adamw: fused update."""
    times: Curve
    """Measured seconds by the bytes that are read and written."""


class Collective(Section):
    """Measured times of one collective."""

    name: Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"]
    """Collective; send: a message from one rank to another."""
    ranks: int = Field(ge=2)
    """Ranks that took part."""
    times: Curve
    """Seconds by the bytes on a rank before it (all_gather: after it; send: on the sender)."""


class Device(Section):
    """Devices of one kind on one host."""

    kind: Literal["cpu", "gpu", "npu", "xpu"]
    """Kind of device. cpu: a share of the host's cores; npu: Ascend and similar; xpu: Kunlun and
    similar."""
    model: str
    """Name of the model."""
    count: int = Field(default=1, ge=1, le=1 << 16)
    """Number of devices; for a CPU, ranks that share its cores."""
    threads: int = Field(default=1, ge=1)
    """Threads per rank (CPU only)."""
    memory_bytes: float = Field(gt=0)
    """Memory of one device, in bytes; for a CPU, the share of one rank."""
    reserved_bytes: float | None = Field(default=None, ge=0)
    """Bytes of `memory_bytes` that plans keep free for the driver's context, buffers of collectives
    and fragmentation; unset: 0 for a CPU, else 2 GiB and 5%, but at most a fifth."""
    memory_bandwidth: float = Field(gt=0)
    """Bytes a second that one device reads and writes in its memory while all are busy."""
    memory_times: Curve | None = None
    """Measured seconds to read and write bytes that were just written; unset: by
    `memory_bandwidth`."""
    elementwise: list[ElementwiseKernel] = Field(default_factory=list)
    """Measured times of special elementwise kernels; unset: by `memory_times`."""
    launch_s: float = Field(default=5e-6, ge=0)
    """Seconds of the smallest operation."""
    transcendental_s: float = Field(default=0.0, ge=0)
    """Seconds per element that an exponential or similar function adds to an elementwise kernel."""
    reference_s: float | None = Field(default=None, gt=0)
    """Mean seconds of a fixed piece of computing, which runs time again; unset: not measured."""
    matmul: list[Matmul] = Field(min_length=1)
    """Matmul speeds of one device while all are busy, one entry per dtype."""
    price_per_hour: float = Field(default=0.0, ge=0)
    """Price of one device for an hour, in any one currency."""

    @model_validator(mode="after")
    def _consistent(self) -> Device:
        duplicate = _first_duplicate([one.dtype for one in self.matmul])
        if duplicate is not None:
            raise ValueError(f"matmul has two speeds for {duplicate}: keep one")
        duplicate = _first_duplicate([one.kind for one in self.elementwise])
        if duplicate is not None:
            raise ValueError(f"elementwise has two curves for {duplicate}: keep one")
        if self.usable_bytes <= 0:
            raise ValueError(
                f"reserved_bytes = {self.reserved_bytes:g} leaves nothing of memory_bytes = "
                f"{self.memory_bytes:g}: keep less free"
            )
        return self

    @property
    def usable_bytes(self) -> float:
        """Memory of one device without its reserve: the most that a plan may use."""
        reserved = self.reserved_bytes
        if reserved is None:
            own = _RESERVED_BYTES + _RESERVED_SHARE * self.memory_bytes
            is_cpu = self.kind == "cpu"
            reserved = 0 if is_cpu else min(own, _MAX_RESERVED_SHARE * self.memory_bytes)
        return self.memory_bytes - reserved

    def elementwise_times(self, kind: str) -> Curve | None:
        """Return the measured times of elementwise kernels of `kind`, if any."""
        for one in self.elementwise:
            if one.kind == kind:
                return one.times
        return self.memory_times

    def matmul_speed(self, dtype: str) -> Matmul:
        """Return the matmul speed for `dtype`; raise ClusterError if there is none."""
        for one in self.matmul:
            if one.dtype == dtype:
                return one
        known = ", ".join(one.dtype for one in self.matmul)
        raise ClusterError(
            f"device '{self.model}' has matmul speeds for {known}, not for {dtype}: add "
            f'[[hosts.devices.matmul]] with dtype = "{dtype}" to these (a list in the file '
            "replaces a preset's), or plan for another device"
        )


class Disk(Section):
    """A disk, with speeds measured without the page cache."""

    path: str
    """Directory on the disk."""
    read: float = Field(gt=0)
    """Bytes a second of sequential reads."""
    write: float = Field(gt=0)
    """Bytes a second of sequential writes, flushed to disk."""
    random_read: float = Field(gt=0)
    """Bytes a second of random reads of `block_bytes`."""
    random_write: float = Field(gt=0)
    """Bytes a second of random writes of `block_bytes`, flushed to disk."""
    mixed: float = Field(gt=0)
    """Bytes a second of random reads and writes in equal numbers."""
    block_bytes: int = Field(default=4096, ge=1)
    """Bytes of a random read or write."""


class Host(Section):
    """One machine."""

    name: str
    """Name, unique in the cluster."""
    memory_bytes: float = Field(gt=0)
    """Main memory, in bytes."""
    devices: list[Device] = Field(min_length=1)
    """Devices. Several entries of kind cpu are alternative ways to share the same cores."""
    disks: list[Disk] = Field(default_factory=list)
    """Disks of the host."""
    price_per_hour: float = Field(default=0.0, ge=0)
    """Price of the whole host for an hour, even if partly used; prices of devices are added."""

    @model_validator(mode="after")
    def _consistent(self) -> Host:
        if "*" in self.name:
            raise ValueError(
                f'name = "{self.name}" has a *, which links use as a wildcard: remove it'
            )
        count = _first_duplicate([device.count for device in self.devices if device.kind == "cpu"])
        if count is not None:
            raise ValueError(f"two devices of kind cpu have count = {count}: keep one")
        return self


class LinkProperties(Section):
    """Speed of a link inside one host or between two."""

    kind: str
    """Kind of link, such as nvlink, pcie, ethernet, infiniband or loopback."""
    latency_s: float = Field(ge=0)
    """Seconds of the smallest message."""
    bandwidth: float = Field(gt=0)
    """Bytes a second in one direction: per device inside a host, per host between hosts."""
    duplex: bool = True
    """True if both directions have this speed at the same time."""
    shared: bool = False
    """True if all ends of the link share this speed, as on a bus or behind a narrow switch."""
    collectives: list[Collective] = Field(default_factory=list)
    """Measured times of collectives, from the arrival of the last rank; unset: by latency and
    bandwidth."""
    skew_s: float = Field(default=0.0, ge=0)
    """Seconds that the slowest of equal ranks lags behind after one second of compute between
    collectives. The lag grows with the square root of that time."""

    @model_validator(mode="after")
    def _check_collectives(self) -> Self:
        duplicate = _first_duplicate(
            [f"{one.name} of {one.ranks} ranks" for one in self.collectives]
        )
        if duplicate is not None:
            raise ValueError(f"collectives has two curves for {duplicate}: keep one")
        return self


class Link(LinkProperties):
    """A link and its two ends, the same in both directions."""

    ends: list[str] = Field(min_length=2, max_length=2)
    """Names of two hosts; the same name twice: between the devices of that host. A name with `*`
    matches many hosts: each match of the first end is linked to each other match of the second."""


class Calibration(Section):
    """Factors that correct predicted times: ratios of measured times to those predicted from the
    cluster's figures."""

    runs: int = Field(ge=1)
    """Number of runs that the factors come from."""
    devices: list[str] = Field(min_length=1)
    """Models of the devices of these runs; other devices are not corrected."""
    matmul: float = Field(ge=MIN_FACTOR, le=MAX_FACTOR)
    """Factor on times of matmuls and attention."""
    elementwise: float = Field(ge=MIN_FACTOR, le=MAX_FACTOR)
    """Factor on times of elementwise kernels."""
    collectives: float = Field(ge=MIN_FACTOR, le=MAX_FACTOR)
    """Factor on times of collectives."""
    error: float | None = Field(default=None, ge=0)
    """Largest error of a run's step predicted by factors of the other runs, as a fraction; unset:
    unknown, as after a single run."""
    ratios: list[Annotated[float, Field(gt=0)]] | None = Field(
        default=None, min_length=2, max_length=2
    )
    """Least and largest ratio of a published run's step to the predicted one, for a preset that is
    fitted to none of them; unset: runs of moesaic, see `error`."""
    source: str | None = None
    """Origin of published runs, such as "other trainers in bf16" for a preset; unset: runs of
    moesaic."""

    def describe(self) -> str:
        """Return the runs in words, such as "2 runs" or "15 published runs of other trainers in
        bf16"."""
        runs = f"{self.runs} {'published ' * (self.source is not None)}run{'s' * (self.runs > 1)}"
        return runs if self.source is None else f"{runs} of {self.source}"


def describe_step(step_s: float, calibration: Calibration | None) -> str:
    """Return a predicted step in words, with the error that calibration has seen, or how far other
    predictions were off."""
    text, ratios = about_seconds(step_s), calibration and calibration.ratios
    if calibration is not None and ratios:
        span = about_range(step_s, ratios)
        return f"{text} ({span} by {calibration.describe()}; calibrate with your own)"
    if calibration is None or calibration.error is None:
        return f"{text} (not calibrated: may be off by 2x)"
    return f"{text} ± {round_text(100 * calibration.error)}%"


class Cluster(Section):
    """All hosts and links to run on."""

    name: str
    """Name of the cluster."""
    hosts: list[Host] = Field(min_length=1)
    """Hosts of the cluster."""
    links: list[Link] = Field(default_factory=list)
    """Links inside and between hosts."""
    calibration: Calibration | None = None
    """Corrections of predicted times from measured runs."""

    @model_validator(mode="after")
    def _consistent(self) -> Cluster:
        duplicate = _first_duplicate([host.name for host in self.hosts])
        if duplicate is not None:
            raise ValueError(f'two hosts are named "{duplicate}": give each its own name')
        for index, link in enumerate(self.links):
            for end in link.ends:
                if not self.hosts_of_end[end]:
                    names = list(self.by_name)
                    remedy = keys.suggest_choice(end, names, f"one of {keys.show(names)}")
                    raise ValueError(
                        f"links[{index}].ends = {keys.show(link.ends)}: "
                        f"no host has the name {keys.show(end)}: {remedy}"
                    )
        return self

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with `update` applied and without the cached properties."""
        copied = super().model_copy(update=update, deep=deep)
        for cached in ("by_name", "hosts_of_end", "links_of_host"):
            copied.__dict__.pop(cached, None)
        return copied

    @cached_property
    def by_name(self) -> dict[str, Host]:
        """Hosts by name."""
        return {host.name: host for host in self.hosts}

    @cached_property
    def hosts_of_end(self) -> dict[str, dict[str, None]]:
        """Host names that match each end of a link, in their order."""
        ends = dict.fromkeys(end for link in self.links for end in link.ends)
        # Most ends are exact names, which need no pattern.
        exact = {end: {end: None} for end in ends if end in self.by_name}
        patterns = {
            end: dict.fromkeys(filter(_pattern(end).fullmatch, self.by_name))
            for end in ends
            if end not in exact
        }
        return {**exact, **patterns}

    @cached_property
    def links_of_host(self) -> dict[str, list[Link]]:
        """Links of each host, in their order."""
        found: dict[str, list[Link]] = {name: [] for name in self.by_name}
        for link in self.links:
            first, second = (self.hosts_of_end[end] for end in link.ends)
            for name in {**first, **second}:
                found[name].append(link)
        return found


def _pattern(end: str) -> re.Pattern[str]:
    """Return the pattern for an `end` of a link, where `*` is the only wildcard."""
    return re.compile(".*".join(map(re.escape, end.split("*"))), re.DOTALL)


def _first_duplicate(values: Sequence[str | int]) -> str | int | None:
    """Return a value that occurs more than once, or None."""
    return next((value for value, times in Counter(values).items() if times > 1), None)
