"""A model made ready for fine-tuning: what does not learn is frozen, adapters are put in."""

from __future__ import annotations

from torch import nn

from moesaic.facts.job.finetune import FinetuneConfig
from moesaic.models.lm import LanguageModel
from moesaic.nn.attention import Linear


def prepare(model: LanguageModel, finetune: FinetuneConfig) -> None:
    """Leave gradients to what `finetune` says; `facts.workload.finetune` names the same."""
    for name, parameter in model.named_parameters():
        routes = ".moe.router." in name
        learns = finetune.router == "train" if routes else finetune.method == "full"
        parameter.requires_grad_(learns)
    if finetune.method == "full":
        return
    for layer in model.decoder_layers():
        shared = None if layer.moe is None else layer.moe.shared
        parts = {"attention": layer.attention, "ffn": layer.ffn, "shared": shared}
        for target, part in parts.items():
            if target in finetune.targets and part is not None:
                _adapt(part, finetune)
        if layer.moe is not None and "experts" in finetune.targets:
            layer.moe.bank.adapt(finetune.rank, finetune.scale)


def _adapt(part: nn.Module, finetune: FinetuneConfig) -> None:
    for module in part.modules():
        if isinstance(module, Linear):
            module.adapt(finetune.rank, finetune.scale)
