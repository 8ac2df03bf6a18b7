"""Other methods of searching, to compare with: exhaustive, hill climbing, MCMC, rule of thumb.

Hill climbing follows the published planner of adaptive distributed training (arXiv 2112.02752):
from a random plan of each mesh, it changes one random setting and keeps what is faster, until
`MAX_FAILS` moves in a row fail. MCMC makes the same moves over all meshes with Metropolis
acceptance. Here a plan that does not fit in memory is never accepted in place of one that fits.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from itertools import islice, product
from typing import Any

from moesaic.facts.plan import RankPlace
from moesaic.facts.plan.search import SearchMethod
from moesaic.policy.plan.space import SCHEDULES, Candidate, Space, divisors
from moesaic.policy.plan.trials import Trials

MAX_FAILS = 5
"""Moves in a row that do not help, before hill climbing stops."""
_MOVES_PER_PLAN = 2
_WIDTHS = 4
"""Widths of expert parallelism that a usual layout may have, the widest ones."""
_TEMPERATURES = 0.1, 0.001
"""Relative temperature of MCMC at the begin and the end."""


def run(method: SearchMethod, trials: Trials, seed: int) -> bool:
    """Search by `method`; return whether the best plan is proven."""
    if method == "rule-of-thumb":
        candidate = rule_of_thumb(trials)
        if candidate is not None:
            trials.try_candidate(candidate)
        return False
    if method == "exhaustive":
        return _exhaustive(trials)
    leaves = list(_leaves(trials))
    if not leaves:
        return False
    draw = random.Random(seed)
    if method == "hill-climbing":
        _climb_hills(trials, leaves, draw)
    else:
        _walk(trials, leaves, draw)
    return False


def rule_of_thumb(trials: Trials) -> Candidate | None:
    """Return the layout of engineers' rule of thumb, or None if no such plan is valid.

    It starts with data parallelism alone. Until the plan fits it adds, as far as pins allow: tensor
    parallelism inside a host, expert parallelism, a pipeline between hosts, sharding of dense
    parameters, and recomputation.
    """
    space, current = trials.space, _simplest(trials)
    if current is None:
        return None
    hosts = [place.host for place in _places(trials, current)]
    per_host = max(hosts.count(host) for host in set(hosts))
    most = {
        "tp": per_host, "ep": space.ranks, "pp": len(set(hosts)), "dp_shard": space.ranks,
        "recompute": 1,
    }  # fmt: skip
    for key, limit in most.items():
        if _fits(trials, current):
            return current
        table = "train" if key == "recompute" else "layout"
        if not space.is_open(f"{table}.{key}"):
            continue
        options = [True] if key == "recompute" else range(limit, 1, -1)
        changes: Iterator[dict[str, Any]] = ({key: value} for value in options)
        raised = [current._replace(**change) for change in changes]
        current = next((one for one in raised if space.plan(one) is not None), current)
    return current


def usual_shapes(trials: Trials) -> Iterator[Candidate]:
    """Yield shapes that large runs start from, as far as pins allow.

    They have no tensor parallelism, and a pipeline of any length with as many micro-batches or
    more. Expert parallelism is the widest beside it, or one of the next widths.
    """
    space, first = trials.space, _simplest(trials)
    if first is None:
        return
    numbers = space.values("train.micro_batches", space.micro_batches())
    for pp in space.values("layout.pp", divisors(space.ranks)):
        enough = [one for one in numbers if one >= pp] or numbers
        widths = space.values("layout.ep", divisors(max(space.ranks // pp, 1))[::-1])
        for micro_batches, recompute in product(
            enough, space.values("train.recompute", (False, True))
        ):
            shape = first._replace(micro_batches=micro_batches, recompute=recompute, pp=pp)
            shapes = (space.pinned(shape._replace(ep=ep)) for ep in widths)
            yield from islice((one for one in shapes if space.plan(one) is not None), _WIDTHS)


def likely_leaves(trials: Trials, shape: Candidate) -> list[Candidate]:
    """Return plans of a shape that may fit, one a dispatch method, those with the least bounds
    first.

    Stages are even, and dense parameters sharded no more than memory asks for.
    """
    space, bounds, last = trials.space, trials.bounds, len(Space.LEVELS)
    for sharded in space.children(shape, 1):
        leaf = next(iter(space.children(sharded, 2)), None)
        if leaf is not None and not bounds.exceeds_memory(leaf, last):
            leaves = space.children(leaf, 0)
            return sorted(leaves, key=lambda one: bounds.seconds(one, last))
    return []


def _simplest(trials: Trials) -> Candidate | None:
    """Return the candidate with pinned values, and else no parallelism but that of data."""
    space = trials.space
    keys = ("layout.pp", "layout.tp", "layout.etp", "layout.ep")
    pp, tp, etp, ep = (space.values(key, [1])[0] for key in keys)
    recompute = space.values("train.recompute", [False])[0]
    own = trials.facts.job.train.micro_batches
    for micro_batches in dict.fromkeys([own, *space.values("train.micro_batches", [own, pp])]):
        for schedule in space.values("layout.schedule", SCHEDULES):
            one = Candidate(micro_batches, recompute, pp, schedule, tp, etp, ep)
            if space.plan(space.pinned(one)) is not None:
                return space.pinned(one)
    return next(space.shapes(), None)


def _places(trials: Trials, candidate: Candidate) -> Sequence[RankPlace]:
    found = trials.space.plan(candidate)
    assert found is not None
    return found[1].places


def _fits(trials: Trials, candidate: Candidate) -> bool:
    found = trials.space.plan(candidate)
    if found is None or trials.bounds.exceeds_memory(candidate, len(trials.space.LEVELS)):
        return False
    return trials.estimates.fits(*found)


def _leaves(trials: Trials) -> Iterator[Candidate]:
    """Yield every complete candidate."""
    for shape in trials.space.shapes():
        if trials.is_over:
            return
        yield from trials.space.leaves(shape)


def _exhaustive(trials: Trials) -> bool:
    for leaf in _leaves(trials):
        if trials.is_over:
            return False
        trials.try_candidate(leaf)
    return True


def _climb_hills(trials: Trials, leaves: list[Candidate], draw: random.Random) -> None:
    meshes: dict[tuple[int, int], list[Candidate]] = {}
    for leaf in leaves:
        meshes.setdefault((leaf.pp, leaf.tp), []).append(leaf)
    for own in meshes.values():
        current, fails = draw.choice(own), 0
        current_s = trials.try_candidate(current)
        while fails < MAX_FAILS and len(own) > 1 and not trials.is_over:
            other = _move(current, own, draw)
            other_s = trials.try_candidate(other)
            fails += 1
            if other_s < current_s:
                current, current_s, fails = other, other_s, 0


def _walk(trials: Trials, leaves: list[Candidate], draw: random.Random) -> None:
    current = draw.choice(leaves)
    current_s, moves = trials.try_candidate(current), _MOVES_PER_PLAN * len(leaves)
    first, last = _TEMPERATURES
    for number in range(moves if len(leaves) > 1 else 0):
        if trials.is_over:
            break
        temperature = first * (last / first) ** (number / moves)
        other = _move(current, leaves, draw)
        other_s = trials.try_candidate(other)
        if _accepts(current_s, other_s, temperature, draw.random()):
            current, current_s = other, other_s


def _accepts(current_s: float, other_s: float, temperature: float, number: float) -> bool:
    """Return whether a move is accepted; `number` is drawn evenly from 0 to 1."""
    if other_s <= current_s:
        return True
    if math.isinf(other_s):
        return False
    return number < math.exp((1 - other_s / current_s) / temperature)


def _move(current: Candidate, leaves: list[Candidate], draw: random.Random) -> Candidate:
    """Return a candidate that differs in one random setting, and else as little as possible."""
    index = {name: at for at, name in enumerate(Candidate._fields)}
    open_fields = [at for at in index.values() if any(one[at] != current[at] for one in leaves)]
    field = draw.choice(open_fields)
    others = [one for one in leaves if one[field] != current[field]]
    distances = [sum(a != b for a, b in zip(one, current, strict=True)) for one in others]
    least = min(distances)
    return draw.choice(
        [one for one, distance in zip(others, distances, strict=True) if distance == least]
    )
