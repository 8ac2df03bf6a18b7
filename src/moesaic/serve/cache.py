"""Keys and values of positions that a model has already seen."""

from __future__ import annotations

import torch
from torch import Tensor

from moesaic.facts.job import ModelConfig


class KeyValueCache:
    """Room for `length` positions of `batch` rows in every layer; rows advance together."""

    def __init__(
        self, model: ModelConfig, batch: int, length: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (model.layers, batch, model.kv_heads, length, model.head_dim)
        self._keys = torch.empty(shape, dtype=dtype, device=device)
        self._values = torch.empty(shape, dtype=dtype, device=device)
        self.filled = 0
        """Positions that every layer holds; the caller advances it after a pass."""

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append new positions to one layer and return all of them."""
        end = self.filled + keys.shape[2]
        self._keys[layer, :, :, self.filled : end] = keys
        self._values[layer, :, :, self.filled : end] = values
        return self._keys[layer, :, :, :end], self._values[layer, :, :, :end]
