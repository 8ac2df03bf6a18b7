"""The loss scale of fp16: a power of two that lives in the counters of a run.

Small gradients vanish in fp16, so that backward starts from the loss times this scale. Where a
gradient overflows, nothing is updated and the scale halves; after many updates in a row it doubles.
The counters of a run that computes in another type have no scale, and may count skipped steps.
"""

from __future__ import annotations

import math

from moesaic.base.errors import DivergedError

EXPONENT = "scale_exponent"
"""The counter that says which power of two."""
GOOD_STEPS = "scale_good_steps"
"""The counter of updates since the scale changed."""
SKIPPED = "skipped"
"""The counter of steps without an update."""

INITIAL_EXPONENT = 16
GROWTH_STEPS = 2000
"""Updates in a row after which the scale doubles."""

_WIDER = 'if it is the range of fp16 that is too small, set train.precision = "bf16" or "fp32"'


def begin(counters: dict[str, int], *, scaled: bool) -> None:
    """Give `counters` a scale if they lack one, or take it from them if nothing is to be scaled."""
    if scaled:
        first = {EXPONENT: INITIAL_EXPONENT, GOOD_STEPS: 0, SKIPPED: 0}
        counters.update({**first, **counters})
    else:
        counters.pop(EXPONENT, None)
        counters.pop(GOOD_STEPS, None)


def scale_of(counters: dict[str, int]) -> float:
    """The factor on the loss; 1 where nothing is scaled."""
    return 2.0 ** counters.get(EXPONENT, 0)


def updates(counters: dict[str, int]) -> int:
    """Steps that updated something."""
    return counters["step"] - counters.get(SKIPPED, 0)


def keep(counters: dict[str, int]) -> None:
    """After an update: the scale has done, and may be too small by now."""
    if EXPONENT not in counters:
        return
    counters[GOOD_STEPS] += 1
    if counters[GOOD_STEPS] == GROWTH_STEPS:
        counters[EXPONENT] += 1
        counters[GOOD_STEPS] = 0


def shrink(counters: dict[str, int], norm: float, loss: float) -> None:
    """After a gradient whose `norm` is not finite: half the scale, or an error if none helps, as
    where the `loss` before any scale, the same on all ranks, is not finite either."""
    step = f"step {counters['step'] + 1}: the gradient's norm is {norm}"
    if EXPONENT not in counters:
        raise DivergedError(f"{step}, and nothing was updated")
    if not math.isfinite(loss):
        raise DivergedError(
            f"{step} as the loss is {loss}, for which no loss scale helps, and nothing was "
            f"updated: {_WIDER}"
        )
    if counters[EXPONENT] == 0:
        raise DivergedError(
            f"{step} at the smallest loss scale, 1, and nothing was updated: {_WIDER}"
        )
    counters[EXPONENT] -= 1
    counters[GOOD_STEPS] = 0
    counters[SKIPPED] += 1
