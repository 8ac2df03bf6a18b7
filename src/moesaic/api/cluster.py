"""Clusters: hosts, devices and links, measured, from a file, or by data sheet."""

from __future__ import annotations

import json
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesaic.api.launch import is_leader, is_torchrun, launch, num_ranks, run_reporting_errors
from moesaic.api.progress import probe_progress
from moesaic.api.start import exit_on_interrupt
from moesaic.base import keys
from moesaic.base.config import parse
from moesaic.base.errors import ClusterError, ConfigError, write_error
from moesaic.base.files import atomic_replace
from moesaic.dist.probe.settings import ProbeConfig
from moesaic.facts.cluster import Cluster as ClusterFacts
from moesaic.facts.cluster import load_cluster
from moesaic.facts.cluster.file import resolve_cluster
from moesaic.facts.cluster.presets import NETWORKS, PRESETS

if TYPE_CHECKING:
    from moesaic.dist.probe.probe import ProbeResult

_MEMORY_HINT = "start fewer ranks (--nproc N, nproc=N in Python), or lower largest_side"


class Cluster:
    """Hosts, devices and links to run on."""

    def __init__(self, facts: ClusterFacts, origin: str) -> None:
        self.facts, self._origin = facts, origin

    @classmethod
    def load(cls, path: str | Path) -> Cluster:
        """Return the cluster in a file that `moesaic probe` or a person wrote."""
        with _naming(str(path)):
            return cls(load_cluster(Path(path)), str(path))

    @classmethod
    def named(cls, name: str) -> Cluster:
        """Return the cluster in the file `name`, or of a preset: "h100-8", "2xh100-8" for two
        hosts."""
        nodes, preset = _split_preset(name)
        if Path(name).exists() or (preset not in PRESETS and Path(name).suffix):
            return cls.load(name)
        if preset not in PRESETS:
            known = f"a file, {keys.join_words(list(PRESETS))}, with 2x before it for two hosts"
            number = name.removesuffix(preset)
            remedy = keys.suggest_choice(name, [f"{number}{one}" for one in PRESETS], known)
            raise ConfigError(f"'{name}' is neither a file nor a preset of a cluster: {remedy}")
        return cls.preset(preset, nodes)

    @classmethod
    def of(cls, cluster: Cluster | str | Path) -> Cluster:
        """Return a cluster as it is, or the one that a path or a preset names."""
        return cluster if isinstance(cluster, Cluster) else cls.named(str(cluster))

    @classmethod
    def preset(
        cls, name: str, nodes: int = 1, *, bandwidth: float | None = None, latency_s: float = 5e-6
    ) -> Cluster:
        """Return `nodes` equal hosts by their data sheets, such as "h100-8".

        Args:
            name: preset of a host, as in a cluster file; "2xh100-8" for two in place of `nodes`.
            nodes: number of hosts.
            bandwidth: bytes per second of a host's network, one way; None: as the host is sold,
                such as eight adapters of 400 Gbit/s beside eight H100.
            latency_s: latency of the network in seconds.
        """
        number, name = _split_preset(name)
        if nodes != 1 and number != 1:
            raise ConfigError(
                f'Cluster.preset("{number}x{name}", nodes={nodes}) has two numbers: leave out nodes'
            )
        nodes *= number
        link = {
            "ends": ["*", "*"], "kind": "network", "latency_s": latency_s,
            "bandwidth": NETWORKS.get(name) if bandwidth is None else bandwidth,
        }  # fmt: skip
        host = {"name": "node", "preset": name, "replicas": nodes}
        raw = {"name": f"{nodes} x {name}", "hosts": [host], "links": [link] if nodes > 1 else []}
        return cls(resolve_cluster(raw, "the cluster"), "the cluster")

    @classmethod
    def probe(cls, nproc: int | None = None, **settings: Any) -> Cluster:
        """Measure this machine with `nproc` ranks; None: one per GPU, else one per core.

        `settings` are those of `moesaic probe`, such as `seconds=5`.
        """
        config = parse(ProbeConfig, settings, "probe")
        if is_torchrun():
            raise ConfigError("Cluster.probe under torchrun: run moesaic probe under torchrun")
        result = probe(config, nproc, is_shown=False)
        assert result is not None
        for note in result.notes:
            warnings.warn(note, stacklevel=2)
        return cls(result.cluster, "the probe")

    def calibrate(self, *runs: str | Path) -> Cluster:
        """Return the cluster with factors that correct predictions, fitted to all `runs` at once;
        each was trained by a plan for this cluster."""
        from moesaic.api.calibration import fit_calibration

        with self.named_in_errors():
            places = [Path(run) for run in runs]
            calibration, _ = fit_calibration(places, self.facts, self._origin)
        return Cluster(self.facts.model_copy(update={"calibration": calibration}), self._origin)

    def to_dict(self) -> dict[str, Any]:
        """Return the cluster as plain data."""
        return self.facts.model_dump(mode="json", by_alias=True)

    def save(self, path: str | Path) -> None:
        """Write a cluster file."""
        try:
            with atomic_replace(Path(path)) as partial:
                partial.write_text(self.facts.to_toml(), encoding="utf-8")
        except OSError as error:
            raise write_error(f"'{path}'", error) from None

    @contextmanager
    def named_in_errors(self) -> Iterator[None]:
        """Let errors about missing facts name where this cluster came from."""
        with _naming(self._origin):
            yield


def _split_preset(name: str) -> tuple[int, str]:
    """Return hosts and preset of a name such as "2xh100-8"."""
    found = re.fullmatch(r"([1-9][0-9]{0,4})x(.+)", name)
    return (int(found[1]), found[2]) if found else (1, name)


@contextmanager
def _naming(origin: str) -> Iterator[None]:
    try:
        yield
    except ClusterError as error:
        raise ConfigError(f"{origin}: {error}") from None


def probe(config: ProbeConfig, nproc: int | None, *, is_shown: bool) -> ProbeResult | None:
    """Measure with `nproc` ranks of this machine, or under torchrun as one of its ranks, which
    returns None unless it is rank 0. `is_shown` shows progress."""
    if is_torchrun():
        return _measure(config, is_shown=is_shown)
    from moesaic.kernels import device as devices

    ranks = num_ranks(nproc) or devices.num_devices(devices.resolve(config.device, key="device"))
    devices.resolve(config.device, ranks - 1, key="device")
    from moesaic.dist.probe.probe import ProbeResult

    with tempfile.TemporaryDirectory(prefix="moesaic-") as place:
        out = Path(place) / "result.json"
        task = {"settings": config.model_dump(), "out": str(out), "is_shown": is_shown}
        launch("moesaic.api.cluster", json.dumps(task), ranks, _MEMORY_HINT)
        raw = json.loads(out.read_text(encoding="utf-8"))
    return ProbeResult(**{**raw, "cluster": parse(ClusterFacts, raw["cluster"], "the probe")})


def main() -> int:
    """Probe as one rank, by the task in the first argument; return the exit status."""
    return run_reporting_errors(_run_task, _MEMORY_HINT)


def _run_task() -> None:
    """Measure; rank 0 writes the result."""
    task = json.loads(sys.argv[1])
    config = parse(ProbeConfig, task["settings"], "probe")
    result = _measure(config, is_shown=task["is_shown"])
    if result is not None:
        cluster = result.cluster.model_dump(mode="json", by_alias=True)
        Path(task["out"]).write_text(
            json.dumps({**asdict(result), "cluster": cluster}), encoding="utf-8"
        )


def _measure(config: ProbeConfig, *, is_shown: bool) -> ProbeResult | None:
    """Measure as one of the ranks; return the result on rank 0.

    Imports and waiting for other ranks may swallow an interrupt, so it kills a rank meanwhile.
    """
    with exit_on_interrupt() if is_torchrun() else nullcontext():
        from moesaic.dist.probe import probe as probing
        from moesaic.dist.world import World

        world = World.from_launcher(config.device, probing.collective_timeout(config), key="device")
    try:
        with probe_progress(is_shown and is_leader(), probing.num_phases(config)) as on_phase:
            return probing.probe(world, config, on_phase)
    finally:
        world.leave()
