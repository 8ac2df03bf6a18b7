"""User errors: one sentence, exit status 2, and no files written."""

from __future__ import annotations

from pathlib import Path

import pytest

from commands import Commands
from moesaic.api import launch
from moesaic.cli.main import main
from moesaic.testing.jobs import RUN_JOB


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", None)
    (tmp_path / "text.txt").write_text("some text, and more of it, for a sample or two")
    (tmp_path / "job.toml").write_text(RUN_JOB.replace("layers = 1", "layers = 2"))
    (tmp_path / "old" / "checkpoints" / "step-00000002").mkdir(parents=True)
    (tmp_path / "old" / "job.json").write_text("{}")
    (tmp_path / "young").mkdir()
    (tmp_path / "young" / "job.json").write_text("{}")
    (tmp_path / "file").write_text("a file")
    (tmp_path / "empty").write_text("")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    return tmp_path


def written(place: Path) -> set[Path]:
    return set(place.rglob("*"))


TRAIN = [
    ("train.stepz=5", "unknown key 'train.stepz': did you mean 'train.steps'?"),
    ("train.device=gpu", "train.device = 'gpu' is not a device"),
    ("layout.ep=3", "layout.ep = 3 does not divide model.experts = 16"),
    ("model.preset=tiny", 'model.preset = "tiny" is not known'),
    ("model.from=old", 'model.from = "old" holds no config.json'),
    ("model.vocab=100", "model.vocab = 100 is less than the 257 ids"),
    ("routing.replay=no.parquet", 'routing.replay = "no.parquet" does not exist'),
    ("data.path=nowhere", "data.path = 'nowhere' does not exist"),
    ("data.path=*.jsonl", "data.path = '*.jsonl' matches no file"),
    ("data.tokenizer=nowhere", 'data.tokenizer = "nowhere" does not exist'),
    ("data.tokenizer=file", "'file' is not a tokenizer"),
    ("data.path=/dev/null", "data.path = '/dev/null' is neither a file nor a directory"),
    (f"train.steps={'9' * 5000}", "train.steps = "),
    ("control.topic=subject", 'control.topic = "subject" is a column, and data.path = "'),
    ("log.mlflow=mine", 'log.mlflow = "mine" needs the package mlflow'),
    ("nonsense", "'nonsense' is not of the form key.path=value"),
]


@pytest.mark.parametrize(("item", "words"), TRAIN, ids=[item for item, _ in TRAIN])
def test_a_wrong_job(item: str, words: str, place: Path, commands: Commands) -> None:
    before = written(place)
    text = commands.refusal(["train", "job.toml", "--set", item, "--out", "run"])
    assert words in text
    assert not text.startswith("error: job.toml: ")
    assert written(place) == before


def test_a_mistake_in_a_set_names_it(commands: Commands) -> None:
    for item in ("data.path=nowhere", "model.from=old", "model.preset=tiny"):
        assert commands.refusal(["train", "job.toml", "--set", item]).startswith(f"error: {item}: ")


def test_training_asks_for_all_tables_at_once(place: Path, commands: Commands) -> None:
    (place / "job.toml").write_text('[model]\npreset = "tiny-olmoe"\n')
    for line in ("train job.toml", "inspect job.toml", "plan job.toml --cluster cpu"):
        text = commands.run(line, status=2).err
        assert ("data is missing: add [data] with path and sequence" in text) == (
            "plan" not in line
        )
        assert "train is missing: add [train] with steps and batch" in text


VERBS = [
    ("train", "JOB.toml is missing"),
    ("train no.toml", "'no.toml' cannot be read (No such file"),
    (
        "train old",
        "'old' is a run and no job file: to continue it, moesaic train --out old --resum",
    ),
    ("train old/checkpoints", "'old/checkpoints' cannot be read (Is a directory"),
    (
        "train job.toml --set train.batch=8 --set train.batch=7 --set train.micro_batches=2",
        "error: job.toml with train.batch=7 and train.micro_batches=2: train.batch = 7 is not div",
    ),
    ("train job.toml --nproc 0", "error: nproc = 0: give a number from 1"),
    ("train job.toml --set nproc=4", "error: nproc=4: unknown key 'nproc': give the number of"),
    ("train nproc.toml", "error: 'nproc.toml' cannot be read"),
    ("train job.toml --nproc two", "invalid value for '--nproc': Input should be a valid integer"),
    (
        "train job.toml --nproc 3 --set layout.ep=2",
        "error: layout.ep = 2 does not divide 3 ranks: use 1 or 3, or 2 ranks "
        "(--nproc 2, nproc=2 in Python)",
    ),
    (
        "train job.toml --nproc 1 --set layout.ep=2",
        "error: layout.ep = 2 does not divide 1 rank: use 1 (--set layout.ep=1), or 2 ranks "
        "(--nproc 2, nproc=2 in Python)",
    ),
    (
        "train job.toml --nproc 2 --set layout.pp=2",
        "job.toml with layout.pp=2: train.micro_batches = 1 is fewer than layout.pp = 2",
    ),
    ("train job.toml --nproc 2000000", "job.toml: nproc = 2000000: give an integer from 1"),
    (
        "train job.toml --dry-run --set data.sequence=64",
        "data.path = 'text.txt' gives 47 tokens, but one sample takes data.sequence + 1 = 65",
    ),
    (
        "train job.toml --dry-run --set data.validation_share=0.1",
        "data.validation_share = 0.1 (the last 5 of 47 tokens) gives 5 tokens, but one sample",
    ),
    ("train job.toml --dry-run --out /proc/run", "'/proc/run' cannot be written"),
    ("train job.toml --dry-run --out file", "'file' is a file: give"),
    ("train job.toml --set layout.ep=4096", "[layout] needs 4096 ranks, and this machine has"),
    ("train job.toml --out old", "'old' is not empty and holds no run (it has 'checkpoints')"),
    (
        "train job.toml --out adapter",
        "is not empty and holds no run (it has 'adapter",
    ),
    ("train job.toml --out /proc/run", "'/proc/run' cannot be written"),
    ("train job.toml --out file", "'file' is a file: give"),
    ("train job.toml --out new --set data.path=.", "'new' is inside data.path = \".\""),
    ("train job.toml --out new --set data.path=**/*", "'new' is inside data.path"),
    ("train job.toml --resume", "a resume needs the directory of its run: give --out DIR"),
    ("train --resume", "a resume needs the directory of its run: give --out DIR"),
    ("train --resume --out young", "'young' has no job.toml, so there is no run to continue"),
    ("train job.toml --resume --out old", "'old' is not empty and holds no run (it"),
    ("train job.toml --resume old/checkpoints/step-00000002", "is not a checkpoint"),
    ("train job.toml --nproc 2 --set train.device=cuda:0", "names one GPU for 2 or more ranks"),
    ("train job.toml --frob", "no such option: --frob"),
    ("train job.toml --frob", "; a setting is given as --set frob=VALUE (see moesaic train"),
    ("serve run --max-running 4", "a setting is given as --set max_running=VALUE"),
    ("report run --frob", "no such option: --frob (see moesaic report --help)"),
    ("train job.toml --out=", "--out '' is empty: give a path"),
    (f"train job.toml --out {'x' * 300}", "File name too long"),
    ("train job.toml --set", "requires an argument"),
    ("train --explain train.stpes", "did you mean 'train.steps'?"),
    ("trian job.toml", "no such command 'trian'"),
    ("generate", "MODEL is missing"),
    ("generate nowhere --prompt x", "'nowhere' is not there"),
    ("generate file --prompt x", "'file' is none of these"),
    ("generate nowhere", "there is no prompt: give --prompt TEXT"),
    ("generate nowhere --prompt x --set max_token=3", "did you mean 'max_tokens'?"),
    ("generate nowhere --prompt x --set top_p=0", "top_p = 0: "),
    ("serve", "MODEL is missing"),
    ("serve nowhere --set port=0", "'nowhere' is not there"),
    ("serve file --set port=0", "'file' is none of these"),
    ("serve young --set port=0", "run 'young' has no checkpoint yet: its job writes one"),
    ("serve nowhere --set prt=0", "unknown key 'prt': did you mean 'port'?"),
    ("serve nowhere --set port=70000", "port = 70000: give an integer from 0 and below 65536"),
    ("serve nowhere --memory much", '"much" is not a size'),
    ("serve nowhere --set host=no.invalid", "host = 'no.invalid' is no address of this machine"),
    ("serve nowhere --api-key-file no", 'api_key_file = "no" cannot be read'),
    ("serve nowhere --api-key-file empty", 'api_key_file = "empty" is empty'),
    ("serve nowhere --api-key a --api-key-file file", "and api_key exclude each other"),
    ("convert", "SOURCE is missing"),
    ("convert old", "--out is missing"),
    ("convert nowhere --out new", "'nowhere' is not there"),
    ("convert nowhere --out old", "'old' is not empty"),
    ("convert adapter --out new", "'adapter' is an adapter, which holds no model of its own: give"),
    ("convert nowhere --out new --set dtype=int8", 'dtype = "int8" is not known'),
    ("convert nowhere --out new --packed --set to=adapter", '--packed with to = "adapter"'),
    ("inspect", "PATH is missing"),
    ("inspect nowhere", "'nowhere' is not there"),
    ("inspect file", "'file' is none of these"),
    ("inspect adapter", "'adapter' is an adapter, which holds no model of its own: give a run"),
    ("inspect job.toml --verify", "--verify needs a run or checkpoint, and 'job.toml' is none"),
    ("inspect old --samples 3", "--samples needs a job file, and 'old' is none"),
    ("report", "RUN is missing"),
    ("report nowhere", "there is no run directory 'nowhere'"),
    ("report old --out old", "--out 'old' is a directory"),
    ("report old --out no/x.html", "--out 'no/x.html' is in a directory that does not exist: "),
]


@pytest.mark.parametrize(("line", "words"), VERBS, ids=[line for line, _ in VERBS])
def test_a_wrong_command(line: str, words: str, place: Path, commands: Commands) -> None:
    before = written(place)
    assert words in commands.refusal(line)
    assert written(place) == before


def test_a_damaged_checkpoint_is_an_error(place: Path, commands: Commands) -> None:
    path = place / "old" / "checkpoints" / "step-00000002"
    (path / "COMMIT").write_text("{}")
    for line in ("generate old --prompt x", f"inspect {path}", f"convert {path} --out new"):
        commands.refusal(line)
    assert not (place / "new").exists()


def test_a_bug_is_not_a_user_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("ours")

    monkeypatch.setattr("moesaic.api.job.load_job", broken)
    with pytest.raises(RuntimeError, match="ours"):
        main(["train", "job.toml"])


def test_an_interrupt_prints_one_word(monkeypatch: pytest.MonkeyPatch, commands: Commands) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("moesaic.api.job.load_job", interrupted)
    assert commands.run("train job.toml", status=130).err == "interrupted\n"


def test_under_torchrun_one_rank_reports_a_mistake(
    commands: Commands, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "SILENCE_S", 0.0)
    line = ["train", "job.toml", "--set", "train.stepz=5"]
    for rank in range(2):
        for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", 2)):
            monkeypatch.setenv(name, str(value))
        if rank == 0:
            assert "did you mean 'train.steps'?" in commands.refusal(line)
            continue
        with pytest.raises(SystemExit) as ended:
            main(line)
        assert ended.value.code == 2
        assert main(["train", "--frob"]) == 2
        assert capfd.readouterr() == ("", "")


MISTAKEN = """
model.preset = "mixtral-8x7b"
train.batch = "many"
layout.tpp = 2
data.sequence = -1
"""


def test_mistakes_of_cluster_and_job_come_together(place: Path, commands: Commands) -> None:
    (place / "mistaken.toml").write_text(MISTAKEN)
    wrong = [
        "unknown key 'layout.tpp': did you mean 'layout.tp'?",
        'train.batch = "many": give an integer',
        "data.sequence = -1: give an integer",
    ]
    text = commands.run(["plan", "mistaken.toml", "--cluster", "h100-8"], status=2).err
    assert "mistaken.toml: 3 mistakes" in text
    assert all(one in text for one in wrong)
    renamed = ["--set", "model.preset=mixtral-8x7"]
    unknown = commands.run(["plan", "mistaken.toml", *renamed, "--cluster", "h100-8"], status=2).err
    assert 'model.preset = "mixtral-8x7" is not known: did you mean "mixtral-8x7b"' in unknown
    assert all(one in unknown for one in wrong)
    assert "4 mistakes" in unknown
    text = commands.run(["plan", "mistaken.toml", "--cluster", "h100_8"], status=2).err
    assert "4 mistakes" in text
    assert "'h100_8' is neither a file nor a preset of a cluster" in text
    assert all(f"mistaken.toml: {one}" in text for one in wrong)
