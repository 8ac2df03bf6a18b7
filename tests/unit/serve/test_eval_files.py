"""Task files of evaluations: what is read, and what is refused in one sentence."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from moesaic.base.errors import ConfigError
from moesaic.serve.eval_files import find_tasks, locate_data, read_questions
from moesaic.serve.eval_scores import NO, SCORE_NAMES, YES, Choice, combine, score_texts

KEYS = ("task", "group", "include", "doc_to_text", "dataset_path", "dataset_kwargs")
CHOICES = {"question": "Two?", "choices": ["one", "two"]}


def write_lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.mark.parametrize("answer", [1, "two", "B", "b"])
def test_the_right_choice_is_an_index_a_text_or_a_letter(tmp_path: Path, answer: object) -> None:
    found = read_questions(write_lines(tmp_path / "quiz.jsonl", {**CHOICES, "answer": answer}))
    assert (found.name, found.kind) == ("quiz", "choices")
    assert found.rows == [
        {"prompt": "Question: Two?\nAnswer:", "choices": ["one", "two"], "gold": 1}
    ]


def test_a_text_that_is_a_choice_is_no_letter(tmp_path: Path) -> None:
    row = {"prompt": "x", "choices": ["B", "A"], "answer": "A"}
    assert read_questions(write_lines(tmp_path / "a.jsonl", row)).rows[0]["gold"] == 1


def test_answers_and_texts(tmp_path: Path) -> None:
    rows = [{"prompt": "2+2=", "answer": "4"}, {"prompt": "1+4=", "answer": ["5", "five"]}]
    found = read_questions(write_lines(tmp_path / "a.jsonl", *rows))
    assert found.kind == "answers"
    assert [row["answers"] for row in found.rows] == [["4"], ["5", "five"]]
    found = read_questions(write_lines(tmp_path / "b.jsonl", {"text": "Words."}))
    assert (found.kind, found.rows) == ("texts", [{"text": "Words."}])


BAD: dict[str, tuple[Any, str]] = {
    "no answer": ({"question": "x"}, "answer = .*: give a text"),
    "a choice beyond": ({**CHOICES, "answer": 2}, "answer = 2 is none of the 2 choices"),
    "true": ({**CHOICES, "answer": True}, "answer = true is none of the 2 choices"),
    "an unknown text": ({**CHOICES, "answer": "three"}, "its index from 0, or its letter"),
    "no choice": ({"question": "x", "choices": [], "answer": 0}, "choices = .*: give a list"),
    "an empty choice": ({"question": "x", "choices": ["", "a"], "answer": 0}, "none empty"),
    "a misspelt field": ({"qestion": "x", "answer": "y"}, "it has 'qestion'.*: rename the field"),
    "two prompts": (
        {"question": "x", "prompt": "y", "answer": "z"},
        "give one of question, prompt",
    ),
    "no object": ([1], "no JSON object"),
    "a number": ({"prompt": 3, "answer": "z"}, "prompt = 3 is no text"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_questions(tmp_path: Path, case: str) -> None:
    row, message = BAD[case]
    path = write_lines(tmp_path / "bad.jsonl", row)
    with pytest.raises(ConfigError, match=f"bad.jsonl' line 1: .*{message}"):
        read_questions(path)


def test_files_that_are_no_questions(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n{oops\n")
    with pytest.raises(ConfigError, match="line 2: it is not JSON"):
        read_questions(path)
    path.write_text("\n")
    with pytest.raises(ConfigError, match="has no line"):
        read_questions(path)
    write_lines(path, {"text": "a"}, {"prompt": "b", "answer": "c"})
    with pytest.raises(ConfigError, match="line 2: it has other fields"):
        read_questions(path)


def test_a_directory_holds_tasks_groups_and_questions(tmp_path: Path) -> None:
    write_lines(tmp_path / "quiz.jsonl", {**CHOICES, "answer": 0})
    write_lines(tmp_path / "data.jsonl", {"anything": 1})
    (tmp_path / "_base.yaml").write_text("dataset_path: json\n")
    (tmp_path / "one.yaml").write_text(
        "task: one\ninclude: _base.yaml\ndoc_to_text: !function mine.text\n"
        "dataset_kwargs:\n  data_files: {test: data.jsonl}\n"
    )
    (tmp_path / "all.yaml").write_text("group: all\ntask: [one]\n")
    found = find_tasks([tmp_path], KEYS)
    assert found.names == ["all"]
    assert set(found.sources) == {"all", "one"}
    assert found.directories == [tmp_path]
    assert [one.name for one in found.questions] == ["quiz"]
    assert locate_data("data.jsonl", tmp_path / "one.yaml") == tmp_path / "data.jsonl"
    assert find_tasks([tmp_path / "one.yaml"], KEYS).names == ["one"]


def test_bad_task_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist: give a directory"):
        find_tasks([tmp_path / "none"], KEYS)
    with pytest.raises(ConfigError, match=r"there is no task: add a \.yaml"):
        find_tasks([tmp_path], KEYS)
    file = tmp_path / "one.yaml"
    for text, message in (
        ("task: one\ndoc_to_txt: x\n", "unknown key 'doc_to_txt': did you mean 'doc_to_text'"),
        ("task: [\n", "is not YAML"),
        ("- task\n", "holds no keys"),
        ("task: 3\n", "task = 3 is no name"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=f"one.yaml'.*{message}"):
            find_tasks([tmp_path], KEYS)
    file.write_text("task: one\n")
    write_lines(tmp_path / "one.jsonl", {"text": "x"})
    with pytest.raises(ConfigError, match="two files define the task 'one'"):
        find_tasks([tmp_path], KEYS)


def test_texts_of_the_scoring_functions() -> None:
    choice = Choice("Shots.\n\n", "Sky?", " blue")
    texts = {name: score_texts(name, choice) for name in SCORE_NAMES}
    assert texts["joint"] == [("", "Shots.\n\nSky? blue")]
    assert texts["conditional"] == [("Shots.\n\nSky?", " blue")]
    assert texts["channel"] == [("Shots.\n\nblue\n", "Sky?")]
    assert texts["pmi"] == [("Shots.\n\nSky?", " blue"), ("", " blue")]
    asked = "Shots.\n\nSky? blue\nIs this answer correct?"
    assert texts["truth"] == [(asked, YES), (asked, NO)]


def test_combinations() -> None:
    assert combine("joint", [-3.0]) == combine("channel", [-3.0]) == -3.0
    assert combine("pmi", [-3.0, -5.0]) == 2.0
    yes, no = 0.02, 0.06
    assert math.exp(combine("truth", [math.log(yes), math.log(no)])) == pytest.approx(0.25)
    assert combine("truth", [-1000.0, -1000.0]) == pytest.approx(math.log(0.5))
