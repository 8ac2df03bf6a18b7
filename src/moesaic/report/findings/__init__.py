"""Findings: what happened in a run, where, and what to do."""

from __future__ import annotations

from moesaic.report.findings import balance, experts, learning, speed
from moesaic.report.findings.finding import Finding, Severity
from moesaic.report.run_stats import RunStats

__all__ = ["Finding", "Severity", "find"]

_ORDER: dict[Severity, int] = {"problem": 0, "warning": 1, "note": 2}


def find(run: RunStats) -> list[Finding]:
    """Return every finding of `run`, most severe first."""
    if not len(run.steps):
        return [learning.no_steps(run)]
    candidates = [
        learning.not_a_number(run.steps),
        learning.stopped(run),
        learning.failed_saves(run.checkpoints),
        experts.dead(run),
        experts.hot(run),
        experts.drops(run),
        experts.replay_mismatches(run.steps),
        learning.spikes(run),
        learning.skipped(run.steps),
        learning.overfitting(run.validations),
        speed.slow_steps(run),
        balance.replicas(run),
        balance.migrated(run.migrations),
        speed.prediction(run.prediction),
        speed.slowest_phase(run),
    ]
    findings = [finding for finding in candidates if finding is not None]
    return sorted(findings, key=lambda finding: _ORDER[finding.severity])
