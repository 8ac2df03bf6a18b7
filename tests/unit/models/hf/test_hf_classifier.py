"""Models with a classifier of texts: transformers gives equal scores, and both heads survive."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moesaic import ConfigError, Engine, Job
from moesaic.base.config import parse
from moesaic.facts.job import Job as LanguageModelJob
from moesaic.facts.job import ModelConfig
from moesaic.facts.job.model import PRESETS
from moesaic.models.hf.config import read_config
from moesaic.models.hf.shards import InMemoryTensors
from moesaic.models.hf.writer import find_companions, write_model
from moesaic.models.init import InitialSource
from moesaic.models.lm import LanguageModel
from moesaic.models.state import tensor_shards
from moesaic.testing.chat_templates import CHATML, write_tokenizer
from moesaic.train.job_file import load_job
from moesaic.train.lm import InitialWeights

SMALL = {
    "hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 24, "vocab": 260,
    "max_positions": 256,
}  # fmt: skip
LATENT = {
    "kv_heads": 4,
    "latent": {"kv_lora_rank": 10, "q_lora_rank": 12, "qk_rope_head_dim": 4, "v_head_dim": 6},
}
CASES: dict[str, dict[str, Any]] = {
    "tiny-dense": {"tied": True}, "tiny-mixtral": {}, "tiny-qwen3": {}, "tiny-deepseek": LATENT,
}  # fmt: skip
TEXTS = ["It is here.", "So it is", "The longest of all these texts."]


def make_model(preset: str, **changes: Any) -> LanguageModel:
    raw = {**PRESETS[preset], **SMALL, **CASES.get(preset, {}), "labels": 2, **changes}
    model = LanguageModel(parse(ModelConfig, raw, "test"))
    InitialSource(3, 0.3).fill(tensor_shards(model))
    return model


def write(model: LanguageModel, directory: Path) -> Path:
    tokenizer = write_tokenizer(directory.with_name("tokenizer"), CHATML)
    config = model.config.model_copy(update={"extras": {"eos_token_id": 257}})
    write_model(
        directory, config, InMemoryTensors(tensor_shards(model)),
        companions=find_companions(tokenizer), special_token_ids={"eos_token_id": 257},
    )  # fmt: skip
    return directory


@pytest.mark.parametrize("preset", CASES)
def test_transformers_gives_equal_scores(preset: str, tmp_path: Path) -> None:
    """The batch is padded, so transformers has to find the last token of each text."""
    import transformers

    directory = write(make_model(preset), tmp_path / "model")
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(directory)
    assert theirs.config.id2label == {0: "generated", 1: "original"}
    with Engine(directory, device="cpu") as engine:
        tokenizer = engine.prompts.tokenizer
        rows = [tokenizer.encode(text) for text in TEXTS]
        longest = max(map(len, rows))
        padded = torch.tensor([row + [theirs.config.pad_token_id] * (longest - len(row))
                               for row in rows])  # fmt: skip
        attended = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
        with torch.no_grad():
            logits = theirs(padded, attention_mask=attended).logits
        expected = logits.softmax(dim=-1)[:, 1]
        assert expected.std() > 0.004
        torch.testing.assert_close(
            torch.tensor(engine.credibility(TEXTS)), expected, rtol=1e-5, atol=1e-6
        )


def test_both_heads_of_an_export_are_read(tmp_path: Path) -> None:
    import transformers

    model = make_model("tiny-mixtral")
    directory = write(model, tmp_path / "model")
    config, warnings = read_config(directory)
    assert (config.labels, warnings) == (2, [])
    assert "id2label" not in config.extras
    with Engine(directory, device="cpu") as engine:
        (row,) = engine.generate(TEXTS[:1], max_tokens=8, temperature=0)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory)
    tokens = theirs.generate(
        torch.tensor([row.prompt_tokens]), max_new_tokens=8, do_sample=False, eos_token_id=257
    )
    assert tokens[0, len(row.prompt_tokens) :].tolist() == row.tokens


def test_a_family_without_a_classifier_in_transformers_is_refused(tmp_path: Path) -> None:
    model = make_model("tiny-olmoe")
    with pytest.raises(ConfigError, match="transformers has no OlmoeForSequenceClassification"):
        write(model, tmp_path / "model")


@pytest.mark.parametrize("labels", [0, 2])
def test_a_run_starts_from_a_model_with_or_without_a_classifier(
    labels: int, tmp_path: Path
) -> None:
    """All weights on file are taken; a missing classifier gets initial values."""
    base = make_model("tiny-mixtral", labels=labels)
    directory = write(base, tmp_path / "model")
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(f'{{"text": "It is {n}.", "label": {n % 2}}}\n' for n in range(40)))
    raw = {
        "model": {"from": str(directory)}, "credibility": {},
        "data": {
            "path": str(pairs), "format": "labelled", "sequence": 16, "cache": str(tmp_path / "c"),
        },
        "train": {"steps": 1, "batch": 2, "device": "cpu"}, "log": {"tensorboard": False},
    }  # fmt: skip
    job = load_job(raw).job
    assert isinstance(job, LanguageModelJob)
    model = LanguageModel(job.model)
    InitialWeights(job).fill(tensor_shards(model))
    found, expected = model.state_dict(), base.state_dict()
    assert found.keys() - expected.keys() == ({"head.score.weight"} if not labels else set())
    for name, values in expected.items():
        assert torch.equal(found[name], values), name
    assert 0 < float(model.head.state_dict()["score.weight"].std()) < 1
    Job.load(raw).train(out=tmp_path / "run", output=None)
    assert (tmp_path / "run/checkpoints/step-00000001/COMMIT").exists()
