"""Whether copies of experts paid: what the model says that they saved, held against what was
measured of waiting for them and of deciding on them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moesaic.facts.job import BalanceConfig
from moesaic.facts.job.balance import LATE
from moesaic.report.facts import RunFacts
from moesaic.report.findings.finding import Finding
from moesaic.report.wording import percent, plural, size, three, timing

EVEN = 1.1
"""Rows of the busiest rank over the mean up to which loads count as even."""
_FAR_OFF = 2.5
"""As many times what is expected, or less than that part of it, is no matter of a noisy machine."""
_FEWEST = 3
"""Recorded steps, or columns of them, from which a median leaves out the first one."""
_ALIKE = 0.02
"""Times that differ by less than this part are told as alike."""
_NONE = 'say balance.policy = "none"'
_MEASURE = (
    ", or have prices measured (balance.measure = true, where neither the job nor a plan says any)"
)


class _Told(NamedTuple):
    """Of a mean recorded step, over all layers of rank 0."""

    home_s: float
    """That layers are modelled to take without copies."""
    with_s: float
    saved_s: float
    """What the model has copies save before anybody waits for them."""
    waited_s: float
    """As measured on rank 0; NaN where no clock tells."""
    planning_s: float
    """As measured on rank 0 of deciding, whether or not that was in the way."""
    step_s: float
    before: float
    """Rows of the busiest rank over the mean, if all were computed at home."""
    after: float


def verdict(run: RunFacts) -> Finding | None:
    """What copies came to, in a sentence; None where no policy was asked."""
    copies = run.steps.copies
    if not np.isfinite(copies).any():
        return None
    if not np.nansum(copies):
        return _no_copies(run)
    told = _told(run)
    if told is None:
        before, after = (
            three(float(np.nanmean(one)))
            for one in (run.steps.busiest_before, run.steps.busiest_after)
        )
        text = (
            f"{three(float(np.nanmean(copies)))} a step; in the least even layer the busiest rank "
            f"had {before} times the mean at home, and {after} with copies. A lower "
            "log.loads_every records more."
        )
        title = "Copies were made, and what they saved is not on record"
        return Finding("copies_unknown", "note", title, text)
    return _judged(run, told)


def did_not_pay(run: RunFacts) -> Finding | None:
    """The same where something should be done about it."""
    found = verdict(run)
    return None if found is None or found.severity == "note" else found


def rehomed(run: RunFacts) -> Finding | None:
    """What became of experts that changed their ranks for good; None where none did."""
    if not run.moves:
        return None
    experts, steps = sum(one.experts for one in run.moves), {one.step for one in run.moves}
    layers = {one.layer for one in run.moves}
    times = "once" if len(steps) == 1 else f"at {len(steps)} times"
    title = f"{plural(experts, 'expert')} of {plural(len(layers), 'layer')} moved for good, {times}"
    last = run.moves[-1].step
    worst = max((one for one in run.moves if one.step == last), key=lambda one: one.before)
    text = (
        f"{size(sum(one.num_bytes for one in run.moves))} travelled. The last were behind step "
        f"{last:,}; in layer {worst.layer} the busiest rank had {three(worst.before)} times the "
        f"mean, and would have had {three(worst.after)}."
    )
    return Finding("rehomed", "note", title, text)


def prices_off(run: RunFacts) -> Finding | None:
    """Experts that took far more or less than policies counted on, where a clock tells, or steps
    that took less than their expert layers should have."""
    off = _off(run)
    if off is None:
        return None
    title = f"Balance counts on prices that are off: {off}"
    text = f"Whether copies pay is decided, and told, by prices. {_of_prices(run)}"
    return Finding("prices_off", "warning", title, text)


def _of_prices(run: RunFacts) -> str:
    """What to do about them, by where they are from."""
    shared = "; a machine that others use at times has no steady ones."
    if run.setting("balance.prices") is not None:
        return "Leave out balance.prices, or correct it by what `moesaic probe` finds here" + shared
    if run.setting("balance.measure"):
        return (
            "If they were measured when the run began (balance.measure), that was with nothing in "
            "a cache, while a small model lives in one, or beside somebody who was busy then: "
            "leave out balance.measure, or say balance.prices by what was measured of a step here."
        )
    return "Say balance.prices, or plan with what `moesaic probe` finds here" + shared


def _off(run: RunFacts) -> str | None:
    """How prices are known to be off, in words; None: as far as is known, they are not."""
    spreads = run.spreads
    if spreads is None:
        return None
    steps = spreads.number.max(axis=1)
    here = steps > 0
    forward_s, backward_s, modelled_s = (
        spreads.sums[name].sum(axis=1)[here] / steps[here]
        for name in ("forward_s", "backward_s", "modelled_experts_s")
    )
    if here.sum() >= _FEWEST:
        took_s, expected_s = (float(np.median(one)) for one in (forward_s + backward_s, modelled_s))
        known = np.isfinite(took_s) and took_s > 0 and expected_s > 0
        if known and not 1 / _FAR_OFF <= took_s / expected_s <= _FAR_OFF:
            return f"experts took rank 0 {timing(took_s)} a step, and {timing(expected_s)} by them"
    told = _told(run)
    if told is not None and told.with_s > told.step_s:
        return (
            f"expert layers would take {timing(told.with_s)} a step by them, and whole steps took "
            f"{timing(told.step_s)}"
        )
    return None


def _told(run: RunFacts) -> _Told | None:
    spreads = run.spreads
    if spreads is None or not spreads.sums["copies"].sum():
        return None
    steps, sums = len(spreads.steps), {name: one.sum() for name, one in spreads.sums.items()}
    home_s, with_s, exposed_s = (
        float(sums[name]) / steps
        for name in ("modelled_home_s", "modelled_s", "modelled_exposed_s")
    )
    if not home_s > 0:
        return None
    before, after = (
        float(sums[name] / spreads.number.sum()) for name in ("busiest_before", "busiest_after")
    )
    recorded = run.steps.step_s[np.isin(run.steps.step, spreads.steps)]
    return _Told(
        home_s, with_s, saved_s=home_s - with_s + exposed_s,
        waited_s=float(sums["landing_s"] + sums["return_s"]) / steps,
        planning_s=float(sums["planning_s"]) / steps,
        step_s=float(np.mean(recorded)) if len(recorded) else float("nan"),
        before=before, after=after,
    )  # fmt: skip


def _judged(run: RunFacts, told: _Told) -> Finding:
    """By the model where nothing was measured, and else by both; by neither if prices are off."""
    off = _off(run)
    if off is not None:
        title = f"Whether copies paid is not known: prices are off ({off})"
        return Finding("copies_unknown", "note", title, _figures(run, told))
    ratio = told.with_s / told.home_s
    part = f"{three(ratio)} of what they would have at home"
    if ratio >= 1:
        part = "about as long as at home" if ratio < 1 + _ALIKE else part
        title = f"Copies did not pay: expert layers are modelled to take {part}"
        remedy = _NONE + _remedy(run)
    elif (kept := _kept(run, told)) is not None:
        title = f"Copies may not have paid: {kept}"
        remedy = _NONE + ("" if run.setting("balance.measure") else _MEASURE)
    else:
        title = f"Copies paid: expert layers are modelled to take {part}"
        return Finding("copies_paid", "note", title, _figures(run, told))
    return Finding(
        "copies_did_not_pay", "warning", title, f"{_figures(run, told)} {_opened(remedy)}."
    )


def _kept(run: RunFacts, told: _Told) -> str | None:
    """How waiting and deciding took what copies save, in words; None: they did not. Nothing on
    record tells how much of deciding by the time before was in the way: all of it counts."""
    waited = bool(np.isfinite(told.waited_s))
    saved_s = told.saved_s if waited else told.home_s - told.with_s
    lost_s = told.planning_s + (told.waited_s if waited else 0.0)
    if not lost_s > saved_s:
        return None
    what = "handing over, waiting and deciding" if waited else "deciding"
    beside = ", part of it while tokens travelled," if _goes_by_the_past(run) else ""
    took = f"{what} took rank 0 {timing(lost_s)} a step{beside or ','}"
    if lost_s < saved_s * (1 + _ALIKE):
        return f"{took} about as long as they are modelled to save without that"
    return f"{took} and they are modelled to save {timing(saved_s)} without that"


def _figures(run: RunFacts, told: _Told) -> str:
    """All that is known, as sentences."""
    waiting = (
        f"handing over and waiting for copies took rank 0 {timing(told.waited_s)}, "
        f"{percent(told.waited_s / told.step_s)} of a step, measured"
        if np.isfinite(told.waited_s)
        else "what waiting for copies took is not measured on such a device"
    )
    where = ", much of it while tokens travelled" if _goes_by_the_past(run) else ""
    text = (
        f"{timing(told.with_s)} for {timing(told.home_s)} a step, modelled; {waiting}; deciding on "
        f"them took it {timing(told.planning_s)}{where}; the busiest rank had {three(told.before)} "
        f"times the mean at home, and {three(told.after)} with copies, in the mean of layers."
    )
    return _opened(text)


def _goes_by_the_past(run: RunFacts) -> bool:
    """Whether copies are decided on by rows of the time before, while those at hand travel."""
    return bool(run.setting("balance.early")) or run.setting("balance.policy") in LATE


def _remedy(run: RunFacts) -> str:
    """What else there is to say to whom copies do not pay, as modelled."""
    if run.setting("balance.early"):
        return ", or balance.early = false, by the rows at hand"
    if _is_ours(run):
        return ""
    if run.setting("balance.as_published"):
        return ", or balance.as_published = false, which makes none that are modelled not to pay"
    return ', or "quota", which makes none that are modelled not to pay'


def _is_ours(run: RunFacts) -> bool:
    """Whether the policy makes all copies that are modelled to pay, and no others."""
    return run.setting("balance.policy") in (None, "quota")


def _no_copies(run: RunFacts) -> Finding:
    """Loads were even, or copies would have cost more than they save."""
    before = float(np.nanmean(run.steps.busiest_before))
    text = f"In the least even layer the busiest rank had {three(before)} times the mean"
    if before <= EVEN:
        title = "Loads were even enough: no copies were made"
        return Finding("no_copies", "note", title, f"{text}.")
    policy = run.setting("balance.policy")
    why = (
        "there was no room for any (balance.copies = 0)"
        if run.setting("balance.copies") == 0
        else _too_few(run)
        or (
            "by the prices at hand none would have paid"
            if _is_ours(run)
            else f"{policy} asked for none"
            if run.setting("balance.as_published")
            else f"{policy} asked for none that are modelled to pay"
        )
    )
    return Finding("no_copies", "note", "No copies were made", f"{text}; {why}.")


def _too_few(run: RunFacts) -> str:
    """That copies get so many rows at least, where that is unusual or more than a rank has; empty
    where it is not, or the policy does not know of it."""
    least = run.setting("balance.least_rows")
    usual = BalanceConfig.model_fields["least_rows"].default
    if not _is_ours(run):
        return ""
    least = usual if least is None else least
    rows = _most_rows(run)
    if rows is not None and rows < least:
        return (
            f"a copy gets at least {least:,} rows (balance.least_rows), and no rank had more than "
            f"{rows:,.0f} of a layer at a time"
        )
    if least == usual:
        return ""
    return (
        "by the prices at hand none would have paid of those that get at least "
        f"{least:,} rows (balance.least_rows)"
    )


def _most_rows(run: RunFacts) -> float | None:
    """Of a rank in a micro-batch of a layer, about; None where that is not on record."""
    spreads, micro_batches = run.spreads, run.setting("train.micro_batches") or 1
    if spreads is None or not spreads.rows["rows_before"].size:
        return None
    steps = np.maximum(spreads.number, 1)[..., None]
    return float((spreads.rows["rows_before"] / steps).max()) / micro_batches


def _opened(text: str) -> str:
    """As a sentence begins."""
    return text[0].upper() + text[1:]
