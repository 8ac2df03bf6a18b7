"""Evaluations against lm-eval's own `hf` model, and against log-probabilities by transformers."""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from commands import Commands
from moesaic import ConfigError, Engine
from moesaic.api.evaluation import Evaluation, run_evaluation, standard_error
from moesaic.serve.eval_scores import SCORE_NAMES, Choice, ScoreName, combine, score_texts
from moesaic.testing.served import write_chat_model

pytest.importorskip("lm_eval", reason="lm-eval is missing: pip install 'moesaic[eval]'")

WORDS = [
    "red", "green", "blue", "cold", "warm", "slow", "quick", "seven", "eight", "north", "south",
    "paper", "stone", "river",
]  # fmt: skip
YAML = """
task: colours
dataset_path: json
dataset_kwargs: {data_files: {test: colours.json, train: shots.json}}
test_split: test
fewshot_split: train
num_fewshot: 2
output_type: multiple_choice
description: "Pick a word.\\n\\n"
doc_to_text: "{{subject}} is"
doc_to_choice: words
doc_to_target: "{{words.index(word)}}"
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_mutual_info, aggregation: mean, higher_is_better: true}
"""
FACTS = """
task: facts
dataset_path: json
dataset_kwargs: {data_files: colours.json}
test_split: train
output_type: loglikelihood
doc_to_text: "{{subject}} is"
doc_to_target: " {{word}}"
"""


def write_json(path: Path, rows: list[Any]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tasks")
    (directory / "colours.yaml").write_text(YAML)
    (directory / "facts.yaml").write_text(FACTS)
    (directory / "both.yaml").write_text(
        "group: both\ntask: [colours, facts]\naggregate_metric_list: [{metric: acc}]\n"
    )
    rows = [
        {
            "subject": f"The {WORDS[at]} thing",
            "words": WORDS[at : at + 4],
            "word": WORDS[at + at % 4],
        }
        for at in range(9)
    ]
    write_json(directory / "colours.json", rows)
    write_json(directory / "shots.json", rows[4:7])
    write_json(
        directory / "quiz.jsonl",
        [
            {"question": f"{word}?", "choices": ["A", "B", "Cé d"], "answer": at % 3}
            for at, word in enumerate(WORDS[:8])
        ],
    )
    write_json(
        directory / "write.jsonl", [{"prompt": f"{word}:", "answer": ["x"]} for word in WORDS[:4]]
    )
    # The model has 256 positions.
    write_json(directory / "texts.jsonl", [{"text": "Short."}, {"text": " ".join(WORDS) * 8}])
    return directory


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("eval") / "model")


@pytest.fixture(scope="module")
def engine(directory: Path) -> Iterator[Engine]:
    with Engine(directory, device="cpu", max_running=4) as engine:
        yield engine


@pytest.fixture(scope="module")
def found(engine: Engine, tasks: Path) -> Evaluation:
    return engine.evaluate([tasks], scores=["all"])


@pytest.fixture(scope="module")
def by_hf(directory: Path, tasks: Path) -> dict[str, Any]:
    from lm_eval.evaluator import evaluate
    from lm_eval.models.huggingface import HFLM

    from moesaic.serve.eval_tasks import load_tasks

    model = HFLM(pretrained=str(directory), device="cpu", dtype="float32", batch_size=3)
    loaded = load_tasks([tasks], SCORE_NAMES)
    for task in loaded["tasks"].values():
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=1234)
    raw: dict[str, Any] = evaluate(model, loaded, bootstrap_iters=1)
    return raw


def test_log_likelihoods_and_answers_equal_those_of_hf(
    found: Evaluation, by_hf: dict[str, Any]
) -> None:
    assert found.samples.keys() == by_hf["samples"].keys()
    number = 0
    for name, samples in found.samples.items():
        for own, other in zip(samples, by_hf["samples"][name], strict=True):
            assert own["arguments"] == other["arguments"]
            for mine, theirs in zip(own["resps"], other["resps"], strict=True):
                number += 1
                [answer], [expected] = mine, theirs
                if isinstance(answer, tuple):
                    assert answer[0] == pytest.approx(expected[0], abs=1e-4)
                    assert answer[1] == expected[1]
                elif isinstance(answer, float):
                    assert answer == pytest.approx(expected, rel=1e-6)
                else:
                    assert answer == expected
    assert number > 200


def test_metrics_equal_those_of_hf(found: Evaluation, by_hf: dict[str, Any]) -> None:
    for one in found.metrics:
        expected = by_hf["results"][one.task]
        value = expected[f"{one.metric},none"]
        assert one.value == pytest.approx(value, rel=1e-4)
        stderr = expected[f"{one.metric}_stderr,none"]
        if isinstance(stderr, float):
            assert one.stderr == pytest.approx(stderr, abs=1e-6)
        else:
            assert one.stderr is not None
    named = {(one.task, one.metric): one for one in found.metrics}
    assert named["both", "acc"].documents == 18
    assert named["colours", "acc"].shots == 2
    # lm-eval has this scoring function itself.
    assert named["colours", "acc_pmi"].value == named["colours", "acc_mutual_info"].value
    assert named["colours", "acc_conditional"].value == named["colours", "acc"].value


@pytest.fixture(scope="module")
def log_likelihood(directory: Path) -> Callable[[str, str], float]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(directory)

    @torch.no_grad()
    def compute(context: str, continuation: str) -> float:
        stripped = context.rstrip()
        continuation = context[len(stripped) :] + continuation
        start = tokenizer(stripped).input_ids if stripped else [tokenizer.bos_token_id]
        ids = torch.tensor([[*start, *tokenizer(continuation).input_ids]])
        logprobs = model(ids).logits[0].log_softmax(dim=-1)
        places = range(len(start) - 1, ids.shape[1] - 1)
        return float(logprobs[list(places), ids[0, len(start) :]].sum())

    return compute


@pytest.mark.parametrize("score", SCORE_NAMES)
def test_scoring_functions_equal_an_oracle(
    found: Evaluation,
    log_likelihood: Callable[[str, str], float],
    tasks: Path,
    score: ScoreName,
) -> None:
    rows = [json.loads(line) for line in (tasks / "quiz.jsonl").read_text().splitlines()]
    right = []
    for row in rows:
        scores = [
            combine(
                score,
                [
                    log_likelihood(*pair)
                    for pair in score_texts(
                        score, Choice("", f"Question: {row['question']}\nAnswer:", f" {choice}")
                    )
                ],
            )
            for choice in row["choices"]
        ]
        right.append(float(scores.index(max(scores)) == row["answer"]))
    assert [one[f"acc_{score}"] for one in found.samples["quiz"]] == right
    [metric] = [one for one in found.metrics if (one.task, one.metric) == ("quiz", f"acc_{score}")]
    assert metric.value == statistics.mean(right)
    assert metric.stderr == pytest.approx(statistics.stdev(right) / math.sqrt(len(right)))


def test_log_likelihoods_of_pairs(
    engine: Engine, log_likelihood: Callable[[str, str], float]
) -> None:
    pairs = [
        ("The sky", " is blue"),
        ("The sky ", "is red"),
        ("", "Alone"),
        ("The sky", " is black"),
    ]
    scores = engine.score(pairs)
    for (context, continuation), one in zip(pairs, scores, strict=True):
        assert (one.context, one.continuation) == (context, continuation)
        assert one.logprob == pytest.approx(log_likelihood(context, continuation), abs=1e-4)
    assert engine.score([([1, 2], [3])])[0].tokens == [3]
    assert engine.score([([1, 2], [])])[0].logprob == 0
    with pytest.raises(ConfigError, match="no token"):
        engine.score([([], [3])])
    with pytest.raises(ConfigError, match="two texts, or token ids of both"):
        engine.score([("a", [3])])
    with pytest.raises(ConfigError, match="256 positions"):
        engine.score([([1] * 300, [3])])


def test_shots_limits_and_chats(engine: Engine, tasks: Path) -> None:
    calls = []
    found = run_evaluation(
        engine, [tasks / "quiz.jsonl"], shots=2, limit=3, chat=True,
        on_progress=lambda *call: calls.append(call),
    )  # fmt: skip
    [one, *_] = found.samples["quiz"]
    assert len(found.samples["quiz"]) == 3
    context = one["arguments"][0][0]
    assert context.count("<|start|>user") == 3
    assert context.endswith("<|start|>assistant\n")
    assert calls[0] == ("continuations", 0, 9)
    assert calls[-1] == ("continuations", 9, 9)
    assert {one.shots for one in found.metrics} == {2}


def test_more_shots_than_documents_are_refused(engine: Engine, tmp_path: Path) -> None:
    question = {"prompt": "x", "choices": ["a", "b"], "answer": 0}
    write_json(tmp_path / "a.jsonl", [question, question])
    with pytest.raises(ConfigError, match="shots = 2, but task a has 1 other documents"):
        run_evaluation(engine, [tmp_path], shots=2)


def test_long_questions_lose_their_start(engine: Engine, tmp_path: Path) -> None:
    write_json(tmp_path / "a.jsonl", [{"prompt": "x" * 300, "choices": ["a", "b"], "answer": 0}])
    [warning] = run_evaluation(engine, [tmp_path]).warnings
    assert warning.startswith("2 texts are longer than the model's 256 positions")


MISTAKES: dict[str, tuple[str, str]] = {
    "a dataset of the hub": (
        "dataset_path: squad", "dataset_path = \"squad\" is not on this machine: use json"
    ),
    "a missing file": (
        "dataset_path: json\ndataset_kwargs: {data_files: none.jsonl}", "does not exist: paths are"
    ),
    "no file": ("dataset_path: json", "data_files is missing"),
    "a split": (
        "dataset_path: json\ndataset_kwargs: {data_files: a.json}\ntest_split: test",
        "test_split = \"test\" is no split of the data: use one of train",
    ),
    "no split": (
        "dataset_path: json\ndataset_kwargs: {data_files: a.json}", "test_split is missing"
    ),
    "an output type": ("output_type: essay", "invalid output_type 'essay'"),
    "a field": (
        "dataset_path: json\ndataset_kwargs: {data_files: a.json}\ntest_split: train\n"
        'doc_to_text: "{{ missing }}"\ndoc_to_target: q\ndoc_to_choice: nowhere\n'
        "output_type: multiple_choice",
        "check doc_to_text",
    ),
    "no choices": (
        "dataset_path: json\ndataset_kwargs: {data_files: a.json}\ntest_split: train\n"
        "doc_to_text: q\ndoc_to_target: q\noutput_type: multiple_choice",
        "doc_to_choice is missing",
    ),
    "an answer": (
        "dataset_path: json\ndataset_kwargs: {data_files: a.json}\ntest_split: train\n"
        "doc_to_text: q\ndoc_to_target: p\ndoc_to_choice: [a, b]\noutput_type: multiple_choice",
        'doc_to_target = "p" is no field of the data: use one of q',
    ),
    "generation": (
        "dataset_path: json\ndataset_kwargs: {data_files: a.json}\ntest_split: train\n"
        "doc_to_text: q\ndoc_to_target: q\ngeneration_kwargs: {until: x, num_beams: 4}",
        "generation_kwargs.num_beams = 4 is not supported",
    ),
    "sampling without a temperature": (
        "dataset_path: json\ndataset_kwargs: {data_files: a.json}\ntest_split: train\n"
        "doc_to_text: q\ndoc_to_target: q\ngeneration_kwargs: {max_gen_toks: 9, do_sample: true}",
        "do_sample = true needs generation_kwargs.temperature above 0",
    ),
    "too many new tokens": (
        "dataset_path: json\ndataset_kwargs: {data_files: a.json}\ntest_split: train\n"
        "doc_to_text: q\ndoc_to_target: q\ngeneration_kwargs: {until: x, max_gen_toks: 256}",
        "max_gen_toks = 256 leaves no room",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MISTAKES)
def test_bad_tasks(engine: Engine, tmp_path: Path, case: str) -> None:
    text, message = MISTAKES[case]
    write_json(tmp_path / "a.json", [{"q": "x"}])
    (tmp_path / "bad.yaml").write_text(f"task: bad\n{text}\n")
    with pytest.raises(ConfigError, match=message):
        run_evaluation(engine, [tmp_path])


def test_scores_that_cannot_be(engine: Engine, tasks: Path) -> None:
    with pytest.raises(ConfigError, match='--score "best" is not known: use joint'):
        run_evaluation(engine, [tasks], scores=["best"])
    with pytest.raises(ConfigError, match="texts has no choices: remove --score"):
        run_evaluation(engine, [tasks / "texts.jsonl"], scores=["pmi"])
    with pytest.raises(ConfigError, match="chat = true and --score pmi"):
        run_evaluation(engine, [tasks], scores=["pmi"], chat=True)


def test_without_lm_eval(engine: Engine, tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ConfigError, match=r"needs lm-eval: pip install 'moesaic\[eval\]'"):
        run_evaluation(engine, [tasks])


def test_standard_errors_by_resampling() -> None:
    values = [0.0, 1.0] * 50
    found = standard_error(statistics.mean, values)
    assert found == pytest.approx(statistics.stdev(values) / 10, rel=0.15)
    assert standard_error(statistics.mean, [1.0]) is None


def test_the_command(commands: Commands, directory: Path, tasks: Path, tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    quiz = str(tasks / "quiz.jsonl")
    call = ("eval", str(directory), "--tasks", quiz, "--set", "device=cpu")
    text = commands.output(call, "--score", "pmi", "--out", str(out))
    assert "acc_pmi" in text
    assert "±" in text
    assert json.loads(out.read_text())["samples"]["quiz"][0]["doc"]["choices"][0] == "A"
    metrics = commands.facts(call, "--set", "limit=2")
    assert [one["documents"] for one in metrics] == [2, 2]
    for words, sentence in (
        ((), "--tasks is missing: give a directory"),
        (("--tasks", "nowhere"), "'nowhere' does not exist"),
        (("--tasks", quiz, "--score", "best"), '"best" is not known'),
        (("--tasks", quiz, "--out", str(out)), "already exists"),
    ):
        assert sentence in commands.refusal(("eval", str(directory), *words))
