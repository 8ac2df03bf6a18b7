"""Recorded routing is bound to its samples and its steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from moesaic.base.errors import DataError
from moesaic.dist.world import World
from moesaic.testing.jobs import tiny_job
from moesaic.testing.runs import train_text
from moesaic.train.routing_replay import RoutingRecorder, RoutingReplay, open_recorder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": f"text {n} " * 9}) + "\n" for n in range(40)))
    return path


def losses(text: Path, out: str, resume: str | None = None, **tables: Any) -> list[float]:
    """Return the losses of a run beside `text`."""
    tables["train"] = {"batch": 4, **tables.get("train", {})}
    return train_text(World.solo(), text, text.parent / out, resume, **tables).losses


SIGMOID = {
    "family": "deepseek_v3", "kv_heads": 4, "layers": 3, "dense_layers": 1, "shared_experts": 1,
    "latent": {"kv_lora_rank": 10, "qk_rope_head_dim": 4, "v_head_dim": 6},
}  # fmt: skip


@pytest.mark.parametrize("model", [{}, SIGMOID], ids=["all layers", "but the first"])
def test_a_replay_repeats_the_run_and_goes_on_from_a_checkpoint(
    text: Path, tmp_path: Path, model: dict[str, Any]
) -> None:
    record, replay = {"record": str(tmp_path / "routes")}, {"replay": str(tmp_path / "routes")}
    model = {"vocab": 260, **model}
    first = losses(text, "first", routing=record, model=model)
    assert losses(text, "second", routing=replay, model=model) == first
    middle = str(tmp_path / "second" / "checkpoints" / "step-00000002")
    assert losses(text, "third", middle, routing=replay, model=model) == first[2:]


def test_other_samples_are_refused_before_anything_is_written(text: Path, tmp_path: Path) -> None:
    losses(text, "first", routing={"record": str(tmp_path / "routes")})
    replay = {"replay": str(tmp_path / "routes")}
    with pytest.raises(DataError, match=r"routing\.replay = .* recorded over other samples"):
        losses(text, "second", routing=replay, data={"sequence": 8})
    with text.open("a") as file:
        file.write(json.dumps({"text": "one more"}) + "\n")
    with pytest.raises(DataError, match="recorded over other samples"):
        losses(text, "second", routing=replay)
    assert not (tmp_path / "second").exists()


def test_steps_that_were_not_recorded_are_refused_at_the_start(text: Path, tmp_path: Path) -> None:
    losses(text, "first", routing={"record": str(tmp_path / "routes")})
    replay = {"replay": str(tmp_path / "routes")}
    with pytest.raises(
        DataError, match=r"no routing of 4 samples .* at step 5, but train\.steps = 6: .* = 4$"
    ):
        losses(text, "second", routing=replay, train={"steps": 6})
    assert not (tmp_path / "second").exists()


def test_files_that_are_no_recording_are_refused(text: Path, tmp_path: Path) -> None:
    place = tmp_path / "routes"
    place.mkdir()
    replay = {"replay": str(place)}
    with pytest.raises(DataError, match="holds no recorded routing"):
        losses(text, "run", routing=replay)
    part = place / "start-000-step-00000000" / "rank-0" / "part-000000.parquet"
    part.parent.mkdir(parents=True)
    pq.write_table(pa.table({"step": [1]}), part)
    with pytest.raises(DataError, match="record no routing"):
        losses(text, "run", routing=replay)
    part.write_bytes(b"PAR1 torn")
    with pytest.raises(DataError, match="cannot be read"):
        losses(text, "run", routing=replay)


def test_two_runs_do_not_mix_their_recordings(text: Path, tmp_path: Path) -> None:
    record = {"record": str(tmp_path / "routes")}
    losses(text, "first", routing=record)
    with pytest.raises(DataError, match="holds the recording of another run"):
        losses(text, "second", routing=record)
    with (
        open_recorder(tmp_path / "other", World.solo(), "digest", 0),
        pytest.raises(DataError, match=r"is in use by process \d+ on "),
    ):
        losses(text, "second", routing={"record": str(tmp_path / "other")})


def choices(expert: int, sample: int) -> dict[int, torch.Tensor]:
    del sample
    return {0: torch.full((2, 1), expert)}


def test_a_start_overrides_earlier_recordings(tmp_path: Path) -> None:
    job = tiny_job(
        model={"layers": 1, "experts": 4, "top_k": 1}, data={"sequence": 2},
        train={"steps": 4, "batch": 2},
    )  # fmt: skip

    def record(first: int, last: int, ranks: int, expert: int) -> None:
        """Record as `ranks` ranks would: one sample each, or both on one rank."""
        with open_recorder(tmp_path, World.solo(), "digest", first) as recorder:
            other = RoutingRecorder(recorder.directory.with_name("rank-1"), "digest")
            for step in range(first, last):
                for sample in range(2):
                    mine = recorder if ranks == 1 or sample == 0 else other
                    mine.record(step, torch.tensor([step * 2 + sample]), choices(expert, sample))
            recorder.flush()
            other.flush()

    record(0, 4, ranks=2, expert=1)
    RoutingReplay(tmp_path, job, "digest").check_steps(0)
    record(2, 3, ranks=1, expert=3)
    replay = RoutingReplay(tmp_path, job, "digest")
    for step, expert in ((1, 1), (2, 3)):
        found = replay.read_expert_ids(step, torch.tensor([step * 2, step * 2 + 1]))
        assert found[0].tolist() == [[expert]] * 4
    with pytest.raises(DataError, match=r"no routing of 2 samples .* at step 4"):
        replay.check_steps(0)
    with (
        pytest.raises(DataError, match="recorded over other samples"),
        open_recorder(tmp_path, World.solo(), "another", 3),
    ):
        pass
    (tmp_path / "start-000-step-00000000" / "rank-1" / "part-000000.parquet").unlink()
    with pytest.raises(DataError, match=r"no routing of 2 samples .* at step 1"):
        RoutingReplay(tmp_path, job, "digest").check_steps(0)
