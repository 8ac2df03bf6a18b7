"""`moesaic replay`: policies over recorded loads, without ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pyarrow as pa
import pytest

from moesaic.base.events import EventLog
from moesaic.base.records import RecordWriter
from moesaic.cli.main import main
from moesaic.cli.replay import _recorded
from moesaic.facts.balance import Setting, unchanged
from moesaic.facts.job import BalanceConfig, Prices
from moesaic.facts.job.balance import Policy
from moesaic.facts.plan import planned
from moesaic.policy.balance import Asked, gifts, quota, rows, times
from moesaic.policy.balance.compiled import compiled
from moesaic.testing.jobs import tiny_job

LOADS = pa.schema(
    [
        ("step", pa.int32()), ("layer", pa.int16()), ("counts", pa.list_(pa.int64())),
        ("dropped", pa.int64()), ("by_rank", pa.list_(pa.int64())),
    ]
)  # fmt: skip
PRICES = {"rows_per_s": 1e4, "bytes_per_s": 1e9, "latency_s": 1e-5, "hides": False}
SET = [f"--set=prices.{name}={json.dumps(value)}" for name, value in PRICES.items()]
MICRO = 2
SETTING = Setting(
    np.arange(8) // 4, 2, 1e4, 32 * 8.0, 1e9, 3 * 32 * 24 * 8.0, 3 * 32 * 24 * 8.0, 1e-5,
    hides=False, room=1, least_rows=64,
)  # fmt: skip
"""Of each layer, with those prices."""


def a_run(
    place: Path,
    *,
    ep: int = 2,
    ranks: int = 4,
    prices: Prices | None = None,
    begun: dict[str, Any] | None = None,
    **balance: Any,
) -> np.ndarray:
    """A run of two steps; returns rows by step, layer, rank and expert."""
    job = tiny_job(
        layout={"ep": ep}, train={"micro_batches": MICRO}, balance={"policy": "none", **balance}
    )
    (place / "events").mkdir(parents=True)
    (place / "job.json").write_text(job.to_json())
    plan = planned(job, ranks).model_copy(update={"prices": prices})
    (place / "plan.json").write_text(plan.to_json())
    (place / "versions.json").write_text("{}")
    log = EventLog(place / "events" / "rank-0.jsonl")
    log.emit("run_start", step=1, **(begun or {}))
    log.close()
    odds = np.random.default_rng(0).dirichlet(np.full(8, 0.5), size=(2, 2))
    counts = MICRO * np.array(
        [[[np.round(400 * one).astype(int)] * ranks for one in step] for step in odds]
    )
    writer = RecordWriter(place / "loads", LOADS)
    for step, layer in np.ndindex(2, 2):
        whole = counts[step, layer]
        writer.add([{
            "step": step + 1, "layer": layer, "counts": whole.sum(0).tolist(), "dropped": 0,
            "by_rank": whole.ravel().tolist(),
        }])  # fmt: skip
    writer.flush()
    return counts


def replay(capsys: pytest.CaptureFixture[str], *line: str) -> dict[str, Any]:
    assert main(["replay", *line, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_what_a_policy_says_of_each_layer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = a_run(tmp_path / "run") // MICRO
    found = replay(capsys, str(tmp_path / "run"), "--policy", "quota", *SET)
    setting = SETTING
    for layer, told in enumerate(found["layers"]):
        passes = [counts[step, layer, group : group + 2] for step in range(2) for group in (0, 2)]
        balances = [quota(one, setting) for one in passes]
        plain = [times(one, setting, unchanged()).whole for one in passes]
        settled = list(zip(passes, balances, strict=True))
        with_it = [times(one, setting, balance).whole for one, balance in settled]
        after = [rows(one, setting.homes, balance).computed for one, balance in settled]
        assert told["passes"] == 4
        assert told["copies"] == np.mean([len(one.copies) for one in balances])
        assert told["plain_s"] == pytest.approx(np.mean(plain))
        assert told["step_s"] == pytest.approx(np.mean(with_it))
        busiest = [2 * one.max() / one.sum() for one in after]
        assert told["busiest_after"] == pytest.approx(np.mean(busiest))
    assert found["gain"] > 1.05
    assert found["simulated"] is True


def test_prices_that_the_run_measured_are_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a_run(tmp_path / "run", prices=Prices(**PRICES))
    measured = replay(capsys, str(tmp_path / "run"))
    assert measured["prices"] == Prices(**PRICES).model_dump()
    assert measured["policy"] == "quota"
    given = replay(capsys, str(tmp_path / "run"), *SET)
    assert given["gain"] == measured["gain"]


def machines(*hosts: int, kind: str = "cpu", threads: int = 1) -> dict[str, Any]:
    each = [{"host": host, "kind": kind, "threads": threads} for host in hosts]
    return {"device": "whatever", "machines": each}


@pytest.mark.parametrize(
    ("begun", "flops", "bytes_per_s", "source"),
    [
        (machines(0, 0, 0, 0, threads=2), 5e10, 3e9, "cpu, 2 threads a rank, one host"),
        (machines(0, 1, 2, 3), 2.5e10, 1.1e8, "cpu, 1 thread a rank, 4 hosts"),
        (machines(0, 0, 0, 1), 2.5e10, 1.1e8 / 3, "cpu, 1 thread a rank, 2 hosts"),
        (machines(0, 0, 0, 0, kind="gpu"), 2e13, 5e10, "gpu, one host"),
        (
            {"device": "cpu (8 cores, 3 threads a rank)"}, 7.5e10, 3e9,
            "cpu, 3 threads a rank, on how many hosts is not on record, taken for one",
        ),
        (
            {"device": "Some GPU"}, 2e13, 5e10,
            "gpu, on how many hosts is not on record, taken for one",
        ),
        (
            {"device": "Some GPU", "machines": [{"host": 0, "kind": "cpu", "threads": "1"}] * 4},
            2e13, 5e10, "gpu, on how many hosts is not on record, taken for one",
        ),
        ({}, 2.5e10, 3e9, None),
    ],
)  # fmt: skip
def test_a_run_that_went_by_no_prices_has_those_usual_of_its_devices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], begun: dict[str, Any], flops: float,
    bytes_per_s: float, source: str | None,
) -> None:  # fmt: skip
    a_run(tmp_path / "run", begun=begun)
    found = replay(capsys, str(tmp_path / "run"))
    assert found["prices"]["rows_per_s"] == pytest.approx(flops / (6 * 32 * 24))
    assert found["prices"]["bytes_per_s"] == pytest.approx(bytes_per_s)
    assert found["prices_from"] == (
        f"usual of such devices: {source}"
        if source
        else "usual of one thread of a processor, all ranks on one host: what the run had is not "
        "on record"
    )
    assert main(["replay", str(tmp_path / "run")]) == 0
    assert f"prices {found['prices_from']}; experts take " in capsys.readouterr().out


def test_hosts_of_a_plan_count_where_the_run_says_nothing_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a_run(tmp_path / "run")
    path = tmp_path / "run" / "plan.json"
    places = [{"host": f"h{rank // 2}", "device": "X", "kind": "gpu"} for rank in range(4)]
    plan = json.loads(path.read_text())
    path.write_text(json.dumps({**plan, "places": places}))
    said = replay(capsys, str(tmp_path / "run"))
    assert said["prices_from"] == "usual of such devices: gpu, 2 hosts"
    assert said["prices"]["bytes_per_s"] == 5e10  # Between ranks of one host, as these share.
    path.write_text(json.dumps({**plan, "hosts": 2}))
    said = replay(capsys, str(tmp_path / "run"))
    assert said["prices"]["bytes_per_s"] == 1.1e8 / 2


def test_where_prices_come_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a job finds them: those of its own before those of its plan."""
    own, planned_ = Prices(**PRICES), Prices(**{**PRICES, "rows_per_s": 2e4})
    small = {"policy": "quota", "prices": PRICES}  # Which does not begin with so few rows.
    runs: dict[str, tuple[dict[str, Any], float]] = {
        "of the run": ({"prices": planned_, "policy": "quota", "least_rows": 1}, 2e4),
        "of the job": ({"prices": planned_}, 1e4),
        "of the plan": ({"prices": planned_}, 2e4),
    }
    for number, (source, (facts, rows_per_s)) in enumerate(runs.items()):
        place = tmp_path / f"run-{number}"
        a_run(place, **facts)
        if source == "of the job":
            job = tiny_job(layout={"ep": 2}, train={"micro_batches": MICRO}, balance=small)
            (place / "job.json").write_text(job.to_json())
        said = replay(capsys, str(place))
        assert (said["prices_from"], said["prices"]["rows_per_s"]) == (source, rows_per_s)
    said = replay(capsys, str(tmp_path / "run-0"), *SET)
    assert (said["prices_from"], said["prices"]) == ("given", own.model_dump())


def test_policies_by_rows_of_the_time_before_have_none_at_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = a_run(tmp_path / "run", prices=Prices(**PRICES)) // MICRO
    policies: tuple[Policy, ...] = ("eplb", "pro-prophet")
    for policy in policies:
        found = replay(capsys, str(tmp_path / "run"), "--policy", policy)
        for layer, told in enumerate(found["layers"]):
            made = 0
            for group in (0, 2):  # Each of them has two passes, and decides by the first one.
                asked = Asked(BalanceConfig(policy=policy), SETTING)
                first, second = (counts[step, layer, group : group + 2] for step in range(2))
                assert not len(asked(first).copies)
                made += len(asked(second).copies)
            assert told["copies"] == made / told["passes"]
    assert replay(capsys, str(tmp_path / "run"), "--policy", "none")["gain"] == 1.0


def test_steps_are_taken_in_order_each_as_it_was_recorded_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that recorded every other step went on from the first of them and recorded each."""
    counts = a_run(tmp_path / "run", prices=Prices(**PRICES))
    for part in (tmp_path / "run" / "loads").iterdir():
        part.unlink()
    lives = [[(1, 0), (3, 0)], [(2, 1), (3, 1)]]
    for life in lives:
        writer = RecordWriter(tmp_path / "run" / "loads", LOADS)
        for step, which in life:
            whole = counts[which, 0]
            row = {"layer": 0, "counts": whole.sum(0).tolist(), "dropped": 0}
            writer.add([{"step": step, **row, "by_rank": whole.ravel().tolist()}])
            writer.add([{"step": step, **row, "layer": 1, "by_rank": []}])  # Of another part.
        writer.flush()
    job = tiny_job(layout={"ep": 2}, train={"micro_batches": MICRO})
    found = list(_recorded(tmp_path / "run", planned(job, 4), MICRO))
    assert [(one.step, one.layer) for one in found] == [(1, 0), (2, 0), (3, 0)]
    for one, which in zip(found, (0, 1, 1), strict=True):
        assert np.array_equal(one.counts, counts[which, 0] // MICRO)
    assert [one["layer"] for one in replay(capsys, str(tmp_path / "run"))["layers"]] == [0]


def test_a_table_says_that_it_is_modelled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a_run(tmp_path / "run", prices=Prices(**PRICES))
    assert main(["replay", str(tmp_path / "run"), "--out", str(tmp_path / "facts.json")]) == 0
    said = capsys.readouterr().out
    assert "modelled, not measured: with quota" in said
    assert "prices of the plan; experts take 10,000 rows/s, 1 GB/s travel, an exchange" in said
    assert json.loads((tmp_path / "facts.json").read_text())["policy"] == "quota"


def test_settings_may_be_named_as_in_a_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a_run(tmp_path / "run", prices=Prices(**PRICES))
    one, other = (
        replay(capsys, str(tmp_path / "run"), "--set", f"{prefix}policy=llep")
        for prefix in ("", "balance.")
    )
    assert one == other
    assert one["policy"] == "llep"


def test_a_policy_may_be_named_twice_if_it_is_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a_run(tmp_path / "run", prices=Prices(**PRICES))
    twice = ["--policy", "quota", "--set", "policy=llep", "--set", 'policy="quota"']
    assert replay(capsys, str(tmp_path / "run"), *twice)["policy"] == "quota"
    assert main(["replay", str(tmp_path / "run"), "--policy", "quota", "--set", "policy=lp"]) == 2
    said = capsys.readouterr().err
    assert said == "error: --set policy=lp beside --policy quota: leave one of them out\n"
    assert replay(capsys, str(tmp_path / "run"), "--policy", '"quota"')["policy"] == "quota"
    odd = ["--policy", "quota", "--set", "policy.of=lp"]
    assert main(["replay", str(tmp_path / "run"), *odd]) == 2


def test_whoever_waits_for_a_compiler_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once: what has been compiled before is read from disk."""
    a_run(tmp_path / "run", prices=Prices(**PRICES))
    line = [str(tmp_path / "run"), "--policy", "quota"]
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "cache"))
    told = []
    for _ in range(2):
        monkeypatch.setattr(gifts, "_taken", compiled(gifts._taken.py_func))
        assert main(["replay", *line]) == 0
        told.append(capsys.readouterr().out.count("compiling the balance policy, once for this"))
    assert told == [1, 0]
    monkeypatch.setattr(gifts, "_taken", numba.njit(gifts._taken.py_func))  # Kept nowhere.
    assert main(["replay", *line, "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["policy"] == "quota"
    assert err.startswith("compiling the balance policy (about 10 s), at each start, for there is ")


def test_a_policy_as_published_is_named_as_the_others_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a_run(tmp_path / "run", prices=Prices(**PRICES))
    line = [str(tmp_path / "run"), "--policy", "top-k-broadcast", "--set", "as_published=true"]
    found = replay(capsys, *line)
    assert (found["policy"], found["as_published"]) == ("top-k-broadcast", True)
    assert replay(capsys, *line[:-2])["as_published"] is False
    assert replay(capsys, line[0], *line[3:])["as_published"] is False  # quota ignores it.
    assert main(["replay", *line]) == 0
    assert "with top-k-broadcast, as published the expert" in capsys.readouterr().out


def test_settings_without_effect_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a_run(tmp_path / "run")
    line = [str(tmp_path / "run"), "--policy", "none", "--set", "balance.least_rows=2", *SET]
    assert main(["replay", *line]) == 0
    said = capsys.readouterr().err
    assert 'least_rows has no effect: policy = "none"' in said
    assert "prices" not in said
    assert "balance." not in said


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["--policy", "quota", "--set", "replan_every=4"],
         "--set replan_every=4 and --policy quota: replan_every = 4 with policy = \"quota\", which "
         "decides by the rows at hand: remove it, take one that does not (pro-prophet, eplb), "
         "or say early = true"),
        (["--set", "balance.policy=quota", "--set", "balance.replan_every=4"],
         "--set balance.policy=quota and --set balance.replan_every=4: replan_every = 4 with"),
        (["--set", "prices.rows_per_s=1e4"],
         "prices.bytes_per_s is missing: add --set prices.bytes_per_s=VALUE (a "),
    ],
)  # fmt: skip
def test_mistakes_are_told_as_they_were_typed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: list[str], said: str
) -> None:
    a_run(tmp_path / "run")
    assert main(["replay", str(tmp_path / "run"), *line]) == 2
    assert capsys.readouterr().err.startswith(f"error: {said}")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ([], "RUN is missing"),
        (["nowhere"], "there is no run directory 'nowhere'"),
        (["RUN", "--policy", "auto"], 'policy = "auto" is not known'),
        (["RUN", "--set", "measure=true"], "a record has no ranks to be measured"),
        (["RUN", "--set", "rehome_every=5"], "replay has experts where the run began"),
        (["ALONE", *SET], "had all experts on every rank (layout.ep = 1)"),
        (["EMPTY", *SET], "has no loads by rank"),
    ],
)
def test_mistakes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: list[str], words: str
) -> None:
    a_run(tmp_path / "RUN")
    a_run(tmp_path / "ALONE", ep=1)
    a_run(tmp_path / "EMPTY")
    for part in (tmp_path / "EMPTY" / "loads").iterdir():
        part.unlink()
    named = [str(tmp_path / one) if one.isupper() else one for one in line]
    assert main(["replay", *named]) == 2
    said = capsys.readouterr().err
    assert words in said
