"""Findings: each reports its own problem, and none on a healthy run."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fabricated import fabricate

from moesaic.report import RunStats
from moesaic.report.findings import Finding, find
from moesaic.report.loads import Loads
from moesaic.report.log import Checkpoint, Launch, Steps, Validation
from moesaic.report.summary import summary

JOB: dict[str, Any] = {
    "routing": {"balance_loss": 0.01, "capacity_factor": None},
    "model": {"experts": 8, "top_k": 2, "layers": 2},
    "optimizer": {"lr": 0.003},
    "train": {"clip": 1.0},
}


def make_run(size: int = 1, job: dict[str, Any] = JOB, **values: Any) -> RunStats:
    """Return a run of `size` steps; `values` are columns of its steps, or fields of the run."""
    names = {field.name for field in fields(Steps)}
    columns = {name: values.pop(name) for name in names & set(values)}
    known = {**{name: np.full(size, np.nan) for name in names}, "loss": np.ones(size)}
    steps = Steps(
        **{**known, "step": np.arange(1.0, size + 1), "phases": {}, "figures": {}, **columns}
    )
    run = RunStats(
        name="run", directory=Path("run"), job=job, plan={}, versions={}, launches=[launch()],
        steps=steps, validations=[], days=[], passes={}, checkpoints=[], ranks=[], loads=None,
        balance=None, prediction=None, ended="finished", read_at_s=0.0,
    )  # fmt: skip
    return replace(run, **values)


def launch(step: int = 0) -> Launch:
    return Launch(0.0, 1.0, step, None, 1, "cpu", 1.0, 1.0, 1.0)


def uneven(recent: list[list[float]], tokens: float = 1000.0, **job: Any) -> RunStats:
    """Return a run with these loads over the even share."""
    counts = np.array(recent) * tokens
    loads = Loads(np.arange(1, 9), np.arange(len(recent)), counts[None], counts)
    return make_run(loads=loads, job={**JOB, **job})


def kinds(run: RunStats) -> list[str]:
    return [finding.kind for finding in find(run)]


def finding_of(run: RunStats, kind: str) -> Finding:
    (finding,) = [one for one in find(run) if one.kind == kind]
    return finding


def text(run: RunStats, kind: str) -> str:
    finding = finding_of(run, kind)
    return f"{finding.title}. {finding.text}"


@pytest.mark.parametrize(
    ("recent", "tokens", "found"),
    [
        ([[1, 1.2, 0.8, 1], [1, 1, 1.9, 0.1]], 1000, []),
        ([[0, 2, 0, 6]], 2, []),
        ([[0.051, *[1.31] * 3]], 1000, []),
        ([[0.049, *[1.31] * 3]], 1000, ["dead_experts"]),
        ([[2.02, *[0.66] * 3]], 1000, ["hot_experts"]),
    ],
)
def test_thresholds_of_dead_and_hot(
    recent: list[list[float]], tokens: float, found: list[str]
) -> None:
    assert kinds(uneven(recent, tokens)) == found


def test_dead_and_hot_experts_are_named_with_a_remedy() -> None:
    one = text(uneven([[1, 1, 1, 1], [1, 0.04, 1.5, 1]]), "dead_experts")
    assert "Expert 1 of layer 1 is dead" in one
    assert "of an even share in steps 7 to 8" in one
    assert "raise routing.balance_loss (now 0.01)" in one
    many = text(uneven([[0, 2, 0, 2], [1, 1, 1, 1], [2, 0, 1, 1]]), "dead_experts")
    assert "3 experts are dead" in many
    assert "layer 0: 0 and 2; layer 2: 1" in many
    unset = uneven([[1, 0.04, 1.5, 1]], routing={"balance_loss": 0.0})
    assert "set routing.balance_loss = 0.01." in text(unset, "dead_experts")
    biased = {"model": {"family": "deepseek_v3"}, "routing": {"bias_update_rate": 0.001}}
    remedy = text(uneven([[1, 0.04, 1.5, 1]], **biased), "dead_experts")
    assert "raise routing.bias_update_rate (now 0.001)" in remedy
    hot = text(uneven([[1.0] * 8, [0.5, 0.5, 0.5, 0.5, 0.5, 4.5, 0.5, 0.5]]), "hot_experts")
    assert "Expert 5 of layer 1 is hot" in hot
    assert "4.50x" in hot
    assert "routing.capacity_factor" in hot


def test_a_frozen_teacher_gets_no_advice_on_learning() -> None:
    """Its loss and its experts follow from the text alone; dropped assignments can be helped."""
    loss, validations = noisy_loss(40), [Validation(n, 1 + (n - 2) ** 2) for n in range(1, 9)]
    loss[30] += 9.0
    experts, even = uneven([[1, 0.04, 4.5, *[1.0] * 5]]), np.arange(40) % 2 == 0
    for frozen in (False, True):
        run = make_run(
            40, {**JOB, "distill": {"frozen": frozen}}, loss=loss, validations=validations,
            loads=experts.loads, tokens=np.full(40, 1000.0), dropped=np.full(40, 200.0),
        )  # fmt: skip
        learning = ["dead_experts", "hot_experts", "loss_spikes", "overfitting"]
        assert sorted(kinds(run)) == sorted(["drops", *(learning * (not frozen))])
        assert ("balance_loss" in text(run, "drops")) is not frozen
        rising = make_run(40, run.job, loss=np.linspace(2.0, 9.0, 40))
        assert kinds(rising) == ["diverged"] * (not frozen)
        assert rising.status == ("finished" if frozen else "diverged")
        rare = make_run(
            40, {**JOB, "distill": {"frozen": frozen}}, loss=np.where(even, 2.0, np.nan)
        )
        assert kinds(rare) == ["diverged"] * (not frozen)
        assert summary(rare)["loss"] == (2.0 if frozen else None)


def test_drops() -> None:
    tokens, none = np.full(40, 1000.0), np.zeros(40)
    assert kinds(make_run(40, tokens=tokens, dropped=none)) == []
    many = make_run(40, tokens=tokens, dropped=none + 200)
    assert "Assignments were dropped: 5.0%" in text(many, "drops")
    assert finding_of(many, "drops").severity == "warning"
    early = np.where(np.arange(40) < 10, 200.0, 0.0)
    assert finding_of(make_run(40, tokens=tokens, dropped=early), "drops").severity == "note"
    sparse = {"model": {"top_k": 1, "layers": 4, "dense_layers": 2}}
    run = make_run(40, sparse, tokens=tokens, dropped=none + 200)
    assert "Assignments were dropped: 10.0%" in text(run, "drops")


def test_replay_mismatches() -> None:
    run = make_run(5, num_replay_mismatches=np.array([0, 0, 3.0, 0, 4.0]))
    assert "7 times in 2 steps, first at step 3" in text(run, "replay_mismatches")


def noisy_loss(size: int = 400) -> np.ndarray[Any, Any]:
    random = np.random.default_rng(1)
    return 1.5 + 4 * np.exp(-np.arange(size) / 60) + 0.08 * random.normal(size=size)


def test_spike_is_named_once_with_its_gradient() -> None:
    loss, norms = noisy_loss(), np.full(400, 0.7)
    assert kinds(make_run(400, loss=loss)) == []
    assert kinds(make_run(5, loss=np.arange(5.0))) == []
    loss[200:203] += [1.0, 2.5, 1.2]
    norms[201] = 14.0
    spike = text(make_run(400, loss=loss, grad_norm=norms), "loss_spikes")
    assert "The loss spiked at step 202." in spike
    assert "14.0 (median 0.700)" in spike
    assert "optimizer.lr (now 0.003)" in spike


def test_loss_that_is_no_number() -> None:
    loss = noisy_loss(20)
    loss[12:] = np.nan
    run = make_run(20, loss=loss)
    assert "diverged (NaN or infinite) at step 13. 8 of 20 steps" in text(run, "diverged")
    assert (find(run)[0].severity, run.status) == ("problem", "diverged")
    cut = make_run(20, loss=loss, ended="interrupted")
    silent = replace(run, ended="", read_at_s=run.last_event_s + 600)
    assert (cut.status, silent.status) == ("diverged", "diverged")
    assert "stopped" not in kinds(cut)
    assert replace(silent, read_at_s=run.last_event_s).status == "running"
    error = "step 21: the gradient's norm is nan"
    ended = make_run(20, loss=noisy_loss(20), ended="diverged", error=error)
    assert "at step 21. Step 21: the gradient's norm is nan. Likely" in text(ended, "diverged")
    assert kinds(make_run(0, ended="diverged", error=error)) == ["diverged"]


@pytest.mark.parametrize(("step", "is_good"), [(19, True), (20, False)])
def test_the_way_back_from_an_error_is_before_the_weights_that_failed(
    tmp_path: Path, step: int, is_good: bool
) -> None:
    """Also if it is another run's checkpoint."""
    run = make_run(20, loss=noisy_loss(20), ended="diverged", error="step 21: the loss is nan")
    none = "No checkpoint from before is left: start anew"
    one = replace(run, directory=tmp_path, checkpoints=[commit(tmp_path, step)])
    here = f"step {step}: moesaic train --resume {tmp_path}/checkpoints/step-{step} --change"
    assert (here if is_good else none) in text(one, "diverged")
    origin = str(tmp_path / "checkpoints" / f"step-{step}")
    resumed = replace(launch(step), resumed_from=origin)
    other = replace(run, directory=tmp_path / "b", launches=[launch(), resumed])
    there = f"step {step}: moesaic train --out NEW --resume {origin} --change"
    assert (there if is_good else none) in text(other, "diverged")
    Path(origin, "COMMIT").unlink()
    assert none in text(other, "diverged")


def test_a_loss_that_explodes_or_is_lost_again_diverged(tmp_path: Path) -> None:
    """A finite loss leaves no error in the log."""
    steps = np.arange(60)
    exploding = np.where(steps < 15, 5.8 - 0.1 * steps, 4.4 * 1.2 ** (steps - 14.0))
    kept = [commit(tmp_path / "a b", step) for step in (10, 20)]
    done = [Checkpoint(5, "a b/checkpoints/step-5", "done"), *kept]  # The first was pruned.
    job = {**JOB, "optimizer": {"lr": 10.0}}
    loss = np.minimum(exploding, 653.0)
    run = make_run(60, job, loss=loss, checkpoints=done, directory=tmp_path / "a b")
    (first, *_) = find(run)
    assert (first.kind, first.severity, run.status) == ("diverged", "problem", "diverged")
    assert first.title.endswith("5.80 at the start, 653 at the end")
    assert "Likely cause: optimizer.lr = 10 is far above" in first.text
    command = f"moesaic train --resume '{tmp_path}/a b/checkpoints/step-10' --change --set "
    assert f"Go back to step 10: {command}" in first.text
    assert run.divergence is not None
    assert 15 < run.divergence.step <= 20
    step = int(run.divergence.step)
    for late, goes_back in ((step - 2, True), (step - 1, False)):  # It has the first wrong loss.
        one = replace(run, checkpoints=[commit(tmp_path / "a b", late)])
        assert ("Go back to step" in text(one, "diverged")) == goes_back
        assert ("before is left: start anew with" in text(one, "diverged")) != goes_back
    ended = replace(run, ended="diverged", error="step 61: the loss is nan")
    assert f"Go back to step 10: {command}" in text(ended, "diverged")
    assert f"from step {step} on, and is NaN or infinite at step 61" in text(ended, "diverged")

    lost = noisy_loss(400)
    lost[300:] += 3.5
    found = text(make_run(400, loss=lost, checkpoints=done), "diverged")
    assert "diverged from step 301 on: it had fallen to 1.4" in found
    at_once = np.where(steps[:20] < 1, 5.8, 650.0)
    assert "from step 2 on: 5.80 at the start" in text(make_run(20, loss=at_once), "diverged")
    few = np.array([5.8, 5.9, 40.0, 300.0, 700.0, 1200.0, 1600.0, 1615.0])
    assert "from step 3 on: 5.80 at the start, 1" in text(make_run(8, loss=few), "diverged")
    settling = np.array([5.78, 7.46, 7.48, 50.29, 17.5, 14.56, 11.82, 10.63])
    assert "5.78 at the start, 13.2 at the end" in text(make_run(8, loss=settling), "diverged")
    assert find(make_run(8, loss=np.array([5.8, 6.1, 9.0, 5.9, 5.7, 8.0, 5.6, 5.5]))) == []
    sinking = np.concatenate(([5.8], 1300.0 * 0.91 ** np.arange(59)))  # The learning rate decays.
    assert "from step 2 on: 5.80 at the start, 6.6" in text(make_run(60, loss=sinking), "diverged")
    warm = {**JOB, "schedule": {"warmup": 9}}
    for job, words in (
        ({**warm, "train": {"clip": 0}}, "train.clip = 0, so a single batch"),
        (JOB, "schedule.warmup = 0, so training begins with the full optimizer.lr (now 0.003)"),
        (warm, "optimizer.lr (now 0.003) is too high for this model"),
    ):
        assert words in text(make_run(20, job, loss=at_once), "diverged")
    calm = 1.0 + 0.5 * np.random.default_rng(3).random(200)
    for loss in (noisy_loss(), calm, calm[:12], np.full(40, 0.7), np.linspace(5.0, 1.0, 40)):
        assert make_run(len(loss), loss=loss).divergence is None


def commit(run: Path, step: int) -> Checkpoint:
    """Write the commit record of a checkpoint; return its save, with a path as of elsewhere."""
    name = f"step-{step}"
    (run / "checkpoints" / name).mkdir(parents=True, exist_ok=True)
    (run / "checkpoints" / name / "COMMIT").touch()
    return Checkpoint(step, f"a b/checkpoints/{name}", "done")


def test_a_model_that_a_peak_has_ruined_ends_flat() -> None:
    peak = np.concatenate(([5.72, 595.0, 4526.0, 759698.0], np.full(36, 5.7683)))
    found = text(make_run(40, loss=peak), "diverged")
    assert "from step 2 on: 5.72 at the start, 5.77 at the end, 7" in found
    assert " at worst. The weights" in found
    learns = np.concatenate((peak[:4], np.full(36, 5.0)))
    assert make_run(40, loss=learns).divergence is None


@pytest.mark.parametrize(
    ("size", "bad", "is_lost"), [(400, 20, False), (1500, 60, True), (1500, 5, True)]
)
def test_a_short_bad_end_of_a_long_run_diverged(size: int, bad: int, is_lost: bool) -> None:
    """Such as the first steps of a resume with another learning rate."""
    loss = noisy_loss(size + bad)
    loss[size:] = 5.0 if is_lost else 900.0
    found = make_run(len(loss), loss=loss).divergence
    assert found is not None
    assert (found.kind, found.step) == ("lost" if is_lost else "exploded", size + 1)
    for begin, end in ((200, 204), (size + bad - 2, size + bad)):  # A spike, or hardly an end.
        loss = noisy_loss(size + bad)
        loss[begin:end] = 900.0
        assert make_run(len(loss), loss=loss).divergence is None


def test_the_way_back_lowers_the_rate_that_is_too_high(tmp_path: Path) -> None:
    """It goes on to the planned end, on as many ranks."""
    loss = np.concatenate((np.linspace(5.8, 4.0, 30), np.full(20, 90.0)))
    began, resumed = launch(), replace(launch(20), ranks=2)
    job = {**JOB, "train": {"clip": 1.0, "steps": 50}, "optimizer": {"lr": 1.0}}
    run = make_run(
        50, job, loss=loss, lr=np.where(np.arange(50) < 20, 2e-4, 1.0), directory=tmp_path,
        checkpoints=[commit(tmp_path, 20)], launches=[began, resumed],
    )  # fmt: skip
    go_on = f"moesaic train --resume {tmp_path}/checkpoints/step-20 --nproc 2 --change --set "
    words = "optimizer.lr=0.0002 --set train.steps=50"  # The rate had worked.
    assert text(run, "diverged").endswith(f"{go_on}{words}")
    warm = replace(run, job={**job, "schedule": {"warmup": 20}})
    assert text(warm, "diverged").endswith(f"{go_on}optimizer.lr=0.001 --set train.steps=50")
    clicks = {**job, "kind": "ctr", "optimizer": {"lr": 0.001}, "table": {"lr": 1e300}}
    found = text(replace(run, job=clicks), "diverged")
    assert "table.lr = 1e+300 is far above the usual 1e-2 to 1e-1" in found
    assert found.endswith(f"{go_on}table.lr=0.1 --set train.steps=50")
    calm = {**clicks, "schedule": {"warmup": 30}, "table": {"lr": 0.05}}
    found = text(replace(run, job=calm), "diverged")
    assert "optimizer.lr (now 0.001) or table.lr (now 0.05) is too high" in found
    assert "optimizer.lr=0.0001 --set table.lr=0.005" in found


@pytest.mark.parametrize("frozen", [False, True])
def test_a_student_that_diverges_is_named(frozen: bool) -> None:
    """A loss on text that no loss of the student trains is not judged."""
    rising, missing = np.geomspace(2.0, 50.0, 40), np.full(20, np.nan)
    figures = {
        "sound/loss": noisy_loss(40), "quiet/loss": rising, "gone/loss": rising,
        "small/loss": np.concatenate((missing, rising[::2])),
    }  # fmt: skip
    losses = {"sound": {"text": 1.0}, "quiet": {"attention": 1.0}, "small": {"logits": 1.0}}
    students = [{"name": name, "losses": one, "lr": None} for name, one in losses.items()]
    job = {**JOB, "distill": {"frozen": frozen}, "student": students}
    run = make_run(40, job, loss=noisy_loss(40), figures=figures)
    found = text(run, "diverged")
    assert found.startswith('The loss of student "small" diverged from step 2')
    assert " on: 2.00 at the start, " in found
    assert "--set optimizer.lr=0.0003" in found
    assert (find(run)[0].kind, run.status) == ("diverged", "diverged")
    students[2]["lr"] = 0.05
    found = text(make_run(40, job, loss=noisy_loss(40), figures=figures), "diverged")
    assert "student.small.lr = 0.05 is far above" in found
    assert "--set student.small.lr=0.001" in found
    sound = {**job, "student": students[:2]}
    assert make_run(40, sound, loss=noisy_loss(40), figures=figures).status == "finished"


@pytest.mark.parametrize(("rows", "severity"), [([2], "note"), ([2, 30, 31, 32], "warning")])
def test_skipped_steps(rows: list[int], severity: str) -> None:
    loss, skips, scales = np.full(40, 2.0), np.zeros(40), np.full(40, 1024.0)
    skips[rows], loss[rows] = 1.0, np.nan
    run = make_run(40, loss=loss, skipped=skips, loss_scale=scales)
    assert kinds(run) == ["skipped"]
    assert f"of 40 skipped for fp16 overflow. The last was step {rows[-1] + 1}" in text(
        run, "skipped"
    )
    assert "it is now 1024" in text(run, "skipped")
    assert find(run)[0].severity == severity
    none = make_run(40, loss=np.full(40, np.nan), skipped=np.ones(40), loss_scale=scales)
    assert (find(none)[0].kind, find(none)[0].severity) == ("all_skipped", "problem")


@pytest.mark.parametrize(
    ("losses", "best"),
    [
        ([2.0, 1.9], None),
        ([3.0, 2.5, 2.2, 2.0, 1.9, 1.85, 1.83], None),
        ([3.0, 2.5, 2.0, 1.9, 2.0, 1.92, 2.01, 1.91, 1.98], None),
        ([3.0, 2.4, 2.0, 1.9, 2.0, 2.1, 2.2, 2.3, 2.4], 40),
    ],
)
def test_overfitting_names_the_best_step(losses: list[float], best: int | None) -> None:
    run = make_run(validations=[Validation(10 * n, loss) for n, loss in enumerate(losses, 1)])
    assert kinds(run) == (["overfitting"] if best else [])
    assert not best or f"Overfitting since step {best}" in text(run, "overfitting")


def test_failed_saves() -> None:
    done = Checkpoint(10, "a", "done")
    failed = Checkpoint(20, "b", "failed", error="No space left on device")
    finding = text(make_run(checkpoints=[done, failed]), "failed_saves")
    assert "1 checkpoint failed to write (step 20)" in finding
    assert "No space left on device" in finding


def test_a_healthy_run_has_no_findings(tmp_path: Path) -> None:
    assert kinds(RunStats.read(fabricate(tmp_path / "run", steps=60))) == []


def test_findings_are_ordered_by_severity(tmp_path: Path) -> None:
    directory = fabricate(
        tmp_path / "run", steps=80, killed_at=70, dead={1: 3}, hot={0: 5}, spike_at=44,
        dropped=300, flips=2,
    )  # fmt: skip
    found = find(RunStats.read(directory))
    kinds = [finding.kind for finding in found]
    assert kinds[0] == "stopped"
    assert set(kinds) == {
        "stopped", "dead_experts", "hot_experts", "drops", "replay_mismatches", "loss_spikes",
    }  # fmt: skip
    assert "newest checkpoint, step 60; it repeats 10 steps" in found[0].text


def test_stopped_run_without_checkpoint_says_that_work_is_lost(tmp_path: Path) -> None:
    run = RunStats.read(fabricate(tmp_path / "run", steps=30, killed_at=12))
    assert "No checkpoint was committed" in text(run, "stopped")
    cut = replace(run, ended="ended by SIGTERM", read_at_s=run.last_event_s)
    assert "The run was ended by SIGTERM. No checkpoint" in text(cut, "stopped")
    for ended in ("", "finished"):
        assert "stopped" not in kinds(replace(run, ended=ended, read_at_s=run.last_event_s))


UNMEASURED = dict.fromkeys(("replica_wait_s", "gradient_wait_s"), float("nan"))
SHORT = {"replica_wait_s": 10.6e-3, "gradient_wait_s": 0.0}


@pytest.mark.parametrize(
    ("story", "kind", "start", "part"),
    [
        # Three layers save 33 ms before waiting; waiting takes 2.25 ms on average.
        ({}, "replicas_paid",
         "Replicas paid: expert layers take a predicted 0.667 of the time without them. 6.00 "
         "replicas a step. In the least even layer the busiest rank had 1.90 times the mean "
         "without replicas and 1.10 with them. Predicted: 60.00 ms a step with replicas, 90.00 ms "
         "without. Sending and waiting for replicas took 2.25 ms, planning 1.00 ms.", ""),
        ({"balance": SHORT}, "replicas_paid", "", ""),
        ({"balance": {**SHORT, "gradient_wait_s": 2.5e-3}}, "replicas_did_not_pay",
         "Replicas did not pay: they cost 40.30 ms a step, the predicted saving is 33.00 ms",
         'Set balance.policy = "none".'),
        # A predicted 30 ms are saved, waiting included.
        ({"balance": {**UNMEASURED, "planning_s": 9.9e-3}}, "replicas_paid", "",
         "Waiting for replicas is not measured on this device"),
        ({"balance": {**UNMEASURED, "planning_s": 11e-3}}, "replicas_did_not_pay",
         "Replicas did not pay: they cost 33.00 ms a step, the predicted saving is 30.00 ms", ""),
        # Experts of each layer take 13 ms.
        ({"balance": {"predicted_experts_s": 13e-3 / 2.495}}, "replicas_paid", "", ""),
        ({"balance": {"predicted_experts_s": 13e-3 * 2.505}}, "replicas_unknown",
         "Balance costs do not match this machine: experts took 39.00 ms on rank 0, predicted "
         "97.69 ms", "Remove balance.costs"),
    ],
)  # fmt: skip
def test_replicas_are_judged(
    story: dict[str, Any], kind: str, start: str, part: str, tmp_path: Path
) -> None:
    run = RunStats.read(fabricate(tmp_path / "run", steps=4, balanced=True, **story))
    assert text(run, kind).startswith(start)
    assert part in text(run, kind)
    assert (finding_of(run, kind).severity == "warning") == (
        kind == "replicas_did_not_pay" or "costs do not" in start
    )


def test_runs_without_replicas_have_no_verdict(tmp_path: Path) -> None:
    for name, story in (("none", {"balance": {"replicas": 0}}), ("unrecorded", {"loads_every": 9})):
        run = RunStats.read(fabricate(tmp_path / name, steps=4, balanced=True, **story))
        assert kinds(run) == []


def test_first_steps_do_not_judge_costs(tmp_path: Path) -> None:
    """A median over too few steps would contain the slow first one."""
    for steps, slow_steps, kind in (
        (4, 1, "replicas_paid"), (4, 4, "replicas_unknown"), (2, 2, "replicas_paid"),
    ):  # fmt: skip
        place = tmp_path / f"{steps}-{slow_steps}"
        run = RunStats.read(fabricate(place, steps=steps, balanced=True))
        assert run.balance is not None
        run.balance.by_step["forward_s"][:slow_steps] = 1.0
        assert kind in kinds(run)


def test_waiting_for_the_drive_is_a_warning(tmp_path: Path) -> None:
    run = RunStats.read(fabricate(tmp_path / "run", steps=6, stall=0.25))
    (finding,) = [one for one in find(run) if one.kind == "slow_drive"]
    assert finding.severity == "warning"
    assert finding.title == "The drive is the bottleneck: 25% of a step waits for it"
    assert "raise memory.host" in finding.text
