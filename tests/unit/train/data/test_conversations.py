"""Conversations: trained tokens, formats, and errors of lines."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from talks import Record, Rows, configure, ours, theirs, write_lines
from tokenizers import models, pre_tokenizers, processors, trainers

from moesaic.base.errors import ConfigError, DataError, StoreError
from moesaic.dist.world import World
from moesaic.models.tokenizer import open_tokenizer
from moesaic.testing.chat_templates import (
    CHATML,
    TEMPLATES,
    without_generation_marks,
    write_tokenizer,
)
from moesaic.train.data.sources import find_sources
from moesaic.train.data.text_data import TextData


def say(*contents: str, system: str | None = None) -> Record:
    roles = ("user", "assistant") * len(contents)
    messages = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]
    opening = [] if system is None else [{"role": "system", "content": system}]
    return {"messages": [*opening, *messages]}


TALKS = [
    say("Hi", "Hello!"),
    say("What is é?", "A letter,\n\nof two  bytes \N{GREEK SMALL LETTER PI}.", system="Be brief."),
    say("1 + 1?", "2", "And  once more?\n", "3 ...\n\tor so", "Sure?", "<|end|> yes"),
    say("left", "right", "nothing is said to this"),
]


def encode(tmp_path: Path, template: str, talks: list[Record]) -> Rows:
    write_tokenizer(tmp_path / "tok", template)
    return ours(write_lines(tmp_path / "a.jsonl", talks))


@pytest.mark.parametrize("name", TEMPLATES)
def test_loss_masks_equal_transformers_by_marks_and_by_prefixes(name: str, tmp_path: Path) -> None:
    marked = encode(tmp_path, TEMPLATES[name], TALKS)
    assert marked == theirs(tmp_path / "tok", TALKS)
    assert encode(tmp_path, without_generation_marks(TEMPLATES[name]), TALKS) == marked
    tokenizer = open_tokenizer(str(tmp_path / "tok"))
    for (ids, counted), talk in zip(marked, TALKS, strict=True):
        trained = tokenizer.decode([i for i, c in zip(ids, counted, strict=True) if c])
        answers = [one["content"] for one in talk["messages"] if one["role"] == "assistant"]
        assert trained.replace(" ", "") == "".join(answers).replace("<|end|>", "").replace(" ", "")


@pytest.mark.parametrize(
    "template", [CHATML, without_generation_marks(CHATML)], ids=["marks", "beginnings"]
)
def test_tokens_with_trimmed_offsets(template: str, tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tok", CHATML)
    file = str(tmp_path / "tok" / "tokenizer.json")
    tokenizer = tokenizers.Tokenizer.from_file(file)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer.save(file)
    expected = theirs(tmp_path / "tok", TALKS)
    (tmp_path / "tok" / "chat_template.jinja").write_text(template)
    assert ours(write_lines(tmp_path / "a.jsonl", TALKS)) == expected


@pytest.mark.parametrize("metaspace", [False, True])
def test_a_token_that_overlaps_an_answer_is_trained(metaspace: bool, tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ m.role + ': ' }}{% generation %}"
        "{{ m.content + '</s>' }}{% endgeneration %}{% endfor %}"
    )
    write_tokenizer(tmp_path / "tok", template)
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = (
        pre_tokenizers.Metaspace() if metaspace else pre_tokenizers.ByteLevel()
    )
    trainer = trainers.BpeTrainer(special_tokens=["</s>"], show_progress=False)
    tokenizer.train_from_iterator(["user: Hello assistant: Hello"] * 9, trainer)
    tokenizer.save(str(tmp_path / "tok" / "tokenizer.json"))
    talk = say("Hello", "Hello")
    ((ids, counted),) = ours(write_lines(tmp_path / "a.jsonl", [talk]))
    assert [(ids, counted)] == theirs(tmp_path / "tok", [talk])
    assert sum(counted) == 4  # " Hello" and the end token, twice.
    assert len(ids) > 4


def test_without_an_end_of_turn_the_line_s_end_is_one(tmp_path: Path) -> None:
    plain = (
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    ((ids, counted),) = encode(tmp_path, plain, [say("Hi", "Hello")])
    assert sum(counted) == len("Hello\n")
    assert counted[-6:] == [1] * 6
    assert len(ids) == len("user: Hi\nassistant: Hello\n")


def test_all_formats_give_the_same_tokens(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tok", CHATML)
    talk = say("Hi", "Hello")
    records = [
        {**talk, "conversations": 7},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
        {"conversations": talk["messages"], "id": 3},
        {"prompt": "Hi", "completion": "Hello"},
    ]
    rows = ours(write_lines(tmp_path / "a.jsonl", records))
    assert rows == rows[:1] * 4
    log: list[str] = []
    TextData.open(configure(tmp_path / "a.jsonl"), 0, World.solo(), log.append)
    assert len(log) == 1
    assert "4 conversations in 2 samples" in log[0]


def test_held_out_conversations_are_logged(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tok", CHATML)
    path = write_lines(tmp_path / "a.jsonl", [say("Hi", f"Hello {i}") for i in range(20)])
    log: list[str] = []
    TextData.open(configure(path, validation_share=0.25), 0, World.solo(), log.append)
    rest, held_out = log
    count = int(re.findall(r"(\d+) of its 20 documents", rest)[0])
    assert held_out.startswith(
        f"data.validation_share = 0.25 ({count} of 20 documents): {count} conversations in"
    )


def test_a_system_message_where_there_is_none(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tok", CHATML)
    talks = [say("Hi", "Hello"), say("Hi", "Yo", system="Own.")]
    path = write_lines(tmp_path / "a.jsonl", talks)
    assert ours(path, system="Be kind.") == ours(
        write_lines(path, [say("Hi", "Hello", system="Be kind."), talks[1]])
    )


def test_a_template_s_clock_stands_still(tmp_path: Path) -> None:
    dated = "{{ strftime_now('%Y') if strftime_now is defined else '2024' }}" + CHATML
    ((ids, _),) = encode(tmp_path, dated, [say("Hi", "Hello")])
    assert open_tokenizer(str(tmp_path / "tok")).decode(ids).startswith("2024")


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ('{"messages', ("is not JSON", "mend the file")),
        ("[" * 200_000, ("is not JSON", "mend the file")),
        ([1], ("is not a JSON object",)),
        ({"text": "a", "id": 1}, ("holds no conversation but id, text", "'messages' (role")),
        ({}, ("holds no conversation but nothing",)),
        ({"prompt": "a"}, ("holds no conversation but prompt", "'completion'")),
        ({"prompt": [], "completion": "b"}, ("message 1 holds [], which is no text",)),
        ({"messages": "hi"}, ("'messages' holds 'hi', which is no list of objects",)),
        ({"messages": [{"role": ["user"], "content": "a"}]}, ("of role ['user']",)),
        ({"messages": [{"role": "bot", "content": "a"}]}, ("of role 'bot'", "assistant or tool")),
        (say("a", " \n"), ("message 2 is an empty answer", "remove the line")),
        (say("a"), ("without an answer", "remove the line")),
        ({"messages": say("a", "b")["messages"][1:]}, ("begins with one", "add what the user")),
        ({"messages": say("a", "b")["messages"][:1] * 2 + say("a", "b")["messages"]}, ("rejects",)),
    ],
)
def test_errors_of_a_line(record: Any, words: tuple[str, ...], tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tok", TEMPLATES["brackets"])
    path = write_lines(tmp_path / "a.jsonl", [say("Hi", "Hello")])
    with path.open("a") as file:
        file.write(record if isinstance(record, str) else json.dumps(record))
    with pytest.raises(DataError) as caught:
        TextData.open(configure(path), 0, World.solo())
    for word in (f"data.path = '{path}': line 2 of '{path}'", *words):
        assert word in str(caught.value)


REWRITES = """{%- for m in messages %}
{%- set thoughts = '(thinks)' if m.role == 'assistant' and loop.last else '' %}
{{- m.role + ':' + thoughts + m.content + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"""


def test_a_template_that_rewrites_messages(tmp_path: Path) -> None:
    talk = say("a", "b", "c", "d")
    assert sum(encode(tmp_path, REWRITES, [say("a", "b")])[0][1]) == len("(thinks)b\n")
    with pytest.raises(DataError, match=r"line 1 of .* writes message 2, .*put {% generation %}"):
        encode(tmp_path, REWRITES, [talk])
    opening = CHATML[: -len("{% endif %}")] + "{{ '<think>' }}{% endif %}"
    with pytest.raises(DataError, match=r"writes message 2, an answer, in other words"):
        encode(tmp_path, without_generation_marks(opening), [talk])
    assert encode(tmp_path, opening, [talk]) == encode(tmp_path, CHATML, [talk])


def test_requirements_of_conversations(tmp_path: Path) -> None:
    config = configure(write_lines(tmp_path / "a.jsonl", [say("Hi", "Hello")]))
    write_tokenizer(tmp_path / "tok")
    with pytest.raises(DataError, match=r"has no chat template: choose another one"):
        TextData.open(config, 0, World.solo())
    write_tokenizer(tmp_path / "tok", "{% if 0 %}{% generation %}{% endgeneration %}{% endif %}hi")
    with pytest.raises(DataError, match=r"line 1 of .*marks nothing of this conversation"):
        TextData.open(config, 0, World.solo())
    for changes, words in (
        ({"tokenizer": "bytes"}, 'data.tokenizer = "bytes" has none: set data.tokenizer'),
        ({"packing": "stream"}, "remove data.packing"),
        ({"format": "jsonl", "system": "x"}, 'data.system = "x" is for conversations'),
    ):
        with pytest.raises(ConfigError) as caught:
            configure(tmp_path / "a.jsonl", **changes)
        assert words in str(caught.value)
    with pytest.raises(DataError, match=r"holds no file named \*\.jsonl, \*\.ndjson, \*\.parquet"):
        find_sources(configure(tmp_path / "tok"))


def test_the_cache_depends_on_the_template(tmp_path: Path) -> None:
    config = configure(write_lines(tmp_path / "a.jsonl", TALKS), sequence=200)
    digests = set()
    for template in (CHATML, without_generation_marks(CHATML), TEMPLATES["headers"]):
        write_tokenizer(tmp_path / "tok", template)
        digests.add(TextData.open(config, 0, World.solo()).digest)
    assert len(digests) == 2  # Loss masks with and without marks are the same.
    places = [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    assert len(places) == 3
    for place in places:
        (place / "loss_mask.bin").write_bytes(b"\1")
    with pytest.raises(StoreError, match="is damaged"):
        TextData.open(config, 0, World.solo())
