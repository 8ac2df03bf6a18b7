"""`moesaic probe`: what this machine, or all that torchrun started ranks on, can do."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from moesaic.cli import flags, screen
from moesaic.cli.flags import DryRun, Explain, Json, Out, Sets
from moesaic.cli.launch import (
    RankFailed,
    launch,
    launched,
    leads,
    num_ranks,
    tell_bug,
)
from moesaic.cli.measure import Part, encode, take_part
from moesaic.cli.start import at_once
from moesaic.dist.probe import disks
from moesaic.dist.probe.settings import ProbeConfig

MODULE = "moesaic.cli.measure"
Nproc = Annotated[
    int | None,
    typer.Option(
        "--nproc", metavar="N", show_default="one a GPU, else one a core",
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
    """Measure devices, links and disks, and write them to cluster.toml.

    Under torchrun the hosts of all ranks are measured, and what joins them.
    """
    if explain is not None:
        flags.explain(ProbeConfig, explain, as_json)
        return 0
    config = flags.settings(ProbeConfig, sets)
    ranks = num_ranks(nproc)
    place = out or Path("cluster.toml")
    if leads():
        flags.check_new("--out", place, "cluster.toml")
    if dry_run:
        if leads():
            _tell(place, config, ranks, as_json)
        return 0
    part = Part(config.model_dump(), str(place), as_json, sys.argv)
    for path in config.disks:
        disks.check(Path(path))
    if launched():
        take_part(part)
        return 0
    return _run(part, _num_ranks(config, ranks))


def _num_ranks(config: ProbeConfig, ranks: int | None) -> int:
    """How many ranks to start; refuses what this machine cannot do."""
    with at_once():
        from moesaic.dist import device

    kind = device.resolve(config.device, key="device")
    ranks = ranks or device.num_devices(kind)
    device.resolve(config.device, ranks - 1, key="device")
    return ranks


def _run(part: Part, ranks: int) -> int:
    if ranks == 1:
        take_part(part)
        return 0
    try:
        launch(MODULE, encode(part), ranks)
    except RankFailed as error:
        return tell_bug(error)
    return 0


def _tell(place: Path, config: ProbeConfig, ranks: int | None, as_json: bool) -> None:
    if as_json:
        screen.as_json({"out": str(place), "ranks": ranks, "settings": config.model_dump()})
        return
    who = f"{ranks} ranks" if ranks else "a rank for every GPU or core"
    screen.say(f"# {who} -> {place}\n")
    screen.say(config.to_toml().rstrip())
