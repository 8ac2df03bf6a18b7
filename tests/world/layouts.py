"""One training run under one layout, and what it did, in terms that do not depend on the layout."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from moesaic.dist.state import PARAMETER
from moesaic.dist.world import World
from moesaic.facts.balance import Balance, Ints, unchanged
from moesaic.facts.job import Job
from moesaic.facts.plan import lay_out
from moesaic.models.initial import InitialSource
from moesaic.nn.context import Context
from moesaic.nn.moe import MoE
from moesaic.testing.jobs import RandomSamples
from moesaic.testing.ranks import Ranks
from moesaic.train.assemble import assemble
from moesaic.train.routes import RouteReplay, recording

Array = npt.NDArray[Any]


def sparing(cases: Sequence[Any], every: int) -> list[Any]:
    """`cases` for the default suite, one of `every` of them; all others are soaks.

    A list is as many arguments as it has items, anything else is one.
    """
    soak = pytest.mark.soak
    return [
        pytest.param(*(case if isinstance(case, list) else [case]), marks=[soak] * (at % every > 0))
        for at, case in enumerate(cases)
    ]


FREE = {"rows_per_s": 1.0, "bytes_per_s": 1e30, "latency_s": 0.0, "hides": True}
"""Prices at which any row that moves from a busy rank to an idle one pays."""
ASKING: dict[str, Any] = {"policy": "quota", "prices": FREE, "least_rows": 1}
"""Of a balance that makes copies in a tiny job."""
IN_PARTS: dict[str, Any] = {
    **ASKING, "early": True, "copies": 3,
    "prices": {"rows_per_s": 700.0, "bytes_per_s": 1e6, "latency_s": 0.0, "hides": True},
}  # fmt: skip
"""Of one whose copies pay, and are more than travel between two layers of a tiny job, so that
others leave under experts of the layer before."""
SIGMOID: dict[str, Any] = {
    "model": {
        "family": "deepseek_v3", "kv_heads": 4, "layers": 3, "dense_layers": 1, "dense_ffn": 40,
        "shared": 1, "groups": 4, "top_groups": 2, "scale": 2.5, "renormalise": True,
        "latent": {"width": 10, "queries": 12, "rotary": 4, "value": 6},
    },
    "routing": {"bias_step": 0.02},
}  # fmt: skip
"""Tables of a job whose layers differ, with biased routers."""


@dataclass
class Outcome:
    """What a run did."""

    steps: list[dict[str, Any]]
    gradients: dict[str, Array]
    state: dict[str, Array]


Run = tuple[list[dict[str, Any]], list[Any], list[Any]]
"""One rank's steps, gradients and state."""


def run_layout(
    world: World,
    job: Job,
    steps: int,
    record: str | None = None,
    replay: str | None = None,
    homes: list[list[int]] | None = None,
    stages: list[list[str]] | None = None,
    shaken: int | None = None,
) -> Run:
    """Train on one rank; pieces are returned as (key, shape, offset, values).

    `shaken` seeds copies of experts at random, in the place of what a policy decides.
    """
    plan = lay_out(job.layout, job.model, world.size)
    if homes is not None:
        plan = plan.model_copy(update={"homes_by_rank": homes})
    if stages is not None:
        plan = plan.model_copy(update={"stages": stages})
    run = assemble(job, plan, world, InitialSource(job.seed, job.model.init_std))
    if shaken is not None:
        for layer, moe in run.model.expert_layers():
            homes = moe.dispatcher.homes
            moe.balancer = Shaken(homes.places // homes.each, [shaken, layer])
    ahead = [Ahead(moe) for _, moe in run.model.expert_layers()]
    samples = RandomSamples(job.model.vocab, job.data.sequence)
    run.replay = RouteReplay(Path(replay), job, "samples") if replay else None
    gradients = first_gradients(run, world.rank)
    facts = []
    with ExitStack() as stack:
        if record:
            run.recorder = stack.enter_context(recording(Path(record), world, "samples", 0))
        for _ in range(steps):
            step = run.step(samples)
            facts.append(
                {
                    "loss": step.loss, "balance": step.balance_loss, "z": step.z_loss,
                    "norm": step.grad_norm, "tokens": step.tokens, "flips": step.flips,
                    "dropped": sum(step.dropped.values()),
                    "counts": [c.tolist() for c in step.counts.values()],
                    "moved": [(one.layer, one.to.moves, one.num_bytes) for one in step.moved],
                    "copies": sum(one.copies for one in step.spread.values())
                    + sum(getattr(m.balancer, "made", 0) for _, m in run.model.expert_layers()),
                    "ahead": sum(one.number for one in ahead),
                    "late": sum(one.late for one in ahead),
                }
            )  # fmt: skip
        if run.recorder:
            run.recorder.flush()
    state = [plain(piece) for piece in run.state().pieces]
    run.close()
    return facts, gradients, state


class Ahead:
    """Counts copies that have left under experts of the layer before, and those left behind."""

    def __init__(self, moe: MoE) -> None:
        self._moe, self._begin, self.number, self.late = moe, moe.begin_ahead, 0, 0
        moe.begin_ahead = self  # type: ignore[assignment]

    def __call__(self, context: Context, dtype: torch.dtype) -> None:
        """As the layer does."""
        self._begin(context, dtype)
        guests = context.guests.get(self._moe.router.layer)
        if guests is not None and guests.flights:
            self.number += int((~guests._late).sum())
            self.late += int(guests._late.sum())


class Shaken:
    """Copies at random, each of whom gets rows at random; every few times nobody does."""

    def __init__(self, homes: Ints, seed: list[int]) -> None:
        """Of two of three layers they are decided on early."""
        self._homes, self._draw, self.early = homes, np.random.default_rng(seed), sum(seed) % 3 > 0
        self._ahead: Balance | None = None
        self.made = 0

    def rehome(self, homes: Ints) -> None:
        """These are the ranks of all experts from now on."""
        self._homes = homes

    def ahead(self) -> Balance:
        """Copies, some of which leave under the layer before."""
        copies = self._copies(self._homes.max() + 1)
        leaving = self._draw.random(len(copies)) < self._draw.choice([0.0, 0.5, 1.0])
        self._ahead = unchanged()._replace(copies=copies, ahead=leaving)
        return self._ahead

    def think(self) -> None:
        """Nothing to think about."""

    def _copies(self, ranks: int) -> Ints:
        share = self._draw.choice([0.0, 0.1, 0.4, 1.0])
        chosen = self._draw.random((len(self._homes), ranks)) < share
        chosen[np.arange(len(self._homes)), self._homes] = False
        return np.argwhere(chosen)

    def __call__(self, counts: Ints) -> Balance:
        """And rows."""
        assert (self._ahead is not None) == self.early
        early, self._ahead = self._ahead, None
        copies = self._copies(len(counts)) if early is None else early.copies
        self.made += len(copies)
        diverted = []
        for expert in range(len(self._homes)):
            targets = copies[copies[:, 0] == expert, 1].tolist()
            for source, number in enumerate(counts[:, expert].tolist()):
                odds = self._draw.dirichlet([0.3] * (len(targets) + 1))
                rows = self._draw.multinomial(number, odds).tolist()
                for target, part in zip(targets, rows, strict=False):
                    diverted += [(expert, source, target, part)] * bool(part)
        leaving = None if early is None else early.ahead
        return Balance(copies, np.array(diverted, np.int64).reshape(-1, 4), leaving)


def plain(piece: Any) -> tuple[str, tuple[int, ...], tuple[int, ...], Array]:
    return piece.key, piece.shape, piece.offset, piece.tensor.clone().numpy()


def first_gradients(run: Any, rank: int) -> list[Any]:
    """To be filled with those of the run's next step, as this rank has them."""
    found: list[Any] = []

    def enter(phase: str) -> None:
        if phase == "clip" and not found:  # They are reduced, and nothing is updated.
            for item in run.holdings:
                found.extend(map(plain, item.pieces("gradient", item.grad, rank)))

    run.hook = enter
    return found


def outcome(ranks: Ranks, size: int, job: Job, steps: int, **more: Any) -> Outcome:
    """The run on `size` ranks, put together; copies of one box must agree bit for bit."""
    wishes = (more.get(name) for name in ("record", "replay", "homes", "stages", "shaken"))
    return together(ranks.run(size, run_layout, job, steps, *wishes))


def together(results: list[Run]) -> Outcome:
    """What all ranks did, put together likewise."""
    own = {"copies": 0, "ahead": 0, "late": 0}  # A group's.
    said = [[{**step, **own} for step in facts] for facts, _, _ in results]
    for facts in said[1:]:
        # What is no number is as good as itself.
        assert repr(facts) == repr(said[0]), "ranks disagree about what happened"
    return Outcome(
        results[0][0], put_together([r[1] for r in results]), put_together([r[2] for r in results])
    )


def assert_same(one: Outcome, other: Outcome) -> None:
    """In fp64: element by element at 1e-9, and the same routing."""
    for a, b in zip(one.steps, other.steps, strict=True):
        assert a["counts"] == b["counts"]
        assert (a["tokens"], a["dropped"]) == (b["tokens"], b["dropped"])
        for figure in ("loss", "balance", "z", "norm"):
            assert a[figure] == pytest.approx(b[figure], rel=1e-9, abs=1e-12), figure
    assert worst_element(one.gradients, other.gradients) < 1e-9
    assert worst_element(one.state, other.state) < 1e-9


def put_together(by_rank: list[list[Any]]) -> dict[str, Array]:
    whole: dict[str, Array] = {}
    seen: dict[str, Array] = {}
    for pieces in by_rank:
        for key, shape, offset, values in pieces:
            if key not in whole:
                whole[key], seen[key] = np.zeros(shape, values.dtype), np.zeros(shape, bool)
            box = tuple(slice(a, a + n) for a, n in zip(offset, values.shape, strict=True))
            known = seen[key][box]
            assert np.array_equal(whole[key][box][known], values[known]), f"copies of {key} differ"
            whole[key][box] = values
            seen[key][box] = True
    for key, mask in seen.items():
        assert mask.all(), f"{key} is not covered"
    return whole


def weights(result: Outcome) -> dict[str, Array]:
    """The parameters among the state."""
    return {k: v for k, v in result.state.items() if k.startswith(PARAMETER + "/")}


def worst_element(a: dict[str, Array], b: dict[str, Array]) -> float:
    """Largest |a - b| / max(|b|, root mean square of b's tensor) over all elements."""
    assert a.keys() == b.keys()
    worst = 0.0
    for key, expected in b.items():
        found, wanted = a[key].astype(np.float64), expected.astype(np.float64)
        for one in (found, wanted):
            assert np.isfinite(one).all(), f"{key} is not finite"
        scale = max(float(np.sqrt(np.mean(wanted**2))), 1e-300)
        apart = abs(found - wanted) / np.maximum(abs(wanted), scale)
        worst = max(worst, float(apart.max()))
    return worst


def worst_tensor(a: dict[str, Array], b: dict[str, Array]) -> float:
    """Largest norm(a - b) / norm(b) over all tensors."""
    assert a.keys() == b.keys()
    return max(float(np.linalg.norm(a[k] - b[k]) / max(np.linalg.norm(b[k]), 1e-30)) for k in a)
