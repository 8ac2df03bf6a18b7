"""What is predicted of a step, as a person reads it; of a job and of a foreign model alike."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from moesaic.base.errors import ConfigError
from moesaic.cli import screen
from moesaic.facts.plan import short
from moesaic.facts.workload import STEP

SLOWEST = 3
"""Blocks that are named."""
_LONG_S = 2 * 3600.0


def tell(
    opening: str, facts: Mapping[str, Any], rates: Mapping[str, str], remark: str = ""
) -> None:
    """Print the time of a step by phase, memory by kind, what binds, the slowest blocks.

    Args:
        opening: what is predicted, and of what.
        facts: the prediction, as `--json` prints it.
        rates: what follows from the time of a step, in words.
        remark: on the memory of a rank.
    """
    needs = facts["memory_per_rank"]
    kinds = {name: num_bytes for name, num_bytes in needs.items() if name != "peak_bytes"}
    rows = {
        "step": f"{time(facts['step_s'])}, of which",
        **{f"  {name}": time(seconds) for name, seconds in facts["phases_s"].items()},
        **rates,
        "memory per rank": f"{screen.size(needs['peak_bytes'])} of "
        f"{screen.size(facts['memory_bytes'])} at one time{remark}; "
        f"{screen.size(sum(kinds.values()))} in all, of which",
        **{
            f"  {name.removesuffix('_bytes')}": screen.size(num_bytes)
            for name, num_bytes in kinds.items()
            if num_bytes
        },
    }
    if "binds" in facts:
        rows["binds"] = facts["binds"]
    blocks = {name: seconds for name, seconds in facts["blocks_s"].items() if name != STEP}
    # Rounded, so that equal ones stay in their order.
    slowest = sorted(blocks, key=lambda name: -short(blocks[name]))[:SLOWEST]
    rows["slowest blocks"] = ", ".join(f"{name} {time(blocks[name])}" for name in slowest)
    learnt = facts["calibration"]
    basis = f", calibrated by {learnt['runs']} run{'s'[: learnt['runs'] > 1]}" if learnt else ""
    screen.say(f"{opening}; computed{basis}, not measured\n")
    for name, value in rows.items():
        screen.say(f"{name:<18} {value}")


def check(cluster: str, step_s: float, *others: float) -> None:
    """Refuse a prediction that is no number, or of no time: nothing could be told of it."""
    if not (0 < step_s < math.inf and all(map(math.isfinite, others))):
        raise ConfigError(
            f"a step on cluster '{cluster}' would take {step_s} s: its figures, or the sizes of "
            "what runs, are too small or too large; correct them"
        )


def time(seconds: float) -> str:
    """Seconds for people: 12.30 ms, 3.5 hours."""
    if seconds >= _LONG_S:
        return f"{seconds / 3600:,.1f} hours"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"
