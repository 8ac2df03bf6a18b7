"""Conversations with tools, and conversations in Parquet, compared with transformers.

A table gives all its rows the same fields. Results are therefore compared with the conversations
that were written, not with those read back.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import transformers
from talks import Record, configure, ours, theirs, write_lines

from moesaic.base.errors import DataError
from moesaic.dist.world import World
from moesaic.models.hf.writer import copy_companions, find_companions
from moesaic.models.tokenizer import open_tokenizer
from moesaic.testing.chat_templates import CHATML, TEMPLATES, write_tokenizer
from moesaic.train.data.chat import ChatEncoder
from moesaic.train.data.text_data import TextData

TOOLS = """{%- set first = messages[0].content + '\\n' if messages[0].role == 'system' else '' %}
{%- if tools %}
{{- '<|start|>system\\n' + first + 'Functions:\\n<tools>' }}
{%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}
{{- '\\n</tools><|end|>\\n' }}
{%- elif first %}
{{- '<|start|>system\\n' + first + '<|end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}
{{- '<|start|>user\\n' + message.content + '<|end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|start|>assistant\\n' }}
{%- generation %}
{%- if message.content is defined %}{{ message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}
{%- set called = call.function or call %}
{%- set given = called.arguments %}
{{- '\\n<tool_call>\\n{"name": "' + called.name + '", "arguments": ' }}
{{- (given if given is string else given | tojson) + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|end|>' }}
{%- endgeneration %}
{{- '\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.previtem.role != 'tool' %}{{ '<|start|>user' }}{% endif %}
{{- '\\n<tool_response of="' ~ (message.name or message.tool_call_id) ~ '">\\n' }}
{{- message.content + '\\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|end|>\\n' }}{% endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}"""
"""Template in the style of Hermes and Qwen, with generation marks."""
PLAIN = TOOLS.replace("{%- generation %}", "").replace("{%- endgeneration %}", "")


def function(name: str, **parameters: Any) -> Record:
    schema = {"type": "object", "properties": parameters}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def call(name: str, arguments: Any, **more: Any) -> Record:
    return {"type": "function", "function": {"name": name, "arguments": arguments}, **more}


def user(content: str) -> Record:
    return {"role": "user", "content": content}


def answered(**answer: Any) -> list[Record]:
    return [user("Hi"), {"role": "assistant", **answer}]


def calling(*calls: Record) -> Record:
    return {"messages": answered(tool_calls=[*calls])}


RECORDS: list[Record] = [
    {
        "messages": [
            {"role": "system", "content": "Be brief."},
            user("Weather in Köln and Rome?"),
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    call("weather", {"city": "Köln"}, id="c1"),
                    call("weather", {"city": "Rome"}, id="c2"),
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "12 degrees"},
            {"role": "tool", "tool_call_id": "c2", "content": '{"t": 25, "sun": true}'},
            {"role": "assistant", "content": "12 and 25."},
            user("And what is 2 + 3?"),
            {
                "role": "assistant",
                "content": "Let me add.",
                "tool_calls": [call("add", {"b": 3, "a": [2.5, None]}, id="c3")],
            },
            {"role": "tool", "name": "add", "content": "5.5"},
            {"role": "assistant", "content": "5.5"},
        ],
        "tools": [
            function("weather", city={"type": "string", "description": "Where?"}),
            function("add", a={"type": "array"}, b={"type": "integer", "enum": [2, 3]}),
        ],
    },
    {
        "messages": [
            user("Now?"),
            {"role": "assistant", "tool_calls": [{"name": "now", "arguments": '{"utc":1}'}]},
        ],
        "tools": [],
    },
    {"messages": [user("Hi"), {"role": "assistant", "content": "Hello!"}], "tools": None},
    {"messages": [user("1"), {"role": "assistant", "content": "2", "tool_calls": []}]},
]
LEARNT = [
    '\n<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
    '\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call><|end|>'
    "12 and 25.<|end|>"
    'Let me add.\n<tool_call>\n{"name": "add", "arguments": {"b": 3, "a": [2.5, null]}}'
    "\n</tool_call><|end|>5.5<|end|>",
    '\n<tool_call>\n{"name": "now", "arguments": {"utc":1}}\n</tool_call><|end|>',
    "Hello!<|end|>",
    "2<|end|>",
]
"""Text of the assistant in each of `RECORDS`, by `TOOLS`."""


def write_table(path: Path, records: list[Record], **more: Any) -> Path:
    """Write Parquet as `datasets` publishes it."""
    keys = {key: None for record in records for key in record}
    rows = datasets.Dataset.from_list([{**keys, **record} for record in records], **more)
    rows.to_parquet(str(path))
    return path


@pytest.mark.parametrize("template", [TOOLS, PLAIN], ids=["marks", "beginnings"])
def test_calls_are_trained_but_not_tools_or_results(template: str, tmp_path: Path) -> None:
    expected = theirs(write_tokenizer(tmp_path / "tok", TOOLS), RECORDS)
    write_tokenizer(tmp_path / "tok", template)
    packed = [{**RECORDS[0], "tools": json.dumps(RECORDS[0]["tools"])}, *RECORDS[1:]]
    rows = ours(write_lines(tmp_path / "a.jsonl", RECORDS))
    assert rows == ours(write_lines(tmp_path / "b.jsonl", packed)) == expected
    tokenizer = open_tokenizer(str(tmp_path / "tok"))
    trained = [[i for i, c in zip(*row, strict=True) if c] for row in rows]
    assert [tokenizer.decode(ids, with_special_tokens=True) for ids in trained] == LEARNT
    whole = tokenizer.decode(rows[0][0], with_special_tokens=True)
    for text in ('"description": "Where?"', '<tool_response of="c2">\n{"t": 25, "sun"', 'of="add"'):
        assert text in whole


def test_tools_have_a_template_of_their_own(tmp_path: Path) -> None:
    named = {"other": "x", "tool_use": TOOLS, "default": CHATML}
    stated = [{"name": name, "template": text} for name, text in named.items()]
    write_tokenizer(tmp_path / "tok", stated)
    path = write_lines(tmp_path / "a.jsonl", RECORDS)
    assert ours(path) == theirs(tmp_path / "tok", RECORDS)
    # The default template would lose its calls.
    write_lines(path, [{"messages": answered(content="", tool_calls=[call("f", {})])}])
    with pytest.raises(DataError, match=r"chat_template of .* leaves out of message 2, an answer"):
        ours(path)


def test_a_template_for_tools_in_a_file_of_its_own(tmp_path: Path) -> None:
    """Read it as transformers saves it, and as it is copied with a run and a model."""
    default = TOOLS.replace("Functions", "Default")
    named = {"default": default, "tool_use": TOOLS}
    stated = [{"name": name, "template": text} for name, text in named.items()]
    saved = write_tokenizer(tmp_path / "tok", stated)
    transformers.AutoTokenizer.from_pretrained(saved).save_pretrained(saved)
    assert "chat_template" not in json.loads((saved / "tokenizer_config.json").read_text())
    path = write_lines(tmp_path / "a.jsonl", RECORDS)
    expected = theirs(saved, RECORDS)
    assert ours(path) == expected
    tokenizer = open_tokenizer(str(saved))
    own = saved / "additional_chat_templates" / "tool_use.jinja"
    assert tokenizer.files()["additional_chat_templates/tool_use.jinja"] == own.read_bytes()
    copy_companions(find_companions(saved), tmp_path / "copy", {})
    assert theirs(tmp_path / "copy", RECORDS) == expected
    digest = ChatEncoder(configure(path), tokenizer).digest
    own.write_text(TOOLS + "{#- #}")
    assert ChatEncoder(configure(path), tokenizer).digest != digest
    own.write_text("{% if %}")
    with pytest.raises(DataError, match=r"tool_use\.jinja' is no Jinja template"):
        ours(path)


def test_blank_text_is_no_tools(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tok", TOOLS)
    rows = [{"messages": answered(content="a"), "tools": tools} for tools in ("", " \n", "null")]
    expected = theirs(tmp_path / "tok", [{"messages": answered(content="a")}]) * 3
    assert ours(write_lines(tmp_path / "a.jsonl", rows)) == expected
    assert ours(write_table(tmp_path / "a.parquet", rows)) == expected


CALLS_ALONE = PLAIN.replace(
    "{%- if message.content is defined %}{{ message.content }}{% endif %}",
    "{{- message.content }}{%- set message = {} if message.content else message %}",
)
"""Template that writes either content or calls."""
FIRST_CALL = TOOLS.replace("in message.tool_calls or []", "in (message.tool_calls or [])[:1]")
UNSAID = TOOLS.replace("{%- endgeneration %}", "").replace(
    "{%- for call in", "{%- endgeneration %}{%- for call in"
)
DEEPSEEK = """{%- for message in messages %}
{%- if message['role'] == 'user' %}{{ '<|start|>' + message['content'] }}{% endif %}
{%- if message['role'] == 'assistant' and message['content'] is none %}
{%- for tool in message['tool_calls'] %}
{{- '<s>' + tool['function']['name'] + tool['function']['arguments'] + '<|end|>' }}
{%- endfor %}
{%- elif message['role'] == 'assistant' %}{{ '<s>' + message['content'] + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<s>' }}{% endif %}"""
BARE = TOOLS.replace("(given if given is string else given | tojson)", "given")
BY_ID = TOOLS.replace('"name": "\' + called.name', '"name": "\' + call.id')


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}, {"content": "f?"}])
def test_a_call_is_trained_or_refused(content: Record, tmp_path: Path) -> None:
    answer = {"role": "assistant", **content, "tool_calls": [call("f", {}, id="1")]}
    answer["tool_calls"].append(call("f", {"x": 1}, id="2"))
    path = write_lines(tmp_path / "a.jsonl", [{"messages": [user("f"), answer]}])
    lost = r"line 1 of .* leaves out of message 2, an answer, the call of 'f': use a model"
    cases: dict[str, str | None] = dict.fromkeys((BY_ID, TOOLS, PLAIN))
    cases |= {FIRST_CALL: lost, UNSAID: lost, BARE: r"line 1 of .* fails \(TypeError"}
    cases[CALLS_ALONE] = lost if content.get("content") else None
    fails = r"line 1 of .* fails .* or give 'content' beside 'tool_calls'"
    cases[DEEPSEEK] = fails if content.get("content") is None else lost
    for template, words in cases.items():
        write_tokenizer(tmp_path / "tok", template)
        if words is None:
            ours(path)
            continue
        with pytest.raises(DataError, match=words):
            ours(path)


NO_SYSTEM = CHATML.replace(
    "for message in messages", "for message in messages if message.role != 'system'"
)
RESULT = [
    *answered(content="add(2, 3)"),
    {"role": "tool", "content": "5"},
    {"role": "assistant", "content": "5"},
]
SYSTEM = [{"role": "system", "content": "Speak French."}, *answered(content="yes")]


@pytest.mark.parametrize(
    ("template", "record", "words"),
    [
        (
            CHATML, {"messages": answered(content="weather"), "tools": RECORDS[0]["tools"]},
            "the tool 'weather'",
        ),
        (
            TOOLS.replace("in tools", "in tools[:1]"),
            {**RECORDS[3], "tools": RECORDS[0]["tools"]}, "the tool 'add'",
        ),
        (TEMPLATES["system first"], {"messages": RESULT}, "message 3, which is of the role tool"),
        (NO_SYSTEM, {"messages": SYSTEM}, "message 1, which is of the role system"),
    ],
)  # fmt: skip
def test_what_a_template_leaves_out_is_refused(
    template: str, record: Record, words: str, tmp_path: Path
) -> None:
    write_tokenizer(tmp_path / "tok", template)
    path = write_lines(tmp_path / "a.jsonl", [{"messages": answered(content="a")}, record])
    with pytest.raises(DataError, match=rf"line 2 of .*: chat_template of .*leaves out {words}"):
        ours(path)


def test_results_and_system_messages_are_read(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tok", CHATML)
    records = [{"messages": RESULT, "tools": []}, {"messages": SYSTEM}]
    path = write_lines(tmp_path / "a.jsonl", records)
    assert ours(path) == theirs(tmp_path / "tok", records)
    write_tokenizer(tmp_path / "tok", NO_SYSTEM)
    write_lines(path, [{"messages": answered(content="yes")}])
    with pytest.raises(DataError, match=r"leaves out message 1, .* role system: use a model"):
        ours(path, system="Speak French.")


JSON, TEXT = datasets.Json(), datasets.Value("string")
JSON_CALL = {
    "type": TEXT, "id": TEXT, "function": {"name": TEXT, "arguments": JSON},
    "name": TEXT, "arguments": TEXT,
}  # fmt: skip
JSON_MESSAGE = {
    "role": TEXT, "content": TEXT, "tool_call_id": TEXT, "name": TEXT,
    "tool_calls": datasets.List(JSON_CALL),
}  # fmt: skip


@pytest.mark.parametrize(
    "columns",
    [
        None,
        {"messages": datasets.List(JSON), "tools": datasets.List(JSON)},
        {"messages": datasets.List(JSON_MESSAGE), "tools": JSON},
    ],
    ids=["structs", "messages as JSON", "arguments as JSON"],
)
def test_rows_equal_lines_without_null_fields(columns: Any, tmp_path: Path) -> None:
    expected = theirs(write_tokenizer(tmp_path / "tok", TOOLS), RECORDS)
    features = columns and datasets.Features(columns)
    path = write_table(tmp_path / "a.parquet", RECORDS, features=features)
    assert ours(path) == expected


def test_null_fields_of_structs_are_missing_in_rows(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tok", TOOLS)

    def record(**null: Any) -> Record:
        tools = [function("f", a={"type": "integer", "enum": [1, None], **null})]
        return {**calling(call("f", {"a": 1, **null})), "tools": tools}

    line = ours(write_lines(tmp_path / "a.jsonl", [record(b=None)]))
    assert line == theirs(tmp_path / "tok", [record(b=None)])
    row = ours(write_table(tmp_path / "a.parquet", [record(b=None)]))
    assert row == theirs(tmp_path / "tok", [record()]) != line


def test_tables_of_other_writers(tmp_path: Path) -> None:
    """Read tools as text, arguments as a map, large lists, and an unused column."""
    write_tokenizer(tmp_path / "tok", TOOLS)
    arguments = pa.map_(pa.string(), pa.string())
    calls = pa.large_list(pa.struct([("name", pa.string()), ("arguments", arguments)]))
    message = pa.struct([("role", pa.string()), ("content", pa.string()), ("tool_calls", calls)])
    answer = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"x": "1"}}]}
    record = {"messages": [user("Hi"), answer], "tools": [function("f", x={"type": "string"})]}
    schema = pa.schema(
        [("tools", pa.string()), ("id", pa.date32()), ("messages", pa.list_(message))]
    )
    row = {"tools": json.dumps(record["tools"]), "messages": record["messages"]}
    pq.write_table(pa.Table.from_pylist([row], schema), tmp_path / "a.parquet")
    assert ours(tmp_path / "a.parquet") == theirs(tmp_path / "tok", [record])


def test_a_directory_of_tables(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tok", TOOLS)
    place = tmp_path / "talks"
    place.mkdir()
    messages = [{"from": "human", "value": "1"}, {"from": "gpt", "value": "2"}]
    (place / "a.txt").write_text("no conversation")
    write_table(place / "b.parquet", RECORDS[2:3])
    write_table(place / "c.parquet", [{"conversations": messages}])
    write_table(place / "d.PARQUET", [{"prompt": "1", "completion": "2", "id": 3}])
    log: list[str] = []
    config = configure(tmp_path / "talks")
    data = TextData.open(config, 0, World.solo(), log.append)
    assert "3 conversations in" in log[0]
    again = write_lines(
        tmp_path / "a.jsonl", [RECORDS[2], *[{"messages": RECORDS[3]["messages"]}] * 2]
    )
    assert TextData.open(configure(again), 0, World.solo()).digest == data.digest
    # These may be the same conversations in another format.
    write_lines(place / "d.jsonl", RECORDS[2:3])
    for path in (place, place / "[b-d].*"):
        words = (
            r"mixes parquet \('b\.parquet'\) and jsonl \('d\.jsonl'\): give a glob of one of them$"
        )
        with pytest.raises(DataError, match=words):
            TextData.open(configure(path, tokenizer=str(tmp_path / "tok")), 0, World.solo())


def test_rows_are_counted_over_batches(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tok", TOOLS)
    rows = [{"prompt": "1", "completion": "2"}] * 1500
    path = write_table(tmp_path / "a.parquet", rows)
    first = ours(path)
    assert first == first[:1] * 1500
    rows[1400] = {"prompt": "1", "completion": " "}
    with pytest.raises(
        DataError, match=r"row 1401 of '.*a\.parquet', message 2 is an empty answer"
    ):
        ours(write_table(path, rows))


UNTOLD = ("which names no function: give its 'name'",)
UNFIT = ("which is neither an object nor its JSON: give {} if there are none",)


@pytest.mark.parametrize("write", [write_lines, write_table], ids=["lines", "rows"])
@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"tools": "f(x)"}, ("'tools' holds 'f(x)', which is no list of objects",)),
        ({"tools": '{"name": "f"}'}, ("'tools' holds {'name': 'f'}, which is no list",)),
        ({"tools": ["f"]}, ("'tools' holds ['f'], which is no list of objects",)),
        ({"tools": "[" * 200_000}, ("'tools' holds '[[", "which is no list of objects")),
        ({"tools": [{"type": "function"}]}, ("tool 1 holds {'type': 'function'}", *UNTOLD)),
        (
            {"messages": answered(content="", tool_calls="[]")},
            ("message 2: 'tool_calls' holds '[]', which is no list of objects",),
        ),
        ({"messages": answered(tool_calls=[])}, ("message 2 holds None, which is no text",)),
        ({"messages": answered(content=" ", tool_calls=[])}, ("message 2 is an empty answer",)),
        (calling(call("f", "{}"), {"id": "c1"}), ("message 2, call 2 holds {'id': 'c1'", *UNTOLD)),
        (calling(call(" ", "{}")), ("message 2, call 1 holds", *UNTOLD)),
        (calling({"function": "f"}), ("message 2, call 1 holds 'f'", *UNTOLD)),
        (calling({"name": "f"}), ("message 2, call 1: 'arguments' holds None", *UNFIT)),
        (calling(call("f", [1])), ("call 1: 'arguments' holds [1]", *UNFIT)),
        (calling(call("f", "{'a': ")), ("call 1: 'arguments' holds \"{'a': \"", *UNFIT)),
        (calling(call("f", "[1]")), ("call 1: 'arguments' holds '[1]'", *UNFIT)),
        (
            {"messages": [{"role": "user", "tool_calls": [{"name": "f"}]}, *answered(content="a")]},
            ("message 1 is of role 'user' and holds 'tool_calls': remove them",),
        ),
        (
            {"messages": answered(content="b", weight=0)},
            ("is an answer with 'weight' = 0, and all answers are learnt here",),
        ),
        (
            {"messages": answered(content="b", train="false")},
            ("is an answer with 'train' = 'false', and all answers are learnt here",),
        ),
        ({"messages": None, "id": 1}, ("'messages'",)),
    ],
)
def test_errors_of_a_line_or_row(
    write: Callable[..., Path], record: Record, words: tuple[str, ...], tmp_path: Path
) -> None:
    write_tokenizer(tmp_path / "tok", TOOLS)
    path = tmp_path / ("a.jsonl" if write is write_lines else "a.parquet")
    write(path, [{"messages": answered(content="a"), **record}])
    place = "line 1 of" if write is write_lines else "row 1 of"
    with pytest.raises(DataError) as caught:
        ours(path)
    for word in (f"{place} '{path}'", *words):
        assert word in str(caught.value)


def test_errors_of_a_table(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tok", TOOLS)
    path = write_table(tmp_path / "a.parquet", [{"text": "a", "id": 1}])
    with pytest.raises(DataError, match=r"row 1 of .* holds no conversation but id, text: give"):
        ours(path)
    json_text = pa.ExtensionArray.from_storage(pa.json_(), pa.array(["[]", "[{"]))
    whole = pa.table({"prompt": ["a", "b"], "completion": ["c", "d"], "tools": json_text})
    pq.write_table(whole, path)
    words = r"row 2 of .* has a column that is not JSON \(.*: mend the file"
    with pytest.raises(DataError, match=words):
        ours(path)
    dated = [{"name": "f", "since": date(2026, 1, 2)}]
    pq.write_table(pa.table({"prompt": ["a"], "completion": ["c"], "tools": [dated]}), path)
    with pytest.raises(DataError, match=r"row 1 of .* fails \(TypeError: .*date is not JSON"):
        ours(path)
    pq.write_table(whole, path)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match=r"a\.parquet' cannot be read as Parquet: "):
        ours(path)
