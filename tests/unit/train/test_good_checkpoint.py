"""The checkpoint that pruning spares: the newest one from before the loss rises."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from moesaic.base.events import RUN_LOG, EventLog
from moesaic.train.good_checkpoint import GoodCheckpoint


def spared(losses: Sequence[float], saves: Sequence[int], name: str = "loss") -> str | None:
    """Return the checkpoint spared after the last of `saves`, in a run with these losses from step
    1 on that a finder saw from the first one."""
    good = GoodCheckpoint()
    found = None
    for step, loss in enumerate(losses, 1):
        good.add_step(step, {name: loss, "grad_norm": 1.0 / step})
        if step in saves:
            good.begin_save(step)
            good.add_checkpoint(step, f"step-{step}")
            paths = [Path(f"step-{one}") for one in reversed(saves) if one <= step]
            found = good.find([Path("step-of-an-earlier-start"), *paths])
    return None if found is None else found.name


FALLING = [5.0 - 0.1 * step for step in range(30)]


@pytest.mark.parametrize(
    ("losses", "saves", "name"),
    [
        (FALLING, [10, 20, 30], "step-30"),
        ([2.0, 2.02, 1.99, 2.01] * 8, [10, 20, 30], "step-30"),  # Noise costs no disk.
        (FALLING[:20] + [9.0] * 10, [10, 20, 25, 30], "step-10"),  # Step 20 did the damage.
        (FALLING[:21] + [9.0] * 9, [10, 20, 21, 30], "step-20"),
        (FALLING[:22] + [float("nan")] * 8, [10, 20, 25, 30], "step-20"),
        ([9.0 + step for step in range(30)], [10, 20, 30], "step-10"),
    ],
)
def test_the_newest_one_from_before_the_rise_is_spared(
    losses: list[float], saves: list[int], name: str
) -> None:
    assert spared(losses, saves) == name
    assert spared(losses, saves, "small/loss") == name  # That of a student.


def test_the_origin_of_a_resume_is_judged_by_the_steps_after_it() -> None:
    good = GoodCheckpoint()
    good.add_checkpoint(70, "step-70")
    assert good.find([Path("step-70")]) is None
    for step, loss in enumerate([2.0, *[40.0] * 9], 71):
        good.add_step(step, {"loss": loss})
    good.begin_save(80)
    good.add_checkpoint(80, "step-80")
    assert good.find([Path("step-80"), Path("step-70")]) == Path("step-70")


@pytest.mark.parametrize("share", [0.01, 0.16, 0.5])
def test_noise_costs_no_disk(share: float) -> None:
    """However large it is, and near a loss of 0."""
    random = np.random.default_rng(5)
    saves = range(10, 401, 10)
    for mean in (2.0, 0.0):
        losses = (mean + share * random.normal(size=400)).tolist()
        assert spared(losses, saves) == "step-400"
        risen = [*losses, *[mean + 20 * share] * 20]  # Step 400 did the damage.
        assert spared(risen, [*saves, 410, 420]) == "step-390"


def write_steps(log: EventLog, first: int, losses: Sequence[float], saves: Sequence[int]) -> None:
    """Write what a start logs that begins with step `first`."""
    log.emit("run_start", step=first)
    for step, loss in enumerate(losses, first):
        log.emit("step", step=step, loss=loss, skipped=float(math.isinf(loss)))
        if step in saves:
            log.emit("checkpoint_done", step=step, path=f"elsewhere/checkpoints/step-{step}")


def test_a_resume_knows_the_losses_of_earlier_starts(tmp_path: Path) -> None:
    """But not those of steps that the run went back from."""
    log = EventLog(tmp_path / RUN_LOG)
    write_steps(log, 1, [*FALLING[:12], *[0.1] * 3], [12, 15])
    log.emit("step", step="?", loss=1.0)
    write_steps(log, 13, [float("inf"), *[9.0] * 11], [22, 23, 24])
    log.close()
    good = GoodCheckpoint()
    good.resume(tmp_path, tmp_path / "checkpoints" / "step-24", 24)
    paths = [Path(f"step-{step}") for step in (24, 23, 22, 15, 12)]
    assert good.find(paths) == Path("step-12")
    good.add_step(25, {"loss": 9.0})
    good.begin_save(25)
    good.add_checkpoint(25, "step-25")
    assert good.find([Path("step-25"), *paths]) == Path("step-12")


def test_the_checkpoint_before_a_failed_step_is_not_good() -> None:
    good = GoodCheckpoint()
    for step in range(1, 10):
        good.add_step(step, {"loss": 2.0})
        good.begin_save(step)
        good.add_checkpoint(step, f"step-{step}")
    assert good.find([Path("step-9"), Path("step-8")]) == Path("step-9")
    good.add_failure(10)
    assert good.find([Path("step-9"), Path("step-8")]) == Path("step-8")


def test_a_step_that_fp16_skips_says_nothing() -> None:
    good = GoodCheckpoint()
    for step, loss in enumerate([2.0, 2.0, float("inf")], 1):
        good.add_step(step, {"loss": loss, "skipped": float(step == 3)})
        good.begin_save(step)
        good.add_checkpoint(step, f"step-{step}")
    assert good.find([Path("step-3"), Path("step-2")]) == Path("step-3")
