"""Generation against recomputing the whole sequence for each token, and sampling."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from moesaic.base.config import parse
from moesaic.base.errors import ConfigError
from moesaic.facts.job import ModelConfig
from moesaic.facts.job.model import PRESETS
from moesaic.facts.job.train import MatmulBackend
from moesaic.models.init import InitialSource
from moesaic.models.lm import LanguageModel
from moesaic.models.state import tensor_shards
from moesaic.nn.attention_backends import AttentionMetadata
from moesaic.nn.inputs import Inputs
from moesaic.serve.generate import KeyValueCache, Sampling, generate, sample_tokens

SMALL = {
    "hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 24, "vocab": 41,
}  # fmt: skip
LATENT = {
    "kv_heads": 4,
    "latent": {"kv_lora_rank": 10, "q_lora_rank": 12, "qk_rope_head_dim": 4, "v_head_dim": 6},
}
PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7]]


MODELS: dict[str, dict[str, object]] = {
    "tiny-dense": {}, "tiny-mixtral": {}, "tiny-olmoe": {}, "tiny-qwen3": {},
    "tiny-mixtral with a window": {"window": 4}, "tiny-qwen3 with a window": {"window": 10},
    "tiny-qwen3 with yarn": {
        "rope_scaling": {
            "kind": "yarn", "factor": 4.0, "original_max_positions": 8, "beta_fast": 2.0,
        },
    },
    "tiny-deepseek": LATENT, "tiny-deepseek with yarn": {
        **LATENT, "rope_scaling": {
            "kind": "yarn", "factor": 4.0, "original_max_positions": 8, "mscale_all_dim": 0.7,
        },
    },
}  # fmt: skip


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> LanguageModel:
    preset = PRESETS[request.param.split()[0]]
    raw = {**preset, **SMALL, "max_positions": 64, **MODELS[request.param]}
    config = parse(ModelConfig, raw, "test")
    model = LanguageModel(config).double()
    InitialSource(1, 0.4).fill(tensor_shards(model))
    return model


def slow_greedy(model: LanguageModel, prompt: list[int], max_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(max_tokens):
        attention = AttentionMetadata.causal(1, len(tokens), window=model.config.window)
        inputs = Inputs(model.rotary(torch.arange(len(tokens))[None]), attention=attention)
        logits, _ = model(torch.tensor([tokens]), inputs)
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_greedy_matches_full_recomputation(model: LanguageModel) -> None:
    expected = [slow_greedy(model, prompt, 12) for prompt in PROMPTS]
    assert generate(model, PROMPTS, 12) == expected
    assert [generate(model, [prompt], 12)[0] for prompt in PROMPTS] == expected


def test_latent_cache_holds_compressed_vectors_only() -> None:
    config = parse(ModelConfig, {**PRESETS["tiny-deepseek"], **SMALL, **LATENT}, "test")
    cache = KeyValueCache(config, 3, 9, torch.float64, torch.device("cpu"))
    (seen,) = cache.extend(1, torch.zeros(3, 1, 5, 10 + 4))
    assert seen.shape == (3, 1, 5, 14)
    assert seen.untyped_storage().nbytes() == 8 * config.layers * 3 * 9 * 14


def test_rows_end_independently(model: LanguageModel) -> None:
    free = generate(model, PROMPTS, 12)
    end = free[0][3]
    seen: list[tuple[int, int]] = []
    ended = generate(
        model, PROMPTS, 12, end_ids=[end], on_token=lambda row, token: seen.append((row, token))
    )
    for row, (all_tokens, tokens) in enumerate(zip(free, ended, strict=True)):
        cut = all_tokens.index(end) + 1 if end in all_tokens else len(all_tokens)
        assert tokens == all_tokens[:cut]
        assert [token for r, token in seen if r == row] == tokens


def test_sampling_depends_on_the_seed(model: LanguageModel) -> None:
    draws = [
        generate(model, PROMPTS, 8, sampling=Sampling(temperature=1.0, seed=seed))
        for seed in (0, 0, 1)
    ]
    assert draws[0] == draws[1] != draws[2]


def test_sampling_follows_probabilities_and_top_p() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).expand(20_000, -1)
    positions = torch.arange(20_000)
    chosen = sample_tokens(logits, Sampling(temperature=0.7), positions)
    odds = (logits[0].double() / 0.7).softmax(-1)
    share = torch.bincount(chosen, minlength=4) / 20_000
    torch.testing.assert_close(share.double(), odds, atol=0.015, rtol=0)
    nucleus = sample_tokens(logits, Sampling(temperature=0.7, top_p=0.8), positions)
    assert set(nucleus.tolist()) == {0, 1}
    assert set(sample_tokens(logits, Sampling(temperature=0.7, top_p=0.0), positions).tolist()) == {
        0
    }


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "words"),
    [([], 4, "no token"), ([41], 4, "vocabulary of 41"), ([1] * 60, 5, "lower max_tokens")],
)
def test_invalid_prompts_are_rejected(
    model: LanguageModel, prompt: list[int], max_tokens: int, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        generate(model, [prompt], max_tokens)


def test_triton_kernels_give_the_same_tokens() -> None:
    """Prefill and decoding in fp32 give the same tokens as torch."""
    pytest.importorskip("triton")
    name = "tiny-deepseek"
    raw = {**PRESETS[name], **SMALL, "max_positions": 64, **MODELS[name]}
    model = LanguageModel(parse(ModelConfig, raw, "test"))
    InitialSource(1, 0.4).fill(tensor_shards(model))
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    texts = []
    for by in get_args(MatmulBackend)[:2]:
        for _, moe in model.expert_layers():
            moe.bank.backend = by
        texts.append(generate(model, PROMPTS, 6))
    assert texts[0] == texts[1]
    assert all(len(row) == 6 for row in texts[0])
