"""The wire format with OpenAI's own client, over an engine that follows a script."""

from __future__ import annotations

import asyncio
import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from scripted_server import CONTEXT, DAMAGE, ScriptedEngine, script, scripted_server

from moesaic.serve.http.app import MAX_BODY_BYTES
from moesaic.testing.chat_templates import CHATML, write_tokenizer


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture(scope="module")
def url(engine: ScriptedEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    from moesaic.models.chat import ChatTemplate

    template = ChatTemplate(write_tokenizer(tmp_path_factory.mktemp("chat"), CHATML))
    with scripted_server(engine, template=template) as found:
        yield found


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with connect(url) as found:
        yield found


def connect(url: str, api_key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=api_key, max_retries=0)


def text_of(prompt: str, choice: int = 0) -> str:
    return script(prompt, choice).decode()


def metric(url: str, name: str) -> float:
    text = urllib.request.urlopen(f"{url}/metrics").read().decode()
    (line,) = [line for line in text.splitlines() if line.startswith((f"{name}{{", f"{name}}}"))]
    return float(line.rpartition(" ")[2])


def wait_for(url: str, name: str, value: float) -> None:
    until = time.monotonic() + 20
    while metric(url, name) != value:
        assert time.monotonic() < until, (name, metric(url, name), value)
        time.sleep(0.02)


def post(url: str, path: str, body: object, **headers: str) -> tuple[int, dict[str, Any]]:
    """Send a body as it is, or as JSON; return the status and the answer."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = {"content-type": "application/json", **headers}
    request = urllib.request.Request(f"{url}{path}", data, sent)
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_a_completion_with_usage(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="scripted", prompt="abc", max_tokens=99)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == (text_of("abc"), "stop")
    assert answer.usage is not None
    num_tokens = len(script("abc", 0)) + 1
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, num_tokens)
    assert answer.usage.total_tokens == 3 + num_tokens
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    assert (answer.object, answer.model) == ("text_completion", "scripted")


def test_the_default_length_is_that_of_openai(client: openai.OpenAI) -> None:
    (choice,) = client.completions.create(model="scripted", prompt="abc").choices
    assert choice.finish_reason == "length"
    assert choice.text == script("abc", 0)[:16].decode()


def test_prompts_and_choices_are_answered_in_order(client: openai.OpenAI) -> None:
    prompts = ["one", "two"]
    answer = client.completions.create(model="scripted", prompt=prompts, n=2, max_tokens=99)
    expected = [text_of(prompt, choice) for prompt in prompts for choice in range(2)]
    assert [choice.text for choice in answer.choices] == expected
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 6
    ids = [list(prompt.encode()) for prompt in prompts]
    by_ids = client.completions.create(model="scripted", prompt=ids, n=2, max_tokens=99)
    assert [choice.text for choice in by_ids.choices] == expected


@pytest.mark.parametrize("stop", [None, " af", ["nothing", "ter"]])
def test_a_stream_gives_the_same_text(client: openai.OpenAI, stop: Any) -> None:
    settings: Any = {"model": "scripted", "prompt": "abc", "n": 3, "max_tokens": 99, "stop": stop}
    whole = client.completions.create(**settings)
    texts, reasons, usages = ["", "", ""], ["", "", ""], []
    stream = client.completions.create(
        **settings, stream=True, stream_options={"include_usage": True}
    )
    for chunk in stream:
        usages.append(chunk.usage)
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices] == ["stop"] * 3
    assert usages[:-1] == [None] * (len(usages) - 1)
    assert usages[-1] == whole.usage
    assert whole.usage is not None
    assert whole.usage.prompt_tokens_details is not None
    assert whole.usage.prompt_tokens_details.cached_tokens == 3
    if stop is not None:
        assert texts[0] == text_of("abc").partition(" af" if stop == " af" else "ter")[0]


def test_a_chat_and_its_stream(client: openai.OpenAI) -> None:
    settings: Any = {
        "model": "scripted", "n": 2, "messages": [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        ],
    }  # fmt: skip
    prompt = "<|start|>system\nBe brief.<|end|>\n<|start|>user\nHi<|end|>\n<|start|>assistant\n"
    answer = client.chat.completions.create(**settings)
    texts = [choice.message.content for choice in answer.choices]
    assert texts == [text_of(prompt, choice) for choice in range(2)]
    assert {choice.message.role for choice in answer.choices} == {"assistant"}
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}
    parts, roles, reasons = ["", ""], set(), []
    for chunk in client.chat.completions.create(**settings, stream=True):
        assert chunk.usage is None
        for one in chunk.choices:
            parts[one.index] += one.delta.content or ""
            roles.add((one.index, one.delta.role))
            reasons.append(one.finish_reason)
    assert parts == texts
    assert {(0, "assistant"), (1, "assistant")} <= roles
    assert [reason for reason in reasons if reason] == ["stop", "stop"]


def test_log_probabilities(client: openai.OpenAI) -> None:
    settings: Any = {"model": "scripted", "prompt": "abc", "logprobs": 2, "max_tokens": 4}
    (choice,) = client.completions.create(**settings).choices
    found = choice.logprobs
    assert found is not None
    assert found.tokens == ["[", "0", "]", " "]
    assert found.token_logprobs == [-1.0] * 4
    assert found.top_logprobs is not None
    assert found.top_logprobs[1] == {"0": -1.0, "1": -2.0}
    assert found.text_offset == [0, 1, 2, 3]
    offsets = []
    for chunk in client.completions.create(**settings, stream=True):
        streamed = chunk.choices[0].logprobs
        assert streamed is not None
        offsets += streamed.text_offset or []
    assert offsets == [0, 1, 2, 3]

    messages: Any = [{"role": "user", "content": "abc"}]
    chat = client.chat.completions.create(
        model="scripted", messages=messages, max_tokens=5, logprobs=True, top_logprobs=1
    )
    content = chat.choices[0].logprobs and chat.choices[0].logprobs.content
    assert content
    assert [one.token for one in content[:4]] == ["[", "0", "]", " "]
    assert [one.bytes for one in content] == [[91], [48], [93], [32], None]
    assert [(top.token, top.logprob) for top in content[0].top_logprobs] == [("[", -1.0)]
    none = client.chat.completions.create(model="scripted", messages=messages, max_tokens=1)
    assert none.choices[0].logprobs is None


def test_models(client: openai.OpenAI) -> None:
    (found,) = client.models.list().data
    assert (found.id, found.owned_by) == ("scripted", "moesaic")
    assert client.models.retrieve("scripted").to_dict()["max_model_len"] == CONTEXT
    with pytest.raises(openai.NotFoundError, match="use 'scripted'"):
        client.models.retrieve("gpt")


def test_many_streams_at_a_time(url: str) -> None:
    async def ask(number: int) -> str:
        prompt = f"stream {number}"
        stream = await shared.completions.create(
            model="scripted", prompt=prompt, max_tokens=99, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def ask_all() -> list[str]:
        return await asyncio.gather(*map(ask, range(40)))

    shared = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    assert asyncio.run(ask_all()) == [text_of(f"stream {number}") for number in range(40)]


USER = [{"role": "user", "content": "a"}]
WRONG: list[tuple[str, Any, int, str | None, str]] = [
    ("completions", b'{"prompt": ', 400, None, "the body is not JSON"),
    ("completions", b"\xff\xfe", 400, None, "the body is not JSON"),
    ("completions", [], 400, None, "the body is no JSON object"),
    ("completions", {}, 400, "prompt", "prompt is missing: add it"),
    ("completions", {"messages": []}, 400, "prompt", "or send messages to /v1/chat/completions"),
    ("chat/completions", {"prompt": "a"}, 400, "messages", "or send prompt to /v1/completions"),
    ("chat/completions", {"messages": []}, 400, "messages", "messages = []: it must have at least"),
    ("completions", {"prompt": ""}, 400, "prompt", "give some text"),
    ("completions", {"prompt": 5.5}, 400, "prompt", "it must be a text"),
    ("completions", {"prompt": [5, 300]}, 400, "prompt", "the model's ids are 0 to 259"),
    ("completions", {"prompt": [-1]}, 400, "prompt", "the model's ids are 0 to 259"),
    ("completions", {"prompt": "a" * 1_000_000}, 400, "prompt", "shorten it"),
    ("completions", {"prompt": "a" * CONTEXT}, 400, "prompt", "4096 tokens of prompt and answer"),
    ("completions", {"prompt": "abcdef", "max_tokens": 4095}, 400, "max_tokens", "up to 4090"),
    ("completions", {"prompt": "impossible"}, 400, "max_tokens", "raise cache_tokens"),
    ("completions", {"prompt": "a", "model": "gpt-5"}, 404, "model", "use 'scripted'"),
    ("completions", {"prompt": "a", "model": 5}, 400, "model", "valid string"),
    ("completions", {"prompt": "a", "temperature": "hot"}, 400, "temperature", "valid number"),
    ("completions", {"prompt": "a", "temperature": 3}, 400, "temperature", "less than or equal"),
    ("completions", {"prompt": "a", "top_p": 0}, 400, "top_p", "greater than 0"),
    ("completions", {"prompt": "a", "n": 0}, 400, "n", "greater than or equal to 1"),
    ("completions", {"prompt": "a", "n": 9}, 400, "n", "8 choices that may wait"),
    ("completions", {"prompt": "a", "max_tokens": 0}, 400, "max_tokens", "greater than"),
    ("completions", {"prompt": "a", "stop": [""]}, 400, "stop", "non-empty string"),
    ("completions", {"prompt": "a", "logprobs": 99}, 400, "logprobs", "less than or equal to 20"),
    ("completions", {"prompt": "a", "logit_bias": {"x": 1}}, 400, "logit_bias", "token ids"),
    ("completions", {"prompt": "a", "logit_bias": {"260": 1}}, 400, "logit_bias", "0 to 259"),
    ("completions", {"prompt": "a", "logit_bias": {"9" * 5000: 1}}, 400, "logit_bias", "token ids"),
    ("completions", {"prompt": "a", "max_tokens": 10**25}, 400, "max_tokens", "up to 4095"),
    ("completions", {"prompt": [10**25]}, 400, "prompt", "the model's ids are 0 to 259"),
    ("completions", {"prompt": "a", "echo": True}, 400, "echo", "is not supported"),
    ("completions", {"prompt": "a", "best_of": 3}, 400, "best_of", "give the value of n"),
    ("completions", {"prompt": "a", "suffix": "b"}, 400, "suffix", "is not supported"),
    ("completions", {"prompt": "a", "temprature": 1}, 400, "temprature", "mean 'temperature'"),
    ("chat/completions", {"messages": []}, 400, "messages", "at least 1 item"),
    ("chat/completions", {"messages": [{"role": "user"}]}, 400, "messages[0].content", "missing"),
    ("chat/completions", {"messages": [{"role": "x", "content": "a"}]}, 400, "messages[0].role",
     "'assistant'"),
    ("chat/completions", {"messages": USER, "top_logprobs": 2}, 400, "top_logprobs", "logprobs ="),
    ("chat/completions", {"messages": USER, "tools": [{"type": "function"}]}, 400, "tools",
     "is not supported"),
    ("chat/completions", {"messages": USER, "response_format": {"type": "json_schema"}}, 400,
     "response_format", 'give {"type": "text"}'),
    ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400,
     "messages[0].content", "it must be a text"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "words"), WRONG, ids=[str(case)[:70] for case in WRONG]
)
def test_bad_input(
    path: str, body: Any, status: int, param: str | None, words: str, url: str
) -> None:
    found, answer = post(url, f"/v1/{path}", body)
    error = answer["error"]
    assert (found, error["param"], error["type"]) == (status, param, "invalid_request_error")
    assert words in error["message"]
    assert len(error["message"]) < 300
    assert set(error) == {"message", "type", "param", "code"}


def test_fields_without_an_effect_are_taken(url: str) -> None:
    neutral = {
        "user": "me", "metadata": {"a": "b"}, "store": False, "echo": False, "suffix": None,
        "best_of": 1, "tools": [], "tool_choice": "none", "response_format": {"type": "text"},
        "stop": None, "seed": -5, "logit_bias": None, "stream": None, "service_tier": "auto",
    }  # fmt: skip
    status, answer = post(url, "/v1/completions", {"prompt": "abc", "max_tokens": 2, **neutral})
    assert (status, answer["choices"][0]["text"]) == (200, "[0")


def test_other_requests_are_refused_in_the_same_form(url: str) -> None:
    status, answer = post(url, "/v1/completions", b"prompt=a", **{"content-type": "text/plain"})
    assert (status, answer["error"]["code"]) == (415, "unsupported_media_type")
    status, answer = post(url, "/v1/embeddings", {})
    assert status == 404
    assert "the routes are /v1/completions" in answer["error"]["message"]
    status, answer = post(url, "/v1/models", {})
    assert (status, answer["error"]["code"]) == (405, "method_not_allowed")
    assert answer["error"]["message"].endswith("Method Not Allowed; use GET")
    status, answer = post(url, "/v1/completions", b" " * (MAX_BODY_BYTES + 1))
    assert (status, answer["error"]["code"]) == (413, "request_too_large")
    for path in ("/../../etc/passwd", "/docs", "/openapi.json", "/page.html", "/v1/../../x"):
        status, _ = post(url, path, {})
        assert status == 404


def test_a_body_that_does_not_arrive_is_given_up(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moesaic.serve.http.app.BODY_TIMEOUT_S", 0.1)
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as slow:
        head = "POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
        slow.sendall(f"{head}content-length: 9\r\n\r\n{{".encode())
        assert slow.recv(4096).startswith(b"HTTP/1.1 408 ")


def test_an_engine_error_ends_its_request(client: openai.OpenAI, url: str) -> None:
    before = metric(url, 'vllm:request_success_total{finished_reason="error",model_name="scripted"')
    with pytest.raises(openai.InternalServerError, match="is cut off: restore it"):
        client.completions.create(model="scripted", prompt=DAMAGE)
    stream = client.completions.create(model="scripted", prompt=DAMAGE, stream=True)
    texts: list[str] = []
    with pytest.raises(openai.APIError, match="is cut off: restore it") as caught:
        texts.extend(chunk.choices[0].text for chunk in stream)
    assert "".join(texts) == "[0"
    body = caught.value.body
    assert isinstance(body, dict)
    assert body["code"] == "internal_error"
    name = 'vllm:request_success_total{finished_reason="error",model_name="scripted"'
    assert metric(url, name) == before + 2
    assert client.completions.create(model="scripted", prompt="abc").choices[0].text


def test_a_key() -> None:
    with scripted_server(ScriptedEngine(), api_key="s\u00e9same") as url:
        for key in ("none", "s\u00e9sam", ""):
            status, answer = post(
                url, "/v1/completions", {"prompt": "a"},
                authorization=f"Bearer {key}".encode().decode("latin-1"),
            )  # fmt: skip
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        status, _ = post(url, "/v1/completions", {"prompt": "a"})
        assert status == 401
        status, _ = post(
            url, "/v1/completions", {"prompt": "a"},
            authorization="Bearer s\u00e9same".encode().decode("latin-1"),
        )  # fmt: skip
        assert status == 200
        for path, status in (("/experts", 401), ("/v1/models", 401), ("/health", 200), ("/", 200)):
            try:
                found = urllib.request.urlopen(f"{url}{path}").status
            except urllib.error.HTTPError as error:
                found = error.code
            assert found == status


def test_a_full_engine_and_clients_that_go() -> None:
    engine = ScriptedEngine(pass_s=0.01, max_waiting=2)
    endless: Any = {"model": "scripted", "prompt": "a", "max_tokens": 4000, "stream": True}
    extra = {"ignore_eos": True}
    with scripted_server(engine) as url, connect(url) as client:
        streams = [client.completions.create(**endless, extra_body=extra) for _ in range(2)]
        for stream in streams:
            next(iter(stream))
        with pytest.raises(openai.RateLimitError, match="try again in 2 s") as caught:
            client.completions.create(model="scripted", prompt="b")
        assert caught.value.response.headers["retry-after"] == "3"
        assert metric(url, "vllm:num_requests_running") == 2
        for stream in streams:
            stream.response.close()
        wait_for(url, "vllm:num_requests_running", 0)
        with pytest.raises(openai.APITimeoutError):  # Not a stream: the engine stops too.
            client.completions.create(
                model="scripted", prompt="a", max_tokens=4000, extra_body=extra, timeout=0.5
            )
        wait_for(url, "vllm:num_requests_running", 0)
        name = 'vllm:request_success_total{finished_reason="abort",model_name="scripted"'
        assert metric(url, name) == 3
        # Of several choices all are taken or none.
        with pytest.raises(openai.RateLimitError):
            client.completions.create(model="scripted", prompt="c", n=3)
        wait_for(url, "vllm:num_requests_running", 0)
