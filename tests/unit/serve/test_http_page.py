"""The chat page in headless Chromium: it streams answers and shows where the experts are."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from scripted_server import ScriptedEngine, script, scripted_server

from browser import needs_browser, open_browser
from moesaic.models.chat import ChatTemplate
from moesaic.serve.http.experts import ExpertFacts
from moesaic.testing.chat_templates import CHATML, write_tokenizer

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
ui = pytest.importorskip("selenium.webdriver.support.ui")
pytestmark = needs_browser
HOSTILE = '<b>"me"</b>'


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with open_browser(tmp_path_factory.mktemp("chromium"), "1200,900") as driver:
        yield driver


def say(browser: Any, text: str) -> None:
    browser.find_element("id", "text").send_keys(text)
    browser.find_element("id", "send").click()


def shown(browser: Any, kind: str) -> list[str]:
    return [one.text for one in browser.find_elements("css selector", f".message.{kind}")]


def wait(browser: Any, condition: Any) -> None:
    ui.WebDriverWait(browser, 30, poll_frequency=0.05).until(lambda _: condition())


def is_ready(browser: Any) -> bool:
    return bool(browser.find_element("id", "send").is_enabled())


def experts_state(browser: Any) -> str:
    return str(browser.find_element("id", "experts-state").text)


def test_a_chat_continues_and_all_experts_are_in_memory(
    browser: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    template = ChatTemplate(write_tokenizer(tmp_path_factory.mktemp("chat"), CHATML))
    engine = ScriptedEngine()
    with scripted_server(engine, template=template, name=HOSTILE) as url:
        browser.get(url)
        assert browser.find_element("id", "model").text == HOSTILE
        assert not browser.find_element("id", "key-row").is_displayed()
        messages: list[dict[str, str]] = []
        for text in ("Hello <i>", "Again"):
            say(browser, text)
            wait(browser, lambda: is_ready(browser))
            messages.append({"role": "user", "content": text})
            answer = script(template.render(messages), 0).decode()
            messages.append({"role": "assistant", "content": answer})
        assert shown(browser, "user") == ["Hello <i>", "Again"]
        answers = browser.find_elements("css selector", ".message.assistant")
        texts = [one.get_property("textContent") for one in answers]
        assert texts == [one["content"] for one in messages if one["role"] == "assistant"]
        assert "tokens/s" in browser.find_element("id", "speed").text
        wait(browser, lambda: experts_state(browser) == "All 8 experts are in memory.")
        cells = browser.find_elements("css selector", ".layer:first-child i.in")
        assert len(cells) == 4
        assert cells[3].get_attribute("title") == "layer 1, expert 3: in memory"
        browser.find_element("id", "clear").click()
        assert shown(browser, "user") == []
        assert browser.get_log("browser") == []
        asked = browser.execute_script(
            "return performance.getEntriesByType('resource').map((entry) => entry.name)"
        )
        assert set(asked) == {f"{url}/v1/chat/completions", f"{url}/experts"}


def test_a_key_errors_experts_on_the_drive_and_stop(browser: Any) -> None:
    facts = ExpertFacts({1: [0, 2], 2: [3]}, hits=6, misses=2)
    engine = ScriptedEngine(pass_s=0.05)
    with scripted_server(engine, api_key="sesame", experts=lambda: facts) as url:
        browser.get(url)
        wait(browser, lambda: "API key is missing" in experts_state(browser))
        say(browser, "a")
        wait(browser, lambda: is_ready(browser))
        (error,) = shown(browser, "error")
        assert "the API key is missing or wrong" in error
        browser.find_element("id", "key").send_keys("sesame")
        wait(browser, lambda: "3 of 8 experts are in memory." in experts_state(browser))
        assert "75.0% of accesses were hits." in experts_state(browser)
        marked = browser.find_elements("css selector", ".layer i.in")
        assert len(marked) == 3
        prompt = "a long prompt that is continued for many passes of the engine"
        say(browser, prompt)
        wait(browser, lambda: "[0]" in shown(browser, "assistant")[-1])
        browser.find_element("id", "stop").click()
        wait(browser, lambda: is_ready(browser))
        wait(browser, lambda: engine.stats().num_running == 0)
        assert len(shown(browser, "assistant")[-1]) < len(prompt) + len(script(prompt, 0).decode())
        assert len(shown(browser, "error")) == 1


def test_the_page_runs_nothing_foreign() -> None:
    engine = ScriptedEngine()
    facts = ExpertFacts({1: range(4)}, hits=0, misses=0)
    with scripted_server(engine, name=HOSTILE, experts=lambda: facts) as url:
        with urllib.request.urlopen(url) as answer:
            text, policy = answer.read().decode(), answer.headers["content-security-policy"]
        assert HOSTILE not in text
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        with urllib.request.urlopen(f"{url}/experts") as answer:
            content = json.loads(answer.read())
        assert content["layers"] == [
            {"layer": 1, "in_memory": [0, 1, 2, 3]}, {"layer": 2, "in_memory": []},
        ]  # fmt: skip
        assert content["all_in_memory"] is False
