"""`moesaic serve --dry-run`: memory and expected speeds, without a server."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from moesaic.cli.main import main
from moesaic.models.hf.reader import SINGLE_NAME
from moesaic.testing.served import write_chat_model

CLUSTER = """
name = "one"
[[hosts]]
name = "here"
memory_bytes = 1e10
[[hosts.devices]]
kind = "cpu"
model = "test"
memory_bytes = 1e10
memory_bandwidth = 2e10
[[hosts.devices.matmul]]
dtype = "fp32"
flops = 1e12
"""
DISK = """
[[hosts.disks]]
path = "/"
read = 2e9
write = 1e9
random_read = 1e8
random_write = 1e8
mixed = 1e9
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("served") / "model")


def test_a_dry_run_divides_memory(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(model), "--dry-run", "--memory", "8GB", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    sizes, budget = found["sizes"], found["budget"]
    assert sizes["memory_bytes"] == 8 * 10**9
    assert budget["num_slots"] == sizes["num_experts"] == 32
    assert found["speeds"] == []
    assert main(["serve", str(model), "--dry-run"]) == 0
    text = capfd.readouterr().out
    assert "experts, 32 of 32" in text
    assert "key-value cache, 8,192 positions" in text  # 32 texts of 256 tokens.
    assert "tokens/s" not in text


def test_a_cluster_gives_speeds(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(CLUSTER + DISK)
    arguments = ["serve", str(model), "--dry-run", "--cluster", str(cluster)]
    assert main([*arguments, "--json"]) == 0
    speeds = json.loads(capfd.readouterr().out)["speeds"]
    assert [one["streams"] for one in speeds] == [1, 8, 32]
    assert all(one["bottleneck"] == "compute" and one["tokens_per_s"] > 0 for one in speeds)
    assert main(arguments) == 0
    assert "tokens/s" in capfd.readouterr().out
    for limit, expected in (("max_running=4", [1, 4]), ("cache_tokens=512", [1, 2])):
        assert main([*arguments, "--json", "--set", limit]) == 0
        speeds = json.loads(capfd.readouterr().out)["speeds"]
        assert [one["streams"] for one in speeds] == expected


def test_a_forecast_in_fp16_needs_its_speed(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    half = tmp_path / "half"
    shutil.copytree(model, half)
    tensors = load_file(half / SINGLE_NAME)
    save_file({name: one.half() for name, one in tensors.items()}, half / SINGLE_NAME)
    cluster = tmp_path / "cluster.toml"
    arguments = ["serve", str(half), "--dry-run", "--cluster", str(cluster)]
    cluster.write_text(CLUSTER + DISK)
    assert main(arguments) == 2
    assert "not for fp16" in capfd.readouterr().err
    cluster.write_text((CLUSTER + DISK).replace("fp32", "fp16"))
    assert main(arguments) == 0


def test_mistakes(model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(CLUSTER)
    for arguments, words in (
        (["--cluster", str(cluster)], "--cluster forecasts speeds: give --dry-run as well"),
        (["--cluster", str(cluster), "--dry-run"], "host 'here' of the cluster has no disks"),
        (["--memory", "10MB", "--dry-run"], "memory = 9.5 MiB is too small for this model"),
    ):
        assert main(["serve", str(model), *arguments]) == 2
        assert words in capfd.readouterr().err
