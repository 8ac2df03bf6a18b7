"""The cluster's file and the short forms that it may use.

`preset` stands for the figures of a known host, `replicas` for many equal hosts, and `link` for a
table of links inside a host. All of them are resolved here; a `Cluster` has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, Field

from moesaic.base import keys
from moesaic.base.config import Section, parse, read_toml
from moesaic.base.errors import ConfigError
from moesaic.facts.cluster.cluster import Calibration, Cluster, Host, Link, LinkProperties
from moesaic.facts.cluster.presets import PRESETS, PUBLISHED, PUBLISHED_PRESETS, Preset

_OTHER_THAN_SPEED = {"count", "memory_bytes", "reserved_bytes", "price_per_hour"}
"""Keys of a device that change no predicted time."""


class HostPreset(Section):
    """A preset in place of a host's figures."""

    preset: Preset | None = None
    """Known host by name. Other keys replace its figures. `devices = { ... }`, a table and not a
    list, changes keys of each of its devices; `link = { ... }` changes keys of its link."""


class HostEntry(Host):
    """One host of a file, or many equal ones."""

    file_keys: ClassVar[type[BaseModel] | None] = HostPreset

    replicas: int | None = Field(default=None, ge=1, le=1 << 16)
    """Number of equal hosts, named name-0, name-1, ...; unset: one, with its own name."""
    link: LinkProperties | None = None
    """Link between the devices of each host; [[links]] that name the host twice take precedence."""


class ClusterFile(Section):
    """A file that describes a cluster."""

    name: str
    """Name of the cluster."""
    hosts: list[HostEntry] = Field(min_length=1)
    """Hosts of the cluster."""
    links: list[Link] = Field(default_factory=list)
    """Links inside and between hosts. Traffic between two hosts takes the widest link that joins
    them."""
    calibration: Calibration | None = None
    """Corrections of predicted times from measured runs, written by `moesaic calibrate`; unset: by
    published runs if all hosts are presets that have some, else none."""


def load_cluster(path: Path) -> Cluster:
    """Return the cluster in the file at `path`."""
    raw = read_toml(path)
    if "hosts" not in raw and {"model", "train"} & raw.keys():
        raise ConfigError(
            f"{path} is a job, not a cluster: give the file that `moesaic probe` or you wrote, "
            "with [[hosts]]"
        )
    return resolve_cluster(raw, str(path))


def resolve_cluster(raw: Mapping[str, Any], origin: str) -> Cluster:
    """Return the cluster of a file's tables; error messages start with `origin`."""
    file = parse(ClusterFile, _fill_presets(raw, origin), origin)
    joined = {link.ends[0] for link in file.links if link.ends[0] == link.ends[1]}
    hosts: list[Host] = []
    links = list(file.links)
    for entry in file.hosts:
        count = entry.replicas
        names = [entry.name] if count is None else [f"{entry.name}-{i}" for i in range(count)]
        host = Host(**{key: getattr(entry, key) for key in Host.model_fields})
        hosts += [host.model_copy(update={"name": name}) for name in names]
        if entry.link is not None:
            properties = dict(entry.link)
            links += [Link(ends=[name, name], **properties) for name in names if name not in joined]
    whole = {"name": file.name, "hosts": hosts, "links": links, "calibration": file.calibration}
    return parse(Cluster, whole, origin)


def _fill_presets(raw: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Return `raw` with the preset of every host filled in; the file's own keys win."""
    hosts = raw.get("hosts")
    if not isinstance(hosts, list):
        return dict(raw)
    filled = [_fill_preset(host, f"{origin}: hosts[{index}]") for index, host in enumerate(hosts)]
    published = {"calibration": PUBLISHED} if all(map(_has_published_runs, hosts)) else {}
    return {**published, **raw, "hosts": filled}


def _has_published_runs(host: object) -> bool:
    """Return whether the host is a preset with published runs, at the speeds of its data sheet."""
    if not isinstance(host, dict) or host.get("preset") not in PUBLISHED_PRESETS:
        return False
    devices = host.get("devices", {})
    return isinstance(devices, dict) and devices.keys() <= _OTHER_THAN_SPEED and "link" not in host


def _fill_preset(host: object, where: str) -> object:
    if not isinstance(host, dict) or "preset" not in host:
        return host
    own = dict(host)
    name = keys.check_choice(f"{where}.preset", own.pop("preset"), list(PRESETS))
    preset = PRESETS[name]
    if isinstance(own.get("devices"), dict):
        own["devices"] = [{**device, **own["devices"]} for device in preset["devices"]]
    if isinstance(own.get("link"), dict):
        own["link"] = {**preset["link"], **own["link"]}
    return {"name": name, **preset, **own}
