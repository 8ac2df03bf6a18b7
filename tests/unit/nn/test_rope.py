"""Scaled rotary frequencies against transformers."""

from __future__ import annotations

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
    plain, scaled = (frequencies(WIDTH, THETA, one, torch.empty(0)) for one in (None, scaling))
    torch.testing.assert_close(scaled, peer_frequencies)
    assert not torch.allclose(scaled, plain)
    positions = torch.tensor([[0, 1, 17, 255]])
    angles = positions[0, :, None] * peer_frequencies
    rotary = Rotary.at_positions(positions, WIDTH, THETA, torch.float32, scaling)
    for actual, expected_values in ((rotary.cosine, angles.cos()), (rotary.sine, angles.sin())):
        torch.testing.assert_close(actual[0, 0], expected_values * factor, rtol=1e-5, atol=1e-4)
