"""Findings of a report: what happened to which step, layer or rank, and what to do."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from moesaic.base.units import plural
from moesaic.report.loads import DEAD, HOT, BalanceStats, Extreme, Loads
from moesaic.report.run_stats import RunStats
from moesaic.report.series import known_mean, median
from moesaic.report.way_back import likely_cause, way_back
from moesaic.report.wording import (
    count,
    digits,
    duration,
    listing,
    loss,
    step_range,
)

Severity = Literal["problem", "warning", "note"]

_SEVERITIES: tuple[Severity, ...] = ("problem", "warning", "note")
_MAX_LAYERS = 8
"""Layers that a list of experts names."""
_MANY_DROPS = 0.01
"""Share of dropped assignments in the last quarter from which a note becomes a warning."""
_MANY_SKIPS = 0.05
"""Share of skipped steps above which a note becomes a warning."""
_NEAR = 9
"""Earlier steps whose median is the expected loss."""
_SPIKE_SIGMAS = 8.0
"""A spike exceeds the expected loss by this many robust standard deviations ..."""
_SPIKE_RISE = 0.1
"""... and by this share."""
_OVERFIT_RISE = 0.01
"""Share above the best validation loss at which the last three count as overfitting."""
_FAR_OFF = 2.5
"""Ratio of measured to predicted expert time, in either direction, that noise does not explain."""
_LONG_WAIT = 0.1
"""Part of a step in waiting for the drive above which the drive is the bottleneck."""
_FEWEST = 3
"""Recorded steps needed for a median that ignores the first, slow one."""


@dataclass(frozen=True)
class Finding:
    """Event, severity and advice."""

    kind: str
    """Machine-readable name."""
    severity: Severity
    """problem: results or work are lost. warning: change something. note: good to know."""
    title: str
    """Sentence on what happened, to which layer, rank or step."""
    text: str
    """Numbers, and what to do: key and value."""


def find(run: RunStats) -> list[Finding]:
    """Return every finding of `run`, most severe first."""
    if not len(run.steps) and run.divergence is None:
        return [_no_steps(run)]
    finders = [one for one in _FINDERS if not (run.is_frozen and one in _OF_TRAINING)]
    findings = [finding for finder in finders if (finding := finder(run)) is not None]
    return sorted(findings, key=lambda finding: _SEVERITIES.index(finding.severity))


def _no_steps(run: RunStats) -> Finding:
    text = "The run ended before its first step. Read its terminal output for the cause."
    if run.status == "running":
        text = "The run is starting. Write the report again after its first step."
    return Finding("no_steps", "note", "No step has finished yet", text)


def _stopped(run: RunStats) -> Finding | None:
    if run.status != "stopped":
        return None
    goal = f" of {run.planned_steps:,}" if run.planned_steps else ""
    checkpoint = run.newest_checkpoint
    text = "The log has no end event: the process was killed or crashed. "
    if run.ended:
        text = f"The run was {run.ended}. "
    if checkpoint is None:
        text += (
            "No checkpoint was committed, so the work is lost. Find the cause in the terminal or "
            "the scheduler's log, and set checkpoint.every for the next run."
        )
    else:
        text += (
            f"Resume from the newest checkpoint, step {checkpoint.step:,}; it repeats "
            f"{plural(run.last_step - checkpoint.step, 'step')}."
        )
    return Finding("stopped", "problem", f"The run stopped at step {run.last_step:,}{goal}", text)


def _failed_saves(run: RunStats) -> Finding | None:
    failed = [checkpoint for checkpoint in run.checkpoints if checkpoint.state == "failed"]
    if not failed:
        return None
    where = listing([f"{checkpoint.step:,}" for checkpoint in failed])
    error = failed[-1].error or "not recorded"
    text = f"The last error was: {error}. Check free space and permissions on that disk."
    title = f"{plural(len(failed), 'checkpoint')} failed to write (step {where})"
    return Finding("failed_saves", "problem", title, text)


def _diverged(run: RunStats) -> Finding | None:
    found = run.divergence
    if found is None:
        return None
    loss_of = f'The loss of student "{found.student}"' if found.student else "The loss"
    if found.kind == "not finite":
        title = f"The loss diverged (NaN or infinite) at step {found.not_finite_step:,}"
        if found.step < found.not_finite_step:
            title = (
                f"The loss diverged from step {found.step:,} on, and is NaN or infinite at step "
                f"{found.not_finite_step:,}"
            )
        what = f"{run.error[:1].upper()}{run.error[1:]}. " if run.error else ""
        if not run.error:
            what = (
                f"{found.num_steps:,} of {len(run.steps):,} steps from step "
                f"{found.not_finite_step:,} on have no finite loss, and the weights after it are "
                "useless. "
            )
    elif found.kind == "exploded":
        title = (
            f"{loss_of} diverged from step {found.step:,} on: {digits(found.before)} at the "
            f"start, {digits(found.after)} at the end"
        )
        if found.peak > 2 * found.after:
            title += f", {digits(found.peak)} at worst"
        what = "The weights are worse than at the start. "
    else:
        title = (
            f"{loss_of} diverged from step {found.step:,} on: it had fallen to "
            f"{digits(found.before)} and is back at {digits(found.after)}"
        )
        what = "Most of what was learned is lost. "
    text = f"{what}Likely cause: {likely_cause(run, found)}. {way_back(run, found)}"
    return Finding("diverged", "problem", title, text)


def _skipped(run: RunStats) -> Finding | None:
    steps = run.steps
    rows = np.flatnonzero(steps.skipped > 0)
    if not len(rows):
        return None
    text = (
        f"The last was step {int(steps.step[rows[-1]]):,}. Gradients overflowed fp16, the "
        "optimizer did not run, and the loss scale halved each time; it is now "
        f"{steps.loss_scale[-1]:g}. A few skips at the start are normal."
    )
    often = len(rows) > _MANY_SKIPS * len(steps)
    if often:
        text += (
            ' These are too many: lower optimizer.lr, or set train.precision = "bf16" or "fp32".'
        )
    title = f"{plural(len(rows), 'step')} of {len(steps):,} skipped for fp16 overflow"
    if len(rows) == len(steps):
        text = (
            f"The loss scale ({steps.loss_scale[-1]:g} in the last step) halves with each skipped "
            "step; raise train.steps and continue with --resume, or start again with "
            'train.precision = "bf16" or "fp32"'
        )
        title = (
            f"All {plural(len(steps), 'step')} were skipped because fp16 overflowed, so nothing "
            "was learnt"
        )
        return Finding("all_skipped", "problem", title, text)
    return Finding("skipped", "warning" if often else "note", title, text)


def _spikes(run: RunStats) -> Finding | None:
    steps = run.steps
    if len(steps) <= _NEAR:
        return None
    usual = np.median(np.lib.stride_tricks.sliding_window_view(steps.loss, _NEAR)[:-1], axis=1)
    over = steps.loss[_NEAR:] - usual
    # Differences measure noise even while the loss falls.
    noise = median(np.abs(np.diff(steps.loss))) * 1.4826 / math.sqrt(2)
    spiking = (over > _SPIKE_SIGMAS * noise) & (over > _SPIKE_RISE * np.abs(usual))
    rows = np.flatnonzero(spiking)
    if not len(rows):
        return None
    worst = int(rows[over[rows].argmax()])
    row = worst + _NEAR
    clip, rate = run.setting("train.clip"), run.setting("optimizer.lr")
    text = (
        f"It rose from {loss(float(usual[worst]))} to {loss(float(steps.loss[row]))}, with "
        f"gradient norm {digits(float(steps.grad_norm[row]))} (median "
        f"{digits(median(steps.grad_norm))}). One spike that recovers is harmless. If spikes "
        f"recur, lower optimizer.lr (now {rate}), lengthen schedule.warmup, or "
        + (f"lower train.clip (now {clip:g})." if clip else "set train.clip = 1.0.")
    )
    title = f"The loss spiked at step {int(steps.step[row]):,}"
    return Finding("loss_spikes", "warning", title, text)


def _overfitting(run: RunStats) -> Finding | None:
    losses = np.array([validation.loss for validation in run.validations])
    if len(losses) < 6 or not np.isfinite(losses).all():
        return None
    best = int(losses.argmin())
    rise = float(losses[-3:].min() - losses[best])
    if rise < _OVERFIT_RISE * losses[best]:
        return None
    at = run.validations[best].step
    text = (
        f"Validation loss was {loss(float(losses[best]))} at step {at:,}. The last three are at "
        f"least {loss(rise)} higher. Use the checkpoint nearest to step {at:,}. Train on more "
        "data, for fewer train.steps, or with a higher optimizer.weight_decay."
    )
    return Finding("overfitting", "warning", f"Overfitting since step {at:,}", text)


def _dead_experts(run: RunStats) -> Finding | None:
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


def _hot_experts(run: RunStats) -> Finding | None:
    loads = run.loads
    if loads is None or not loads.hot:
        return None
    top = loads.hot[0]
    hottest = f"Expert {top.expert} of layer {top.layer}"
    title = f"{len(loads.hot):,} experts are hot" if len(loads.hot) > 1 else f"{hottest} is hot"
    text = (
        f"{hottest} received {digits(top.utilisation)}x its even share in {_recent(loads)}. Its "
        f"owner rank computes longest, unless it has replicas. Over {HOT:g}x: "
        f"{_by_layer(loads.hot)}. To spread the load, {_spread_load(run)}"
    )
    if run.setting("routing.capacity_factor") is None:
        text += " Or set routing.capacity_factor to bound its work; excess tokens are then dropped."
    return Finding("hot_experts", "warning", title, text)


def _drops(run: RunStats) -> Finding | None:
    steps, total = run.steps, float(np.nansum(run.steps.dropped))
    if total <= 0:
        return None
    layers = (run.setting("model.layers") or 1) - (run.setting("model.dense_layers") or 0)
    last_quarter = slice(3 * len(steps) // 4, None)
    tokens = float(np.nansum(steps.tokens[last_quarter]))
    assignments = max(tokens * layers * (run.setting("model.top_k") or 1), 1.0)
    recent = float(np.nansum(steps.dropped[last_quarter])) / assignments
    text = (
        f"Full experts dropped {count(total)} assignments in the whole run. Raise "
        f"routing.capacity_factor{_now(run.setting('routing.capacity_factor'))}"
    )
    text += "." if run.is_frozen else f", or spread the load: {_spread_load(run)}"
    title = f"Assignments were dropped: {recent:.1%} in the last quarter of the run"
    return Finding("drops", "warning" if recent >= _MANY_DROPS else "note", title, text)


def _replay_mismatches(run: RunStats) -> Finding | None:
    steps = run.steps
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
    for extreme in sorted(extremes):
        layers.setdefault(extreme.layer, []).append(str(extreme.expert))
    texts = [f"layer {layer}: {listing(experts)}" for layer, experts in layers.items()]
    more = "; ..." if len(texts) > _MAX_LAYERS else ""
    return "; ".join(texts[:_MAX_LAYERS]) + more


def _spread_load(run: RunStats) -> str:
    """Return the setting that evens out the load, as the end of a sentence."""
    by_bias = run.setting("model.family") == "deepseek_v3"
    key = "routing.bias_update_rate" if by_bias else "routing.balance_loss"
    value = run.setting(key)
    return f"raise {key}{_now(value)} by a factor of 2 to 10." if value else f"set {key} = 0.01."


def _now(value: object) -> str:
    return f" (now {value:g})" if isinstance(value, (int, float)) else ""


# Balance. The saving of replicas is predicted, because no step runs twice. Their cost, waiting and
# planning, is measured.


def _replicas(run: RunStats) -> Finding | None:
    made, stats = known_mean(run.steps.replicas), run.balance
    if stats is None or not made > 0 or not stats.mean("predicted_unbalanced_s") > 0:
        return None
    text = (
        f"{digits(made)} replicas a step. In the least even layer the busiest rank had "
        f"{digits(known_mean(run.steps.imbalance_before))} times the mean without replicas and "
        f"{digits(known_mean(run.steps.imbalance_after))} with them."
    )
    mismatch = _price_mismatch(stats)
    if mismatch:
        title = f"Balance costs do not match this machine: {mismatch}"
        text += (
            " Replicas have no verdict by such costs. Remove balance.costs, and plan with the "
            "result of `moesaic probe` on an idle machine."
        )
        return Finding("replicas_unknown", "warning", title, text)
    return _judge_replicas(stats, text)


def _price_mismatch(stats: BalanceStats) -> str:
    """Return how costs are wrong; empty if nothing shows that they are."""
    measured_s = float(np.median(stats.by_step["forward_s"] + stats.by_step["backward_s"]))
    predicted_s = float(np.median(stats.by_step["predicted_experts_s"]))
    comparable = len(stats.steps) >= _FEWEST and measured_s > 0 and predicted_s > 0
    if not comparable or 1 / _FAR_OFF <= measured_s / predicted_s <= _FAR_OFF:
        return ""
    return f"experts took {duration(measured_s)} on rank 0, predicted {duration(predicted_s)}"


def _judge_replicas(stats: BalanceStats, text: str) -> Finding:
    """Compare the predicted saving with the measured cost.

    No record says how much of the planning overlaps other work, so all of it counts.
    """
    with_s, without_s = stats.mean("predicted_s"), stats.mean("predicted_unbalanced_s")
    saved_s, cost_s = without_s - with_s, stats.mean("planning_s")
    waited_s = stats.mean("replica_wait_s", "gradient_wait_s")
    waiting = "Waiting for replicas is not measured on this device"
    if np.isfinite(waited_s):
        saved_s += stats.mean("predicted_exposed_s")
        cost_s += waited_s
        waiting = f"Sending and waiting for replicas took {duration(waited_s)}"
    text += (
        f" Predicted: {duration(with_s)} a step with replicas, {duration(without_s)} without. "
        f"{waiting}, planning {duration(stats.mean('planning_s'))}."
    )
    if with_s < without_s and cost_s <= saved_s:
        share = digits(with_s / without_s)
        title = f"Replicas paid: expert layers take a predicted {share} of the time without them"
        return Finding("replicas_paid", "note", title, text)
    title = (
        f"Replicas did not pay: they cost {duration(cost_s)} a step, the predicted saving is "
        f"{duration(max(saved_s, 0.0))}"
    )
    return Finding("replicas_did_not_pay", "warning", title, f'{text} Set balance.policy = "none".')


def _slow_drive(run: RunStats) -> Finding | None:
    waited = median(run.steps.memory_stall_s / run.steps.step_s)
    if not waited > _LONG_WAIT:
        return None
    title = f"The drive is the bottleneck: {waited:.0%} of a step waits for it"
    text = (
        "Raise train.batch (the traffic per step stays the same), set train.clip = 0, raise "
        "memory.host, or use a faster drive. moesaic replay RUN --memory SIZE says what a budget "
        "saves."
    )
    return Finding("slow_drive", "warning", title, text)


def _slow_passes(run: RunStats) -> Finding | None:
    stall_s = sum(one.get("stall_s", 0.0) for one in run.passes.values())
    waited = stall_s / max(float(np.nansum(run.steps.step_s)), 1e-9)
    if not waited > _LONG_WAIT:
        return None
    title = f"The table's drive is the bottleneck: {waited:.0%} of the time waits for its rows"
    text = (
        "Raise table.host, or train.batch (rows that many samples share are read once), or use a "
        "faster drive."
    )
    return Finding("slow_passes", "warning", title, text)


_FINDERS: tuple[Callable[[RunStats], Finding | None], ...] = (
    _diverged, _stopped, _failed_saves, _dead_experts, _hot_experts, _drops, _replay_mismatches,
    _spikes, _skipped, _overfitting, _replicas, _slow_drive,
    _slow_passes,
)  # fmt: skip
_OF_TRAINING = (_dead_experts, _hot_experts, _spikes, _overfitting)
"""Findings about how the job's own model learns, which a frozen teacher does not."""
