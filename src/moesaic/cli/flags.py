"""Flags that all verbs share, with their checks and explanations.

The settings of a verb form one section (the job, for `train`). `--set` sets any key and `--explain`
describes it; no key has a flag of its own.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from pydantic import BaseModel

from moesaic.api.cluster import Cluster
from moesaic.base import keys, unknown_keys
from moesaic.base.config import SET_FLAG, Section, apply_sets, parse, read_toml
from moesaic.base.errors import ConfigError, write_error
from moesaic.base.files import atomic_create
from moesaic.base.unknown_keys import Meant
from moesaic.cli import screen
from moesaic.facts.cluster.file import ClusterFile
from moesaic.facts.cluster.presets import PRESETS
from moesaic.facts.job import CtrJob, Job
from moesaic.facts.plan import Plan

Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="To change one key; repeatable.", show_default=False
    ),
]
JobPath = Annotated[
    Path | None, typer.Argument(metavar="JOB.toml", help="Job file.", show_default=False)
]
ClusterPath = Annotated[
    str | None,
    typer.Option(
        "--cluster", metavar="FILE|PRESET", show_default=False,
        help="To name the hosts, devices and links: a file of `moesaic probe`, or a preset such as "
        "h100-8, 2xh100-8 for two hosts.",
    ),
]  # fmt: skip
PlanPath = Annotated[
    Path | None,
    typer.Option(
        "--plan", metavar="FILE", show_default=False,
        help="To use the ranks and layout of a plan from `moesaic plan --out`, perhaps edited.",
    ),
]  # fmt: skip
Out = Annotated[
    Path | None,
    typer.Option(
        "--out", metavar="PATH", help="To name the file of the results.", show_default=False
    ),
]
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", metavar="", help="To check and report first; nothing is written."),
]
Json = Annotated[
    bool, typer.Option("--json", metavar="", help="For programs: print JSON on stdout.")
]
Explain = Annotated[
    str | None,
    typer.Option(
        "--explain",
        metavar="KEY",
        help="To learn what a key means (all: every key).",
        show_default=False,
    ),
]

S = TypeVar("S", bound=Section)


class JobFiles(Job):
    """Keys of a job and of the files beside it, which count as tables of the job."""

    plan: Plan  # type: ignore[assignment]
    """Plan file of `--plan`: what each rank holds. The file has these keys without `plan.`. In a
    job `plan` is a word: "auto" searches for a layout (docs/planning.md), "layout" takes
    `[layout]`."""
    cluster: ClusterFile
    """Cluster file of `--cluster`: hosts, devices and links. The file has these keys without
    `cluster.`."""


_FILE_TABLES = ("plan", "cluster")


def parse_settings(kind: type[S], sets: Sequence[str] | None) -> S:
    """Return the settings of a verb without a file: defaults and the items of `--set`."""
    return parse(kind, apply_sets({}, sets or ()), SET_FLAG, sets or ())


def load_cluster(name: str | None) -> Cluster:
    """Return the cluster of `--cluster`: a file, or a preset."""
    if name is None:
        raise ConfigError(
            "--cluster is missing: give a cluster file (`moesaic probe` writes one), or a preset: "
            f"{keys.join_words(list(PRESETS))}, 2x{next(iter(PRESETS))} for two such hosts"
        )
    return Cluster.named(name)


def print_explanation(kind: type[BaseModel], key: str, as_json: bool) -> None:
    """Print the meaning of `key`, or of all keys.

    A name without its table, of another framework, or shortened, stands for the keys it means.
    """
    entries = list(keys.walk(kind))
    if key != "all":
        is_known = any(entry.path == key for entry in entries)
        found = Meant() if is_known else unknown_keys.meant(kind, key.split("."))
        shown = [key] if found.is_misspelt else found.keys or [key]
        explained = [keys.explain(one, unknown_keys.locate(kind, one)) for one in shown]
        if not as_json:
            way = [f"{key} is no key: {found.way}"] if found.way else []
            screen.print_line("\n".join([*explained, *way]))
            return
        tables = tuple(f"{one}." for one in shown)
        entries = [entry for entry in entries if f"{entry.path}.".startswith(tables)]
    if as_json:
        screen.print_json([entry._asdict() for entry in entries])
        return
    for entry in entries:
        default = f", {entry.default}" if entry.default else ""
        screen.print_line(f"{entry.path}  {entry.kind}{default}\n  {entry.meaning}")


def print_job_explanation(key: str, as_json: bool, job: Path | None = None) -> None:
    """Print the meaning of a key of a job, plan or cluster; search unknown keys in the job.

    A `job` file tells the kind of job. Without it, keys that language models lack are those of
    recommenders.
    """
    kind = None if job is None else read_toml(job).get("kind", "lm")
    if kind == "ctr" or (kind is None and key != "all" and _is_of_ctr_alone(key)):
        print_explanation(CtrJob, key, as_json)
        return
    everywhere = (
        key == "all" or _is_file_key(key) or not unknown_keys.meant(Job, key.split(".")).keys
    )
    print_explanation(JobFiles if everywhere else Job, key, as_json)


def _is_of_ctr_alone(key: str) -> bool:
    """Return whether jobs of kind ctr have `key`, its table or another name for it, and nothing
    else does."""
    known, others = ({entry.path for entry in keys.walk(kind)} for kind in (CtrJob, JobFiles))
    parts = key.split(".")
    if any(".".join(parts[:end]) in known - others for end in range(1, len(parts) + 1)):
        return True
    if key in others or _is_file_key(key) or unknown_keys.meant(Job, parts) != Meant():
        return False
    return bool(unknown_keys.meant(CtrJob, parts).keys)


def _is_file_key(key: str) -> bool:
    """Return whether `key` belongs to a plan or cluster file."""
    return key.partition(".")[0] in _FILE_TABLES


def check_new_file(flag: str, path: Path, name: str) -> None:
    """Raise ConfigError if no new file can be written at `path`; `name` is an example."""
    if path.is_dir():
        raise ConfigError(f"{flag} '{path}' is a directory: name a file, such as {path}/{name}")
    if path.exists() and not path.is_file():  # Such as a device.
        raise ConfigError(f"{flag} '{path}' is not a plain file: name another path")
    if path.exists():
        raise ConfigError(f"{flag} '{path}' already exists: remove it, or name another file")
    check_parent(flag, path)
    try:
        with tempfile.TemporaryFile(dir=path.absolute().parent):  # Leaves nothing behind.
            pass
    except OSError as error:
        raise write_error(f"{flag} '{path}'", error) from None


def check_parent(flag: str, path: Path) -> None:
    """Raise ConfigError unless the directory of the file that `flag` names exists."""
    directory = path.absolute().parent
    if not directory.is_dir():
        raise ConfigError(
            f"{flag} '{path}' is in a directory that does not exist: create '{directory}' first"
        )


def write_new_file(flag: str, path: Path, text: str) -> None:
    """Write the new file that `flag` names, after `check_new_file`."""
    try:
        with atomic_create(path.resolve()) as partial:
            partial.write_text(text, encoding="utf-8")
    except FileExistsError:
        raise ConfigError(
            f"{flag} '{path}' was created by another program meanwhile and is left as it is: try "
            "again with another file name"
        ) from None
    except OSError as error:
        raise write_error(f"{flag} '{path}'", error) from None


def require(value: Path | None, name: str, verb: str) -> Path:
    """Return `value`; raise ConfigError if it is missing."""
    if value is None:
        raise ConfigError(f"{name} is missing: moesaic {verb} {name} (see moesaic {verb} --help)")
    return value
