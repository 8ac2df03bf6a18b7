"""What attention remembers of positions that a model has already seen."""

from __future__ import annotations

import torch
from torch import Tensor

from moesaic.facts.job import ModelConfig


class KeyValueCache:
    """Room for `length` positions of `batch` rows in every layer; rows advance together."""

    def __init__(
        self, model: ModelConfig, batch: int, length: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        latent = model.latent
        # Keys and values, or the narrow vector that both come from and the turned key.
        kept = [(model.kv_heads, model.head_dim)] * 2
        if latent is not None:
            kept = [(1, latent.width + latent.rotary)]
        self._kept = [
            torch.empty(model.layers, batch, heads, length, width, dtype=dtype, device=device)
            for heads, width in kept
        ]
        self.filled = 0
        """Positions that every layer holds; the caller advances it after a pass."""

    def extend(self, layer: int, *new: Tensor) -> tuple[Tensor, ...]:
        """Append new positions to one layer and return all of them."""
        end = self.filled + new[0].shape[2]
        for kept, part in zip(self._kept, new, strict=True):
            kept[layer, :, :, self.filled : end] = part
        return tuple(kept[layer, :, :, :end] for kept in self._kept)
