"""The adapters of a LoRA run alone, as the peft library has them on file: adapter_config.json and
adapter_model.safetensors, to be put beside the weights that the run started from.

Every matrix has A and B of its own under the name that it has in the base's files, experts one by
one. peft joins those of experts (gate and up as blocks of one B) where transformers holds experts
stacked.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from moesaic.base.errors import ConfigError
from moesaic.facts.job import ModelConfig
from moesaic.facts.job.finetune import FinetuneConfig
from moesaic.facts.workload import Parameter, parameters
from moesaic.facts.workload.finetune import A, B, adapter_stem, adapters
from moesaic.models.hf import names
from moesaic.models.hf.config import ADAPTER_NAME
from moesaic.models.hf.origin import Origin
from moesaic.models.hf.settings import Precision
from moesaic.models.hf.shards import (
    Progress,
    Stream,
    lay_out,
    refuse_occupied,
    staged,
    total_bytes,
)

FILE_NAME = "adapter_model.safetensors"
_ENDS = {A: ".lora_A.weight", B: ".lora_B.weight"}
_MERGED = 'write the merged model instead (to = "huggingface")'


class Adapted(NamedTuple):
    """A matrix with an adapter beside it."""

    parameter: Parameter
    module: str
    """Its name in the base's files, without `weight`."""

    @property
    def leaf(self) -> str:
        """The last part of that name."""
        return self.module.rpartition(".")[2]

    @property
    def place(self) -> str:
        """The name within its layer."""
        return self.module.removeprefix(f"model.layers.{self.parameter.layer}.")


def write_adapter(
    directory: Path, origin: Origin, dtype: Precision = "keep", progress: Progress | None = None
) -> None:
    """Write the adapters of `origin` as the directory `directory`, which must not exist.

    Args:
        directory: must not exist, or be empty.
        origin: of a run whose adapters are all that it learnt.
        dtype: of A and B on file; keep leaves each its own.
        progress: told of every tensor.
    """
    refuse_occupied(directory)
    finetune, model = alone(origin), origin.model
    own = {adapter_stem(one.parameter.name): one.module for one in adapted(model, finetune)}

    def name(parameter: Parameter) -> str:
        stem, dot, end = parameter.name.rpartition(".")
        return f"base_model.model.{own[stem]}{_ENDS[dot + end]}"

    items = lay_out(adapters(model, finetune), origin.tensors, dtype, name)
    config = config_of(model, finetune, _job(origin).get("source"))
    with staged(directory) as partial:
        with Stream(origin.tensors, total_bytes(items), progress) as stream:
            stream.write(partial / FILE_NAME, items, {"format": "pt"})
        text = json.dumps(config, indent=2, sort_keys=True) + "\n"
        (partial / ADAPTER_NAME).write_text(text, encoding="utf-8")


def alone(origin: Origin) -> FinetuneConfig:
    """How the adapters of `origin` were learnt; raises if they are not all that makes it differ
    from the weights that it started from."""
    finetune, job = origin.finetune, _job(origin)
    if finetune is None:
        raise ConfigError(
            f"to = \"adapter\": '{origin.path}' holds whole weights and no adapters: give a run of "
            f'[finetune] method = "lora", or {_MERGED}'
        )
    if finetune.method != "lora":
        raise ConfigError(
            f"to = \"adapter\": '{origin.path}' has no adapters, as finetune.method = "
            f'"{finetune.method}" changes the weights themselves: {_MERGED}'
        )
    if finetune.router == "train":
        raise ConfigError(
            f"to = \"adapter\": '{origin.path}' has routers that learnt (finetune.router = "
            f'"train"), which an adapter does not hold: {_MERGED}'
        )
    if origin.model.renormalise != job["model"]["renormalise"]:
        raise ConfigError(
            f"to = \"adapter\": '{origin.path}' was trained with routing.router = "
            f'"{job["routing"]["router"]}", which renormalises weights of experts, and the base '
            f"(model.renormalise = false) does not: {_MERGED}"
        )
    return finetune


def adapted(model: ModelConfig, finetune: FinetuneConfig) -> Iterator[Adapted]:
    """Every matrix with an adapter, in the order of the blocks."""
    stems = {one.name.removesuffix(A) for one in adapters(model, finetune)}
    for parameter in parameters(model):
        if adapter_stem(parameter.name) in stems:
            module = names.written_name(model, parameter).removesuffix(".weight")
            yield Adapted(parameter, module)


def config_of(model: ModelConfig, finetune: FinetuneConfig, base: str | None) -> dict[str, Any]:
    """What adapter_config.json says.

    Where transformers has stacked experts, peft takes every module that is called as one of their
    matrices for those. What is called alike elsewhere (dense networks, shared experts) is named by
    its weight; its tensors are called the same.
    """
    found = list(adapted(model, finetune))
    experts = names.expert_matrices(model)
    apart = [one for one in found if one.parameter.expert is None and one.leaf in experts]
    modules = {one.leaf for one in found} - {one.leaf for one in apart}
    modules |= {one.leaf for one in found if one.parameter.expert is not None}
    return {
        "alpha_pattern": {},
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": int(finetune.alpha) if finetune.alpha.is_integer() else finetune.alpha,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": finetune.rank,
        "rank_pattern": {},
        "target_modules": sorted(modules),
        "target_parameters": sorted({f"{one.place}.weight" for one in apart}) or None,
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }


def _job(origin: Origin) -> dict[str, Any]:
    return origin.facts.get("job") or {}
