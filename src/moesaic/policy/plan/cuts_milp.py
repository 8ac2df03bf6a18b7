"""Stage cuts as a mixed-integer linear program, solved by HiGHS: a yardstick of `cuts`.

It needs scipy, which is imported on use.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import numpy as np

from moesaic.base.errors import ConfigError
from moesaic.policy.plan.cuts import Fits, StageCuts, cuts_seconds


def check_scipy() -> None:
    """Raise without scipy, before a search that needs it begins."""
    if importlib.util.find_spec("scipy") is None:
        raise ConfigError('method "milp" needs scipy: pip install scipy, or use another method')


def solve_cuts(
    block_seconds: Sequence[Sequence[float]],
    micro_batches: int,
    fits: Fits | None = None,
) -> StageCuts | None:
    """Return the cuts that HiGHS finds, as `best_cuts` does; None if there are none.

    A binary variable tells whether a stage has the blocks from one index to another. Every block is
    in one stage, every stage has one range of blocks, and the slowest stage bounds all others.
    """
    from scipy import optimize, sparse

    num_stages, num_blocks = len(block_seconds), len(block_seconds[0])
    ranges = [
        (stage, start, end)
        for stage in range(num_stages)
        for start in range(stage, num_blocks)
        for end in range(start + 1, num_blocks - (num_stages - 1 - stage) + 1)
        if fits is None or fits(stage, start, end)
    ]
    seconds = [sum(block_seconds[stage][start:end]) for stage, start, end in ranges]
    # The last variable is the slowest stage.
    costs = np.array([*seconds, micro_batches - 1.0])
    one_range = sparse.lil_matrix((num_stages, len(costs)))
    one_stage = sparse.lil_matrix((num_blocks, len(costs)))
    slowest = sparse.lil_matrix((num_stages, len(costs)))
    for at, (stage, start, end) in enumerate(ranges):
        one_range[stage, at] = 1
        one_stage[start:end, at] = 1
        slowest[stage, at] = -seconds[at]
    slowest[:, -1] = 1
    # Stages stand in order: the end of one is the start of the next.
    order = sparse.lil_matrix((max(num_stages - 1, 1), len(costs)))
    for at, (stage, start, end) in enumerate(ranges):
        if stage < num_stages - 1:
            order[stage, at] = end
        if stage:
            order[stage - 1, at] = -start
    constraints = [
        optimize.LinearConstraint(one_range.tocsr(), 1, 1),
        optimize.LinearConstraint(one_stage.tocsr(), 1, 1),
        optimize.LinearConstraint(slowest.tocsr(), 0, np.inf),
        optimize.LinearConstraint(order.tocsr(), 0, 0),
    ]
    found = optimize.milp(
        costs, constraints=constraints, integrality=np.array([1] * len(ranges) + [0]),
        bounds=optimize.Bounds(0, np.array([1.0] * len(ranges) + [np.inf])),
        options={"mip_rel_gap": 0.0},
    )  # fmt: skip
    if found.x is None:
        return None
    chosen = sorted(one for one, value in zip(ranges, found.x, strict=False) if value > 0.5)
    starts = tuple(start for _, start, _ in chosen)
    return StageCuts(starts, cuts_seconds(block_seconds, micro_batches, starts))
