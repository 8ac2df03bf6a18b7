"""Several runs on one page: their headline figures, loss and speed, one colour a run."""

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

_OF_BALANCE = ("copies", "busiest_before", "busiest_after")
_DASHES = ("solid", "dash", "dot", "dashdot")


def render(runs: list[RunFacts]) -> str:
    """The comparison of `runs` as HTML."""
    names, facts = _names(runs), [summary(run) for run in runs]
    pairs = [(name, run) for name, run in zip(names, runs, strict=True) if len(run.steps)]
    figures = [_losses(pairs), _speeds(pairs)] if pairs else []
    body = (
        f'<header><div class="brand">{MARK}<div><p>moesaic comparison</p>'
        f"<h1>{html.escape(listing(names, 3))}</h1></div></div></header><main>"
        f'<section><div class="bar"><h2>{plural(len(runs), "run")}</h2></div>'
        f'<div class="card flat">{_table(names, facts)}</div></section>'
        f"{_section('Where the runs differ', _differences(names, runs))}"
        f"{_section('Balance', _balance(names, facts))}"
        f"{_section('Settings that differ', _settings(names, runs))}"
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
    """The directories' names, with as many parents as it takes to tell them apart."""
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


def _section(title: str, body: str) -> str:
    return f'<section><h2>{title}</h2><div class="card flat">{body}</div></section>' if body else ""


def _differences(names: list[str], runs: list[RunFacts]) -> str:
    """How far each run's loss is from the first one's, over the steps that both have."""
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
                f"{int(np.nansum(run.steps.flips)):,}",
            )
        )  # fmt: skip
    header = (
        "loss of", "steps in common", "first step that differs", "largest difference",
        "at the last step", "flips",
    )  # fmt: skip
    return table(header, rows) if rows else ""


def _balance(names: list[str], every: list[dict[str, Any]]) -> str:
    """What became of copies, of runs in which a policy was asked."""
    rows = []
    for name, facts in zip(names, every, strict=True):
        told = facts["balance"]
        if told is not None:
            numbers = (three(figure_or_unknown(told[key])) for key in _OF_BALANCE)
            planning = timing(figure_or_unknown(told["planning_s"]))
            rows.append((name, *numbers, planning, told["verdict"]["title"]))
    header = (
        "run", "copies a step", "busiest rank over the mean, in the least even layer at home",
        "the same with copies", "deciding", "whether they paid",
    )  # fmt: skip
    return table(header, rows) if rows else ""


def _settings(names: list[str], runs: list[RunFacts]) -> str:
    """The keys of jobs and plans in which the runs are not alike."""
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
        "loss", "Loss", "training, smoothed; diamonds: validation", alt, data, layout(), 12, 460
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
        "all ranks together, smoothed",
        "Tokens per second by step of " + listing([name for name, _ in pairs]) + ".",
        data,
        layout(yaxis={"rangemode": "tozero", "tickformat": "~s"}),
        12,
        320,
    )
