"""Trainable parameters of a job: the model's own parameters, or LoRA adapters.

An adapter of W [outputs, inputs] is a pair A [rank, inputs] and B [outputs, rank]. Their names
replace `weight` in W's name by `lora_a` and `lora_b`, or append them for an expert's matrix.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from moesaic.facts.job import Job, ModelConfig
from moesaic.facts.job.finetune import AdapterTarget, FinetuneConfig
from moesaic.facts.workload.parameters import Parameter, parameters

A, B = ".lora_a", ".lora_b"
_TARGET_PATHS: dict[str, AdapterTarget] = {
    ".attention.": "attention",
    ".ffn.": "ffn",
    ".moe.shared.": "shared",
}


def adapter_prefix(name: str) -> str:
    """Return the common prefix of the adapter names of parameter `name`."""
    return name.removesuffix(".weight")


def adapters(model: ModelConfig, finetune: FinetuneConfig | None) -> Iterator[Parameter]:
    """Yield every A and B that `finetune` adds to `model`, in block order."""
    if finetune is None or finetune.method != "lora":
        return
    for parameter in parameters(model):
        if _target(parameter) in finetune.targets:
            outputs, inputs = parameter.shape
            prefix, tp_dim = adapter_prefix(parameter.name), parameter.tp_dim
            pairs = (A, (finetune.rank, inputs), 1), (B, (outputs, finetune.rank), 0)
            # TP splits an adapter like its matrix, along the dimension that both have.
            for name, shape, dim in pairs:
                adapter_tp_dim = tp_dim if tp_dim == dim else None
                yield replace(parameter, name=f"{prefix}{name}", shape=shape, tp_dim=adapter_tp_dim)


def is_trainable(finetune: FinetuneConfig | None, parameter: Parameter) -> bool:
    """Return whether a parameter of the model itself has a gradient and moments."""
    if parameter.kind == "bias":
        return False
    if finetune is None:
        return True
    return finetune.router == "train" if parameter.kind == "router" else finetune.method == "full"


def trainable_parameters(job: Job) -> list[Parameter]:
    """Return every parameter that `job` trains."""
    trained = [p for p in parameters(job.model) if is_trainable(job.finetune, p)]
    return trained + list(adapters(job.model, job.finetune))


def describe_trainable(job: Job) -> list[str]:
    """Return lines for the user: trained and total parameters, then sizes by name, with * for
    numbers."""
    sizes: dict[str, int] = {}
    for parameter in trainable_parameters(job):
        pattern = re.sub(r"\b\d+\b|(?<=\.lora_).", "*", parameter.name)
        sizes[pattern] = sizes.get(pattern, 0) + parameter.size
    num_trained = sum(sizes.values())
    num_adapters = sum(p.size for p in adapters(job.model, job.finetune))
    num_parameters = sum(p.size for p in parameters(job.model)) + num_adapters
    fraction = num_trained / num_parameters
    lines = [f"trains {num_trained:,} of {num_parameters:,} parameters ({fraction:.2%})"]
    return lines + [f"  {pattern}: {size:,}" for pattern, size in sizes.items()]


def _target(parameter: Parameter) -> AdapterTarget | None:
    """Return the adapter target of `parameter`; None if it takes no adapter."""
    if parameter.kind == "expert":
        return "experts"
    if parameter.kind != "dense":
        return None
    return next(target for path, target in _TARGET_PATHS.items() if path in parameter.name)
