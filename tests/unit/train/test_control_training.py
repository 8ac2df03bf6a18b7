"""Training behind prompts: gradients of soft prompts, and exports that transformers continues."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from moesaic import Engine
from moesaic.api.model import convert, load
from moesaic.base.errors import ConfigError
from moesaic.dist.state import PARAMETER, TensorShard
from moesaic.dist.world import World
from moesaic.facts.job import ControlValues
from moesaic.models.control import ControlPrompts, prompt_text
from moesaic.models.init import InitialSource
from moesaic.models.lm import LanguageModel
from moesaic.models.state import tensor_shards
from moesaic.models.tokenizer import FileTokenizer
from moesaic.testing.jobs import tiny_job
from moesaic.testing.runs import start_run, train_text
from moesaic.testing.served import write_chat_model
from moesaic.train.data.text_data import TextData
from moesaic.train.input_checks import check_inputs
from moesaic.train.job_file import language_model, load_job
from moesaic.train.lm import InitialWeights
from moesaic.train.objectives.objective import StepContext

CONTROL = {"genres": ["a", "b"], "genre": "kind", "topic": "subject", "length": "tokens"}
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """File of short texts."""
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    records = [{"text": f"t {i}", "kind": "ab"[i % 2], "subject": "x"} for i in range(12)]
    path.write_text("\n".join(map(json.dumps, records)))
    return path


def test_soft_prompts_get_a_gradient_only_where_a_sample_has_them(text: Path) -> None:
    data = {"path": str(text), "sequence": 110, "cache": str(text.parent / "cache")}
    job = tiny_job(model={"vocab": 400}, data=data, control=CONTROL)
    texts = TextData.open(job.data, job.seed, World.solo(), control=job.control)
    prompts = ControlPrompts.find(texts.tokenizer)
    assert prompts is not None
    soft = torch.from_numpy(prompts.soft_ids).flatten()
    run = start_run(job)
    batch = texts.train.batch([0, 1])
    loss, _ = run.objective.compute_loss(
        batch, StepContext(step=0, units=run.objective.num_units(batch), scale=1.0)
    )
    loss.backward()
    weight = run.part.model.embed.weight
    assert weight.grad is not None
    has_gradient = weight.grad.abs().sum(dim=1) > 0
    # Attention hands a loss back to all that comes before a target of its document.
    used = torch.zeros(400, dtype=torch.bool)
    for row, targets in enumerate(batch.targets):
        for document in batch.documents[row].unique():
            at = torch.nonzero(batch.documents[row] == document)[:, 0]
            counted = torch.nonzero(targets[at] >= 0)[:, 0]
            if len(counted):
                used[batch.inputs[row, at[: int(counted[-1]) + 1]]] = True
    assert torch.equal(has_gradient[soft], used[soft])
    assert 0 < int(used[soft].sum()) < len(soft)


def test_an_export_continues_the_same_prompts_in_transformers(text: Path, tmp_path: Path) -> None:
    train_text(
        World.solo(), text, tmp_path / "run", model={"vocab": 400, "max_positions": 256},
        data={"sequence": 110}, control=CONTROL,
        train={"steps": 2, "batch": 4, "precision": "fp32"},
    )  # fmt: skip
    convert(tmp_path / "run", tmp_path / "hf")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    prompts = ControlPrompts.find(FileTokenizer(str(tmp_path / "hf")))
    assert prompts is not None
    cases: list[tuple[dict[str, Any], str]] = [
        ({"genre": "b", "topic": "x", "length": 9}, ""),
        ({"genre": "a", "soft_prompts": 3}, "t 1"),
        ({"length": 3}, "t"),
        ({}, "t 1"),
    ]
    with Engine(tmp_path / "run", device="cpu") as run, Engine(tmp_path / "hf", device="cpu") as hf:
        for values, prompt in cases:
            string = f"{prompt_text(ControlValues(**values))} {prompt}".strip()
            ids = theirs(string, return_tensors="pt")
            output = model.generate(**ids, do_sample=False, max_new_tokens=12)[0].tolist()
            for engine in (run, hf):
                (found,) = engine.generate([prompt], control=values, **GREEDY)
                (same,) = engine.generate([string], **GREEDY)
                assert found.prompt_tokens == same.prompt_tokens
                assert [*found.prompt_tokens, *found.tokens] == output
                assert same.tokens == found.tokens
                assert not set(found.tokens) & set(prompts.reserved_ids)


def test_a_pretrained_model_gets_more_embeddings(text: Path, tmp_path: Path) -> None:
    base = write_chat_model(tmp_path / "base")
    tables: dict[str, Any] = {
        "model": {"from": str(base), "vocab": 400}, "control": CONTROL,
        "data": {"path": str(text), "sequence": 110, "cache": str(text.parent / "cache")},
        "train": {"steps": 1, "batch": 4},
    }  # fmt: skip
    loaded = language_model(load_job(tables), "")
    check_inputs(loaded)
    model = LanguageModel(loaded.job.model)
    InitialWeights(loaded.job).fill(tensor_shards(model))
    fresh = LanguageModel(loaded.job.model)
    InitialSource(loaded.job.seed, loaded.job.model.init_std).fill(tensor_shards(fresh))
    before = load(base, device="cpu").module
    for name in ("embed", "head"):
        weight = getattr(model, name).weight
        assert torch.equal(weight[:260], getattr(before, name).weight)
        assert torch.equal(weight[260:], getattr(fresh, name).weight[260:])
    rows = torch.empty(200, 32)
    shard = TensorShard.of_tensor(PARAMETER, "embed.weight", (400, 32), (200, 0), rows, (0,))
    InitialWeights(loaded.job).fill([shard])
    assert torch.equal(rows, model.embed.weight[200:])
    for vocab, words in ((380, "set model.vocab = 448"), (200, "has 260 embeddings")):
        tables["model"]["vocab"] = vocab
        with pytest.raises(ConfigError, match=words):
            check_inputs(load_job(tables))
