"""Comparison of several runs: headline numbers, differences, loss and speed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from moesaic.base.units import format_clock
from moesaic.report.charts.figure import SERIES, Figure, curve, diamonds
from moesaic.report.document import cards, document, header, section, table_card
from moesaic.report.run_stats import RunStats
from moesaic.report.series import Floats, smooth
from moesaic.report.summary import summary
from moesaic.report.wording import (
    UNKNOWN,
    count,
    digits,
    listing,
    loss,
    plural,
    size,
)

_HEADLINES = (
    "Headline of each run. Look for the lowest validation loss, the highest speed, and the busiest "
    "rank nearest to 1."
)
_DIFFERENCES = "Loss of each run beside that of the first. Look for the first step that differs."
_SETTINGS = "Keys of job.json and plan.json. Look here for the cause of a difference above."


def render(runs: Sequence[RunStats]) -> str:
    """Return the comparison of `runs` as HTML."""
    names = _names(runs)
    pairs = [(name, run) for name, run in zip(names, runs, strict=True) if len(run.steps)]
    figures = [_losses(pairs), _speeds(pairs)] if pairs else []
    title = plural(len(runs), "run")
    body = (
        f"{header('comparison', listing(names, 3))}<main>"
        f"{section(title, _headlines(names, runs))}"
        f"{_differences(names, runs)}{_settings(names, runs)}"
        f"<section>{cards(figures)}</section></main>"
    )
    num_steps = max(len(run.steps) for run in runs)
    return document(f"{title} \N{MIDDLE DOT} moesaic comparison", body, figures, num_steps)


def _names(runs: Sequence[RunStats]) -> list[str]:
    """Return directory names, with enough parents to be unique."""
    paths = [run.directory.resolve().parts for run in runs]
    for depth in range(1, max(map(len, paths)) + 1):
        names = ["/".join(path[-depth:]) for path in paths]
        if len(set(names)) == len(set(paths)):
            break
    return names


def _headlines(names: Sequence[str], runs: Sequence[RunStats]) -> str:
    rows = []
    for name, run in zip(names, runs, strict=True):
        headline = summary(run)
        balance = headline["balance"] or {}
        rows.append(
            (
                name, headline["status"], f"{headline['step']:,}", loss(headline["recent_loss"]),
                loss(headline["best_validation_loss"]),
                f"{count(headline['tokens_per_s'])} {headline['unit']}/s",
                count(headline["parameters_total"]), str(headline["ranks"] or UNKNOWN),
                size(headline["peak_memory_bytes"]), format_clock(headline["seconds"]),
                digits(balance.get("replicas")), digits(balance.get("imbalance_before")),
                digits(balance.get("imbalance_after")),
            )
        )  # fmt: skip
    titles = (
        "run", "status", "step", "recent loss", "best validation", "speed", "parameters", "ranks",
        "peak memory", "time", "replicas a step", "busiest rank without", "with replicas",
    )  # fmt: skip
    return table_card(_HEADLINES, titles, rows)


def _differences(names: Sequence[str], runs: Sequence[RunStats]) -> str:
    """Compare the loss of each run with the first one, over common steps."""
    first, rows = runs[0].steps, []
    for name, run in zip(names[1:], runs[1:], strict=True):
        common, mine, theirs = np.intersect1d(first.step, run.steps.step, return_indices=True)
        if not len(common):
            continue
        difference = np.abs(run.steps.loss[theirs] - first.loss[mine])
        difference = np.where(np.isfinite(difference), difference, np.inf)
        worst = int(difference.argmax())
        unequal = np.flatnonzero(difference)
        rows.append(
            (
                f"{name} against {names[0]}", f"{len(common):,}",
                f"{int(common[unequal[0]]):,}" if len(unequal) else "none",
                f"{difference[worst]:.3g} at step {int(common[worst]):,}",
                f"{difference[-1]:.3g}", f"{int(np.nansum(run.steps.num_replay_mismatches)):,}",
            )
        )  # fmt: skip
    if not rows:
        return ""
    titles = (
        "runs", "common steps", "first step that differs", "largest difference",
        "at the last step", "replay mismatches",
    )  # fmt: skip
    return section("Where the runs differ", table_card(_DIFFERENCES, titles, rows))


def _settings(names: Sequence[str], runs: Sequence[RunStats]) -> str:
    """List the keys of jobs and plans that differ between the runs."""
    settings = []
    for run in runs:
        plan = {key: value for key, value in run.plan.items() if key != "predictions"}
        settings.append({**dict(_flatten(run.job)), **dict(_flatten(plan, "plan."))})
    keys = dict.fromkeys(key for one in settings for key in one)
    values = {key: [one.get(key, "") for one in settings] for key in keys}
    rows = [(key, *texts) for key, texts in values.items() if len(set(texts)) > 1]
    if not rows:
        return ""
    return section("Settings that differ", table_card(_SETTINGS, ("key", *names), rows))


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", "unset" if value is None else json.dumps(value)


def _losses(pairs: Sequence[tuple[str, RunStats]]) -> Figure:
    data = []
    for index, (name, run) in enumerate(pairs):
        trace = _curve(index, name, run, run.steps.loss, "%{y:.4f}")
        data.append(trace)
        if run.validations:
            marks = diamonds(run.validations, f"{name}, validation", trace["line"]["color"])
            data.append(marks | {"legendgroup": str(index), "showlegend": False})
    return Figure(
        "loss",
        "Loss",
        "Training loss, smoothed; diamonds are validations. Look for the step where curves part.",
        data,
        span=12,
        height=460,
    )


def _speeds(pairs: Sequence[tuple[str, RunStats]]) -> Figure:
    units = listing(list(dict.fromkeys(run.unit for _, run in pairs)))
    return Figure(
        "units-per-second",
        f"{units.capitalize()} per second",
        "All ranks together, smoothed. Look for a run that is slower or declines.",
        [
            _curve(index, name, run, run.steps.tokens_per_s, "%{y:.4~s}")
            for index, (name, run) in enumerate(pairs)
        ],
        {"yaxis": {"rangemode": "tozero", "tickformat": "~s"}},
        span=12,
        height=320,
    )


def _curve(index: int, name: str, run: RunStats, values: Floats, form: str) -> dict[str, Any]:
    colour = SERIES[index % len(SERIES)]
    return curve(
        run.steps.step, smooth(values), name, colour, form, width=2, legendgroup=str(index)
    )
