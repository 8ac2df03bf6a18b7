"""Batches of requests in files: answers, bad lines, and going on after a cut."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moesaic import ConfigError, Engine
from moesaic.api.batch import BatchCounts, run_batch
from moesaic.base.lock import fail_if_locked, file_lock
from moesaic.cli.main import main
from moesaic.testing.served import write_chat_model

SETTINGS: dict[str, Any] = {"max_tokens": 6, "seed": 3}
CHAT = [{"role": "user", "content": "Why?"}]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("batch") / "model")


@pytest.fixture(scope="module")
def engine(directory: Path) -> Iterator[Engine]:
    with Engine(directory, device="cpu", precision="fp64", max_running=2) as engine:
        yield engine


@pytest.fixture(autouse=True)
def _chdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(*lines: object) -> Path:
    path = Path("in.jsonl")
    path.write_text("".join(f"{x if isinstance(x, str) else json.dumps(x)}\n" for x in lines))
    return path


def answers() -> dict[str, Any]:
    rows = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    found = {row["custom_id"]: row for row in rows}
    assert len(found) == len(rows)
    return found


def test_every_form_of_a_request_is_answered(engine: Engine) -> None:
    source = write(
        {"custom_id": "a", "method": "POST", "url": "/v1/completions",
         "body": {"model": "mine", "prompt": "One", "max_tokens": 9, "user": "me",
                  "prompt_cache_key": "mine"}},
        {"custom_id": "b", "body": {"messages": CHAT, "n": 2, "max_completion_tokens": 4}},
        {"prompt": "Three", "temperature": 0}, "",
        {"custom_id": "ids", "prompt": [65, 66], "logprobs": 2, "logit_bias": {"70": 5}},
        {"custom_id": "top", "messages": CHAT, "logprobs": True, "top_logprobs": 1},
        {"custom_id": "stop", "prompt": "x", "stop": None, "seed": 4},
    )  # fmt: skip
    seen: list[BatchCounts] = []
    counts = run_batch(engine, source, "out.jsonl", on_progress=seen.append, **SETTINGS)
    found = answers()
    bodies = {name: row["response"]["body"] for name, row in found.items()}
    assert counts[:3] == (6, 0, 0)
    assert seen[-1] == counts
    assert set(found) == {"a", "b", "line-3", "ids", "top", "stop"}
    assert all(row["error"] is None for row in found.values())

    (one,) = engine.generate(["One"], max_tokens=9, seed=3)
    choice = {
        "index": 0, "text": one.text, "logprobs": None, "finish_reason": one.finish_reason,
    }  # fmt: skip
    assert bodies["a"]["choices"] == [choice]
    assert bodies["a"]["object"] == "text_completion"
    assert bodies["a"]["model"] == "mine"
    new = len(one.tokens)
    assert bodies["a"]["usage"] == {
        "prompt_tokens": 3, "completion_tokens": new, "total_tokens": 3 + new,
    }  # fmt: skip

    two = engine.generate([CHAT], n=2, max_tokens=4, seed=3)
    messages = [one["message"] for one in bodies["b"]["choices"]]
    assert messages == [{"role": "assistant", "content": one.text} for one in two]
    assert bodies["b"]["model"] == "model"
    (three,) = engine.generate(["Three"], temperature=0, **SETTINGS)
    assert bodies["line-3"]["choices"][0]["text"] == three.text

    (four,) = engine.generate([[65, 66]], logprobs=2, logit_bias={70: 5}, **SETTINGS)
    logprobs = bodies["ids"]["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == pytest.approx(four.logprobs)
    assert len(logprobs["tokens"]) == len(logprobs["top_logprobs"]) == len(four.tokens)
    content = bodies["top"]["choices"][0]["logprobs"]["content"]
    assert all(len(one["top_logprobs"]) == 1 for one in content)


def test_bad_lines_are_answered_with_their_number(engine: Engine) -> None:
    source = write(
        {"prompt": "good"}, "{broken", "[]", {"custom_id": 5, "prompt": "x"},
        {"custom_id": "six", "body": {"prompt": "x", "temprature": 1}}, {"custom_id": "seven"},
        {"prompt": "x", "messages": CHAT}, {"prompt": "y" * 300}, {"body": 4},
        {"custom_id": "six", "prompt": "again"}, {"prompt": ["two", "texts"]},
        {"messages": [{"role": "user"}]}, {"prompt": "x", "max_tokens": "4"},
    )  # fmt: skip
    assert run_batch(engine, source, "out.jsonl", **SETTINGS)[:3] == (1, 12, 0)
    errors = {name: row["error"]["message"] for name, row in answers().items() if row["error"]}
    for name, words in {
        "line-2": "line 2: it is not JSON", "line-3": "line 3: it is no JSON object",
        "line-4": "line 4: custom_id is no text", "six": "line 5: body: unknown key 'temprature'",
        "seven": "line 6: body: give a prompt or messages", "line-7": "and not both",
        "line-8": "line 8: prompt", "line-9": "line 9: body is no JSON object",
        "line-10": "line 10: custom_id 'six' is that of an earlier line", "line-11": "prompt = ",
        "line-13": 'max_tokens = "4"',
    }.items():  # fmt: skip
        assert words in errors[name]
    before = Path("out.jsonl").read_bytes()
    assert run_batch(engine, source, "out.jsonl", **SETTINGS)[:3] == (0, 0, 13)
    assert Path("out.jsonl").read_bytes() == before


def test_a_batch_goes_on_after_a_cut(engine: Engine) -> None:
    source = write(*({"custom_id": f"id {i}", "prompt": f"Prompt {i}"} for i in range(9)))
    run_batch(engine, source, "out.jsonl", **SETTINGS)
    whole = Path("out.jsonl").read_bytes()
    expected = {name: row["response"]["body"]["choices"] for name, row in answers().items()}
    for size in (0, 1, len(whole) // 2, len(whole) - 1, len(whole)):
        Path("out.jsonl").write_bytes(whole[:size])
        num_lines = whole[:size].count(b"\n")
        counts = run_batch(engine, source, "out.jsonl", **SETTINGS)
        assert counts[:3] == (9 - num_lines, 0, num_lines)
        found = {name: row["response"]["body"]["choices"] for name, row in answers().items()}
        assert found == expected


def test_many_more_requests_than_run_at_a_time(engine: Engine) -> None:
    source = write(*({"prompt": "x", "seed": i, "max_tokens": 1 + i % 3} for i in range(60)))
    assert run_batch(engine, source, "out.jsonl")[:3] == (60, 0, 0)
    assert len(answers()) == 60


def test_files_that_cannot_be_used(engine: Engine) -> None:
    source = write({"prompt": "x"})
    with pytest.raises(ConfigError, match="input 'none' is no file"):
        run_batch(engine, "none", "out.jsonl")
    Path("other").write_text("a text\n")
    with pytest.raises(ConfigError, match="line 1 of output 'other' is no answer of a batch"):
        run_batch(engine, source, "other")
    assert Path("other").read_text() == "a text\n"
    with (
        file_lock(Path("out.jsonl.lock"), fail_if_locked),
        pytest.raises(ConfigError, match=r"output 'out.jsonl' is written by process"),
    ):
        run_batch(engine, source, "out.jsonl")
    with pytest.raises(ConfigError, match="max_tokens = 0"):
        run_batch(engine, source, "out.jsonl", max_tokens=0)


def test_the_command_answers_a_batch(directory: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write({"prompt": "x"}, {"messages": CHAT}, "{")
    line = ["generate", str(directory), "--input", "in.jsonl", "--output", "out.jsonl"]
    sets = ["--set", "max_tokens=4", "--set", "device=cpu"]
    assert main([*line, *sets]) == 0
    assert "2 answered, 1 failed: out.jsonl (" in capfd.readouterr().out
    assert main([*line, *sets, "--json"]) == 0
    assert json.loads(capfd.readouterr().out) == {
        "answered": 0, "failed": 0, "skipped": 3, "tokens": 0,
    }  # fmt: skip
    for more, words in (
        (["--prompt", "x"], "--prompt and a batch exclude each other"),
        (["--set", "max_tokens=0"], "max_tokens = 0"),
    ):
        assert main([*line, *more]) == 2
        assert words in capfd.readouterr().err
    assert main([*line[:4]]) == 2
    assert "give --input FILE and --output FILE" in capfd.readouterr().err


def test_a_model_that_cannot_be_loaded_writes_no_answers(directory: Path) -> None:
    source = write({"prompt": "x"})
    with (
        Engine(directory, device="cpu", precision="fp64", grouped_mm="triton") as engine,
        pytest.raises(ConfigError, match="grouped_mm"),
    ):
        run_batch(engine, source, "out.jsonl")
    assert Path("out.jsonl").read_bytes() == b""
