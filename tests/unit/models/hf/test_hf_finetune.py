"""Adapters trained over a transformers directory, merged, and read by transformers again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from directories import TUNE_JOB, lora, tune
from safetensors.torch import load_file
from torch import Tensor

from moesaic.base.errors import ConfigError
from moesaic.cli.main import main
from moesaic.dist.checkpoint import Checkpoint, resume_candidates
from moesaic.dist.state import PARAMETER
from moesaic.dist.world import World
from moesaic.facts.job import Job
from moesaic.facts.plan import plan_from_layout
from moesaic.facts.workload import parameters
from moesaic.facts.workload.parameters import A, B, adapter_prefix
from moesaic.models.hf.config import CONFIG_NAME
from moesaic.models.hf.convert import convert
from moesaic.models.hf.origin import open_origin
from moesaic.nn.inputs import Inputs
from moesaic.serve.loading import load_model
from moesaic.testing.states import read_checkpoint
from moesaic.train.assemble import assemble


def logits_of(job: Job, checkpoint: Path, tokens: Tensor) -> Tensor:
    """Return the logits of base and adapters without merging them."""
    plan = plan_from_layout(job.layout, job.model, 1)
    run = assemble(job, plan, World.solo(torch.device("cpu")), Checkpoint.open(checkpoint))
    run.part.model.eval()
    positions = torch.arange(tokens.shape[1]).expand(len(tokens), -1)
    with torch.no_grad():
        logits: Tensor = run.part.model(tokens, Inputs(run.part.model.rotary(positions)))[0]
    return logits


@pytest.mark.parametrize(
    ("case", "targets"),
    [
        ("llama", ["attention", "ffn"]),
        ("mixtral", ["attention", "experts"]),
        ("olmoe", ["experts"]),
        ("qwen3", ["attention", "experts"]),
        ("deepseek", ["attention", "experts", "ffn", "shared"]),
        ("deepseek-yarn", ["attention"]),
    ],
)
def test_merged_model_matches_base_with_adapters(
    case: str,
    targets: list[str],
    their_model: Callable[..., Any],
    their_logits: Callable[[Path, Tensor], Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    their_model(case, vocab_size=260).save_pretrained("base")
    assert tune(*lora(targets)) == 0, capfd.readouterr().err
    (checkpoint, *_) = resume_candidates(Path("run/checkpoints"))
    assert main(["convert", "run", "--out", "tuned"]) == 0, capfd.readouterr().err
    tokens = torch.randint(0, 256, (3, 16), generator=torch.Generator().manual_seed(1))
    job = Job.model_validate_json(Path("run/job.json").read_text())
    ours, theirs = logits_of(job, checkpoint, tokens), their_logits(Path("tuned"), tokens)
    assert float((ours - theirs).norm() / theirs.norm()) < 1e-5
    base = their_logits(Path("base"), tokens)
    assert float((ours - base).norm() / base.norm()) > 1e-2, "nothing was learnt"
    if "experts" in targets:
        with pytest.raises(ConfigError, match=r"adapters of experts.*write the merged model"):
            load_model(open_origin(Path("run")), torch.device("cpu"), memory=1 << 20)
    with load_model(open_origin(Path("run")), torch.device("cpu"), memory=3 << 30) as fitting:
        assert fitting.reads is None
    served = load_model(open_origin(Path("run")), torch.device("cpu")).model
    positions = torch.arange(tokens.shape[1]).expand(len(tokens), -1)
    with torch.no_grad():
        merged = served(tokens, Inputs(served.rotary(positions)))[0]
    assert float((merged - theirs).norm() / theirs.norm()) < 1e-5
    before, after = (load_file(f"{name}/model.safetensors") for name in ("base", "tuned"))
    assert torch.equal(before["model.embed_tokens.weight"], after["model.embed_tokens.weight"])
    if case == "llama":
        check_forms(checkpoint)


def check_forms(checkpoint: Path) -> None:
    """Each element is W + alpha / rank * B A; a merged checkpoint is not merged again."""
    convert(Path("run"), Path("again"), to="checkpoint")
    merged, again = (open_origin(Path(name)) for name in ("run", "again"))
    stored = read_checkpoint(checkpoint)

    def read(name: str) -> Tensor:
        return torch.from_numpy(stored[f"{PARAMETER}/{name}"]).double()

    for parameter in parameters(merged.model):
        expected, stem = read(parameter.name), adapter_prefix(parameter.name)
        if f"{PARAMETER}/{stem}{A}" in stored:
            expected = expected + 6.5 / 4 * read(f"{stem}{B}") @ read(f"{stem}{A}")
        assert torch.equal(merged.tensors.read(parameter.name), expected.float()), parameter.name
        assert torch.equal(again.tensors.read(parameter.name), expected.float()), parameter.name
    assert (Path("tuned") / CONFIG_NAME).is_file()


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (['finetune.targets=["expert"]'], ('"attention", "experts", "ffn" or "shared"',)),
        (['finetune.targets=["shared"]'], ("names nothing", '["attention", "experts"]')),
        (["finetune.rank=33"], ("finetune.rank = 33", "model.hidden = 32", "lower it")),
        (["finetune.alpha=0"], ("finetune.alpha = 0",)),
    ],
)
def test_finetune_errors(
    sets: list[str],
    words: tuple[str, ...],
    peer: Callable[[str], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("base").symlink_to(peer("olmoe").directory)
    assert tune(*lora(["experts"]), *sets, flags=["--dry-run"]) == 2
    message = " ".join(capfd.readouterr().err.split())
    assert all(word in message for word in words)
    Path("job.toml").write_text(TUNE_JOB.replace("from", "preset").replace("base", "tiny-olmoe"))
    assert main(["train", "job.toml", "--dry-run", "--set", "finetune.rank=4"]) == 2
    assert "[finetune] without model.from" in " ".join(capfd.readouterr().err.split())
