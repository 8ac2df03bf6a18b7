"""Questions to `moesaic plan`: searches, reasons, comparisons, parts, largest models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moesaic.api.cluster import Cluster
from moesaic.api.job import Job
from moesaic.api.launch import EXIT_DOES_NOT_FIT
from moesaic.api.plan_search import compare_plans, explain_block
from moesaic.base import keys
from moesaic.base.errors import ConfigError, join_mistakes
from moesaic.base.units import parse_bytes
from moesaic.cli import flags, prediction, screen, searched
from moesaic.facts.job import LayoutConfig

if TYPE_CHECKING:
    from moesaic.policy.plan.predict import PlannedJob

_EXCLUDED = {
    "--compare": (
        "--search", "--plan", "--why", "--min-cost", "--floor", "--fit", "--out", "--trace",
        "--method",
    ),
    "--fit model": (
        "--search", "--plan", "--why", "--min-cost", "--floor", "--loads", "--out", "--trace",
        "--method",
    ),
    "--fit cluster": ("--search", "--plan", "--min-cost", "--floor", "--nproc"),
    "--min-cost": ("--search", "--plan", "--nproc"),
    "--search": ("--plan",),
    "--why": ("--out", "--trace"),
}  # fmt: skip
"""Flags that a flag excludes."""
_OWNERS = {
    "--ssd": ("--fit model",), "--floor": ("--min-cost",),
    "--method": ("--search", "--min-cost", "--fit cluster"),
}  # fmt: skip
"""Flags of which one must stand beside a flag."""


@dataclass(frozen=True)
class Question:
    """Job, cluster and flags that all questions share."""

    path: Path
    """Job file."""
    cluster: Cluster
    nproc: int | None
    loads: Path | None
    method: str | None
    sets: tuple[str, ...]
    as_json: bool

    def job(self, *more: str) -> Job:
        """Return the job, with `more` items of `--set`."""
        return Job.load(self.path, sets=[*self.sets, *more])

    def predict(self, plan: Path | None, *, search: bool) -> tuple[PlannedJob, int]:
        """Return the prediction of the job, or of the best layout of a search, and the status."""
        planned = self.job().plan(
            self.cluster, nproc=self.nproc, plan=plan, loads=self.loads, search=search,
            method=self.method or "best-first", is_shown=not self.as_json,
        )  # fmt: skip
        return planned, 0 if planned.figures["fits"] else EXIT_DOES_NOT_FIT


def load_cluster_beside(name: str | None, path: Path, sets: Sequence[str]) -> Cluster:
    """Return the cluster of `--cluster`; the error also has the mistakes of the job."""
    try:
        return flags.load_cluster(name)
    except ConfigError as mistake:
        try:
            Job.load(path, sets=sets)
        except ConfigError as other:
            raise join_mistakes([mistake, other]) from None
        raise


def check_questions(given_flags: Mapping[str, object]) -> None:
    """Raise ConfigError if flags exclude each other, or need another one."""
    if given_flags["--fit"]:
        keys.check_choice("--fit", given_flags["--fit"], ["cluster", "model"])
    given = {
        flag if flag != "--fit" else f"--fit {value}"
        for flag, value in given_flags.items()
        if value
    }
    for flag, excluded in _EXCLUDED.items():
        for other in excluded if flag in given else ():
            if given_flags[other]:
                raise ConfigError(f"{flag} cannot be combined with {other}: remove one")
    for flag, owners in _OWNERS.items():
        if given_flags[flag] and not given.intersection(owners):
            raise ConfigError(
                f"{flag} {given_flags[flag]} belongs to {owners[0]}: add it, or remove {flag}"
            )


def choose_part(question: Question, floor: float | None) -> tuple[PlannedJob, int]:
    """Print which part of the cluster to take; return its plan and the exit status."""
    choice = question.job().cheapest_part(
        question.cluster, floor=floor, method=question.method or "best-first",
        loads=question.loads, is_shown=not question.as_json,
    )  # fmt: skip
    status = 0 if choice.is_reached else EXIT_DOES_NOT_FIT
    figures = {
        **choice.planned.figures,
        "cluster_parts": choice.parts,
        "is_reached": choice.is_reached,
    }
    if not question.as_json:
        searched.print_part(choice, floor)
    return choice.planned._replace(figures=figures), status


def print_block(planned: PlannedJob, block: str, as_json: bool) -> None:
    """Print why a block is where it is and takes as long as it does."""
    facts = explain_block(planned, block)
    if as_json:
        screen.print_json(facts)
    else:
        searched.print_why(facts)


def print_compared(question: Question, names: tuple[str, str]) -> int:
    """Print two plans, or layouts, side by side; return the exit status."""
    first, second = (_predict(question, name) for name in names)
    facts = compare_plans(first, second)
    if question.as_json:
        screen.print_json({"names": names, **facts})
    else:
        searched.print_comparison(names, facts)
    return 0 if any(facts["fits"]) else EXIT_DOES_NOT_FIT


def _predict(question: Question, name: str) -> PlannedJob:
    """Return the prediction of a plan file, or of a layout such as "ep=8,tp=2"."""
    is_shown = not question.as_json
    if Path(name).is_file():
        return question.job().plan(
            question.cluster, plan=Path(name), loads=question.loads, is_shown=is_shown
        )
    items = [item.strip() for item in name.split(",")]
    for item in items:
        key, equals, _ = item.partition("=")
        if not equals or (key not in LayoutConfig.model_fields and "." not in key):
            raise ConfigError(
                f"--compare {name} is neither a plan file nor a layout: give a file of "
                "`moesaic plan --out`, or keys of [layout] such as ep=8,dp_shard=all"
            )
    sets = [item if "." in item.partition("=")[0] else f"layout.{item}" for item in items]
    return question.job(*sets).plan(
        question.cluster, nproc=question.nproc, loads=question.loads, is_shown=is_shown
    )


def print_largest(question: Question, ssd: str | None) -> int:
    """Print the largest models of the job's shape; return the exit status."""
    job = question.job()
    if ssd is None and getattr(job.config, "memory", None) is not None:
        raise ConfigError(
            "--ssd is missing: cluster files do not have the space of drives; give that of each "
            "host for --fit model, such as --ssd 500GB"
        )
    if ssd is None:
        figures = job.largest_in_memory(
            question.cluster, nproc=question.nproc, is_shown=not question.as_json
        )
    else:
        try:
            ssd_bytes = parse_bytes(ssd)
        except ValueError as error:
            raise ConfigError(f"--ssd: {error}") from None
        figures = job.largest_model(question.cluster, ssd_bytes, nproc=question.nproc)
    if question.as_json:
        screen.print_json(figures)
    elif ssd is None:
        searched.print_largest_in_memory(figures)
    else:
        prediction.print_largest_model(figures)
    return 0 if ssd is not None or figures["size"] else EXIT_DOES_NOT_FIT
