"""Theme `families`: the same work for all contenders, and exact conversions."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import conversion, families, measure, race
from benchmarks.on_ranks import Unlike
from benchmarks.race import Apart
from benchmarks.training import Ours, Theirs

from moesaic.dist.world import World
from moesaic.facts.job import Job, ModelConfig
from moesaic.models.hf.convert import convert

SMALL: dict[str, Any] = {"layers": 2, "vocab": 64, "ffn": 16}


def weighed(job: Job, balance_loss: float) -> Job:
    routing = job.routing.model_copy(update={"balance_loss": balance_loss})
    return job.model_copy(update={"routing": routing})


@pytest.mark.parametrize("family", families.SHAPES)
def test_contenders_of_every_family_take_the_same_steps(family: str) -> None:
    """All steps but for the balance loss, which transformers takes over all layers together."""
    job = families.job_of(family, 2, 16, **SMALL)
    ours = Ours(weighed(job, 0.0), World.solo())
    theirs = {mode: Theirs.like(ours, mode) for mode in families.modes()}
    assert {"eager", "grouped_mm"} <= theirs.keys()
    assert max(race.differences(ours, theirs)) < race.TOLERANCE
    ours = Ours(job, World.solo())
    assert race.differences(ours, {"eager": Theirs.like(ours, "eager")})[0] < race.TOLERANCE


@pytest.mark.soak
def test_a_contender_elsewhere_is_the_one_here() -> None:
    job = families.job_of("olmoe", 2, 16, **SMALL)
    ours = Ours(job, World.solo())
    with closing(Apart(ours, "eager")) as there:
        here = Theirs.like(ours, "eager")
        assert there.weight == here.weight
        assert there.balance() == pytest.approx(here.balance(), rel=1e-5)
        assert [there.step(), there.step()] == pytest.approx([here.step(), here.step()], rel=1e-5)


def test_nobody_measures_where_weights_differ() -> None:
    ours = Ours(families.job_of("olmoe", 2, 16, **SMALL), World.solo())
    other = Theirs.like(ours)
    with torch.no_grad():
        other.model.lm_head.weight.mul_(1.5)
    with pytest.raises(Unlike, match="olmoe"):
        race.differences(ours, {"grouped_mm": other})


def test_a_balance_loss_that_transformers_has_not_is_refused() -> None:
    job = families.job_of("deepseek_v3", 2, 16, **SMALL)
    ours = Ours(weighed(job, 0.01), World.solo())
    with pytest.raises(ValueError, match=r"routing\.balance_loss = 0\.01"):
        Theirs.like(ours)


def test_a_race_names_the_quickest_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "FOREIGN_SHARE", 9.0)  # No round is repeated.
    ours = Ours(weighed(families.job_of("olmoe", 2, 16, **SMALL), 0.0), World.solo())
    theirs = {mode: Theirs.like(ours, mode) for mode in families.modes()}
    loss, speed = race.race(ours, theirs, 1, same=3)
    assert loss.name == "difference of the losses, first 3 steps, olmoe, 2 x 16 tokens"
    assert loss.value < race.TOLERANCE
    assert "the quickest of 2 modes" in speed.against
    assert speed.value > 0


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    conversion.make(tmp_path / "source", ModelConfig(**conversion.NOTHING), 20_000)
    return tmp_path / "source"


def test_what_is_made_is_read_and_compared(directory: Path, tmp_path: Path) -> None:
    assert len(list(directory.glob("*.safetensors"))) > 2
    convert(directory, tmp_path / "checkpoint", to="checkpoint")
    convert(tmp_path / "checkpoint", tmp_path / "back")
    conversion.check_same(directory, tmp_path / "back")
    conversion.copy(directory, tmp_path / "copy")
    conversion.forget(tmp_path / "copy")
    assert conversion.size_of(tmp_path / "copy") == conversion.size_of(directory)
    victim = sorted((tmp_path / "copy").glob("*.safetensors"))[-1]
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(data)
    with pytest.raises(ValueError, match="is another one in"):
        conversion.check_same(directory, tmp_path / "copy")


@pytest.mark.soak
def test_conversions_are_measured_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversion.measure, "ROOT", tmp_path)
    monkeypatch.setattr(conversion.measure, "wait_for_quiet", lambda: True)
    rows = list(conversion.rows(1, conversion.NOTHING, 20_000))
    assert [row.bar for row in rows] == [conversion.QUICK, conversion.SMALL, "", "", ""]
    assert rows[0].value == max(row.value for row in rows[2:])
    assert list((tmp_path / "build").iterdir()) == []


def test_a_disk_without_room_is_told(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion, "ROOM", 1e15)
    with pytest.raises(OSError, match="make room"):
        conversion.check_room(directory, directory)
