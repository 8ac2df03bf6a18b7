"""Preparation of a model for fine-tuning: freezes parameters and adds LoRA adapters."""

from __future__ import annotations

from moesaic.facts.job.finetune import FinetuneConfig
from moesaic.facts.workload import expert_name, parameters
from moesaic.facts.workload.parameters import A, adapters, is_trainable
from moesaic.models.lm import LanguageModel
from moesaic.models.state import logical_name
from moesaic.nn.attention import Linear


def prepare_for_finetuning(model: LanguageModel, finetune: FinetuneConfig) -> None:
    """Freeze parameters and add adapters as `facts.workload.parameters` decides."""
    config = model.config
    trainable = {param.name for param in parameters(config) if is_trainable(finetune, param)}
    adapted = {param.name.removesuffix(A) for param in adapters(config, finetune)}
    for block, module in model.blocks():
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(logical_name(config, f"{block}.{name}") in trainable)
        for name, submodule in module.named_modules():
            if isinstance(submodule, Linear) and f"{block}.{name}" in adapted:
                submodule.add_adapters(finetune.rank, finetune.scale)
    for layer, bank in model.expert_banks():
        # One arena holds all experts of a layer, so one matrix decides for all of them.
        name = expert_name(layer, bank.experts[0], "gate")
        bank.arena.requires_grad_(name in trainable)
        if name in adapted:
            bank.add_adapters(finetune.rank, finetune.scale)
