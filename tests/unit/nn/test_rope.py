"""Scaled rotary frequencies against a loop and against transformers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from moesaic.facts.job.model import RopeScaling
from moesaic.nn.inputs import Rotary
from moesaic.nn.rope import attention_factor, frequencies

YARN = {"kind": "yarn", "factor": 4.0, "original_max_positions": 64}
CASES: dict[str, dict[str, Any]] = {
    "linear": {"kind": "linear", "factor": 3.0},
    "llama3": {"kind": "llama3", "factor": 8.0, "original_max_positions": 256},
    "llama3 narrow": {
        "kind": "llama3", "factor": 8.0, "original_max_positions": 64,
        "low_freq_factor": 0.3, "high_freq_factor": 0.5,
    },
    "yarn": YARN,
    "yarn, not truncated": {**YARN, "truncate": False, "beta_slow": 0.4, "beta_fast": 6.0},
    "yarn, blended nowhere": {**YARN, "beta_slow": 3.0, "beta_fast": 3.0, "truncate": False},
    "yarn, short": {**YARN, "original_max_positions": 4},
    "yarn, weighted": {**YARN, "mscale": 1.5, "mscale_all_dim": 0.5},
    "yarn, one weight": {**YARN, "mscale_all_dim": 0.5},
    "yarn, sharpened": {**YARN, "attention_factor": 1.25, "mscale": 1.0, "mscale_all_dim": 2.0},
}  # fmt: skip
THETA, WIDTH = 500.0, 24


def reference(scaling: RopeScaling) -> list[float]:
    """Compute pair by pair, as in the papers."""
    result = []
    for pair in range(WIDTH // 2):
        plain = THETA ** (-2 * pair / WIDTH)
        wave = 2 * math.pi / plain
        length = scaling.original_max_positions
        if scaling.kind == "linear":
            ramp = 1.0
        elif scaling.kind == "llama3":
            if wave > length / scaling.low_freq_factor:
                ramp = 1.0
            elif wave < length / scaling.high_freq_factor:
                ramp = 0.0
            else:
                ramp = 1 - (length / wave - scaling.low_freq_factor) / (
                    scaling.high_freq_factor - scaling.low_freq_factor
                )
        else:
            ends = []
            for turns in (scaling.beta_fast, scaling.beta_slow):
                # Pair (a real number) with this many turns within the original length.
                pair_position = (
                    WIDTH / 2 * math.log(length / (turns * 2 * math.pi)) / math.log(THETA)
                )
                ends.append(pair_position)
            if scaling.truncate:
                ends = [math.floor(ends[0]), math.ceil(ends[1])]
            first, last = max(ends[0], 0), min(ends[1], WIDTH - 1)
            last = last if last != first else last + 0.001
            ramp = min(max((pair - first) / (last - first), 0.0), 1.0)
        result.append(plain * (1 - ramp) + plain / scaling.factor * ramp)
    return result


@pytest.mark.parametrize("name", CASES)
def test_frequencies_equal_loop(name: str) -> None:
    scaling = RopeScaling(**CASES[name])
    actual = frequencies(WIDTH, THETA, scaling, torch.empty(0, dtype=torch.float64))
    expected = reference(scaling)
    assert actual.tolist() == pytest.approx(expected, rel=1e-12)
    assert max(expected) <= 1.0
    plain = frequencies(WIDTH, THETA, None, torch.empty(0, dtype=torch.float64))
    assert not torch.allclose(actual, plain)


@pytest.mark.parametrize("name", CASES)
def test_cosines_and_sines_equal_transformers(name: str) -> None:
    scaling = RopeScaling(**CASES[name])
    keys = {
        "factor": "factor", "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "beta_slow": "beta_slow", "beta_fast": "beta_fast", "attention_factor": "attention_factor",
        "mscale": "mscale", "mscale_all_dim": "mscale_all_dim", "truncate": "truncate",
        "original_max_positions": "original_max_position_embeddings",
    }  # fmt: skip
    table = {keys[key]: value for key, value in scaling.model_dump().items() if key != "kind"}
    config = transformers.LlamaConfig(
        hidden_size=WIDTH, num_attention_heads=1, head_dim=WIDTH, max_position_embeddings=256,
        rope_parameters={
            "rope_type": scaling.kind, "rope_theta": THETA,
            **{key: value for key, value in table.items() if value is not None},
        },
    )  # fmt: skip
    peer_frequencies, factor = ROPE_INIT_FUNCTIONS[scaling.kind](config)
    assert attention_factor(scaling) == pytest.approx(factor, rel=1e-12)
    positions = torch.tensor([[0, 1, 17, 255]])
    angles = positions[0, :, None] * peer_frequencies
    rotary = Rotary.at_positions(positions, WIDTH, THETA, torch.float32, scaling)
    for actual, expected_values in ((rotary.cosine, angles.cos()), (rotary.sine, angles.sin())):
        torch.testing.assert_close(actual[0, 0], expected_values * factor, rtol=1e-5, atol=1e-4)
    exact = Rotary.at_positions(positions, WIDTH, THETA, torch.float64, scaling)
    cosine = torch.tensor(
        [[math.cos(p * f) for f in reference(scaling)] for p in positions[0].tolist()]
    )
    torch.testing.assert_close(exact.cosine[0, 0], cosine.double() * factor, rtol=0, atol=1e-6)
