"""Findings on routing: dead experts, hot experts, dropped assignments, and replay mismatches."""

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
"""Share of an even load below which an expert is dead."""
HOT = 2.0
"""Multiple of an even load above which an expert is hot."""
ENOUGH = 20
"""Mean tokens per expert below which chance alone makes experts dead or hot."""

Settings = Callable[[str], Any]
"""Lookup of a dotted key of the job; None if it is absent."""


@dataclass(frozen=True)
class Extreme:
    """Dead or hot expert in the last quarter of recorded steps."""

    layer: int
    """Layer of the expert."""
    expert: int
    """Index of the expert in its layer."""
    utilisation: float
    """Load over the even share."""


def dead_experts(loads: Loads) -> list[Extreme]:
    """Return the experts under `DEAD`, by layer and expert."""
    return _where(loads, loads.recent_utilisation() < DEAD)


def hot_experts(loads: Loads) -> list[Extreme]:
    """Return the experts over `HOT`, hottest first."""
    found = _where(loads, loads.recent_utilisation() > HOT)
    return sorted(found, key=lambda extreme: -extreme.utilisation)


def dead(loads: Loads | None, setting: Settings) -> Finding | None:
    """Report the dead experts."""
    found = dead_experts(loads) if loads else []
    if not loads or not found:
        return None
    if len(found) == 1:
        title = f"Expert {found[0].expert} of layer {found[0].layer} is dead"
        text = f"It received {percent(found[0].utilisation)} of an even share in {_recent(loads)}"
        subject = "it stays"
    else:
        title = f"{plural(len(found), 'expert')} are dead"
        text = (
            f"They received under {DEAD:.0%} of an even share in {_recent(loads)}: "
            f"{_by_layer(found)}"
        )
        subject = "they stay"
    text += (
        f". Dead experts take memory and hardly train. To revive them, {_spread_load(setting)} "
        f"If {subject} dead, use a smaller model.experts."
    )
    return Finding("dead_experts", "warning", title, text)


def hot(
    loads: Loads | None, setting: Settings, plan: Mapping[str, Any] | None = None
) -> Finding | None:
    """Report the hot experts; the plan names their owner ranks."""
    found = hot_experts(loads) if loads else []
    if not loads or not found:
        return None
    top = found[0]
    worst = f"Expert {top.expert} of layer {top.layer}"
    title = f"{worst} is hot" if len(found) == 1 else f"{len(found):,} experts are hot"
    owner = _owner_rank(top, setting, plan or {})
    text = (
        f"{'It' if len(found) == 1 else worst} received {three(top.utilisation)}x its even share "
        f"in {_recent(loads)}. {_effect(setting, owner)}"
    )
    if len(found) > 1:
        text += f"All over {HOT:g}x: {_by_layer(found)}. "
    text += f"To spread the load, {_spread_load(setting)}"
    if setting("routing.capacity_factor") is None:
        text += " Or set routing.capacity_factor to bound its work; excess tokens are then dropped."
    return Finding("hot_experts", "warning", title, text)


def drops(steps: Steps, setting: Settings) -> Finding | None:
    """Report assignments that were dropped for capacity."""
    total = float(np.nansum(steps.dropped))
    if total <= 0:
        return None
    layers = (setting("model.layers") or 1) - (setting("model.dense_layers") or 0)
    assignments = (setting("model.top_k") or 1) * layers
    recent = slice(len(steps) - -(-len(steps) // 4), None)
    share, now = (
        float(
            np.nansum(steps.dropped[part]) / max(np.nansum(steps.tokens[part]) * assignments, 1.0)
        )
        for part in (slice(None), recent)
    )
    capacity = setting("routing.capacity_factor")
    words = percent(share)
    title = f"{words[0].upper()}{words[1:]} of assignments were dropped"
    text = (
        f"Full experts dropped {count(total)} assignments; in the last quarter of the run "
        f"{percent(now)}. Raise routing.capacity_factor"
        f"{f' (now {capacity:g})' if isinstance(capacity, (int, float)) else ''}, or spread the "
        f"load: {_spread_load(setting)}"
    )
    return Finding("drops", "warning" if now >= 0.01 else "note", title, text)


def flips(steps: Steps) -> Finding | None:
    """Report router choices that differ from the replayed ones."""
    total = float(np.nansum(steps.num_replay_mismatches))
    if total <= 0:
        return None
    rows = np.flatnonzero(steps.num_replay_mismatches > 0)
    first = int(steps.step[rows[0]])
    text = (
        f"The router disagreed with the replayed choices {count(total)} times in "
        f"{plural(len(rows), 'step')}, first at step {first:,}. The replayed choices were used. A "
        "few come from rounding. If there are many from the first step on, compare weights and "
        "data with the recorded run."
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


def _spread_load(setting: Settings) -> str:
    """Return the setting that evens out the load, as the end of a sentence."""
    by_bias = setting("model.family") == "deepseek_v3"
    key = "routing.bias_update_rate" if by_bias else "routing.balance_loss"
    value = setting(key)
    if not value:
        return f"set {key} = 0.01."
    now = f" (now {value:g})" if isinstance(value, (int, float)) else ""
    return f"raise {key}{now} by a factor of 2 to 10."


def _effect(setting: Settings, owner: str) -> str:
    """Return what a hot expert does to its owner rank."""
    if setting("balance.policy") in (None, "none"):
        return f"Its owner rank{owner} computes longest and the others wait. "
    return f"Replicas (balance.policy) relieve its owner rank{owner} if they pay. "


def _owner_rank(top: Extreme, setting: Settings, plan: Mapping[str, Any]) -> str:
    """Name the owner rank of an expert, unless experts migrate.

    Older plans have no expert placement: their experts lie in order.
    """
    ep, experts, expert = setting("layout.ep"), setting("model.experts"), top.expert
    if not isinstance(ep, int) or not isinstance(experts, int) or ep < 2 or not experts:
        return ""
    if setting("balance.migrate_every"):
        return ""
    rank, by_layer = expert * ep // experts, plan.get("expert_placement_by_layer")
    placement = plan.get("expert_placement")
    if isinstance(by_layer, dict):
        placement = by_layer.get(str(top.layer), placement)
    if isinstance(placement, list):
        owners = [
            at for at, owned in enumerate(placement) if isinstance(owned, list) and expert in owned
        ]
        rank = owners[0] if owners else rank
    return f" (rank {rank} of its expert-parallel group)"
