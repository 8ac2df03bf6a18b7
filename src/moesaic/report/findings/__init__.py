"""Findings: what happened in a run, where, and what to do."""

from __future__ import annotations

from moesaic.report.facts import RunFacts
from moesaic.report.findings import balance, experts, learning, prediction, speed
from moesaic.report.findings.finding import Finding, Severity

__all__ = ["Finding", "Severity", "find"]

_ORDER: dict[Severity, int] = {"problem": 0, "warning": 1, "note": 2}


def find(run: RunFacts) -> list[Finding]:
    """Return every finding of `run`, most severe first."""
    candidates = [
        learning.not_a_number(run.steps),
        learning.stopped(run),
        learning.failed_saves(run.checkpoints),
        experts.dead(run.loads, run.setting),
        experts.hot(run.loads, run.setting, run.plan),
        experts.drops(run.steps, run.setting),
        experts.flips(run.steps),
        learning.spikes(run.steps, run.setting),
        learning.skipped(run.steps),
        learning.overfitting(run.validations),
        speed.slow_steps(run.steps, run.parts, run.checkpoints, run.validations),
        balance.did_not_pay(run),
        balance.prices_off(run),
        prediction.off(run.prediction),
        speed.slowest_phase(run.steps, run.parts[-1].device if run.parts else "", run.setting),
    ]
    found = [finding for finding in candidates if finding is not None]
    return sorted(found, key=lambda finding: _ORDER[finding.severity])
