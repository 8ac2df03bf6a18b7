"""Findings on routing: dead experts, hot experts, dropped assignments, and replay mismatches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moesaic.report.findings.finding import Finding
from moesaic.report.loads import DEAD, HOT, Extreme, Loads
from moesaic.report.log import Steps
from moesaic.report.run_stats import RunStats
from moesaic.report.wording import count, digits, listing, percent, plural, step_range

_MAX_LAYERS = 8
"""Layers that a list of experts names."""


def dead(run: RunStats) -> Finding | None:
    """Report the dead experts."""
    loads = run.loads
    if loads is None or not loads.dead:
        return None
    first = loads.dead[0]
    title = f"{plural(len(loads.dead), 'expert')} are dead"
    if len(loads.dead) == 1:
        title = f"Expert {first.expert} of layer {first.layer} is dead"
    text = (
        f"Under {DEAD:.0%} of an even share in {_recent(loads)}: {_by_layer(loads.dead)}. Dead "
        f"experts take memory and hardly train. To revive them, {_spread_load(run)} If they stay "
        "dead, use a smaller model.experts."
    )
    return Finding("dead_experts", "warning", title, text)


def hot(run: RunStats) -> Finding | None:
    """Report the hot experts."""
    loads = run.loads
    if loads is None or not loads.hot:
        return None
    top = loads.hot[0]
    hottest = f"Expert {top.expert} of layer {top.layer}"
    title = f"{len(loads.hot):,} experts are hot" if len(loads.hot) > 1 else f"{hottest} is hot"
    effect = "Its owner rank computes longest and the others wait."
    if run.setting("balance.policy") not in (None, "none"):
        effect = "Replicas (balance.policy) relieve its owner rank if they pay."
    text = (
        f"{hottest} received {digits(top.utilisation)}x its even share in {_recent(loads)}. "
        f"{effect} Over {HOT:g}x: {_by_layer(loads.hot)}. To spread the load, {_spread_load(run)}"
    )
    if run.setting("routing.capacity_factor") is None:
        text += " Or set routing.capacity_factor to bound its work; excess tokens are then dropped."
    return Finding("hot_experts", "warning", title, text)


def drops(run: RunStats) -> Finding | None:
    """Report assignments that were dropped for capacity."""
    steps, total = run.steps, float(np.nansum(run.steps.dropped))
    if total <= 0:
        return None
    layers = (run.setting("model.layers") or 1) - (run.setting("model.dense_layers") or 0)
    assignments = (run.setting("model.top_k") or 1) * layers
    last_quarter = slice(len(steps) - -(-len(steps) // 4), None)
    overall, recent = (
        float(np.nansum(steps.dropped[at]) / max(np.nansum(steps.tokens[at]) * assignments, 1.0))
        for at in (slice(None), last_quarter)
    )
    text = (
        f"Full experts dropped {count(total)} assignments; in the last quarter of the run "
        f"{percent(recent)}. Raise routing.capacity_factor"
        f"{_now(run.setting('routing.capacity_factor'))}, or spread the load: {_spread_load(run)}"
    )
    title = f"Assignments were dropped: {percent(overall)}"
    return Finding("drops", "warning" if recent >= 0.01 else "note", title, text)


def replay_mismatches(steps: Steps) -> Finding | None:
    """Report router choices that differ from the replayed ones."""
    rows = np.flatnonzero(steps.num_replay_mismatches > 0)
    if not len(rows):
        return None
    text = (
        f"The router disagreed with the replayed choices "
        f"{count(float(np.nansum(steps.num_replay_mismatches)))} times in "
        f"{plural(len(rows), 'step')}, first at step {int(steps.step[rows[0]]):,}. The replayed "
        "choices were used. A few come from rounding. If there are many from the first step on, "
        "compare weights and data with the recorded run."
    )
    return Finding("replay_mismatches", "note", "Routing differs from the recording", text)


def _recent(loads: Loads) -> str:
    steps = loads.recent_steps
    return f"{step_range(int(steps[0]), int(steps[-1]))} (the last quarter recorded)"


def _by_layer(extremes: Sequence[Extreme]) -> str:
    layers: dict[int, list[str]] = {}
    for extreme in sorted(extremes, key=lambda extreme: (extreme.layer, extreme.expert)):
        layers.setdefault(extreme.layer, []).append(str(extreme.expert))
    texts = [f"layer {layer}: {listing(experts)}" for layer, experts in layers.items()]
    if len(texts) > _MAX_LAYERS:
        more = plural(len(texts) - _MAX_LAYERS, "more layer")
        texts = [*texts[:_MAX_LAYERS], f"and {more}"]
    return "; ".join(texts)


def _spread_load(run: RunStats) -> str:
    """Return the setting that evens out the load, as the end of a sentence."""
    by_bias = run.setting("model.family") == "deepseek_v3"
    key = "routing.bias_update_rate" if by_bias else "routing.balance_loss"
    value = run.setting(key)
    return f"raise {key}{_now(value)} by a factor of 2 to 10." if value else f"set {key} = 0.01."


def _now(value: object) -> str:
    return f" (now {value:g})" if isinstance(value, (int, float)) else ""
