"""The checkpoint that pruning spares: the newest one from before the loss rises."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

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


def test_a_step_that_fp16_skips_says_nothing() -> None:
    good = GoodCheckpoint()
    for step, loss in enumerate([2.0, 2.0, float("inf")], 1):
        good.add_step(step, {"loss": loss, "skipped": float(step == 3)})
        good.begin_save(step)
        good.add_checkpoint(step, f"step-{step}")
    assert good.find([Path("step-3"), Path("step-2")]) == Path("step-3")
