"""Comparison of several runs: headline numbers, loss and speed, one colour per run."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from moesaic.report.charts.figure import SERIES, Figure, column, curve, layout
from moesaic.report.document import MARK, document
from moesaic.report.facts import RunFacts
from moesaic.report.page import card, figure_or_unknown, table
from moesaic.report.series import sample, smooth
from moesaic.report.summary import summary
from moesaic.report.wording import (
    UNKNOWN,
    count,
    duration,
    listing,
    loss,
    plural,
    size,
    three,
    timing,
)

_BALANCE = ("replicas", "imbalance_before", "imbalance_after")
_HEADLINES = "Headline of each run. Look for the lowest validation loss and the most tokens/s."
_DIFFERENCES = "Loss of each run beside that of the first. Look for the first step that differs."
_BALANCES = "Means over steps. Look for the busiest rank nearest to 1, and for the verdict."
_SETTINGS = "Keys of job.json and plan.json. Look here for the cause of a difference above."
_DASHES = ("solid", "dash", "dot", "dashdot")


def render(runs: list[RunFacts]) -> str:
    """Return the comparison of `runs` as HTML."""
    names, facts = _names(runs), [summary(run) for run in runs]
    pairs = [(name, run) for name, run in zip(names, runs, strict=True) if len(run.steps)]
    figures = [_losses(pairs), _speeds(pairs)] if pairs else []
    body = (
        f'<header><div class="brand">{MARK}<div><p>moesaic comparison</p>'
        f"<h1>{html.escape(listing(names, 3))}</h1></div></div></header><main>"
        f'<section><div class="bar"><h2>{plural(len(runs), "run")}</h2></div>'
        f'<div class="card flat"><p class="guide">{_HEADLINES}</p>{_table(names, facts)}</div>'
        "</section>"
        f"{_section('Where the runs differ', _DIFFERENCES, _differences(names, runs))}"
        f"{_section('Balance', _BALANCES, _balance(names, facts))}"
        f"{_section('Settings that differ', _SETTINGS, _settings(names, runs))}"
        f'<section><div class="grid">{"".join(card(figure) for figure in figures)}</div></section>'
        "</main>"
    )
    data: dict[str, Any] = {
        "figures": [figure.to_json() for figure in figures],
        "loads": None,
        "span": max(len(run.steps) for run in runs),
    }
    return document(f"{plural(len(runs), 'run')} \N{MIDDLE DOT} moesaic comparison", body, data)


def _names(runs: list[RunFacts]) -> list[str]:
    """Return directory names, with enough parents to be unique."""
    paths = [run.directory.resolve().parts for run in runs]
    for depth in range(1, max(map(len, paths)) + 1):
        names = ["/".join(path[-depth:]) for path in paths]
        if len(set(names)) == len(set(paths)):
            break
    return names


def _table(names: list[str], every: list[dict[str, Any]]) -> str:
    rows = []
    for name, facts in zip(names, every, strict=True):
        value = {
            key: figure_or_unknown(facts[key])
            for key in (
                "recent_loss", "best_validation_loss", "tokens_per_s", "parameters_total",
                "parameters_active", "peak_memory_bytes", "seconds",
            )
        }  # fmt: skip
        rows.append(
            (
                name, facts["status"], f"{facts['step']:,}", loss(value["recent_loss"]),
                loss(value["best_validation_loss"]), count(value["tokens_per_s"]),
                count(facts["tokens"]), count(value["parameters_total"]),
                count(value["parameters_active"]), str(facts["ranks"] or UNKNOWN),
                size(value["peak_memory_bytes"]), duration(value["seconds"]),
            )
        )  # fmt: skip
    header = (
        "run", "status", "step", "recent loss", "best validation", "tokens/s", "tokens",
        "parameters", "active", "ranks", "peak memory", "time",
    )  # fmt: skip
    return table(header, rows)


def _section(title: str, guide: str, body: str) -> str:
    if not body:
        return ""
    content = f'<div class="card flat"><p class="guide">{guide}</p>{body}</div>'
    return f'<section><div class="bar"><h2>{title}</h2></div>{content}</section>'


def _differences(names: list[str], runs: list[RunFacts]) -> str:
    """Compare the loss of each run with the first one, over common steps."""
    first, rows = runs[0].steps, []
    for name, run in zip(names[1:], runs[1:], strict=True):
        common, mine, theirs = np.intersect1d(first.step, run.steps.step, return_indices=True)
        if not len(common):
            continue
        apart = np.abs(run.steps.loss[theirs] - first.loss[mine])
        apart = np.where(np.isfinite(apart), apart, np.inf)
        worst = int(apart.argmax())
        unequal = np.flatnonzero(apart)
        rows.append(
            (
                f"{name} against {names[0]}", f"{len(common):,}",
                f"{int(common[unequal[0]]):,}" if len(unequal) else "none",
                f"{apart[worst]:.3g} at step {int(common[worst]):,}", f"{apart[-1]:.3g}",
                f"{int(np.nansum(run.steps.num_replay_mismatches)):,}",
            )
        )  # fmt: skip
    header = (
        "runs", "common steps", "first step that differs", "largest difference",
        "at the last step", "replay mismatches",
    )  # fmt: skip
    return table(header, rows) if rows else ""


def _balance(names: list[str], every: list[dict[str, Any]]) -> str:
    """Compare the replicas of runs with a balance policy."""
    rows = []
    for name, facts in zip(names, every, strict=True):
        means = facts["balance"]
        if means is not None:
            numbers = (three(figure_or_unknown(means[key])) for key in _BALANCE)
            planning = timing(figure_or_unknown(means["planning_s"]))
            rows.append((name, *numbers, planning, means["verdict"]["title"]))
    header = (
        "run", "replicas a step", "busiest rank over the mean, without replicas", "with replicas",
        "planning", "verdict",
    )  # fmt: skip
    return table(header, rows) if rows else ""


def _settings(names: list[str], runs: list[RunFacts]) -> str:
    """List the keys of jobs and plans that differ between the runs."""
    plans = [
        {key: value for key, value in run.plan.items() if key != "predictions"} for run in runs
    ]
    settings = [
        {**dict(_flatten(run.job)), **dict(_flatten(plan, "plan."))}
        for run, plan in zip(runs, plans, strict=True)
    ]
    keys = dict.fromkeys(key for one in settings for key in one)
    rows = [
        (key, *values)
        for key, values in ((key, [one.get(key, "") for one in settings]) for key in keys)
        if len(set(values)) > 1
    ]
    return table(("key", *names), rows) if rows else ""


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", "unset" if value is None else json.dumps(value)


def _style(at: int) -> tuple[str, str]:
    return SERIES[at % len(SERIES)], _DASHES[at // len(SERIES) % len(_DASHES)]


def _losses(pairs: list[tuple[str, RunFacts]]) -> Figure:
    data = []
    for at, (name, run) in enumerate(pairs):
        colour, dash = _style(at)
        smoothed = sample(run.steps.step, smooth(run.steps.loss))
        trace = curve(
            *smoothed, name, colour, width=2, legendgroup=str(at), hovertemplate="%{y:.4f}"
        )
        trace["line"]["dash"] = dash
        data.append(trace)
        if run.validations:
            losses = np.array([validation.loss for validation in run.validations])
            data.append(
                {
                    "type": "scatter", "mode": "markers", "legendgroup": str(at),
                    "showlegend": False, "name": f"{trace['name']}, validation",
                    "x": [validation.step for validation in run.validations], "y": column(losses),
                    "marker": {"size": 8, "symbol": "diamond", "color": colour},
                    "hovertemplate": "%{y:.4f} at step %{x}",
                }
            )  # fmt: skip
    alt = "Smoothed training loss by step of " + listing([name for name, _ in pairs]) + "."
    return Figure(
        "loss",
        "Loss",
        "Training loss, smoothed; diamonds are validations. Look for the step where curves part.",
        alt,
        data,
        layout(),
        12,
        460,
    )


def _speeds(pairs: list[tuple[str, RunFacts]]) -> Figure:
    data = []
    for at, (name, run) in enumerate(pairs):
        colour, dash = _style(at)
        smoothed = sample(run.steps.step, smooth(run.steps.tokens_per_s))
        trace = curve(*smoothed, name, colour, width=2, hovertemplate="%{y:.4~s}")
        trace["line"]["dash"] = dash
        data.append(trace)
    return Figure(
        "tokens-per-second",
        "Tokens per second",
        "All ranks together, smoothed. Look for a run that is slower or declines.",
        "Tokens per second by step of " + listing([name for name, _ in pairs]) + ".",
        data,
        layout(yaxis={"rangemode": "tozero", "tickformat": "~s"}),
        12,
        320,
    )
