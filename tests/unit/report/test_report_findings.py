"""Findings: each fires on what it is for, and not on a healthy run."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fabricated import fabricate

from moesaic.facts.plan import Measured, Predictions
from moesaic.report import RunFacts
from moesaic.report.findings import balance, experts, find, learning, prediction, speed
from moesaic.report.findings.finding import Finding
from moesaic.report.loads import Loads, over_mean
from moesaic.report.log import Checkpoint, Part, Steps, Validation
from moesaic.report.prediction import Prediction

JOB = {
    "routing": {"balance_loss": 0.01, "capacity": None},
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
        tokens_per_s=10.0, memory_bytes={"peak": 100},
    )  # fmt: skip
    measured = Measured(
        steps=5, step_s=step_s, phases_s=phases_s, tokens_per_s=10 / step_s, peak_bytes=None,
        memory="resident",
    )  # fmt: skip
    return Prediction(predicted, measured)


def test_a_step_far_from_its_prediction() -> None:
    assert prediction.off(None) is None
    assert prediction.off(compared(1.19)) is None
    assert prediction.off(compared(0.81)) is None
    said = text(prediction.off(compared(2.0, forward=0.5, backward=1.4, log=0.1)))
    assert said.startswith("A step took 2.00x the predicted time. 2.00 s where 1.00 s were ")
    assert "Most of it is in 'backward': 1.40 s for 600 ms." in said
    fast = text(prediction.off(compared(0.5, forward=0.3, backward=0.1)))
    assert "took 0.500x" in fast
    assert "Most of it is in 'backward': 100 ms for 600 ms." in fast


def test_even_load_has_no_dead_and_no_hot_experts() -> None:
    even = loads([[1, 1.2, 0.8, 1], [1, 1, 1.9, 0.1]])
    assert experts.dead(even, setting) is None
    assert experts.hot(even, setting) is None
    assert experts.dead(None, setting) is None
    assert experts.hot(None, setting) is None


def test_one_dead_expert_is_named_with_its_remedy() -> None:
    said = text(experts.dead(loads([[1, 1, 1, 1], [1, 0.04, 1.5, 1]]), setting))
    assert "Expert 1 of layer 1 is dead" in said
    assert "4.5% of an even share over steps 7 to 8" in said
    assert "routing.balance_loss (now 0.01)" in said


def test_a_loss_that_is_not_there_is_set_and_not_raised() -> None:
    said = text(experts.dead(loads([[1, 0.04, 1.5, 1]]), {"routing.balance_loss": 0.0}.get))
    assert "set routing.balance_loss, to a hundredth for a start." in said


@pytest.mark.parametrize(("policy", "waits"), [(None, True), ("none", True), ("quota", False)])
def test_copies_of_hot_experts_are_named(policy: str | None, waits: bool) -> None:
    said = text(experts.hot(loads([[3, 0.5, 0.25, 0.25]]), {"balance.policy": policy}.get))
    assert ("works longest while the others wait" in said) == waits
    assert ("copies on these (balance.policy)" in said) == (not waits)


def test_biased_routers_are_balanced_by_their_step() -> None:
    given = {"model.family": "deepseek_v3", "routing.bias_step": 0.001}
    said = text(experts.dead(loads([[1, 0.04, 1.5, 1]]), given.get))
    assert "raise routing.bias_step (now 0.001)" in said


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
    said = text(experts.hot(uneven, setting, {"homes": elsewhere}))
    assert "rank 0 of its expert-parallel group" in said
    layers = {"homes": elsewhere, "homes_of_layers": {"1": in_turn}}
    assert "rank 1 of its expert-parallel group" in text(experts.hot(uneven, setting, layers))

    def moving(key: str) -> object:
        return 100 if key == "balance.rehome_every" else setting(key)

    assert "group" not in text(experts.hot(uneven, moving, layers))
    assert "routing.capacity" in said


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
    assert experts.flips(make_steps(5, flips=np.zeros(5))) is None
    said = text(experts.flips(make_steps(5, flips=np.array([0, 0, 3.0, 0, 4.0]))))
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
    assert "The loss leapt at step 202." in said
    assert "14.0 (median 0.700)" in said
    assert "optimizer.lr (now 0.003)" in said


def test_loss_that_is_no_number() -> None:
    loss = noisy_loss(20)
    assert learning.not_a_number(make_steps(20, loss=loss)) is None
    loss[12:] = np.nan
    finding = learning.not_a_number(make_steps(20, loss=loss))
    assert "not a number at step 13" in text(finding)
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
    assert "now it is 1024" in text(finding)
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
    assert "1 checkpoint could not be written (step 20)" in said
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
        ("H100", {"train.precision": "fp32"}, ['"bf16" is faster']),
        ("H100", {"train.precision": "bf16", "train.recompute": True}, ["Without train.recompute"]),
        ("H100", {"train.precision": "bf16", "train.micro_batches": 4}, ["Larger micro-batches"]),
    ],
)
def test_tips_fit_the_settings(device: str, settings: dict[str, Any], words: list[str]) -> None:
    steps = make_steps(4, phases={"backward": np.ones(4)})
    told = text(speed.slowest_phase(steps, device, settings.get))
    for tip in ("Few CPUs", '"bf16" is faster', "Without train.recompute", "Larger micro-batches"):
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
    assert "checkpoint is of step 60; resuming from it repeats 10 steps" in found[0].text


def test_stopped_run_without_checkpoint_says_that_work_is_lost(tmp_path: Path) -> None:
    run = RunFacts.read(fabricate(tmp_path / "run", steps=30, killed_at=12))
    assert "No checkpoint was committed" in text(learning.stopped(run))
    cut = replace(run, ended="ended by SIGTERM", read_at_s=run.last_event_s)
    assert "It was ended by SIGTERM. No checkpoint" in text(learning.stopped(cut))
    assert learning.stopped(replace(run, read_at_s=run.last_event_s)) is None
    assert learning.stopped(replace(run, ended="finished")) is None


def judged(place: Path, **story: Any) -> tuple[Finding, list[Finding]]:
    """Of a run of four steps and three layers, and all findings."""
    run = RunFacts.read(fabricate(place, steps=4, balanced=True, **story))
    found = balance.verdict(run)
    assert found is not None
    return found, find(run)


def test_copies_that_paid(tmp_path: Path) -> None:
    """Three layers save 33 ms before anybody waits; in four steps 2.25 ms were waited, on average,
    for copies of all of them."""
    found, others = judged(tmp_path / "run")
    assert (found.kind, found.severity) == ("copies_paid", "note")
    said = text(found)
    assert (
        "Copies paid: expert layers are modelled to take 0.667 of what they would have at" in said
    )
    assert "60.0 ms for 90.0 ms a step, modelled; handing over and waiting for copies took" in said
    assert "; deciding on them took it 1.00 ms; the busiest rank had 1.65 times the mean" in said
    assert said.endswith("at home, and 1.10 with copies, in the mean of layers.")
    step_s = RunFacts.read(tmp_path / "run").steps.step_s.mean()
    (share,) = re.findall(r"2.25 ms, (.*?)% of a step, measured", said)
    assert float(share) == pytest.approx(100 * 2.25e-3 / step_s, abs=0.06)
    assert found not in others


def test_copies_that_were_waited_for_too_long(tmp_path: Path) -> None:
    """11 ms a layer are saved, what the model has for waiting not among them, and a third of one
    is decided."""
    enough, _ = judged(tmp_path / "enough", spread={"landing_s": 10.6e-3, "return_s": 0.0})
    assert enough.kind == "copies_paid"
    waits = {"landing_s": 6.1e-3, "return_s": 7e-3}
    found, others = judged(tmp_path / "late", spread=waits)
    assert (found.kind, found.severity) == ("copies_did_not_pay", "warning")
    assert found in others
    said = text(found)
    assert said.startswith(
        "Copies may not have paid: handing over, waiting and deciding took rank 0 40.3 ms a step, "
        "and they are modelled to save 33.0 ms without that. 60.0 ms for 90.0 ms"
    )
    assert 'Say balance.policy = "none", or have prices measured (balance.measure = true' in said
    measured, _ = judged(tmp_path / "measured", spread=waits, settings={"measure": True})
    assert measured.text.endswith('Say balance.policy = "none".')


@pytest.mark.parametrize(
    ("settings", "beside"),
    [
        ({}, ","), ({"policy": "quota"}, ","),
        ({"policy": "eplb"}, ", part of it while tokens travelled,"),
        ({"policy": "quota", "early": True}, ", part of it while tokens travelled,"),
    ],
)  # fmt: skip
def test_deciding_counts(settings: dict[str, Any], beside: str, tmp_path: Path) -> None:
    """Three layers save 33 ms, and are waited for 2.25 ms on average."""
    found, _ = judged(tmp_path / "soon", spread={"planning_s": 10.2e-3}, settings=settings)
    assert found.kind == "copies_paid"
    assert ("much of it while tokens travelled" in found.text) == (beside != ",")
    found, others = judged(tmp_path / "late", spread={"planning_s": 12.02e-3}, settings=settings)
    assert found in others
    assert found.title == (
        "Copies may not have paid: handing over, waiting and deciding took rank 0 38.3 ms a step"
        f"{beside} and they are modelled to save 33.0 ms without that"
    )
    assert "; deciding on them took it 36.1 ms" in found.text


def test_deciding_counts_where_no_clock_tells_of_waiting(tmp_path: Path) -> None:
    """Three layers save 30 ms as modelled, waiting and all."""
    dark = dict.fromkeys(("landing_s", "return_s"), float("nan"))
    found, _ = judged(tmp_path / "soon", spread={**dark, "planning_s": 9.9e-3})
    assert found.kind == "copies_paid"
    found, _ = judged(tmp_path / "late", spread={**dark, "planning_s": 11e-3})
    assert found.title == (
        "Copies may not have paid: deciding took rank 0 33.0 ms a step, and they are modelled to "
        "save 30.0 ms without that"
    )


def test_times_that_are_alike_are_told_as_alike(tmp_path: Path) -> None:
    near = {"landing_s": 10.75e-3, "return_s": 0.0}
    found, _ = judged(tmp_path / "near", spread=near)
    assert found.title == (
        "Copies may not have paid: handing over, waiting and deciding took rank 0 33.2 ms a step, "
        "about as long as they are modelled to save without that"
    )
    found, _ = judged(tmp_path / "as at home", spread={"modelled_s": 3.01e-2})
    assert found.title.endswith("expert layers are modelled to take about as long as at home")


def test_nobody_knows_whether_copies_paid_by_prices_that_are_off(tmp_path: Path) -> None:
    off = {"modelled_experts_s": 3.3e-2}
    found, others = judged(tmp_path / "off", spread=off)
    assert (found.kind, found.severity) == ("copies_unknown", "note")
    assert found.title == (
        "Whether copies paid is not known: prices are off (experts took rank 0 39.0 ms a step, and "
        "99.0 ms by them)"
    )
    assert "60.0 ms for 90.0 ms a step, modelled; " in found.text
    assert {one.kind for one in others} >= {"prices_off"}
    assert not {one.kind for one in others} & {"copies_did_not_pay", "copies_paid"}


def test_layers_that_take_longer_than_steps_do_are_of_prices_that_are_off(tmp_path: Path) -> None:
    """Which shows without a clock, too: a step of 0.4 s has no three layers of 0.2 s."""
    names = "landing_s", "return_s", "forward_s", "backward_s"
    dark = dict.fromkeys(names, float("nan"))
    long = {**dark, "modelled_s": 0.2, "modelled_home_s": 0.3}
    found, others = judged(tmp_path / "run", spread=long, step_s=0.4)
    assert found.title.startswith(
        "Whether copies paid is not known: prices are off (expert layers would take 600 ms a step "
        "by them, and whole steps took 4"
    )
    assert [one.kind for one in others if one.severity == "warning"] == ["prices_off"]
    possible, _ = judged(tmp_path / "slow", spread=long, step_s=0.7)
    assert possible.kind == "copies_paid"


def test_copies_that_cost_more_than_they_save(tmp_path: Path) -> None:
    dear = {"modelled_s": 3.3e-2}
    found, others = judged(tmp_path / "run", spread=dear, settings={"policy": "eplb"})
    assert found in others
    assert "did not pay: expert layers are modelled to take 1.10 of what" in text(found)
    assert 'Say balance.policy = "none", or "quota"' in text(found)
    early = {"policy": "quota", "early": True}
    late, _ = judged(tmp_path / "early", spread=dear, settings=early)
    assert late.text.endswith("or balance.early = false, by the rows at hand.")
    ours, _ = judged(tmp_path / "ours", spread=dear, settings={"policy": "quota"})
    assert ours.text.endswith('Say balance.policy = "none".')


def test_prices_that_are_far_off(tmp_path: Path) -> None:
    """Three layers take 13 ms each, and 10 are expected."""
    near = {"modelled_experts_s": 5.3e-3}
    assert "prices_off" not in {one.kind for one in judged(tmp_path / "near", spread=near)[1]}
    for name, seconds, said in (("low", 5.1e-3, "15.3 ms"), ("high", 3.3e-2, "99.0 ms")):
        spread = {"modelled_experts_s": seconds}
        _, others = judged(tmp_path / name, spread=spread)
        (found,) = (one for one in others if one.kind == "prices_off")
        assert found.severity == "warning"
        assert found.title.endswith(f"experts took rank 0 39.0 ms a step, and {said} by them")
        assert "Say balance.prices, or plan with what `moesaic probe` finds here" in found.text
    given = {"prices": {"rows_per_s": 1e4, "bytes_per_s": 1e9, "latency_s": 0.0, "hides": True}}
    _, others = judged(tmp_path / "given", spread=spread, settings=given)
    (found,) = (one for one in others if one.kind == "prices_off")
    assert "Leave out balance.prices, or correct it by what `moesaic probe` finds" in found.text
    _, others = judged(tmp_path / "measured", spread=spread, settings={"measure": True})
    (found,) = (one for one in others if one.kind == "prices_off")
    assert "that was with nothing in a cache" in found.text
    assert "leave out balance.measure, or say balance.prices" in found.text
    dark = {**spread, "forward_s": float("nan")}
    assert "prices_off" not in {one.kind for one in judged(tmp_path / "dark", spread=dark)[1]}


@pytest.mark.parametrize(
    ("ratio", "off"), [(2.495, False), (2.505, True), (1 / 2.495, False), (1 / 2.505, True)]
)
def test_threshold_of_prices_is_two_and_a_half_times(
    ratio: float, off: bool, tmp_path: Path
) -> None:
    _, others = judged(tmp_path / "run", spread={"modelled_experts_s": 13e-3 / ratio})
    assert ("prices_off" in {one.kind for one in others}) == off


def test_first_steps_say_nothing_of_prices(tmp_path: Path) -> None:
    run = RunFacts.read(fabricate(tmp_path / "run", steps=4, balanced=True))
    assert run.spreads is not None
    run.spreads.sums["forward_s"][0] = 1.0
    assert balance.prices_off(run) is None
    run.spreads.sums["forward_s"][:] = 1.0
    assert balance.prices_off(run) is not None
    few = RunFacts.read(fabricate(tmp_path / "few", steps=2, balanced=True))
    assert few.spreads is not None
    few.spreads.sums["forward_s"][:] = 1.0
    assert balance.prices_off(few) is None


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"policy": "quota", "least_rows": 100_000},
         "a copy gets at least 100,000 rows (balance.least_rows), and no rank had more than 1,120 "
         "of a layer at a time."),
        ({"policy": "quota", "least_rows": 1121}, "and no rank had more than 1,120 of a layer at"),
        ({"policy": "quota", "least_rows": 500},
         "none would have paid of those that get at least 500 rows (balance.least_rows)."),
        ({"policy": "eplb", "least_rows": 100_000},
         "1.90 times the mean; eplb asked for none that are modelled to pay."),
        ({"policy": "quota", "least_rows": 64}, "by the prices at hand none would have paid."),
    ],
)  # fmt: skip
def test_least_rows_may_be_why_there_are_no_copies(
    settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    found, _ = judged(tmp_path / "run", spread={"copies": 0}, settings=settings)
    assert said in text(found)


def test_copies_of_which_little_is_known(tmp_path: Path) -> None:
    """On a GPU no clock tells; and steps may be recorded without their layers."""
    nothing = dict.fromkeys(("landing_s", "return_s"), float("nan"))
    found, _ = judged(tmp_path / "gpu", spread=nothing)
    assert found.kind == "copies_paid"
    assert "what waiting for copies took is not measured on such a device" in text(found)
    found, _ = judged(tmp_path / "seldom", loads_every=9)
    assert found.kind == "copies_unknown"
    assert "6.00 a step; in the least even layer the busiest rank had 1.90 times" in text(found)
    assert balance.verdict(RunFacts.read(fabricate(tmp_path / "not asked", steps=4))) is None


def test_no_copies(tmp_path: Path) -> None:
    none = {"copies": 0}
    found, others = judged(tmp_path / "even", spread=none, busiest=1.04)
    assert found not in others
    assert text(found) == (
        "Loads were even enough: no copies were made. In the least even layer the busiest rank had "
        "1.04 times the mean."
    )
    found, _ = judged(tmp_path / "dear", spread=none, busiest=1.9)
    assert text(found).startswith("No copies were made. In the least even layer")
    assert text(found).endswith("1.90 times the mean; by the prices at hand none would have paid.")
    found, _ = judged(tmp_path / "full", spread=none, settings={"copies": 0})
    assert text(found).endswith("there was no room for any (balance.copies = 0).")
