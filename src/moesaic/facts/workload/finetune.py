"""What of a model a job learns: parameters of the model itself, or adapters beside them.

An adapter of W [outputs, inputs] is a pair A [rank, inputs] and B [outputs, rank]; their names are
W's with `lora_a` and `lora_b` in place of `weight`, or behind it for an expert's matrix.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from moesaic.facts.job import Job, ModelConfig
from moesaic.facts.job.finetune import FinetuneConfig, Target
from moesaic.facts.workload.parameters import Parameter, parameters

A, B = ".lora_a", ".lora_b"
_PLACES: dict[str, Target] = {".attention.": "attention", ".ffn.": "ffn", ".moe.shared.": "shared"}


def adapter_stem(name: str) -> str:
    """What the names of the adapters of the parameter `name` begin with."""
    return name.removesuffix(".weight")


def adapters(model: ModelConfig, finetune: FinetuneConfig | None) -> Iterator[Parameter]:
    """Every A and B that `finetune` puts into `model`, in the order of the blocks."""
    if finetune is None or finetune.method != "lora":
        return
    for parameter in parameters(model):
        if _target(parameter) in finetune.targets:
            outputs, inputs = parameter.shape
            stem, cut = adapter_stem(parameter.name), parameter.cut
            halves = (A, (finetune.rank, inputs), 1), (B, (outputs, finetune.rank), 0)
            for name, shape, side in halves:  # Cut as their matrix is, where they have that side.
                own = cut if cut == side else None
                yield replace(parameter, name=f"{stem}{name}", shape=shape, cut=own)


def learns(finetune: FinetuneConfig | None, parameter: Parameter) -> bool:
    """Whether a parameter of the model itself has gradient and moments."""
    if parameter.kind == "bias":
        return False
    if finetune is None:
        return True
    return finetune.router == "train" if parameter.kind == "router" else finetune.method == "full"


def learnt(job: Job) -> list[Parameter]:
    """Everything that `job` learns."""
    own = [p for p in parameters(job.model) if learns(job.finetune, p)]
    return own + list(adapters(job.model, job.finetune))


def describe(job: Job) -> list[str]:
    """What `job` learns, for a person: how much of it all, then by names with * for numbers."""
    sizes: dict[str, int] = {}
    for parameter in learnt(job):
        pattern = re.sub(r"\b\d+\b|(?<=\.lora_).", "*", parameter.name)
        sizes[pattern] = sizes.get(pattern, 0) + parameter.size
    some = sum(sizes.values())
    added = sum(p.size for p in adapters(job.model, job.finetune))
    every = sum(p.size for p in parameters(job.model)) + added
    lines = [f"learns {some:,} of {every:,} parameters ({some / every:.2%})"]
    return lines + [f"  {pattern}: {size:,}" for pattern, size in sizes.items()]


def _target(parameter: Parameter) -> Target | None:
    """Which of the targets a matrix belongs to."""
    if parameter.kind == "expert":
        return "experts"
    if parameter.kind != "dense":
        return None
    return next(target for place, target in _PLACES.items() if place in parameter.name)
