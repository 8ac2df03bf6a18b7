"""Stretched frequencies against slow twins and against those of transformers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from moesaic.facts.job.model import RopeScaling
from moesaic.models.hf.config import from_huggingface
from moesaic.nn.context import Rotary
from moesaic.nn.rope import frequencies, mscale, sharpness

YARN = {"kind": "yarn", "factor": 4.0, "original_positions": 64}
CASES: dict[str, dict[str, Any]] = {
    "linear": {"kind": "linear", "factor": 3.0},
    "llama3": {"kind": "llama3", "factor": 8.0, "original_positions": 256},
    "llama3 narrow": {
        "kind": "llama3", "factor": 8.0, "original_positions": 64, "low": 0.3, "high": 0.5,
    },
    "yarn": YARN,
    "yarn, not truncated": {**YARN, "truncate": False, "slow": 0.4, "fast": 6.0},
    "yarn, blended nowhere": {**YARN, "slow": 3.0, "fast": 3.0, "truncate": False},
    "yarn, short": {**YARN, "original_positions": 4},
    "yarn, weighted": {**YARN, "mscale": 1.5, "mscale_all": 0.5},
    "yarn, one weight": {**YARN, "mscale_all": 0.5},
    "yarn, sharpened": {**YARN, "sharpness": 1.25, "mscale": 1.0, "mscale_all": 2.0},
}  # fmt: skip
THETA, WIDTH = 500.0, 24


def slow(scaling: RopeScaling) -> list[float]:
    """Pair by pair, as papers have it."""
    result = []
    for pair in range(WIDTH // 2):
        plain = THETA ** (-2 * pair / WIDTH)
        wave = 2 * math.pi / plain
        length = scaling.original_positions
        if scaling.kind == "linear":
            part = 1.0
        elif scaling.kind == "llama3":
            if wave > length / scaling.low:
                part = 1.0
            elif wave < length / scaling.high:
                part = 0.0
            else:
                part = 1 - (length / wave - scaling.low) / (scaling.high - scaling.low)
        else:
            ends = []
            for turns in (scaling.fast, scaling.slow):
                # The pair, as a real number, that turns so often within the first length.
                where = WIDTH / 2 * math.log(length / (turns * 2 * math.pi)) / math.log(THETA)
                ends.append(where)
            if scaling.truncate:
                ends = [math.floor(ends[0]), math.ceil(ends[1])]
            first, last = max(ends[0], 0), min(ends[1], WIDTH - 1)
            last = last if last != first else last + 0.001
            part = min(max((pair - first) / (last - first), 0.0), 1.0)
        result.append(plain * (1 - part) + plain / scaling.factor * part)
    return result


@pytest.mark.parametrize("name", CASES)
def test_frequencies_equal_a_slow_twin(name: str) -> None:
    scaling = RopeScaling(**CASES[name])
    found = frequencies(WIDTH, THETA, scaling, torch.empty(0, dtype=torch.float64))
    expected = slow(scaling)
    assert found.tolist() == pytest.approx(expected, rel=1e-12)
    assert max(expected) <= 1.0
    plain = frequencies(WIDTH, THETA, None, torch.empty(0, dtype=torch.float64))
    assert not torch.allclose(found, plain)


@pytest.mark.parametrize("name", CASES)
def test_cosines_and_sines_are_those_of_transformers(name: str) -> None:
    scaling = RopeScaling(**CASES[name])
    keys = {
        "factor": "factor", "low": "low_freq_factor", "high": "high_freq_factor",
        "slow": "beta_slow", "fast": "beta_fast", "sharpness": "attention_factor",
        "mscale": "mscale", "mscale_all": "mscale_all_dim", "truncate": "truncate",
        "original_positions": "original_max_position_embeddings",
    }  # fmt: skip
    table = {keys[key]: value for key, value in scaling.model_dump().items() if key != "kind"}
    config = transformers.LlamaConfig(
        hidden_size=WIDTH, num_attention_heads=1, head_dim=WIDTH, max_position_embeddings=256,
        rope_parameters={
            "rope_type": scaling.kind, "rope_theta": THETA,
            **{key: value for key, value in table.items() if value is not None},
        },
    )  # fmt: skip
    theirs, factor = ROPE_INIT_FUNCTIONS[scaling.kind](config)
    assert sharpness(scaling) == pytest.approx(factor, rel=1e-12)
    places = torch.tensor([[0, 1, 17, 255]])
    angles = places[0, :, None] * theirs
    ours = Rotary.at(places, WIDTH, THETA, torch.float32, scaling)
    for mine, other in ((ours.cosine, angles.cos()), (ours.sine, angles.sin())):
        torch.testing.assert_close(mine[0, 0], other * factor, rtol=1e-5, atol=1e-4)
    exact = Rotary.at(places, WIDTH, THETA, torch.float64, scaling)
    cosine = torch.tensor([[math.cos(p * f) for f in slow(scaling)] for p in places[0].tolist()])
    torch.testing.assert_close(exact.cosine[0, 0], cosine.double() * factor, rtol=0, atol=1e-6)


def test_only_yarn_sharpens() -> None:
    assert sharpness(None) == sharpness(RopeScaling(kind="linear", factor=4.0)) == 1.0
    assert sharpness(RopeScaling(kind="llama3", factor=4.0)) == 1.0
    assert mscale(1.0) == mscale(1.0, 7.0) == 1.0
    assert mscale(math.e) == pytest.approx(1.1)
    assert mscale(math.e, 3.0) == pytest.approx(1.3)


def test_a_published_file_means_what_its_model_was_made_with() -> None:
    """Llama 3.1: waves of eight turns within 8192 keep their angles, of half a turn lose 7/8."""
    table = {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3",
    }  # fmt: skip
    raw = {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "rope_theta": 500000.0, "rope_scaling": table,
    }  # fmt: skip
    model, _ = from_huggingface(raw, "config.json")
    like = torch.empty(0, dtype=torch.float64)
    plain, found = (
        frequencies(128, model.rope_theta, scaling, like) for scaling in (None, model.rope_scaling)
    )
    turns = 8192 * plain / (2 * math.pi)
    assert torch.equal(found[turns > 4], plain[turns > 4])
    assert torch.equal(found[turns < 1], plain[turns < 1] / 8)
    assert bool((turns > 4).any())
    assert bool((turns < 1).any())
