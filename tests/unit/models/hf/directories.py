"""Whole models in memory, and model directories made of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moesaic.base import direct_io
from moesaic.cli.main import main
from moesaic.dist.state import TensorShard
from moesaic.facts.job import ModelConfig
from moesaic.facts.workload import Parameter, parameters
from moesaic.models.hf import names
from moesaic.models.hf.config import config_text
from moesaic.models.hf.origin import Origin
from moesaic.models.hf.reader import DTYPES, INDEX_NAME, SINGLE_NAME
from moesaic.models.hf.shards import InMemoryTensors
from moesaic.store.expert_files import ExpertFiles
from moesaic.testing.jobs import RUN_JOB
from moesaic.testing.states import whole_shard

TUNE_JOB = f"""
[model]
from = "base"

{RUN_JOB[RUN_JOB.index("[data]") :]}
[optimizer]
lr = 0.03
"""


def tune(*sets: str, out: str = "run", flags: Sequence[str] = ()) -> int:
    """Train over the directory `base` in the working directory, with the items of `sets`."""
    if not Path("text.txt").exists():
        Path("text.txt").write_text("Of mosaics and their stones. " * 40)
    Path("job.toml").write_text(TUNE_JOB)
    arguments = [word for item in sets for word in ("--set", item)]
    return main(["train", "job.toml", "--out", out, *arguments, *flags])


def lora(targets: Sequence[str]) -> tuple[str, ...]:
    """Return the items that train adapters of rank 4 of `targets`."""
    return (
        'finetune.method="lora"', "finetune.rank=4", "finetune.alpha=6.5",
        f"finetune.targets={json.dumps(targets)}",
    )  # fmt: skip


def whole(
    model: ModelConfig, fill: Callable[[tuple[int, ...]], Tensor] = torch.randn
) -> list[TensorShard]:
    """Return all parameters, each as one shard."""
    return [whole_shard(p.name, fill(p.shape)) for p in parameters(model)]


def random_tensors(
    model: ModelConfig, dtype: torch.dtype = torch.float32, wide: Iterable[str] = ()
) -> InMemoryTensors:
    """Return random parameters of `dtype`, those of a kind in `wide` in fp32."""

    def draw(p: Parameter) -> Tensor:
        return torch.randn(p.shape, dtype=torch.float32 if p.kind in wide else dtype)

    return InMemoryTensors([whole_shard(p.name, draw(p)) for p in parameters(model)])


def on_file(model: ModelConfig, logical: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return parameters by their written name."""
    return {tensor: logical[name] for tensor, name in names.logical_names(model).items()}


def put(directory: Path, model: ModelConfig, tensors: dict[str, Tensor]) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(config_text(model, "float32"))
    save_file(tensors, directory / SINGLE_NAME)
    return directory


def put_sharded(
    directory: Path,
    tensors: dict[str, Tensor],
    file_of: Callable[[int, str], str] = lambda place, _: f"part-{place % 3}.safetensors",
) -> dict[str, str]:
    """Distribute the tensors over files by place and name, and return the weight map."""
    weight_map = {name: file_of(place, name) for place, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        save_file({n: t for n, t in tensors.items() if weight_map[n] == file}, directory / file)
    (directory / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    return weight_map


def read_back(directory: Path) -> dict[str, Tensor]:
    """Return the tensors of all weight files."""
    found: dict[str, Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        found |= load_file(file)
    return found


def experts_in_place(origin: Origin, dtype: str) -> dict[str, Tensor]:
    """Return the matrices of experts by logical name, as blocks of `dtype` have them."""
    model, found = origin.model, dict[str, Tensor]()
    experts = [one for layer in origin.stored_experts().values() for one in layer]
    size = model.hidden * model.ffn
    files = ExpertFiles(experts, 3 * size, dtype)
    for block, expert in enumerate(experts):
        memory = np.frombuffer(direct_io.aligned_buffer(files.stride_bytes), np.uint8)
        files.read(block, memory)
        values = torch.from_numpy(memory).view(DTYPES[dtype])[: 3 * size].split(size)
        for matrix, one in zip(("gate", "up", "down"), values, strict=True):
            columns = model.ffn if matrix == "down" else model.hidden
            found[f"{expert.name}.{matrix}"] = one.view(-1, columns)
    files.close()
    return found


def digests(directory: Path) -> dict[str, str]:
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in directory.rglob("*")
        if path.is_file()
    }
