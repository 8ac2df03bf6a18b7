"""Exported adapters, loaded by peft over their base, against the merged export of the same run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from directories import lora, tune
from safetensors.torch import load_file
from torch import Tensor

from moesaic.cli.main import main
from moesaic.models.hf.adapter import ADAPTER_WEIGHTS_NAME
from moesaic.models.hf.config import ADAPTER_NAME

RANK, ALPHA = 4, 6.5
GSHARD = ('routing.router="gshard"', "routing.capacity_factor=2.0")
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj"]
LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
GATED = ["gate_proj", "up_proj", "down_proj"]
CASES: list[tuple[str, list[str], list[str], list[str]]] = [
    # case, targets, target_modules and target_parameters of peft
    ("llama", ["attention", "ffn"], [*PROJECTIONS, *GATED], []),
    ("mixtral", ["attention", "experts"], [*PROJECTIONS, "w1", "w2", "w3"], []),
    ("mixtral", ["experts"], ["w1", "w2", "w3"], []),
    ("olmoe", ["attention", "experts"], [*PROJECTIONS, *GATED], []),
    ("qwen3", ["attention", "experts"], [*PROJECTIONS, *GATED], []),
    ("qwen3", ["attention"], PROJECTIONS, []),
    ("deepseek", ["attention", "experts"], [*LATENT, *GATED], []),
    (
        "deepseek", ["attention", "experts", "ffn", "shared"], [*LATENT, *GATED],
        [f"mlp.{inner}{name}.weight" for inner in ("", "shared_experts.") for name in GATED],
    ),
    ("deepseek", ["ffn"], [], [f"mlp.{name}.weight" for name in GATED]),
    (
        "deepseek-yarn", ["attention", "shared"], ["q_proj", *LATENT[2:]],
        [f"mlp.shared_experts.{name}.weight" for name in GATED],
    ),
]  # fmt: skip


@pytest.fixture
def make_base(
    their_model: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., None]:
    """Return a function that makes the directory `base` in the test's working directory."""
    monkeypatch.chdir(tmp_path)

    def make(case: str, **changes: Any) -> None:
        their_model(case, vocab_size=260, **changes).save_pretrained("base")

    return make


def logits(model: torch.nn.Module) -> Tensor:
    tokens = torch.randint(0, 256, (3, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        result: Tensor = model.eval()(tokens).logits
    return result


def opened(directory: str) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")


def distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{'-'.join(case[1])}")
def test_peft_with_adapter_matches_merged_model(
    case: tuple[str, list[str], list[str], list[str]], make_base: Callable[..., None]
) -> None:
    name, targets, modules, parameters = case
    make_base(name)
    Path("base").rename("theirs")
    assert main(["convert", "theirs", "--out", "base"]) == 0
    assert tune(*lora(targets)) == 0
    assert main(["convert", "run", "--out", "merged"]) == 0
    assert main(["convert", "run", "--out", "adapter", "--set", "to=adapter"]) == 0
    assert {path.name for path in Path("adapter").iterdir()} == {ADAPTER_NAME, ADAPTER_WEIGHTS_NAME}

    config = json.loads(Path("adapter", ADAPTER_NAME).read_text())
    assert (config["r"], config["lora_alpha"]) == (RANK, ALPHA)
    assert config["base_model_name_or_path"] == str(Path("base").resolve())
    assert set(config["target_modules"]) == set(modules)
    assert set(config["target_parameters"] or []) == set(parameters)

    base, merged = logits(opened("base")), logits(opened("merged"))
    assert distance(base, merged) > 1e-2, "nothing was learnt"
    adapted = peft.PeftModel.from_pretrained(opened("base"), "adapter")
    assert distance(logits(adapted), merged) < 1e-5
    assert distance(logits(opened("adapter")), merged) < 1e-5
    with adapted.disable_adapter():
        assert torch.equal(logits(adapted), base)
    written = opened("merged").state_dict()
    for key, tensor in adapted.merge_and_unload().state_dict().items():
        assert distance(tensor, written[key]) < 1e-6, key


@pytest.mark.parametrize(
    ("name", "axis", "targets"),
    [
        ("deepseek", "tp", ["attention", "experts", "ffn", "shared"]),
        ("olmoe", "ep", ["attention", "experts"]),
    ],
)
def test_adapter_of_two_ranks_matches_one_rank(
    name: str, axis: str, targets: list[str], make_base: Callable[..., None]
) -> None:
    make_base(name)
    exact = [*lora(targets), "train.precision=fp64"]
    assert tune(*exact, out="one") == 0
    assert tune(*exact, f"layout.{axis}=2", out="two", flags=["--nproc", "2"]) == 0
    for run in ("one", "two"):
        assert main(["convert", run, "--out", f"{run}-alone", "--set", "to=adapter"]) == 0
    one, two = (load_file(Path(f"{run}-alone", ADAPTER_WEIGHTS_NAME)) for run in ("one", "two"))
    assert one.keys() == two.keys()
    for key, tensor in one.items():
        assert tensor.any(), key
        assert distance(two[key], tensor) < 1e-9, key
    assert main(["convert", "two", "--out", "merged", "--set", "dtype=fp32"]) == 0
    adapted = peft.PeftModel.from_pretrained(opened("base"), "two-alone")
    merged = logits(opened("merged"))
    assert distance(logits(opened("base")), merged) > 1e-2, "nothing was learnt"
    assert distance(logits(adapted), merged) < 1e-5


def test_adapter_dtypes(make_base: Callable[..., None]) -> None:
    make_base("olmoe")
    assert tune(*lora(["attention", "experts"]), "train.steps=2") == 0
    for dtype in ("keep", "bf16"):
        sets = ["--set", "to=adapter", "--set", f"dtype={dtype}"]
        assert main(["convert", "run", "--out", dtype, *sets]) == 0
    kept, narrow = (load_file(Path(name, ADAPTER_WEIGHTS_NAME)) for name in ("keep", "bf16"))
    assert kept.keys() == narrow.keys()
    experts = "base_model.model.model.layers.1.mlp.experts.5"
    assert kept[f"{experts}.down_proj.lora_A.weight"].shape == (RANK, 48)
    assert kept[f"{experts}.down_proj.lora_B.weight"].shape == (32, RANK)
    assert len(kept) == 2 * 2 * (4 + 6 * 3)
    for key, tensor in kept.items():
        assert tensor.dtype == torch.float32
        assert tensor.any(), key
        assert torch.equal(narrow[key], tensor.bfloat16()), key
    adapted = peft.PeftModel.from_pretrained(opened("base"), "bf16")
    exact = peft.PeftModel.from_pretrained(opened("base"), "keep")
    assert 1e-5 < distance(logits(adapted), logits(exact)) < 1e-2


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (['finetune.method="full"'], ('finetune.method = "full"', "the weights themselves")),
        (
            [*lora(["experts"]), 'finetune.router="train"'],
            ('finetune.router = "train"', "trained routers"),
        ),
        (
            [*lora(["experts"]), *GSHARD],
            ('routing.router = "gshard"', "model.renormalise = false"),
        ),
        ([], ("'run/checkpoints", "no adapters", '[finetune] method = "lora"')),
    ],
)
def test_runs_beyond_adapters_are_rejected(
    sets: list[str],
    words: tuple[str, ...],
    make_base: Callable[..., None],
    capfd: pytest.CaptureFixture[str],
) -> None:
    make_base("olmoe", num_experts_per_tok=2)
    assert tune(*sets, "train.steps=1") == 0
    capfd.readouterr()
    assert main(["convert", "run", "--out", "adapter", "--set", "to=adapter"]) == 2
    output = " ".join(capfd.readouterr().err.split())
    for word in (*words, 'to = "adapter"', 'to = "huggingface"'):
        assert word in output
    assert not Path("adapter").exists()
