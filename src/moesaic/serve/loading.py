"""Model loading for inference: a whole model on one device, from any form on disk."""

from __future__ import annotations

from typing import Literal

import torch

from moesaic.base.errors import ConfigError
from moesaic.dist.state import PRECISIONS
from moesaic.facts.job.train import MatmulBackend
from moesaic.models.build import allocate_model, build_model
from moesaic.models.hf.origin import Origin
from moesaic.models.lm import LanguageModel
from moesaic.models.state import tensor_shards


@torch.no_grad()
def load_model(
    origin: Origin,
    device: torch.device,
    precision: str = "keep",
    grouped_mm: Literal["auto"] | MatmulBackend = "auto",
) -> LanguageModel:
    """Return the model of `origin` on `device`, filled tensor by tensor.

    Args:
        origin: the model on disk.
        device: device of the parameters.
        precision: fp32, bf16 or fp64; keep: the dtype of the embedding on file.
        grouped_mm: kernels of the expert matmuls on a GPU.
    """
    dtype = PRECISIONS.get(precision) or origin.tensors.dtype("embed.weight")
    if dtype == torch.float64 and grouped_mm not in ("auto", "torch") and origin.model.experts:
        raise ConfigError(
            f'grouped_mm = "{grouped_mm}" with weights in fp64, which the Triton kernels do not '
            'support: set it to "torch", or precision to "fp32"'
        )
    model = build_model(origin.model, dtype)
    allocate_model(model, device)
    for _, moe in model.expert_layers():
        moe.bank.backend = grouped_mm
    origin.fill(tensor_shards(model))
    return model.eval()
