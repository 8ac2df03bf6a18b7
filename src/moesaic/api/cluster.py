"""Clusters: hosts, devices and links, measured, from a file, or by data sheet."""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesaic.api.launch import is_torchrun, launch, num_ranks, run_reporting_errors
from moesaic.api.start import exit_on_interrupt
from moesaic.base.config import parse
from moesaic.base.errors import ClusterError, ConfigError, write_error
from moesaic.base.files import atomic_replace
from moesaic.dist.probe.settings import ProbeConfig
from moesaic.facts.cluster import Cluster as ClusterFacts
from moesaic.facts.cluster import load_cluster
from moesaic.facts.cluster.file import resolve_cluster

if TYPE_CHECKING:
    from moesaic.dist.probe.probe import ProbeResult

MEMORY_HINT = "start fewer ranks (nproc), or lower largest_side"
_MAX_MEDIAN_RANGE, _MAX_P90_RANGE = 0.2, 0.5
"""Relative ranges of repeats, at the median and at the 90th percentile, that cause a warning."""


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
    def preset(
        cls, name: str, nodes: int = 1, *, bandwidth: float = 5e10, latency_s: float = 5e-6
    ) -> Cluster:
        """Return `nodes` equal hosts by their data sheets, such as "h100-8".

        Args:
            name: preset of a host, as in a cluster file.
            nodes: number of hosts.
            bandwidth: bytes per second of a host's network; the default is 400 Gbit/s.
            latency_s: latency of the network in seconds.
        """
        link = {
            "ends": ["*", "*"], "kind": "network", "bandwidth": bandwidth, "latency_s": latency_s,
        }  # fmt: skip
        host = {"name": "node", "preset": name, "replicas": nodes}
        raw = {"name": f"{nodes} x {name}", "hosts": [host], "links": [link] if nodes > 1 else []}
        return cls(resolve_cluster(raw, "the cluster"), "the cluster")

    @classmethod
    def probe(cls, nproc: int | None = None, **settings: Any) -> Cluster:
        """Measure this machine with `nproc` ranks; None: one per GPU, else one per core.

        `settings` are those of `moesaic probe`, such as `seconds=5`.
        """
        from moesaic.kernels import device as devices

        config = parse(ProbeConfig, settings, "probe")
        if is_torchrun():
            raise ConfigError("Cluster.probe under torchrun: run moesaic probe under torchrun")
        ranks = num_ranks(nproc) or devices.num_devices(
            devices.resolve(config.device, key="device")
        )
        devices.resolve(config.device, ranks - 1, key="device")
        with tempfile.TemporaryDirectory(prefix="moesaic-") as place:
            task = json.dumps({"settings": config.model_dump(), "directory": place})
            launch("moesaic.api.cluster", task, ranks)
            notes = json.loads((Path(place) / "notes.json").read_text(encoding="utf-8"))
            for note in notes:
                warnings.warn(note, stacklevel=2)
            return cls.load(Path(place) / "cluster.toml")

    def calibrate(self, *runs: str | Path) -> Cluster:
        """Return the cluster with factors that correct predictions, fitted to all `runs` at once;
        each was trained by a plan for this cluster."""
        from moesaic.api.calibration import fit_calibration

        with self.named_in_errors():
            places = [Path(run) for run in runs]
            calibration, _ = fit_calibration(places, self.facts, self._origin)
        return Cluster(self.facts.model_copy(update={"calibration": calibration}), self._origin)

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


@contextmanager
def _naming(origin: str) -> Iterator[None]:
    try:
        yield
    except ClusterError as error:
        raise ConfigError(f"{origin}: {error}") from None


def main() -> int:
    """Probe as one rank, by the task in the first argument; return the exit status."""
    return run_reporting_errors(_measure, MEMORY_HINT)


def _measure() -> None:
    """Measure; rank 0 writes the cluster file and the notes."""
    task = json.loads(sys.argv[1])
    result = measure(parse(ProbeConfig, task["settings"], "probe"), lambda _: None)
    if result is not None:
        directory = Path(task["directory"])
        (directory / "cluster.toml").write_text(result.cluster.to_toml(), encoding="utf-8")
        (directory / "notes.json").write_text(json.dumps(result.notes), encoding="utf-8")


def measure(config: ProbeConfig, on_phase: Callable[[str], None]) -> ProbeResult | None:
    """Measure as one of the ranks; return the result on rank 0.

    Imports and waiting for other ranks may swallow an interrupt, so it kills a rank meanwhile.
    """
    with exit_on_interrupt() if is_torchrun() else nullcontext():
        from moesaic.dist.probe.probe import collective_timeout, probe
        from moesaic.dist.world import World

        world = World.from_launcher(config.device, collective_timeout(config), key="device")
    try:
        result = probe(world, config, on_phase)
    finally:
        world.leave()
    if result is None:
        return None
    return replace(result, notes=[*result.notes, *_noise_warnings(result, config)])


def _noise_warnings(result: ProbeResult, config: ProbeConfig) -> Iterator[str]:
    """Yield a warning if repeats differ too much."""
    median_range, p90_range = result.repeat_ranges
    if median_range > _MAX_MEDIAN_RANGE or p90_range > _MAX_P90_RANGE:
        yield (
            f"the machine was not steady: repeats differ by {median_range:.0%} (median) and "
            f"{p90_range:.0%} (90th percentile); stop other work and probe again, for longer "
            f"(seconds = {3 * config.seconds:g}, repeats = {2 * config.repeats})"
        )
