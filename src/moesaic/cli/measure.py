"""One rank's part in a probe, and the process of a rank that `moesaic probe` started."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.table import Table

from moesaic import __version__
from moesaic.base.config import parse
from moesaic.cli import flags, screen
from moesaic.cli.progress import watched
from moesaic.cli.rank import bounded
from moesaic.cli.start import at_once
from moesaic.dist.probe.settings import ProbeConfig

if TYPE_CHECKING:
    from moesaic.dist.probe.probe import Found

_HALF_WITHIN, _MOST_WITHIN = 0.2, 0.5
"""Repeats that lie farther apart, of half of the points and of nine tenths, are worth a warning."""
LESS_MEMORY = "start fewer ranks with --nproc, or lower largest"


@dataclass(frozen=True)
class Part:
    """What a rank must know to take part; every rank is told the same."""

    settings: dict[str, Any]
    out: str
    """The file to write."""
    as_json: bool
    """Print JSON."""
    command: list[str]
    """The command line as the user gave it."""


def take_part(part: Part) -> None:
    """Measure; rank 0 writes the file and says what was found."""
    with at_once():
        from moesaic.dist.probe.probe import deadline, num_parts, probe
        from moesaic.dist.world import World

    config = parse(ProbeConfig, part.settings, "settings")
    with at_once():
        world = World.from_launcher(config.device, deadline(config), key="device")
    try:
        with watched(world.leads, num_parts(config)) as watch:
            found = probe(world, config, watch)
    finally:
        world.leave()
    if found is not None:
        found = replace(found, notes=[*found.notes, *_unsteady(found, config)])
        for note in found.notes:
            screen.warn(note)
        _write(Path(part.out), found)
        _tell(part, found)


def _write(path: Path, found: Found) -> None:
    opening = (
        f"# Measured by moesaic {__version__} on {datetime.now():%Y-%m-%d %H:%M}, "
        f"{len(found.repeats)} times over.\n# {_agreement(found)}.\n"
        "# In bytes, seconds, bytes a second and operations a second. What each key means is in\n"
        "# docs/facts.md; `moesaic plan --explain cluster.hosts` says it too.\n"
        + "".join(f"# {note}.\n" for note in found.notes)
        + "\n"
    )
    flags.write_new("--out", path, opening + found.cluster.to_toml())


def _unsteady(found: Found, config: ProbeConfig) -> Iterator[str]:
    """A sentence, where repeats lie too far apart to plan by."""
    half, most = _apart(found)
    if half > _HALF_WITHIN or most > _MOST_WITHIN:
        yield (
            f"the machine was not steady: half of the points repeat within {half:.0%}, nine tenths "
            f"within {most:.0%}; see what else it does and probe again, for longer and more often "
            f"(--set seconds={3 * config.seconds:g} --set repeats={2 * config.repeats})"
        )


def _apart(found: Found) -> tuple[float, float]:
    """How closely half and nine tenths of all points repeat."""
    return median(found.spreads), found.spreads[int(0.9 * (len(found.spreads) - 1))]


def _agreement(found: Found) -> str:
    """How well the repeats agree."""
    half, most = _apart(found)
    return (
        f"Of {len(found.spreads):,} points half repeat within {half:.0%}, nine tenths within "
        f"{most:.0%}"
    )


def _tell(part: Part, found: Found) -> None:
    from moesaic.dist.probe.cluster import headlines
    from moesaic.dist.probe.timing import spread

    repeats = zip(*(headlines(one) for one in found.repeats), strict=True)
    rows = [
        (headline, spread([one.value for one in several]))
        for headline, several in zip(headlines(found.cluster), repeats, strict=True)
    ]
    half, most = _apart(found)
    if part.as_json:
        screen.as_json(
            {
                "out": part.out,
                "figures": [{**line._asdict(), "spread": apart} for line, apart in rows],
                "points": {
                    "count": len(found.spreads), "half_within": half, "nine_tenths_within": most,
                },
                "notes": found.notes,
                "cluster": found.cluster.model_dump(mode="json", by_alias=True),
            }
        )  # fmt: skip
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("", "figure", "repeats within"):
        table.add_column(title, justify="left" if not title else "right")
    thing = ""
    for line, apart in rows:
        if line.thing != thing:
            thing = line.thing
            table.add_row(thing, style="bold")
        table.add_row(f"  {line.what}", screen.quantity(line.value, line.unit), f"{apart:.0%}")
    screen.show(table)
    screen.say(f"\n{_agreement(found)}.")
    screen.say(f"wrote {part.out}")


def encode(part: Part) -> str:
    """The argument of a rank's process."""
    return json.dumps(asdict(part))


def main() -> int:
    """The process of one rank, which `cli.start` begins with a part as JSON."""
    part = Part(**json.loads(sys.argv[1]))
    sys.argv = part.command
    return bounded(lambda: take_part(part), LESS_MEMORY)
