"""Conversion between model formats: results, errors and memory."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from directories import digests, experts_in_place, read_back, whole
from safetensors.torch import load_file, save_file

from moesaic.base import direct_io
from moesaic.base.errors import ConfigError, StoreError, WeightsError
from moesaic.cli.main import main
from moesaic.dist.checkpoint import Checkpoint, Saver
from moesaic.dist.state import FIRST_MOMENT, PARAMETER, State, TensorShard
from moesaic.dist.world import World
from moesaic.facts.job import DataConfig, Job, ModelConfig, RoutingConfig, TrainConfig
from moesaic.facts.job.model import PRESETS
from moesaic.facts.workload import parameters
from moesaic.models.hf.convert import convert
from moesaic.models.hf.origin import open_origin
from moesaic.models.hf.reader import INDEX_NAME, SINGLE_NAME, HFSource
from moesaic.models.hf.settings import ConvertConfig
from moesaic.models.hf.shards import InMemoryTensors
from moesaic.models.hf.writer import write_model
from moesaic.testing.jobs import RUN_JOB
from moesaic.testing.states import live_values

TINY = ModelConfig(
    family="mixtral", vocab=300, hidden=16, layers=2, heads=2, kv_heads=1, head_dim=8, ffn=12,
    experts=4, top_k=2, renormalise=True,
)  # fmt: skip


def halves(param: TensorShard) -> list[TensorShard]:
    """Return the same values as two shards, as ranks that shard the tensor hold them: TP ranks have
    columns of an expert's down matrix."""
    dim = int(param.name.endswith(".down"))
    middle = param.shape[dim] // 2
    sizes = (middle, param.shape[dim] - middle)
    shards = []
    for first, half in zip((0, middle), live_values(param).split(sizes, dim), strict=True):
        offset = tuple(first * (index == dim) for index in range(len(param.shape)))
        shards.append(
            TensorShard.of_tensor(param.kind, param.name, param.shape, offset, half, (0,))
        )
    return shards


def save_run(
    run: Path, model: ModelConfig, routing: RoutingConfig | None = None, source: str | None = None
) -> list[TensorShard]:
    """Write a run with checkpoints of steps 3 and 5, and return the parameters of step 5."""
    job = Job(
        model=model, routing=routing or RoutingConfig(), data=DataConfig(path="text", sequence=8),
        train=TrainConfig(steps=5, batch=4), source=source,
    )  # fmt: skip
    facts = {"job": job.model_dump(mode="json"), "plan": {}}
    world = World.solo()
    world.timeout = timedelta(seconds=20)
    saver = Saver(run / "checkpoints", world, keep=2)
    for step in (3, 5):
        params = whole(model, torch.randn)
        moments = [
            TensorShard.of_tensor(
                FIRST_MOMENT, p.name, p.shape, p.offset, torch.ones_like(live_values(p)), (0,)
            )
            for p in params
        ]
        half_shards = [half for param in [*params, *moments] for half in halves(param)]
        saver.save(State(half_shards, {"step": step}), step, facts)
    saver.wait()
    return params


@pytest.mark.parametrize("case", ["llama-tied-wide", "mixtral", "olmoe-renormalised"])
def test_checkpoint_round_trip(case: str, peer: Callable[[str], Any], tmp_path: Path) -> None:
    source = tmp_path / "source"
    convert(peer(case).directory, source, max_shard_bytes=30_000)
    (source / "tokenizer.json").write_text("{}")
    origin = convert(source, tmp_path / "checkpoint", to="checkpoint", max_shard_bytes=50_000)
    assert origin.warnings == []
    assert set((tmp_path / "checkpoint" / "tokenizer").iterdir())
    convert(tmp_path / "checkpoint", tmp_path / "back", max_shard_bytes=30_000)
    assert digests(tmp_path / "back") == digests(source)


def test_conversion_changes_fusion_shards_and_dtype(
    peer: Callable[[str], Any], tmp_path: Path
) -> None:
    source = peer("mixtral").directory
    fused = tmp_path / "fused"
    fused.mkdir()
    (fused / "config.json").write_bytes((source / "config.json").read_bytes())
    state_dict = transformers.AutoModelForCausalLM.from_pretrained(source).state_dict()
    save_file({name: tensor.clone() for name, tensor in state_dict.items()}, fused / SINGLE_NAME)

    convert(fused, tmp_path / "out", dtype="bf16", max_shard_bytes=20_000)
    assert (tmp_path / "out" / INDEX_NAME).is_file()
    found = read_back(tmp_path / "out")
    expected = load_file(source / SINGLE_NAME)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor.bfloat16()), name


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_experts_of_a_run_are_read_in_place(tmp_path: Path, dtype: str) -> None:
    params = {param.name: live_values(param) for param in save_run(tmp_path / "run", TINY)}
    found = experts_in_place(open_origin(tmp_path / "run"), dtype)
    assert len(found) == 2 * 4 * 3
    for name, values in found.items():
        assert torch.equal(values, params[name].to(values.dtype)), name


def test_transformers_reads_a_converted_run(
    their_logits: Callable[..., torch.Tensor], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    params = save_run(run, TINY)
    (run / "tokenizer").mkdir()
    tokenizer = {"added_tokens": [{"id": 256, "content": "<end>"}], "model": {"vocab": {"a": 97}}}
    (run / "tokenizer" / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"eos_token": {"content": "<end>"}, "pad_token": "a", "bos_token": None}
    (run / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(settings))

    origin = convert(run, tmp_path / "out")
    assert origin.path == run / "checkpoints" / "step-00000005"
    source = HFSource(tmp_path / "out", TINY)
    for param in params:
        assert torch.equal(source.read(param.name), live_values(param)), param.name
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (None, 256, 97)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        copied = (tmp_path / "out" / name).read_bytes()
        assert copied == (run / "tokenizer" / name).read_bytes()
    tokens = torch.randint(0, 300, (1, 9))
    assert their_logits(tmp_path / "out", tokens).isfinite().all()

    convert(run / "checkpoints" / "step-00000005", tmp_path / "same")
    assert digests(tmp_path / "same") == digests(tmp_path / "out")
    convert(run, tmp_path / "parameters", to="checkpoint", dtype="bf16")
    bare = Checkpoint.open(tmp_path / "parameters")
    assert set(bare.tensors) == {f"{PARAMETER}/{param.name}" for param in params}
    assert {record.dtype for record in bare.tensors.values()} == {"BF16"}


def test_damaged_checkpoint_is_rejected(tmp_path: Path) -> None:
    save_run(tmp_path / "run", TINY)
    newest = tmp_path / "run" / "checkpoints" / "step-00000005"
    victim = next(newest.glob("*.safetensors"))
    data = bytearray(victim.read_bytes())
    data[-5] ^= 16
    victim.write_bytes(data)
    with pytest.raises(StoreError, match=victim.name):
        convert(newest, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    origin = convert(tmp_path / "run", tmp_path / "out")
    assert origin.path.name == "step-00000003"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_origin_fills_shards_of_any_layout(dtype: torch.dtype, tmp_path: Path) -> None:
    params = save_run(tmp_path / "run", TINY)
    convert(tmp_path / "run", tmp_path / "directory")
    for path in (tmp_path / "run", tmp_path / "directory"):
        wanted = whole(TINY, lambda shape: torch.full(shape, float("nan"), dtype=dtype))
        open_origin(path).fill([half for param in wanted for half in halves(param)])
        for param, expected in zip(wanted, params, strict=True):
            assert torch.equal(live_values(param), live_values(expected).to(dtype)), param.name


def test_routers_without_a_config_json_key(tmp_path: Path) -> None:
    unscaled = TINY.model_copy(update={"renormalise": False})
    save_run(tmp_path / "gshard", unscaled, RoutingConfig(router="gshard", capacity_factor=1.2))
    assert convert(tmp_path / "gshard", tmp_path / "out").model.renormalise
    save_run(tmp_path / "softmax", unscaled)
    with pytest.raises(ConfigError, match=r"model\.renormalise"):
        convert(tmp_path / "softmax", tmp_path / "out-2")
    save_run(tmp_path / "balanced", TINY, RoutingConfig(router="balanced"))
    (warning,) = convert(tmp_path / "balanced", tmp_path / "out-3").warnings
    assert "balanced" in warning


def test_fine_tuned_run_keeps_generation_settings(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "generation_config.json").write_text('{"top_p": 0.7}')
    save_run(tmp_path / "run", TINY, source=str(tmp_path / "base"))
    convert(tmp_path / "run", tmp_path / "out")
    assert (tmp_path / "out" / "generation_config.json").read_text() == '{"top_p": 0.7}'
    (tmp_path / "base" / "generation_config.json").unlink()
    convert(tmp_path / "run", tmp_path / "without")
    assert not (tmp_path / "without" / "generation_config.json").exists()


def test_checkpoint_without_model_is_rejected(tmp_path: Path) -> None:
    Saver(tmp_path, World.solo(), keep=1, asynchronous=False).save(
        State(whole(TINY, torch.randn)), 1, {}
    )
    with pytest.raises(ConfigError, match="names no model"):
        convert(tmp_path, tmp_path / "out")


def test_path_without_model_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not there"):
        convert(tmp_path / "nowhere", tmp_path / "out")
    with pytest.raises(ConfigError, match="a checkpoint or a run directory"):
        convert(tmp_path, tmp_path / "out")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(ConfigError, match="not empty"):
        convert(tmp_path, tmp_path / "full")


def test_checkpoint_of_another_model_is_rejected(tmp_path: Path) -> None:
    larger = TINY.model_copy(update={"vocab": 301})
    facts = {"model": larger.model_dump(mode="json")}
    Saver(tmp_path, World.solo(), keep=1, asynchronous=False).save(
        State(whole(TINY, torch.randn)), 1, facts
    )
    with pytest.raises(WeightsError, match=r"'embed\.weight' of shape \[301, 16\]"):
        convert(tmp_path, tmp_path / "out")


SCRIPT = """
import os, signal, sys
from pathlib import Path
from moesaic.models.hf import convert as module

source, target, to = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
kill_at, shard_bytes = map(int, sys.argv[4:])

def progress(done, total):
    if 0 <= kill_at <= 100 * done / total:
        os.kill(os.getpid(), signal.SIGKILL)

def status_bytes(key):
    return 1024 * int(Path("/proc/self/status").read_text().split(key)[1].split()[0])

before = status_bytes("VmRSS:")
module.convert(source, target, to=to, max_shard_bytes=shard_bytes, progress=progress)
print(status_bytes("VmHWM:") - before)  # ru_maxrss would count the process that started us
"""


def run_script(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, *map(str, arguments)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a directory of about 200 MB in shards of at most 20 MB, the largest tensor 4 MB."""
    directory = tmp_path_factory.mktemp("large") / "model"
    model = ModelConfig(
        **PRESETS["tiny-olmoe"] | {"vocab": 4000, "hidden": 256, "head_dim": 64, "ffn": 512,
                                   "layers": 7, "experts": 16}
    )  # fmt: skip
    tensors = InMemoryTensors(whole(model, torch.rand))
    write_model(directory, model, tensors, ConvertConfig(max_shard_bytes=20_000_000))
    size = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    assert 180e6 < size < 220e6
    assert len(list(directory.glob("*.safetensors"))) >= 10
    return directory


def test_conversion_bypasses_the_page_cache(tmp_path: Path) -> None:
    """Tensors of a directory and whole checkpoint files bypass the page cache."""
    source, checkpoint = tmp_path / "source", tmp_path / "checkpoint"
    write_model(source, TINY, InMemoryTensors(whole(TINY, torch.rand)))
    read, parts = direct_io.read, direct_io.read_blocks
    with mock.patch.object(direct_io, "read", wraps=read) as reads:
        convert(source, checkpoint, to="checkpoint")
    assert reads.call_count == len(list(parameters(TINY)))
    with mock.patch.object(direct_io, "read_blocks", wraps=parts) as files:
        convert(checkpoint, tmp_path / "out")
    assert [call.args[0].name for call in files.call_args_list] == ["rank-0.safetensors"]
    assert digests(tmp_path / "out") == digests(source)


def test_read_errors_are_not_reported_as_a_full_disk(tmp_path: Path) -> None:
    write_model(tmp_path / "source", TINY, InMemoryTensors(whole(TINY, torch.rand)))
    source = HFSource(tmp_path / "source", TINY, reads_once=True)
    (tmp_path / "source" / SINGLE_NAME).unlink()
    with pytest.raises(StoreError) as caught:
        write_model(tmp_path / "out", TINY, source)
    assert f"'{tmp_path / 'source' / SINGLE_NAME}' cannot be read" in str(caught.value)
    assert "make room" not in str(caught.value)
    tensors, gone = InMemoryTensors(whole(TINY, torch.rand)), tmp_path / "tokenizer.json"
    with pytest.raises(StoreError, match=r"tokenizer\.json' cannot be read \(No such file"):
        write_model(tmp_path / "out", TINY, tensors, companions=[gone])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("route", ["directory", "checkpoint"])
def test_memory_stays_below_two_shards(route: str, large: Path, tmp_path: Path) -> None:
    # A directory is read tensor by tensor, a checkpoint file as a whole into one buffer: one shard,
    # one tensor and the allocator's cache. Two shards are a fifth of the model, so holding it whole
    # would take five times the bound.
    bound = 2 * 20_000_000
    if route == "directory":
        steps = [(large, tmp_path / "out", "huggingface")]
    else:
        steps = [
            (large, tmp_path / "checkpoint", "checkpoint"),
            (tmp_path / "checkpoint", tmp_path / "out", "huggingface"),
        ]
    for source, target, to in steps:
        done = run_script(source, target, to, -1, 20_000_000)
        assert done.returncode == 0, done.stderr
        assert int(done.stdout) < bound, (to, done.stdout)
    assert digests(tmp_path / "out") == digests(large)


@pytest.mark.parametrize("to", ["huggingface", "checkpoint"])
def test_killed_conversion_leaves_no_target(to: str, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "out"
    settings = ConvertConfig(max_shard_bytes=20_000)
    write_model(source, TINY, InMemoryTensors(whole(TINY, torch.rand)), settings)
    assert len(list(source.glob("*.safetensors"))) > 1
    assert run_script(source, target, to, 60, 20_000).returncode == -signal.SIGKILL
    assert not target.exists()
    convert(source, target, to=to, max_shard_bytes=20_000)
    assert target.is_dir()


def test_the_program_of_the_page_runs_on_an_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Train with a tokenizer file, export, load and generate with transformers."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    monkeypatch.chdir(tmp_path)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={one: at for at, one in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save("tokenizer.json")
    Path("text.txt").write_text("words and more words " * 20)
    Path("job.toml").write_text(RUN_JOB)
    sets = ["train.steps=1", "data.tokenizer=tokenizer.json", 'data.end_token="<|end|>"']
    assert main(["train", "job.toml", "--out", "run", *(f"--set={one}" for one in sets)]) == 0
    assert main(["convert", "run", "--out", "exported"]) == 0
    capsys.readouterr()
    page = Path(__file__).parents[4] / "docs" / "export.md"
    (program,) = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    exec(program, {})
    assert capsys.readouterr().out.startswith("Once upon a time")
