"""Replay: balance policies applied to recorded loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pyarrow as pa
import pytest

from commands import Commands
from moesaic.api.loads import latest_loads
from moesaic.base.compiled import cached_njit
from moesaic.base.events import EventLog
from moesaic.base.records import RecordWriter
from moesaic.facts.balance import BalanceProblem, no_replicas
from moesaic.facts.job import BalanceConfig, BalanceCosts
from moesaic.facts.job.balance import Policy
from moesaic.facts.plan import plan_from_job
from moesaic.policy.balance import LayerBalancer, layer_times, quota, quota_search
from moesaic.policy.balance.cost_model import count_rank_tokens
from moesaic.testing.jobs import tiny_job

LOADS = pa.schema(
    [
        ("step", pa.int32()), ("layer", pa.int16()), ("counts", pa.list_(pa.int64())),
        ("dropped", pa.int64()), ("counts_by_rank", pa.list_(pa.int64())),
    ]
)  # fmt: skip
COSTS = {"expert_tokens_per_s": 1e4, "bytes_per_s": 1e9, "latency_s": 1e-5, "overlaps": False}
SET = [f"--set=costs.{name}={json.dumps(value)}" for name, value in COSTS.items()]
MICRO = 2
PROBLEM = BalanceProblem(
    np.arange(8) // 4, 2, 1e4, 32 * 8.0, 1e9, 3 * 32 * 24 * 8.0, 3 * 32 * 24 * 8.0, 1e-5,
    overlaps=False, max_replicas=1, min_replica_tokens=64,
)  # fmt: skip
"""Balance problem of each layer with `COSTS`."""


def write_run(
    directory: Path,
    *,
    ep: int = 2,
    ranks: int = 4,
    costs: BalanceCosts | None = None,
    start_event: dict[str, Any] | None = None,
    **balance: Any,
) -> np.ndarray:
    """Write a run of two steps; return its tokens, [step, layer, rank, expert]."""
    job = tiny_job(
        layout={"ep": ep}, train={"micro_batches": MICRO}, balance={"policy": "none", **balance}
    )
    (directory / "events").mkdir(parents=True)
    (directory / "job.json").write_text(job.to_json())
    plan = plan_from_job(job, ranks).model_copy(update={"balance_costs": costs})
    (directory / "plan.json").write_text(plan.to_json())
    (directory / "versions.json").write_text("{}")
    log = EventLog(directory / "events" / "rank-0.jsonl")
    log.emit("run_start", step=1, **(start_event or {}))
    log.close()
    odds = np.random.default_rng(0).dirichlet(np.full(8, 0.5), size=(2, 2))
    counts = MICRO * np.array(
        [[[np.round(400 * layer).astype(int)] * ranks for layer in step] for step in odds]
    )
    writer = RecordWriter(directory / "loads", LOADS)
    for step, layer in np.ndindex(2, 2):
        whole = counts[step, layer]
        writer.add([{
            "step": step + 1, "layer": layer, "counts": whole.sum(0).tolist(), "dropped": 0,
            "counts_by_rank": whole.ravel().tolist(),
        }])  # fmt: skip
    writer.flush()
    return counts


def replay(commands: Commands, *line: str) -> dict[str, Any]:
    facts: dict[str, Any] = commands.facts(["replay", *line])
    return facts


def test_layers_are_balanced_as_by_the_policy(tmp_path: Path, commands: Commands) -> None:
    counts = write_run(tmp_path / "run") // MICRO
    facts = replay(commands, str(tmp_path / "run"), "--set=policy=quota", *SET)
    for layer, row in enumerate(facts["layers"]):
        passes = [counts[step, layer, group : group + 2] for step in range(2) for group in (0, 2)]
        decisions = [quota(one, PROBLEM) for one in passes]
        unbalanced = [layer_times(one, PROBLEM, no_replicas()).total_s for one in passes]
        pairs = list(zip(passes, decisions, strict=True))
        balanced = [layer_times(one, PROBLEM, decision).total_s for one, decision in pairs]
        after = [
            count_rank_tokens(one, PROBLEM.owners, decision).computed for one, decision in pairs
        ]
        assert row["micro_batches"] == 4
        assert row["replicas"] == np.mean([len(one.replicas) for one in decisions])
        assert row["unbalanced_s"] == pytest.approx(np.mean(unbalanced))
        assert row["balanced_s"] == pytest.approx(np.mean(balanced))
        imbalance = [2 * one.max() / one.sum() for one in after]
        assert row["imbalance_after"] == pytest.approx(np.mean(imbalance))
    assert facts["speedup"] > 1.05
    assert facts["simulated"] is True


def machines(*hosts: int, kind: str = "cpu", threads: int = 1) -> dict[str, Any]:
    each = [{"host": host, "kind": kind, "threads": threads} for host in hosts]
    return {"device": "whatever", "rank_hosts": each}


@pytest.mark.parametrize(
    ("start_event", "flops", "bytes_per_s"),
    [
        (machines(0, 0, 0, 0, threads=2), 5e10, 3e9),
        (machines(0, 1, 2, 3), 2.5e10, 1.1e8),
        (machines(0, 0, 0, 1), 2.5e10, 1.1e8 / 3),
        (machines(0, 0, 0, 0, kind="gpu"), 2e13, 5e10),
    ],
)
def test_a_run_without_costs_gets_typical_ones(
    tmp_path: Path, commands: Commands, start_event: dict[str, Any], flops: float,
    bytes_per_s: float,
) -> None:  # fmt: skip
    write_run(tmp_path / "run", start_event=start_event)
    costs = replay(commands, str(tmp_path / "run"))["costs"]
    assert costs["expert_tokens_per_s"] == pytest.approx(flops / (6 * 32 * 24))
    assert costs["bytes_per_s"] == pytest.approx(bytes_per_s)


def test_given_prices_replace_those_of_the_run(tmp_path: Path, commands: Commands) -> None:
    planned = BalanceCosts(**{**COSTS, "expert_tokens_per_s": 2e4})
    write_run(tmp_path / "run", costs=planned)
    assert replay(commands, str(tmp_path / "run"))["costs"] == planned.model_dump()
    own = replay(commands, str(tmp_path / "run"), *SET)["costs"]
    assert own == BalanceCosts(**COSTS).model_dump()


def test_policies_by_past_loads_make_no_replicas_at_first(
    tmp_path: Path, commands: Commands
) -> None:
    counts = write_run(tmp_path / "run", costs=BalanceCosts(**COSTS)) // MICRO
    policies: tuple[Policy, ...] = ("eplb", "pro-prophet")
    for policy in policies:
        facts = replay(commands, str(tmp_path / "run"), f"--set=policy={policy}")
        for layer, row in enumerate(facts["layers"]):
            num_replicas = 0
            for group in (0, 2):  # Each has two micro-batches and decides by the first one.
                balancer = LayerBalancer(BalanceConfig(policy=policy), PROBLEM)
                first, second = (counts[step, layer, group : group + 2] for step in range(2))
                assert not len(balancer(first).replicas)
                num_replicas += len(balancer(second).replicas)
            assert row["replicas"] == num_replicas / row["micro_batches"]
    assert replay(commands, str(tmp_path / "run"), "--set=policy=none")["speedup"] == 1.0


def test_the_last_record_of_each_step_counts(tmp_path: Path, commands: Commands) -> None:
    """The run recorded every other step, was resumed after the first, and then recorded each."""
    counts = write_run(tmp_path / "run", costs=BalanceCosts(**COSTS))
    for part in (tmp_path / "run" / "loads").iterdir():
        part.unlink()
    starts = [[(1, 0), (3, 0)], [(2, 1), (3, 1)]]
    for records in starts:
        writer = RecordWriter(tmp_path / "run" / "loads", LOADS)
        for step, which in records:
            whole = counts[which, 0]
            row = {"layer": 0, "counts": whole.sum(0).tolist(), "dropped": 0}
            writer.add([{"step": step, **row, "counts_by_rank": whole.ravel().tolist()}])
            # A layer of another pipeline rank.
            writer.add([{"step": step, **row, "layer": 1, "counts_by_rank": []}])
        writer.flush()
    rows = latest_loads(tmp_path / "run")
    assert rows is not None
    valid = [row for row in rows.to_pylist() if row["layer"] == 0]
    assert [row["step"] for row in valid] == [1, 2, 3]
    for row, which in zip(valid, (0, 1, 1), strict=True):
        assert row["counts_by_rank"] == counts[which, 0].ravel().tolist()
    assert [one["layer"] for one in replay(commands, str(tmp_path / "run"))["layers"]] == [0]


def test_only_steps_in_the_layout_of_the_last_start_are_replayed(
    tmp_path: Path, commands: Commands
) -> None:
    """A run of one rank went back to its first step on four, and has not come as far again."""
    run = tmp_path / "run"
    counts = write_run(run, costs=BalanceCosts(**COSTS))
    whole = replay(commands, str(run))
    assert whole["steps_left_out"] == 0
    (run / "events" / "rank-0.jsonl").unlink()
    for part in (run / "loads").iterdir():
        part.unlink()
    log = EventLog(run / "events" / "rank-0.jsonl")
    for ranks, first, last, sharded in ((1, 1, 4, {}), (4, 3, 3, {"ep": 2}), (4, 2, 3, {"ep": 2})):
        log.emit("run_start", step=first, ranks=ranks, plan=sharded, parts=[])
        writer = RecordWriter(run / "loads", LOADS)
        for step, layer in np.ndindex(5, 2):
            if first <= step <= last:
                tokens = counts[step % 2, layer].sum(0, keepdims=True)
                tokens = tokens if ranks == 1 else counts[step % 2, layer]
                log.emit("step", step=step, loss=1.0, step_s=1.0)
                writer.add([{
                    "step": step, "layer": layer, "counts": tokens.sum(0).tolist(), "dropped": 0,
                    "counts_by_rank": tokens.ravel().tolist(),
                }])  # fmt: skip
        writer.flush()
    log.close()
    found = replay(commands, str(run))
    assert found["steps_left_out"] == 2
    for one, same in zip(found["layers"], whole["layers"], strict=True):
        assert one == pytest.approx(same)
    text = commands.output(["replay", str(run)])
    assert "2 recorded steps left out: only those in the layout of the last start" in text


def test_compiling_is_announced(
    tmp_path: Path, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once per installation, since compiled code is cached on disk."""
    write_run(tmp_path / "run", costs=BalanceCosts(**COSTS))
    line = [str(tmp_path / "run"), "--set=policy=quota"]
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "cache"))
    notices = []
    for _ in range(2):
        monkeypatch.setattr(
            quota_search, "split_by_source", cached_njit(quota_search.split_by_source.py_func)
        )
        err = commands.run(["replay", *line]).err
        notices.append(err.count("compiling the balance policy, once for this"))
    assert notices == [1, 0]
    monkeypatch.setattr(
        quota_search, "split_by_source", numba.njit(quota_search.split_by_source.py_func)
    )  # Not cached.
    out, err = commands.run(["replay", *line, "--json"])
    assert json.loads(out)["policy"] == "quota"
    assert err.startswith(
        "compiling the balance policy (about 10 s) at each start, because no cache"
    )


def test_output_names_the_policy_and_settings_without_effect(
    tmp_path: Path, commands: Commands
) -> None:
    write_run(tmp_path / "run", costs=BalanceCosts(**COSTS))
    line = [str(tmp_path / "run"), "--set=policy=top-k-broadcast", "--set=as_published=true"]
    assert replay(commands, *line)["policy"] == "top-k-broadcast, as published"
    assert replay(commands, *line[:-1])["policy"] == "top-k-broadcast"
    assert replay(commands, line[0], line[2])["policy"] == "quota"  # It ignores the setting.
    text = commands.output(["replay", *line])
    assert "predicted, not measured: with top-k-broadcast, as published the expert" in text
    assert "costs: experts 10,000 tokens/s, exchanges 1 GB/s with 0.01 ms" in text
    sets = ["--set=policy=none", "--set=min_replica_tokens=2", *SET]
    assert commands.run(["replay", line[0], *sets]).err.count("has no effect") == 1


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ([], "RUN is missing"),
        (["nowhere"], "there is no run directory 'nowhere'"),
        (["RUN", "--set=policy=auto"], 'policy = "auto" is not known'),
        (["RUN", "--set", "migrate_every=5"], "a replay keeps experts on their first owner ranks"),
        (
            ["RUN", "--set=replan_drift=0.5"],
            "replan_drift=0.5: replan_drift = 0.5 with replan_every = 1, which always plans "
            "anew: remove it, or raise replan_every",
        ),
        (
            ["RUN", "--set=balance.replan_every=2"],
            "balance.replan_every=2: balance.replan_every = 2 has the name of a job's key: "
            "did you mean 'replan_every'?",
        ),
        (["ALONE", *SET], "had all experts on every rank (layout.ep = 1)"),
        (["EMPTY", *SET], "has no loads by rank"),
        (["RUN"], "has not recorded the devices of its ranks: give prices, such as"),
    ],
)
def test_mistakes(tmp_path: Path, commands: Commands, line: list[str], words: str) -> None:
    write_run(tmp_path / "RUN")
    write_run(tmp_path / "ALONE", ep=1)
    write_run(tmp_path / "EMPTY")
    for part in (tmp_path / "EMPTY" / "loads").iterdir():
        part.unlink()
    named = [str(tmp_path / one) if one.isupper() else one for one in line]
    errors = commands.refusal(["replay", *named])
    assert words in errors
