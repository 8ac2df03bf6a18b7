"""The page as a file: what stands in it, what cannot break out of it, how large it grows."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from fabricated import PREDICTED, TIMELINE, TOKENS, fabricate, predict

from moesaic.base.errors import StoreError
from moesaic.base.events import EventLog
from moesaic.report import RunStats, page, summary, write_report
from moesaic.report.document import plotly_source

HOSTILE = "</script><b>bold</b><img src=x onerror=alert(1)>"


def data_of(text: str) -> dict[str, Any]:
    """Return the data that `page.js` draws."""
    found = re.search(r'<script type="application/json" id="page-data">(.*?)</script>', text, re.S)
    assert found is not None
    data: dict[str, Any] = json.loads(found.group(1))
    return data


def figures_of(text: str) -> dict[str, dict[str, Any]]:
    return {figure["name"]: figure for figure in data_of(text)["figures"]}


def own_part(text: str) -> str:
    """Return the page without Plotly."""
    return text.replace(plotly_source(), "")


def test_page_of_a_run(tmp_path: Path) -> None:
    run = RunStats.read(fabricate(tmp_path / "my-run", steps=60, dead={1: 3}, hot={2: 6}))
    text = page.render(run)
    assert list(figures_of(text)) == [
        "loss", "learning-rate", "gradient-norm", "expert-load", "expert-overview", "imbalance",
        "units-per-second", "phases", "phases-by-rank",
    ]  # fmt: skip
    assert "<title>my-run " in text
    assert "Expert 3 of layer 1 is dead" in text
    assert "Expert 6 of layer 2 is hot" in text
    assert "13.6 M" in text
    assert "finished" in text
    axes = figures_of(text)["expert-overview"]["layout"]
    assert (axes["xaxis"]["range"], axes["yaxis"]["range"]) == ([-0.5, 7.5], [2.5, -0.5])
    for name in figures_of(text):
        assert re.search(rf'id="{name}" role="img"[^>]*aria-label="[^"]+"', text), name


def test_loss_figure_holds_every_mark(tmp_path: Path) -> None:
    directory = fabricate(tmp_path / "run", steps=60, killed_at=50, resumed_at=40)
    figure = figures_of(page.render(RunStats.read(directory)))["loss"]
    raw, smoothed, validation = figure["data"]
    assert raw["x"] == list(range(1, 61))
    assert len(smoothed["y"]) == 60
    assert validation["x"] == [20, 40, 60]
    assert [shape["x0"] for shape in figure["layout"]["shapes"]] == [40]


def test_utilisation_in_hundredths_is_what_was_recorded(tmp_path: Path) -> None:
    directory = fabricate(tmp_path / "run", steps=9, layers=2, experts=4)
    table = pq.read_table(directory / "loads" / "part-000000.parquet")
    row = next(row for row in table.to_pylist() if (row["step"], row["layer"]) == (7, 1))
    loads = data_of(page.render(RunStats.read(directory)))["loads"]
    column = [expert[6] for expert in loads["hundredths"][1]]
    mean = sum(row["counts"]) / 4
    assert column == [round(100 * count / mean) for count in row["counts"]]


BALANCE = {"busiest-rank", "expert-replicas", "balance-saved", "balance-layers"}


def test_balance_charts_need_a_policy_and_records(tmp_path: Path) -> None:
    run = RunStats.read(fabricate(tmp_path / "run", steps=20))
    assert not BALANCE & set(figures_of(page.render(run)))
    assert summary(run)["balance"] is None
    seldom = RunStats.read(fabricate(tmp_path / "seldom", steps=20, balanced=True, loads_every=99))
    figures = figures_of(page.render(seldom))
    assert BALANCE & set(figures) == {"busiest-rank", "expert-replicas"}
    before, after = (trace["y"] for trace in figures["busiest-rank"]["data"])
    assert (set(before), set(after)) == ({1.9}, {1.1})
    assert summary(seldom)["balance"] == pytest.approx({
        "replicas": 6.0, "imbalance_before": 1.9, "imbalance_after": 1.1, "planning_s": 1e-3,
    })  # fmt: skip


def test_memory_charts_need_a_budget(tmp_path: Path) -> None:
    plain = page.render(RunStats.read(fabricate(tmp_path / "plain", steps=4)))
    assert "memory-waiting" not in figures_of(plain)
    text = page.render(RunStats.read(fabricate(tmp_path / "few", steps=4, stall=0.03)))
    figures = figures_of(text)
    waiting = figures["memory-waiting"]["data"][0]["y"]
    assert waiting == pytest.approx([3.0] * 4)
    assert {trace["name"] for trace in figures["memory-bandwidth"]["data"]} == {"read", "written"}
    step = {trace["name"]: trace["y"] for trace in figures["memory-step"]["data"]}
    whole = np.array(step["computing"]) + step["waiting for the drive"]
    assert step["reads in flight"] == pytest.approx(0.7 * whole, rel=1e-3)
    assert step["writes in flight"] == pytest.approx(0.2 * whole, rel=1e-3)
    for name in ("memory-step", "memory-waiting", "memory-bandwidth"):
        (guide,) = re.findall(rf'{name}.*?<p class="guide">([^<]+\.)</p>', text, re.S)[:1]
        assert len(guide) <= 120
    assert "The drive is the bottleneck" not in text


def test_four_balance_charts(tmp_path: Path) -> None:
    run = RunStats.read(fabricate(tmp_path / "run", steps=20, balanced=True))
    figures = figures_of(page.render(run))
    assert set(figures) >= BALANCE
    [replicas] = figures["expert-replicas"]["data"]
    assert set(replicas["y"]) == {6}
    # Three layers: 30 ms are saved as predicted; measured waiting grows by 0.9 ms a step.
    predicted, measured = figures["balance-saved"]["data"]
    assert predicted["y"] == pytest.approx([30] * 20)
    assert measured["y"][9] == pytest.approx(30 + 3 - 1 - 9)
    before, after = figures["balance-layers"]["data"]
    assert (before["x"], after["y"]) == ([0, 1, 2], [1.1] * 3)
    assert before["y"] == pytest.approx([1.71, 1.81, 1.91])
    unknown = dict.fromkeys(("replica_wait_s", "gradient_wait_s"), math.nan)
    directory = fabricate(tmp_path / "gpu", steps=20, balanced=True, balance=unknown)
    _, measured = figures_of(page.render(RunStats.read(directory)))["balance-saved"]["data"]
    assert measured["name"] == "with measured planning"
    assert measured["y"] == pytest.approx([29] * 20)


def test_every_chart_explains_itself_on_a_small_page(tmp_path: Path) -> None:
    directory = fabricate(tmp_path / "run", steps=300, layers=8, experts=64, balanced=True, ranks=4)
    text = page.render(predict(directory, {**PREDICTED, "timeline": TIMELINE}))
    assert len(text) < 2_000_000
    cards = re.findall(r'<figure class="card.*?</figure>', text, re.S)
    assert len(cards) == len(figures_of(text)) == 14
    for one in cards:
        (guide,) = re.findall(r'<p class="guide">([^<]+\.)</p>', one)
        assert len(guide) <= 120


def test_starts_show_their_layout(tmp_path: Path) -> None:
    directory = fabricate(tmp_path / "run", steps=20)
    log = EventLog(directory / "events" / "rank-0.jsonl")
    plan = {"ep": 2, "dp_shard": 1, "tp": 4}
    words = "experts: torch's loop; tokens sent by memory"
    log.emit("run_start", step=16, ranks=8, device="cpu", plan=plan, backends=words)
    parts = [
        {"prefix": "teacher.", "ranks": [0, 1], "plan": {"dp_shard": 2}},
        {"prefix": "student.", "ranks": [2], "plan": {"dp_shard": 1}},
    ]
    log.emit("run_start", step=17, ranks=3, device="cpu", plan=parts[0]["plan"], parts=parts)
    log.emit("run_start", step=18, ranks=2, device="cpu")
    log.close()
    run = RunStats.read(directory)
    placed = "teacher. on 0,1 dp_shard=2; student. on 2"
    assert [(one.layout, one.backends) for one in run.launches[-3:]] == [
        ("ep=2,tp=4", words), (placed, ""), ("", ""),
    ]  # fmt: skip
    section = page.render(run).split("Starts and resumes")[1].split("</table>")[0]
    assert "ep=2,tp=4" in section
    assert placed in section
    assert escape(words) in section
    assert "replicated" in section.split("<tr>")[-1]


def test_dense_run_has_no_experts_section(tmp_path: Path) -> None:
    run = RunStats.read(fabricate(tmp_path / "run", steps=20, experts=0))
    text = page.render(run)
    assert run.loads is None
    assert summary(run)["experts"] is None
    assert not {"expert-load", "expert-overview", "imbalance"} & set(figures_of(text))
    assert data_of(text)["loads"] is None
    assert "dense" in text
    assert "experts," not in own_part(text).split("<main>")[1]


def test_a_credibility_head_is_no_click_prediction(tmp_path: Path) -> None:
    labels = {"credibility_loss": 0.31, "auc": 0.94, "accuracy": 0.865}
    directory = fabricate(
        tmp_path / "run", steps=40, experts=0, labels=labels, job={"credibility": {"weight": 1.0}}
    )
    run = RunStats.read(directory)
    text = page.render(run)
    assert {"credibility-loss", "auc", "accuracy"} <= figures_of(text).keys()
    body = own_part(text)
    assert "<h2>Credibility</h2>" in body
    assert "<h2>Clicks</h2>" not in body
    assert "every click" not in json.dumps(data_of(text)) + body
    assert "accuracy 0.865" in body
    head = summary(run)
    assert head["clicks"] is None
    assert head["credibility"] == {
        "validation": labels, "training": {"credibility_loss": pytest.approx(0.6)}
    }  # fmt: skip


@pytest.mark.parametrize("frozen", [False, True])
def test_students_are_listed_with_their_teacher(tmp_path: Path, frozen: bool) -> None:
    names, job = ("small", "tiny"), {"distill": {"frozen": frozen}}
    run = RunStats.read(fabricate(tmp_path / "run", steps=40, experts=0, students=names, job=job))
    text, head = page.render(run), summary(run)
    table = own_part(text).split("<h2>Students</h2>")[1].split("</table>")[0]
    rows = [re.findall("<t[hd][^>]*>(.*?)</t[hd]>", row) for row in table.split("<tr>")[1:]]
    assert rows[0] == [
        "name", "teacher", "parameters", "loss", "logits", "attention", "validation loss"
    ]  # fmt: skip
    assert rows[1][:3] == ["model (frozen)" if frozen else "model", "\u2013", "13.6 M"]
    assert rows[2] == [
        "small", "model", "1,000",
        *(f"{head['students']['small'][name]:.4f}"
          for name in ("loss", "logits", "attention", "validation_loss")),
    ]  # fmt: skip
    assert head["students"]["tiny"]["teacher"] == "model"
    assert ("learning-rate" in figures_of(text)) is not frozen
    assert ("Loss of the frozen teacher" in text) is frozen


def test_run_of_one_step(tmp_path: Path) -> None:
    directory = fabricate(tmp_path / "run", steps=1, checkpoint_every=1, validate_every=1)
    figures = figures_of(page.render(RunStats.read(directory)))
    assert len(figures) == 9
    assert figures["loss"]["data"][0]["mode"] == "lines+markers"


def test_run_without_steps_says_so(tmp_path: Path) -> None:
    directory = fabricate(tmp_path / "run", steps=1)
    (directory / "events" / "rank-0.jsonl").write_text("")
    text = page.render(RunStats.read(directory))
    assert "No step has finished yet" in text
    assert data_of(text)["figures"] == []
    assert summary(RunStats.read(directory))["loss"] is None


def test_losses_that_are_no_numbers_do_not_break_the_page(tmp_path: Path) -> None:
    run = RunStats.read(fabricate(tmp_path / "run", steps=40))
    loss = run.steps.loss.copy()
    loss[20:] = math.nan
    loss[30] = math.inf
    broken = replace(run, steps=replace(run.steps, loss=loss))
    raw = figures_of(page.render(broken))["loss"]["data"][0]
    assert raw["y"][19] is not None
    assert raw["y"][20:] == [None] * 20
    assert json.dumps(summary(broken), allow_nan=False)


def test_nothing_that_a_run_wrote_becomes_markup(tmp_path: Path) -> None:
    directory = fabricate(tmp_path / "<b>run&amp;", steps=20)
    job = json.loads((directory / "job.json").read_text())
    job["data"]["path"] = job["model"]["family"] = HOSTILE
    (directory / "job.json").write_text(json.dumps(job))
    log = directory / "events" / "rank-0.jsonl"
    log.write_text(log.read_text().replace('"clip"', json.dumps(HOSTILE)))
    text = own_part(page.render(replace(RunStats.read(directory), name=HOSTILE)))
    assert "<b>bold" not in text
    assert "<img" not in text
    assert text.count("</script>") == 3
    assert "&lt;/script&gt;&lt;b&gt;bold" in text
    names = [trace["name"] for trace in figures_of(text)["phases"]["data"]]
    assert "&lt;/script&gt;&lt;b&gt;bold&lt;/b&gt;&lt;img src=x onerror=alert(1)&gt;" in names


def test_page_asks_for_nothing_from_outside(tmp_path: Path) -> None:
    text = own_part(page.render(RunStats.read(fabricate(tmp_path / "run", steps=5))))
    assert "default-src 'none'" in text
    addresses = re.findall(r'(?:src|href)="([^"]*)"', text)
    assert addresses
    assert all(address.startswith("data:") for address in addresses)
    assert "http" not in text.replace("http-equiv", "").replace("http://www.w3.org", "")


def test_long_run_makes_a_small_page_that_keeps_its_spike(tmp_path: Path) -> None:
    run = RunStats.read(fabricate(tmp_path / "run", steps=4000, layers=1, ranks=1, spike_at=2801))
    text = page.render(run)
    assert len(text) < 2_000_000
    figures = figures_of(text)
    for figure in figures.values():
        for trace in figure["data"]:
            assert len(trace.get("y", [])) <= 800, figure["name"]
    assert max(figures["loss"]["data"][0]["y"]) == pytest.approx(run.steps.loss.max(), rel=1e-3)
    assert len(figures["expert-load"]["data"][0]["x"]) == 400
    assert len(data_of(text)["loads"]["hundredths"][0][0]) == 400


def test_summary_is_json_and_tells_the_head_of_the_page(tmp_path: Path) -> None:
    directory = fabricate(
        tmp_path / "run", steps=80, killed_at=60, resumed_at=40, dead={1: 3}, hot={2: 6}
    )
    facts = json.loads(json.dumps(summary(RunStats.read(directory)), allow_nan=False))
    assert (facts["run"], facts["status"], facts["step"]) == ("run", "finished", 80)
    assert facts["tokens"] == 80 * (TOKENS - 32)
    assert (facts["ranks"], facts["device"], facts["resumes"]) == (2, "cpu", 1)
    assert facts["parameters_total"] == 13_640_832
    assert facts["validation_step"] == 80
    assert facts["checkpoints"] == 4
    assert facts["newest_checkpoint"] == "checkpoints/step-00000080"
    assert [(dead["layer"], dead["expert"]) for dead in facts["experts"]["dead"]] == [(1, 3)]
    assert [(hot["layer"], hot["expert"]) for hot in facts["experts"]["hot"]] == [(2, 6)]
    assert {finding["kind"] for finding in facts["findings"]} >= {"dead_experts", "hot_experts"}


def test_predictions_stand_beside_measurements(tmp_path: Path) -> None:
    directory = fabricate(tmp_path / "run", steps=20, killed_at=14)
    assert "Predicted and measured" not in page.render(RunStats.read(directory))
    learnt = {"runs": 2, "devices": ["x"], "matmul": 1.1, "elementwise": 1.0, "collectives": 1.2}
    run = predict(directory, {**PREDICTED, "calibration": learnt, "loads": "before"})
    text = page.render(run)
    prediction = run.prediction
    assert prediction is not None
    assert prediction.measured.steps == 11
    assert prediction.measured.step_s == pytest.approx(float(np.median(run.steps.step_s[3:])))
    assert prediction.measured.tokens_per_s == pytest.approx(TOKENS / prediction.measured.step_s)
    assert prediction.measured.peak_bytes == max(rank.peak_bytes for rank in run.ranks)
    basis = "&gt;&#x27;, calibrated by 2 runs, with the loads of &#x27;before&#x27;; measured"
    assert f"Predicted for cluster &#x27;&lt;here{basis}" in text
    assert "<td>tokens a second</td>" in text
    other = replace(run, launches=[replace(launch, unit="samples") for launch in run.launches])
    assert "<td>samples a second</td>" in page.render(other)
    assert "peak memory of a rank, resident</td><td>1.0 MiB" in text
    assert "<td>backward</td><td>60.00 ms</td>" in text
    facts = json.loads(json.dumps(summary(run), allow_nan=False))["prediction"]
    assert facts["step_ratio"] == pytest.approx(prediction.ratio)
    assert facts["predicted"]["cluster"] == "<here>"


def test_timeline_of_the_predicted_step(tmp_path: Path) -> None:
    directory = fabricate(tmp_path / "run", steps=20)
    assert "step-timeline" not in figures_of(page.render(predict(directory)))
    run = predict(directory, {**PREDICTED, "timeline": TIMELINE})
    assert run.prediction is not None
    measured = run.prediction.measured
    figure = figures_of(page.render(run))["step-timeline"]
    bars = {trace["name"]: trace for trace in figure["data"]}
    assert [label.partition("<br>")[0] for label in figure["layout"]["yaxis"]["ticktext"]] == [
        "predicted, rank 1", "predicted, rank 0", "measured, rank 0",
    ]  # fmt: skip
    forward = bars["forward"]
    assert (forward["y"], forward["base"][:3]) == ([0, 0, 1, 2], [0, 40, 0])
    assert forward["x"][:3] == [40, 4, 20]
    assert forward["x"][3] == pytest.approx(measured.phases_s["forward"] * 1e3, rel=1e-4)
    assert forward["text"][1] == "forward: collectives<br><b>4.00 ms</b> from 40.00 ms"
    assert forward["text"][3].startswith("forward: median, waiting included<br>")
    waiting, collectives = bars["reduce"]["width"][:2]
    assert waiting < collectives < max(forward["width"])
    # Time outside of phases is drawn too, so the lane is as long as the step.
    assert bars["other"]["y"] == [2]
    end = bars["other"]["base"][0] + bars["other"]["x"][0]
    assert end == pytest.approx(measured.step_s * 1e3, rel=1e-3)
    assert "timeline" not in summary(run)["prediction"]["predicted"]


@pytest.mark.parametrize("predicted", [None, {**PREDICTED, "step_s": "no"}])
def test_predictions_that_no_one_can_read_are_left_out(predicted: Any, tmp_path: Path) -> None:
    run = predict(fabricate(tmp_path / "run", steps=5), predicted)
    assert run.prediction is None
    assert "Predicted and measured" not in page.render(run)


def test_report_is_written_whole_or_says_where_it_cannot(tmp_path: Path) -> None:
    directory, out = fabricate(tmp_path / "run", steps=5), tmp_path / "new" / "report.html"
    write_report(directory, out)
    assert out.read_text().endswith("</html>\n")
    assert list(out.parent.iterdir()) == [out]
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"file/report\.html' cannot be written \(.*another"):
        write_report(directory, tmp_path / "file" / "report.html")
