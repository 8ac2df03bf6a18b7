"""Parity with transformers: same files, same logits, in both directions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from directories import digests, read_back
from safetensors.torch import load_file
from torch import Tensor

from moesaic.facts.plan import Plan
from moesaic.facts.workload import parameters
from moesaic.models.hf.config import read_config
from moesaic.models.hf.names import choose_slices
from moesaic.models.hf.reader import HFSource
from moesaic.models.hf.settings import ConvertConfig
from moesaic.models.hf.shards import InMemoryTensors
from moesaic.models.hf.writer import find_companions, write_model
from moesaic.models.lm import LanguageModel
from moesaic.models.state import local_params, tensor_shards
from moesaic.nn.attention_backends import AttentionMetadata
from moesaic.nn.inputs import Inputs
from moesaic.testing.states import live_values

CASES = [
    "llama", "llama-tied-wide", "llama-linear", "llama-llama3", "mixtral", "mixtral-window",
    "olmoe", "olmoe-renormalised", "qwen3", "qwen3-window", "qwen3-yarn", "deepseek",
    "deepseek-yarn",
]  # fmt: skip
PLAIN = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e3}}


def load(directory: Path) -> LanguageModel:
    config, warnings = read_config(directory)
    assert warnings == []
    model = LanguageModel(config)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, float("nan"))
    HFSource(directory, config).fill(tensor_shards(model))
    return model.eval()


def our_logits(model: LanguageModel, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return run(model, tokens)


def run(model: LanguageModel, tokens: Tensor) -> Tensor:
    positions = torch.arange(tokens.shape[1]).expand(tokens.shape)
    attention = AttentionMetadata.causal(*tokens.shape, window=model.config.window)
    logits: Tensor = model(tokens, Inputs(model.rotary(positions), attention=attention))[0]
    return logits


def export(
    model: LanguageModel, target: Path, companions: Sequence[Path] = (), **settings: Any
) -> None:
    tensors = InMemoryTensors(tensor_shards(model))
    write_model(target, model.config, tensors, ConvertConfig(**settings), companions=companions)


@pytest.mark.parametrize("case", CASES)
def test_logits_match_transformers(case: str, peer: Callable[[str], Any]) -> None:
    theirs = peer(case)
    ours = our_logits(load(theirs.directory), theirs.tokens)
    assert theirs.logits.std() > 0.3  # else a tolerance of 1e-5 would prove nothing
    torch.testing.assert_close(ours, theirs.logits, rtol=1e-5, atol=1e-5)
    assert (ours - theirs.logits).norm() <= 1e-5 * theirs.logits.norm()


@pytest.mark.parametrize("case", CASES)
def test_gradients_match_transformers(
    case: str, peer: Callable[[str], Any], their_model: Callable[..., Any]
) -> None:
    ours, theirs = load(peer(case).directory), their_model(case)
    tokens = peer(case).tokens.clamp(min=1)  # transformers gives padding no gradient.
    loss = torch.nn.functional.cross_entropy
    for model, logits in ((ours, run(ours, tokens)), (theirs, theirs(tokens).logits)):
        model.zero_grad()
        loss(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    expected = dict(theirs.named_parameters())
    learnt = {p.name for p in parameters(ours.config) if p.kind != "bias"}
    stored_slices = {
        name: p for name, p in choose_slices(ours.config, expected).items() if name in learnt
    }
    plan = Plan(ranks=1, ep=1, dp_shard=1, experts=ours.config.experts)
    found = [
        p
        for item in local_params(ours, plan, 0)
        for p in item.tensor_shards("gradient", item.grad, 0)
    ]
    assert {shard.name for shard in found} == stored_slices.keys()
    for shard in found:
        stored = stored_slices[shard.name]
        assert stored is not None
        box = tuple(slice(o, o + n) for o, n in zip(stored.offset, stored.size, strict=True))
        gradient = expected[stored.tensor].grad
        assert gradient is not None
        assert gradient.norm() > 0
        difference = live_values(shard) - gradient[box].view(live_values(shard).shape)
        assert difference.norm() <= 1e-5 * gradient[box].norm() + 1e-9, shard.name


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("mixtral-window", {"sliding_window": None}), ("qwen3-window", {"sliding_window": None}),
        ("llama-linear", PLAIN), ("llama-llama3", PLAIN), ("qwen3-yarn", PLAIN),
    ],
)  # fmt: skip
def test_cases_are_sensitive_to_their_option(
    case: str, changes: dict[str, Any], peer: Callable[[str], Any], their_model: Callable[..., Any]
) -> None:
    """The case gives other logits without its window or scaling."""
    found = peer(case)
    with torch.no_grad():
        plain = their_model(case, **changes)(found.tokens).logits
    assert (plain - found.logits).norm() > 0.01 * plain.norm()


@pytest.mark.parametrize("case", CASES)
def test_exports_round_trip(
    case: str, peer: Callable[[str], Any], their_logits: Callable[..., Tensor], tmp_path: Path
) -> None:
    """Names and bytes survive, transformers reads an export, and exporting it again changes no
    file."""
    source, first, second = peer(case).directory, tmp_path / "first", tmp_path / "second"
    for target, directory in ((first, source), (second, first)):
        model = load(directory)
        carried = find_companions(directory)
        export(model, target, max_shard_bytes=20_000, companions=carried)
    before, after = load_file(source / "model.safetensors"), read_back(first)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor.view(torch.int32), after[name].view(torch.int32)), name
    assert len(list(first.glob("*.safetensors"))) > 1
    theirs = their_logits(first, peer(case).tokens)
    torch.testing.assert_close(our_logits(model, peer(case).tokens), theirs, rtol=1e-5, atol=1e-5)
    files = digests(first)
    assert {"config.json", "generation_config.json", "model.safetensors.index.json"} <= files.keys()
    assert files == digests(second)


def test_bfloat16_round_trip_is_bitwise(
    peer: Callable[[str], Any], their_logits: Callable[..., Tensor], tmp_path: Path
) -> None:
    model = load(peer("mixtral").directory)
    export(model, tmp_path / "bf16", dtype="bf16")
    again = load(tmp_path / "bf16")
    again.to(torch.bfloat16)
    export(again, tmp_path / "again")
    assert digests(tmp_path / "bf16") == digests(tmp_path / "again")
    for name, tensor in load_file(tmp_path / "bf16" / "model.safetensors").items():
        original = load_file(peer("mixtral").directory / "model.safetensors")[name]
        assert torch.equal(tensor, original.to(torch.bfloat16)), name
    theirs = their_logits(tmp_path / "bf16", peer("mixtral").tokens)
    assert theirs.dtype == torch.bfloat16  # config.json names the dtype of the weights


def test_router_biases_stay_fp32(
    peer: Callable[[str], Any], their_logits: Callable[..., Tensor], tmp_path: Path
) -> None:
    source = peer("deepseek").directory
    export(load(source), tmp_path / "bf16", dtype="bf16")
    before = load_file(source / "model.safetensors")
    after = load_file(tmp_path / "bf16" / "model.safetensors")
    biases = [name for name in after if name.endswith("e_score_correction_bias")]
    assert len(biases) == 2
    for name in after:
        assert after[name].dtype == (torch.float32 if name in biases else torch.bfloat16)
    assert all(torch.equal(before[name], after[name]) for name in biases)
    assert their_logits(tmp_path / "bf16", peer("deepseek").tokens).isfinite().all()
