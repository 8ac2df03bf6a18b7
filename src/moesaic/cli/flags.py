"""The flags that every verb has, and what a verb does with them before its own work.

What a verb can be told stands in one section of settings (the job, for `train`); `--set` sets any
of its keys and `--explain` says what they mean. No key has a flag of its own.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from pydantic import BaseModel
from rich.table import Table

from moesaic.base import keys
from moesaic.base.config import SETS, Section, apply_sets, parse
from moesaic.base.errors import ClusterError, ConfigError, UserError, unwritable
from moesaic.base.files import adding, replacing
from moesaic.cli import screen
from moesaic.facts.cluster import Cluster, load_cluster
from moesaic.facts.cluster.file import ClusterFile
from moesaic.facts.job import Job
from moesaic.facts.plan import Plan

Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Set one key; may be given again.", show_default=False
    ),
]
Out = Annotated[
    Path | None,
    typer.Option("--out", metavar="PATH", help="Where results go.", show_default=False),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", metavar="", help="Check and tell; write nothing.")
]
Json = Annotated[bool, typer.Option("--json", metavar="", help="Print JSON on stdout.")]
Explain = Annotated[
    str | None,
    typer.Option(
        "--explain",
        metavar="KEY",
        help="Say what a key means (all: every key).",
        show_default=False,
    ),
]

S = TypeVar("S", bound=Section)


class JobAndPlan(Job):
    """What `--explain` knows where there may be a plan: its file counts as a table of the job."""

    plan: Plan
    """The file of `--plan`, which says which rank holds what; in it keys stand without `plan.`."""


class JobPlanAndCluster(JobAndPlan):
    """The same where there is a cluster too."""

    cluster: ClusterFile
    """The file of `--cluster`, which says what there is to run on; in it keys stand without
    `cluster.`."""


_FILES = ("plan", "cluster")


def settings(kind: type[S], sets: Sequence[str] | None) -> S:
    """The settings of a verb without a file: defaults, and what `--set` changes."""
    return parse(kind, apply_sets({}, sets or ()), SETS, sets or ())


@contextmanager
def at_cluster(path: Path) -> Iterator[Cluster]:
    """The cluster at `path`; what it turns out to lack is said of that file."""
    try:
        yield load_cluster(path)
    except ClusterError as error:
        raise ConfigError(f"{path}: {error}") from None


def explain(kind: type[BaseModel], key: str, as_json: bool) -> None:
    """Print what `key` of the settings means, or all of them."""
    if key == "all":
        _explain_all(kind, as_json)
    elif as_json:
        keys.locate(kind, key)
        below = [entry for entry in keys.walk(kind) if f"{entry.path}.".startswith(f"{key}.")]
        screen.as_json([entry._asdict() for entry in below])
    else:
        screen.say(keys.explain(kind, key))


def explain_job(kind: type[JobAndPlan], key: str, as_json: bool) -> None:
    """The same of a job and the files beside it; what is a key of neither is sought in the job."""
    everywhere = key == "all" or _in_file(key) or keys.nearest(Job, key.split(".")) is None
    explain(kind if everywhere else Job, key, as_json)


def _explain_all(kind: type[BaseModel], as_json: bool) -> None:
    entries = list(keys.walk(kind))
    if as_json:
        screen.as_json([entry._asdict() for entry in entries])
        return
    if not entries:
        screen.say("this verb has no settings")
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("key", "takes", "default", "meaning"):
        table.add_column(title, overflow="fold", no_wrap=title == "key")
    for entry in entries:
        if not _in_file(entry.path):
            table.add_row(*(cell for cell in entry))
    screen.show(table)
    for entry in entries:
        if _in_file(entry.path):  # Too long a key to leave room for columns.
            default = f", {entry.default}" if entry.default else ""
            screen.say(f"{entry.path}  {entry.kind}{default}\n  {entry.meaning}")


def _in_file(key: str) -> bool:
    """Whether `key` is of a file beside a job."""
    return key.partition(".")[0] in _FILES


def check_new(flag: str, place: Path, name: str) -> None:
    """Refuse a `place` that no new file called such as `name` can have."""
    check_place(flag, place, name)
    if place.exists():
        raise UserError(
            f"{flag} '{place}' is there already, perhaps with changes of yours: remove it, or name "
            "another file"
        )


def check_place(flag: str, place: Path, name: str) -> None:
    """Refuse a `place` that no file called such as `name` can have."""
    if place.is_dir():
        raise UserError(f"{flag} '{place}' is a directory: name a file, such as {place}/{name}")
    if place.exists() and not place.is_file():  # A device, say, which a new file would replace.
        raise UserError(f"{flag} '{place}' is no plain file: name another place")
    directory = place.absolute().parent
    if not directory.is_dir():
        raise UserError(f"{flag} '{place}' is in a directory that is not there: make it first")
    try:
        with tempfile.TemporaryFile(dir=directory):  # Has no name, so that nothing of it stays.
            pass
    except OSError as error:
        raise unwritable(f"{flag} '{place}'", error) from None


def write_new(flag: str, path: Path, text: str) -> None:
    """Write the file that `flag` names and `check_new` has found not to be there."""
    try:
        with adding(path.resolve()) as partial:
            partial.write_text(text, encoding="utf-8")
    except FileExistsError:
        raise UserError(
            f"{flag} '{path}' has come to be there meanwhile, and stays as it is: do this again "
            "with the name of another file"
        ) from None
    except OSError as error:
        raise unwritable(f"{flag} '{path}'", error) from None


def need(value: Path | None, name: str, verb: str) -> Path:
    """`value`, which may be left out only beside --explain."""
    if value is None:
        raise UserError(f"{name} is missing: moesaic {verb} {name} (see moesaic {verb} --help)")
    return value


def write(flag: str, path: Path, text: str) -> None:
    """Write the file that `flag` names, whole or not at all."""
    try:
        with replacing(path) as partial:
            partial.write_text(text, encoding="utf-8")
    except OSError as error:
        raise unwritable(f"{flag} '{path}'", error) from None
