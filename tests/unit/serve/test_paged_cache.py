"""Memory of the key-value cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moesaic.api.engine import default_cache_tokens
from moesaic.base.config import parse
from moesaic.facts.job import ModelConfig
from moesaic.facts.job.model import PRESETS
from moesaic.models.lm import LanguageModel
from moesaic.serve.cache import PagedCache

SMALL = {
    "hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 24, "vocab": 41,
    "max_positions": 64,
}  # fmt: skip
LATENT = {
    "kv_heads": 4,
    "latent": {"kv_lora_rank": 10, "q_lora_rank": 12, "qk_rope_head_dim": 4, "v_head_dim": 6},
}
CASES: dict[str, tuple[dict[str, Any], list[tuple[int, int]]]] = {
    "tiny-olmoe": ({}, [(2, 8), (2, 8)]), "tiny-deepseek": (LATENT, [(1, 10 + 4)]),
}  # fmt: skip
"""Changes of a preset, and heads and width of what its cache holds for each position."""


@pytest.mark.parametrize("name", CASES)
def test_the_cache_holds_compressed_vectors_and_fits_the_free_memory(name: str) -> None:
    changes, shapes = CASES[name]
    config = parse(ModelConfig, {**PRESETS[name], **SMALL, **changes}, "test")
    model = LanguageModel(config).double()
    cache = PagedCache(config, 10, 4, model.embed.weight.detach())
    cache.write_to(torch.tensor([8, 9, 31]))
    new = [torch.rand(1, heads, 3, width, dtype=torch.float64) for heads, width in shapes]
    seen = cache.extend(1, *new)
    for whole, part in zip(seen, new, strict=True):
        assert whole.shape == (1, part.shape[1], 40, part.shape[3])
        assert torch.equal(whole[:, :, [8, 9, 31]], part)
    num_bytes = sum(whole.untyped_storage().nbytes() for whole in seen)
    assert num_bytes == 8 * config.layers * 40 * sum(heads * width for heads, width in shapes)
    assert default_cache_tokens(config, 8, 32, 4 * num_bytes) == 40
    assert default_cache_tokens(config, 8, 3, 1 << 30) == 3 * 64
