"""Key-value cache for incremental decoding."""

from __future__ import annotations

import torch
from torch import Tensor

from moesaic.facts.job import ModelConfig


class KeyValueCache:
    """Keys and values of up to `length` positions in every layer; all `batch` rows advance
    together."""

    def __init__(
        self, model: ModelConfig, batch: int, length: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        latent = model.latent
        # Latent attention caches its compressed key-value vector and the rotary key instead.
        shapes = [(model.kv_heads, model.head_dim)] * 2
        if latent is not None:
            shapes = [(1, latent.kv_lora_rank + latent.qk_rope_head_dim)]
        self._buffers = [
            torch.empty(model.layers, batch, heads, length, width, dtype=dtype, device=device)
            for heads, width in shapes
        ]
        self.num_filled = 0
        """Positions filled in every layer; the caller advances it after a forward pass."""

    def extend(self, layer: int, *new: Tensor) -> tuple[Tensor, ...]:
        """Append new positions to one layer and return all of its positions."""
        end = self.num_filled + new[0].shape[2]
        for buffer, values in zip(self._buffers, new, strict=True):
            buffer[layer, :, :, self.num_filled : end] = values
        return tuple(buffer[layer, :, :, :end] for buffer in self._buffers)
