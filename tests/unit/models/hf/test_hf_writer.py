"""Sharding, dtypes, reproducible bytes, and no partial output under the target's name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from directories import random_tensors, read_back
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from moesaic.base.errors import ConfigError, StoreError, WeightsError
from moesaic.facts.job import ModelConfig
from moesaic.models.hf import names
from moesaic.models.hf.reader import INDEX_NAME, SINGLE_NAME
from moesaic.models.hf.settings import ConvertConfig, Precision
from moesaic.models.hf.shards import InMemoryTensors
from moesaic.models.hf.writer import find_companions, write_model

OLMOE = ModelConfig(
    family="olmoe", vocab=21, hidden=8, layers=2, heads=2, kv_heads=1, head_dim=4, ffn=6,
    experts=3, top_k=2,
)  # fmt: skip


def weights() -> InMemoryTensors:
    return random_tensors(OLMOE)


def same(directory: Path, tensors: InMemoryTensors, model: ModelConfig = OLMOE) -> None:
    found = read_back(directory)
    mapping = names.logical_names(model)
    assert found.keys() == mapping.keys()
    for tensor, logical in mapping.items():
        assert torch.equal(found[tensor], tensors.read(logical)), tensor


def test_small_model_is_one_file(tmp_path: Path) -> None:
    tensors = weights()
    write_model(tmp_path / "out", OLMOE, tensors)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"config.json", SINGLE_NAME}
    with safe_open(tmp_path / "out" / SINGLE_NAME, "pt") as file:
        assert file.metadata() == {"format": "pt"}
    same(tmp_path / "out", tensors)


@pytest.mark.parametrize("limit", [1, 700, 2000])
def test_shards_stay_below_the_limit(limit: int, tmp_path: Path) -> None:
    tensors = weights()
    write_model(tmp_path / "out", OLMOE, tensors, ConvertConfig(max_shard_bytes=limit))
    same(tmp_path / "out", tensors)
    index = json.loads((tmp_path / "out" / INDEX_NAME).read_text())
    files = sorted((tmp_path / "out").glob("model-*.safetensors"))
    expected = [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    assert [file.name for file in files] == expected
    total = 0
    for file in files:
        contents = load_file(file)
        assert all(index["weight_map"][name] == file.name for name in contents)
        num_bytes = sum(tensor.nbytes for tensor in contents.values())
        assert num_bytes <= limit or len(contents) == 1
        total += num_bytes
    assert index["metadata"]["total_size"] == total
    assert len(index["weight_map"]) == len(names.logical_names(OLMOE))


def test_tensors_are_aligned_and_config_names_the_main_dtype(tmp_path: Path) -> None:
    odd = ModelConfig(
        family="llama", vocab=3, hidden=7, layers=1, heads=1, kv_heads=1, head_dim=2, ffn=3
    )
    tensors = random_tensors(odd, torch.bfloat16, wide=("norm",))
    write_model(tmp_path / "out", odd, tensors)
    same(tmp_path / "out", tensors, odd)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    data = (tmp_path / "out" / SINGLE_NAME).read_bytes()
    length = int.from_bytes(data[:8], "little")
    table = json.loads(data[8 : 8 + length])
    assert length % 8 == 0
    widths = {"F32": 4, "BF16": 2}
    for name, entry in table.items():
        if name != "__metadata__":
            assert entry["data_offsets"][0] % widths[entry["dtype"]] == 0, name


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("fp64", torch.float64), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
)
def test_dtype_is_converted(precision: str, dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = weights()
    write_model(tmp_path / "out", OLMOE, tensors, ConvertConfig(dtype=precision))  # type: ignore[arg-type]
    found = read_back(tmp_path / "out")
    for tensor, logical in names.logical_names(OLMOE).items():
        assert torch.equal(found[tensor], tensors.read(logical).to(dtype)), tensor
    stated = json.loads((tmp_path / "out" / "config.json").read_text())
    assert stated["dtype"] == stated["torch_dtype"] == str(dtype).removeprefix("torch.")


@pytest.mark.parametrize(
    ("dtype", "value", "precision", "remedy"),
    [
        (torch.float64, 1e300, "fp32", "keep"),
        (torch.float64, 1e300, "bf16", "keep"),
        (torch.float32, 3.4028e38, "bf16", "keep"),
        (torch.float32, 70000.0, "fp16", "bf16"),
    ],
    ids=str,
)
def test_overflow_is_rejected_and_infinities_are_kept(
    dtype: torch.dtype, value: float, precision: Precision, remedy: str, tmp_path: Path
) -> None:
    tensors = random_tensors(OLMOE, dtype)
    tensors.read("head.weight").view(-1)[3] = float("inf")
    write_model(tmp_path / "kept", OLMOE, tensors, ConvertConfig(dtype=precision))
    assert read_back(tmp_path / "kept")["lm_head.weight"].isinf().sum() == 1
    tensors.read("head.weight").view(-1)[4] = value
    with pytest.raises(WeightsError, match=rf"lm_head\.weight.*overflow.*: set dtype to {remedy}"):
        write_model(tmp_path / "refused", OLMOE, tensors, ConvertConfig(dtype=precision))
    assert not (tmp_path / "refused").exists()


def test_dangling_companion_link_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").symlink_to("blobs/missing")
    with pytest.raises(WeightsError, match="is a link to 'blobs/missing', which is not there"):
        find_companions(tmp_path)


def test_targets_that_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is a file"):
        write_model(tmp_path / "file", OLMOE, weights())
    with pytest.raises(ConfigError, match="is not empty"):
        write_model(tmp_path, OLMOE, weights())
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    with pytest.raises(ConfigError, match=r"'.*link' is a link.*: name a directory in it"):
        write_model(tmp_path / "link", OLMOE, weights())
    monkeypatch.setattr("os.path.ismount", lambda path: Path(path).name == "empty")
    with pytest.raises(ConfigError, match=r"'.*empty' is a mount point"):
        write_model(tmp_path / "empty", OLMOE, weights())
    assert not any((tmp_path / "empty").iterdir())
    monkeypatch.undo()
    write_model(tmp_path / "empty", OLMOE, weights())


def test_companions_are_copied_byte_for_byte(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("tokenizer.json", "generation_config.json", "merges.txt", "notes.txt"):
        (source / name).write_bytes(b"\xff\x00" + name.encode())
    write_model(tmp_path / "out", OLMOE, weights(), companions=find_companions(source))
    carried = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    for name in ("tokenizer.json", "generation_config.json", "merges.txt"):
        assert carried[name] == (source / name).read_bytes()
    assert "notes.txt" not in carried
    assert find_companions(tmp_path / "nowhere") == []


def test_progress_counts_every_byte(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    write_model(
        tmp_path / "out", OLMOE, weights(), progress=lambda done, total: calls.append((done, total))
    )
    assert len(calls) == len(names.logical_names(OLMOE))
    assert calls == sorted(calls)
    assert (
        calls[-1][0] == calls[-1][1] == sum(t.nbytes for t in read_back(tmp_path / "out").values())
    )


class Broken(InMemoryTensors):
    """Fails half-way, and checks meanwhile that the target does not exist."""

    def __init__(self, tensors: InMemoryTensors, target: Path, error: Exception) -> None:
        self._tensors, self._target, self._error = tensors, target, error

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors.dtype(name)

    def read(self, name: str) -> Tensor:
        assert not self._target.exists()
        if name == "layers.1.attention.q.weight":
            raise self._error
        return self._tensors.read(name)


@pytest.mark.parametrize("error", [KeyError("gone"), OSError(28, "No space left on device")])
def test_failed_write_leaves_nothing(error: Exception, tmp_path: Path) -> None:
    target = tmp_path / "deep" / "out"
    expected = StoreError if isinstance(error, OSError) else KeyError
    with pytest.raises(expected) as caught:
        write_model(
            target, OLMOE, Broken(weights(), target, error), ConvertConfig(max_shard_bytes=500)
        )
    assert list((tmp_path / "deep").iterdir()) == []
    if isinstance(error, OSError):
        assert "No space left" in str(caught.value)
        assert str(target) in str(caught.value)
