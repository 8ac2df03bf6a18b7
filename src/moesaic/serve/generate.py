"""Generation: prompts of any lengths in one batch, greedy or sampled, with a key-value cache.

Prompts are padded on the left and the padding is masked; a row's tokens do not depend on its
neighbours. A draw is a function of (seed, row, position), so the same call gives the same text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.base.errors import ConfigError, StoreError
from moesaic.models.lm import LanguageModel
from moesaic.nn.context import Context
from moesaic.nn.randomness import uniform
from moesaic.serve.cache import KeyValueCache


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen."""

    temperature: float = 0.0
    """0: the most likely token; higher values even out the odds."""
    top_p: float = 1.0
    """Only the likeliest tokens whose odds add up to this are drawn from."""
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
    """The continuation of each prompt, without it, up to and including an end token.

    Args:
        model: the model, whole on this process.
        prompts: token ids, at least one each.
        max_tokens: most tokens to add to a prompt.
        end_ids: tokens that end a row.
        sampling: how tokens are chosen; absent: greedily.
        on_token: called with (row, token) as tokens come.
    """
    _check(model, prompts, max_tokens)
    if not prompts or max_tokens == 0:
        return [[] for _ in prompts]
    model.eval()
    sampling = sampling or Sampling()
    device = model.embed.weight.device
    longest = max(len(prompt) for prompt in prompts)
    padding = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)
    tokens = torch.tensor(
        [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=device
    )
    cache = KeyValueCache(
        model.config, len(prompts), longest + max_tokens - 1, model.embed.weight.dtype, device
    )
    results: list[list[int]] = [[] for _ in prompts]
    going = [True] * len(prompts)
    for turn in range(max_tokens):
        logits = _advance(model, tokens, cache, padding)
        if not bool(logits.isfinite().all()):
            raise StoreError(
                f"token {turn + 1} cannot be chosen, as the model's scores are not finite: its "
                "weights are damaged or its training diverged; use an earlier checkpoint, or "
                "precision = fp32 if the weights are sound"
            )
        chosen = choose(logits, sampling, longest + turn - padding)
        for row, token in enumerate(chosen.tolist()):
            if not going[row]:
                continue
            results[row].append(token)
            going[row] = token not in end_ids
            if on_token is not None:
                on_token(row, token)
        if not any(going):
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


def _advance(model: LanguageModel, tokens: Tensor, cache: KeyValueCache, padding: Tensor) -> Tensor:
    """Logits [rows, vocab] after `tokens` [rows, new], which the cache then holds."""
    start, end = cache.filled, cache.filled + tokens.shape[1]
    places = torch.arange(start, end, device=tokens.device)
    context = Context(model.rotary((places[None, :] - padding[:, None]).clamp(min=0)))
    window = model.config.window or end
    if bool(padding.any()) or window < end:
        seen = torch.arange(end, device=tokens.device)
        back = places[:, None] - seen[None, :]
        near = (back >= 0) & (back < window)
        real = seen[None, :] >= padding[:, None]
        # A row of padding sees itself, so that no softmax runs over nothing.
        context.mask = ((near[None] & real[:, None]) | (back == 0)[None])[:, None]
    context.cache = cache
    x = tokens
    for name, block in model.blocks():
        x = block(x[:, -1:] if name == "head" else x, context)
    cache.filled = end
    return x[:, -1]


def choose(logits: Tensor, sampling: Sampling, positions: Tensor) -> Tensor:
    """The next token of each row.

    Args:
        logits: [rows, vocab].
        sampling: how.
        positions: position of the new token in each row, which names its random draw.
    """
    if sampling.temperature == 0.0:
        return logits.argmax(dim=-1)
    odds = (logits.double() / sampling.temperature).softmax(dim=-1)
    ordered, ids = odds.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(dim=-1) - ordered
    ordered = ordered.masked_fill(before >= sampling.top_p, 0.0)
    ordered[:, 0] = ordered[:, 0].clamp(min=1e-300)
    cumulated = ordered.cumsum(dim=-1)
    rows = torch.arange(len(logits), device=logits.device)
    draws = uniform(sampling.seed, "next token", 0, rows, positions)
    place = torch.searchsorted(cumulated, draws[:, None] * cumulated[:, -1:])
    return ids.gather(1, place.clamp(max=ids.shape[1] - 1)).squeeze(1)
