"""Memory of the key-value cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from moesaic.api.engine import default_cache_tokens
from moesaic.base.config import parse
from moesaic.facts.job import ModelConfig
from moesaic.facts.job.model import PRESETS
from moesaic.models.lm import LanguageModel
from moesaic.nn.attention_backends import AttentionMetadata, Segment
from moesaic.policy.serving.budget import serving_facts
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


def temporary_bytes(config: ModelConfig, tokens_per_pass: int) -> int:
    """Return the bytes of a position in the budget, in fp64, beyond its keys and values."""
    facts = serving_facts(
        config, 8, memory_bytes=0, interpreter_bytes=0, read_bytes=0,
        tokens_per_pass=tokens_per_pass, max_running=1,
    )  # fmt: skip
    return facts.position_bytes - config.layers * config.cache_width * 8


def test_the_budget_has_room_for_the_masks_of_a_pass() -> None:
    queries, keys = 1024, 4096
    metadata = AttentionMetadata((Segment(range(1), range(queries), range(keys)),))
    like = torch.empty(0, dtype=torch.float64)
    masks = [metadata.mask(block, like) for block in metadata.blocks]
    num_bytes = sum(mask.nbytes for mask in masks if mask is not None)
    config = parse(ModelConfig, {**PRESETS["tiny-olmoe"], **SMALL}, "test")
    assert 0 < num_bytes <= keys * temporary_bytes(config, queries)


class Copied(TorchFunctionMode):
    """Bytes that a copy of pages takes at once."""

    index_bytes = 0
    layer_bytes = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.__name__ == "index_select":
            self.layer_bytes = max(self.layer_bytes, result.nbytes)
        elif isinstance(result, Tensor) and result.dtype == torch.int64:
            self.index_bytes = max(self.index_bytes, result.nbytes)
        return result


def test_the_budget_has_room_for_the_copy_of_all_pages() -> None:
    changes = {"heads": 8, "kv_heads": 8, "head_dim": 128}
    config = parse(ModelConfig, {**PRESETS["tiny-olmoe"], **SMALL, **changes}, "test")
    cache = PagedCache(config, 16, 4, torch.empty(0, dtype=torch.float64))
    with Copied() as copied:
        cache._copy_pages(range(16), [*range(1, 16), 0])
    num_bytes = copied.layer_bytes + 2 * copied.index_bytes
    assert 0 < num_bytes <= 16 * 4 * temporary_bytes(config, 32)
