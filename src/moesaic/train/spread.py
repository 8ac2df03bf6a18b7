"""What became of the rows of an expert layer: where they would have been computed and where they
were, what copies took, and what was expected of it; a row for each layer of a step in a run's
`balance/`.

What adds up over micro-batches is their sum. Rows, copies and bytes are of all ranks that share out
the experts, seconds of the rank that tells.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import pyarrow as pa

from moesaic.dist.exchange import LANDING, RETURN
from moesaic.facts.balance import Balance, Ints, Setting, unchanged
from moesaic.nn.grouped import BACKWARD, FORWARD
from moesaic.policy.balance.model import busiest, handled_s, moved, rows, times_of

BALANCE = pa.schema(
    [
        ("step", pa.int32()),
        ("layer", pa.int16()),
        ("rows_before", pa.list_(pa.int64())),
        ("rows_after", pa.list_(pa.int64())),
        ("busiest_before", pa.float64()),
        ("busiest_after", pa.float64()),
        ("std_before", pa.float64()),
        ("std_after", pa.float64()),
        ("copies", pa.int64()),
        ("bytes_moved", pa.int64()),
        ("planning_s", pa.float64()),
        ("landing_s", pa.float64()),
        ("return_s", pa.float64()),
        ("forward_s", pa.float64()),
        ("backward_s", pa.float64()),
        ("modelled_experts_s", pa.float64()),
        ("modelled_travel_s", pa.float64()),
        ("modelled_exposed_s", pa.float64()),
        ("modelled_s", pa.float64()),
        ("modelled_home_s", pa.float64()),
    ]
)
_WORST = ("before", "after")
"""What does not add up."""


def _no_rows() -> Ints:
    return np.zeros(1, np.int64)


@dataclass(frozen=True)
class Spread:
    """Of one layer, of one micro-batch or of several."""

    copies: int = 0
    """That were made."""
    before: float = 1.0
    """Rows of the busiest rank over the mean, if everything were computed at home; the most of any
    micro-batch."""
    after: float = 1.0
    """The same, as it was computed."""
    planning_s: float = 0.0
    rows_before: Ints = field(default_factory=_no_rows)
    """By rank, if everything were computed at home."""
    rows_after: Ints = field(default_factory=_no_rows)
    most_before: int = 0
    """Of the rank with the most of them, which may be another one in each micro-batch."""
    most_after: int = 0
    std_before: float = 0.0
    """Standard deviation of rows over ranks."""
    std_after: float = 0.0
    bytes_moved: int = 0
    """Parameters to copies and gradients home."""
    modelled_experts_s: float = 0.0
    """Of this rank's rows, forward and backward, slowed by handling copies that travel."""
    modelled_travel_s: float = 0.0
    """Of copies, out and back, hidden or not."""
    modelled_exposed_s: float = 0.0
    """What of that is not hidden."""
    modelled_s: float = 0.0
    """Of the layer, forward and backward."""
    modelled_home_s: float = 0.0
    """The same, if everything were computed at home."""
    landing_s: float = math.nan
    """That copies kept this rank in forward, handing over and waiting; NaN where no clock tells."""
    return_s: float = math.nan
    """The same of their gradients in backward."""
    forward_s: float = math.nan
    """That its experts computed."""
    backward_s: float = math.nan

    @classmethod
    def of(cls, counts: Ints, setting: Setting, balance: Balance, rank: int) -> Spread:
        """What rank `rank` tells of rows [ranks, experts] that are computed as `balance` says."""
        home, now = (rows(counts, setting.homes, one) for one in (unchanged(), balance))
        nothing = np.zeros(setting.ranks, np.int64)
        without = times_of(home, nothing, nothing, setting)
        copies = moved(balance, setting)
        modelled = times_of(now, *copies, setting)
        each = setting.forwards * setting.expert_bytes + setting.gradient_bytes
        guests = int((balance.copies[:, 1] == rank).sum())
        matrices_s = setting.matrices_s * (1 + guests / setting.own)
        forward_s = int(now.computed[rank]) / setting.rows_per_s + matrices_s
        return cls(
            copies=len(balance.copies),
            before=busiest(home.computed), after=busiest(now.computed),
            rows_before=home.computed, rows_after=now.computed,
            most_before=int(home.computed.max()), most_after=int(now.computed.max()),
            std_before=float(home.computed.std()), std_after=float(now.computed.std()),
            bytes_moved=round(len(balance.copies) * each),
            modelled_experts_s=setting.passes * forward_s + handled_s(rank, *copies, setting),
            modelled_travel_s=setting.forwards * modelled.out + modelled.back,
            modelled_exposed_s=modelled.exposed,
            modelled_s=modelled.whole, modelled_home_s=without.whole,
        )  # fmt: skip

    @property
    def exposed_s(self) -> float:
        """That copies kept this rank from computing."""
        return self.landing_s + self.return_s

    def and_then(self, other: Spread) -> Spread:
        """Of both, the worse of the two where they do not add up."""
        found = {}
        for one in fields(self):
            mine, theirs = getattr(self, one.name), getattr(other, one.name)
            found[one.name] = max(mine, theirs) if one.name in _WORST else mine + theirs
        return Spread(**found)

    def timed(self, seconds: Mapping[str, float]) -> Spread:
        """The same, with what a clock says of the step."""
        landing_s, return_s, forward_s, backward_s = (
            seconds.get(kind, 0.0) for kind in (LANDING, RETURN, FORWARD, BACKWARD)
        )
        return replace(
            self, landing_s=landing_s, return_s=return_s, forward_s=forward_s, backward_s=backward_s
        )

    def record(self, step: int, layer: int) -> dict[str, Any]:
        """The row of a layer of a step."""
        told = {name: getattr(self, name) for name in BALANCE.names if hasattr(self, name)}
        by_rank = {name: told[name].tolist() for name in ("rows_before", "rows_after")}
        ranks, num_rows = len(self.rows_before), int(self.rows_before.sum())
        uneven = {
            name: most * ranks / num_rows if num_rows else 1.0
            for name, most in (
                ("busiest_before", self.most_before), ("busiest_after", self.most_after),
            )
        }  # fmt: skip
        return {**told, **by_rank, **uneven, "step": step, "layer": layer}
