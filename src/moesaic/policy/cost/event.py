"""A step as events: what every rank computes for itself, and what ranks do together.

Events stand in the order in which each rank meets them; a rank that an event does not concern takes
no time over it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Seconds = NDArray[np.float64]


@dataclass(frozen=True)
class Event:
    """One thing that happens on ranks."""

    name: str
    """What it is: an op, or a message."""
    phase: str
    """The phase of the step that it belongs to, as `train.phases` names it."""
    block: str
    """The block of the model; `step`: none."""
    seconds: Seconds
    """How long it takes, by rank."""
    groups: Sequence[Sequence[int]] = field(default_factory=tuple)
    """Ranks that do it together: they begin when the last of them has come."""
    skew_s: float = 0.0
    """How much later the last of them comes than each by itself would, after a second of computing;
    as the square root of other times."""
