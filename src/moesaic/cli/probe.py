"""`moesaic probe`: measured speed of this machine, or of all hosts under torchrun."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moesaic import __version__
from moesaic.api import cluster as clusters
from moesaic.api.launch import is_leader, num_ranks
from moesaic.base.units import format_bytes, format_quantity, plural
from moesaic.cli import flags, screen
from moesaic.cli.flags import DryRun, Explain, Json, Out, Sets
from moesaic.dist.probe import disks
from moesaic.dist.probe.settings import ProbeConfig
from moesaic.facts.cluster import Cluster

if TYPE_CHECKING:
    from moesaic.dist.probe.probe import ProbeResult

Nproc = Annotated[
    int | None,
    typer.Option(
        "--nproc", metavar="N", show_default="one per GPU, else one per core",
        help="Ranks to start on this machine.",
    ),
]  # fmt: skip


def probe(
    nproc: Nproc = None,
    sets: Sets = None,
    out: Out = None,
    dry_run: DryRun = False,
    as_json: Json = False,
    explain: Explain = None,
) -> int:
    """Measure devices, links and disks, and write a cluster file.

    The file is cluster.toml unless --out says otherwise. Under torchrun the hosts of all ranks are
    measured, with the links between them.
    """
    if explain is not None:
        flags.print_explanation(ProbeConfig, explain, as_json)
        return 0
    config = flags.parse_settings(ProbeConfig, sets)
    ranks = num_ranks(nproc)
    path = out or Path("cluster.toml")
    if is_leader():
        flags.check_new_file("--out", path, "cluster.toml")
    if dry_run:
        if is_leader():
            _print_dry_run(path, config, ranks, as_json)
        return 0
    for directory in config.disks:
        disks.check_writable(Path(directory))
    result = clusters.probe(config, nproc, is_shown=True)
    if result is not None:
        for note in result.notes:
            screen.print_warning(note)
        _write(path, result, config.repeats)
        _print_result(path, result, as_json)
    return 0


def _print_dry_run(path: Path, config: ProbeConfig, ranks: int | None, as_json: bool) -> None:
    if as_json:
        screen.print_json({"out": str(path), "ranks": ranks, "settings": config.model_dump()})
        return
    count = plural(ranks, "rank") if ranks else "one rank per GPU or core"
    screen.print_line(f"# {count} -> {path}\n")
    screen.print_line(config.to_toml().rstrip())


def _write(path: Path, result: ProbeResult, repeats: int) -> None:
    opening = (
        f"# Measured by moesaic {__version__} on {datetime.now():%Y-%m-%d %H:%M}, "
        f"{repeats} repeats.\n# {_describe_noise(result)}.\n"
        "# Units: bytes, seconds, bytes per second, operations per second. docs/facts.md explains\n"
        "# the keys; so does `moesaic plan --explain cluster.hosts`.\n"
        + "".join(f"# {note}.\n" for note in result.notes)
        + "\n"
    )
    flags.write_new_file("--out", path, opening + result.cluster.to_toml())


def _describe_noise(result: ProbeResult) -> str:
    return (
        f"Repeats of a measurement differ by {result.median_range:.0%} (median) and "
        f"{result.p90_range:.0%} (90th percentile)"
    )


def _print_result(path: Path, result: ProbeResult, as_json: bool) -> None:
    if as_json:
        ranges = {"median_range": result.median_range, "p90_range": result.p90_range}
        cluster = result.cluster.model_dump(mode="json", by_alias=True)
        screen.print_json({"out": str(path), **ranges, "notes": result.notes, "cluster": cluster})
        return
    screen.print_table(("", "figure"), _headlines(result.cluster))
    screen.print_line(f"\n{_describe_noise(result)}.")
    screen.print_line(f"wrote {path}")


def _headlines(cluster: Cluster) -> list[tuple[str, ...]]:
    """Return a table of the main figures: a heading for each device, disk and link."""
    rows = list[tuple[str, ...]]()

    def add(metric: str, value: float, unit: str) -> None:
        rows.append((f"  {metric}", format_quantity(value, unit)))

    for host in cluster.hosts:
        for device in host.devices:
            rows.append((f"{host.name}: {device.count} x {device.model}",))
            for matmul in device.matmul:
                add(f"{matmul.dtype} matmul", matmul.flops, "flop/s")
            add("memory bandwidth", device.memory_bandwidth, "B/s")
            add("kernel launch", device.launch_s, "s")
        for disk in host.disks:
            rows.append((f"{host.name}: disk {disk.path}",))
            for name in ("read", "write", "random_read", "random_write", "mixed"):
                add(name.replace("_", " "), getattr(disk, name), "B/s")
    for link in cluster.links:
        rows.append((f"{' to '.join(dict.fromkeys(link.ends))}: {link.kind}",))
        add("latency", link.latency_s, "s")
        add("bandwidth", link.bandwidth, "B/s")
        for one in link.collectives:
            size = format_bytes(one.times.num_bytes[-1])
            add(f"{one.name} of {size}, {one.ranks} ranks", one.times.seconds[-1], "s")
    return rows
