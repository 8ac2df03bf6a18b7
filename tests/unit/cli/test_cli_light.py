"""Commands without torch (help, --explain), and the dry run of a training job."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from moesaic import __version__
from moesaic.api import memory_here, prepared_run
from moesaic.api.cluster import Cluster
from moesaic.api.job import Job as ApiJob
from moesaic.base import keys
from moesaic.base.config import parse
from moesaic.base.errors import ConfigError
from moesaic.cli import flags
from moesaic.cli.flags import JobFiles
from moesaic.cli.main import VERBS, expand_resume, main
from moesaic.facts.job import CtrJob, Job
from moesaic.kernels import device as devices
from moesaic.serve.config import GenerateConfig
from moesaic.train import input_checks

JOB = """
[model]
preset = "tiny-olmoe"

[layout]
ep = 2

[data]
path = "text.txt"
sequence = 16

[train]
steps = 2
batch = 2

[schedule]
kind = "constant"
final = 0.5
"""

CTR = """
kind = "ctr"
[model]
family = "dcn-v2"
[data.stream]
slots = 2
[train]
steps = 2
batch = 2
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("some text " * 4)
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "ctr.toml").write_text(CTR)
    return tmp_path


def run(line: str, capfd: pytest.CaptureFixture[str]) -> str:
    assert main(line.split()) == 0
    return capfd.readouterr().out


LIGHT = [
    "", "--help", "--version", "train --help", "generate -h", "convert --help", "inspect --help",
    "report --help", "probe --help", "probe --explain all", "probe --dry-run", "plan --help",
    "trace --help", "plan --explain all", "train --explain all", "train --explain train.batch",
    "generate --explain all", "serve --help", "serve --explain all", "convert --explain to",
    "train --explain table.lr",
]  # fmt: skip


def test_light_commands_work_without_heavy_libraries() -> None:
    program = f"""
import sys
for name in ("torch", "datasets", "transformers", "pyarrow", "tokenizers", "fastapi", "uvicorn"):
    sys.modules[name] = None
from moesaic.cli.main import main
for line in {LIGHT!r}:
    assert main(line.split()) == 0, line
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stderr.decode() == ""


def test_serve_names_a_missing_package(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    assert main(["serve", "anywhere"]) == 2
    assert capfd.readouterr().err == (
        "error: moesaic serve needs the package prometheus-client: pip install 'moesaic[serve]'\n"
    )


def test_a_verb_imports_no_other(place: Path) -> None:
    program = (
        "import sys; from moesaic.cli.main import main; main(['plan', '--explain', 'plan.ep']); "
        "print([name for name in sys.modules if name.startswith('moesaic.cli.')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    imported = done.stdout.decode().splitlines()[-1]
    assert "moesaic.cli.plan" in imported
    for verb in set(VERBS) - {"plan"}:
        assert f"'moesaic.cli.{verb}'" not in imported


def test_verbs_run_on_any_thread(capfd: pytest.CaptureFixture[str]) -> None:
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(main, ["--version"]).result() == 0
    assert capfd.readouterr().out == f"moesaic {__version__}\n"


@pytest.mark.parametrize(
    ("line", "closed", "status"),
    [
        ("--version", "2>&-", 0), ("--version", ">&-", 0), ("nope", "2>&-", 2),
        pytest.param(
            "nope", "2>/dev/full", 2,
            marks=pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full"),
        ),
    ],
)  # fmt: skip
def test_closed_streams_change_no_status(line: str, closed: str, status: int) -> None:
    command = f"{shlex.quote(sys.executable)} -m moesaic {line} {closed}"
    assert subprocess.run(["sh", "-c", command], check=False).returncode == status


def test_help_names_every_verb(capfd: pytest.CaptureFixture[str]) -> None:
    text = run("--help", capfd)
    for verb in VERBS:
        assert verb in text
        flags = run(f"{verb} --help", capfd)
        assert "--json" in flags
        assert ("--set" in flags) == ("--explain" in flags)
    assert "one per GPU, else one per core" in run("probe --help", capfd)
    assert run("", capfd) == text
    assert run("--version", capfd) == f"moesaic {__version__}\n"


def test_explain(capfd: pytest.CaptureFixture[str]) -> None:
    assert run("train --explain train.batch", capfd) == (
        "train.batch: an integer from 1 and up to 2^24\n"
        "  Samples of one global batch, over all ranks and micro-batches.\n"
        "  required\n"
    )
    assert "model.from: a string\n" in run("train --explain model.from", capfd)
    assert "  .warmup: Steps of linear" in run("train --explain schedule", capfd)
    assert "default: 128" in run("generate --explain max_tokens", capfd)


@pytest.mark.parametrize("key", ["table.nope", "data.stream.nope"])
def test_explain_names_the_keys_of_a_table_of_recommenders(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"unknown key '{key}': '{key[:-5]}' has the keys"):
        flags.print_job_explanation(key, as_json=False)


@pytest.mark.parametrize(
    ("verb", "kind"),
    [("train", JobFiles), ("plan", JobFiles), ("generate", GenerateConfig)],
)
def test_explain_all_leaves_no_key_out(
    verb: str, kind: type[Any], capfd: pytest.CaptureFixture[str]
) -> None:
    text = run(f"{verb} --explain all", capfd)
    shown = [line.split()[0] for line in text.splitlines() if not line.startswith(" ")]
    assert shown == [entry.path for entry in keys.walk(kind)]
    listed = json.loads(run(f"{verb} --explain all --json", capfd))
    assert [entry["path"] for entry in listed] == shown


def test_explain_knows_plan_and_cluster_files(capfd: pytest.CaptureFixture[str]) -> None:
    placement = run("train --explain plan.expert_placement", capfd)
    assert placement.startswith(
        "plan.expert_placement: a list of lists of integers\n  Experts on each of"
    )
    assert run("plan --explain plan.expert_placement", capfd) == placement
    assert "\n  .places: Host and device of each rank" in run("train --explain plan", capfd)
    preset = run("plan --explain cluster.hosts.preset", capfd)
    assert preset.startswith('cluster.hosts.preset: "v100-8", "a100-8"')
    assert "list of tables" in run("plan --explain cluster.hosts.devices.matmul", capfd)
    entries = json.loads(run("plan --explain cluster.calibration --json", capfd))
    assert [entry["path"] for entry in entries][:2] == [
        "cluster.calibration", "cluster.calibration.runs",
    ]  # fmt: skip
    for line, key in (
        ("plan --explain links", "cluster.links"),
        ("train --explain expert_placement", "plan.expert_placement"),
        ("train --explain lr", "optimizer.lr"), ("train --explain ep", "layout.ep"),
        ("train --explain model.experts_per_token", "model.top_k"),
        ("train --explain micro_batch_size", "train.micro_batches"),
        ("train --explain epochs", "train.steps"), ("generate --explain temp", "temperature"),
        ("train --explain capacity", "routing.capacity_factor"),
    ):  # fmt: skip
        assert run(line, capfd).startswith(f"{key}: ")
        assert json.loads(run(f"{line} --json", capfd))[0]["path"] == key
    way = "\nmicro_batch_size is no key: give train.micro_batches, their number: train.batch / "
    assert way in run("train --explain micro_batch_size", capfd)
    for line, words in (
        ("plan --explain cluster.host", "unknown key 'cluster.host': did you mean 'cluster.hosts'"),
        ("train --explain output_dir", "give the directory of the run as a flag, --out DIR"),
    ):
        assert main(line.split()) == 2
        assert words in capfd.readouterr().err


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        ("ep=4", 4), ("dp_shard=all", 2), ("dp_shard=4", 4), ("tp=2 etp=2", 4), ("ep=1", 1),
        ("pp=2 tp=2", 4), ("ep=4 tp=2 dp_shard=3", 12),
    ],
)  # fmt: skip
def test_without_a_number_a_run_has_the_ranks_that_its_layout_needs(
    layout: str, ranks: int
) -> None:
    sets = [f"layout.{item}" for item in layout.split()]
    sets += ["train.micro_batches=2", "train.device=cpu"]
    assert ApiJob.load("job.toml", sets=sets).prepare(is_started=False).ranks == ranks


def test_the_job_of_the_readme_names_its_ranks(place: Path) -> None:
    readme = Path(__file__).parents[3] / "README.md"
    text = readme.read_text().split("```toml job\n")[1].split("```")[0]
    (place / "readme.toml").write_text(text)
    (place / "corpus").mkdir()
    (place / "corpus" / "a.jsonl").write_text('{"text": "words"}\n' * 99)
    assert ApiJob.load("readme.toml", sets=["train.device=cpu"]).prepare().ranks == 2


@pytest.mark.parametrize(
    ("gpus", "device", "layout", "ranks"),
    [
        (3, "auto", "", 3), (3, "cuda", "ep = 2", 2), (5, "auto", "ep = 2", 4),
        (1, "auto", "ep = 2", 2), (3, "cpu", "ep = 2", 2), (3, "cuda:1", "ep = 1", 1),
        (0, "auto", "ep = 2", 2),
    ],
)  # fmt: skip
def test_without_nproc_a_run_has_a_rank_on_each_gpu_as_far_as_the_layout_goes(
    gpus: int, device: str, layout: str, ranks: int, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine has no GPU; torch is told to count them."""
    monkeypatch.setattr(prepared_run, "_GPU_NODES", ("null",))
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpus > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    table = f"[layout]\n{layout}\n" if layout else ""
    (place / "job.toml").write_text(JOB.replace("[layout]\nep = 2\n", table))
    sets = [f"train.device={device}"]
    prepared = ApiJob.load("job.toml", sets=sets).prepare(is_started=False)
    assert prepared.ranks == ranks


def test_a_dry_run_of_a_pipeline_shows_its_fullest_rank(
    capfd: pytest.CaptureFixture[str],
) -> None:
    line = "train job.toml --dry-run --nproc 4 --set layout.pp=2 --set layout.schedule=gpipe"
    text = run(line, capfd)
    assert (
        "plan             4 ranks, layers over 2 pipeline ranks (gpipe), experts over 2, tok"
        in text
    )
    assert "memory per rank  " in text
    facts = json.loads(run(f"{line} --json", capfd))
    memory = facts["memory_per_rank"]
    peak = memory.pop("peak_bytes")
    assert sum(memory.values()) == peak
    assert facts["plan"]["stages"] == [
        ["embed", "layers.0", "layers.1"], ["layers.2", "layers.3", "head"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("used", "usable"),
    [(0.5, 80 - (2 + 0.05 * 80)), (0.25, 80 - (2 + 0.05 * 80)), (10.5, 70 - (2 + 0.05 * 70))],
)
def test_a_dry_run_on_a_gpu_counts_the_context_of_the_driver_once(
    used: float, usable: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in the reserve, and free memory lacks it. GiB, of 80."""
    total, free = 80 * 2**30, int((80 - used) * 2**30)
    fakes = {
        "resolve": "cuda:0", "kind": "gpu", "model": "a GPU", "free_bytes": free,
        "memory_bytes": total,
    }  # fmt: skip
    for name, value in fakes.items():
        monkeypatch.setattr(devices, name, lambda *_, value=value: value)
    monkeypatch.setattr(memory_here, "_GPU_DRIVERS", ("/",))
    prepared = ApiJob.load("job.toml").prepare(is_started=False)
    assert isinstance(prepared.config, Job)
    _, figures = memory_here.memory_here(prepared.config, prepared.plan, None)
    assert figures["device"] == "a GPU"
    assert figures["usable_memory_bytes"] == pytest.approx(usable * 2**30)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_dry_run_warns_of_columns_on_one_rank(
    ranks: int, capfd: pytest.CaptureFixture[str]
) -> None:
    sets = ["--set", 'layout.embedding="columns"', "--set", f"layout.ep={ranks}"]
    assert main(["train", "job.toml", "--dry-run", "--nproc", str(ranks), *sets]) == 0
    warning = "layout.embedding has no effect: each stage has one rank"
    assert (warning in capfd.readouterr().err) == (ranks == 1)


def test_a_dry_run_warns_of_a_disk_without_room(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*["train", "job.toml", "--dry-run", "--set", "model.ffn=100000000"]]) == 3
    assert "warning: a checkpoint takes about " in capfd.readouterr().err
    assert main([*["train", "job.toml", "--dry-run"]]) == 0
    assert "checkpoint" not in capfd.readouterr().err


def test_a_dry_run_shows_everything_and_writes_nothing(
    place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = set(place.rglob("*"))
    line = "train job.toml --dry-run --nproc 2 --set train.steps=7"
    text = run(line, capfd)
    assert "parameters       1,927,296 in total, 747,648 active (39%)" in text
    assert "plan             2 ranks, experts over 2, tokens once per expert, dense" in text
    assert "memory per rank  " in text
    assert " 0 B" not in text
    for kind in ("parameters", "gradients", "moments", "activations"):
        assert f"  {kind}" in text
    verdict = text.partition("\n")[0]
    assert re.fullmatch(r"fits: [0-9.]+ MiB of [0-9.]+ [GT]iB free per rank", verdict)
    shown = run(f"{line} --verbose", capfd)
    resolved = shown.partition("\n")[2].partition("parameters  ")[0]
    assert resolved.startswith("# job.toml, resolved\n")
    job = parse(Job, tomllib.loads(resolved), "dry run")
    assert job.train.steps == 7
    rest = [one.replace(resolved, "").splitlines()[1:] for one in (shown, text)]
    of_free = re.compile(r" of [0-9.]+ [GT]iB, of which$")  # what is free differs between runs
    parts = [[of_free.sub("", line) for line in lines] for lines in rest]
    assert parts[0] == parts[1]
    assert len(parts[1]) < 16

    facts = json.loads(run(f"{line} --json", capfd))
    assert parse(Job, facts["job"], "dry run") == job
    assert (facts["plan"]["ranks"], facts["plan"]["ep"]) == (2, 2)
    assert facts["plan"]["expert_placement"] == [[*range(8)], [*range(8, 16)]]
    assert facts["plan"]["stages"] == [["embed", *(f"layers.{n}" for n in range(4)), "head"]]
    assert facts["parameters"] == {"total": 1_927_296, "active": 747_648}
    memory = facts["memory_per_rank"]
    peak = memory.pop("peak_bytes")
    assert sum(memory.values()) == peak
    assert [warning.split()[0] for warning in facts["warnings"]] == ["schedule.final"]
    assert facts["data"] == ["all read: 2 samples to train on"]
    assert "\ndata             all read: 2 samples to train on\n" in text
    text = run(f"{line} --set layout.tp=2", capfd)
    assert "tokens once per expert, matrices over 2 TP ranks, dense parameters on" in text
    sharded = json.loads(run(f"{line} --set layout.tp=2 --json", capfd))["memory_per_rank"]
    assert sharded["parameters_bytes"] < memory["parameters_bytes"]
    assert set(place.rglob("*")) == before


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (["data.path=wrong.jsonl"], "data.path = 'wrong.jsonl': line 2 of 'wrong.jsonl' has no 't"),
        (["data.path=torn.jsonl"], "data.path = 'torn.jsonl': line 3 of 'torn.jsonl' is not JSON"),
        (["data.path=latin"], "data.path = 'latin': 'latin/b.txt' is not UTF-8 text"),
        (["data.sequence=64"], "gives 41 tokens, but one sample takes data.sequence + 1 = 65"),
        (
            ["data.path=few.jsonl", "data.validation_share=0.01"],
            "(the last 1 of 128 tokens) gives 1 tokens, but one",
        ),
    ],
)
def test_a_dry_run_reads_the_data_as_the_start_of_training_does(
    sets: list[str], words: str, place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (place / "wrong.jsonl").write_text('{"text": "words"}\n{"body": "words"}\n')
    (place / "torn.jsonl").write_text('{"text": "words"}\n{"text": "words"}\n{"text": "wo')
    (place / "few.jsonl").write_text('{"text": "several words and several words"}\n' * 4)
    (place / "latin").mkdir()
    (place / "latin" / "a.txt").write_text("words")
    (place / "latin" / "b.txt").write_bytes("caf\u00e9s".encode("latin-1"))
    before = set(place.rglob("*"))
    errors = []
    for line in (["--dry-run"], ["--out", "run", "--nproc", "1", "--set", "data.cache=cache"]):
        flags = [f"--set={one}" for one in ("layout.ep=1", "train.device=cpu", *sets)]
        assert main(["train", "job.toml", *line, *flags]) == 2
        errors.append(capfd.readouterr().err.splitlines()[-1])
        assert words in errors[-1]
        if line == ["--dry-run"]:
            assert set(place.rglob("*")) == before
    assert errors[0] == errors[1]


def test_a_dry_run_reads_the_first_part_of_large_data(
    place: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(input_checks, "WHOLE_BYTES", 400)
    (place / "many.jsonl").write_text('{"text": "words"}\n' * 30)
    (place / "long.txt").write_text("words " * 99)
    (place / "wrong.jsonl").write_text('{"body": "words"}\n' * 30)
    rest = "read; the rest, and what is held out, at the start of training"
    line = "train job.toml --dry-run --json --set data.path="
    for name, first in (("many.jsonl", "180 tokens"), ("long.txt", "401 tokens")):
        (found,) = json.loads(run(f"{line}{name}", capfd))["data"]
        assert found.startswith(f"the first {first} of data.path = '{name}' (")
        assert found.endswith(rest)
    assert main(f"{line}many.jsonl --set data.validation_path=wrong.jsonl".split()) == 2
    assert "has no 'text'" in capfd.readouterr().err
    (place / "clicks.tsv").write_text("\t".join(["1", *["7"] * 13, *["ab"] * 26]) + "\n")
    clicks = '[data]\npath = "clicks.tsv"\n'
    (place / "clicks.toml").write_text(CTR.replace("[data.stream]\nslots = 2\n", clicks))
    (found, *_) = json.loads(run("train clicks.toml --dry-run --json", capfd))["data"]
    assert found == "all read: 1 samples to train on"
    monkeypatch.setattr(input_checks, "WHOLE_BYTES", 4)
    (found,) = json.loads(run("train clicks.toml --dry-run --json", capfd))["data"]
    assert found == f"the first 1 samples of 'clicks.tsv' (data.path) {rest}"
    (place / "clicks.tsv").write_text("no clicks\n")
    assert main(["train", "clicks.toml", "--dry-run"]) == 2
    assert "data.path = 'clicks.tsv': malformed lines" in capfd.readouterr().err


def test_resume_needs_no_value() -> None:
    assert expand_resume(["train", "a.toml", "--resume"])[-2:] == ["--resume", "auto"]
    assert expand_resume(["--resume", "--out", "x"]) == ["--resume", "auto", "--out", "x"]
    assert expand_resume(["--resume", "job.toml"]) == ["--resume", "auto", "job.toml"]
    assert expand_resume(["--resume", "run/step"]) == ["--resume", "run/step"]


def test_the_page_of_keys_is_current() -> None:
    page = Path(__file__).parents[3] / "docs" / "generate.py"
    done = subprocess.run([sys.executable, str(page), "--check"], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


def test_explain_follows_the_kind_of_job(capfd: pytest.CaptureFixture[str]) -> None:
    assert "Learning rate of the rows." in run("train --explain table.lr", capfd)
    assert "Numbers per embedding row." in run("train --explain embedding_dim", capfd)
    assert "Network. ctr-dnn:" in run("train ctr.toml --explain model.family", capfd)
    assert "Network. ctr-dnn:" not in run("train --explain model.family", capfd)
    assert "plan.ep " not in run("train ctr.toml --explain all", capfd)
    assert main(["train", "--explain", "table.rl"]) == 2
    assert "unknown key 'table.rl'" in capfd.readouterr().err


def test_dry_run_of_a_recommender(capfd: pytest.CaptureFixture[str]) -> None:
    facts = json.loads(run("train ctr.toml --dry-run --nproc 2 --json", capfd))
    assert facts["plan"]["ranks"] == 2
    assert facts["row_bytes"] == 16 * 4 + 4 + 12
    text = run("train ctr.toml --dry-run --verbose", capfd)
    assert f"parameters       {facts['parameters']['network']:,} in the network" in text
    again = CtrJob.model_validate(tomllib.loads(text.partition("parameters  ")[0]))
    assert again.model_dump(mode="json") == facts["job"]
    assert main(["train", "ctr.toml", "--plan", "plan.json"]) == 2
    assert 'ctr.toml: kind = "ctr" takes no plan' in capfd.readouterr().err
    job = ApiJob.load("ctr.toml")
    for predict in (job.plan, partial(job.largest_model, ssd_bytes=1e9)):
        with pytest.raises(ConfigError, match=r'kind = "ctr" has no plan: plans are for language'):
            predict(Cluster.preset("h100-8"))


def test_samples_of_clicks_are_shown(capfd: pytest.CaptureFixture[str]) -> None:
    facts = json.loads(run("inspect ctr.toml --samples 3 --json", capfd))
    assert (facts["slots"], facts["dense"], facts["num_samples"]) == (2, 4, 400_000)
    assert [len(row["dense"]) for row in facts["clicks"]] == [4, 4, 4]
    text = run("inspect ctr.toml --samples 3", capfd)
    for number, row in enumerate(facts["clicks"]):
        assert row["keys"].keys() == {"0", "1"}
        label = "click" if row["label"] else "no click"
        assert f"sample {number}: {label}, day 0, user {row['user']}\n" in text
        assert f"  slot 0            {row['keys']['0'][0]}\n" in text
