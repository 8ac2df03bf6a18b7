"""`moesaic serve` as a process, with OpenAI's client."""

from __future__ import annotations

import asyncio
import json
import select
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import openai
import pytest

from moesaic.api.engine import Engine
from moesaic.cli.main import main
from moesaic.testing.served import write_chat_model

CONTEXT = 4096
ENDLESS: dict[str, Any] = {"max_tokens": CONTEXT - 100, "extra_body": {"ignore_eos": True}}
PROMPT = "Of mosaics and their stones"
MESSAGES: Any = [{"role": "user", "content": "Of mosaics?"}]


class Server:
    """A server process and its client."""

    def __init__(self, process: subprocess.Popen[str], url: str, api_key: str) -> None:
        self.process, self.url = process, url
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key=api_key, max_retries=0)

    def metric(self, name: str) -> float:
        text = urllib.request.urlopen(f"{self.url}/metrics").read().decode()
        (line,) = [line for line in text.splitlines() if line.startswith(f"vllm:{name}{{")]
        return float(line.rpartition(" ")[2])

    def wait_for(self, name: str, value: float) -> None:
        until = time.monotonic() + 30
        while self.metric(name) != value:
            assert time.monotonic() < until, (name, self.metric(name), value)
            time.sleep(0.02)

    def open_stream(self) -> openai.Stream[Any]:
        """Return an endless stream after its first token."""
        stream = self.client.completions.create(model="tiny", prompt=PROMPT, stream=True, **ENDLESS)
        next(iter(stream))
        return stream

    def connect(self) -> socket.socket:
        host, port = self.url.removeprefix("http://").split(":")
        return socket.create_connection((host, int(port)), timeout=30)

    def wait_until_closed(self) -> None:
        until = time.monotonic() + 30
        with suppress(ConnectionRefusedError):
            while time.monotonic() < until:
                self.connect().close()
                time.sleep(0.02)
        assert time.monotonic() < until

    def signal(self, number: int) -> None:
        self.process.send_signal(number)


@contextmanager
def serving(model: Path, *arguments: str, api_key: str = "none") -> Iterator[Server]:
    """Start a server and wait for its line."""
    command = [sys.executable, "-m", "moesaic", "serve", str(model), "--json"]
    sets = ["--set", "port=0", "--set", "name=tiny", "--set", f"cache_tokens={4 * CONTEXT}"]
    process = subprocess.Popen(
        [*command, *sets, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.stderr and process.stderr.read()
        yield Server(process, json.loads(line)["url"], api_key)
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("served") / "model", max_positions=CONTEXT)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    with serving(model) as found:
        yield found


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    with Engine(model, cache_tokens=CONTEXT) as found:
        yield found


def test_greedy_text_equals_that_of_generate(
    server: Server, model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sets = ["--set", "temperature=0", "--set", "max_tokens=24", "--json", "--prompt", PROMPT]
    for flags in ([], ["--chat"]):
        assert main(["generate", str(model), *sets, *flags]) == 0
        (expected,) = json.loads(capfd.readouterr().out)
        if flags:
            chat = server.client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": PROMPT}], temperature=0,
                max_tokens=24,
            )  # fmt: skip
            text, reason, usage = (
                chat.choices[0].message.content, chat.choices[0].finish_reason, chat.usage,
            )  # fmt: skip
        else:
            plain = server.client.completions.create(
                model="tiny", prompt=PROMPT, temperature=0, max_tokens=24
            )
            text, reason, usage = plain.choices[0].text, plain.choices[0].finish_reason, plain.usage
        assert (text, reason) == (expected["text"], expected["finish_reason"])
        assert usage is not None
        assert usage.prompt_tokens == len(expected["prompt_tokens"])
        assert usage.completion_tokens == len(expected["tokens"])


def test_sampled_texts_equal_those_of_the_engine(server: Server, engine: Engine) -> None:
    settings: Any = {
        "max_tokens": 20, "temperature": 1.3, "top_p": 0.9, "seed": 7, "n": 3,
        "presence_penalty": 0.5, "frequency_penalty": 0.25, "logit_bias": {"65": 2.0},
        "stop": ["e", "zz"],
    }  # fmt: skip
    bias = {65: 2.0}
    expected = engine.generate([PROMPT], top_k=50, logprobs=2, **{**settings, "logit_bias": bias})
    answer = server.client.completions.create(
        model="tiny", prompt=PROMPT, logprobs=2, extra_body={"top_k": 50}, **settings
    )
    assert [choice.text for choice in answer.choices] == [one.text for one in expected]
    assert [one.finish_reason for one in answer.choices] == [one.finish_reason for one in expected]
    assert len({choice.text for choice in answer.choices}) > 1
    for choice, one in zip(answer.choices, expected, strict=True):
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs == pytest.approx(one.logprobs, abs=1e-4)
    texts = ["", "", ""]
    for chunk in server.client.completions.create(
        model="tiny", prompt=PROMPT, stream=True, extra_body={"top_k": 50}, **settings
    ):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [one.text for one in expected]
    other = server.client.completions.create(model="tiny", prompt=PROMPT, **{**settings, "seed": 8})
    assert [choice.text for choice in other.choices] != texts


def test_concurrent_chats_equal_single_ones(server: Server, engine: Engine) -> None:
    async def ask(shared: openai.AsyncOpenAI, number: int) -> str:
        stream = await shared.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": f"Say {number}"}], stream=True,
            temperature=0, max_tokens=12,
        )  # fmt: skip
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0
        ) as shared:
            return await asyncio.gather(*(ask(shared, number) for number in range(24)))

    prompts = [f"Say {number}" for number in range(24)]
    expected = engine.generate(prompts, chat=True, temperature=0, max_tokens=12)
    assert asyncio.run(ask_all()) == [one.text for one in expected]


def test_a_prompt_that_was_seen_is_found_in_the_prefix_cache(server: Server) -> None:
    cached = []
    for _ in range(2):
        answer = server.client.completions.create(
            model="tiny", prompt="A long prompt. " * 20, max_tokens=2
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
    assert cached == [0, 288]
    assert server.metric("prefix_cache_hits_total") >= 288


def test_bad_requests_leave_the_engine_alone(server: Server) -> None:
    before = server.metric("prompt_tokens_total")
    for settings, words in (
        ({"prompt": "a" * 1_000_000}, f"takes {CONTEXT} tokens of prompt and answer"),
        ({"prompt": "a", "max_tokens": CONTEXT}, f"give max_tokens up to {CONTEXT - 1}"),
        ({"prompt": [260]}, "the model's ids are 0 to 259"),
        ({"prompt": ""}, "give some text"),
    ):
        with pytest.raises(openai.BadRequestError, match=words):
            server.client.completions.create(model="tiny", **settings)  # type: ignore[call-overload]
    with pytest.raises(openai.NotFoundError, match="use 'tiny'"):
        server.client.completions.create(model="huge", prompt="a")
    assert server.metric("prompt_tokens_total") == before


def test_the_engine_stops_for_clients_that_go(server: Server) -> None:
    stream = server.open_stream()
    assert server.metric("num_requests_running") == 1
    stream.close()
    server.wait_for("num_requests_running", 0)
    with pytest.raises(openai.APITimeoutError):
        server.client.completions.create(model="tiny", prompt=PROMPT, timeout=0.3, **ENDLESS)
    server.wait_for("num_requests_running", 0)
    assert server.metric("generation_tokens_total") < CONTEXT


def test_a_thousand_idle_connections(server: Server) -> None:
    before = server.metric("generation_tokens_total")
    with ExitStack() as stack:
        idle = []
        for number in range(1000):
            one = stack.enter_context(server.connect())
            if number % 2:
                one.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n")
            idle.append(one)
        answer = server.client.completions.create(
            model="tiny", prompt=PROMPT, temperature=0, max_tokens=8
        )
        assert answer.choices[0].text
        readable, _, _ = select.select(idle[:900], [], [], 0)
        assert readable == []  # Nothing was closed or sent.
    assert server.metric("generation_tokens_total") > before


def test_a_full_server_and_its_end(model: Path, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("sesame\n")
    limits = ["--set", "max_running=1", "--set", "max_waiting=1", "--api-key-file", str(key)]
    with serving(model, *limits, api_key="sesame") as server:
        wrong = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.AuthenticationError, match="API key is missing or wrong"):
            wrong.models.list()
        short: Any = {"model": "tiny", "prompt": PROMPT, "max_tokens": 300, "temperature": 0}
        expected = server.client.completions.create(**short).choices[0].text
        streams = [
            server.client.completions.create(**short, stream=True, timeout=60) for _ in range(2)
        ]
        server.wait_for("num_requests_waiting", 1)
        with pytest.raises(openai.RateLimitError) as caught:
            server.client.completions.create(**short)
        assert int(caught.value.response.headers["retry-after"]) >= 1
        idle = server.connect()
        server.signal(signal.SIGTERM)
        texts = ["".join(chunk.choices[0].text for chunk in stream) for stream in streams]
        assert texts == [expected] * 2
        assert server.process.wait(timeout=30) == 0
        assert idle.recv(1) == b""
        idle.close()


def test_answers_that_take_too_long_end_with_an_error(model: Path) -> None:
    with serving(model, "--set", "drain_s=1") as server, ThreadPoolExecutor(1) as pool:
        stream = server.open_stream()
        whole = pool.submit(
            server.client.completions.create, model="tiny", prompt=PROMPT, **ENDLESS
        )
        server.wait_for("num_requests_running", 2)
        idle, half = server.connect(), server.connect()
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n")
        server.signal(signal.SIGTERM)
        with pytest.raises(openai.APIError, match="the server is shutting down"):
            list(stream)
        with pytest.raises(openai.InternalServerError, match="the server is shutting down"):
            whole.result()
        assert server.process.wait(timeout=30) == 0
        assert server.process.stderr is not None
        assert "ending: 2 open texts may take up to 1 s" in server.process.stderr.read()
        for one in (idle, half):
            assert one.recv(1) == b""
            one.close()


def test_an_interrupt_ends_open_answers(model: Path) -> None:
    """Their time, a minute by default, is for SIGTERM."""
    with serving(model, "--set", "drain_s=3600") as server:
        stream = server.open_stream()
        half = server.connect()
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n")
        server.wait_for("num_requests_running", 1)
        server.signal(signal.SIGINT)
        with pytest.raises(openai.APIError, match="the server is shutting down"):
            list(stream)
        assert server.process.wait(timeout=30) == 130
        assert server.process.stderr is not None
        assert server.process.stderr.read() == "interrupted\n"
        half.close()


def test_mistakes_that_only_a_model_or_a_server_shows(
    server: Server, model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    port = server.url.rpartition(":")[2]
    small = "context=512"
    for sets, words in (
        (f"port={port}", f"port = {port} of 127.0.0.1 is taken: stop the program"),
        ("context=9999", f"context = 9999 is more than the model's {CONTEXT} positions"),
        ("memory=10KB", "memory = "),
        ("tokens_per_pass=4", "tokens_per_pass = 4 is less than max_running = 32"),
        (small, "context = 512 is more than the key-value cache of 256 positions: raise"),
        ("tokenizer=nowhere", 'tokenizer = "nowhere" does not exist'),
    ):
        given = ["port=0", sets, *(["cache_tokens=256"] if sets == small else [])]
        assert main(["serve", str(model), *(f"--set={one}" for one in given)]) == 2
        error = capfd.readouterr().err
        assert words in error
        assert error.startswith("error: ")


def test_a_second_signal_ends_the_process_at_once(server: Server) -> None:
    """The last test of this file, as it ends the server of the others."""
    stream = server.open_stream()
    server.signal(signal.SIGTERM)
    server.wait_until_closed()
    assert next(iter(stream)).choices[0].text is not None
    server.signal(signal.SIGTERM)
    assert server.process.wait(timeout=10) == 128 + signal.SIGTERM
