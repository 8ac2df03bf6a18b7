"""A small model on disk that chats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moesaic.base.config import parse
from moesaic.facts.job import ModelConfig
from moesaic.facts.job.model import PRESETS
from moesaic.models.hf.shards import InMemoryTensors
from moesaic.models.hf.writer import find_companions, write_model
from moesaic.models.init import InitialSource
from moesaic.models.lm import LanguageModel
from moesaic.models.state import tensor_shards
from moesaic.testing.chat_templates import CHATML, write_tokenizer

END_ID = 257
"""Id of the token that ends a text."""


def write_chat_model(directory: Path, **changes: Any) -> Path:
    """Write a model of 260 byte tokens with a chat template as a Hugging Face directory."""
    raw = {
        **PRESETS["tiny-olmoe"], "hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2,
        "head_dim": 8, "ffn": 24, "vocab": 260, "max_positions": 256, **changes,
    }  # fmt: skip
    model = LanguageModel(parse(ModelConfig, raw, "test"))
    InitialSource(1, 0.4).fill(tensor_shards(model))
    tokenizer = write_tokenizer(directory.with_name(f"{directory.name}-tokenizer"), CHATML)
    write_model(
        directory, model.config, InMemoryTensors(tensor_shards(model)),
        companions=find_companions(tokenizer), special_token_ids={"eos_token_id": END_ID},
    )  # fmt: skip
    return directory
