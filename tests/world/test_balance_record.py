"""What a balanced run records of each layer, held against its loads, its messages and its clock."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from moesaic.base.events import read_events
from moesaic.base.records import read_records
from moesaic.dist.all_to_all import Transport, Work
from moesaic.dist.world import World
from moesaic.facts.job import Job
from moesaic.testing.jobs import RandomSamples, tiny_job
from moesaic.testing.ranks import RankPool
from moesaic.testing.runs import start_run
from moesaic.train.record import RunRecord

STEPS = 3
FREE = {"expert_tokens_per_s": 1.0, "bytes_per_s": 1e30, "latency_s": 0.0, "overlaps": True}
"""Costs at which any row that moves from a busy rank to an idle one pays."""


class Weighed:
    """A carrier that counts the bytes of rows as wide as experts."""

    def __init__(self, inner: Transport, width: int) -> None:
        self.name, self.group, self.close = inner.name, inner.group, inner.close
        self._inner, self._width, self.sent = inner, width, 0

    def start(
        self, rows: Tensor, send: list[int], receive: list[int], into: Tensor | None = None
    ) -> tuple[Tensor, Work]:
        if rows.shape[1] == self._width:
            self.sent += rows.numel() * rows.element_size()
        return self._inner.start(rows, send, receive, into)


def record(world: World, job: Job, out: Path) -> list[list[Any]]:
    """Of each step: its seconds, bytes of experts that this rank sent, and what it told."""
    run = start_run(job, world)
    weighed = {}
    for layer, moe in run.part.model.expert_layers():
        ranks, width = moe.dispatcher.groups, moe.bank.arena.shape[1]
        if ranks.replica_transport is not None:  # It is where there is a policy.
            weighed[layer] = Weighed(ranks.replica_transport, width)
            moe.dispatcher.groups = replace(ranks, replica_transport=weighed[layer])
    samples, said = RandomSamples(job.model.vocab, job.data.sequence), []
    written = RunRecord(out, job, world)
    for _ in range(STEPS):
        facts = run.step(samples)
        figures = written.write_step(facts, sum(facts.phases.values()), {})
        bytes_by_layer = {layer: carrier.sent for layer, carrier in weighed.items()}
        for carrier in weighed.values():
            carrier.sent = 0
        said.append([figures, bytes_by_layer])
    written.close()
    run.close()
    return said


def rows_of(directory: Path) -> list[dict[str, Any]]:
    return [row for part in read_records(directory) for row in part.to_pylist()]


@pytest.mark.parametrize(
    ("policy", "early", "train"),
    [
        ("quota", False, {"micro_batches": 2}),
        ("quota", True, {"micro_batches": 2, "recompute": True}),
        ("faster-moe", False, {"precision": "bf16", "recompute": True}),
    ],
)
def test_layers_over_time(
    ranks: RankPool, tmp_path: Path, policy: str, early: bool, train: dict[str, Any]
) -> None:
    job = tiny_job(
        layout={"ep": 2}, train=train, log={"loads_every": 1, "tensorboard": False},
        balance={"policy": policy, "costs": FREE, "min_replica_tokens": 1, "prefetch": early},
    )  # fmt: skip
    results = ranks.run(2, record, job, tmp_path)
    loads, told = rows_of(tmp_path / "loads"), rows_of(tmp_path / "balance")
    assert [(row["step"], row["layer"]) for row in told] == [
        (step, layer) for step in range(1, STEPS + 1) for layer in (0, 1)
    ]
    homes, passes = np.arange(8) // 4, 4 if train.get("recompute") else 3
    for row, load in zip(told, loads, strict=True):
        assert (row["step"], row["layer"]) == (load["step"], load["layer"])
        at_home = np.bincount(homes, weights=load["counts"], minlength=2)
        assert row["tokens_before"] == at_home.tolist()
        rank_tokens = row["predicted_experts_s"] / passes
        assert 0 < rank_tokens == round(rank_tokens) <= sum(load["counts"])
        assert row["imbalance_before"] >= max(at_home) / np.mean(at_home) - 1e-12
        sent = sum(steps[row["step"] - 1][1][row["layer"]] for steps in results)
        assert row["replica_bytes"] == sent
        assert (row["replicas"] > 0) == (sent > 0)
    assert sum(row["replicas"] for row in told) > 0
    written = list(read_events(tmp_path / "events" / "rank-0.jsonl"))
    events = [event for event in written if event["event"] == "step"]
    decisions = {e["step"]: e["balance"] for e in written if e["event"] == "decisions"}
    assert list(decisions) == [event["step"] for event in events]
    for event in events:
        mine = [row for row in told if row["step"] == event["step"]]
        decided = [one for one in decisions[event["step"]] if not one["is_ahead"]]
        assert sum(len(one["replicas"]) for one in decided) == event["replicas"]
        for name in ("replicas", "replica_bytes", "planning_s"):
            assert event[name] == pytest.approx(sum(row[name] for row in mine)), name
        waited = sum(row["replica_wait_s"] + row["gradient_wait_s"] for row in mine)
        computed = sum(row["forward_s"] + row["backward_s"] for row in mine)
        assert event["replica_exposed_s"] == pytest.approx(waited)
        assert all(row["forward_s"] > 0 and row["backward_s"] > 0 for row in mine)
        assert all((row["replica_wait_s"] > 0) == (row["replicas"] > 0) for row in mine)
        assert all((row["gradient_wait_s"] > 0) == (row["replicas"] > 0) for row in mine)
        assert 0 < computed + waited < event["step_s"]


def test_nothing_is_recorded_where_nobody_is_asked(ranks: RankPool, tmp_path: Path) -> None:
    job = tiny_job(layout={"ep": 2}, log={"loads_every": 1, "tensorboard": False})
    [first, _] = ranks.run(2, record, job, tmp_path)
    assert (tmp_path / "loads").is_dir()
    assert not (tmp_path / "balance").exists()
    assert not {"replicas", "replica_bytes", "replica_exposed_s"} & set(first[0][0])


def test_a_run_is_the_same_with_a_clock_and_without(ranks: RankPool) -> None:
    job = tiny_job(
        layout={"ep": 2}, balance={"policy": "quota", "costs": FREE, "min_replica_tokens": 1}
    )
    with_it, without = (ranks.run(2, parameters, job, told) for told in (True, False))
    for one, other in zip(with_it, without, strict=True):
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))


def parameters(world: World, job: Job, told: bool) -> list[Tensor]:
    run = start_run(job, world)
    for _, moe in run.part.model.expert_layers():
        assert moe.clock is not None
        moe.clock = moe.clock if told else None
    samples = RandomSamples(job.model.vocab, job.data.sequence)
    for _ in range(2):
        run.step(samples)
    found = [one.detach().clone() for one in run.part.model.parameters()]
    run.close()
    return found
