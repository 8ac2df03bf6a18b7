"""The page in headless Chromium: it draws, makes no requests, and its controls work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fabricated import PREDICTED, TIMELINE, fabricate, predict

from browser import needs_browser, open_browser
from moesaic.report import RunStats, page, summary

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
ui = pytest.importorskip("selenium.webdriver.support.ui")
pytestmark = needs_browser
HOSTILE = "</script><b>bold</b>"
Open = Callable[[str], Any]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with open_browser(tmp_path_factory.mktemp("chromium"), "1200,1600") as driver:
        yield driver


@pytest.fixture
def show(browser: Any, tmp_path: Path) -> Open:
    """Return a function that opens a page and fails on errors and requests."""

    def open_page(text: str) -> Any:
        path = tmp_path / "page.html"
        path.write_text(text, encoding="utf-8")
        browser.get(path.as_uri())
        assert browser.execute_script("return document.body.dataset.drawn") == "yes"
        assert_silent(browser)
        return browser

    return open_page


def assert_silent(browser: Any) -> None:
    """Check that the console has no errors and nothing was fetched."""
    complaints = [entry for entry in browser.get_log("browser") if entry["level"] != "INFO"]
    assert complaints == []
    asked = browser.execute_script(
        "return performance.getEntriesByType('resource').map((entry) => entry.name)"
    )
    assert [name for name in asked if not name.startswith("data:")] == []


def traces(browser: Any, chart: str) -> list[dict[str, Any]]:
    """Return type, name and number of points of the traces that Plotly drew."""
    script = """
        return document.getElementById(arguments[0])._fullData.map((trace) => ({
            type: trace.type, name: trace.name, points: (trace.x || []).length,
            rows: trace.type === "heatmap" ? trace.z.length : 0,
            cells: trace.type === "heatmap" ? trace.z.flat().filter(Number.isFinite).length : 0,
        }))"""
    found: list[dict[str, Any]] = browser.execute_script(script, chart)
    return found


def points(browser: Any, chart: str) -> list[int]:
    return [trace["points"] for trace in traces(browser, chart)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunStats:
    return RunStats.read(
        fabricate(
            tmp_path_factory.mktemp("browser") / "run", steps=80, killed_at=57, resumed_at=40,
            dead={1: 3}, hot={2: 6},
        )
    )  # fmt: skip


def test_every_chart_has_all_its_points_and_experts_are_named(show: Open, run: RunStats) -> None:
    browser = show(page.render(run))
    assert points(browser, "loss") == [80, 80, 4]
    assert points(browser, "learning-rate") == [80]
    for chart in ("gradient-norm", "units-per-second", "imbalance"):
        assert points(browser, chart) == [80, 80]
    assert points(browser, "phases") == [80] * 7
    assert points(browser, "phases-by-rank") == [2] * 7
    heat, *_ = traces(browser, "expert-load")
    assert (heat["type"], heat["rows"], heat["cells"]) == ("heatmap", 8, 8 * 80)
    overview, dead, hot = traces(browser, "expert-overview")
    assert (overview["rows"], overview["cells"]) == (3, 3 * 8)
    assert (dead["name"], dead["points"], hot["name"], hot["points"]) == ("dead", 1, "hot", 1)
    drawn = browser.execute_script(
        "return [...document.querySelectorAll('.chart')].filter((chart) => "
        "chart.querySelector('svg.main-svg') && chart.clientHeight > 100).length"
    )
    assert drawn == 9
    findings = browser.find_element("css selector", ".findings").text
    assert "Expert 3 of layer 1 is dead" in findings
    assert "Expert 6 of layer 2 is hot" in findings


def test_controls_choose_the_layer(show: Open, run: RunStats) -> None:
    browser = show(page.render(run))
    assert run.loads is not None
    utilisation = run.loads.utilisation()
    for layer, kind in ((1, "dead"), (2, "hot")):
        browser.execute_script(
            "const select = document.getElementById('layer'); select.value = arguments[0];"
            "select.dispatchEvent(new Event('change'))",
            str(layer),
        )
        shown = browser.execute_script(
            "const chart = document.getElementById('expert-load');"
            "return [chart._fullData[0].z[5][60], "
            "chart.layout.annotations.map((note) => note.text).join(), "
            "document.querySelector('#card-expert-load h3').textContent]"
        )
        assert shown[0] == pytest.approx(utilisation[60, layer, 5], abs=0.0051)
        assert shown[1] == f"<b>{kind}</b>"
        assert shown[2] == f"Load by step, layer {layer}"
    browser.execute_script(
        "document.getElementById('expert-overview').emit('plotly_click', {points: [{y: 0}]})"
    )
    assert browser.execute_script("return document.getElementById('layer').value") == "0"
    assert_silent(browser)


def test_markup_is_text_and_a_script_that_slipped_in_does_not_run(
    show: Open, run: RunStats, tmp_path: Path
) -> None:
    text = page.render(replace(run, name=HOSTILE))
    browser = show(text)
    assert browser.find_element("css selector", "h1").text == HOSTILE
    assert browser.title.startswith(HOSTILE)
    text = text.replace("<main>", "<script>window.slipped = 1</script><main>", 1)
    (tmp_path / "page.html").write_text(text)
    browser.get((tmp_path / "page.html").as_uri())
    assert browser.execute_script("return window.slipped") is None
    assert "Content Security Policy" in browser.get_log("browser")[0]["message"]


def test_dark_screens_get_a_dark_page(show: Open, run: RunStats) -> None:
    browser = show(page.render(run))
    script = (
        "return [getComputedStyle(document.body).backgroundColor, "
        "document.getElementById('loss')._fullData[1].line.color]"
    )
    light = browser.execute_script(script)
    scheme = {"name": "prefers-color-scheme", "value": "dark"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    dark = ["rgb(20, 23, 28)", "#6ea8f0"]
    try:
        # The browser notifies the charts later.
        ui.WebDriverWait(browser, 30).until(lambda _: browser.execute_script(script) == dark)
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    assert light == ["rgb(247, 245, 241)", "#2a6fbb"]


@pytest.mark.parametrize("width", [390, 1000])
def test_nothing_is_wider_than_a_narrow_screen(show: Open, run: RunStats, width: int) -> None:
    text = page.render(replace(run, name="unbroken" * 20))
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser = show(text)
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        browser.get(browser.current_url)
        wide = browser.execute_script("return document.documentElement.scrollWidth")
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert wide <= width


def test_the_predicted_step_is_drawn(show: Open, tmp_path: Path) -> None:
    predicted = {**PREDICTED, "timeline": TIMELINE}
    browser = show(page.render(predict(fabricate(tmp_path / "run", steps=20), predicted)))
    bars = browser.execute_script(
        "return [...document.querySelectorAll('#step-timeline .bars .point path')]"
        ".map((bar) => {const box = bar.getBBox(); return [box.x, box.y, box.width, box.height];})"
    )
    assert len(bars) == sum(points(browser, "step-timeline"))
    assert all(width > 0 and height > 0 for _, _, width, height in bars)
    lanes = browser.execute_script(
        "return [...document.querySelectorAll('#step-timeline .ytick text')]"
        ".map((one) => one.textContent)"
    )
    assert [name.partition("rank")[0] for name in lanes] == ["predicted, "] * 2 + ["measured, "]
    browser.execute_script(
        "Plotly.Fx.hover('step-timeline', [{curveNumber: arguments[0], pointNumber: 0}])",
        [trace["name"] for trace in traces(browser, "step-timeline")].index("reduce"),
    )
    hover = browser.find_element("css selector", "#step-timeline .hoverlayer").text
    assert "reduce: waiting" in hover
    assert "6.00 ms from 74.00 ms" in hover
    assert_silent(browser)


def test_balance_is_drawn(show: Open, tmp_path: Path) -> None:
    run = RunStats.read(fabricate(tmp_path / "run", steps=30, layers=5, balanced=True))
    browser = show(page.render(run))
    for chart in ("busiest-rank", "balance-saved"):
        assert points(browser, chart) == [30, 30], chart
    assert points(browser, "expert-replicas") == [30]
    assert points(browser, "balance-layers") == [5, 5]
    bars = browser.find_elements("css selector", "#balance-layers .bars .point path")
    assert len(bars) == 10
    browser.execute_script("Plotly.Fx.hover('balance-layers', [{curveNumber: 0, pointNumber: 3}])")
    hover = browser.find_element("css selector", "#balance-layers .hoverlayer").text
    assert "layer 3, without replicas: 2.11x" in hover
    assert_silent(browser)


def test_all_students_share_a_plot(show: Open, tmp_path: Path) -> None:
    """The teacher and three students have a curve and their validations each."""
    names = ("small", "tiny-1", "assistant")
    run = RunStats.read(fabricate(tmp_path / "run", steps=60, experts=0, students=names))
    browser = show(page.render(run))
    shown = {trace["name"]: trace["points"] for trace in traces(browser, "student-losses")}
    assert shown == {
        name: points
        for one in ("teacher", *names)
        for name, points in ((one, 60), (f"{one}, validation", 3))
    }
    shown = {trace["name"]: trace["points"] for trace in traces(browser, "student-distances")}
    assert shown == {f"{one}, {term}": 40 for one in names for term in ("logits", "attention")}
    lines = browser.execute_script(
        "return ['student-losses', 'student-distances'].map((chart) => "
        "document.querySelectorAll(`#${chart} .scatterlayer .trace path.js-line`).length)"
    )
    assert lines == [4, 6]
    legend = browser.find_element("css selector", "#student-losses .legend").text
    assert legend.split() == ["teacher", *names]
    facts = summary(run)["students"]["small"]
    assert facts["loss"] == pytest.approx(run.steps.figures["small/loss"][-6:].mean())
    assert facts["validation_loss"] == run.validations[-1].figures["small/loss"]
    assert facts["attention"] == pytest.approx(0.1)
    assert_silent(browser)
