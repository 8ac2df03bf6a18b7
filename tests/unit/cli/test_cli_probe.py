"""`moesaic probe`: a file that parses, and no other files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from commands import Commands
from moesaic.base.errors import ConfigError
from moesaic.cli import flags
from moesaic.facts.cluster import load_cluster

TINY = [
    f"--set={item}"
    for item in (
        "seconds=0.02", "largest_side=64", "dtypes=['fp32']", "copy_bytes=16384",
        "message_bytes=16384", "disk_bytes=1048576", "device=cpu", "disks=['disk']",
    )
]  # fmt: skip


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "disk").mkdir()
    return tmp_path


def start(*words: str, module: str = "moesaic") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", *module.split(), "probe", *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def without_noise_warnings(err: str) -> str:
    prefixes = ("warning: the machine was not steady", "measuring ")
    return "".join(one for one in err.splitlines(keepends=True) if not one.startswith(prefixes))


def test_ranks_measure_and_the_file_parses(place: Path) -> None:
    process = start("--nproc", "2", *TINY, "--set", "name=mine", "--json")
    out, err = process.communicate(timeout=100)
    assert (process.returncode, without_noise_warnings(err)) == (0, "")
    facts = json.loads(out)
    unsteady = facts["median_range"] > 0.2 or facts["p90_range"] > 0.5
    assert (len(facts["notes"]), "was not steady" in err) == (unsteady, unsteady)
    cluster = load_cluster(place / "cluster.toml")
    assert cluster.name == "mine"
    assert facts["cluster"] == cluster.model_dump(mode="json", by_alias=True)
    assert [device.count for device in cluster.hosts[0].devices] == [2, 1]
    assert [link.kind for link in cluster.links] == ["loopback"]
    assert (place / "cluster.toml").read_text().startswith("# Measured by moesaic ")
    assert sorted(path.name for path in place.rglob("*")) == ["cluster.toml", "disk"]


def test_a_process_of_torchrun_is_one_rank(place: Path) -> None:
    module = "torch.distributed.run --standalone --nproc-per-node 2 -m moesaic"
    process = start(*TINY, "--out", "two.toml", module=module)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    assert out.count("wrote two.toml") == 1
    for figure in ("fp32 matmul", "read", "latency", "all_reduce of 16.0 KiB, 2 ranks"):
        assert f"\n  {figure} " in out
    assert len(load_cluster(place / "two.toml").links) == 1


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("--out disk", "--out 'disk' is a directory: name a file, such as disk/cluster.toml"),
        ("--out there.toml", "--out 'there.toml' already exists: remove it, or name another file"),
        ("--set disks=['nowhere']", "disks = 'nowhere' is not a directory; name one on the disk to "
         "measure"),
        ("--set device=gpu", "device = 'gpu' is not a device; use auto, cpu or cuda"),
        ("--set second=3", "second=3: unknown key 'second': did you mean 'seconds'?"),
    ],
)  # fmt: skip
def test_user_errors(line: str, sentence: str, place: Path, commands: Commands) -> None:
    (place / "there.toml").write_text("mine")
    assert commands.refusal(f"probe {line}") == f"error: {sentence}\n"
    assert sorted(path.name for path in place.rglob("*")) == ["disk", "there.toml"]
    assert (place / "there.toml").read_text() == "mine"


def test_a_dry_run_measures_nothing(place: Path, commands: Commands) -> None:
    text = commands.output("probe --dry-run --nproc 2 --set seconds=7")
    assert text.startswith("# 2 ranks -> cluster.toml\n")
    assert "seconds = 7.0" in text
    assert commands.facts("probe --dry-run")["ranks"] is None
    assert [path.name for path in place.iterdir()] == ["disk"]


def test_a_file_of_another_program_is_kept(place: Path) -> None:
    """The file did not exist when the measurement began."""
    (place / "same.toml").write_text("another's")
    with pytest.raises(ConfigError, match=r"^--out 'same.toml' was created by another program"):
        flags.write_new_file("--out", Path("same.toml"), "mine")
    assert [path.name for path in place.iterdir() if path.is_file()] == ["same.toml"]
    assert (place / "same.toml").read_text() == "another's"
