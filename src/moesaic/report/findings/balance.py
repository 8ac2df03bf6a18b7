"""Whether copies of experts paid: what the model says that they saved, held against what was
measured of waiting for them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moesaic.report.facts import RunFacts
from moesaic.report.findings.finding import Finding
from moesaic.report.wording import percent, three, timing

EVEN = 1.1
"""Rows of the busiest rank over the mean up to which loads count as even."""
_FAR_OFF = 2.5
"""As many times what is expected, or less than that part of it, is no matter of a noisy machine."""
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


def prices_off(run: RunFacts) -> Finding | None:
    """Experts that took far more or less than policies counted on, where a clock tells."""
    spreads = run.spreads
    if spreads is None:
        return None
    names = "forward_s", "backward_s", "modelled_experts_s"
    forward_s, backward_s, expected_s = (
        float(spreads.sums[name].sum()) / len(spreads.steps) for name in names
    )
    took_s = forward_s + backward_s
    if not (np.isfinite(took_s) and took_s > 0 and expected_s > 0):
        return None
    if 1 / _FAR_OFF <= took_s / expected_s <= _FAR_OFF:
        return None
    title = (
        f"Balance counts on prices that are off: experts took rank 0 {timing(took_s)} a step, and "
        f"{timing(expected_s)} by them"
    )
    asked = run.setting("balance.prices") is not None
    remedy = "Leave out balance.prices, or correct" if asked else "Say balance.prices, or plan with"
    text = (
        f"Whether copies pay is decided, and told, by prices. {remedy} what `moesaic probe` finds "
        "here; a machine that others use at times has no steady ones."
    )
    return Finding("prices_off", "warning", title, text)


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
        step_s=float(np.mean(recorded)) if len(recorded) else float("nan"),
        before=before, after=after,
    )  # fmt: skip


def _judged(run: RunFacts, told: _Told) -> Finding:
    """By the model where nothing was measured, and else by both."""
    part = f"{three(told.with_s / told.home_s)} of what they would have at home"
    modelled = f"{timing(told.with_s)} for {timing(told.home_s)} a step, modelled"
    known = np.isfinite(told.waited_s)
    waiting = (
        f"handing over and waiting for copies took rank 0 {timing(told.waited_s)}, "
        f"{percent(told.waited_s / told.step_s)} of a step, measured"
        if known
        else "what waiting for copies took is not measured on such a device"
    )
    busiest = (
        f"the busiest rank had {three(told.before)} times the mean at home, and "
        f"{three(told.after)} with copies"
    )
    text = f"{modelled}; {waiting}; {busiest}."
    if told.with_s >= told.home_s:
        title = f"Copies did not pay: expert layers are modelled to take {part}"
        remedy = _NONE + _remedy(run)
    elif known and told.waited_s > told.saved_s:
        title = (
            f"Copies may not have paid: they kept rank 0 for {timing(told.waited_s)} a step, and "
            f"are modelled to save {timing(told.saved_s)} without that"
        )
        remedy = _NONE + ("" if run.setting("balance.measure") else _MEASURE)
    else:
        title = f"Copies paid: expert layers are modelled to take {part}"
        return Finding("copies_paid", "note", title, _opened(text))
    return Finding("copies_did_not_pay", "warning", title, f"{_opened(text)} {_opened(remedy)}.")


def _remedy(run: RunFacts) -> str:
    """What else there is to say to whom copies do not pay, as modelled."""
    if run.setting("balance.early"):
        return ", or balance.early = false, by the rows at hand"
    if _is_ours(run):
        return ""
    if run.setting("balance.as_published"):
        return ", or balance.as_published = false, which makes none that are modelled not to pay"
    return ', or "auto", which makes none that are modelled not to pay'


def _is_ours(run: RunFacts) -> bool:
    """Whether the policy makes all copies that are modelled to pay, and no others."""
    return run.setting("balance.policy") in (None, "auto", "quota")


def _no_copies(run: RunFacts) -> Finding:
    """Loads were even, or copies would have cost more than they save."""
    before = float(np.nanmean(run.steps.busiest_before))
    text = f"In the least even layer the busiest rank had {three(before)} times the mean"
    if before <= EVEN:
        title = "Loads were even enough: no copies were made"
        return Finding("no_copies", "note", title, f"{text}.")
    why = (
        "there was no room for any (balance.copies = 0)"
        if run.setting("balance.copies") == 0
        else "by the prices at hand none would have paid"
        if _is_ours(run)
        else f"{run.setting('balance.policy')} asked for none"
        if run.setting("balance.as_published")
        else f"{run.setting('balance.policy')} asked for none that are modelled to pay"
    )
    return Finding("no_copies", "note", "No copies were made", f"{text}; {why}.")


def _opened(text: str) -> str:
    """As a sentence begins."""
    return text[0].upper() + text[1:]
