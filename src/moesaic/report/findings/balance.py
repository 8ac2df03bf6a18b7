"""Findings on expert balance: whether replicas paid, and migrated experts.

The saving of replicas is predicted, because no step runs twice. Their cost (waiting and planning)
is measured.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moesaic.report.balance_stats import BalanceStats
from moesaic.report.findings.finding import Finding
from moesaic.report.log import Migration
from moesaic.report.run_stats import RunStats
from moesaic.report.series import known_mean
from moesaic.report.wording import digits, duration, plural, size

_EVEN = 1.1
"""Busiest rank over the mean, up to which loads count as even."""
_FAR_OFF = 2.5
"""Ratio of measured to predicted expert time, in either direction, that noise does not explain."""
_FEWEST = 3
"""Recorded steps needed for a median that ignores the first, slow one."""


def replicas(run: RunStats) -> Finding | None:
    """Say whether replicas paid; None if no balance policy ran."""
    made, stats = known_mean(run.steps.replicas), run.balance
    if np.isnan(made):
        return None
    before, after = (
        digits(known_mean(values))
        for values in (run.steps.imbalance_before, run.steps.imbalance_after)
    )
    if made == 0:
        return _no_replicas(known_mean(run.steps.imbalance_before))
    text = (
        f"{digits(made)} replicas a step. In the least even layer the busiest rank had {before} "
        f"times the mean without replicas and {after} with them."
    )
    if stats is None or not stats.mean("predicted_unbalanced_s") > 0:
        title = "Replicas were made; no record shows their saving"
        text += " Lower log.loads_every to record the layers."
        return Finding("replicas_unknown", "note", title, text)
    step_s = known_mean(run.steps.step_s[np.isin(run.steps.step, stats.steps)])
    text += f" {_describe_times(stats, step_s)}"
    mismatch = _price_mismatch(stats, step_s)
    if mismatch is not None:
        title = f"Balance prices do not match this machine: {mismatch}"
        text += " Replicas have no verdict by such prices. " + _fix_prices(run)
        return Finding("replicas_unknown", "warning", title, text)
    return _judge(run, stats, text)


def migrated(migrations: Sequence[Migration]) -> Finding | None:
    """Sum up the experts that migrated to another rank; None if none did."""
    if not migrations:
        return None
    experts = sum(one.experts for one in migrations)
    steps, layers = ({getattr(one, name) for one in migrations} for name in ("step", "layer"))
    where = f"{plural(len(layers), 'layer')}, {plural(len(steps), 'time')}"
    title = f"{plural(experts, 'expert')} migrated to another rank ({where})"
    last = migrations[-1].step
    worst = max(
        (one for one in migrations if one.step == last), key=lambda one: one.imbalance_before
    )
    text = (
        f"The migrations moved {size(sum(one.bytes for one in migrations))}. The last came after "
        f"step {last:,}: in layer {worst.layer} the busiest rank had "
        f"{digits(worst.imbalance_before)} times the mean, and {digits(worst.imbalance_after)} "
        "with the new owner ranks."
    )
    return Finding("migrated", "note", title, text)


def _no_replicas(before: float) -> Finding:
    text = f"In the least even layer the busiest rank had {digits(before)} times the mean."
    title = "Loads were even: no replicas were needed"
    if before > _EVEN:
        title = "No replicas were made"
        text += (
            " None would pay by balance.prices, within balance.max_replicas and with at least "
            "balance.min_replica_tokens tokens each."
        )
    return Finding("no_replicas", "note", title, text)


def _describe_times(stats: BalanceStats, step_s: float) -> str:
    waited_s = stats.mean("replica_wait_s", "gradient_wait_s")
    waiting = (
        f"Sending and waiting for replicas took {duration(waited_s)} of {duration(step_s)}"
        if np.isfinite(waited_s)
        else "Waiting for replicas is not measured on this device"
    )
    return (
        f"Predicted: {duration(stats.mean('predicted_s'))} a step with replicas, "
        f"{duration(stats.mean('predicted_unbalanced_s'))} without. {waiting}, planning "
        f"{duration(stats.mean('planning_s'))}."
    )


def _price_mismatch(stats: BalanceStats, step_s: float) -> str | None:
    """Describe how prices are wrong; None if nothing shows that they are."""
    measured = float(np.median(stats.by_step["forward_s"] + stats.by_step["backward_s"]))
    predicted = float(np.median(stats.by_step["predicted_experts_s"]))
    comparable = len(stats.steps) >= _FEWEST and measured > 0 and predicted > 0
    if comparable and not 1 / _FAR_OFF <= measured / predicted <= _FAR_OFF:
        return (
            f"experts took {duration(measured)} a step on rank 0, predicted {duration(predicted)}"
        )
    with_s = stats.mean("predicted_s")
    if with_s > step_s:
        return (
            f"expert layers were predicted to take {duration(with_s)} a step, and whole steps "
            f"took {duration(step_s)}"
        )
    return None


def _fix_prices(run: RunStats) -> str:
    """Say how to correct the prices, by their source."""
    if run.setting("balance.prices") is not None:
        return "Remove balance.prices, or correct it with `moesaic probe` on an idle machine."
    return "Set balance.prices, or plan with the result of `moesaic probe` on an idle machine."


def _judge(run: RunStats, stats: BalanceStats, text: str) -> Finding:
    """Compare the predicted saving with the measured cost.

    No record says how much of the planning overlaps other work, so all of it counts.
    """
    with_s, without_s = stats.mean("predicted_s"), stats.mean("predicted_unbalanced_s")
    saved_s, cost_s, costs = without_s - with_s, stats.mean("planning_s"), "planning"
    waited_s = stats.mean("replica_wait_s", "gradient_wait_s")
    if np.isfinite(waited_s):
        saved_s += stats.mean("predicted_exposed_s")
        cost_s, costs = cost_s + waited_s, "sending, waiting and planning"
    share = f"expert layers take a predicted {digits(with_s / without_s)} of the time without them"
    if with_s < without_s and cost_s <= saved_s:
        return Finding("replicas_paid", "note", f"Replicas paid: {share}", text)
    action = 'Set balance.policy = "none"'
    if with_s >= without_s:
        title = f"Replicas did not pay: {share}"
        if run.setting("balance.policy") not in (None, "quota"):
            action += ', or "quota" to skip replicas that are predicted not to pay'
    else:
        title = (
            f"Replicas may not have paid: {costs} cost {duration(cost_s)} a step, the predicted "
            f"saving is {duration(saved_s)}"
        )
        action += ", or plan with the result of `moesaic probe`"
    return Finding("replicas_did_not_pay", "warning", title, f"{text} {action}.")
