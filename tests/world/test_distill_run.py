"""Runs with students: killed, resumed, and with students that join and leave."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from layouts import SIGMOID
from students import ASSISTANT, DENSE, SMALL, SPARSE

from commands import Commands
from moesaic.base.errors import ConfigError
from moesaic.base.events import read_events
from moesaic.cli.main import main
from moesaic.dist.checkpoint import Checkpoint
from moesaic.dist.world import World
from moesaic.facts.plan import Plan
from moesaic.models.hf.shards import InMemoryTensors
from moesaic.models.hf.writer import write_model
from moesaic.models.init import InitialSource
from moesaic.models.lm import LanguageModel
from moesaic.models.state import tensor_shards
from moesaic.testing.jobs import RUN_JOB, tiny_job
from moesaic.testing.ranks import RankPool
from moesaic.testing.runs import RecordingProgress, text_job, train_text
from moesaic.testing.states import read_checkpoint
from moesaic.train.assemble import assemble
from moesaic.train.job_file import LoadedJob
from moesaic.train.lm import InitialWeights, LanguageModelKind
from moesaic.train.out_checks import checkpoint_bytes
from moesaic.train.run import Run
from moesaic.train.trainer import train

JOB = f"""{RUN_JOB}
[checkpoint]
every = 2
asynchronous = false

[[student]]
name = "small"
model = {{ preset = "tiny-dense", layers = 1, hidden = 16, heads = 2, head_dim = 4, ffn = 16 }}
teacher = "assistant"
losses = {{ attention = 1.0, logits = 0.5, text = 1.0 }}

[[student]]
name = "assistant"
model = {{ preset = "tiny-olmoe", layers = 1, hidden = 16, experts = 2, top_k = 1, ffn = 8 }}
losses = {{ relations = 1.0, hidden = 0.5, text = 1.0 }}
lr = 1e-3
"""
"""Job file with two students, one the assistant of the other."""
NEW = """
[[student]]
name = "new"
model = { preset = "tiny-dense", layers = 1, hidden = 16, heads = 2, head_dim = 4, ffn = 16 }
losses = { logits = 1.0 }
"""


def train_until_killed(command: Sequence[str], update: int) -> None:
    """Train until an update kills this process."""
    take = Run._update

    def die(run: Run[Any, Any], number: int, *rest: Any) -> None:
        if number == update:
            os.kill(os.getpid(), signal.SIGKILL)
        take(run, number, *rest)

    Run._update = die  # type: ignore[method-assign]
    torch.set_num_threads(1)
    main(list(command))


def steps_of(out: Path) -> dict[int, dict[str, float]]:
    """Return the figures of each step that depend on nothing but the job; the last ones if it was
    done twice."""
    timed = ("time", "per_s", "step_s", "memory", "phases", "peak")
    return {
        event["step"]: {key: one for key, one in event.items() if not any(t in key for t in timed)}
        for event in read_events(out / "events" / "rank-0.jsonl")
        if event["event"] == "step"
    }


def checkpoint_of(out: Path, step: int) -> Path:
    return out / "checkpoints" / f"step-{step:08d}"


def assert_same_checkpoints(one: Path, other: Path) -> None:
    first, second = read_checkpoint(one), read_checkpoint(other)
    assert first.keys() == second.keys()
    assert all(np.array_equal(first[key], second[key]) for key in first)
    assert Checkpoint.open(one).counters == Checkpoint.open(other).counters


def test_a_killed_run_resumes_and_its_students_join_and_leave(
    ranks: RankPool, commands: Commands, tmp_path: Path
) -> None:
    """By `moesaic train`, on one rank."""
    ranks.run(1, len_of_world)  # Its server of forks has imported torch.
    job, straight, killed = tmp_path / "job.toml", tmp_path / "straight", tmp_path / "killed"
    text, cache = tmp_path / "text.txt", tmp_path / "cache"
    text.write_text("all happy families are alike; " * 100)
    table = JOB.replace('"text.txt"', f'"{text}"').replace('"cache"', f'"{cache}"')
    job.write_text(table)
    shown = commands.output(["train", str(job), "--out", str(straight)])
    assert 'student "assistant": ' in shown
    assert 'student "small": ' in shown
    assert re.search(r"step 4/4: loss \d\.\d+, assistant \d\.\d+, small \d\.\d+, ", shown)
    command = ["train", str(job), "--out", str(killed)]
    process = multiprocessing.get_context("forkserver").Process(
        target=train_until_killed, args=(command, 4), daemon=True
    )
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert not checkpoint_of(killed, 4).exists()
    commands.output([*command, "--resume", "auto"])
    assert steps_of(killed) == steps_of(straight)
    assert_same_checkpoints(checkpoint_of(killed, 4), checkpoint_of(straight, 4))

    general, small, _ = table.replace('teacher = "assistant"', "").split("[[student]]")
    job.write_text(f"{general}[[student]]{small}{NEW}")
    shown = commands.output([*command, "--resume", "auto", "--change", "--set", "train.steps=6"])
    assert 'the checkpoint has no student "new": it starts from initial values' in shown
    assert 'student "assistant" is no longer in the job' in shown
    names = {
        key.split(".")[1] for key in Checkpoint.open(checkpoint_of(killed, 6)).tensors
        if "/students." in key
    }  # fmt: skip
    assert names == {"small", "new"}
    last = steps_of(killed)[6]
    assert last["new/loss"] > 0
    assert "assistant/loss" not in last
    (start, *_) = read_events(killed / "events" / "rank-0.jsonl")
    assert [one["name"] for one in start["students"]] == ["small", "assistant"]


def test_an_assistant_of_an_earlier_run_is_handed_over(commands: Commands, tmp_path: Path) -> None:
    """As a frozen teacher, and as a student that goes on learning and teaches another one."""
    job, first, second = tmp_path / "job.toml", tmp_path / "first", tmp_path / "second"
    (tmp_path / "text.txt").write_text("all happy families are alike; " * 100)
    table = RUN_JOB.replace('"text.txt"', f'"{tmp_path}/text.txt"').replace(
        "steps = 4", "steps = 2"
    )
    table = table.replace('"cache"', f'"{tmp_path}/cache"')
    assistant = JOB[JOB.rindex("\nname =") :].replace("ffn = 8", "ffn = 8, head_dim = 4")
    job.write_text(f"{table}[[student]]{assistant}")
    commands.output(["train", str(job), "--out", str(first)])
    handed = str(tmp_path / "assistant")
    commands.output(["convert", str(first), "--student", "assistant", "--out", handed])

    small = JOB[JOB.index("[[student]]") : JOB.rindex("[[student]]")]
    given = f'[[student]]\nname = "assistant"\nmodel = {{ from = "{handed}" }}\n'
    sizes = table[table.index("[model]") : table.index("[data]")]
    job.write_text(
        table.replace(sizes, f'[model]\nfrom = "{handed}"\n\n[distill]\nfrozen = true\n\n')
        + f"{given}losses = {{ text = 1.0, logits = 1.0 }}\n{small}"
    )
    commands.output(["train", str(job), "--out", str(second)])
    before, after = (read_checkpoint(checkpoint_of(out, 2)) for out in (first, second))
    prefix = "parameter/students.assistant."
    exported = [key for key in before if key.startswith(prefix) and ".auxiliary." not in key]
    assert len(exported) > 5
    for key in exported:
        assert np.array_equal(after[f"parameter/{key.removeprefix(prefix)}"], before[key])
        assert not np.array_equal(after[key], before[key])
    start, _ = steps_of(second).values()
    assert start["assistant/loss"] == pytest.approx(start["loss"], rel=1e-6)
    assert abs(start["assistant/logits"]) < 1e-6 < start["small/attention"]


def len_of_world(world: World) -> int:
    return world.size


def run_students(
    world: World, text: str, out: str, students: list[dict[str, Any]], resume: str | None = None,
    changes: dict[str, Any] | None = None,
) -> list[str]:  # fmt: skip
    """Train on one rank; return its messages."""
    models = [{**one, "model": {**one["model"], "vocab": 260}} for one in students]
    tables = {"data": {"validation_share": 0.1}, **(changes or {})}
    return train_text(world, Path(text), Path(out), resume, student=models, **tables).messages


@pytest.mark.parametrize(
    ("size", "layout", "moments"),
    [(1, {}, "full"), pytest.param(2, {"ep": 2, "dp_shard": 2}, "8bit", marks=pytest.mark.soak)],
)
def test_a_resumed_run_has_the_same_bits(
    ranks: RankPool, text: Path, tmp_path: Path, size: int, layout: dict[str, Any], moments: str
) -> None:
    """Moments in few bits, an interval, and routers with a bias resume alike."""
    sizes = {**SPARSE, **SIGMOID["model"], "layers": 1, "dense_layers": 0, "experts": 8}
    biased = {"name": "biased", "model": sizes, "losses": {"logits": 1.0, "hidden": 1.0}}
    students = [{**SMALL, "interval": 3}, ASSISTANT, biased]
    changes = {
        "layout": layout, "optimizer": {"moments": moments}, "train": {"precision": "bf16"},
        "routing": SIGMOID["routing"],
    }  # fmt: skip
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    arguments = (students, None, changes)
    (messages, *_) = ranks.run(size, run_students, str(text), str(straight), *arguments)
    assert any("validation loss" in message and ", small " in message for message in messages)
    middle = str(checkpoint_of(straight, 2))
    ranks.run(size, run_students, str(text), str(resumed), students, middle, changes)
    assert_same_checkpoints(checkpoint_of(resumed, 4), checkpoint_of(straight, 4))
    state = read_checkpoint(checkpoint_of(straight, 4))
    assert state["parameter/students.biased.layers.0.moe.router.bias"].any()


def test_models_that_stay_keep_their_bits_when_others_join_and_leave(
    text: Path, tmp_path: Path
) -> None:
    """Then the teacher is frozen."""
    solo, plain = World.solo(), {"name": "plain", "model": DENSE}
    straight, joined, frozen = (tmp_path / name for name in ("straight", "joined", "frozen"))
    run_students(solo, str(text), str(straight), [plain, ASSISTANT])
    middle = str(checkpoint_of(straight, 2))
    run_students(solo, str(text), str(joined), [SMALL | {"teacher": "plain"}, plain], middle)
    first, second = (read_checkpoint(checkpoint_of(out, 4)) for out in (straight, joined))
    stay = {key for key in first if ".assistant." not in key}
    assert stay == {key for key in second if ".small." not in key}
    assert all(np.array_equal(first[key], second[key]) for key in stay)

    changes = {"distill": {"frozen": True}}
    run_students(solo, str(text), str(frozen), [plain], middle, changes)
    before, after = read_checkpoint(Path(middle)), read_checkpoint(checkpoint_of(frozen, 4))
    teacher = [key for key in after if "/students." not in key]
    assert all(key.startswith("parameter/") for key in teacher)
    assert all(np.array_equal(before[key], after[key]) for key in teacher)


def test_figures_of_a_step_are_its_own(text: Path, tmp_path: Path) -> None:
    """A frozen teacher runs in one of three steps; the checkpoint is as large as predicted."""
    student = {
        "name": "small", "model": {**DENSE, "vocab": 260}, "interval": 3,
        "losses": {"text": 1.0, "logits": 1.0, "attention": 1.0},
    }  # fmt: skip
    job = text_job(
        text, student=[student], distill={"frozen": True}, data={"validation_share": 0.1},
        train={"steps": 3, "validate_every": 1},
    )  # fmt: skip
    seen, out = list[dict[str, float]](), tmp_path / "run"
    last = train(
        LoadedJob(job, "", []), out, None, World.solo(), RecordingProgress(), LanguageModelKind(),
        on_step=lambda figures: seen.append(figures),
    )  # fmt: skip
    logged = [one for one in read_events(out / "events/rank-0.jsonl") if one["event"] == "step"]
    for figures, event in zip(seen, logged, strict=True):
        own = {name for name in figures if not name.startswith("validation_")}
        assert own == event.keys() - {"event", "time", "phases"}
    for name in ("loss", "small/logits", "small/attention"):
        assert [name in figures for figures in (*seen, last)] == [True, False, False, False]
    assert ["validation_loss" in figures for figures in seen] == [False, True, True]
    saved = sum(one.nbytes for one in read_checkpoint(checkpoint_of(out, 3)).values())
    assert checkpoint_bytes(job) == pytest.approx(saved, rel=0.01)


def test_a_resume_leaves_an_auxiliary_layer_out(text: Path, tmp_path: Path) -> None:
    before = {"name": "small", "model": DENSE, "losses": {"relations": 1.0}}
    frozen = {"distill": {"frozen": True}, "train": {"steps": 2}}
    out = str(tmp_path / "run")
    run_students(World.solo(), str(text), out, [before], None, frozen)
    more = frozen | {"train": {"steps": 3}}
    after = before | {"auxiliary_layer": False}
    run_students(World.solo(), str(text), out, [after], "auto", more)
    assert not any(".auxiliary." in key for key in read_checkpoint(checkpoint_of(Path(out), 3)))


@pytest.mark.parametrize(
    ("student", "changes", "words"),
    [
        ({"model": {**DENSE, "ffn": 28}}, {}, "student.small.model.ffn = 20, the job has 28"),
        ({"auxiliary_layer": True}, {}, "student.small.auxiliary_layer = false"),
        (
            {"losses": {"relations": 1.0, "hidden": 1.0}},
            {},
            r'auxiliary.projection.weight \[32, 16\] of student "small", which its losses or',
        ),
        ({}, {"distill": {"frozen": False}}, "distill.frozen = true, the job has false"),
    ],
)
def test_a_resume_refuses_state_that_it_lacks(
    text: Path, tmp_path: Path, student: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    before = {
        "name": "small", "model": DENSE, "losses": {"relations": 1.0}, "auxiliary_layer": False,
    }  # fmt: skip
    frozen = {"distill": {"frozen": True}, "train": {"steps": 2}}
    out = str(tmp_path / "run")
    run_students(World.solo(), str(text), out, [before], None, frozen)
    more = frozen | {"train": {"steps": 3}} | changes
    with pytest.raises(ConfigError, match=words):
        run_students(World.solo(), str(text), out, [before | student], "auto", more)


def test_a_student_starts_from_a_directory(tmp_path: Path) -> None:
    job = tiny_job(student=[{**SMALL, "teacher": "model"}])
    config = job.student[0].model
    model = LanguageModel(config)
    InitialSource(5, 0.3).fill(tensor_shards(model))
    write_model(tmp_path / "hf", config, InMemoryTensors(tensor_shards(model)))
    started = job.student[0].model_copy(update={"source": str(tmp_path / "hf")})
    source = InitialWeights(job.model_copy(update={"student": [started]}))
    run = assemble(job, Plan.data_parallel(1), World.solo(), source)
    student = run.parts[1]
    for name, parameter in model.named_parameters():
        found = dict(student.model.named_parameters())[name]
        torch.testing.assert_close(found, parameter.to(found.dtype), rtol=0, atol=0)
    (auxiliary,) = (item for item in student.trainable if item.name == "auxiliary.layer.q.weight")
    assert 0.1 < auxiliary.parameter.std() < 0.3
    run.close()
