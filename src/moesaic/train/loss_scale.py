"""Loss scale of fp16: a power of two in the counters of a run.

Small gradients underflow in fp16, so backward starts from the loss times this scale. If a gradient
overflows, the update is skipped and the scale halves; after many updates in a row it doubles. Runs
in other precisions have no scale, but may have counted skipped steps before.
"""

from __future__ import annotations

import math

from moesaic.base.errors import DivergedError

EXPONENT = "loss_scale_exponent"
"""Counter of the scale's binary exponent."""
GROWTH_TRACKER = "loss_scale_growth_tracker"
"""Counter of updates since the scale changed."""
SKIPPED = "skipped"
"""Counter of steps without an update."""

INITIAL_EXPONENT = 16
GROWTH_INTERVAL = 2000
"""Updates in a row after which the scale doubles."""

_WIDER_TYPE_HINT = 'if the range of fp16 is too small, set train.precision = "bf16" or "fp32"'


def init_counters(counters: dict[str, int], *, is_scaled: bool) -> None:
    """Add a scale to `counters` if it is missing, or remove it if nothing is scaled."""
    if is_scaled:
        first = {EXPONENT: INITIAL_EXPONENT, GROWTH_TRACKER: 0, SKIPPED: 0}
        counters.update({**first, **counters})
    else:
        counters.pop(EXPONENT, None)
        counters.pop(GROWTH_TRACKER, None)


def current_scale(counters: dict[str, int]) -> float:
    """Return the factor on the loss; 1 if nothing is scaled."""
    return 2.0 ** counters.get(EXPONENT, 0)


def num_updates(counters: dict[str, int]) -> int:
    """Return the number of steps that updated parameters."""
    return counters["step"] - counters.get(SKIPPED, 0)


def record_update(counters: dict[str, int]) -> None:
    """Count an update; double the scale after `GROWTH_INTERVAL` in a row."""
    if EXPONENT not in counters:
        return
    counters[GROWTH_TRACKER] += 1
    if counters[GROWTH_TRACKER] == GROWTH_INTERVAL:
        counters[EXPONENT] += 1
        counters[GROWTH_TRACKER] = 0


def back_off(
    counters: dict[str, int],
    norm: float,
    loss: float,
    *,
    whose: str = "",
    is_updated: bool = False,
) -> None:
    """Halve the scale after a gradient with a `norm` that is not finite. Raise if no scale helps,
    as when the unscaled `loss`, equal on all ranks, is not finite either. `whose` names the part,
    " of ...", if there are several. `is_updated` if experts were updated before the norm was known,
    which needs an unscaled loss."""
    step = f"step {counters['step'] + 1}: the gradient's norm{whose} is {norm}"
    if EXPONENT not in counters:
        state = (
            "which was known only after the update of experts"
            if is_updated
            else "and nothing was updated"
        )
        raise DivergedError(f"{step}, {state}")
    if not math.isfinite(loss):
        raise DivergedError(
            f"{step} as the loss is {loss}, for which no loss scale helps, and nothing was "
            f"updated: {_WIDER_TYPE_HINT}"
        )
    if counters[EXPONENT] == 0:
        raise DivergedError(
            f"{step} at the smallest loss scale, 1, and nothing was updated: {_WIDER_TYPE_HINT}"
        )
    counters[EXPONENT] -= 1
    counters[GROWTH_TRACKER] = 0
    counters[SKIPPED] += 1
