"""Headline numbers of a run as plain JSON, printed by `moesaic report --json`."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import numpy as np

from moesaic.report.facts import RunFacts
from moesaic.report.findings import find
from moesaic.report.findings.balance import verdict
from moesaic.report.findings.experts import dead_experts, hot_experts
from moesaic.report.log import Migration
from moesaic.report.series import middle

_RECENT = 50
"""Steps in the mean of the recent loss, at most a tenth of the run."""


def summary(run: RunFacts) -> dict[str, Any]:
    """Return the headline and the findings of `run`; unknown values are None."""
    part = run.parts[-1] if run.parts else None
    current = run.steps.step > run.layout_since  # Steps of other layouts had other speeds.
    checkpoint = run.newest_checkpoint
    return {
        "run": run.name,
        "directory": str(run.directory),
        "status": run.status,
        "step": run.last_step,
        "planned_steps": run.planned_steps,
        **_losses(run),
        "tokens_per_s": known(middle(run.steps.tokens_per_s[current])),
        "step_s": known(middle(run.steps.step_s[current])),
        "tokens": int(np.nansum(run.steps.tokens)),
        "seconds": known(run.seconds),
        "last_event_s": known(run.last_event_s),
        "ranks": part.ranks if part else run.plan.get("ranks"),
        "device": part.device if part else None,
        "parameters_total": _whole(part.parameters_total) if part else None,
        "parameters_active": _whole(part.parameters_active) if part else None,
        "peak_memory_bytes": _peak(run),
        "resumes": max(len(run.parts) - 1, 0),
        "checkpoints": sum(checkpoint.state == "done" for checkpoint in run.checkpoints),
        "newest_checkpoint": checkpoint.path if checkpoint else None,
        "dropped": int(np.nansum(run.steps.dropped)),
        "num_replay_mismatches": int(np.nansum(run.steps.num_replay_mismatches)),
        "skipped": int(np.nansum(run.steps.skipped)),
        "experts": _experts(run),
        "balance": _balance(run),
        "experts_migrated": [_migration(one) for one in run.migrations],
        "prediction": _prediction(run),
        "findings": [asdict(finding) for finding in find(run)],
    }


def known(value: float) -> float | None:
    """Return `value` for JSON: None if it is not finite."""
    return float(value) if math.isfinite(value) else None


def _whole(value: float) -> int | None:
    return int(value) if math.isfinite(value) else None


def _losses(run: RunFacts) -> dict[str, Any]:
    losses, validations = run.steps.loss, run.validations
    num_recent = min(_RECENT, max(len(losses) // 10, 1))
    recent = losses[-num_recent:]
    best = min(validations, key=lambda validation: validation.loss, default=None)
    return {
        "loss": known(losses[-1]) if len(losses) else None,
        "first_loss": known(losses[0]) if len(losses) else None,
        "recent_loss": known(recent.mean()) if len(recent) else None,
        "recent_steps": len(recent),
        "validation_loss": known(validations[-1].loss) if validations else None,
        "validation_step": validations[-1].step if validations else None,
        "best_validation_loss": known(best.loss) if best else None,
        "best_validation_step": best.step if best else None,
    }


def _peak(run: RunFacts) -> int | None:
    columns = [run.steps.memory_bytes, np.array([part.peak_bytes for part in run.parts])]
    for rank in run.ranks:
        columns += [rank.memory_bytes, rank.peak_bytes]
    seen = np.concatenate(columns)
    seen = seen[np.isfinite(seen)]
    return int(seen.max()) if len(seen) else None


def _prediction(run: RunFacts) -> dict[str, Any] | None:
    found = run.prediction
    if found is None:
        return None
    return {
        "predicted": found.predicted.model_dump(exclude={"timeline"}),
        "measured": found.measured.model_dump(),
        "step_ratio": known(found.ratio),
    }  # fmt: skip


def _balance(run: RunFacts) -> dict[str, Any] | None:
    """Return means over the steps with a balance policy, and whether replicas paid."""
    names = ("replicas", "imbalance_before", "imbalance_after", "planning_s")
    columns = {name: getattr(run.steps, name) for name in names}
    if not np.isfinite(columns["replicas"]).any():
        return None
    means = {name: known(float(np.nanmean(values))) for name, values in columns.items()}
    found = verdict(run)
    return {**means, "verdict": None if found is None else asdict(found)}


def _migration(one: Migration) -> dict[str, Any]:
    """Return a migration with the keys of its event."""
    return {
        "step": one.step, "layer": one.layer, "experts": one.experts,
        "bytes": known(one.num_bytes), "imbalance_before": known(one.before),
        "imbalance_after": known(one.after),
    }  # fmt: skip


def _experts(run: RunFacts) -> dict[str, Any] | None:
    loads = run.loads
    if loads is None:
        return None
    recent = loads.imbalance[-len(loads.recent_steps) :]
    return {
        "layers": len(loads.layers),
        "experts": loads.num_experts,
        "imbalance": known(float(np.nanmean(recent))) if np.isfinite(recent).any() else None,
        "dead": [asdict(extreme) for extreme in dead_experts(loads)],
        "hot": [asdict(extreme) for extreme in hot_experts(loads)],
    }
