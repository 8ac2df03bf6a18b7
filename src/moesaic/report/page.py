"""Page of one run: headline, findings, charts, and the files of the run in folds."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from moesaic.report.charts import balance, experts, learning, prediction, speed, timeline
from moesaic.report.charts.figure import Figure
from moesaic.report.document import MARK, document
from moesaic.report.facts import RunFacts
from moesaic.report.findings.balance import migrated, verdict
from moesaic.report.summary import summary
from moesaic.report.wording import (
    UNKNOWN,
    count,
    duration,
    loss,
    moment,
    plural,
    size,
    stretch,
    three,
    timing,
)

_ROWS = 200
"""Rows of a table; older ones are omitted."""


def render(run: RunFacts) -> str:
    """Return the report of `run` as HTML."""
    facts = summary(run)
    sections = _sections(run)
    figures = [figure for _, _, group in sections for figure in group]
    balance_charts, prediction_charts = balance.figures(run), _prediction_charts(run)
    figures += balance_charts + prediction_charts
    data: dict[str, Any] = {
        "figures": [figure.to_json() for figure in figures],
        "loads": None,
        "span": len(run.steps),
    }
    if run.loads is not None and len(run.steps):
        data["loads"] = experts.page_data(run.loads)
    body = "".join(
        [
            _head(run, facts),
            "<main>",
            _tiles(facts, run.unit),
            _findings(facts) if len(run.steps) else _nothing_yet(run),
            *(_section(title, extra, group) for title, extra, group in sections),
            _balance_section(run, balance_charts),
            _prediction_section(run, prediction_charts),
            _details(run),
            "</main>",
            _foot(run),
        ]
    )
    return document(f"{run.name} \N{MIDDLE DOT} moesaic report", body, data)


def card(figure: Figure) -> str:
    """Return the card of one chart, with its title and guide."""
    extra = (
        '<label class="switch"><input type="checkbox" id="log-loss"> log scale</label>'
        if figure.name == "loss"
        else ""
    )
    return (
        f'<figure class="card span-{figure.span}" id="card-{figure.name}">'
        f"<figcaption><h3>{html.escape(figure.title)}</h3>{extra}"
        f'<p class="guide">{html.escape(figure.guide)}</p></figcaption>'
        f'<div class="chart" id="{figure.name}" role="img" style="--height:{figure.height}px" '
        f'aria-label="{html.escape(figure.alt)}"></div></figure>'
    )


def tile(name: str, value: str, note: str = "") -> str:
    """Return one tile of the headline."""
    return (
        f'<div class="tile"><dt>{html.escape(name)}</dt><dd>{html.escape(value)}'
        f"<small>{html.escape(note)}</small></dd></div>"
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of text."""
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in header)
    lines = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{lines}</tbody></table></div>"
    )


def figure_or_unknown(value: float | None) -> float:
    """Return `value`, or NaN, which is shown as unknown."""
    return math.nan if value is None else value


def _sections(run: RunFacts) -> list[tuple[str, str, list[Figure]]]:
    if not len(run.steps):
        return []
    first = [learning.loss(run), learning.learning_rate(run), learning.gradient_norm(run)]
    sections = [("Learning", "", first)]
    auxiliary = learning.auxiliary(run)
    if run.loads is not None:
        loads = run.loads
        group = [experts.heat_by_step(loads), experts.overview(loads), experts.imbalance(loads)]
        sections.append(("Experts", _controls(run), group + auxiliary))
    elif auxiliary:
        sections.append(("Experts", "", auxiliary))
    machine = [
        speed.tokens_per_second(run),
        speed.memory(run),
        speed.phases_over_steps(run),
        speed.phases_by_rank(run),
    ]
    sections.append(("Speed and memory", "", [figure for figure in machine if figure is not None]))
    return sections


def _section(title: str, extra: str, group: list[Figure]) -> str:
    cards = "".join(card(figure) for figure in group)
    return (
        f'<section><div class="bar"><h2>{title}</h2>{extra}</div>'
        f'<div class="grid">{cards}</div></section>'
    )


def _prediction_charts(run: RunFacts) -> list[Figure]:
    if run.prediction is None:
        return []
    lanes = timeline.step(run.prediction)
    return [prediction.phases(run.prediction), *([] if lanes is None else [lanes])]


def _prediction_section(run: RunFacts, group: list[Figure]) -> str:
    found = run.prediction
    if found is None:
        return ""
    predicted, measured = found.predicted, found.measured
    times = [("step", predicted.step_s, measured.step_s)] + [
        (name, predicted.phases_s.get(name, math.nan), measured.phases_s.get(name, math.nan))
        for name in found.phases()
    ]
    rows = [(name, timing(one), timing(other), _ratio(one, other)) for name, one, other in times]
    rate, reached = predicted.tokens_per_s, measured.tokens_per_s
    rows.append(("tokens a second", count(rate), count(reached), _ratio(rate, reached)))
    peak = predicted.memory_bytes.get("peak", math.nan)
    most = figure_or_unknown(measured.peak_bytes)
    whole = measured.memory == "resident"
    ratio = UNKNOWN if whole else _ratio(peak, most)
    rows.append((f"peak memory of a rank, {measured.memory}", size(peak), size(most), ratio))
    calibration = predicted.calibration
    basis = f", calibrated by {plural(calibration.runs, 'run')}" if calibration else ""
    basis += f", with the loads of '{predicted.loads}'" if predicted.loads else ""
    note = (
        f"Prediction for cluster '{predicted.cluster}'{basis}. Measured values are medians of "
        f"{plural(measured.steps, 'step')} on rank 0. A phase includes its waiting for other ranks."
    )
    if whole:
        note += " Resident memory includes libraries; the prediction covers tensors alone."
    body = table(("", "predicted", "measured", "measured / predicted"), rows)
    return (
        '<section><div class="bar"><h2>Predicted and measured</h2></div><div class="grid">'
        '<div class="card flat span-6"><p class="guide">Look for ratios far from 1: the plan was '
        f'wrong there.</p>{body}<p class="guide">{html.escape(note)}</p></div>'
        f"{''.join(card(figure) for figure in group)}</div></section>"
    )


def _balance_section(run: RunFacts, group: list[Figure]) -> str:
    """Return the balance section; warnings have their text among the findings."""
    migration = migrated(run)
    if not group and migration is None:
        return ""
    leads = "".join(
        f'<p class="lead"><strong>{html.escape(one.title)}.</strong>'
        f"{' ' + html.escape(one.text) if one.severity == 'note' else ''}</p>"
        for one in (verdict(run), migration)
        if one is not None
    )
    return (
        f'<section><div class="bar"><h2>Balance</h2></div>{leads}'
        f'<div class="grid">{"".join(card(figure) for figure in group)}</div></section>'
    )


def _ratio(predicted: float, measured: float) -> str:
    return three(measured / predicted) if predicted > 0 else UNKNOWN


def _controls(run: RunFacts) -> str:
    layers = run.loads.layers.tolist() if run.loads else []
    options = "".join(
        f'<option value="{at}">layer {layer}</option>' for at, layer in enumerate(layers)
    )
    return (
        '<div class="legend" aria-hidden="true">'
        '<span>load</span><span class="scale"><i></i><span>0</span><span>1, even</span>'
        "<span>2</span><span>4 and over</span></span>"
        '<b class="dead">\N{MULTIPLICATION SIGN}</b><span>dead</span>'
        '<b class="hot">\N{BLACK UP-POINTING TRIANGLE}</b><span>hot</span></div>'
        f'<label class="choose">Layer <select id="layer">{options}</select></label>'
    )


def _head(run: RunFacts, facts: dict[str, Any]) -> str:
    step, planned = facts["step"], facts["planned_steps"]
    goal = f" of {planned:,}" if planned else ""
    words = {
        "finished": f"finished \N{MIDDLE DOT} {plural(step, 'step')}",
        "stopped": f"stopped at step {step:,}{goal}",
        "running": f"running \N{MIDDLE DOT} step {step:,}{goal}",
    }
    return (
        f'<header><div class="brand">{MARK}<div><p>moesaic run report</p>'
        f'<h1>{html.escape(run.name)}</h1></div></div><div class="state">'
        f'<span class="pill {facts["status"]}">{words[facts["status"]]}</span>'
        f"<p>{html.escape(_described(run, facts))}</p></div></header>"
    )


def _described(run: RunFacts, facts: dict[str, Any]) -> str:
    model = run.job.get("model")
    model = model if isinstance(model, dict) else {}
    words = [str(model["family"])] if model.get("family") else []
    if model.get("layers"):
        words.append(f"{model['layers']} layers")
    words.append(
        f"{model['experts']} experts, top {model.get('top_k', '?')}"
        if model.get("experts")
        else "dense"
    )
    words.append(plural(facts["ranks"] or 1, "rank") + _dispatch(run.plan))
    if facts["device"]:
        words.append(facts["device"])
    return " \N{MIDDLE DOT} ".join(words)


def _dispatch(plan: Mapping[str, Any]) -> str:
    """Name the expert parallelism of a plan and its dispatch method; empty without it."""
    ep, hosts = plan.get("ep") or 1, plan.get("dispatch_hosts") or 1
    if ep == 1:
        return ""
    method = "deduplicated" if plan.get("dispatch") == "dedup" else "all-to-all"
    return f", ep {ep}, {'hierarchical ' * (1 < hosts < ep)}{method} dispatch"


def _tiles(facts: dict[str, Any], unit: str) -> str:
    value = {name: figure_or_unknown(facts[name]) for name in (
        "loss", "recent_loss", "validation_loss", "tokens_per_s", "seconds",
        "parameters_total", "parameters_active", "peak_memory_bytes", "step_s",
    )}  # fmt: skip
    recent = facts["recent_steps"]
    validated = facts["validation_step"]
    best = facts["best_validation_step"]
    note = "none measured"
    if validated is not None:
        lowest = figure_or_unknown(facts["best_validation_loss"])
        note = f"at step {validated:,}" + (
            f", best {loss(lowest)} at {best:,}" if best != validated else ", its best"
        )
    active = value["parameters_active"]
    dense = active == value["parameters_total"]
    resumed = f", {plural(facts['resumes'], 'resume')}" if facts["resumes"] else ""
    tiles = [
        tile("Loss", loss(value["loss"]),
             f"mean of last {recent}: {loss(value['recent_loss'])}" if recent > 1 else "last step"),
        tile("Validation loss", loss(value["validation_loss"]), note),
        tile(f"{unit.capitalize()} per second", count(value["tokens_per_s"]),
             f"median; {duration(value['step_s'])} a step"),
        tile(f"{unit.capitalize()} seen", count(facts["tokens"]), "with a loss target"),
        tile("Parameters", count(value["parameters_total"]),
             "all active" if dense else f"{count(active)} active"),
        tile("Ranks", str(facts["ranks"] or UNKNOWN),
             f"peak {size(value['peak_memory_bytes'])} each"),
        tile("Time", duration(value["seconds"]), f"start to last event{resumed}"),
    ]  # fmt: skip
    return f'<dl class="tiles">{"".join(tiles)}</dl>'


def _findings(facts: dict[str, Any]) -> str:
    found = facts["findings"]
    experts_too = "" if facts["experts"] is None else "dead or hot experts, "
    clear = (
        ""
        if any(finding["severity"] != "note" for finding in found)
        else '<li class="clear"><span class="badge">clear</span><div>'
        f"<h3>Nothing needs attention</h3><p>No {experts_too}loss spikes, slow steps or "
        "failed saves.</p></div></li>"
    )
    items = "".join(
        f'<li class="{finding["severity"]}" data-kind="{finding["kind"]}">'
        f'<span class="badge">{finding["severity"]}</span><div>'
        f"<h3>{html.escape(finding['title'])}</h3><p>{html.escape(finding['text'])}</p></div></li>"
        for finding in found
    )
    return (
        '<section><div class="bar"><h2>What stands out</h2></div>'
        f'<ul class="findings">{clear}{items}</ul></section>'
    )


def _nothing_yet(run: RunFacts) -> str:
    text = (
        "The run is starting. Write the report again after its first step."
        if run.status == "running"
        else "The run ended before its first step. Read its terminal output for the cause."
    )
    return (
        '<section><ul class="findings"><li class="note"><span class="badge">note</span><div>'
        f"<h3>No step has finished yet</h3><p>{text}</p></div></li></ul></section>"
    )


def _details(run: RunFacts) -> str:
    folds = [
        ("Checkpoints", _checkpoints(run), len(run.checkpoints)),
        ("Validation", _validations(run), len(run.validations)),
        ("Starts and resumes", _parts(run), len(run.parts)),
    ]
    shown = "".join(
        f"<details><summary>{name} <small>{number:,}</small></summary>{content}</details>"
        for name, content, number in folds
        if number
    )
    files = "".join(
        f"<details><summary>{name} <small>{file}</small></summary><pre>"
        f"{html.escape(json.dumps(value, indent=2, ensure_ascii=False))}</pre></details>"
        for name, file, value in (
            ("Resolved job", "job.json", run.job),
            ("Plan", "plan.json", run.plan),
            ("Versions", "versions.json", run.versions),
        )
    )
    return (
        '<section class="files"><div class="bar"><h2>Details</h2></div>'
        f'<div class="folds">{shown}{files}</div></section>'
    )


def _checkpoints(run: RunFacts) -> str:
    rows = [
        (
            f"{checkpoint.step:,}", checkpoint.path,
            {"done": "committed", "writing": "not committed", "failed": "failed"}[checkpoint.state],
            size(checkpoint.num_bytes), duration(checkpoint.seconds),
            duration(checkpoint.blocking_s), checkpoint.error,
        )
        for checkpoint in run.checkpoints[-_ROWS:]
    ]  # fmt: skip
    return table(
        ("step", "path", "state", "size", "committed after", "blocked training", "error"), rows
    )


def _validations(run: RunFacts) -> str:
    rows = [
        (f"{v.step:,}", loss(v.loss), count(v.tokens), duration(v.seconds))
        for v in run.validations[-_ROWS:]
    ]
    return table(("step", "loss", run.unit, "took"), rows)


def _parts(run: RunFacts) -> str:
    rows = [
        (moment(part.start_s), f"{part.step:,}", part.resumed_from or "new run", str(part.ranks),
         part.layout or "replicated" * (part.ranks > 1), part.backends, part.device,
         duration(part.end_s - part.start_s))
        for part in run.parts[-_ROWS:]
    ]  # fmt: skip
    names = (
        "started", "finished steps", "from", "ranks", "layout", "kernels and transport", "device",
        "lasted",
    )  # fmt: skip
    return table(names, rows)


def _foot(run: RunFacts) -> str:
    span = (
        f"{stretch(int(run.steps.step[0]), run.last_step)}; last event {moment(run.last_event_s)}"
        if len(run.steps)
        else "no steps"
    )
    version = html.escape(str(run.versions.get("moesaic", "?")))
    return (
        f"<footer><p>moesaic {version} \N{MIDDLE DOT} {span} \N{MIDDLE DOT} read "
        f"{moment(run.read_at_s)}.<br>Charts: drag to zoom, double-click to go back, click a name "
        "in a legend to hide it. The page comes from the files of the run and needs no network.</p>"
        "</footer>"
        '<noscript><p class="noscript">The charts need JavaScript.</p></noscript>'
    )
