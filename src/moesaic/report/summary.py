"""Headline numbers of a run as plain JSON, printed by `moesaic report --json`."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import numpy as np

from moesaic.report.findings import find
from moesaic.report.run_stats import RunStats
from moesaic.report.series import known_mean, median

METRICS = frozenset({"auc", "log_loss", "normalized_entropy", "calibration", "gauc"})
"""Names of metrics of click prediction."""
_RECENT = 50
"""Steps in the mean of the recent loss, at most a tenth of the run."""


def summary(run: RunStats) -> dict[str, Any]:
    """Return the headline and the findings of `run`; unknown values are None."""
    launch = run.launches[-1] if run.launches else None
    # Earlier launches may have had other ranks, and so other speeds.
    current = run.steps.step > (launch.step if launch else 0)
    checkpoint = run.newest_checkpoint
    peaks = [*(one.peak_bytes for one in run.launches), *(one.peak_bytes for one in run.ranks)]
    peak_bytes = max((peak for peak in peaks if math.isfinite(peak)), default=None)
    headline = {
        "run": run.name,
        "directory": str(run.directory),
        "status": run.status,
        "unit": run.unit,
        "first_step": int(run.steps.step[0]) if len(run.steps) else None,
        "step": run.last_step,
        "planned_steps": run.planned_steps,
        **_losses(run),
        "tokens_per_s": median(run.steps.tokens_per_s[current]),
        "step_s": median(run.steps.step_s[current]),
        "tokens": int(np.nansum(run.steps.tokens)),
        "seconds": run.seconds,
        "last_event_s": run.last_event_s,
        "ranks": launch.ranks if launch else run.plan.get("ranks"),
        "device": launch.device if launch else None,
        "parameters_total": launch.parameters_total if launch else None,
        "parameters_active": launch.parameters_active if launch else None,
        "peak_memory_bytes": peak_bytes,
        "resumes": max(len(run.launches) - 1, 0),
        "checkpoints": sum(checkpoint.state == "done" for checkpoint in run.checkpoints),
        "newest_checkpoint": checkpoint.path if checkpoint else None,
        "dropped": int(np.nansum(run.steps.dropped)),
        "num_replay_mismatches": int(np.nansum(run.steps.num_replay_mismatches)),
        "skipped": int(np.nansum(run.steps.skipped)),
        "loss_scale": float(run.steps.loss_scale[-1]) if len(run.steps) else None,
        "experts": _experts(run),
        "students": _students(run),
        "credibility": _credibility(run),
        "clicks": _clicks(run),
        "table": _table(run),
        "balance": _balance(run),
        "prediction": _prediction(run),
        "findings": [asdict(finding) for finding in find(run)],
    }
    plain: dict[str, Any] = _without_nan(headline)
    return plain


def _without_nan(value: Any) -> Any:
    """Return `value` for JSON: None where a number is not finite."""
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _losses(run: RunStats) -> dict[str, Any]:
    losses, validations = run.steps.loss.tolist(), run.validations
    if run.is_frozen:  # It has no loss in steps in which it does not teach.
        losses = [one for one in losses if math.isfinite(one)]
    recent = losses[-min(_RECENT, max(len(losses) // 10, 1)) :]
    best = min(validations, key=lambda validation: validation.loss, default=None)
    return {
        "loss": losses[-1] if losses else None,
        "first_loss": losses[0] if losses else None,
        "recent_loss": float(np.mean(recent)) if recent else None,
        "recent_steps": len(recent),
        "validation_loss": validations[-1].loss if validations else None,
        "validation_step": validations[-1].step if validations else None,
        "best_validation_loss": best.loss if best else None,
        "best_validation_step": best.step if best else None,
    }


def _students(run: RunStats) -> dict[str, dict[str, Any]]:
    """Return teacher, parameters and figures by student: means of recent steps, and those of the
    last validation with "validation_" before their name."""
    known = {one.name: one._asdict() for launch in run.launches for one in launch.students}
    recent = min(_RECENT, max(len(run.steps) // 10, 1))
    figures = {name: known_mean(values[-recent:]) for name, values in run.steps.figures.items()}
    for name, value in run.validations[-1].figures.items() if run.validations else ():
        student, slash, term = name.rpartition("/")
        figures[f"{student}{slash}validation_{term}"] = value
    return {
        name: {
            **{key: value for key, value in known.get(name, {}).items() if key != "name"},
            **{
                key.rpartition("/")[2]: value
                for key, value in figures.items()
                if key.rpartition("/")[0] == name
            },
        }
        for name in run.students
    }


def _credibility(run: RunStats) -> dict[str, Any] | None:
    """Return metrics of a credibility head: of the last validation, and the mean of recent
    steps."""
    if run.setting("credibility") is None:
        return None
    recent = min(_RECENT, max(len(run.steps) // 10, 1))
    logged = run.steps.figures.get("credibility_loss")
    return {
        "validation": dict(run.validations[-1].figures) if run.validations else None,
        "training": {} if logged is None else {"credibility_loss": known_mean(logged[-recent:])},
    }


def _clicks(run: RunStats) -> dict[str, Any] | None:
    """Return metrics of click prediction: of the last validation, and means of recent steps."""
    logged = {name: run.steps.figures[name] for name in METRICS if name in run.steps.figures}
    measured = [one for one in run.validations if METRICS & one.figures.keys()]
    if run.setting("credibility") is not None or not (logged or measured):
        return None
    recent = min(_RECENT, max(len(run.steps) // 10, 1))
    return {
        "validation": dict(measured[-1].figures) if measured else None,
        "training": {name: known_mean(values[-recent:]) for name, values in logged.items()},
        "days": [{"day": one.day, **one.figures} for one in run.days],
        "input_wait_s": median(run.steps.phases["data"]) if "data" in run.steps.phases else None,
    }


def _table(run: RunStats) -> dict[str, Any] | None:
    """Return the rows of the embedding table at the last step, and the passes of its drive."""
    rows = run.steps.figures.get("rows")
    if rows is None:
        return None
    return {"rows": int(rows[np.isfinite(rows)][-1]), "passes": _passes(run)}


def _passes(run: RunStats) -> dict[str, Any] | None:
    """Return totals over the passes of rank 0, and its rows and bytes by tier."""
    passes = list(run.passes.values())
    if not passes:
        return None
    hits, raised, stalls = (
        np.array([one.get(name, math.nan) for one in passes])
        for name in ("hits", "raised", "stall_s")
    )
    return {
        "number": len(passes),
        "hit_rate": float(np.nansum(hits) / max(np.nansum(hits + raised), 1)),
        "stall_s": float(np.nansum(stalls)),
        "mean_stall_s": known_mean(stalls),
        **{
            name: passes[-1].get(name)
            for name in ("memory_rows", "drive_rows", "memory_bytes", "drive_bytes")
        },
    }


def _prediction(run: RunStats) -> dict[str, Any] | None:
    if run.prediction is None:
        return None
    return {
        "predicted": run.prediction.predicted.model_dump(exclude={"timeline"}),
        "measured": asdict(run.prediction.measured),
        "step_ratio": run.prediction.ratio,
        "machine_ratio": run.prediction.machine_ratio,
        "wait_ratio": run.prediction.wait_ratio,
        "model_ratio": run.prediction.model_ratio,
        "text": run.prediction.describe(),
    }


def _balance(run: RunStats) -> dict[str, Any] | None:
    """Return means over the steps with a balance policy."""
    if not np.isfinite(run.steps.replicas).any():
        return None
    names = ("replicas", "imbalance_before", "imbalance_after", "planning_s")
    return {name: known_mean(getattr(run.steps, name)) for name in names}


def _experts(run: RunStats) -> dict[str, Any] | None:
    loads = run.loads
    if loads is None:
        return None
    return {
        "layers": len(loads.layers),
        "experts": loads.num_experts,
        "imbalance": loads.recent_imbalance,
        "dead": [extreme._asdict() for extreme in loads.dead],
        "hot": [extreme._asdict() for extreme in loads.hot],
    }
