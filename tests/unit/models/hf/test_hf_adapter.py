"""Exported adapters, loaded by peft over their base, against the merged export of the same run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from moesaic.cli.main import main
from moesaic.models.hf.adapter import ADAPTER_WEIGHTS_NAME
from moesaic.models.hf.config import ADAPTER_NAME

RANK, ALPHA = 4, 6.5
JOB = """
[model]
from = "base"

[finetune]
method = "{method}"
rank = 4
alpha = 6.5
router = "{router}"
targets = {targets}

[routing]
{routing}

[data]
path = "text.txt"
sequence = 16
cache = "cache"

[train]
steps = {steps}
batch = 4
device = "cpu"

[optimizer]
lr = 0.03

[log]
tensorboard = false
"""
GSHARD = 'router = "gshard"\ncapacity_factor = 2.0'
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


def run_job(
    targets: list[str],
    *,
    method: str = "lora",
    router: str = "frozen",
    routing: str = "",
    steps: int = 4,
    out: str = "run",
    flags: Sequence[str] = (),
) -> None:
    """Train over the directory `base`."""
    Path("text.txt").write_text("Of mosaics and their stones. " * 40)
    Path("job.toml").write_text(
        JOB.format(
            targets=json.dumps(targets), method=method, router=router, routing=routing, steps=steps
        )
    )
    assert main(["train", "job.toml", "--out", out, *flags]) == 0


@pytest.fixture
def base(their_model: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Create a directory `base` to train over, in the test's working directory."""
    monkeypatch.chdir(tmp_path)
    their_model("olmoe", vocab_size=260).save_pretrained("base")


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
    case: tuple[str, list[str], list[str], list[str]],
    their_model: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, targets, modules, parameters = case
    monkeypatch.chdir(tmp_path)
    their_model(name, vocab_size=260).save_pretrained("theirs")
    assert main(["convert", "theirs", "--out", "base"]) == 0
    run_job(targets)
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
    name: str,
    axis: str,
    targets: list[str],
    their_model: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    their_model(name, vocab_size=260).save_pretrained("base")
    exact = ["--set", "train.precision=fp64"]
    run_job(targets, out="one", flags=exact)
    run_job(targets, out="two", flags=[*exact, "--nproc", "2", "--set", f"layout.{axis}=2"])
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


def test_adapter_dtypes(
    their_model: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    their_model("olmoe", vocab_size=260).save_pretrained("base")
    run_job(["attention", "experts"], steps=2)
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


def test_max_shard_bytes_warns_for_adapters(base: None, capfd: pytest.CaptureFixture[str]) -> None:
    run_job(["experts"], steps=1)
    words = 'warning: max_shard_bytes has no effect: to = "adapter" writes one file\n'
    for to, sets, said in (
        ("adapter", ["max_shard_bytes=9"], 1),
        ("adapter", [], 0),
        ("checkpoint", ["max_shard_bytes=9"], 0),
    ):
        given = [word for item in (f"to={to}", *sets) for word in ("--set", item)]
        capfd.readouterr()
        assert main(["convert", "run", "--out", "adapter", *given]) == 0
        assert capfd.readouterr().err.count(words) == said, (to, sets)
        shutil.rmtree("adapter")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"method": "full"}, ('finetune.method = "full"', "the weights themselves")),
        ({"router": "train"}, ('finetune.router = "train"', "trained routers")),
        ({"routing": GSHARD}, ('routing.router = "gshard"', "model.renormalise = false")),
    ],
)
def test_runs_beyond_adapters_are_rejected(
    changes: dict[str, str],
    words: tuple[str, ...],
    their_model: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    their_model("olmoe", vocab_size=260, num_experts_per_tok=2).save_pretrained("base")
    run_job(["experts"], steps=1, **changes)
    check_refused("run", words, capfd)
    assert main(["convert", "run", "--out", "merged"]) == 0


def test_weights_without_adapters_are_rejected(
    base: None, capfd: pytest.CaptureFixture[str]
) -> None:
    run_job(["experts"], steps=1)
    assert main(["convert", "run", "--out", "merged", "--set", "to=checkpoint"]) == 0
    for source in ("base", "merged"):
        check_refused(source, (f"'{source}'", "no adapters", '[finetune] method = "lora"'), capfd)


def check_refused(source: str, words: tuple[str, ...], capfd: pytest.CaptureFixture[str]) -> None:
    capfd.readouterr()
    assert main(["convert", source, "--out", "adapter", "--set", "to=adapter"]) == 2
    output = " ".join(capfd.readouterr().err.split())
    for word in (*words, 'to = "adapter"', 'to = "huggingface"'):
        assert word in output
    assert not Path("adapter").exists()
