"""Findings on expert balance: whether replicas paid, wrong prices, and migrated experts.

The saving of replicas is predicted, because no step runs twice. Their cost (waiting and planning)
is measured.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moesaic.facts.job import BalanceConfig
from moesaic.facts.job.balance import PAST_LOAD_POLICIES
from moesaic.report.facts import RunFacts
from moesaic.report.findings.finding import Finding
from moesaic.report.wording import percent, plural, size, three, timing

EVEN = 1.1
"""Busiest rank over the mean, up to which loads count as even."""
_FAR_OFF = 2.5
"""Ratio of measured to predicted expert time, in either direction, that noise does not explain."""
_FEWEST = 3
"""Recorded steps needed for a median that ignores the first, slow one."""
_SAME = 0.02
"""Relative difference below which two times count as the same."""
_TURN_OFF = 'Set balance.policy = "none"'
_MEASURE = (
    ", or measure prices: balance.measure_prices = true, with no prices in the job or the plan"
)


class _Means(NamedTuple):
    """Means over recorded steps, summed over the layers of rank 0."""

    without_s: float
    """Predicted seconds of the expert layers without replicas."""
    with_s: float
    """Predicted seconds with replicas."""
    saved_s: float
    """Predicted saving in seconds, before waiting for replicas."""
    waited_s: float
    """Measured seconds of sending and waiting on rank 0; NaN on devices without that clock."""
    planning_s: float
    """Measured seconds of planning on rank 0, overlapped or not."""
    step_s: float
    """Measured seconds of the whole step."""
    before: float
    """Busiest rank over the mean without replicas."""
    after: float
    """Busiest rank over the mean with replicas."""


def verdict(run: RunFacts) -> Finding | None:
    """Say whether replicas paid; None if no balance policy ran."""
    replicas = run.steps.replicas
    if not np.isfinite(replicas).any():
        return None
    if not np.nansum(replicas):
        return _no_replicas(run)
    means = _means(run)
    if means is None:
        before, after = (
            three(float(np.nanmean(values)))
            for values in (run.steps.imbalance_before, run.steps.imbalance_after)
        )
        text = (
            f"{three(float(np.nanmean(replicas)))} replicas a step. In the least even layer the "
            f"busiest rank had {before} times the mean without replicas and {after} with them. "
            "Lower log.loads_every to record the layers."
        )
        title = "Replicas were made; no record shows their saving"
        return Finding("replicas_unknown", "note", title, text)
    return _judge(run, means)


def did_not_pay(run: RunFacts) -> Finding | None:
    """Return the verdict if it calls for a change."""
    found = verdict(run)
    return None if found is None or found.severity == "note" else found


def migrated(run: RunFacts) -> Finding | None:
    """Sum up the experts that migrated to another rank; None if none did."""
    if not run.migrations:
        return None
    experts = sum(one.experts for one in run.migrations)
    steps, layers = ({getattr(one, name) for one in run.migrations} for name in ("step", "layer"))
    where = f"{plural(len(layers), 'layer')}, {plural(len(steps), 'time')}"
    title = f"{plural(experts, 'expert')} migrated to another rank ({where})"
    last = run.migrations[-1].step
    worst = max((one for one in run.migrations if one.step == last), key=lambda one: one.before)
    text = (
        f"The migrations moved {size(sum(one.num_bytes for one in run.migrations))}. The last came "
        f"after step {last:,}: in layer {worst.layer} the busiest rank had {three(worst.before)} "
        f"times the mean, and {three(worst.after)} with the new owner ranks."
    )
    return Finding("migrated", "note", title, text)


def prices_off(run: RunFacts) -> Finding | None:
    """Report prices that do not match the measured times of experts or steps."""
    mismatch = _mismatch(run)
    if mismatch is None:
        return None
    title = f"Balance prices do not match this machine: {mismatch}"
    text = f"The policy makes too many or too few replicas by such prices. {_fix_prices(run)}"
    return Finding("prices_off", "warning", title, text)


def _fix_prices(run: RunFacts) -> str:
    """Say how to correct the prices, by their source."""
    busy = " Probe while the machine is idle."
    if run.setting("balance.prices") is not None:
        return "Remove balance.prices, or correct it with the result of `moesaic probe`." + busy
    if run.setting("balance.measure_prices"):
        return (
            "balance.measure_prices timed the start of the run: caches were cold, or the machine "
            "was busy. Remove balance.measure_prices, or set balance.prices from the times of a "
            "step."
        )
    return "Set balance.prices, or plan with the result of `moesaic probe`." + busy


def _mismatch(run: RunFacts) -> str | None:
    """Describe how prices are wrong; None if nothing shows that they are."""
    stats = run.balance
    if stats is None:
        return None
    steps = stats.recorded.max(axis=1)
    known = steps > 0
    forward_s, backward_s, predicted_s = (
        stats.sums[name].sum(axis=1)[known] / steps[known]
        for name in ("forward_s", "backward_s", "predicted_experts_s")
    )
    if known.sum() >= _FEWEST:
        measured, predicted = (
            float(np.median(values)) for values in (forward_s + backward_s, predicted_s)
        )
        comparable = np.isfinite(measured) and measured > 0 and predicted > 0
        if comparable and not 1 / _FAR_OFF <= measured / predicted <= _FAR_OFF:
            return (
                f"experts took {timing(measured)} a step on rank 0, predicted {timing(predicted)}"
            )
    means = _means(run)
    if means is not None and means.with_s > means.step_s:
        return (
            f"expert layers were predicted to take {timing(means.with_s)} a step, and whole steps "
            f"took {timing(means.step_s)}"
        )
    return None


def _means(run: RunFacts) -> _Means | None:
    stats = run.balance
    if stats is None or not stats.sums["replicas"].sum():
        return None
    steps = len(stats.steps)
    sums = {name: float(values.sum()) for name, values in stats.sums.items()}
    without_s, with_s, exposed_s = (
        sums[name] / steps
        for name in ("predicted_unbalanced_s", "predicted_s", "predicted_exposed_s")
    )
    if not without_s > 0:
        return None
    before, after = (
        sums[name] / float(stats.recorded.sum()) for name in ("imbalance_before", "imbalance_after")
    )
    recorded = run.steps.step_s[np.isin(run.steps.step, stats.steps)]
    return _Means(
        without_s, with_s, saved_s=without_s - with_s + exposed_s,
        waited_s=(sums["replica_wait_s"] + sums["gradient_wait_s"]) / steps,
        planning_s=sums["planning_s"] / steps,
        step_s=float(np.mean(recorded)) if len(recorded) else float("nan"),
        before=before, after=after,
    )  # fmt: skip


def _judge(run: RunFacts, means: _Means) -> Finding:
    """Compare the predicted saving with the measured cost; no verdict if prices are wrong."""
    mismatch = _mismatch(run)
    if mismatch is not None:
        title = f"Replicas have no verdict: balance prices do not match this machine ({mismatch})"
        return Finding("replicas_unknown", "note", title, _measured(run, means))
    ratio = means.with_s / means.without_s
    share = f"a predicted {three(ratio)} of the time without them"
    if ratio >= 1:
        share = "about the same time as without them" if ratio < 1 + _SAME else share
        title = f"Replicas did not pay: expert layers take {share}"
        action = _TURN_OFF + _alternative(run)
    elif (cost := _excess_cost(means)) is not None:
        title = f"Replicas may not have paid: {cost}"
        action = _TURN_OFF + ("" if run.setting("balance.measure_prices") else _MEASURE)
    else:
        title = f"Replicas paid: expert layers take {share}"
        return Finding("replicas_paid", "note", title, _measured(run, means))
    text = f"{_measured(run, means)} {action}."
    return Finding("replicas_did_not_pay", "warning", title, text)


def _excess_cost(means: _Means) -> str | None:
    """Describe a measured cost above the predicted saving; None if it is below.

    No record says how much of the planning overlaps other work, so all of it counts.
    """
    waited = bool(np.isfinite(means.waited_s))
    saved_s = means.saved_s if waited else means.without_s - means.with_s
    cost_s = means.planning_s + (means.waited_s if waited else 0.0)
    if not cost_s > saved_s:
        return None
    what = "sending, waiting and planning cost" if waited else "planning cost"
    if cost_s < saved_s * (1 + _SAME):
        return f"{what} {timing(cost_s)} a step, about the predicted saving"
    return f"{what} {timing(cost_s)} a step, the predicted saving is {timing(saved_s)}"


def _measured(run: RunFacts, means: _Means) -> str:
    """Return the numbers behind the verdict, as sentences."""
    waiting = (
        f"Sending and waiting for replicas took {timing(means.waited_s)} on rank 0 "
        f"({percent(means.waited_s / means.step_s)} of a step)"
        if np.isfinite(means.waited_s)
        else "Waiting for replicas is not measured on this device"
    )
    overlapped = ", partly overlapped with the dispatch" if _plans_early(run) else ""
    return (
        f"Predicted: {timing(means.with_s)} a step with replicas, {timing(means.without_s)} "
        f"without. {waiting}, planning {timing(means.planning_s)}{overlapped}. Mean of the layers: "
        f"the busiest rank had {three(means.before)} times the mean without replicas, "
        f"{three(means.after)} with them."
    )


def _plans_early(run: RunFacts) -> bool:
    """Return whether replicas are planned from earlier counts, during the dispatch."""
    return (
        bool(run.setting("balance.prefetch")) or run.setting("balance.policy") in PAST_LOAD_POLICIES
    )


def _alternative(run: RunFacts) -> str:
    """Return what else helps when replicas are predicted not to pay."""
    if run.setting("balance.prefetch"):
        return ", or balance.prefetch = false to plan from the current counts"
    if _is_exact(run):
        return ""
    if run.setting("balance.as_published"):
        return ", or balance.as_published = false to skip replicas that are predicted not to pay"
    return ', or "quota" to skip replicas that are predicted not to pay'


def _is_exact(run: RunFacts) -> bool:
    """Return whether the policy makes exactly the replicas that are predicted to pay."""
    return run.setting("balance.policy") in (None, "quota")


def _no_replicas(run: RunFacts) -> Finding:
    before = float(np.nanmean(run.steps.imbalance_before))
    text = f"In the least even layer the busiest rank had {three(before)} times the mean"
    if before <= EVEN:
        title = "Loads were even: no replicas were needed"
        return Finding("no_replicas", "note", title, f"{text}.")
    return Finding("no_replicas", "note", "No replicas were made", f"{text}. {_why_none(run)}.")


def _why_none(run: RunFacts) -> str:
    policy = run.setting("balance.policy")
    if run.setting("balance.max_replicas") == 0:
        return "balance.max_replicas = 0 leaves no room for replicas; raise it"
    if minimum := _below_minimum(run):
        return minimum
    if _is_exact(run):
        return "No replica would pay by the current balance.prices"
    if run.setting("balance.as_published"):
        return f"Policy {policy} requested none"
    return f"Policy {policy} requested none that are predicted to pay"


def _below_minimum(run: RunFacts) -> str:
    """Say that balance.min_replica_tokens prevents replicas; empty if it does not."""
    least = run.setting("balance.min_replica_tokens")
    default = BalanceConfig.model_fields["min_replica_tokens"].default
    if not _is_exact(run):
        return ""
    least = default if least is None else least
    stats, micro_batches = run.balance, run.setting("train.micro_batches") or 1
    if stats is not None and 0 < stats.most_tokens / micro_batches < least:
        return (
            f"A replica needs at least {least:,} tokens (balance.min_replica_tokens); no rank had "
            f"more than {stats.most_tokens / micro_batches:,.0f} in a layer and micro-batch. Lower "
            "it, or raise train.batch"
        )
    if least == default:
        return ""
    return f"No replica of at least {least:,} tokens (balance.min_replica_tokens) would pay"
