"""What stands out in the routing of tokens: dead experts, hot experts, drops, flips."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from moesaic.report.findings.finding import Finding
from moesaic.report.loads import Loads
from moesaic.report.log import Steps
from moesaic.report.wording import count, listing, percent, plural, stretch, three

DEAD = 0.05
"""Share of an even load under which an expert counts as dead."""
HOT = 2.0
"""Multiple of an even load over which an expert counts as hot."""
ENOUGH = 20
"""Tokens an expert on average; with fewer, chance alone makes experts dead or hot."""

Settings = Callable[[str], Any]
"""The value of a dotted key of the job, or None."""


@dataclass(frozen=True)
class Extreme:
    """An expert far from its even share in the last quarter of recorded steps."""

    layer: int
    expert: int
    utilisation: float


def dead_experts(loads: Loads) -> list[Extreme]:
    """Experts under `DEAD`, by layer and expert."""
    return _where(loads, loads.recent_utilisation() < DEAD)


def hot_experts(loads: Loads) -> list[Extreme]:
    """Experts over `HOT`, the hottest first."""
    found = _where(loads, loads.recent_utilisation() > HOT)
    return sorted(found, key=lambda extreme: -extreme.utilisation)


def dead(loads: Loads | None, setting: Settings) -> Finding | None:
    """Dead experts, in one finding."""
    found = dead_experts(loads) if loads else []
    if not loads or not found:
        return None
    if len(found) == 1:
        title = f"Expert {found[0].expert} of layer {found[0].layer} is dead"
        text = f"It took {percent(found[0].utilisation)} of an even share over {_recent(loads)}"
        whose, they = "its", "it stays"
    else:
        title = f"{plural(len(found), 'expert')} are dead"
        text = f"Under {DEAD:.0%} of an even share over {_recent(loads)}: {_by_layer(found)}"
        whose, they = "their", "they stay"
    text += (
        f". The optimizer carries {whose} weights along but hardly trains them: "
        f"{_balance(setting)} If {they} dead, a smaller model.experts would do as well in less "
        "memory."
    )
    return Finding("dead_experts", "warning", title, text)


def hot(
    loads: Loads | None, setting: Settings, plan: Mapping[str, Any] | None = None
) -> Finding | None:
    """Hot experts, in one finding; the plan says where experts live."""
    found = hot_experts(loads) if loads else []
    if not loads or not found:
        return None
    top = found[0]
    worst = f"Expert {top.expert} of layer {top.layer}"
    title = f"{worst} is hot" if len(found) == 1 else f"{len(found):,} experts are hot"
    holder = _home(top, setting, plan or {})
    text = (
        f"{'It' if len(found) == 1 else worst} took {three(top.utilisation)}x its even share over "
        f"{_recent(loads)}. {_waiting(setting, holder)}"
    )
    if len(found) > 1:
        text += f"Over {HOT:g}x in all: {_by_layer(found)}. "
    text += f"To even it out, {_balance(setting)}"
    if setting("routing.capacity") is None:
        text += " Setting routing.capacity would bound its work, at the price of dropped tokens."
    return Finding("hot_experts", "warning", title, text)


def drops(steps: Steps, setting: Settings) -> Finding | None:
    """Assignments lost to capacity."""
    total = float(np.nansum(steps.dropped))
    if total <= 0:
        return None
    layers = (setting("model.layers") or 1) - (setting("model.dense_layers") or 0)
    visits = (setting("model.top_k") or 1) * layers
    recent = slice(len(steps) - -(-len(steps) // 4), None)
    share, now = (
        float(np.nansum(steps.dropped[part]) / max(np.nansum(steps.tokens[part]) * visits, 1.0))
        for part in (slice(None), recent)
    )
    capacity = setting("routing.capacity")
    told = percent(share)
    title = f"{told[0].upper()}{told[1:]} of assignments were dropped"
    text = (
        f"{count(total)} times an expert was full and a token went on without it; in the last "
        f"quarter of the run, {percent(now)}. Raise routing.capacity"
        f"{f' (now {capacity:g})' if isinstance(capacity, (int, float)) else ''}, or spread the "
        f"load: {_balance(setting)}"
    )
    return Finding("drops", "warning" if now >= 0.01 else "note", title, text)


def flips(steps: Steps) -> Finding | None:
    """Choices of the router that differ from the ones replayed."""
    total = float(np.nansum(steps.flips))
    if total <= 0:
        return None
    rows = np.flatnonzero(steps.flips > 0)
    first = int(steps.step[rows[0]])
    text = (
        f"The router would have chosen otherwise {count(total)} times in "
        f"{plural(len(rows), 'step')}, first at step {first:,}; the replayed choices were used. A "
        "few come from rounding; many, from the first step on, mean that weights or data are not "
        "those of the recorded run."
    )
    return Finding("flips", "note", "Routing differs from the recording", text)


def _where(loads: Loads, mask: Any) -> list[Extreme]:
    utilisation = loads.recent_utilisation()
    mask = mask & (loads.recent.mean(axis=1, keepdims=True) >= ENOUGH)
    return [
        Extreme(int(loads.layers[row]), int(expert), float(utilisation[row, expert]))
        for row, expert in np.argwhere(mask)
    ]


def _recent(loads: Loads) -> str:
    steps = loads.recent_steps
    return f"{stretch(int(steps[0]), int(steps[-1]))} (the last quarter recorded)"


def _by_layer(found: list[Extreme]) -> str:
    layers: dict[int, list[str]] = {}
    for extreme in sorted(found, key=lambda extreme: (extreme.layer, extreme.expert)):
        layers.setdefault(extreme.layer, []).append(str(extreme.expert))
    return "; ".join(
        f"layer {layer}: {listing(experts)}" for layer, experts in list(layers.items())[:8]
    ) + (f"; and {plural(len(layers) - 8, 'more layer')}" if len(layers) > 8 else "")


def _balance(setting: Settings) -> str:
    by_bias = setting("model.family") == "deepseek_v3"
    key = "routing.bias_step" if by_bias else "routing.balance_loss"
    value = setting(key)
    if not value:
        return f"set {key}, to a hundredth for a start."
    now = f" (now {value:g})" if isinstance(value, (int, float)) else ""
    return f"raise {key}{now} by a factor of 2 to 10."


def _waiting(setting: Settings, holder: str) -> str:
    """What a hot expert makes of ranks."""
    rank = f"The rank that holds it{holder}"
    if setting("balance.policy") in (None, "none"):
        return f"{rank} works longest while the others wait. "
    return (
        f"{rank} would work longest while the others wait: copies on these (balance.policy) take "
        "over what is too much, where that pays. "
    )


def _home(top: Extreme, setting: Settings, plan: Mapping[str, Any]) -> str:
    """Which rank holds an expert, if that does not change; plans of old runs say no homes, which
    then were in turn."""
    ep, experts, expert = setting("layout.ep"), setting("model.experts"), top.expert
    if not isinstance(ep, int) or not isinstance(experts, int) or ep < 2 or not experts:
        return ""
    if setting("balance.rehome_every"):
        return ""
    rank, others = expert * ep // experts, plan.get("homes_of_layers")
    homes = plan.get("homes")
    if isinstance(others, dict):
        homes = others.get(str(top.layer), homes)
    if isinstance(homes, list):
        held = [at for at, here in enumerate(homes) if isinstance(here, list) and expert in here]
        rank = held[0] if held else rank
    return f" (rank {rank} of its expert-parallel group)"
