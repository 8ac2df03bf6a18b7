"""Prompts of attributes in requests over HTTP."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from scripted_server import MODEL

from moesaic.facts.job import ControlConfig, ControlValues
from moesaic.models.control import ControlPrompts, ControlTokenizer, prompt_text
from moesaic.models.tokenizer import open_tokenizer
from moesaic.serve.http.errors import ApiError
from moesaic.serve.http.schemas import CompletionRequest, parse_request

TOKENIZER = ControlTokenizer(
    open_tokenizer("bytes"), ControlConfig(genres=["a"], genre="g", length="tokens")
)
CONTROLLED = replace(
    MODEL, tokenizer=TOKENIZER, control=ControlPrompts(TOKENIZER), vocab=400, context=200
)


def parse(**body: Any) -> CompletionRequest:
    return parse_request(CompletionRequest, json.dumps(body).encode())


def test_the_field_is_a_prompt_before_the_text() -> None:
    body = parse(prompt=["", "b [w] c"], control={"genre": "a", "length": 9})
    empty, text = CONTROLLED.requests(body)
    string = prompt_text(ControlValues(genre="a", length=9))
    assert list(empty.prompt) == TOKENIZER.encode(string)
    assert text.prompt == (*empty.prompt, *b"b [w] c")
    (same,) = CONTROLLED.requests(parse(prompt=f"{string} b"))
    assert same.prompt == (*empty.prompt, *b"b")


@pytest.mark.parametrize(
    ("model", "body", "words"),
    [
        (CONTROLLED, {"prompt": "x", "control": {"genre": "b"}}, 'control.genre = "b" is not'),
        (CONTROLLED, {"prompt": "x", "control": {"topic": "b"}}, "was trained on genre and length"),
        (CONTROLLED, {"prompt": "x", "control": {"mood": "b"}}, "control.mood"),
        (CONTROLLED, {"prompt": [1, 2], "control": {"length": 3}}, "prompts that are texts"),
        (CONTROLLED, {"prompt": ""}, "prompt is empty"),
        (MODEL, {"prompt": "x", "control": {"length": 3}}, "not known to the model 'scripted'"),
    ],
)
def test_what_the_model_cannot_follow_is_refused(
    model: Any, body: dict[str, Any], words: str
) -> None:
    with pytest.raises(ApiError) as caught:
        model.requests(parse(**body))
    assert words in str(caught.value)
    assert caught.value.status == 400
