"""Chat templates match transformers, and cannot do more than produce text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from moesaic.base.errors import DataError
from moesaic.cli.main import main
from moesaic.models.chat import ChatTemplate, Messages
from moesaic.models.tokenizer import open_tokenizer
from moesaic.testing.chat_templates import CHATML
from moesaic.testing.chat_templates import write_tokenizer as put
from moesaic.testing.jobs import RUN_JOB

TRICKS = """{%- set ns = namespace(system='', turns=0) %}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}
    {% set ns.system = message['content'] %}{% continue %}
    {% endif %}
    {%- set ns.turns = ns.turns + 1 %}
    {%- if ns.turns > 3 %}{% break %}{% endif %}
    {% generation %}{% set ns = 3 %}
    {{ bos_token }}[{{ loop.index0 }}]{{ message['content'] | trim | tojson }}{% endgeneration %}
{%- endfor %}
  {% if tools %}never{% endif %}
{{ dict(a=1, b=[eos_token, '<é>']) | tojson(indent=2) }}
{{- ns.system }} {{ unk_token }} {{ strftime_now('%%') }}
{%- for key, value in {'x': 1}.items() %}{{ key ~ value }}{% endfor %}
"""

TALKS: list[Messages] = [
    [{"role": "user", "content": ' Why is <|end|> é "so"?\n'}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi & bye"}],
    [{"role": role, "content": f"{role}?"} for role in ("user", "assistant") * 3],
]


@pytest.mark.parametrize("messages", TALKS)
@pytest.mark.parametrize("template", [CHATML, TRICKS], ids=["chatml", "tricks"])
def test_text_and_ids_match_transformers(template: str, messages: Messages, tmp_path: Path) -> None:
    put(tmp_path, template)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = ChatTemplate(tmp_path).render(messages)
    assert text == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert open_tokenizer(str(tmp_path)).encode(text, has_special_tokens=True) == expected


@pytest.mark.parametrize("form", ["list", "file", "both", "older tokens", "newer tokens"])
def test_template_precedence_matches_transformers(form: str, tmp_path: Path) -> None:
    template: object = "{{ bos_token }}from settings"
    settings: dict[str, Any] = {}
    if form == "list":
        other = {"name": "tool_use", "template": "other"}
        template = [other, {"name": "default", "template": template}]
    if form == "newer tokens":
        settings["added_tokens_decoder"] = {"256": {"content": "<s>", "special": True}}
    put(tmp_path, None if form == "file" else template, **settings)
    if form in ("file", "both"):
        (tmp_path / "chat_template.jinja").write_text("{{ eos_token }}from the file\n")
    if "tokens" in form:
        (tmp_path / "special_tokens_map.json").write_text('{"bos_token": "<|start|>"}')
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    expected = theirs.apply_chat_template(TALKS[0], tokenize=False, add_generation_prompt=True)
    assert ChatTemplate(tmp_path).render(TALKS[0]) == expected


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, ("has no chat template", "chat_template.jinja")),
        (7, ("has no chat template",)),
        ([{"name": "tool_use", "template": "x"}], ("has no chat template",)),
        ("{% if %}", ("no Jinja template", "fix it")),
        (
            "{{ raise_exception('Only two messages') }}",
            ("rejects these messages", "Only two messages"),
        ),
        ("{{ messages.content.text }}", ("fails (UndefinedError",)),
        ("{{ messages[0] + 1 }}", ("fails (TypeError",)),
        ("{{ ''.__class__.__mro__ }}", ("is unsafe",)),
        ("{{ messages.append(1) }}", ("is unsafe",)),
        ("{{ dict.__subclasses__() }}", ("is unsafe",)),
    ],
)
def test_unusable_templates_are_rejected(
    template: object, words: tuple[str, ...], tmp_path: Path
) -> None:
    put(tmp_path, template)
    with pytest.raises(DataError) as caught:
        ChatTemplate(tmp_path).render(TALKS[0])
    for word in (str(tmp_path), *words):
        assert word in str(caught.value)


def ask(line: str, capfd: pytest.CaptureFixture[str]) -> list[int]:
    capfd.readouterr()
    sets = ["--set", "temperature=0", "--set", "max_tokens=2", "--json", "--prompt", "Why?"]
    assert main([*line.split(), *sets]) == 0, capfd.readouterr().err
    (row,) = json.loads(capfd.readouterr().out)
    assert row["prompt"] == "Why?"
    tokens: list[int] = row["prompt_tokens"]
    return tokens


def test_chat_with_the_template_of_an_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    put(tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text(CHATML)
    Path("text.txt").write_text("Because it is so. " * 40)
    Path("job.toml").write_text(RUN_JOB)
    for line in (
        "train job.toml --out run --set model.vocab=260 --set data.tokenizer=tokenizer",
        "convert run --out hf",
        "convert hf --out again",
        "convert hf --out bare --set to=checkpoint",
    ):
        assert main(line.split()) == 0, capfd.readouterr().err
    theirs = transformers.AutoTokenizer.from_pretrained("tokenizer")
    user = {"role": "user", "content": "Why?"}
    with_system = [{"role": "system", "content": "Briefly."}, user]
    for model in ("run", "hf", "again", "bare"):
        for messages, more in (([user], ""), (with_system, " --set system=Briefly.")):
            expected = theirs.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=False
            )
            assert ask(f"generate {model} --chat{more}", capfd) == expected, model

    for line, words in (
        ("generate run --prompt x --set system=y", "ask for a chat"),
        ("generate run --prompt x --chat --set tokenizer=bytes", "the bytes tokenizer has none"),
    ):
        assert main(line.split()) == 2
        assert words in capfd.readouterr().err
