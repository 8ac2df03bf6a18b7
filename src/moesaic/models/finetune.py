"""A model made ready for fine-tuning: what does not learn is frozen, adapters are put in."""

from __future__ import annotations

from moesaic.facts.job.finetune import FinetuneConfig
from moesaic.facts.workload import expert_name, parameters
from moesaic.facts.workload.finetune import A, adapters, learns
from moesaic.models.lm import LanguageModel
from moesaic.models.pieces import logical
from moesaic.nn.attention import Linear


def prepare(model: LanguageModel, finetune: FinetuneConfig) -> None:
    """Leave gradients, and put adapters, where `facts.workload.finetune` says."""
    config = model.config
    learning = {one.name for one in parameters(config) if learns(finetune, one)}
    adapted = {one.name.removesuffix(A) for one in adapters(config, finetune)}
    for block, module in model.blocks():
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(logical(config, f"{block}.{name}") in learning)
        for name, part in module.named_modules():
            if isinstance(part, Linear) and f"{block}.{name}" in adapted:
                part.adapt(finetune.rank, finetune.scale)
    for layer, bank in model.banks():
        # All that is in an arena is of one parameter: what is true of one matrix is of all.
        name = expert_name(layer, bank.experts[0], "gate")
        bank.arena.requires_grad_(name in learning)
        if name in adapted:
            bank.adapt(finetune.rank, finetune.scale)
