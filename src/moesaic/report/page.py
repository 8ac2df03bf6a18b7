"""Page of one run: headline, findings, charts, and the files of the run in folds."""

from __future__ import annotations

import html
import json
from collections.abc import Callable
from typing import Any

from moesaic.base.units import format_clock, plural
from moesaic.report.charts import (
    balance,
    clicks,
    experts,
    learning,
    memory,
    speed,
    students,
    timeline,
)
from moesaic.report.document import cards, document, header, section, table, table_card
from moesaic.report.prediction import Prediction
from moesaic.report.run_stats import STUDENT_TERMS, RunStats
from moesaic.report.summary import summary
from moesaic.report.wording import (
    UNKNOWN,
    count,
    digits,
    duration,
    loss,
    moment,
    size,
    step_range,
)

_MAX_ROWS = 200
"""Rows of a table; older ones are omitted."""
_DAY_COLUMNS: dict[str, tuple[str, Callable[[float | None], str]]] = {
    "samples": ("samples", count), "log_loss": ("log-loss", loss), "auc": ("AUC", loss),
    "normalized_entropy": ("normalised entropy", loss), "calibration": ("calibration", loss),
    "gauc": ("GAUC", loss), "rows": ("rows", count),
}  # fmt: skip
"""Columns of the table of days: figure, title and format."""


def render(run: RunStats) -> str:
    """Return the report of `run` as HTML."""
    headline = summary(run)
    parts, figures, loads = [], [], None
    if len(run.steps):
        groups = [("Learning", "", learning.figures(run)), ("Students", "", students.figures(run))]
        groups.append(("Credibility", "", clicks.label_figures(run)))
        groups.append(("Clicks", "", clicks.figures(run)))
        if run.loads is not None:
            loads = experts.page_data(run.loads)
            groups.append(("Experts", _controls(loads["layers"]), experts.figures(run.loads)))
        groups.append(("Speed", "", speed.figures(run)))
        groups.append(("Table", "", clicks.table_figures(run)))
        groups.append(("Memory", "", memory.figures(run)))
        groups.append(("Balance", "", balance.figures(run)))
        tables = {"Students": _students(run, headline)}
        parts = [
            section(title, cards(group) + tables.get(title, ""), extra)
            for title, extra, group in groups
            if group
        ]
        figures = [figure for _, _, group in groups for figure in group]
    if run.days:
        parts.append(section("Days", _days(run)))
    if run.prediction is not None:
        lanes = timeline.figures(run.prediction)
        content = _prediction_table(run.prediction, run.unit) + cards(lanes)
        parts.append(section("Predicted and measured", content))
        figures += lanes
    body = (
        f"{_head(run, headline)}<main>{_tiles(headline, run.is_frozen)}{_findings(headline)}"
        f"{''.join(parts)}{_details(run)}</main>{_foot(run)}"
    )
    title = f"{run.name} \N{MIDDLE DOT} moesaic report"
    return document(title, body, figures, len(run.steps), loads)


def _prediction_table(prediction: Prediction, unit: str) -> str:
    predicted, measured = prediction.predicted, prediction.measured
    times = {"step": (predicted.step_s, measured.step_s)} | {
        name: (predicted.phases_s.get(name), measured.phases_s.get(name))
        for name in prediction.phases()
    }
    rows = [(name, *map(duration, pair), _ratio(*pair)) for name, pair in times.items()]
    rates = predicted.tokens_per_s, measured.tokens_per_s
    rows.append((f"{unit} a second", *map(count, rates), _ratio(*rates)))
    peaks = predicted.used_bytes_by_kind.get("peak"), measured.peak_bytes
    # Resident memory includes libraries; the prediction covers tensors alone.
    ratio = UNKNOWN if measured.memory == "resident" else _ratio(*peaks)
    rows.append((f"peak memory of a rank, {measured.memory}", *map(size, peaks), ratio))
    calibration, text = predicted.calibration, prediction.describe()
    basis = f", calibrated by {calibration.describe()}" if calibration else ""
    basis += f", with the loads of '{predicted.loads}'" if predicted.loads else ""
    guide = (
        f"{text[0].upper()}{text[1:]}. Predicted for "
        f"cluster '{predicted.cluster}'{basis}; measured as medians of "
        f"{plural(measured.steps, 'step')} on rank 0. A phase includes its waiting for other ranks."
    )
    return table_card(guide, ("", "predicted", "measured", "measured / predicted"), rows)


def _ratio(predicted: float | None, measured: float | None) -> str:
    return digits(measured / predicted) if predicted and measured is not None else UNKNOWN


def _controls(layers: list[int]) -> str:
    options = "".join(
        f'<option value="{index}">layer {layer}</option>' for index, layer in enumerate(layers)
    )
    return (
        '<div class="legend" aria-hidden="true">'
        '<span>load</span><span class="scale"><i></i><span>0</span><span>1, even</span>'
        "<span>2</span><span>4 and over</span></span>"
        '<b class="dead">\N{MULTIPLICATION SIGN}</b><span>dead</span>'
        '<b class="hot">\N{BLACK UP-POINTING TRIANGLE}</b><span>hot</span></div>'
        f'<label class="choose">Layer <select id="layer">{options}</select></label>'
    )


def _head(run: RunStats, headline: dict[str, Any]) -> str:
    status, planned = headline["status"], headline["planned_steps"]
    goal = f" of {planned:,}" if planned and status != "finished" else ""
    state = f"{status} \N{MIDDLE DOT} step {headline['step']:,}{goal}"
    text = html.escape(" \N{MIDDLE DOT} ".join(_describe(run, headline)))
    return header(
        run.name,
        f'<div class="state"><span class="pill {status}">{state}</span><p>{text}</p></div>',
    )


def _describe(run: RunStats, headline: dict[str, Any]) -> list[str]:
    """Return the model, the ranks and the device in words."""
    words, model = [], run.setting("model")
    if model is not None and "dim" in model:
        words = [model["family"], f"rows of {model['dim']}"]
    elif model is not None:
        experts = f"{model['experts']} experts, top {model['top_k']}"
        words = [model["family"], f"{model['layers']} layers"]
        words.append(experts if model["experts"] else "dense")
    words.append(plural(headline["ranks"] or 1, "rank"))
    return words + ([headline["device"]] if headline["device"] else [])


def _tiles(headline: dict[str, Any], is_frozen: bool) -> str:
    unit = headline["unit"].capitalize()
    validated, best_step = headline["validation_step"], headline["best_validation_step"]
    validation = "none measured"
    if validated is not None:
        best = f"best {loss(headline['best_validation_loss'])} at {best_step:,}"
        validation = f"at step {validated:,}, {'its best' if best_step == validated else best}"
    resumes = f", {plural(headline['resumes'], 'resume')}" if headline["resumes"] else ""
    metrics = headline["clicks"] or headline["credibility"]
    of_teacher = " of the frozen teacher" if is_frozen else ""
    tiles = [
        (f"Loss{of_teacher}", loss(headline["loss"]),
         f"mean of last {headline['recent_steps']}: {loss(headline['recent_loss'])}"),
        (f"Validation loss{of_teacher}", loss(headline["validation_loss"]), validation),
        (f"{unit} per second", count(headline["tokens_per_s"]),
         f"median; {duration(headline['step_s'])} a step"),
        (f"{unit} seen", count(headline["tokens"]), "repeated steps count once"),
        _auc_tile(metrics) if metrics else _parameters_tile(headline),
        ("Ranks", str(headline["ranks"] or UNKNOWN),
         f"peak {size(headline['peak_memory_bytes'])} each"),
        ("Time", format_clock(headline["seconds"]), f"start to last event{resumes}"),
    ]  # fmt: skip
    shown = "".join(
        f'<div class="tile"><dt>{name}</dt><dd>{html.escape(text)}<small>{html.escape(note)}'
        "</small></dd></div>"
        for name, text, note in tiles
    )
    return f'<dl class="tiles">{shown}</dl>'


def _parameters_tile(headline: dict[str, Any]) -> tuple[str, str, str]:
    total, active = headline["parameters_total"], headline["parameters_active"]
    note = "all active" if active == total else f"{count(active)} active"
    return "Parameters", count(total), note


def _auc_tile(metrics: dict[str, Any]) -> tuple[str, str, str]:
    """Return the AUC of clicks or labels, with another metric as its note."""
    shown, name = metrics["validation"] or metrics["training"], "validation"
    if not metrics["validation"]:
        name = "training, recent mean"
    more = [f"{one} {digits(shown[one])}" for one in ("calibration", "accuracy") if shown.get(one)]
    return "AUC", loss(shown.get("auc")), "; ".join([name, *more])


def _days(run: RunStats) -> str:
    """Return the table of days of click data."""
    shown = run.days[-_MAX_ROWS:]
    names = [name for name in _DAY_COLUMNS if any(name in day.figures for day in shown)]
    rows = [
        (f"{day.day:,}", *(_DAY_COLUMNS[name][1](day.figures.get(name)) for name in names))
        for day in shown
    ]
    guide = (
        "Each sample is predicted before the update that it is part of. Look for AUC that falls "
        "from one day to the next."
    )
    return table_card(guide, ("day", *(_DAY_COLUMNS[name][0] for name in names)), rows)


def _students(run: RunStats, headline: dict[str, Any]) -> str:
    """Return the table of the teacher and its students."""
    students, teacher = headline["students"], "model (frozen)" if run.is_frozen else "model"
    terms = [
        one for one in ("loss", *STUDENT_TERMS, "validation_loss")
        if any(one in figures for figures in students.values())
    ]  # fmt: skip
    own = {
        "parameters_total": headline["parameters_total"], "loss": headline["recent_loss"],
        "validation_loss": headline["validation_loss"],
    }  # fmt: skip
    rows = [
        (
            name, figures.get("teacher") or UNKNOWN, count(figures.get("parameters_total")),
            *(loss(figures.get(term)) for term in terms),
        )
        for name, figures in {teacher: own, **students}.items()
    ]  # fmt: skip
    guide = (
        f"Losses are means of the last {plural(headline['recent_steps'], 'step')}, without their "
        "weights. Look for a student far above its teacher: give it more steps, or a larger model."
    )
    names = ("name", "teacher", "parameters", *(term.replace("_", " ") for term in terms))
    return table_card(guide, names, rows)


def _findings(headline: dict[str, Any]) -> str:
    findings = headline["findings"]
    if all(finding["severity"] == "note" for finding in findings) and headline["step"]:
        text = "No problem and no warning was found."
        clear = {"severity": "clear", "title": "Nothing needs attention", "text": text}
        findings = [clear, *findings]
    items = "".join(
        f'<li class="{finding["severity"]}"><span class="badge">{finding["severity"]}</span><div>'
        f"<h3>{html.escape(finding['title'])}</h3><p>{html.escape(finding['text'])}</p></div></li>"
        for finding in findings
    )
    return section("What stands out", f'<ul class="findings">{items}</ul>')


def _details(run: RunStats) -> str:
    folds = [("Starts and resumes", f"{len(run.launches):,}", _launches(run))]
    for name, file, value in (
        ("Resolved job", "job.json", run.job),
        ("Plan", "plan.json", run.plan),
        ("Versions", "versions.json", run.versions),
    ):
        text = html.escape(json.dumps(value, indent=2, ensure_ascii=False))
        folds.append((name, file, f"<pre>{text}</pre>"))
    shown = "".join(
        f"<details><summary>{name} <small>{note}</small></summary>{content}</details>"
        for name, note, content in folds
    )
    return (
        '<section class="files"><div class="bar"><h2>Details</h2></div>'
        f'<div class="folds">{shown}</div></section>'
    )


def _launches(run: RunStats) -> str:
    rows = [
        (moment(launch.start_s), f"{launch.step:,}", launch.resumed_from or "new run",
         str(launch.ranks), launch.layout or "replicated" * (launch.ranks > 1), launch.backends,
         launch.device, duration(launch.end_s - launch.start_s))
        for launch in run.launches[-_MAX_ROWS:]
    ]  # fmt: skip
    names = (
        "started", "finished steps", "from", "ranks", "layout", "kernels and transport", "device",
        "lasted",
    )  # fmt: skip
    return table(names, rows)


def _foot(run: RunStats) -> str:
    span = "no steps"
    if len(run.steps):
        steps = step_range(int(run.steps.step[0]), run.last_step)
        span = f"{steps}; last event {moment(run.last_event_s)}"
    version = html.escape(str(run.versions.get("moesaic", "?")))
    return (
        f"<footer><p>moesaic {version} \N{MIDDLE DOT} {span} \N{MIDDLE DOT} read "
        f"{moment(run.read_at_s)}.<br>Charts: drag to zoom, double-click to go back, click a name "
        "in a legend to hide it. The page comes from the files of the run and needs no network.</p>"
        '</footer><noscript><p class="noscript">The charts need JavaScript.</p></noscript>'
    )
