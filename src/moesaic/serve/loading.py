"""Weights into a model that answers: whole, on one device, from whatever form they have on disk."""

from __future__ import annotations

from typing import Literal

import torch

from moesaic.base.errors import ConfigError
from moesaic.dist.state import PRECISIONS
from moesaic.facts.job.train import Products
from moesaic.models.hf.origin import Origin
from moesaic.models.lm import LanguageModel
from moesaic.models.pieces import pieces


@torch.no_grad()
def load_model(
    origin: Origin,
    device: torch.device,
    precision: str = "keep",
    products: Literal["auto"] | Products = "auto",
) -> LanguageModel:
    """The model of `origin` on `device`, filled tensor by tensor.

    Args:
        origin: where the weights are.
        device: where they go.
        precision: fp32, bf16 or fp64; keep: what the embedding is on file.
        products: what multiplies experts; auto: as is usual of the device.
    """
    dtype = PRECISIONS.get(precision) or origin.tensors.dtype("embed.weight")
    if dtype == torch.float64 and products not in ("auto", "torch") and origin.model.experts:
        raise ConfigError(
            f'products = "{products}" with weights in fp64, which its kernels do not multiply: set '
            'it to "torch", or precision to "fp32"'
        )
    with torch.device("meta"):
        model = LanguageModel(origin.model)
    model.to(dtype).materialise(device)
    for _, moe in model.expert_layers():
        moe.bank.by = products
    for piece in pieces(model):
        piece.tensor.copy_(origin.tensors.read(piece.name))
    return model.eval()
