"""Weights into a model that answers: whole, on one device, from whatever form they have on disk."""

from __future__ import annotations

import torch

from moesaic.dist.state import PRECISIONS
from moesaic.models.hf.origin import Origin
from moesaic.models.lm import LanguageModel
from moesaic.models.pieces import pieces
from moesaic.nn.trial import Load, tried
from moesaic.policy.products import fastest


@torch.no_grad()
def load_model(origin: Origin, device: torch.device, precision: str = "keep") -> LanguageModel:
    """The model of `origin` on `device`, filled tensor by tensor.

    Args:
        origin: where the weights are.
        device: where they go.
        precision: fp32, bf16 or fp64; keep: what the embedding is on file.
    """
    dtype = PRECISIONS.get(precision) or origin.tensors.dtype("embed.weight")
    with torch.device("meta"):
        model = LanguageModel(origin.model)
    model.to(dtype).materialise(device)
    for piece in pieces(model):
        piece.tensor.copy_(origin.tensors.read(piece.name))
    return model.eval()


def take_the_fastest(model: LanguageModel, sequences: int) -> None:
    """Have experts multiplied by what is the fastest where each of so many sequences goes on by one
    token, if its device leaves a choice."""
    layers = [moe for _, moe in model.expert_layers()]
    if not layers:
        return
    load = Load.of(layers[0], sequences, layers[0].bank.arena.dtype, back=False)
    times = tried(layers[0].bank, load).seconds
    for moe in layers:
        moe.bank.by = fastest(times) if times else moe.bank.by
