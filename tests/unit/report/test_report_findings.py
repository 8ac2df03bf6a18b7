"""Findings: each reports its own problem, and none on a healthy run."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fabricated import fabricate

from moesaic.facts.plan import Predictions
from moesaic.report import RunStats
from moesaic.report.findings import balance, experts, find, learning, speed
from moesaic.report.findings.finding import Finding
from moesaic.report.loads import Loads, over_mean
from moesaic.report.log import Checkpoint, Launch, Steps, Validation
from moesaic.report.prediction import Measurements, Prediction

JOB: dict[str, Any] = {
    "routing": {"balance_loss": 0.01, "capacity_factor": None},
    "model": {"experts": 8, "top_k": 2, "layers": 2},
    "optimizer": {"lr": 0.003},
    "train": {"clip": 1.0},
}


def make_run(size: int = 0, job: dict[str, Any] = JOB, **values: Any) -> RunStats:
    """Return a run of `size` steps; `values` are columns of its steps, or fields of the run."""
    names = {field.name for field in fields(Steps)}
    columns = {name: values.pop(name) for name in names & set(values)}
    unknown = {name: np.full(size, np.nan) for name in names}
    steps = Steps(**{**unknown, "step": np.arange(1.0, size + 1), "phases": {}, **columns})
    run = RunStats(
        name="run", directory=Path("run"), job=job, plan={}, versions={}, launches=[launch()],
        steps=steps, validations=[], checkpoints=[], migrations=[], ranks=[], loads=None,
        balance=None, prediction=None, ended="finished", read_at_s=0.0,
    )  # fmt: skip
    return replace(run, **values)


def launch(step: int = 0, device: str = "cpu") -> Launch:
    return Launch(0.0, 1.0, step, None, 1, device, 1.0, 1.0, 1.0)


def uneven(recent: list[list[float]], tokens: float = 1000.0, **job: Any) -> RunStats:
    """Return a run with these loads over the even share."""
    counts = np.array(recent) * tokens
    every, steps = np.repeat(counts[None], 8, axis=0), np.arange(1, 9)
    layers, imbalance = np.arange(len(recent)), over_mean(every).max(-1)
    loads = Loads(steps, layers, steps, steps, every, counts, imbalance)
    return make_run(loads=loads, job={**JOB, **job})


def text(finding: Finding | None) -> str:
    assert finding is not None
    return f"{finding.title}. {finding.text}"


def severity(finding: Finding | None) -> str:
    assert finding is not None
    return finding.severity


def compared(step_s: float, **phases_s: float) -> Prediction:
    predicted = Predictions(
        cluster="here", step_s=1.0, phases_s={"forward": 0.4, "backward": 0.6}, blocks_s={},
        tokens_per_s=10.0, used_bytes_by_kind={"peak": 100},
    )  # fmt: skip
    measured = Measurements(
        steps=5, step_s=step_s, phases_s=phases_s, tokens_per_s=10 / step_s, peak_bytes=None,
        memory="resident",
    )  # fmt: skip
    return Prediction(predicted, measured)


def test_a_step_far_from_its_prediction() -> None:
    for near in (None, compared(1.19), compared(0.81)):
        assert speed.prediction(near) is None
    slow = text(speed.prediction(compared(2.0, forward=0.5, backward=1.4, log=0.1)))
    assert slow.startswith(
        "A step took 2.00x the predicted time. Measured 2.00 s, predicted 1.00 s "
    )
    assert "The largest error is in 'backward': measured 1.40 s, predicted 600 ms." in slow
    fast = text(speed.prediction(compared(0.5, forward=0.3, backward=0.1)))
    assert "took 0.500x" in fast
    assert "The largest error is in 'backward': measured 100 ms, predicted 600 ms." in fast


def test_even_load_has_no_dead_and_no_hot_experts() -> None:
    even = uneven([[1, 1.2, 0.8, 1], [1, 1, 1.9, 0.1]])
    few_tokens = uneven([[0, 2, 0, 6]], tokens=2)
    for run in (make_run(), even, few_tokens):
        assert experts.dead(run) is None
        assert experts.hot(run) is None


@pytest.mark.parametrize(
    ("share", "num_dead", "num_hot"), [(0.051, 0, 0), (0.049, 1, 0), (2.02, 0, 1), (1.99, 0, 0)]
)
def test_thresholds_of_dead_and_hot(share: float, num_dead: int, num_hot: int) -> None:
    loads = uneven([[share, *[(4 - share) / 3] * 3]]).loads
    assert loads is not None
    assert (len(loads.dead), len(loads.hot)) == (num_dead, num_hot)


def test_dead_experts_are_named_with_a_remedy() -> None:
    one = text(experts.dead(uneven([[1, 1, 1, 1], [1, 0.04, 1.5, 1]])))
    assert "Expert 1 of layer 1 is dead" in one
    assert "of an even share in steps 7 to 8" in one
    assert "raise routing.balance_loss (now 0.01)" in one
    many = text(experts.dead(uneven([[0, 2, 0, 2], [1, 1, 1, 1], [2, 0, 1, 1]])))
    assert "3 experts are dead" in many
    assert "layer 0: 0 and 2; layer 2: 1" in many
    unset = text(experts.dead(uneven([[1, 0.04, 1.5, 1]], routing={"balance_loss": 0.0})))
    assert "set routing.balance_loss = 0.01." in unset
    biased = {"model": {"family": "deepseek_v3"}, "routing": {"bias_update_rate": 0.001}}
    assert "raise routing.bias_update_rate (now 0.001)" in text(
        experts.dead(uneven([[1, 0.04, 1.5, 1]], **biased))
    )


@pytest.mark.parametrize("policy", [None, "none", "quota"])
def test_hot_expert_is_named_with_its_effect(policy: str | None) -> None:
    recent = [[1.0] * 8, [0.5, 0.5, 0.5, 0.5, 0.5, 4.5, 0.5, 0.5]]
    hot = text(experts.hot(uneven(recent, balance={"policy": policy})))
    assert "Expert 5 of layer 1 is hot" in hot
    assert "4.50x" in hot
    assert ("computes longest and the others wait" in hot) == (policy != "quota")
    assert ("Replicas (balance.policy) relieve" in hot) == (policy == "quota")
    assert "routing.capacity_factor" in hot


def test_drops() -> None:
    tokens, none = np.full(40, 1000.0), np.zeros(40)
    assert experts.drops(make_run(40, tokens=tokens, dropped=none)) is None
    assert experts.drops(make_run(40)) is None
    many = experts.drops(make_run(40, tokens=tokens, dropped=none + 200))
    assert "Assignments were dropped: 5.0%" in text(many)
    assert severity(many) == "warning"
    early = np.where(np.arange(40) < 10, 200.0, 0.0)
    assert severity(experts.drops(make_run(40, tokens=tokens, dropped=early))) == "note"
    sparse = {"model": {"top_k": 1, "layers": 4, "dense_layers": 2}}
    run = make_run(40, sparse, tokens=tokens, dropped=none + 200)
    assert "Assignments were dropped: 10%" in text(experts.drops(run))


def test_replay_mismatches() -> None:
    assert experts.replay_mismatches(make_run(5).steps) is None
    mismatches = np.array([0, 0, 3.0, 0, 4.0])
    finding = experts.replay_mismatches(make_run(5, num_replay_mismatches=mismatches).steps)
    assert "7 times in 2 steps, first at step 3" in text(finding)


def noisy_loss(size: int = 400) -> np.ndarray[Any, Any]:
    random = np.random.default_rng(1)
    return 1.5 + 4 * np.exp(-np.arange(size) / 60) + 0.08 * random.normal(size=size)


def test_noise_is_no_spike() -> None:
    assert learning.spikes(make_run(400, loss=noisy_loss())) is None
    assert learning.spikes(make_run(5, loss=np.arange(5.0))) is None
    long = 1.4 + 0.07 * np.random.default_rng(0).normal(size=50_000)
    assert learning.spikes(make_run(50_000, loss=long)) is None


def test_spike_is_named_once_with_its_gradient() -> None:
    loss = noisy_loss()
    loss[200:203] += [1.0, 2.5, 1.2]
    norms = np.full(400, 0.7)
    norms[201] = 14.0
    spike = text(learning.spikes(make_run(400, loss=loss, grad_norm=norms)))
    assert "The loss spiked at step 202." in spike
    assert "14.0 (median 0.700)" in spike
    assert "optimizer.lr (now 0.003)" in spike


def test_loss_that_is_no_number() -> None:
    loss = noisy_loss(20)
    assert learning.not_a_number(make_run(20, loss=loss).steps) is None
    loss[12:] = np.nan
    finding = learning.not_a_number(make_run(20, loss=loss).steps)
    assert "diverged (NaN or infinite) at step 13. 8 of 20 steps" in text(finding)
    assert severity(finding) == "problem"


def test_skipped_steps() -> None:
    loss, skips, scales = np.full(40, 2.0), np.zeros(40), np.full(40, 1024.0)
    assert learning.skipped(make_run(40, loss=loss).steps) is None
    assert learning.skipped(make_run(40, skipped=skips, loss_scale=scales).steps) is None
    skips[2], loss[2] = 1.0, np.nan
    few = make_run(40, loss=loss, skipped=skips, loss_scale=scales).steps
    finding = learning.skipped(few)
    assert "1 step of 40 skipped for fp16 overflow. The last was step 3" in text(finding)
    assert "it is now 1024" in text(finding)
    assert severity(finding) == "note"
    assert learning.not_a_number(few) is None
    skips[30:33] = 1.0
    finding = learning.skipped(make_run(40, skipped=skips, loss_scale=scales).steps)
    assert "4 steps of 40 skipped" in text(finding)
    assert 'train.precision = "bf16" or "fp32"' in text(finding)
    assert severity(finding) == "warning"


def validations(losses: list[float]) -> list[Validation]:
    return [Validation(10 * (at + 1), loss) for at, loss in enumerate(losses)]


@pytest.mark.parametrize(
    "losses",
    [
        [],
        [2.0, 1.9],
        [3.0, 2.5, 2.2, 2.0, 1.9, 1.85, 1.83],
        [3.0, 2.5, 2.0, 1.9, 2.0, 1.92, 2.01, 1.91, 1.98],
        [3.0, 2.5, 2.0, 1.9, 1.8, 2.6],
    ],
)
def test_falling_or_noisy_validation_is_no_overfitting(losses: list[float]) -> None:
    assert learning.overfitting(validations(losses)) is None


def test_overfitting_names_the_best_step() -> None:
    losses = [3.0, 2.4, 2.0, 1.9, 2.0, 2.1, 2.2, 2.3, 2.4]
    assert "Overfitting since step 40" in text(learning.overfitting(validations(losses)))


def test_failed_saves() -> None:
    done = Checkpoint(10, "a", "done")
    assert learning.failed_saves([done]) is None
    failed = Checkpoint(20, "b", "failed", error="No space left on device")
    finding = text(learning.failed_saves([done, failed]))
    assert "1 checkpoint failed to write (step 20)" in finding
    assert "No space left on device" in finding


def test_slow_steps_are_traced_to_their_phase() -> None:
    seconds, data = np.full(100, 0.2), np.full(100, 0.01)
    seconds[0] = 9.0
    assert speed.slow_steps(make_run(100, step_s=seconds, phases={"data": data})) is None
    seconds[[30, 60]] += 1.0
    data[[30, 60]] += 1.0
    slow = make_run(100, step_s=seconds, phases={"data": data, "forward": np.full(100, 0.1)})
    finding = text(speed.slow_steps(slow))
    assert "2 steps took over 2x the median" in finding
    assert "Most of the excess is in 'data'" in finding
    assert "steps 31 and 61" in finding
    saves = [Checkpoint(30, "a", "done"), Checkpoint(60, "b", "done")]
    assert "raise checkpoint.every" in text(speed.slow_steps(replace(slow, checkpoints=saves)))
    passes = [Validation(31, 1.0), Validation(61, 1.0)]
    assert "train.validate_every" in text(speed.slow_steps(replace(slow, validations=passes)))


def test_first_step_of_every_launch_may_be_slow() -> None:
    seconds = np.full(50, 0.2)
    seconds[[0, 20]] = 5.0
    run = make_run(50, step_s=seconds)
    assert speed.slow_steps(replace(run, launches=[launch(), launch(20)])) is None
    assert speed.slow_steps(run) is not None


def test_slowest_phase() -> None:
    assert speed.slowest_phase(make_run(4)) is None
    phases = {"data": np.full(4, 0.3), "forward": np.full(4, 0.1)}
    phases["forward"][0] = 9.0  # The first step is warmup.
    finding = speed.slowest_phase(make_run(4, phases=phases, tokens_per_s=np.full(4, 10.0)))
    assert "'data' is the slowest phase: 75% of a step" in text(finding)
    assert severity(finding) == "warning"
    assert "'other'" in text(speed.slowest_phase(make_run(4, phases={"other": np.ones(4)})))


@pytest.mark.parametrize(
    ("device", "settings", "tip"),
    [
        ("cpu (2 cores)", {}, None),
        ("H100", {"precision": "fp32"}, '"bf16" if the device'),
        ("H100", {"precision": "bf16", "recompute": True}, "turn off train.recompute"),
        ("H100", {"precision": "bf16", "micro_batches": 4}, "larger micro-batches"),
    ],
)
def test_tips_fit_the_settings(device: str, settings: dict[str, Any], tip: str | None) -> None:
    phases = {"backward": np.ones(4)}
    job = {"train": settings}
    run = make_run(4, job, phases=phases, launches=[launch(device=device)])
    finding = text(speed.slowest_phase(run))
    for words in ('"bf16" if the device', "turn off train.recompute", "larger micro-batches"):
        assert (words in finding) == (words == tip)


def test_healthy_run_has_nothing_but_notes(tmp_path: Path) -> None:
    found = find(RunStats.read(fabricate(tmp_path / "run", steps=60)))
    assert [finding.kind for finding in found] == ["slowest_phase"]


def test_findings_are_ordered_by_severity(tmp_path: Path) -> None:
    directory = fabricate(
        tmp_path / "run", steps=80, killed_at=70, dead={1: 3}, hot={0: 5}, spike_at=44,
        slow_at=(31, 52), dropped=300, flips=2,
    )  # fmt: skip
    found = find(RunStats.read(directory))
    kinds = [finding.kind for finding in found]
    assert kinds[0] == "stopped"
    assert set(kinds) == {
        "stopped", "dead_experts", "hot_experts", "drops", "replay_mismatches", "loss_spikes",
        "slow_steps", "slowest_phase",
    }  # fmt: skip
    assert "newest checkpoint, step 60; it repeats 10 steps" in found[0].text


def test_stopped_run_without_checkpoint_says_that_work_is_lost(tmp_path: Path) -> None:
    run = RunStats.read(fabricate(tmp_path / "run", steps=30, killed_at=12))
    assert "No checkpoint was committed" in text(learning.stopped(run))
    cut = replace(run, ended="ended by SIGTERM", read_at_s=run.last_event_s)
    assert "The run was ended by SIGTERM. No checkpoint" in text(learning.stopped(cut))
    assert learning.stopped(replace(run, read_at_s=run.last_event_s)) is None
    assert learning.stopped(replace(run, ended="finished")) is None


def judged(place: Path, **story: Any) -> Finding:
    """Return the finding on replicas of a run of four steps and three layers."""
    finding = balance.replicas(RunStats.read(fabricate(place, steps=4, balanced=True, **story)))
    assert finding is not None
    return finding


def test_replicas_that_paid(tmp_path: Path) -> None:
    """Three layers save 33 ms before waiting; waiting takes 2.25 ms on average."""
    paid = judged(tmp_path / "run")
    assert (paid.kind, paid.severity) == ("replicas_paid", "note")
    assert text(paid).startswith(
        "Replicas paid: expert layers take a predicted 0.667 of the time without them. 6.00 "
        "replicas a step. In the least even layer the busiest rank had 1.90 times the mean "
        "without replicas and 1.10 with them. Predicted: 60.0 ms a step with replicas, 90.0 ms "
        "without. Sending and waiting for replicas took 2.25 ms of "
    )
    assert text(paid).endswith(", planning 1.00 ms.")


def test_replicas_with_long_waits(tmp_path: Path) -> None:
    """Each layer saves 11 ms before waiting, and takes a third of a millisecond to plan."""
    short = {"replica_wait_s": 10.6e-3, "gradient_wait_s": 0.0}
    assert judged(tmp_path / "short", balance=short).kind == "replicas_paid"
    waits = {"replica_wait_s": 6.1e-3, "gradient_wait_s": 7e-3}
    late = judged(tmp_path / "late", balance=waits)
    assert (late.kind, late.severity) == ("replicas_did_not_pay", "warning")
    assert late.title == (
        "Replicas may not have paid: sending, waiting and planning cost 40.3 ms a step, the "
        "predicted saving is 33.0 ms"
    )
    assert 'Set balance.policy = "none", or plan with the result of' in late.text


def test_planning_counts_where_waiting_is_not_measured(tmp_path: Path) -> None:
    """Three layers save a predicted 30 ms, waiting included."""
    unknown = dict.fromkeys(("replica_wait_s", "gradient_wait_s"), float("nan"))
    fast = judged(tmp_path / "fast", balance={**unknown, "planning_s": 9.9e-3})
    assert fast.kind == "replicas_paid"
    assert "Waiting for replicas is not measured on this device" in fast.text
    slow = judged(tmp_path / "slow", balance={**unknown, "planning_s": 11e-3})
    assert slow.title.endswith(": planning cost 33.0 ms a step, the predicted saving is 30.0 ms")


def test_replicas_that_cost_more_than_they_save(tmp_path: Path) -> None:
    for policy, advice in (("eplb", '"none", or "quota" to skip replicas'), ("quota", '"none".')):
        settings = {"policy": policy}
        cost = judged(tmp_path / policy, balance={"predicted_s": 3.3e-2}, settings=settings)
        assert "did not pay: expert layers take a predicted 1.10 of the time" in text(cost)
        assert f"Set balance.policy = {advice}" in text(cost)


@pytest.mark.parametrize(
    ("ratio", "off"), [(2.495, False), (2.505, True), (1 / 2.495, False), (1 / 2.505, True)]
)
def test_threshold_of_prices_is_two_and_a_half_times(
    ratio: float, off: bool, tmp_path: Path
) -> None:
    """Each of three layers takes 13 ms."""
    finding = judged(tmp_path / "run", balance={"predicted_experts_s": 13e-3 / ratio})
    assert (finding.kind == "replicas_unknown") == off


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ({}, "Set balance.prices, or plan with the result of `moesaic probe`"),
        ({"prices": {"latency_s": 0.0}}, "Remove balance.prices, or correct it with `moesaic"),
    ],
)
def test_wrong_prices_allow_no_verdict(
    settings: dict[str, Any], remedy: str, tmp_path: Path
) -> None:
    wrong = {"predicted_experts_s": 3.3e-2}
    finding = judged(tmp_path / "off", balance=wrong, settings=settings)
    assert (finding.kind, finding.severity) == ("replicas_unknown", "warning")
    assert finding.title == (
        "Balance prices do not match this machine: experts took 39.0 ms a step on rank 0, "
        "predicted 99.0 ms"
    )
    assert remedy in finding.text


def test_layers_predicted_to_exceed_the_step_show_wrong_prices(tmp_path: Path) -> None:
    """No clock is needed: a step of 0.4 s cannot hold three layers of 0.2 s."""
    names = "replica_wait_s", "gradient_wait_s", "forward_s", "backward_s"
    unknown = dict.fromkeys(names, float("nan"))
    long = {**unknown, "predicted_s": 0.2, "predicted_unbalanced_s": 0.3}
    finding = judged(tmp_path / "run", balance=long, step_s=0.4)
    assert "expert layers were predicted to take 600 ms a step, and whole" in finding.title
    assert judged(tmp_path / "slow", balance=long, step_s=0.7).kind == "replicas_paid"


def test_first_steps_do_not_judge_prices(tmp_path: Path) -> None:
    """A median over too few steps would contain the slow first one."""
    run = RunStats.read(fabricate(tmp_path / "run", steps=4, balanced=True))
    few = RunStats.read(fabricate(tmp_path / "few", steps=2, balanced=True))
    for one, slow_steps, kind in (
        (run, 1, "replicas_paid"), (run, 4, "replicas_unknown"), (few, 2, "replicas_paid"),
    ):  # fmt: skip
        assert one.balance is not None
        one.balance.by_step["forward_s"][:slow_steps] = 1.0
        finding = balance.replicas(one)
        assert finding is not None
        assert finding.kind == kind


def test_runs_without_replicas_or_records(tmp_path: Path) -> None:
    none = judged(tmp_path / "none", balance={"replicas": 0})
    assert text(none).startswith(
        "No replicas were made. In the least even layer the busiest rank had 1.90 times the mean. "
        "None would pay by balance.prices"
    )
    even = judged(tmp_path / "even", balance={"replicas": 0}, busiest=1.04)
    assert text(even) == (
        "Loads were even: no replicas were needed. In the least even layer the busiest rank had "
        "1.04 times the mean."
    )
    seldom = judged(tmp_path / "seldom", loads_every=9)
    assert seldom.kind == "replicas_unknown"
    assert "Lower log.loads_every" in seldom.text
    assert balance.replicas(make_run(4)) is None
