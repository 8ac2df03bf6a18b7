"""Theme `families`: the same work for all contenders, bubbles, exact conversions."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import bubble, conversion, families
from benchmarks.apart import Apart
from benchmarks.bubble import Taken
from benchmarks.training import Ours, Theirs

from moesaic.dist.world import World
from moesaic.facts.cluster.file import resolve
from moesaic.facts.job import Job, ModelConfig
from moesaic.facts.plan import lay_out
from moesaic.facts.workload import count
from moesaic.models.hf.convert import convert
from moesaic.testing.ranks import Ranks

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
    assert max(families.differences(ours, theirs)) < families.TOLERANCE
    ours = Ours(job, World.solo())
    assert families.differences(ours, {"eager": Theirs.like(ours, "eager")})[0] < families.TOLERANCE


def test_a_contender_elsewhere_is_the_one_here() -> None:
    job = families.job_of("olmoe", 2, 16, **SMALL)
    ours = Ours(job, World.solo())
    with closing(Apart(ours, "eager")) as there:
        here = Theirs.like(ours, "eager")
        assert there.weight == here.weight
        assert there.balance() == pytest.approx(here.balance(), rel=1e-5)
        assert [there.step(), there.step()] == pytest.approx([here.step(), here.step()], rel=1e-5)


@pytest.mark.parametrize("family", families.SHAPES)
def test_nobody_measures_where_weights_differ(family: str) -> None:
    ours = Ours(families.job_of(family, 2, 16, **SMALL), World.solo())
    other = Theirs.like(ours)
    with torch.no_grad():
        other.model.lm_head.weight.mul_(1.5)
    with pytest.raises(families.Unlike, match=family):
        families.differences(ours, {"grouped_mm": other})


def test_a_balance_loss_that_transformers_has_not_is_refused() -> None:
    job = families.job_of("deepseek_v3", 2, 16, **SMALL)
    ours = Ours(weighed(job, 0.01), World.solo())
    with pytest.raises(ValueError, match=r"routing\.balance_loss = 0\.01"):
        Theirs.like(ours)


def test_who_is_done_early_waits_for_the_last() -> None:
    first = [Taken(phase_s=10.0, computing_s=8.0, alone_s=7.0)]
    last = [Taken(phase_s=8.0, computing_s=6.0, alone_s=5.0)]
    shares, costs = bubble.bubbles([first, last])
    assert shares == pytest.approx([(0.2 + 0.4) / 2])
    assert costs == pytest.approx([10.0 / 6.0])


def test_every_schedule_has_a_predicted_bubble() -> None:
    cluster = resolve({"name": "test", "hosts": [{"preset": "cpu"}]}, "test")
    for schedule in bubble.FORMS:
        job = bubble.job_of(schedule)
        plan = lay_out(job.layout, job.model, bubble.PARTS)
        assert 0 < bubble.predicted(job, plan, cluster) < 1


def test_a_round_of_pipelines(ranks: Ranks) -> None:
    """A rank computes for a part of its pipeline's time, be its stages one or two."""
    jobs = {
        name: bubble.job_of(name, hidden=64, head_dim=8, ffn=64, layers=4)
        for name in ("interleaved", "zero-bubble")
    }
    taken = ranks.run(bubble.PARTS, bubble.take_rounds, jobs, 1, 0, 0.0)
    for one in taken:
        assert one.keys() == jobs.keys()
        for (spent,) in one.values():
            assert 0 < spent.computing_s < spent.phase_s
            assert spent.alone_s > 0


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    conversion.make(tmp_path / "source", ModelConfig(**conversion.NOTHING), 20_000)
    return tmp_path / "source"


def test_the_model_has_ten_gigabytes() -> None:
    assert 10e9 < 2 * count(ModelConfig(**conversion.OLMOE)).total < 11e9


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


def test_conversions_are_measured_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversion.measure, "ROOT", tmp_path)
    monkeypatch.setattr(conversion.measure, "wait_for_quiet", lambda: True)
    rows = list(conversion.rows(1, conversion.NOTHING, 20_000))
    assert len(rows) == 7
    assert {row.name.rpartition(", ")[2] for row in rows} == {"time", "memory"}
    assert list((tmp_path / "build").iterdir()) == []


def test_a_disk_without_room_is_told(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion, "ROOM", 1e15)
    with pytest.raises(OSError, match="make room"):
        conversion.check_room(directory, directory)


def test_the_index_names_every_tensor(directory: Path) -> None:
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == conversion.Tensors(directory).files.keys()
