"""Experts that are read while a model computes: bits of a model in memory, and damaged files."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from moesaic.base import direct_io
from moesaic.base.config import parse
from moesaic.base.errors import ConfigError, StoreError, WeightsError
from moesaic.base.safetensors_file import read_entries
from moesaic.facts.job import ModelConfig
from moesaic.facts.job.model import PRESETS
from moesaic.facts.workload import parameters
from moesaic.models.hf.convert import convert
from moesaic.models.hf.origin import open_origin
from moesaic.models.hf.packed import HASHES_NAME
from moesaic.models.hf.reader import SINGLE_NAME
from moesaic.models.hf.shards import InMemoryTensors
from moesaic.models.hf.writer import write_model
from moesaic.models.lm import LanguageModel
from moesaic.models.state import tensor_shards
from moesaic.nn.attention_backends import AttentionMetadata
from moesaic.nn.inputs import Inputs
from moesaic.policy.serving.budget import ServingBudget, ServingFacts
from moesaic.serve import loading
from moesaic.serve.loading import ExpertStats, ServedModel, load_model
from moesaic.store.expert_files import ExpertFiles
from moesaic.testing.states import whole_shard

CPU = torch.device("cpu")
SMALL = {
    "hidden": 32, "layers": 3, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 48, "vocab": 41,
    "max_positions": 64, "experts": 8,
}  # fmt: skip
"""Matrices of whole cache lines: otherwise the last digit depends on alignment."""
LATENT = {
    "kv_heads": 4, "dense_layers": 1, "expert_groups": 4, "top_expert_groups": 2,
    "latent": {"kv_lora_rank": 10, "q_lora_rank": 12, "qk_rope_head_dim": 4, "v_head_dim": 6},
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "tiny-mixtral": {}, "tiny-olmoe": {}, "tiny-qwen3": {}, "tiny-deepseek": LATENT,
}  # fmt: skip


def config_of(preset: str) -> ModelConfig:
    raw = {**PRESETS[preset], **SMALL, "top_k": 3, **MODELS[preset]}
    return parse(ModelConfig, raw, "test")


def write_random(directory: Path, config: ModelConfig, dtype: torch.dtype) -> None:
    draws = torch.Generator().manual_seed(3)
    shards = []
    for p in parameters(config):
        kept = torch.float32 if p.kind == "bias" else dtype
        values = torch.randn(p.shape, generator=draws) * (0.1 if p.kind == "bias" else 0.4)
        shards.append(whole_shard(p.name, values.to(kept)))
    write_model(directory, config, InMemoryTensors(shards))


def fuse_experts(directory: Path, target: Path, num_experts: int) -> None:
    """Write a directory whose experts are stacked, as transformers 5 writes them."""
    tensors = load_file(directory / SINGLE_NAME)
    stems = {name.split(".experts.")[0] for name in tensors if ".experts." in name}
    for stem in stems:
        matrices: dict[str, list[Tensor]] = {}
        for expert in range(num_experts):
            prefix = f"{stem}.experts.{expert}."
            for name in [name for name in tensors if name.startswith(prefix)]:
                matrices.setdefault(name.split(".")[-2], []).append(tensors.pop(name))
        gate, up, down = (
            torch.stack(matrices[one] if one in matrices else matrices[other])
            for one, other in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"))
        )
        tensors[f"{stem}.experts.gate_up_proj"] = torch.cat((gate, up), 1).contiguous()
        tensors[f"{stem}.experts.down_proj"] = down
    target.mkdir()
    (target / "config.json").write_text((directory / "config.json").read_text())
    save_file(tensors, target / SINGLE_NAME)


@torch.inference_mode()
def passes(model: LanguageModel) -> list[Tensor]:
    """Return the logits of passes with many tokens, and with few, in turn."""
    results, draws = [], torch.Generator().manual_seed(1)
    for rows, length in ((2, 17), (1, 1), (3, 1), (1, 9), (1, 1), (2, 17)):
        tokens = torch.randint(0, model.config.vocab, (rows, length), generator=draws)
        attention = AttentionMetadata.causal(rows, length, window=model.config.window)
        positions = torch.arange(length).expand(rows, -1)
        logits, _ = model(tokens, Inputs(model.rotary(positions), attention=attention))
        results.append(logits)
    return results


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


Lease = Callable[..., ServedModel]


@pytest.fixture
def lease(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lease]:
    """Yield a function that loads a model with this number of experts in memory."""
    opened: list[ServedModel] = []

    def load(directory: Path, num_slots: int, precision: str = "keep") -> ServedModel:
        def divide(facts: ServingFacts) -> ServingBudget:
            del facts
            return ServingBudget(num_slots, 64)

        monkeypatch.setattr(loading, "divide_memory", divide)
        opened.append(load_model(open_origin(directory), CPU, precision, memory=3 << 30))
        return opened[-1]

    yield load
    for one in opened:
        one.close()


FORMS = ("per expert", "fused", "packed", "checkpoint")


@pytest.fixture(scope="module", params=MODELS)
def directories(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Return one model in every form."""
    root, config = tmp_path_factory.mktemp(request.param), config_of(request.param)
    paths = {name: root / name for name in FORMS}
    write_random(paths["per expert"], config, torch.float32)
    fuse_experts(paths["per expert"], paths["fused"], config.experts)
    convert(paths["per expert"], paths["packed"], "packed", max_shard_bytes=150_000)
    convert(paths["per expert"], paths["checkpoint"], "checkpoint", max_shard_bytes=50_000)
    return paths


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_leased_experts_change_no_bit(
    directories: dict[str, Path], lease: Lease, precision: str
) -> None:
    """Two slots, fewer than a pass uses in a layer, and more; every form on disk."""
    plain = load_model(open_origin(directories["per expert"]), CPU, precision).model
    expected = passes(plain)
    cases = [(2, form) for form in FORMS] + [(5, "fused"), (9, "packed"), (15, "checkpoint")]
    for num_slots, form in cases:
        served = lease(directories[form], num_slots, precision)
        assert equal(passes(served.model), expected), (num_slots, form)
        stats = served.expert_stats
        assert stats.misses > num_slots
        assert stats.hits > 0 or num_slots == 2
        assert stats.read_bytes >= stats.misses * 3 * 32 * 48 * 4  # The files are fp32.
        in_memory = served.experts_in_memory()
        assert list(in_memory) == list(plain.config.expert_layers)
        assert 1 <= sum(len(experts) for experts in in_memory.values()) <= num_slots
        served.close()


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float64])
def test_conversions_equal_those_of_loading(
    tmp_path: Path, lease: Lease, stored: torch.dtype
) -> None:
    write_random(tmp_path / "model", config_of("tiny-qwen3"), stored)
    for precision in ("keep", "fp32", "bf16", "fp64"):
        plain = load_model(open_origin(tmp_path / "model"), CPU, precision).model
        served = lease(tmp_path / "model", 4, precision)
        assert equal(passes(served.model), passes(plain)), precision


def test_saved_experts_come_from_the_files(tmp_path: Path, lease: Lease) -> None:
    write_random(tmp_path / "model", config_of("tiny-olmoe"), torch.float32)
    served = lease(tmp_path / "model", 2)
    write_model(
        tmp_path / "again", served.model.config, InMemoryTensors(tensor_shards(served.model))
    )
    again = load_file(tmp_path / "again" / SINGLE_NAME)
    expected = load_file(tmp_path / "model" / SINGLE_NAME)
    assert again.keys() == expected.keys()
    assert all(torch.equal(again[name], expected[name]) for name in expected)


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    write_random(tmp_path / "model", config_of("tiny-mixtral"), torch.float32)
    return tmp_path / "model"


def flip_all_experts(path: Path) -> bytes:
    """Flip a bit in the middle of each tensor of an expert; return the file's content before."""
    before, stat = path.read_bytes(), path.stat()
    content = bytearray(before)
    for entry, start in read_entries(path).values():
        if ".experts." in entry.name:
            content[start + entry.num_bytes // 2] ^= 4
    path.write_bytes(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    return before


EXPERT = r"'.*safetensors'.* 'model\.layers\.\d\.block_sparse_moe\.experts\.\d\.w"


def test_flipped_bits_are_found_and_the_next_pass_recovers(model_path: Path, lease: Lease) -> None:
    """A drive that returns wrong bytes changes no time of the file."""
    served = lease(model_path, 2)
    path, expected = model_path / SINGLE_NAME, passes(served.model)
    stat, before = path.stat(), flip_all_experts(path)
    for _ in range(2):
        with pytest.raises(StoreError, match=f"{EXPERT}.*differ from what was read.*restore"):
            passes(served.model)
    path.write_bytes(before)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert equal(passes(served.model), expected)


@pytest.mark.parametrize("damage", ["cut", "other content"])
def test_changed_files_are_found_at_the_first_reading(
    model_path: Path, lease: Lease, damage: str
) -> None:
    served, path = lease(model_path, 2), model_path / SINGLE_NAME
    if damage == "cut":
        os.truncate(path, path.stat().st_size // 2)
    else:
        path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(StoreError, match=f"has changed since it was opened.*{EXPERT[-20:]}.*start"):
        passes(served.model)


def test_a_cut_file_with_its_old_time_names_the_tensors(model_path: Path, lease: Lease) -> None:
    served, path = lease(model_path, 2), model_path / SINGLE_NAME
    stat = path.stat()
    with mock.patch.object(ExpertFiles, "_check_unchanged"):
        os.truncate(path, stat.st_size // 4)
        with pytest.raises(StoreError, match=rf"ends within .*{EXPERT[-20:]}.*restore"):
            passes(served.model)


def test_a_replaced_file_changes_nothing(model_path: Path, lease: Lease) -> None:
    """The open file stays on the drive until the model is closed."""
    served, path = lease(model_path, 2), model_path / SINGLE_NAME
    expected = passes(served.model)
    (model_path / "new").write_bytes(b"other")
    (model_path / "new").rename(path)
    assert equal(passes(served.model), expected)


def test_damage_of_packed_experts_is_found_at_the_first_reading(
    model_path: Path, tmp_path: Path, lease: Lease
) -> None:
    packed = tmp_path / "packed"
    convert(model_path, packed, "packed")
    served = lease(packed, 2)
    for path in packed.glob("*.safetensors"):
        flip_all_experts(path)
    with pytest.raises(StoreError, match=f"{EXPERT}.*differ from what was packed.*convert"):
        passes(served.model)
    (packed / HASHES_NAME).write_text("{")
    with pytest.raises(WeightsError, match=f"{HASHES_NAME}.*cannot be read.*convert"):
        lease(packed, 2)


def test_packed_experts_are_read_into_their_slots(tmp_path: Path, lease: Lease) -> None:
    """Nothing is copied or converted, and transformers reads the directory."""
    config = config_of("tiny-olmoe").model_copy(update={"hidden": 64, "ffn": 64, "head_dim": 16})
    write_random(tmp_path / "model", config, torch.float32)
    convert(tmp_path / "model", tmp_path / "packed", "packed", "bf16", max_shard_bytes=100_000)
    files = sorted((tmp_path / "packed").glob("*.safetensors"))
    assert len(files) > 4
    for path in files:
        names = list(read_entries(path))
        assert len({".experts." in name for name in names}) == 1
    plain = load_model(open_origin(tmp_path / "packed"), CPU).model
    with mock.patch.object(ExpertFiles, "_read_ranges", side_effect=AssertionError):
        served = lease(tmp_path / "packed", 4)
        assert equal(passes(served.model), passes(plain))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "packed").state_dict()
    expected = load_file(tmp_path / "model" / SINGLE_NAME)
    name = "model.layers.1.self_attn.q_proj.weight"
    assert torch.equal(theirs[name].bfloat16(), expected[name].bfloat16())
    experts = theirs["model.layers.1.mlp.experts.down_proj"]
    for expert in range(config.experts):
        one = expected[f"model.layers.1.mlp.experts.{expert}.down_proj.weight"]
        assert torch.equal(experts[expert].bfloat16(), one.bfloat16())


def test_dense_models_have_nothing_to_pack(tmp_path: Path) -> None:
    config = parse(ModelConfig, {**PRESETS["tiny-dense"], "layers": 1}, "test")
    write_random(tmp_path / "model", config, torch.float32)
    with pytest.raises(ConfigError, match=r'has no experts to pack: .*to = "huggingface"'):
        convert(tmp_path / "model", tmp_path / "packed", "packed")


def test_too_little_memory_names_the_least_which_works(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "used_memory_bytes", lambda: 300 << 20)
    origin = open_origin(model_path)
    with pytest.raises(ConfigError, match=r"memory = 1\.0 MiB is too small.*interpreter") as caught:
        load_model(origin, CPU, memory=1 << 20)
    found = re.search(r'set memory to "(\d+)MiB" or more', str(caught.value))
    assert found is not None
    expected = passes(load_model(origin, CPU).model)
    with load_model(origin, CPU, memory=int(found[1]) << 20) as served:
        assert served.decision is not None
        assert equal(passes(served.model), expected)
    with pytest.raises(ConfigError, match=r"is more than the .* that this process can have"):
        load_model(origin, CPU, memory=1 << 50)


def test_a_model_beyond_the_machine_names_the_budget(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "free_memory_bytes", lambda: 4096)
    with pytest.raises(ConfigError, match=r"weights take .* can have 4\.0 KiB: set memory to"):
        load_model(open_origin(model_path), CPU, "fp64")


def test_a_model_that_fits_is_in_memory(model_path: Path) -> None:
    with load_model(open_origin(model_path), CPU, memory=3 << 30) as served:
        assert served.decision is not None
        assert served.decision.outcome.num_slots == served.decision.facts.num_experts == 24
        assert served.experts_in_memory() == {layer: list(range(8)) for layer in range(3)}
        assert served.expert_stats == ExpertStats()
        assert all(bank.places is None for _, bank in served.model.expert_banks())


def test_a_process_stays_below_its_memory(tmp_path: Path, memory_group: Path | None) -> None:
    """The kernel would kill it; page cache counts, too."""
    if memory_group is None:
        pytest.skip("this process may not make a memory control group of version 1")
    sizes = {
        "hidden": 256, "ffn": 512, "layers": 6, "experts": 16, "vocab": 60_000,
        "max_positions": 8192,
    }  # fmt: skip
    config = config_of("tiny-qwen3").model_copy(update=sizes)
    write_random(tmp_path / "model", config, torch.bfloat16)
    script, limit = Path(__file__).with_name("limited_process.py"), "memory.limit_in_bytes"
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "model"), str(memory_group / limit)],
        preexec_fn=lambda: (memory_group / "cgroup.procs").write_text(str(os.getpid())),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert 2 <= found["slots"] == found["in_memory"] < found["experts"] == 96
    assert found["misses"] > found["slots"]
    assert found["preemptions"] > 0


def test_a_drive_without_direct_io_is_warned_of(
    model_path: Path, lease: Lease, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = passes(load_model(open_origin(model_path), CPU).model)
    monkeypatch.setattr(direct_io, "set_direct_io", lambda file, direct: None)
    served = lease(model_path, 2)
    (warning,) = served.warnings
    assert "no direct I/O" in warning
    assert equal(passes(served.model), expected)
