"""Run one layout and return its outcome in terms that do not depend on the layout."""

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
from moesaic.facts.balance import BalanceDecision, IntArray, no_replicas
from moesaic.facts.job import Job
from moesaic.facts.plan import plan_from_layout
from moesaic.models.init import InitialSource
from moesaic.nn.inputs import Inputs
from moesaic.nn.moe import MoE
from moesaic.testing.jobs import RandomSamples, tiny_job
from moesaic.testing.ranks import RankPool
from moesaic.train.assemble import LMRun, assemble
from moesaic.train.routing_replay import RoutingReplay, open_recorder

Array = npt.NDArray[Any]


def sparing(cases: Sequence[Any], every: int) -> list[Any]:
    """Return `cases` as parameters; all but one of `every` are soaks.

    A list is unpacked into arguments; anything else is one argument.
    """
    soak = pytest.mark.soak
    return [
        pytest.param(*(case if isinstance(case, list) else [case]), marks=[soak] * (at % every > 0))
        for at, case in enumerate(cases)
    ]


FREE = {"expert_tokens_per_s": 1.0, "bytes_per_s": 1e30, "latency_s": 0.0, "overlaps": True}
"""Prices at which any token that moves from a busy rank to an idle one pays."""
ASKING: dict[str, Any] = {"policy": "quota", "prices": FREE, "min_replica_tokens": 1}
"""Balance table that makes replicas in a tiny job."""
IN_PARTS: dict[str, Any] = {
    **ASKING, "prefetch": True, "max_replicas": 3,
    "prices": {
        "expert_tokens_per_s": 700.0, "bytes_per_s": 1e6, "latency_s": 0.0, "overlaps": True,
    },
}  # fmt: skip
"""Balance table with more replicas than one transfer between two layers of a tiny job can carry:
some are prefetched during the experts of the layer before."""
SIGMOID: dict[str, Any] = {
    "model": {
        "family": "deepseek_v3", "kv_heads": 4, "layers": 3, "dense_layers": 1, "dense_ffn": 40,
        "shared_experts": 1, "expert_groups": 4, "top_expert_groups": 2,
        "routed_scaling_factor": 2.5, "renormalise": True,
        "latent": {"kv_lora_rank": 10, "q_lora_rank": 12, "qk_rope_head_dim": 4, "v_head_dim": 6},
    },
    "routing": {"bias_update_rate": 0.02},
}  # fmt: skip
"""Tables of a job with dense and sparse layers and biased routers."""


@dataclass
class Outcome:
    """Outcome of a run."""

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
    placement: list[list[int]] | None = None,
    stages: list[list[str]] | None = None,
    replica_seed: int | None = None,
) -> Run:
    """Train on one rank; return shards as (key, shape, offset, values).

    `replica_seed` seeds random replicas, which replace the decisions of a policy.
    """
    plan = plan_from_layout(job.layout, job.model, world.size)
    if placement is not None:
        plan = plan.model_copy(update={"expert_placement": placement})
    if stages is not None:
        plan = plan.model_copy(update={"stages": stages})
    run = assemble(job, plan, world, InitialSource(job.seed, job.model.init_std))
    place_random_replicas(run, replica_seed)
    moes = [moe for _, moe in run.part.model.expert_layers()]
    ahead = [CountPrefetched(moe) for moe in moes]
    samples = RandomSamples(job.model.vocab, job.data.sequence)
    run.objective.routing_replay = RoutingReplay(Path(replay), job, "samples") if replay else None
    gradients = first_gradients(run, world.rank)
    facts = []
    with ExitStack() as stack:
        if record:
            run.objective.routing_recorder = stack.enter_context(
                open_recorder(Path(record), world, "samples", 0)
            )
        for _ in range(steps):
            step = run.step(samples)
            facts.append(
                {
                    "loss": step.loss, "balance": step.balance_loss, "z": step.z_loss,
                    "norm": step.grad_norm, "tokens": step.tokens,
                    "num_replay_mismatches": step.num_replay_mismatches,
                    "dropped": sum(step.dropped.values()),
                    "counts": [c.tolist() for c in step.counts.values()],
                    "migrations": [
                        (one.layer, one.decision.outcome.moves, one.num_bytes)
                        for one in step.migrations
                    ],
                    "replicas": sum(one.stats.replicas for one in step.balance.values())
                    + sum(getattr(moe.balancer, "made", 0) for moe in moes),
                    "prefetched": sum(one.number for one in ahead),
                    "not_prefetched": sum(one.late for one in ahead),
                }
            )  # fmt: skip
        if run.objective.routing_recorder:
            run.objective.routing_recorder.flush()
    state = [plain(shard) for shard in run.state().shards]
    run.close()
    return facts, gradients, state


def place_random_replicas(run: LMRun, seed: int | None) -> None:
    """Replace the policy of every layer by random replicas, unless `seed` is None."""
    for layer, moe in run.part.model.expert_layers() if seed is not None else ():
        owned = moe.dispatcher.placement
        moe.balancer = RandomReplicas(owned.slot_of_expert // owned.slots_per_rank, [seed, layer])


class CountPrefetched:
    """Count prefetched replicas, and those that were too late for it."""

    def __init__(self, moe: MoE) -> None:
        self._moe, self._begin, self.number, self.late = moe, moe.start_prefetch, 0, 0
        moe.start_prefetch = self  # type: ignore[assignment]

    def __call__(self, inputs: Inputs, dtype: torch.dtype) -> None:
        """Start the replicas, and count them."""
        self._begin(inputs, dtype)
        begun = self._moe._next_pass
        replicas = None if begun is None else begun.replicas
        if replicas is not None and replicas.all_to_alls:
            self.number += int(replicas._is_prefetched.sum())
            self.late += int((~replicas._is_prefetched).sum())


class RandomReplicas:
    """Place random replicas with random tokens; sometimes with none."""

    def __init__(self, owners: IntArray, seed: list[int]) -> None:
        """In two of three layers, replicas are prefetched."""
        self._owners, self._draw = owners, np.random.default_rng(seed)
        self.prefetches = sum(seed) % 3 > 0
        self._ahead: BalanceDecision | None = None
        self.made = 0

    def set_owners(self, owners: IntArray) -> None:
        """Set the owner rank of each expert."""
        self._owners = owners

    def prefetched_replicas(self) -> BalanceDecision:
        """Return replicas, some of them prefetched."""
        replicas = self._draw_replicas(self._owners.max() + 1)
        leaving = self._draw.random(len(replicas)) < self._draw.choice([0.0, 0.5, 1.0])
        self._ahead = no_replicas()._replace(replicas=replicas, prefetched=leaving)
        return self._ahead

    def place_next_replicas(self) -> None:
        """Plan nothing."""

    def _draw_replicas(self, ranks: int) -> IntArray:
        share = self._draw.choice([0.0, 0.1, 0.4, 1.0])
        chosen = self._draw.random((len(self._owners), ranks)) < share
        chosen[np.arange(len(self._owners)), self._owners] = False
        return np.argwhere(chosen)

    def __call__(self, counts: IntArray) -> BalanceDecision:
        """Return replicas and the tokens that each receives."""
        assert (self._ahead is not None) == self.prefetches
        early, self._ahead = self._ahead, None
        replicas = self._draw_replicas(len(counts)) if early is None else early.replicas
        self.made += len(replicas)
        diverted = []
        for expert in range(len(self._owners)):
            targets = replicas[replicas[:, 0] == expert, 1].tolist()
            for source, number in enumerate(counts[:, expert].tolist()):
                odds = self._draw.dirichlet([0.3] * (len(targets) + 1))
                tokens = self._draw.multinomial(number, odds).tolist()
                for target, num in zip(targets, tokens, strict=False):
                    diverted += [(expert, source, target, num)] * bool(num)
        leaving = None if early is None else early.prefetched
        return BalanceDecision(replicas, np.array(diverted, np.int64).reshape(-1, 4), leaving)


def plain(shard: Any) -> tuple[str, tuple[int, ...], tuple[int, ...], Array]:
    with shard.borrow() as values:
        return shard.key, shard.shape, shard.offset, values.detach().clone().numpy()


def first_gradients(run: Any, rank: int) -> list[Any]:
    """Return a list that the next step fills with this rank's gradients."""
    found: list[Any] = []

    def enter(phase: str) -> None:
        if phase == "clip" and not found:  # They are reduced, and nothing is updated.
            for item in run.part.trainable:
                found.extend(map(plain, item.tensor_shards("gradient", item.grad, rank)))

    run.phase_hook = enter
    return found


def outcome(
    ranks: RankPool,
    size: int,
    job: Job,
    steps: int,
    *,
    record: str | None = None,
    replay: str | None = None,
    placement: list[list[int]] | None = None,
    stages: list[list[str]] | None = None,
    replica_seed: int | None = None,
) -> Outcome:
    """Run on `size` ranks and join the results; replicated shards must agree bit for bit."""
    options = (record, replay, placement, stages, replica_seed)
    return together(ranks.run(size, run_layout, job, steps, *options))


_references: dict[str, Outcome] = {}


def reference(ranks: RankPool, steps: int, size: int = 1, **tables: Any) -> Outcome:
    """Return the outcome of the tiny job with `tables`; each is run once."""
    key = f"{size} {steps} {tables}"
    if key not in _references:
        _references[key] = outcome(ranks, size, tiny_job(**tables), steps)
    return _references[key]


def together(results: list[Run]) -> Outcome:
    """Join the results of all ranks."""
    own = {"replicas": 0, "prefetched": 0, "not_prefetched": 0}  # Differ by EP group.
    facts_by_rank = [[{**step, **own} for step in facts] for facts, _, _ in results]
    for facts in facts_by_rank[1:]:
        # NaN equals itself in repr.
        assert repr(facts) == repr(facts_by_rank[0]), "ranks report different steps"
    return Outcome(
        results[0][0], put_together([r[1] for r in results]), put_together([r[2] for r in results])
    )


def assert_same(one: Outcome, other: Outcome) -> None:
    """Compare fp64 runs: each element within 1e-9, and the same routing."""
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
    for shards in by_rank:
        for key, shape, offset, values in shards:
            if key not in whole:
                whole[key], seen[key] = np.zeros(shape, values.dtype), np.zeros(shape, bool)
            box = tuple(slice(a, a + n) for a, n in zip(offset, values.shape, strict=True))
            known = seen[key][box]
            assert np.array_equal(whole[key][box][known], values[known]), (
                f"replicated shards of {key} differ"
            )
            whole[key][box] = values
            seen[key][box] = True
    for key, mask in seen.items():
        assert mask.all(), f"{key} is not covered"
    return whole


def weights(result: Outcome) -> dict[str, Array]:
    """Return the parameters of the state."""
    return {k: v for k, v in result.state.items() if k.startswith(PARAMETER + "/")}


def worst_element(a: dict[str, Array], b: dict[str, Array]) -> float:
    """Return the largest |a - b| / max(|b|, root mean square of b's tensor) over all elements."""
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
    """Return the largest norm(a - b) / norm(b) over all tensors."""
    assert a.keys() == b.keys()
    return max(float(np.linalg.norm(a[k] - b[k]) / max(np.linalg.norm(b[k]), 1e-30)) for k in a)
