"""A cluster's file, and what a hand may write shorter in it than the fact has it.

`preset` puts a known host in place of its figures, `replicas` makes many hosts of one, `link` joins
a host's devices without a table of its own. All of it is resolved here: a `Cluster` knows none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, Field

from moesaic.base import keys
from moesaic.base.config import Section, parse, parse_toml, read_toml
from moesaic.base.errors import ConfigError
from moesaic.facts.cluster.calibration import Calibration
from moesaic.facts.cluster.cluster import Cluster, Host, Link, Wire
from moesaic.facts.cluster.presets import PRESETS, Preset

_OWN_TABLE = re.compile(r"\[\s*calibration\s*\]\s*(#.*)?")
_LINE = re.compile(r"[^\n]*\n|[^\n]+")
"""Of TOML, whatever else Unicode ends a line with."""
_MARK = "\ufeff"
"""What some editors open a file with, to say that it is UTF-8."""
_NOTE = "# Written by `moesaic calibrate`, which replaces this table."


class KnownHost(Section):
    """What may stand in place of a host's figures."""

    preset: Preset | None = None
    """A known host by name. Other keys replace what it says; `devices = { ... }`, a table and not a
    list, changes keys of each of its devices, `link = { ... }` keys of its link."""


class HostEntry(Host):
    """One machine of a file, or many alike."""

    file_keys: ClassVar[type[BaseModel] | None] = KnownHost

    replicas: int | None = Field(default=None, ge=1, le=1 << 16)
    """How many such hosts there are, called name-0, name-1, ...; unset: one, called name."""
    link: Wire | None = None
    """What joins the devices of each; [[links]] that name the host twice go before it."""


class ClusterFile(Section):
    """A file that describes a cluster."""

    name: str
    """What the cluster is called."""
    hosts: list[HostEntry] = Field(min_length=1)
    """Its machines."""
    links: list[Link] = Field(default_factory=list)
    """What joins them; between two hosts the way of fewest links is taken, of those the widest."""
    calibration: Calibration | None = None
    """What runs have shown of these figures, as `moesaic calibrate` writes it; unset: nothing."""


def load_cluster(path: Path) -> Cluster:
    """The cluster that the file at `path` describes."""
    raw = read_toml(path)
    if "hosts" not in raw and {"model", "train"} & raw.keys():
        raise ConfigError(
            f"{path} is a job, and no cluster: give the file that `moesaic probe` or you wrote, "
            "with [[hosts]]"
        )
    return resolve(raw, str(path))


def cluster_of(text: str, origin: str) -> Cluster:
    """The cluster that the text of a file describes; `origin` opens the message of an error."""
    return resolve(parse_toml(text.removeprefix(_MARK), origin), origin)


def resolve(raw: Mapping[str, Any], origin: str) -> Cluster:
    """The cluster that the tables of a file describe; `origin` opens the message of an error."""
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
            wire = dict(entry.link)
            links += [Link(ends=[name, name], **wire) for name in names if name not in joined]
    whole = {"name": file.name, "hosts": hosts, "links": links, "calibration": file.calibration}
    return parse(Cluster, whole, origin)


def with_calibration(text: str, calibration: Calibration, origin: str) -> str:
    """The text of a file with `calibration` as its last table, in place of an earlier one.

    Nothing else of it changes: no comment, no blank, no mark of its encoding at the start.
    """
    mark = _MARK * text.startswith(_MARK)
    text = text.removeprefix(mark)
    lines = _LINE.findall(text)
    heads = [index for index, line in enumerate(lines) if line.lstrip().startswith("[")]
    own = next((index for index in heads if _OWN_TABLE.fullmatch(lines[index].strip())), None)
    if own is not None:
        end = next((index for index in heads if index > own), len(lines))
        while lines[end - 1].strip().partition("#")[0] == "":  # What stands here is of the next.
            end -= 1
        lines[own:end] = []
    kept = "".join(lines)
    kept += "\n" * (not kept.endswith("\n"))
    kept += "\n" * bool(_LINE.findall(kept)[-1].strip())
    result = f"{kept}[calibration]\n{_NOTE}\n{calibration.to_toml()}"
    known, wanted = parse_toml(text, origin), calibration.model_dump()
    try:
        is_it = parse_toml(result, origin) == {**known, "calibration": wanted}
    except ConfigError:  # Two tables of that name, one of them not written as a table.
        is_it = False
    if not is_it:
        raise ConfigError(
            f"{origin}: what it says of calibration is no table [calibration] of its own: remove it"
        )
    return mark + result


def _fill_presets(raw: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """`raw` with `preset = NAME` of every host replaced by its figures, under the file's own."""
    hosts = raw.get("hosts")
    if not isinstance(hosts, list):
        return dict(raw)
    filled = [_filled(host, f"{origin}: hosts[{index}]") for index, host in enumerate(hosts)]
    return {**raw, "hosts": filled}


def _filled(host: object, where: str) -> object:
    if not isinstance(host, dict) or "preset" not in host:
        return host
    own = dict(host)
    name = own.pop("preset")
    if not isinstance(name, str) or name not in PRESETS:
        known = keys.listed([keys.show(preset) for preset in PRESETS])
        remedy = keys.choose(str(name), list(PRESETS), known)
        raise ConfigError(f"{where}.preset = {keys.show(name)} is not known: {remedy}")
    preset = PRESETS[name]
    if isinstance(own.get("devices"), dict):
        own["devices"] = [{**device, **own["devices"]} for device in preset["devices"]]
    if isinstance(own.get("link"), dict):
        own["link"] = {**preset["link"], **own["link"]}
    return {"name": name, **preset, **own}
