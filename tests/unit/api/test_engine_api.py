"""`moesaic.Engine` against full forward passes without a cache, one token at a time."""

from __future__ import annotations

import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

import moesaic
from moesaic import ConfigError, Engine
from moesaic.api import engine as engine_module
from moesaic.api.generation import Generation
from moesaic.base.errors import MoesaicError
from moesaic.facts.job.train import MatmulBackend
from moesaic.models.chat import ChatTemplate
from moesaic.models.lm import LanguageModel
from moesaic.nn.inputs import Inputs
from moesaic.testing.served import END_ID, write_chat_model

CPU: dict[str, Any] = {"device": "cpu", "precision": "fp64"}
"""Settings of loading; in fp64 rounding never changes a token, whatever the batch."""
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}
PROMPTS = ["A first prompt", "b", "Prüfung: 1, 2, 3, ..."]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("engine") / "model")


@pytest.fixture(scope="module")
def model(directory: Path) -> moesaic.Model:
    return moesaic.load(directory, **CPU)


@pytest.fixture(scope="module")
def engine(directory: Path) -> Iterator[Engine]:
    with Engine(directory, **CPU, max_running=3) as engine:
        yield engine


@torch.no_grad()
def logits_of(module: LanguageModel, tokens: list[int]) -> torch.Tensor:
    logits, _ = module(
        torch.tensor([tokens]), Inputs(module.rotary(torch.arange(len(tokens))[None]))
    )
    return logits[0]


def slow_greedy(module: LanguageModel, prompt: list[int], max_tokens: int = 12) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens and tokens[-1] != END_ID:
        tokens.append(int(logits_of(module, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def test_greedy_text_equals_full_recomputation(
    engine: Engine, model: moesaic.Model, directory: Path
) -> None:
    chat = [{"role": "system", "content": "Briefly."}, {"role": "user", "content": "Why?"}]
    rendered = ChatTemplate(directory).render(chat)
    encode = model.tokenizer.encode
    prompts: dict[str, list[int]] = {text: encode(text) for text in PROMPTS}
    given = [*PROMPTS, [65, 66, 67], chat]
    ids = [*prompts.values(), [65, 66, 67], encode(rendered, has_special_tokens=True)]
    answers = engine.generate(given, **GREEDY)
    for prompt, row, answer in zip(given, ids, answers, strict=True):
        new = slow_greedy(model.module, row)
        assert answer.prompt == prompt
        assert answer.prompt_tokens == row
        assert answer.tokens == new
        assert answer.text == model.tokenizer.decode(new)
        assert answer.finish_reason == ("stop" if new[-1] == END_ID else "length")
        assert answer.logprobs is answer.top_logprobs is None
    assert model.generate(*given, **GREEDY) == answers
    (asked,) = engine.generate(["Why?"], chat=True, system="Briefly.", **GREEDY)
    assert asked.tokens == answers[-1].tokens


def test_company_and_order_do_not_change_a_text(engine: Engine, model: moesaic.Model) -> None:
    settings: dict[str, Any] = {"max_tokens": 20, "temperature": 1.1, "top_p": 0.9, "seed": 5}
    together = engine.generate(PROMPTS * 3, **settings)
    alone = [engine.generate([prompt], **settings)[0] for prompt in PROMPTS]
    assert together == alone * 3
    assert model.generate(PROMPTS[1], **settings) == alone[1:2]
    assert engine.generate(PROMPTS, **{**settings, "seed": 6}) != alone
    several = engine.generate(PROMPTS[:2], n=3, **settings)
    assert several[0] == alone[0]
    assert several[3] == alone[1]
    assert len({one.text for one in several}) == 6


def test_a_stream_has_the_text_in_pieces(engine: Engine) -> None:
    (whole,) = engine.generate(PROMPTS[:1], max_tokens=40, seed=2)
    pieces = list(engine.stream(PROMPTS[0], max_tokens=40, seed=2))
    assert "".join(pieces) == whole.text
    assert len(pieces) > 5
    begun = engine.stream(PROMPTS[0], max_tokens=200, seed=2)
    assert next(begun) == pieces[0]
    begun.close()  # type: ignore[attr-defined]
    assert engine.generate(PROMPTS[:1], max_tokens=40, seed=2) == [whole]


def test_stop_strings_end_a_text(engine: Engine) -> None:
    (whole,) = engine.generate(["a"], max_tokens=60, seed=4)
    stop = whole.text[10:13]
    at = whole.text.index(stop)
    for kind in (stop, ["never there", stop]):
        (answer,) = engine.generate(["a"], max_tokens=60, seed=4, stop=kind)
        assert (answer.text, answer.finish_reason) == (whole.text[:at], "stop")
        assert answer.tokens == whole.tokens[: len(answer.tokens)]
        assert len(answer.tokens) < len(whole.tokens)
    (answer,) = engine.generate(["a"], max_tokens=60, seed=4, stop=stop, include_stop=True)
    assert answer.text == whole.text[: at + 3]
    assert "".join(engine.stream("a", max_tokens=60, seed=4, stop=stop)) == whole.text[:at]


def test_settings_reach_the_sampling(engine: Engine, model: moesaic.Model) -> None:
    greedy = engine.generate(["a"], **GREEDY)[0].tokens
    assert engine.generate(["a"], max_tokens=12, top_k=1, seed=9)[0].tokens == greedy
    biased = engine.generate(["a"], logit_bias={70: 100}, **GREEDY)[0]
    assert set(biased.tokens) == {70}
    others = engine.generate(
        ["a"], logit_bias={70: 100}, frequency_penalty=2, presence_penalty=2,
        **{**GREEDY, "max_tokens": 60},
    )[0]  # fmt: skip
    assert set(others.tokens) != {70}
    (scored,) = engine.generate(["a"], logprobs=3, **GREEDY)
    assert scored.logprobs is not None
    assert scored.top_logprobs is not None
    logits = logits_of(model.module, [*scored.prompt_tokens, *scored.tokens])[:-1]
    for row, token, own, top in zip(
        logits.log_softmax(-1), scored.tokens, scored.logprobs, scored.top_logprobs, strict=True
    ):
        assert own == pytest.approx(float(row[token]), abs=1e-9)
        assert list(top) == row.topk(3).indices.tolist()
    (bare,) = engine.generate(["a"], logprobs=0, **GREEDY)
    assert bare.logprobs == pytest.approx(scored.logprobs)
    assert bare.top_logprobs == [{}] * len(bare.tokens)


def test_threads_share_an_engine(engine: Engine) -> None:
    expected = engine.generate(PROMPTS, max_tokens=15, seed=1)
    found: dict[int, list[Generation]] = {}

    def ask(index: int) -> None:
        found[index] = engine.generate(PROMPTS, max_tokens=15, seed=1)

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(range(4), expected)


def test_a_model_generates_with_its_present_weights(directory: Path) -> None:
    model = moesaic.load(directory, **CPU)
    (before,) = model.generate("words", **GREEDY)
    with torch.no_grad():
        model.module.embed.weight[100:].mul_(-2.0)
    (after,) = model.generate("words", **GREEDY)
    assert before.tokens != after.tokens == slow_greedy(model.module, before.prompt_tokens)


def test_triton_kernels_give_the_same_tokens(directory: Path) -> None:
    """Prefill and decoding in fp32 give the same tokens as torch."""
    pytest.importorskip("triton")
    model, texts = moesaic.load(directory), []
    for backend in get_args(MatmulBackend)[:2]:
        for _, moe in model.module.expert_layers():
            moe.bank.backend = backend
        texts.append(model.generate("b", "two", temperature=0, max_tokens=4))
    assert texts[0] == texts[1]


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"prompts": "text"}, "prompts is a text: give a list"),
    ({"prompts": [""]}, 'prompt "" has no tokens'),
    ({"prompts": [3]}, "prompt 3 is not known: give a text, token ids, or messages"),
    ({"prompts": [["a", 1]]}, "is not known"),
    ({"prompts": [[260]]}, "prompt has the token 260, and the model's ids are 0 to 259"),
    ({"prompts": ["a" * 200], "max_tokens": 60}, "exceed the model's 256 positions"),
    ({"prompts": ["a"], "max_token": 3}, "did you mean 'max_tokens'?"),
    ({"prompts": ["a"], "temperature": -1}, "temperature = -1"),
    ({"prompts": ["a"], "stop": ["x", ""]}, "stop"),
    ({"prompts": ["a"], "logit_bias": {300: 1.0}}, "logit_bias has the token 300"),
    ({"prompts": ["a"], "logit_bias": {"x": 1.0}}, "logit_bias"),
    ({"prompts": ["a"], "system": "Hi"}, 'system = "Hi" needs a chat'),
]


@pytest.mark.parametrize(("call", "words"), MISTAKES, ids=[words for _, words in MISTAKES])
def test_mistakes_are_config_errors(engine: Engine, call: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        engine.generate(**call)
    assert words in str(caught.value)


def test_settings_of_the_engine_are_checked(directory: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_runing.*did you mean 'max_running'"):
        Engine(directory, max_runing=3)
    with pytest.raises(ConfigError, match='Engine: memory = "lots" is not a size'):
        Engine(directory, memory="lots")
    with pytest.raises(ConfigError, match="max_running = 0"):
        Engine(directory, max_running=0)
    with pytest.raises(ConfigError, match="tokens_per_pass = 8 is less than max_running = 32"):
        Engine(directory, tokens_per_pass=8)
    with pytest.raises(ConfigError, match="cache_tokens = 15"):
        Engine(directory, cache_tokens=15)
    with pytest.raises(ConfigError, match="'nowhere' is not there"):
        Engine("nowhere")
    with (
        Engine(directory, **CPU, tokenizer="bytes") as engine,
        pytest.raises(ConfigError, match="the bytes tokenizer has none"),
    ):
        engine.generate(["a"], chat=True)
    with Engine(directory, **CPU, cache_tokens=32) as engine:
        with pytest.raises(ConfigError, match="cache's 32 positions"):
            engine.generate(["a" * 30], max_tokens=30)
        with pytest.raises(ConfigError, match="n = 2: a stream has one text"):
            engine.stream("a", n=2)
        assert len(engine.generate(["a"] * 5, max_tokens=30)) == 5


def test_weights_are_read_once(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if there is no memory for the cache at first."""
    make, failures = engine_module.make_engine, [MoesaicError("no memory")]

    def fail_once(*args: Any, **options: Any) -> Any:
        if failures:
            raise failures.pop()
        return make(*args, **options)

    monkeypatch.setattr(engine_module, "make_engine", fail_once)
    with Engine(directory, **CPU) as engine:
        with pytest.raises(MoesaicError, match="no memory"):
            engine.generate(["a"], **GREEDY)
        first = engine._served
        engine.generate(["a"], **GREEDY)
        assert engine._served is first is not None


def test_closing_ends_all_requests(directory: Path) -> None:
    engine = Engine(directory, **CPU)
    pieces = engine.stream("a", max_tokens=250)
    next(pieces)
    engine.close()
    with pytest.raises(MoesaicError, match="closed"):
        list(pieces)
    with pytest.raises(ConfigError, match="the engine is closed: create another one"):
        engine.generate(["a"])
    engine.close()


def test_an_engine_that_is_never_closed_ends_with_its_last_reference_or_the_program(
    directory: Path,
) -> None:
    before = set(threading.enumerate())
    engine = Engine(directory, **CPU)
    engine.generate(["a"], max_tokens=2)
    gone = weakref.ref(engine)
    del engine
    assert gone() is None
    assert set(threading.enumerate()) <= before
    program = (
        "import sys, moesaic\n"
        "engine = moesaic.Engine(sys.argv[1], device='cpu')\n"
        "print(len(engine.generate(['a'], max_tokens=2)))\n"
    )
    command = [sys.executable, "-c", program, str(directory)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "1\n"), ended.stderr
