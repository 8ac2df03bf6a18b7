"""Findings: each fires on what it is for, and not on a healthy run."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fabricated import fabricate

from moesaic.facts.plan import Measurements, Predictions
from moesaic.report import RunFacts
from moesaic.report.findings import balance, experts, find, learning, prediction, speed
from moesaic.report.findings.finding import Finding
from moesaic.report.loads import Loads, over_mean
from moesaic.report.log import Checkpoint, Part, Steps, Validation
from moesaic.report.prediction import Prediction

JOB = {
    "routing": {"balance_loss": 0.01, "capacity_factor": None},
    "layout": {"ep": 2},
    "model": {"experts": 8, "top_k": 2, "layers": 2},
    "optimizer": {"lr": 0.003},
    "train": {"clip": 1.0},
}


def setting(key: str) -> Any:
    section, name = key.split(".")
    return JOB.get(section, {}).get(name)


def loads(recent: list[list[float]], tokens: float = 1000.0, steps: int = 8) -> Loads:
    counts = np.array(recent) * tokens
    every = np.repeat(counts[None], steps, axis=0)
    numbers = np.arange(1, steps + 1)
    return Loads(
        numbers, np.arange(len(recent)), numbers, numbers, every, counts, over_mean(every).max(-1)
    )


def make_steps(size: int, **columns: Any) -> Steps:
    values = {field.name: np.full(size, np.nan) for field in fields(Steps)}
    values["step"] = np.arange(1.0, size + 1)
    return Steps(**{**values, "phases": {}, **columns})


def part(step: int = 0) -> Part:
    return Part(0.0, 1.0, step, None, 1, "cpu", 1.0, 1.0, 1.0)


def text(finding: Finding | None) -> str:
    assert finding is not None
    return f"{finding.title}. {finding.text}"


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
    assert prediction.off(None) is None
    assert prediction.off(compared(1.19)) is None
    assert prediction.off(compared(0.81)) is None
    said = text(prediction.off(compared(2.0, forward=0.5, backward=1.4, log=0.1)))
    assert said.startswith(
        "A step took 2.00x the predicted time. Measured 2.00 s, predicted 1.00 s "
    )
    assert "The largest error is in 'backward': measured 1.40 s, predicted 600 ms." in said
    fast = text(prediction.off(compared(0.5, forward=0.3, backward=0.1)))
    assert "took 0.500x" in fast
    assert "The largest error is in 'backward': measured 100 ms, predicted 600 ms." in fast


def test_even_load_has_no_dead_and_no_hot_experts() -> None:
    even = loads([[1, 1.2, 0.8, 1], [1, 1, 1.9, 0.1]])
    assert experts.dead(even, setting) is None
    assert experts.hot(even, setting) is None
    assert experts.dead(None, setting) is None
    assert experts.hot(None, setting) is None


def test_one_dead_expert_is_named_with_its_remedy() -> None:
    said = text(experts.dead(loads([[1, 1, 1, 1], [1, 0.04, 1.5, 1]]), setting))
    assert "Expert 1 of layer 1 is dead" in said
    assert "4.5% of an even share in steps 7 to 8" in said
    assert "routing.balance_loss (now 0.01)" in said


def test_a_loss_that_is_not_there_is_set_and_not_raised() -> None:
    said = text(experts.dead(loads([[1, 0.04, 1.5, 1]]), {"routing.balance_loss": 0.0}.get))
    assert "set routing.balance_loss = 0.01." in said


@pytest.mark.parametrize(("policy", "waits"), [(None, True), ("none", True), ("quota", False)])
def test_replicas_of_hot_experts_are_named(policy: str | None, waits: bool) -> None:
    said = text(experts.hot(loads([[3, 0.5, 0.25, 0.25]]), {"balance.policy": policy}.get))
    assert ("computes longest and the others wait" in said) == waits
    assert ("Replicas (balance.policy) relieve" in said) == (not waits)


def test_biased_routers_are_balanced_by_their_step() -> None:
    given = {"model.family": "deepseek_v3", "routing.bias_update_rate": 0.001}
    said = text(experts.dead(loads([[1, 0.04, 1.5, 1]]), given.get))
    assert "raise routing.bias_update_rate (now 0.001)" in said


def test_dense_layers_drop_nothing() -> None:
    given = {"model.top_k": 1, "model.layers": 4, "model.dense_layers": 2}
    steps = make_steps(40, tokens=np.full(40, 1000.0), dropped=np.zeros(40) + 200)
    assert "10% of assignments were dropped" in text(experts.drops(steps, given.get))


def test_threshold_of_dead_is_five_percent_of_the_even_share() -> None:
    assert experts.dead_experts(loads([[0.051, 1, 1, 1.949]])) == []
    assert len(experts.dead_experts(loads([[0.049, 1, 1, 1.951]]))) == 1


def test_threshold_of_hot_is_twice_the_even_share() -> None:
    assert experts.hot_experts(loads([[1.99, 0.67, 0.67, 0.67]])) == []
    assert len(experts.hot_experts(loads([[2.02, 0.66, 0.66, 0.66]]))) == 1


def test_many_dead_experts_are_listed_by_layer() -> None:
    said = text(experts.dead(loads([[0, 2, 0, 2], [1, 1, 1, 1], [2, 0, 1, 1]]), setting))
    assert "3 experts are dead" in said
    assert "layer 0: 0 and 2; layer 2: 1" in said


def test_hot_expert_is_named_with_its_rank() -> None:
    said = text(experts.hot(loads([[1] * 8, [0.5, 0.5, 0.5, 0.5, 0.5, 4.5, 0.5, 0.5]]), setting))
    assert "Expert 5 of layer 1 is hot" in said
    assert "4.50x" in said
    assert "rank 1 of its expert-parallel group" in said
    uneven = loads([[1] * 8, [0.5, 0.5, 0.5, 0.5, 0.5, 4.5, 0.5, 0.5]])
    elsewhere, in_turn = [[0, 1, 2, 5], [3, 4, 6, 7]], [[0, 1, 2, 3], [4, 5, 6, 7]]
    said = text(experts.hot(uneven, setting, {"expert_placement": elsewhere}))
    assert "rank 0 of its expert-parallel group" in said
    layers = {"expert_placement": elsewhere, "expert_placement_by_layer": {"1": in_turn}}
    assert "rank 1 of its expert-parallel group" in text(experts.hot(uneven, setting, layers))

    def moving(key: str) -> object:
        return 100 if key == "balance.migrate_every" else setting(key)

    assert "group" not in text(experts.hot(uneven, moving, layers))
    assert "routing.capacity_factor" in said


def test_too_few_tokens_say_nothing_of_experts() -> None:
    few = loads([[0, 2, 0, 6]], tokens=2)
    assert experts.dead_experts(few) == []
    assert experts.hot_experts(few) == []


def test_drops() -> None:
    tokens, none = np.full(40, 1000.0), np.zeros(40)
    assert experts.drops(make_steps(40, tokens=tokens, dropped=none), setting) is None
    assert experts.drops(make_steps(40), setting) is None
    finding = experts.drops(make_steps(40, tokens=tokens, dropped=none + 200), setting)
    assert "5.0% of assignments were dropped" in text(finding)
    assert finding is not None
    assert finding.severity == "warning"
    early = np.where(np.arange(40) < 10, 200.0, 0.0)
    healed = experts.drops(make_steps(40, tokens=tokens, dropped=early), setting)
    assert healed is not None
    assert healed.severity == "note"


def test_flips() -> None:
    assert experts.flips(make_steps(5, num_replay_mismatches=np.zeros(5))) is None
    mismatches = np.array([0, 0, 3.0, 0, 4.0])
    said = text(experts.flips(make_steps(5, num_replay_mismatches=mismatches)))
    assert "7 times in 2 steps, first at step 3" in said


def noisy_loss(size: int = 400) -> np.ndarray[Any, Any]:
    random = np.random.default_rng(1)
    return 1.5 + 4 * np.exp(-np.arange(size) / 60) + 0.08 * random.normal(size=size)


def test_noise_is_no_spike() -> None:
    assert learning.spikes(make_steps(400, loss=noisy_loss()), setting) is None
    assert learning.spikes(make_steps(5, loss=np.arange(5.0)), setting) is None
    long = 1.4 + 0.07 * np.random.default_rng(0).normal(size=50_000)
    assert learning.spikes(make_steps(50_000, loss=long), setting) is None


def test_spike_is_named_once_with_its_gradient() -> None:
    loss = noisy_loss()
    loss[200:203] += [1.0, 2.5, 1.2]
    norms = np.full(400, 0.7)
    norms[201] = 14.0
    said = text(learning.spikes(make_steps(400, loss=loss, grad_norm=norms), setting))
    assert "The loss spiked at step 202." in said
    assert "14.0 (median 0.700)" in said
    assert "optimizer.lr (now 0.003)" in said


def test_loss_that_is_no_number() -> None:
    loss = noisy_loss(20)
    assert learning.not_a_number(make_steps(20, loss=loss)) is None
    loss[12:] = np.nan
    finding = learning.not_a_number(make_steps(20, loss=loss))
    assert "diverged (NaN or infinite) at step 13" in text(finding)
    assert "8 of 20 steps" in text(finding)
    assert finding is not None
    assert finding.severity == "problem"


def test_skipped_steps() -> None:
    loss, skips, scales = np.full(40, 2.0), np.zeros(40), np.full(40, 1024.0)
    assert learning.skipped(make_steps(40, loss=loss)) is None
    assert learning.skipped(make_steps(40, loss=loss, skipped=skips, loss_scale=scales)) is None
    skips[2], loss[2] = 1.0, np.nan
    few = make_steps(40, loss=loss, skipped=skips, loss_scale=scales)
    finding = learning.skipped(few)
    assert "1 step of 40 skipped" in text(finding)
    assert "The last was step 3" in text(finding)
    assert "it is now 1024" in text(finding)
    assert finding is not None
    assert finding.severity == "note"
    assert learning.not_a_number(few) is None
    skips[30:33] = 1.0
    finding = learning.skipped(make_steps(40, skipped=skips, loss_scale=scales))
    assert "4 steps of 40 skipped" in text(finding)
    assert 'train.precision = "bf16" or "fp32"' in text(finding)
    assert finding is not None
    assert finding.severity == "warning"


def validations(losses: list[float]) -> list[Validation]:
    return [Validation(10 * (at + 1), loss, 1.0, 1.0) for at, loss in enumerate(losses)]


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
    said = text(learning.overfitting(validations([3.0, 2.4, 2.0, 1.9, 2.0, 2.1, 2.2, 2.3, 2.4])))
    assert "Overfitting since step 40" in said


def test_failed_saves() -> None:
    done = Checkpoint(10, "a", "done", 0.1)
    assert learning.failed_saves([done]) is None
    failed = Checkpoint(20, "b", "failed", 0.1, error="No space left on device")
    said = text(learning.failed_saves([done, failed]))
    assert "1 checkpoint failed to write (step 20)" in said
    assert "No space left on device" in said


def test_slow_steps_are_laid_to_their_phase() -> None:
    seconds, data = np.full(100, 0.2), np.full(100, 0.01)
    seconds[0] = 9.0
    steady = make_steps(100, step_s=seconds, phases={"data": data})
    assert speed.slow_steps(steady, [part()], [], []) is None
    seconds, data = seconds.copy(), data.copy()
    seconds[[30, 60]] += 1.0
    data[[30, 60]] += 1.0
    slow = make_steps(100, step_s=seconds, phases={"data": data, "forward": np.full(100, 0.1)})
    said = text(speed.slow_steps(slow, [part()], [], []))
    assert "2 steps took over 2x the median" in said
    assert "Most of the excess is in 'data'" in said
    assert "steps 31 and 61" in said
    saves = [Checkpoint(30, "a", "done", 0.1), Checkpoint(60, "b", "done", 0.1)]
    assert "raise checkpoint.every" in text(speed.slow_steps(slow, [part()], saves, []))
    passes = [Validation(31, 1.0, 1.0, 1.0), Validation(61, 1.0, 1.0, 1.0)]
    assert "train.validate_every" in text(speed.slow_steps(slow, [part()], [], passes))


def test_first_step_of_every_part_may_be_slow() -> None:
    seconds = np.full(50, 0.2)
    seconds[[0, 20]] = 5.0
    steps = make_steps(50, step_s=seconds)
    assert speed.slow_steps(steps, [part(), part(20)], [], []) is None
    assert speed.slow_steps(steps, [part()], [], []) is not None


def test_slowest_phase() -> None:
    assert speed.slowest_phase(make_steps(4)) is None
    phases = {"data": np.full(4, 0.3), "forward": np.full(4, 0.1)}
    finding = speed.slowest_phase(make_steps(4, phases=phases, tokens_per_s=np.full(4, 10.0)))
    assert "'data' is the slowest phase: 75% of a step" in text(finding)
    assert finding is not None
    assert finding.severity == "warning"
    phases["forward"][0] = 9.0  # The first step pays for warming up.
    finding = speed.slowest_phase(make_steps(4, phases=phases, tokens_per_s=np.full(4, 10.0)))
    assert "'data' is the slowest phase: 75% of a step" in text(finding)
    other = speed.slowest_phase(make_steps(4, phases={"my phase": np.ones(4)}))
    assert "'my phase'" in text(other)


@pytest.mark.parametrize(
    ("device", "settings", "words"),
    [
        ("cpu (2 cores)", {}, []),
        ("cpu (2 cores)", {"train.precision": "bf16"}, ["Few CPUs"]),
        ("H100", {"train.precision": "fp32"}, ['"bf16" if the device']),
        (
            "H100",
            {"train.precision": "bf16", "train.recompute": True},
            ["turn off train.recompute"],
        ),
        ("H100", {"train.precision": "bf16", "train.micro_batches": 4}, ["larger micro-batches"]),
    ],
)
def test_tips_fit_the_settings(device: str, settings: dict[str, Any], words: list[str]) -> None:
    steps = make_steps(4, phases={"backward": np.ones(4)})
    told = text(speed.slowest_phase(steps, device, settings.get))
    for tip in (
        "Few CPUs",
        '"bf16" if the device',
        "turn off train.recompute",
        "larger micro-batches",
    ):
        assert (tip in told) == (tip in words)


def test_healthy_run_has_nothing_but_notes(tmp_path: Path) -> None:
    found = find(RunFacts.read(fabricate(tmp_path / "run", steps=60)))
    assert [finding.kind for finding in found] == ["slowest_phase"]


def test_troubled_run_has_it_all_gravest_first(tmp_path: Path) -> None:
    directory = fabricate(
        tmp_path / "run", steps=80, killed_at=70, dead={1: 3}, hot={0: 5}, spike_at=44,
        slow_at=(31, 52), dropped=300, flips=2,
    )  # fmt: skip
    found = find(RunFacts.read(directory))
    kinds = [finding.kind for finding in found]
    assert kinds[0] == "stopped"
    assert set(kinds) == {
        "stopped", "dead_experts", "hot_experts", "drops", "flips", "loss_spikes", "slow_steps",
        "slowest_phase",
    }  # fmt: skip
    assert "newest checkpoint, step 60; it repeats 10 steps" in found[0].text


def test_stopped_run_without_checkpoint_says_that_work_is_lost(tmp_path: Path) -> None:
    run = RunFacts.read(fabricate(tmp_path / "run", steps=30, killed_at=12))
    assert "No checkpoint was committed" in text(learning.stopped(run))
    cut = replace(run, ended="ended by SIGTERM", read_at_s=run.last_event_s)
    assert "The run was ended by SIGTERM. No checkpoint" in text(learning.stopped(cut))
    assert learning.stopped(replace(run, read_at_s=run.last_event_s)) is None
    assert learning.stopped(replace(run, ended="finished")) is None


def judged(place: Path, **story: Any) -> tuple[Finding, list[Finding]]:
    """Return the verdict of a run of four steps and three layers, and all its findings."""
    run = RunFacts.read(fabricate(place, steps=4, balanced=True, **story))
    found = balance.verdict(run)
    assert found is not None
    return found, find(run)


def test_replicas_that_paid(tmp_path: Path) -> None:
    """Three layers save 33 ms before waiting; waiting takes 2.25 ms on average."""
    found, others = judged(tmp_path / "run")
    assert (found.kind, found.severity) == ("replicas_paid", "note")
    said = text(found)
    assert said.startswith(
        "Replicas paid: expert layers take a predicted 0.667 of the time without them. "
        "Predicted: 60.0 ms a step with replicas, 90.0 ms without. "
    )
    assert ", planning 1.00 ms. Mean of the layers: the busiest rank had 1.65 times" in said
    assert said.endswith("without replicas, 1.10 with them.")
    step_s = RunFacts.read(tmp_path / "run").steps.step_s.mean()
    (share,) = re.findall(r"took 2.25 ms on rank 0 \((.*?)% of a step\)", said)
    assert float(share) == pytest.approx(100 * 2.25e-3 / step_s, abs=0.06)
    assert found not in others


def test_replicas_with_long_waits(tmp_path: Path) -> None:
    """Each layer saves 11 ms before waiting, and takes a third of a millisecond to plan."""
    enough, _ = judged(
        tmp_path / "enough", balance={"replica_wait_s": 10.6e-3, "gradient_wait_s": 0.0}
    )
    assert enough.kind == "replicas_paid"
    waits = {"replica_wait_s": 6.1e-3, "gradient_wait_s": 7e-3}
    found, others = judged(tmp_path / "late", balance=waits)
    assert (found.kind, found.severity) == ("replicas_did_not_pay", "warning")
    assert found in others
    said = text(found)
    assert said.startswith(
        "Replicas may not have paid: sending, waiting and planning cost 40.3 ms a step, the "
        "predicted saving is 33.0 ms. Predicted: 60.0 ms a step"
    )
    assert 'Set balance.policy = "none", or measure prices: balance.measure_prices = true' in said
    measured, _ = judged(tmp_path / "measured", balance=waits, settings={"measure_prices": True})
    assert measured.text.endswith('Set balance.policy = "none".')


@pytest.mark.parametrize(
    ("settings", "overlapped"),
    [
        ({}, False), ({"policy": "quota"}, False), ({"policy": "eplb"}, True),
        ({"policy": "quota", "prefetch": True}, True),
    ],
)  # fmt: skip
def test_planning_counts(settings: dict[str, Any], overlapped: bool, tmp_path: Path) -> None:
    """Three layers save 33 ms before waiting; waiting takes 2.25 ms on average."""
    found, _ = judged(tmp_path / "fast", balance={"planning_s": 10.2e-3}, settings=settings)
    assert found.kind == "replicas_paid"
    assert ("partly overlapped with the dispatch" in found.text) == overlapped
    found, others = judged(tmp_path / "slow", balance={"planning_s": 12.02e-3}, settings=settings)
    assert found in others
    assert "planning cost 38.3 ms a step, the predicted saving is 33.0 ms" in found.title
    assert ", planning 36.1 ms" in found.text


def test_planning_counts_where_waiting_is_not_measured(tmp_path: Path) -> None:
    """Three layers save a predicted 30 ms, waiting included."""
    unknown = dict.fromkeys(("replica_wait_s", "gradient_wait_s"), float("nan"))
    found, _ = judged(tmp_path / "fast", balance={**unknown, "planning_s": 9.9e-3})
    assert found.kind == "replicas_paid"
    assert "Waiting for replicas is not measured on this device" in found.text
    found, _ = judged(tmp_path / "slow", balance={**unknown, "planning_s": 11e-3})
    assert found.title.endswith(": planning cost 33.0 ms a step, the predicted saving is 30.0 ms")


def test_times_that_hardly_differ_count_as_the_same(tmp_path: Path) -> None:
    found, _ = judged(
        tmp_path / "wait", balance={"replica_wait_s": 10.75e-3, "gradient_wait_s": 0.0}
    )
    assert found.title.endswith("planning cost 33.2 ms a step, about the predicted saving")
    found, _ = judged(tmp_path / "layer", balance={"predicted_s": 3.01e-2})
    assert found.title.endswith("expert layers take about the same time as without them")


def test_wrong_prices_allow_no_verdict(tmp_path: Path) -> None:
    found, others = judged(tmp_path / "off", balance={"predicted_experts_s": 3.3e-2})
    assert (found.kind, found.severity) == ("replicas_unknown", "note")
    assert found.title == (
        "Replicas have no verdict: balance prices do not match this machine (experts took 39.0 ms "
        "a step on rank 0, predicted 99.0 ms)"
    )
    assert "Predicted: 60.0 ms a step with replicas, 90.0 ms without. " in found.text
    assert {one.kind for one in others} >= {"prices_off"}
    assert not {one.kind for one in others} & {"replicas_did_not_pay", "replicas_paid"}


def test_layers_predicted_to_exceed_the_step_show_wrong_prices(tmp_path: Path) -> None:
    """No clock is needed: a step of 0.4 s cannot hold three layers of 0.2 s."""
    names = "replica_wait_s", "gradient_wait_s", "forward_s", "backward_s"
    unknown = dict.fromkeys(names, float("nan"))
    long = {**unknown, "predicted_s": 0.2, "predicted_unbalanced_s": 0.3}
    found, others = judged(tmp_path / "run", balance=long, step_s=0.4)
    assert "(expert layers were predicted to take 600 ms a step, and whole" in found.title
    assert [one.kind for one in others if one.severity == "warning"] == ["prices_off"]
    possible, _ = judged(tmp_path / "slow", balance=long, step_s=0.7)
    assert possible.kind == "replicas_paid"


def test_replicas_that_cost_more_than_they_save(tmp_path: Path) -> None:
    slower = {"predicted_s": 3.3e-2}
    found, others = judged(tmp_path / "run", balance=slower, settings={"policy": "eplb"})
    assert found in others
    assert "did not pay: expert layers take a predicted 1.10 of the time" in text(found)
    assert 'Set balance.policy = "none", or "quota"' in text(found)
    early, _ = judged(
        tmp_path / "early", balance=slower, settings={"policy": "quota", "prefetch": True}
    )
    assert early.text.endswith("or balance.prefetch = false to plan from the current counts.")
    exact, _ = judged(tmp_path / "exact", balance=slower, settings={"policy": "quota"})
    assert exact.text.endswith('Set balance.policy = "none".')


def test_prices_that_are_far_off(tmp_path: Path) -> None:
    """Each of three layers takes 13 ms."""
    near = {"predicted_experts_s": 5.3e-3}
    assert "prices_off" not in {one.kind for one in judged(tmp_path / "near", balance=near)[1]}
    for name, seconds, said in (("low", 5.1e-3, "15.3 ms"), ("high", 3.3e-2, "99.0 ms")):
        values = {"predicted_experts_s": seconds}
        _, others = judged(tmp_path / name, balance=values)
        (found,) = (one for one in others if one.kind == "prices_off")
        assert found.severity == "warning"
        assert found.title.endswith(f"experts took 39.0 ms a step on rank 0, predicted {said}")
        assert "Set balance.prices, or plan with the result of `moesaic probe`." in found.text
    given = {
        "prices": {
            "expert_tokens_per_s": 1e4,
            "bytes_per_s": 1e9,
            "latency_s": 0.0,
            "overlaps": True,
        }
    }
    _, others = judged(tmp_path / "given", balance=values, settings=given)
    (found,) = (one for one in others if one.kind == "prices_off")
    assert "Remove balance.prices, or correct it with the result of `moesaic" in found.text
    _, others = judged(tmp_path / "measured", balance=values, settings={"measure_prices": True})
    (found,) = (one for one in others if one.kind == "prices_off")
    assert "Remove balance.measure_prices, or set balance.prices" in found.text
    unknown = {**values, "forward_s": float("nan")}
    assert "prices_off" not in {one.kind for one in judged(tmp_path / "gpu", balance=unknown)[1]}


@pytest.mark.parametrize(
    ("ratio", "off"), [(2.495, False), (2.505, True), (1 / 2.495, False), (1 / 2.505, True)]
)
def test_threshold_of_prices_is_two_and_a_half_times(
    ratio: float, off: bool, tmp_path: Path
) -> None:
    _, others = judged(tmp_path / "run", balance={"predicted_experts_s": 13e-3 / ratio})
    assert ("prices_off" in {one.kind for one in others}) == off


def test_first_steps_do_not_judge_prices(tmp_path: Path) -> None:
    run = RunFacts.read(fabricate(tmp_path / "run", steps=4, balanced=True))
    assert run.balance is not None
    run.balance.sums["forward_s"][0] = 1.0
    assert balance.prices_off(run) is None
    run.balance.sums["forward_s"][:] = 1.0
    assert balance.prices_off(run) is not None
    few = RunFacts.read(fabricate(tmp_path / "few", steps=2, balanced=True))
    assert few.balance is not None
    few.balance.sums["forward_s"][:] = 1.0
    assert balance.prices_off(few) is None


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"policy": "quota", "min_replica_tokens": 100_000},
         "A replica needs at least 100,000 tokens (balance.min_replica_tokens); no rank had more "
         "than 1,120 in a layer and micro-batch. Lower it, or raise train.batch."),
        ({"policy": "quota", "min_replica_tokens": 1121}, "no rank had more than 1,120 in a layer"),
        ({"policy": "quota", "min_replica_tokens": 500},
         "No replica of at least 500 tokens (balance.min_replica_tokens) would pay."),
        ({"policy": "eplb", "min_replica_tokens": 100_000},
         "1.90 times the mean. Policy eplb requested none that are predicted to pay."),
        ({"policy": "quota", "min_replica_tokens": 64},
         "No replica would pay by the current balance.prices."),
        ({"max_replicas": 0}, "balance.max_replicas = 0 leaves no room for replicas; raise it."),
    ],
)  # fmt: skip
def test_reasons_for_no_replicas(settings: dict[str, Any], reason: str, tmp_path: Path) -> None:
    found, _ = judged(tmp_path / "run", balance={"replicas": 0}, settings=settings)
    assert text(found).startswith("No replicas were made. In the least even layer the busiest ra")
    assert reason in text(found)


def test_even_loads_need_no_replicas(tmp_path: Path) -> None:
    found, others = judged(tmp_path / "even", balance={"replicas": 0}, busiest=1.04)
    assert found not in others
    assert text(found) == (
        "Loads were even: no replicas were needed. In the least even layer the busiest rank had "
        "1.04 times the mean."
    )


def test_replicas_without_records_of_layers(tmp_path: Path) -> None:
    found, _ = judged(tmp_path / "seldom", loads_every=9)
    assert found.kind == "replicas_unknown"
    assert "6.00 replicas a step. In the least even layer the busiest rank had 1.90" in text(found)
    assert balance.verdict(RunFacts.read(fabricate(tmp_path / "none", steps=4))) is None
