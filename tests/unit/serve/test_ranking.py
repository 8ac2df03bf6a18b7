"""Ranking of several texts of a prompt, and the classifier's scores in the engine."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from moesaic import ConfigError, Engine
from moesaic.api.generation import Generation, ranked_text
from moesaic.cli.main import main
from moesaic.models.hf.origin import open_origin
from moesaic.models.lm import LanguageModel
from moesaic.models.state import tensor_shards
from moesaic.models.tokenizer import ByteTokenizer
from moesaic.nn.attention_backends import AttentionMetadata
from moesaic.nn.inputs import Inputs
from moesaic.serve.ranking import best_of_each, likelihood
from moesaic.testing.served import write_chat_model

TEXTS = ["It is here.", "So it is", "x", "The longest of all these texts. " * 4]
SAMPLING: dict[str, Any] = {"max_tokens": 12, "temperature": 1.5, "seed": 5}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ranking") / "model"
    return write_chat_model(path, family="qwen3_moe", renormalise=True, labels=2)


@pytest.fixture(scope="module")
def engine(directory: Path) -> Engine:
    return Engine(directory, device="cpu", precision="fp64", tokens_per_pass=40)


@pytest.fixture(scope="module")
def model(directory: Path) -> LanguageModel:
    origin = open_origin(directory)
    model = LanguageModel(origin.model).double().eval()
    origin.fill(tensor_shards(model))
    return model


def slow_score(model: LanguageModel, tokens: list[int]) -> float:
    """Return the probability of class 1 by a forward pass over one text."""
    positions = torch.arange(len(tokens))[None]
    inputs = Inputs(
        model.rotary(positions), attention=AttentionMetadata.causal(1, len(tokens)),
        keep=frozenset({"label_logits"}),
    )  # fmt: skip
    with torch.no_grad():
        _, reports = model(torch.tensor([tokens]), inputs)
    logits = reports["head"].label_logits
    assert logits is not None
    return float(logits[0, -1].softmax(dim=-1)[1])


def test_scores_are_those_of_whole_passes(engine: Engine, model: LanguageModel) -> None:
    """One text takes several passes, and the second time most of it comes from the cache."""
    expected = [slow_score(model, engine.prompts.tokenizer.encode(text)) for text in TEXTS]
    assert max(expected) - min(expected) > 0.05
    for _ in range(2):
        assert engine.credibility(TEXTS) == pytest.approx(expected, rel=1e-9)
    assert engine.credibility([TEXTS[0], "", TEXTS[0]]) == pytest.approx(
        [expected[0], 0.0, expected[0]]
    )


def test_texts_are_scored_among_others_that_are_generated(
    engine: Engine, model: LanguageModel
) -> None:
    alone = engine.generate(TEXTS[:2], **SAMPLING)
    requests = [engine._classification(engine.prompts.tokenizer.encode(TEXTS[0]))]
    from moesaic.serve.config import SamplingConfig

    config = SamplingConfig(**SAMPLING)
    requests[:0] = [one for text in TEXTS[:2] for one in engine.requests(text, config)]
    for one, _ in engine.run(requests):
        assert one.error is None
    assert [one.result().tokens for one in requests[:2]] == [row.tokens for row in alone]
    expected = slow_score(model, engine.prompts.tokenizer.encode(TEXTS[0]))
    assert math.exp(requests[2].label_logprobs[1]) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("rank", ["credibility", "likelihood"])
def test_the_best_texts_come_first_and_the_worst_are_dropped(
    engine: Engine, model: LanguageModel, rank: str
) -> None:
    everything = engine.generate(TEXTS[:2], n=6, logprobs=0, **SAMPLING)
    rows = engine.generate(TEXTS[:2], n=2, best_of=6, rank=rank, **SAMPLING)
    for number, prompt in enumerate(TEXTS[:2]):
        candidates = everything[6 * number : 6 * number + 6]
        if rank == "likelihood":
            scores = [sum(one.logprobs or ()) / len(one.tokens) for one in candidates]
        else:
            texts = [ranked_text(one, engine.prompts.tokenizer).text for one in candidates]
            assert all(prompt in text for text in texts)
            scores = [slow_score(model, engine.prompts.tokenizer.encode(text)) for text in texts]
        order = sorted(range(6), key=lambda index: scores[index], reverse=True)
        chosen = rows[2 * number : 2 * number + 2]
        assert [one.text for one in chosen] == [candidates[index].text for index in order[:2]]
        assert [one.score for one in chosen] == pytest.approx(
            [scores[index] for index in order[:2]], rel=1e-9
        )
    assert all(row.logprobs is None for row in rows)


@pytest.mark.parametrize(
    ("prompt", "text", "reason", "judged", "num_tokens"),
    [
        ("So it", " is. And more", "stop", "So it is. And more", 13),
        ("So it", " is. And mo", "length", "So it is.", 4),
        ("So it is.", " And mo", "length", "So it is. And mo", 7),
        ("So it", " is.  ", "length", "So it is.", 6),
        ("\u00e9", "\u00e9.\u00e9", "length", "\u00e9\u00e9.\u00e9", 5),
        ("  \u00e9", "\u00e9. \u00e9", "length", "\u00e9\u00e9.", 3),
        ([{"role": "user", "content": "Why?"}], " It is. So", "length", "It is.", 7),
        ([83, 111], " it is. ", "stop", "So it is.", 8),
    ],
)
def test_a_cut_sentence_does_not_count(
    prompt: Any, text: str, reason: str, judged: str, num_tokens: int
) -> None:
    tokens = list(b"So") if isinstance(prompt, list) else []
    row = Generation(prompt, tokens, list(text.encode()), text, reason)
    assert ranked_text(row, ByteTokenizer()) == (judged, num_tokens)
    row = row._replace(text=" x", tokens=list(b" x"))
    assert ranked_text(row, ByteTokenizer(), is_chat=True) == ("x", 2)


@pytest.mark.parametrize("rank", ["credibility", "likelihood"])
def test_both_scores_leave_out_a_cut_sentence(engine: Engine, rank: str) -> None:
    settings: dict[str, Any] = {
        "max_tokens": 30, "temperature": 3.0, "logit_bias": dict.fromkeys((13, 33, 220), 14.0),
    }  # fmt: skip
    tokenizer = engine.prompts.tokenizer
    assert tokenizer.encode(".B ") == [13, 33, 220]
    everything = engine.generate(["So"], n=4, logprobs=0, **settings)
    ranked = [ranked_text(one, tokenizer) for one in everything]
    assert any(one.num_tokens < 30 for one in ranked)
    rows = engine.generate(["So"], n=4, best_of=4, rank=rank, **settings)
    if rank == "likelihood":
        pairs = zip(everything, ranked, strict=True)
        expected = [
            sum((row.logprobs or [])[: one.num_tokens]) / one.num_tokens for row, one in pairs
        ]
    else:
        expected = engine.credibility([one.text for one in ranked])
    assert [row.score for row in rows] == pytest.approx(sorted(expected, reverse=True), rel=1e-9)


def test_a_text_beyond_the_positions_is_cut(engine: Engine) -> None:
    """Bytes that are no UTF-8 have more tokens when they are encoded anew."""
    prompt = "x" * 236
    settings: dict[str, Any] = {"max_tokens": 20, "temperature": 5.0, "best_of": 3, "n": 3}
    rows = engine.generate([prompt], rank="credibility", **settings)
    encode = engine.prompts.tokenizer.encode
    assert max(len(encode(prompt + row.text)) for row in rows) > engine.max_positions == 256
    for row in rows:
        kept = encode(ranked_text(row, engine.prompts.tokenizer).text)[:256]
        (alone,) = engine._credibility([kept])
        assert row.score == pytest.approx(alone, rel=1e-9)
    with pytest.raises(ConfigError, match="has 300 tokens, and the model has 256 positions"):
        engine.credibility(["x" * 300])


def test_ties_keep_their_order() -> None:
    assert best_of_each([1.0, 3.0, 1.0, 3.0, 5.0, 5.0, 9.0, 5.0], 4, 3) == [1, 3, 0, 6, 4, 5]
    assert likelihood([-1.0, -2.0]) == -1.5
    assert likelihood([]) == -math.inf


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"best_of": 4, "rank": "credability"}, 'did you mean "credibility"'),
        ({"rank": "likelihood"}, 'rank = "likelihood" ranks several texts: set best_of'),
        ({"best_of": 2, "n": 3}, "best_of = 2: give a number of texts from n = 3 to 128"),
    ],
)
def test_mistakes_are_explained(engine: Engine, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        engine.generate(["x"], **settings)


def test_a_model_without_a_classifier_ranks_by_likelihood(tmp_path: Path) -> None:
    with Engine(write_chat_model(tmp_path / "plain"), device="cpu") as plain:
        (row,) = plain.generate(["x"], best_of=3, **SAMPLING)
        assert row.score is not None
        with pytest.raises(ConfigError, match='rank = "credibility" needs a model with a classif'):
            plain.generate(["x"], best_of=3, rank="credibility")
        with pytest.raises(ConfigError, match="the model has no classifier: train one"):
            plain.credibility(["x"])


def test_the_command_shows_scores(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["generate", str(directory), "--prompt", "So", "--best-of", "4", "--rank"]
    sets = ["--set", "max_tokens=6", "--set", "n=2", "--set", "device=cpu"]
    assert main([*command, "credibility", *sets, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["score"] for row in rows] == sorted((row["score"] for row in rows), reverse=True)
    assert main([*command, "credibility", *sets]) == 0
    shown, told = capsys.readouterr()
    num_cut = sum(row["finish_reason"] == "length" for row in rows)
    assert num_cut
    assert f"warning: max_tokens = 6 cut {num_cut} of 2 texts, which were ranked without" in told
    assert shown.count("--- [credibility ") == 2
    assert f"--- [credibility {rows[0]['score']:.4f}] So\n{rows[0]['text']}\n" in shown
    assert main([*command, "credibility", "--input", "a", "--output", "b"]) == 2
    assert "remove --best-of and --rank" in capsys.readouterr().err
