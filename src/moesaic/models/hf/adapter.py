"""Export of a run's LoRA adapters in the format of peft: adapter_config.json and
adapter_model.safetensors.

Every matrix has its own A and B under its name in the base model's files, one pair per expert.
peft itself joins these pairs for stacked experts (gate and up as blocks of one B).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moesaic.base.errors import ConfigError
from moesaic.facts.job import ModelConfig
from moesaic.facts.job.finetune import FinetuneConfig
from moesaic.facts.workload import Parameter, parameters
from moesaic.facts.workload.parameters import A, B, adapter_prefix, adapters
from moesaic.models.hf import names
from moesaic.models.hf.config import ADAPTER_NAME
from moesaic.models.hf.origin import Origin
from moesaic.models.hf.settings import Precision
from moesaic.models.hf.shards import (
    Progress,
    TensorWriter,
    atomic_directory,
    plan_items,
)

ADAPTER_WEIGHTS_NAME = "adapter_model.safetensors"
_SUFFIXES = {A: ".lora_A.weight", B: ".lora_B.weight"}
_MERGE_HINT = 'write the merged model instead (to = "huggingface")'


def write_adapter(
    directory: Path, origin: Origin, dtype: Precision = "keep", progress: Progress | None = None
) -> None:
    """Write the adapters of `origin` as the directory `directory`.

    Args:
        directory: must not exist, or be empty.
        origin: a run that trained nothing but adapters.
        dtype: dtype of A and B on file; keep: the dtype of each tensor.
        progress: callback after every tensor.
    """
    finetune, model = require_adapter_only(origin), origin.model
    modules = {
        adapter_prefix(parameter.name): module
        for parameter, module in adapted_modules(model, finetune)
    }

    def name(parameter: Parameter) -> str:
        stem, dot, end = parameter.name.rpartition(".")
        return f"base_model.model.{modules[stem]}{_SUFFIXES[dot + end]}"

    items = plan_items(adapters(model, finetune), origin.tensors, dtype, name)
    config = adapter_config(model, finetune, _job_facts(origin).get("source"))
    with atomic_directory(directory) as partial:
        with TensorWriter(origin.tensors, items, progress) as stream:
            stream.write(partial / ADAPTER_WEIGHTS_NAME, items, {"format": "pt"})
        text = json.dumps(config, indent=2, sort_keys=True) + "\n"
        (partial / ADAPTER_NAME).write_text(text, encoding="utf-8")


def require_adapter_only(origin: Origin) -> FinetuneConfig:
    """Return the fine-tuning settings of `origin`; raise if it changed more than adapters."""
    finetune, job = origin.finetune, _job_facts(origin)
    if finetune is None:
        raise ConfigError(
            f"to = \"adapter\": '{origin.path}' holds whole weights and no adapters: give a run of "
            f'[finetune] method = "lora", or {_MERGE_HINT}'
        )
    if finetune.method != "lora":
        raise ConfigError(
            f"to = \"adapter\": '{origin.path}' has no adapters, as finetune.method = "
            f'"{finetune.method}" changes the weights themselves: {_MERGE_HINT}'
        )
    if finetune.router == "train":
        raise ConfigError(
            f"to = \"adapter\": '{origin.path}' has trained routers (finetune.router = "
            f'"train"), which an adapter cannot hold: {_MERGE_HINT}'
        )
    if origin.model.labels:
        raise ConfigError(
            f"to = \"adapter\": '{origin.path}' has a trained classifier ([credibility]), which an "
            f"adapter cannot hold: {_MERGE_HINT}"
        )
    if origin.model.renormalise != job["model"]["renormalise"]:
        raise ConfigError(
            f"to = \"adapter\": '{origin.path}' was trained with routing.router = "
            f'"{job["routing"]["router"]}", which renormalises weights of experts, and the base '
            f"(model.renormalise = false) does not: {_MERGE_HINT}"
        )
    return finetune


def adapted_modules(
    model: ModelConfig, finetune: FinetuneConfig
) -> Iterator[tuple[Parameter, str]]:
    """Yield every matrix with an adapter, in the order of the blocks, and its module name in the
    base model's files."""
    stems = {one.name.removesuffix(A) for one in adapters(model, finetune)}
    for parameter in parameters(model):
        if adapter_prefix(parameter.name) in stems:
            yield parameter, names.written_name(model, parameter).removesuffix(".weight")


def adapter_config(
    model: ModelConfig, finetune: FinetuneConfig, base_model: str | None
) -> dict[str, Any]:
    """Return the content of adapter_config.json.

    If transformers stacks experts, peft maps every target module with the name of an expert
    matrix to the stack. Dense networks and shared experts with the same names are therefore listed
    by weight, in `target_parameters`. Their tensor names stay the same.
    """
    experts = names.expert_matrices(model)
    modules, weights = set(), set()
    for parameter, module in adapted_modules(model, finetune):
        matrix = module.rpartition(".")[2]
        if parameter.expert is None and matrix in experts:
            weights.add(f"{module.removeprefix(f'model.layers.{parameter.layer}.')}.weight")
        else:
            modules.add(matrix)
    return {
        "alpha_pattern": {},
        "base_model_name_or_path": base_model,
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
        "target_parameters": sorted(weights) or None,
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }


def _job_facts(origin: Origin) -> dict[str, Any]:
    return origin.facts.get("job") or {}
