"""One small run through every verb, in one process."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from commands import Commands
from moesaic.api import progress
from moesaic.api.engine import Engine
from moesaic.base.config import parse
from moesaic.base.events import read_events
from moesaic.cli.main import main
from moesaic.dist.checkpoint import Checkpoint
from moesaic.facts.job import Job
from moesaic.models.hf.settings import ConvertConfig
from moesaic.models.hf.writer import SHARD_BYTES
from moesaic.models.tokenizer import open_tokenizer
from moesaic.testing.jobs import RUN_JOB
from moesaic.train import loss_scale

JOB = RUN_JOB.replace("text.txt", "text")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("cli")
    (place / "text").mkdir()
    for number in range(4):
        (place / "text" / f"{number}.txt").write_text(f"Document {number}: " + "words " * 30)
    (place / "job.toml").write_text(JOB)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        assert main(["train", "job.toml", "--out", "run", "--set", "checkpoint.every=2"]) == 0
        assert main(["convert", "run", "--out", "hf"]) == 0
    return place


@pytest.fixture(autouse=True)
def _chdir(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)


def test_a_run_writes_its_files() -> None:
    job = parse(Job, json.loads(Path("run/job.json").read_text()), "job.json")
    assert job.checkpoint.every == 2
    assert Path("run/job.toml").read_text() == f"{JOB.rstrip()}\n\n# --set checkpoint.every=2\n"
    steps = [event["step"] for event in read_events(Path("run/events/rank-0.jsonl"))
             if event["event"] == "step"]  # fmt: skip
    assert steps == [1, 2, 3, 4]
    assert "<html" in Path("run/report.html").read_text()[:500].lower()
    assert json.loads(Path("run/versions.json").read_text())["moesaic"]


def test_training_prints_a_summary(commands: Commands) -> None:
    text = commands.output("train job.toml --out fresh --set train.steps=2")
    assert "step 2/2: loss " in text
    assert "trained 2 steps in " in text
    assert "  checkpoint  fresh/checkpoints/step-00000002\n" in text
    assert "  report      fresh/report.html\n" in text
    assert '  next        moesaic generate fresh --prompt "..."\n' in text


def test_a_run_prints_few_lines(commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many steps, validations and messages it has; `--verbose` shows them all."""
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    sets = ["train.steps=30", "train.validate_every=1", "data.validation_share=0.3"]
    flags = [f"--set={one}" for one in sets]
    lines = commands.output("train job.toml --out few", *flags).splitlines()
    assert len(lines) <= 25
    assert sum(line.startswith("step ") for line in lines) in range(5, 11)
    assert ", validation " in lines[3]
    many = commands.output("train job.toml --out many --verbose", *flags)
    assert many.count(": validation loss ") == 30
    assert "step 30: validation loss" not in "".join(lines)


def test_training_chooses_a_directory_and_prints_json(commands: Commands) -> None:
    facts = commands.facts("train job.toml --set train.steps=1")
    out = Path(facts["directory"])
    assert out.parent == Path("runs")
    assert out.name.startswith("job-")
    assert (facts["status"], facts["step"]) == ("finished", 1)
    assert Path(facts["report"]).is_file()


FP16 = ("--set", "train.precision=fp16")


def test_skipped_steps_are_reported(commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_scale, "INITIAL_EXPONENT", 30)
    facts = commands.facts("train job.toml --out over --set train.steps=20", *FP16)
    skipped = facts["skipped"]
    assert 1 < skipped < 20
    text = commands.output("train job.toml --out over2 --set train.steps=20", *FP16)
    assert f", {skipped} of 20 steps skipped because fp16 overflowed: loss " in text
    line = f"train job.toml --out none --set train.steps={skipped}".split()
    words = (
        f"error: all {skipped} steps were skipped because fp16 overflowed, so nothing was learnt. "
        f"The loss scale ({2 ** (31 - skipped):g} in the last step) halves"
    )
    captured = commands.run(line, *FP16, status=2)
    assert captured.err.splitlines()[-1].startswith(words)
    assert f", {skipped} of {skipped} steps skipped because fp16" in captured.out
    assert Path("none/report.html").exists()
    more = f"train --out none --resume --change --set train.steps={skipped + 1}"
    facts = commands.facts(more)
    assert facts["skipped"] == skipped
    captured = commands.run([*line[:3], "none2", *line[4:]], "--json", *FP16, status=2)
    assert json.loads(captured.out)["skipped"] == skipped
    assert words in captured.err


def test_a_nan_loss_in_fp16_ends_the_run(commands: Commands) -> None:
    line = ["train", "job.toml", "--out", "nan", "--set", "model.init_std=30.0", *FP16]
    errors = commands.run(line, status=2).err.splitlines()[-1]
    assert errors.startswith(
        "error: the loss diverged (NaN or infinite) at step 1. Step 1: the gradient's norm is nan "
        "as the loss is nan, for which "
    )
    assert 'set train.precision = "bf16" or "fp32". Likely cause: ' in errors
    assert "start anew with --out NEW --set optimizer.lr=" in errors


def test_a_run_is_resumed(commands: Commands) -> None:
    commands.output("train job.toml --out resumed --set train.steps=2")
    line = "train job.toml --out resumed"
    more = "--change --set train.steps=4"
    text = commands.output(f"{line} --resume {more}")
    assert "resuming from resumed/checkpoints/step-00000002" in text
    path = "resumed/checkpoints/step-00000002"
    commands.output(f"train job.toml --resume {path} {more}")
    commands.output(f"train job.toml --resume {path} --out branched {more}")
    assert sorted(p.name for p in Path("branched/checkpoints").iterdir()) == ["step-00000004"]
    events = list(read_events(Path("resumed/events/rank-0.jsonl")))
    starts = [event for event in events if event["event"] == "run_start"]
    assert [event["step"] for event in starts] == [1, 3, 3]
    (machine,) = starts[-1]["rank_hosts"]
    assert machine == {"host": 0, "kind": "cpu", "threads": torch.get_num_threads()}

    before = Path("branched/job.json").read_bytes()
    for wrong, words in (
        (
            f"{line} --resume --change --set train.steps=9 --set seed=3",
            "on other samples (seed = 3, was 0)",
        ),
        (f"train job.toml --resume {path} --out branched", "already holds a run"),
        (f"{line} --resume --change --set train.steps=3", "train.steps = 3"),
    ):
        assert words in commands.run(wrong, status=2).err
    assert Path("branched/job.json").read_bytes() == before


def test_a_resumed_run_keeps_its_settings(commands: Commands) -> None:
    """Neither the job file nor --set need be repeated; learning changes need --change."""
    began = "train job.toml --out kept --set train.steps=2 --set schedule.kind=linear"
    commands.output(f"{began} --set checkpoint.every=1")
    line, path = "train --out kept --resume", Path("kept/job.json")
    before = path.read_bytes()
    words = "resume: train.steps = 3, was 2: this changes what 'kept' learns; add --change"
    assert words in commands.refusal(f"{line} --set train.steps=3")
    Path("edited.toml").write_text(f"{JOB}\n[optimizer]\nlr = 0.01\n")
    text = commands.refusal("train edited.toml --out kept --resume")
    assert "resume: optimizer.lr = 0.01, was 0.0003: this changes" in text
    assert (
        "--change (change=True in Python) is for a run to resume: add --resume"
        in commands.refusal("train job.toml --change --out new")
    )
    assert path.read_bytes() == before

    text = commands.output(f"{line} --change --set train.steps=3 --set log.loads_every=2")
    assert "changed since the checkpoint: train.steps = 3, was 2\n" in text
    assert "changed since the checkpoint: log.loads_every = 2, was 1\n" in text
    assert text.count("changed since") == 2
    text = commands.output("train edited.toml --out kept --resume --change --set train.steps=4")
    assert "optimizer.lr = 0.01, was 0.0003" in text
    assert text.count("changed since") == 2
    job = parse(Job, json.loads(path.read_text()), "job.json")
    assert (job.schedule.kind, job.train.steps, job.checkpoint.every) == ("linear", 4, 1)
    assert (
        Path("kept/job.toml")
        .read_text()
        .endswith(
            "lr = 0.01\n\n# --set schedule.kind=linear\n# --set checkpoint.every=1\n"
            "# --set log.loads_every=2\n# --set train.steps=4\n"
        )
    )


def test_a_resume_that_saved_nothing_leaves_the_settings_of_the_checkpoint(
    commands: Commands,
) -> None:
    commands.output("train job.toml --out calm --set train.steps=2")
    line = "train --out calm --resume --change --set train.steps=6"
    commands.run(f"{line} --set optimizer.lr=1e300 --set layout.dispatch=dedup", status=2)
    assert json.loads(Path("calm/job.json").read_text())["optimizer"]["lr"] == 1e300
    again = commands.run(f"{line} --set optimizer.lr=1e300 --set layout.dispatch=dedup --dry-run")
    assert "saved nothing" not in again.err
    captured = commands.run(line)
    words = (
        "warning: the last start of 'calm' saved nothing, and a resume goes on with the settings "
        "of 'calm/checkpoints/step-00000002', so without the last start's "
    )
    assert captured.err.startswith(words)
    assert "optimizer.lr = 1e+300" in captured.err
    assert captured.out.count("changed since the checkpoint") == 1
    job = parse(Job, json.loads(Path("calm/job.json").read_text()), "job.json")
    assert (job.optimizer.lr, job.layout.dispatch, job.train.steps) == (0.0003, "auto", 6)
    assert "1e300" not in Path("calm/job.toml").read_text()
    more = "train --out calm --resume --change --set train.steps=7 --dry-run"
    assert commands.run(more).err == ""
    refused = commands.refusal(more.replace("=7", "=6"))
    assert "has done 6 steps already: to train on, set train.steps above 6 and add --ch" in refused
    constant = commands.refusal(f"{more.replace('=7', '=5')} --set schedule.kind=constant")
    assert constant.startswith("error: train.steps = 5 counts from the start of the run, and 'calm")
    assert constant.endswith("set train.steps above 6\n")


def test_an_edited_plan_of_a_run_is_noticed(commands: Commands) -> None:
    commands.output("train job.toml --out planned --set train.steps=2")
    path = Path("planned/plan.json")
    edited = json.dumps({**json.loads(path.read_text()), "recompute": True})
    path.write_text(edited)
    line = "train --out planned --resume --change --set train.steps=3"
    captured = commands.run(line)
    assert captured.err == (
        "warning: 'planned/plan.json' was edited after the start, and a resume goes on with the "
        "settings of 'planned/checkpoints/step-00000002': to take the edits, give --plan "
        "planned/plan.json\n"
    )
    assert json.loads(path.read_text())["recompute"] is False
    path.write_text(edited)
    captured = commands.run(f"{line.replace('=3', '=4')} --plan planned/plan.json")
    assert captured.err == ""
    assert json.loads(path.read_text())["recompute"] is True


def test_a_run_goes_on_with_other_data_if_the_user_says_so(commands: Commands) -> None:
    """A text that grew begins anew; the next resume takes it for the run's own."""
    Path("growing.txt").write_text("few words " * 20)
    began = "train job.toml --out grown --set train.steps=2 --set schedule.kind=constant"
    commands.output(f"{began} --set data.path=growing.txt")
    with Path("growing.txt").open("a") as file:
        file.write("and many more words " * 30)
    line = "train --out grown --resume --set train.steps=3"
    refused = commands.run(f"{line} --change --set seed=1", status=2)
    assert "(seed = 1, was 0): restore them, or start a new run" in refused.err
    refused = commands.run(line, status=2)
    assert (
        "was trained on other samples (the files of its text have changed): restore them, or add "
        "--change (change=True in Python) to go on with the new ones from their first sample\n"
    ) in refused.err
    text = commands.output(f"{line} --change")
    assert "other data since the checkpoint: step 3 begins with their first sample\n" in text
    new = Checkpoint.open(Path("grown/checkpoints/step-00000003"))
    assert new.counters["samples"] == 4
    text = commands.output("train --out grown --resume --set train.steps=4")
    assert "other data" not in text
    assert Checkpoint.open(Path("grown/checkpoints/step-00000004")).counters["samples"] == 8


@pytest.mark.parametrize("key", ["data.path", "data.validation_path"])
def test_a_relative_path_is_missed_with_the_directory_of_the_start(
    commands: Commands, monkeypatch: pytest.MonkeyPatch, place: Path, key: str
) -> None:
    Path("moved.txt").write_text("few words " * 20)
    out = f"at-{key}"
    sets = [f"--set={key}=moved.txt", f"--set=data.path={place / 'text'}"]
    sets = sets[: 1 + (key != "data.path")]
    commands.output(f"train job.toml --out {out} --set train.steps=1", *sets)
    (place / "elsewhere").mkdir(exist_ok=True)
    monkeypatch.chdir(place / "elsewhere")
    line = f"train --out {place / out} --resume --change --set train.steps=2"
    refused = commands.refusal(line)
    assert f"{key} = 'moved.txt' does not exist" in refused
    where = "'moved.txt' is relative to the current directory, and the run was started in"
    remedy = f"--set {key}={place / 'moved.txt'}"
    assert refused.endswith(f"; {where} '{place}': resume it there, or with {remedy}\n")
    for added in ("log.wandb=proj", "data.tokenizer=nope"):
        refused = commands.refusal(line, *f"{remedy} --set {added}".split())
        assert "is relative to" not in refused
    assert "trained 2 steps" in commands.output(f"{line} {remedy}")


def test_a_run_that_failed_before_its_first_checkpoint_starts_anew(commands: Commands) -> None:
    diverging = "train job.toml --out failed --set optimizer.lr=1e300"
    captured = commands.run(diverging, status=2)
    assert "error: the loss diverged (NaN or infinite) at step 2. Step 2: " in captured.err
    assert captured.out.endswith("  report      failed/report.html\n")
    assert commands.facts("report failed")["status"] == "diverged"
    text = commands.output("train --out failed --resume --set optimizer.lr=0.001")
    assert text.startswith(
        "'failed' held a run without a checkpoint: kept as 'failed/failed-1', and starting anew\n"
    )
    assert commands.facts("report failed")["status"] == "finished"
    (finding, *_) = commands.facts("report failed/failed-1")["findings"]
    assert (finding["kind"], finding["severity"]) == ("diverged", "problem")
    assert "already holds a run" in commands.refusal("train job.toml --out failed")
    commands.run(diverging.replace("--out failed", "--out twice"), status=2)
    assert (
        "kept as 'twice/failed-1'"
        in commands.run(diverging.replace("--out failed", "--out twice"), status=2).out
    )
    assert "kept as 'twice/failed-2'" in commands.output("train job.toml --out twice")


def test_going_back_to_fewer_ranks_is_told(commands: Commands) -> None:
    commands.output("train job.toml --out more --set train.steps=2")
    commands.output("train --out more --resume --nproc 2 --change --set train.steps=3")
    line = "train --resume more/checkpoints/step-00000002 --change --set train.steps=3 --dry-run"
    captured = commands.run(line)
    assert "1 rank holds everything" in captured.out
    assert "so without the last start's " in captured.err  # Also of the layout that it chose.
    assert captured.err.endswith("2 ranks (--nproc 2): give what you want to keep again\n")
    assert "2 ranks" not in commands.run(f"{line} --nproc 2").err


def test_one_command_starts_and_resumes_a_run(commands: Commands) -> None:
    """As a scheduler repeats it."""
    line = "train job.toml --out again --resume --set train.steps=2"
    words = "'again' has no checkpoint to resume from: starting a new run"
    assert words in commands.run(f"{line} --dry-run").err
    assert not Path("again").exists()
    assert commands.run(line).err == f"warning: {words}\n"
    captured = commands.run(f"{line.replace('=2', '=3')} --change")
    assert "resuming from again/checkpoints/step-00000002" in captured.out
    assert captured.err == ""


def test_a_diverged_run_ends_with_its_step_and_cause(commands: Commands) -> None:
    """The loss stays finite, so that training itself sees no error."""
    sets = ["--set", "train.steps=20", "--set", "optimizer.lr=10"]
    captured = commands.run("train job.toml --out high --set checkpoint.every=1", *sets, status=2)
    last = captured.err.splitlines()[-1]
    assert last.startswith("error: the loss diverged from step ")
    assert "Likely cause: optimizer.lr = 10 is far above the usual" in last
    assert "moesaic generate" not in captured.out
    facts = commands.facts("report high")
    assert (facts["status"], facts["findings"][0]["kind"]) == ("diverged", "diverged")
    assert '<span class="pill diverged">' in Path("high/report.html").read_text()


def test_a_diverged_resume_goes_back_by_the_command_that_it_names(commands: Commands) -> None:
    """The checkpoint from before the divergence stays, though newer ones are as many as `keep`."""
    commands.output("train job.toml --out rising --set train.steps=12 --set optimizer.lr=0.003")
    more = "--set train.steps=24 --set optimizer.lr=5 --set checkpoint.every=1"
    captured = commands.run(f"train --out rising --resume --change {more}", status=2)
    names = sorted(path.name for path in Path("rising/checkpoints").glob("step-*"))
    assert names == [f"step-{step:08d}" for step in (12, 22, 23, 24)]
    captured = commands.run("train --out rising --resume --change --set train.steps=26", status=2)
    names = sorted(path.name for path in Path("rising/checkpoints").glob("step-*"))
    assert names == [f"step-{step:08d}" for step in (12, 24, 25, 26)]
    command = re.search(r"Go back to step 12: moesaic (.*)\n", captured.err)
    assert command is not None
    back = "--resume rising/checkpoints/step-00000012"
    worked = r"--set optimizer\.lr=0\.00(29\d*|3) --set train\.steps=26"
    assert re.fullmatch(f"train {back} --change {worked}", command[1])
    (line, *_, last) = commands.output("report rising").splitlines()
    assert line.endswith(command[1])
    assert last == "wrote rising/report.html"
    refused = commands.refusal(f"train {back} --set train.steps=14 --set data.path=other.txt")
    assert f"to go on as before (moesaic train {back} needs no job file)" in refused
    assert 'train.steps = 14, was 12; data.path = "other.txt", was "text": this ch' in refused
    plain = commands.run(f"train --out branch {back} --change --set train.steps=14")
    (warning,) = plain.err.splitlines()  # The checkpoint's own job goes on.
    assert warning.startswith(
        "warning: a resume goes on with the settings of 'rising/checkpoints/step-00000012', so "
        "without the last start's "
    )
    assert "optimizer.lr = 5" in warning
    assert "train.steps" not in warning  # It is given.
    text = commands.output(f"train {back} --dry-run --verbose --change --set train.steps=14")
    assert "# job of 'rising/checkpoints/step-00000012', resolved\n" in text
    assert json.loads(Path("branch/job.json").read_text())["optimizer"]["lr"] == 0.003
    text = commands.output(command[1])
    assert "going back to step-00000012" in text
    assert re.search(r"\ntrained 26 steps in [\d:]+( s)? over 4 starts: ", text)
    gone = commands.refusal("train --resume rising/checkpoints/step-00000007")
    assert "does not exist: checkpoint.keep limits how many stay, and 'rising/checkp" in gone


def test_an_update_that_ruins_the_weights_is_undone(commands: Commands) -> None:
    """The checkpoint of its step is whole, but the next step fails from it."""
    sets = "--set train.steps=12 --set checkpoint.every=1 --set schedule.warmup=0"
    commands.output("train job.toml --out ruined --set train.steps=4", "--set=checkpoint.every=1")
    more = f"train --out ruined --resume --change {sets} --set optimizer.lr=1e30"
    captured = commands.run(more, status=2)
    assert "error: the loss diverged (NaN or infinite) at step 6. Step 6: the " in captured.err
    assert Path("ruined/checkpoints/step-00000005/COMMIT").is_file()  # Its save was in progress.
    (finding, *_) = commands.facts("report ruined")["findings"]
    words = "Go back to step 4: moesaic train --resume ruined/checkpoints/step-00000004 --change"
    assert words in finding["text"]
    assert words in captured.err
    away = more.replace("ruined --resume", "away --resume ruined/checkpoints/step-00000004")
    away = away.replace("checkpoint.every=1", "checkpoint.every=0")
    captured = commands.run(away, status=2)
    (finding, *_) = commands.facts("report away")["findings"]
    command = re.search(r"Go back to step 4: moesaic (.*)$", finding["text"])
    assert command is not None
    text = commands.output(command[1].replace("lr=0.001", "lr=1e-4"))
    assert "trained steps 5 to 12 in " in text


@pytest.mark.parametrize(
    ("kept", "other"), [("fp32", "bf16"), ("fp32", "fp16"), ("fp32", "fp64"), ("fp64", "bf16")]
)
def test_a_run_is_resumed_in_a_precision_with_equal_weights(
    kept: str, other: str, commands: Commands
) -> None:
    out, refused = f"{kept}-to-{other}", "fp64" in (kept, other)
    commands.output("train job.toml --out", out, "--set", f"train.precision={kept}")
    more = ["--out", out, "--resume", "--change", "--set", "train.steps=5"]
    more += ["--set", f"train.precision={other}"]
    captured = commands.run("train job.toml", *more, status=2 if refused else 0)
    changed = f'changed since the checkpoint: train.precision = "{other}", was "{kept}"'
    assert (changed in captured.out) == (not refused)
    if refused:
        assert (
            f'step-00000004\' was trained with train.precision = "{kept}", the job has "{other}": '
            "restore it, or start a new run from its weights (moesaic convert, then [model] from)\n"
        ) in captured.err


def test_text_is_generated_from_any_form(commands: Commands) -> None:
    tokens = []
    for model in ("run", "run/checkpoints/step-00000004", "hf"):
        more = ["--prompt", "Document", "--set", "temperature=0", "--set", "max_tokens=5"]
        (row,) = commands.facts(f"generate {model}", *more)
        assert row["prompt_tokens"] == list(b"Document")
        tokens.append(row["tokens"])
    assert tokens[0] == tokens[1] == tokens[2]
    assert 1 <= len(tokens[0]) <= 5


def test_text_streams_and_sampling_repeats(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = ["--set", "max_tokens=12", "--set", "temperature=5"]
    (row,) = commands.facts("generate run --prompt Doc", *sets)
    assert commands.output("generate run --prompt Doc", *sets) == row["text"] + "\n"
    monkeypatch.setattr("sys.stdin", io.StringIO("Doc\n"))
    assert commands.output("generate run", *sets) == row["text"] + "\n"
    (other,) = commands.facts("generate run --prompt Doc --set seed=1", *sets)
    assert other["tokens"] != row["tokens"]


def test_an_interrupted_text_ends_its_line(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> Iterator[str]:
        yield "half a sen"
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "stream", interrupted)
    captured = commands.run("generate run --prompt Doc", status=130)
    assert captured == ("half a sen\n", "interrupted\n")


def test_end_tokens_can_be_ignored(commands: Commands) -> None:
    line = "generate run --prompt Doc --set temperature=0 --set max_tokens=5 --set"
    end = f"logit_bias.{open_tokenizer('bytes').end_id}=100"
    (row,) = commands.facts(f"{line} {end}")
    assert (len(row["tokens"]), row["finish_reason"]) == (1, "stop")
    (row,) = commands.facts(f"{line} {end} --set ignore_eos=true")
    assert (len(row["tokens"]), row["finish_reason"]) == (5, "length")


def test_several_prompts(commands: Commands) -> None:
    line = "generate run --prompt One --prompt Two --set max_tokens=3"
    text = commands.output(line)
    assert [part for part in text.splitlines() if part.startswith("---")] == ["--- One", "--- Two"]
    assert [row["prompt"] for row in commands.facts(line)] == ["One", "Two"]


def test_generation_refuses_wrong_settings(commands: Commands) -> None:
    for item, words in (
        ("max_tokens=5000", "max_tokens = 5000 exceed the model's 4096 positions"),
        ("device=tpu", "device = 'tpu' is not a device"),
        ("tokenizer=nowhere", 'tokenizer = "nowhere" does not exist'),
    ):
        assert words in commands.refusal(f"generate run --prompt Doc --set {item}")
    assert 'prompt "" has no tokens' in commands.refusal("generate run --prompt", "")


def test_a_model_is_converted(commands: Commands) -> None:
    assert json.loads(Path("hf/config.json").read_text())["model_type"] == "olmoe"
    facts = commands.facts("convert run --out narrow --set dtype=bf16")
    assert facts["from"] == "run/checkpoints/step-00000004"
    assert facts["bytes"] < sum(path.stat().st_size for path in Path("hf").iterdir())
    assert "wrote back from hf" in commands.output("convert hf --out back --set to=checkpoint")
    assert commands.facts("inspect back")["kind"] == "checkpoint"
    assert commands.output("convert hf --out pieces --packed").endswith("packed\n")
    assert "experts" in commands.output("inspect pieces")
    assert ConvertConfig().max_shard_bytes == SHARD_BYTES


def test_a_directory_is_inspected(commands: Commands) -> None:
    facts = commands.facts("inspect run --verify")
    assert (facts["kind"], facts["status"], facts["step"]) == ("run", "finished", 4)
    assert [row["step"] for row in facts["checkpoints"]] == [4, 2]
    assert all(row["verified"] for row in facts["checkpoints"])

    facts = commands.facts("inspect run/checkpoints/step-00000002")
    assert (facts["kind"], facts["step"], facts["verified"]) == ("checkpoint", 2, False)
    assert facts["tensor_kinds"] == ["first_moment", "parameter", "second_moment"]

    facts = commands.facts("inspect hf")
    assert (facts["kind"], facts["dtypes"]) == ("Hugging Face model", ["F32"])

    for target in ("run", "run/checkpoints/step-00000002", "hf"):
        text = commands.output(f"inspect {target}")
        assert text.startswith(f"{target}: ")
        assert "parameters total" in text


def test_damage_is_found(commands: Commands) -> None:
    commands.output("train job.toml --out hurt --set train.steps=2 --set checkpoint.every=1")
    victim = next(Path("hurt/checkpoints/step-00000001").glob("*.safetensors"))
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(data)
    commands.run("inspect hurt")
    captured = commands.run("inspect hurt --verify", status=2)
    assert victim.name in captured.err
    assert "step 2" in captured.out
    line = "generate hurt/checkpoints/step-00000001 --prompt x"
    assert victim.name in commands.run(line, status=2).err


def test_runs_are_reported(commands: Commands) -> None:
    Path("run/report.html").unlink()
    assert commands.facts("report run")["step"] == 4
    assert not Path("run/report.html").exists()
    assert commands.output("report run") == "wrote run/report.html\n"
    assert commands.output("report run --out page.html") == "wrote page.html\n"
    assert Path("page.html").stat().st_size > 1000


def test_from_fine_tunes(commands: Commands) -> None:
    job = JOB.partition("[data]")
    Path("tune.toml").write_text('[model]\nfrom = "hf"\n\n' + job[1] + job[2])
    facts = commands.facts("train tune.toml --out tuned --set train.steps=1")
    base = commands.facts("report run")
    assert facts["first_loss"] < base["first_loss"]
    assert json.loads(Path("tuned/job.json").read_text())["source"] == str(Path("hf").resolve())
