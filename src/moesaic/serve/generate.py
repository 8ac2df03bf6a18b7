"""Batched text generation with a key-value cache, greedy or sampled.

Prompts of different lengths are padded on the left. Nothing attends to the padding, so a row's
tokens do not depend on the other rows. Random draws depend only on (seed, row, position), so the
same call returns the same text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.base.errors import ConfigError, StoreError
from moesaic.facts.job import ModelConfig
from moesaic.kernels.randomness import uniform
from moesaic.models.lm import LanguageModel
from moesaic.nn.attention_backends import AttentionMetadata
from moesaic.nn.inputs import Inputs


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


@dataclass(frozen=True)
class Sampling:
    """Settings of token sampling."""

    temperature: float = 0.0
    """Sampling temperature; 0 picks the most likely token."""
    top_p: float = 1.0
    """Nucleus sampling: draw from the likeliest tokens whose probabilities sum to this."""
    seed: int = 0


@torch.inference_mode()
def generate(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    *,
    end_ids: Sequence[int] = (),
    sampling: Sampling | None = None,
    on_token: Callable[[int, int], None] | None = None,
) -> list[list[int]]:
    """Return the continuation of each prompt, without the prompt, up to and including an end token.

    Args:
        model: the whole model, on this process.
        prompts: token ids, at least one each.
        max_tokens: maximum number of tokens to generate per prompt.
        end_ids: tokens that end a row.
        sampling: sampling settings; None: greedy.
        on_token: callback with (row, token) for every new token.
    """
    _check(model, prompts, max_tokens)
    if not prompts or max_tokens == 0:
        return [[] for _ in prompts]
    model.eval()
    sampling = sampling or Sampling()
    device = model.embed.weight.device
    longest = max(len(prompt) for prompt in prompts)
    padding = [longest - len(prompt) for prompt in prompts]
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    tokens = torch.tensor(
        [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=device
    )
    cache = KeyValueCache(
        model.config, len(prompts), longest + max_tokens - 1, model.embed.weight.dtype, device
    )
    results: list[list[int]] = [[] for _ in prompts]
    active = [True] * len(prompts)
    for step in range(max_tokens):
        logits = _advance(model, tokens, cache, padding)
        if not bool(logits.isfinite().all()):
            raise StoreError(
                f"token {step + 1} cannot be chosen, as the model's scores are not finite: its "
                "weights are damaged or its training diverged; use an earlier checkpoint, or "
                "precision = fp32 if the weights are sound"
            )
        chosen = sample_tokens(logits, sampling, lengths + step)
        for row, token in enumerate(chosen.tolist()):
            if not active[row]:
                continue
            results[row].append(token)
            active[row] = token not in end_ids
            if on_token is not None:
                on_token(row, token)
        if not any(active):
            break
        tokens = chosen[:, None]
    return results


def _check(model: LanguageModel, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
    vocab, limit = model.config.vocab, model.config.max_positions
    for row, prompt in enumerate(prompts):
        if not prompt:
            raise ConfigError(f"prompt {row} holds no token: give it at least one")
        if not all(0 <= token < vocab for token in prompt):
            raise ConfigError(
                f"prompt {row} holds a token beyond the model's vocabulary of {vocab}: "
                "it was made with another tokenizer"
            )
        if len(prompt) + max_tokens > limit:
            raise ConfigError(
                f"prompt {row} has {len(prompt)} tokens and max_tokens = {max_tokens}: together "
                f"more than the model's {limit} positions; lower max_tokens or shorten the prompt"
            )


def _advance(
    model: LanguageModel, tokens: Tensor, cache: KeyValueCache, padding: Sequence[int]
) -> Tensor:
    """Return logits [rows, vocab] after `tokens` [rows, new], and add them to the cache."""
    start, end = cache.num_filled, cache.num_filled + tokens.shape[1]
    positions = torch.arange(start, end) - torch.tensor(padding)[:, None]
    rotary = model.rotary(positions.clamp(min=0).to(tokens.device))
    attention = AttentionMetadata.cached(padding, range(start, end), model.config.window)
    x, inputs = tokens, Inputs(rotary, attention=attention, cache=cache)
    for name, block in model.blocks():
        x, _ = block(x[:, -1:] if name == "head" else x, inputs)
    cache.num_filled = end
    return x[:, -1]


def sample_tokens(logits: Tensor, sampling: Sampling, positions: Tensor) -> Tensor:
    """Return the next token of each row.

    Args:
        logits: [rows, vocab].
        sampling: sampling settings.
        positions: position of the new token in each row; it selects the random number.
    """
    if sampling.temperature == 0.0:
        return logits.argmax(dim=-1)
    probabilities = (logits.double() / sampling.temperature).softmax(dim=-1)
    sorted_probabilities, ids = probabilities.sort(dim=-1, descending=True, stable=True)
    before = sorted_probabilities.cumsum(dim=-1) - sorted_probabilities
    sorted_probabilities = sorted_probabilities.masked_fill(before >= sampling.top_p, 0.0)
    sorted_probabilities[:, 0] = sorted_probabilities[:, 0].clamp(min=1e-300)
    cumulated = sorted_probabilities.cumsum(dim=-1)
    rows = torch.arange(len(logits), device=logits.device)
    draws = uniform(sampling.seed, "next token", 0, rows, positions)
    index = torch.searchsorted(cumulated, draws[:, None] * cumulated[:, -1:])
    return ids.gather(1, index.clamp(max=ids.shape[1] - 1)).squeeze(1)
