"""`moesaic probe`: measured speed of this machine, or of all hosts under torchrun."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from moesaic.api.launch import is_leader, is_torchrun, launch, num_ranks
from moesaic.api.start import exit_on_interrupt
from moesaic.cli import flags, screen
from moesaic.cli.flags import DryRun, Explain, Json, Out, Sets
from moesaic.cli.probe_worker import ProbeTask, encode, run_probe_task
from moesaic.dist.probe import disks
from moesaic.dist.probe.settings import ProbeConfig

MODULE = "moesaic.cli.probe_worker"
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
    task = ProbeTask(config.model_dump(), str(path), as_json, sys.argv)
    for directory in config.disks:
        disks.check_writable(Path(directory))
    if is_torchrun():
        run_probe_task(task)
        return 0
    return _run_task(task, _num_ranks(config, ranks))


def _num_ranks(config: ProbeConfig, ranks: int | None) -> int:
    """Return the number of ranks to start; raise ConfigError if this machine lacks devices."""
    with exit_on_interrupt():
        from moesaic.kernels import device

    kind = device.resolve(config.device, key="device")
    ranks = ranks or device.num_devices(kind)
    device.resolve(config.device, ranks - 1, key="device")
    return ranks


def _run_task(task: ProbeTask, ranks: int) -> int:
    if ranks == 1:
        run_probe_task(task)
        return 0
    launch(MODULE, encode(task), ranks)
    return 0


def _print_dry_run(path: Path, config: ProbeConfig, ranks: int | None, as_json: bool) -> None:
    if as_json:
        screen.print_json({"out": str(path), "ranks": ranks, "settings": config.model_dump()})
        return
    count = f"{ranks} ranks" if ranks else "one rank per GPU or core"
    screen.print_line(f"# {count} -> {path}\n")
    screen.print_line(config.to_toml().rstrip())
