"""The page as a file: what stands in it, what cannot break out of it, how large it grows."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fabricated import LOADS, PREDICTED, TIMELINE, TOKENS, fabricate, predict

from moesaic.base.errors import StoreError
from moesaic.base.events import EventLog
from moesaic.report import RunFacts, page, summary, write_report
from moesaic.report.charts.balance import busiest_scale
from moesaic.report.charts.experts import SCALE
from moesaic.report.document import embed, plotly_source

HOSTILE = "</script><b>bold</b><img src=x onerror=alert(1)>"


def data_of(text: str) -> dict[str, Any]:
    """What the page's script draws."""
    found = re.search(r'<script type="application/json" id="page-data">(.*?)</script>', text, re.S)
    assert found is not None
    data: dict[str, Any] = json.loads(found.group(1))
    return data


def figures_of(text: str) -> dict[str, dict[str, Any]]:
    return {figure["name"]: figure for figure in data_of(text)["figures"]}


def own_part(text: str) -> str:
    """The page without Plotly."""
    return text.replace(plotly_source(), "")


def test_page_of_a_run(tmp_path: Path) -> None:
    run = RunFacts.read(fabricate(tmp_path / "my-run", steps=60, dead={1: 3}, hot={2: 6}))
    text = page.render(run)
    assert list(figures_of(text)) == [
        "loss", "learning-rate", "gradient-norm", "expert-load", "expert-overview", "imbalance",
        "balance-loss", "z-loss", "tokens-per-second", "memory", "phases", "phases-by-rank",
    ]  # fmt: skip
    assert "<title>my-run " in text
    assert "Expert 3 of layer 1 is dead" in text
    assert "Expert 6 of layer 2 is hot" in text
    assert "13.6 M" in text
    assert "finished" in text
    axes = figures_of(text)["expert-overview"]["layout"]
    assert (axes["xaxis"]["range"], axes["yaxis"]["range"]) == ([-0.5, 7.5], [2.5, -0.5])
    for name in figures_of(text):
        assert re.search(rf'id="{name}" role="img"[^>]*aria-label="[^"]+\."', text), name


def test_loss_figure_holds_every_mark(tmp_path: Path) -> None:
    directory = fabricate(tmp_path / "run", steps=60, killed_at=50, resumed_at=40)
    figure = figures_of(page.render(RunFacts.read(directory)))["loss"]
    raw, smoothed, validation, checkpoint = figure["data"]
    assert raw["x"] == list(range(1, 61))
    assert len(smoothed["y"]) == 60
    assert validation["x"] == checkpoint["x"] == [20, 40, 60]
    assert [shape["x0"] for shape in figure["layout"]["shapes"]] == [40]


def test_utilisation_in_hundredths_is_what_was_recorded(tmp_path: Path) -> None:
    directory = fabricate(tmp_path / "run", steps=9, layers=2, experts=4)
    table = pq.read_table(directory / "loads" / "part-000000.parquet")
    row = next(row for row in table.to_pylist() if (row["step"], row["layer"]) == (7, 1))
    loads = data_of(page.render(RunFacts.read(directory)))["loads"]
    column = [expert[6] for expert in loads["hundredths"][1]]
    mean = sum(row["counts"]) / 4
    assert column == [round(100 * count / mean) for count in row["counts"]]


def test_copies_of_experts_are_shown_where_a_policy_was_asked(tmp_path: Path) -> None:
    run = RunFacts.read(fabricate(tmp_path / "run", steps=20))
    text = page.render(run)
    assert not {"busiest-rank", "expert-copies", *BY_LAYER, *BY_RANK} & set(figures_of(text))
    assert "<h2>Balance</h2>" not in text
    assert summary(run)["balance"] is None
    asked = replace(
        run.steps, copies=np.full(20, 3.0), busiest_before=np.full(20, 1.7),
        busiest_after=np.full(20, 1.1), planning_s=np.full(20, 1e-3),
    )  # fmt: skip
    balanced = replace(run, steps=asked)
    figures = figures_of(page.render(balanced))
    before, after = (trace["y"] for trace in figures["busiest-rank"]["data"])
    assert set(before) == {1.7}
    assert set(after) == {1.1}
    assert set(figures["expert-copies"]["data"][0]["y"]) == {3.0}
    told = summary(balanced)["balance"]
    assert told.pop("verdict")["kind"] == "copies_unknown"
    assert told == pytest.approx({
        "copies": 3.0, "busiest_before": 1.7, "busiest_after": 1.1, "planning_s": 1e-3,
    })  # fmt: skip


BY_LAYER = {
    "balance-expected", "balance-home", "balance-copies", "balance-ratio", "balance-made",
    "balance-bytes", "balance-deciding", "balance-waiting", "balance-model",
}  # fmt: skip
BY_RANK = ("balance-ranks-home", "balance-ranks-copies")


def test_balance_opens_with_whether_copies_paid(tmp_path: Path) -> None:
    """In the page itself, whether or not its script runs."""
    run = RunFacts.read(fabricate(tmp_path / "run", steps=20, balanced=True))
    text = page.render(run)
    section = text[text.index("<h2>Balance</h2>") :]
    (lead,) = re.findall(r'<p class="lead">(.*?)</p>', section[: section.index("<figure")])
    assert lead.startswith(
        "<strong>Copies paid: expert layers are modelled to take 0.667 of what they would have at "
        "home.</strong> 60.0 ms for 90.0 ms a step, modelled; handing over and waiting for "
        "copies took rank 0 "
    )
    assert "copies_paid" not in text


def test_experts_that_moved_for_good_are_told(tmp_path: Path) -> None:
    """Whether or not a policy was asked; what a resume threw away has not been."""
    for balanced in (False, True):
        directory = fabricate(
            tmp_path / f"run-{balanced}", steps=20, balanced=balanced, finished=False
        )
        log = EventLog(directory / "events" / "rank-0.jsonl")
        for step, layer, before in ((10, 0, 1.9), (20, 0, 1.5), (20, 2, 1.71)):
            log.emit(
                "rehomed", step=step, layer=layer, moves=[[3, 0, 1], [4, 1, 0]], bytes=1 << 20,
                seconds=None, gain_s=1.0, busiest_before=before, busiest_after=1.08,
            )  # fmt: skip
        log.emit("rehomed", step=20, layer="odd", moves=3)
        run = RunFacts.read(directory)
        text = page.render(run)
        section = text[text.index("<h2>Balance</h2>") :]
        assert (
            '<p class="lead"><strong>6 experts of 2 layers moved for good, at 2 times.</strong> '
            "3.00 MiB travelled. The last were behind step 20; in layer 2 the busiest rank had "
            "1.71 times the mean, and would have had 1.08.</p>" in section
        )
        assert ("Copies paid" in section) == balanced
        assert summary(run)["rehomed"][2] == {
            "step": 20, "layer": 2, "experts": 2, "bytes": 1 << 20, "busiest_before": 1.71,
            "busiest_after": 1.08,
        }  # fmt: skip
        log.emit("run_start", step=16, resumed_from="checkpoints/step-00000015")
        log.close()
        again = RunFacts.read(directory)
        assert [(one.step, one.layer) for one in again.moves] == [(10, 0)]
        assert "2 experts of 1 layer moved for good, once." in page.render(again)


def test_starts_tell_who_shared_out_what(tmp_path: Path) -> None:
    directory = fabricate(tmp_path / "run", steps=20)
    log = EventLog(directory / "events" / "rank-0.jsonl")
    plan = {"ep": 2, "shard": 1, "tp": 4, "embedding": "columns"}
    words = "experts: torch's loop; tokens carried by memory"
    log.emit("run_start", step=16, ranks=8, resumed_from="there", plan=plan, engines=words)
    log.emit("run_start", step=17, ranks=2, resumed_from="there")
    log.close()
    run = RunFacts.read(directory)
    assert [(part.layout, part.engines) for part in run.parts[-2:]] == [
        ("ep=2,tp=4,embedding=columns", words), ("", ""),
    ]  # fmt: skip
    section = page.render(run).split("Starts and resumes")[1].split("</table>")[0]
    assert "ep=2,tp=4,embedding=columns" in section
    assert escape(words) in section
    assert "copies" in section.split("<tr>")[-1]


def test_balance_is_shown_layer_by_layer(tmp_path: Path) -> None:
    run = RunFacts.read(fabricate(tmp_path / "run", steps=20, balanced=True))
    text = page.render(run)
    figures = figures_of(text)
    assert {"busiest-rank", "expert-copies", *BY_LAYER} <= set(figures)
    heat = {name: figures[name]["data"][0] for name in sorted(BY_LAYER - {"balance-expected"})}
    assert all(trace["x"] == list(range(1, 21)) for trace in heat.values())
    assert all(trace["y"] == [0, 1, 2] for trace in heat.values())
    assert heat["balance-home"]["z"][2][4] == pytest.approx(1.5 + 0.2 + 0.1)
    assert {cell for row in heat["balance-copies"]["z"] for cell in row} == {1.1}
    assert [row[0] for row in heat["balance-ratio"]["z"]] == [4, 8, 12]
    # Of two ranks, so that more than 2 is an odd record.
    assert heat["balance-home"]["zmax"] == heat["balance-copies"]["zmax"] == pytest.approx(2.1)
    assert heat["balance-model"]["zmax"] == 4
    assert {cell for row in heat["balance-bytes"]["z"] for cell in row} == {3}
    assert "MiB of each step" in text
    assert heat["balance-deciding"]["z"][2][3] == pytest.approx(1 / 3, rel=1e-4)
    assert heat["balance-waiting"]["z"][0][9] == pytest.approx(3.0)
    assert heat["balance-model"]["z"][1][1] == pytest.approx(1.3)
    lines = {trace["name"]: trace["y"][1] for trace in figures["balance-expected"]["data"]}
    assert lines == pytest.approx({
        "experts, expected": 30, "experts": 39, "waiting for copies, expected": 3,
        "waiting for copies": 1.8,
    })  # fmt: skip
    cells = [re.findall(r"<td>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", text)]
    assert [row for row in cells if len(row) == 12] == [
        [str(layer), home, "1.10", ratio, "2.00", "3.00 MiB", "0.333 ms", "3.15 ms", "10.0 ms",
         "13.0 ms", "30.0 ms", "20.0 ms"]
        for layer, home, ratio in ((0, "1.71", "4.00"), (1, "1.81", "8.00"), (2, "1.91", "12.0"))
    ]  # fmt: skip
    for name in BY_LAYER:
        assert re.search(rf'id="{name}" role="img"[^>]*aria-label="[^"]+\."', text), name


def test_balance_is_shown_rank_by_rank(tmp_path: Path) -> None:
    run = RunFacts.read(fabricate(tmp_path / "run", steps=9, ranks=3, balanced=True))
    text = page.render(run)
    figures = figures_of(text)
    home, copied = (figures[name]["data"][0] for name in BY_RANK)
    for trace in (home, copied):
        assert trace["x"] == list(range(1, 10))
        assert trace["y"] == [
            f"layer {layer}, rank {rank}" for layer in range(3) for rank in range(3)
        ]
        assert trace["hovertemplate"].startswith("%{y}, step %{x}<br>")
    # In step 5 rank 2 of layer 2 has 1150 rows, of 1050 on average, and rank 0 takes half of 150.
    assert [row[4] for row in home["z"][6:]] == pytest.approx(
        [1000 / 1050, 1000 / 1050, 1150 / 1050], rel=1e-4
    )
    assert [row[4] for row in copied["z"][6:]] == pytest.approx(
        [1075 / 1050, 1000 / 1050, 1075 / 1050], rel=1e-4
    )
    scales = [
        [figures[name]["data"][0][key] for key in ("zmin", "zmax", "colorscale")]
        for name in (*BY_RANK, "balance-home", "balance-copies")
    ]
    assert scales == [scales[0]] * 4
    assert scales[0][1] == 3
    assert figures[BY_RANK[0]]["layout"]["yaxis"]["dtick"] == 1
    subtitles = re.findall(r"rows over the mean of the layer; 1 is even([^<]*)<", text)
    assert subtitles == [""]
    for name in BY_RANK:
        assert re.search(rf'id="{name}" role="img"[^>]*aria-label="[^"]+\."', text), name


@pytest.mark.parametrize(
    ("story", "shown", "every", "says"),
    [
        ({"layers": 32}, [(layer, 0) for layer in range(32)], 4, ""),
        ({"layers": 40}, [(layer, 0) for layer in range(8, 40)], 4,
         "; the 32 least even of 40 layers"),
        ({"layers": 2, "ranks": 40}, [(1, 0)], 3, "; the least even of 2 layers"),
        ({"layers": 70, "ranks": 66}, [(69, 0)], 4,
         "; the least even of 70 layers; the 64 busiest of 66 ranks"),
    ],
)  # fmt: skip
def test_no_more_ranks_than_can_be_told_apart(
    story: dict[str, Any], shown: list[tuple[int, int]], every: int, says: str, tmp_path: Path
) -> None:
    run = RunFacts.read(fabricate(tmp_path / "run", steps=2, balanced=True, **story))
    text = page.render(run)
    figures = figures_of(text)
    for name in BY_RANK:
        figure = figures[name]
        names = figure["data"][0]["y"]
        assert len(names) == len(figure["data"][0]["z"]) <= 64
        assert [one for one in names if one.endswith(" rank 0")] == [
            f"layer {layer}, rank {rank}" for layer, rank in shown
        ]
        assert figure["layout"]["yaxis"]["dtick"] == every
    subtitles = re.findall(r"(?:mean of the layer; 1 is even|on the same scale)(; [^<]*)<", text)
    assert subtitles == [says] * 2 * bool(says)


def test_the_busiest_of_many_ranks_are_shown(tmp_path: Path) -> None:
    run = RunFacts.read(fabricate(tmp_path / "run", steps=2, layers=66, ranks=66, balanced=True))
    [home, _] = (figures_of(page.render(run))[name]["data"][0] for name in BY_RANK)
    # Rank 65 of layer 65 has most; of the others, which are alike, the last ones are left out.
    assert home["y"] == [f"layer 65, rank {rank}" for rank in (*range(63), 65)]
    assert home["z"][-1][1] == max(max(row) for row in home["z"]) > 1


def test_a_layer_that_was_not_there_all_the_time_is_blank(tmp_path: Path) -> None:
    """As of a run whose rank 0 went on with another part of a pipeline."""
    run = RunFacts.read(fabricate(tmp_path / "run", steps=9, balanced=True))
    assert run.spreads is not None
    run.spreads.number[3, 1] = 0
    text = page.render(run)
    cells = figures_of(text)["balance-bytes"]["data"][0]["z"]
    assert (cells[1][3], cells[1][4], cells[0][3]) == (None, 3, 3)
    assert "MiB of each step" in text


@pytest.mark.parametrize(
    ("most", "ranks", "end", "middle"),
    [
        (1.2, 2, 2, 2**0.5), (2.0, 2, 2, 2**0.5), (2.5, 3, 3, 3**0.5), (1.2, 4, 4, 2),
        (1.2, 64, 4, 2), (9.0, 64, 9, 2), (1.2, None, 4, 2), (6.0, None, 6, 2), (3.0, 2, 3, 3**0.5),
    ],
)  # fmt: skip
def test_a_busiest_rank_is_coloured_by_what_is_possible(
    most: float, ranks: int | None, end: float, middle: float
) -> None:
    scale = busiest_scale(most, ranks)
    assert (scale["zmin"], scale["zmax"]) == (0, end)
    stops = [(at * end, colour) for at, colour in scale["colorscale"]]
    assert [at for at, _ in stops] == pytest.approx([0, 0.5, 1, middle, end])
    assert [colour for _, colour in stops] == [colour for _, colour in SCALE]


def test_balance_without_a_clock_shows_what_is_known(tmp_path: Path) -> None:
    """As on a GPU, where clocks of a host say nothing of kernels."""
    run = RunFacts.read(fabricate(tmp_path / "run", steps=20, balanced=True))
    assert run.spreads is not None
    unknown = {
        name: np.full_like(run.spreads.number, np.nan)
        for name in ("landing_s", "return_s", "forward_s", "backward_s")
    }
    dark = replace(run, spreads=replace(run.spreads, sums={**run.spreads.sums, **unknown}))
    text = page.render(dark)
    figures = figures_of(text)
    assert BY_LAYER - set(figures) == {"balance-waiting", "balance-model"}
    assert [trace["name"] for trace in figures["balance-expected"]["data"]] == [
        "experts, expected", "waiting for copies, expected",
    ]  # fmt: skip
    assert "<td>10.0 ms</td><td>\N{EN DASH}</td><td>30.0 ms</td>" in text


def test_dense_run_has_no_experts_section(tmp_path: Path) -> None:
    text = page.render(RunFacts.read(fabricate(tmp_path / "run", steps=20, experts=0)))
    assert not {"expert-load", "expert-overview", "imbalance", "balance-loss"} & set(
        figures_of(text)
    )
    assert data_of(text)["loads"] is None
    assert "dense" in text
    assert "experts," not in own_part(text).split("<main>")[1]


def test_run_of_one_step(tmp_path: Path) -> None:
    directory = fabricate(tmp_path / "run", steps=1, checkpoint_every=1, validate_every=1)
    figures = figures_of(page.render(RunFacts.read(directory)))
    assert len(figures) == 12
    assert figures["loss"]["data"][0]["mode"] == "lines+markers"


def test_run_without_steps_says_so(tmp_path: Path) -> None:
    directory = fabricate(tmp_path / "run", steps=1)
    (directory / "events" / "rank-0.jsonl").write_text("")
    text = page.render(RunFacts.read(directory))
    assert "No step has finished yet" in text
    assert data_of(text)["figures"] == []
    assert summary(RunFacts.read(directory))["loss"] is None


def test_losses_that_are_no_numbers_do_not_break_the_page(tmp_path: Path) -> None:
    run = RunFacts.read(fabricate(tmp_path / "run", steps=40))
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
    text = own_part(page.render(replace(RunFacts.read(directory), name=HOSTILE)))
    assert "<b>bold" not in text
    assert "<img" not in text
    assert text.count("</script>") == 3
    assert "&lt;/script&gt;&lt;b&gt;bold" in text
    names = [trace["name"] for trace in figures_of(text)["phases"]["data"]]
    assert "&lt;/script&gt;&lt;b&gt;bold&lt;/b&gt;&lt;img src=x onerror=alert(1)&gt;" in names


def test_embedded_json_reads_back() -> None:
    value = {"a": "</script><!-- & \u2028 <b>", "b": [1, None]}
    assert json.loads(embed(value)) == value
    assert not set("<>&\u2028") & set(embed(value))


def test_page_asks_for_nothing_from_outside(tmp_path: Path) -> None:
    text = own_part(page.render(RunFacts.read(fabricate(tmp_path / "run", steps=5))))
    assert "default-src 'none'" in text
    addresses = re.findall(r'(?:src|href)="([^"]*)"', text)
    assert addresses
    assert all(address.startswith("data:") for address in addresses)
    assert "http" not in text.replace("http-equiv", "").replace("http://www.w3.org", "")


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """100,000 steps and as many loads, written as plain text for speed."""
    directory = fabricate(tmp_path_factory.mktemp("long") / "run", steps=1, ranks=1)
    size, random = 100_000, np.random.default_rng(0)
    losses = (1.4 + 0.05 * random.normal(size=size)).tolist()
    losses[70_001] = 9.5
    with (directory / "events" / "rank-0.jsonl").open("a") as file:
        file.writelines(
            f'{{"time": 1760000010.0, "event": "step", "step": {step}, "loss": {losses[step - 1]}, '
            f'"tokens": 100, "step_s": 0.1, "tokens_per_s": 1000, "phases": {{"forward": 0.1}}}}\n'
            for step in range(2, size + 1)
        )
    counts = random.poisson(TOKENS, size=(size - 1) * 8).astype(np.int64)
    table = pa.table(
        {
            "step": pa.array(range(2, size + 1), pa.int32()),
            "layer": pa.array([0] * (size - 1), pa.int16()),
            "counts": pa.ListArray.from_arrays(pa.array(range(0, size * 8, 8), pa.int32()), counts),
            "dropped": pa.array([0] * (size - 1), pa.int64()),
        },
        schema=LOADS,
    )
    pq.write_table(table, directory / "loads" / "part-000001.parquet")
    return directory


def test_long_run_makes_a_small_page_that_keeps_its_spike(long_run: Path) -> None:
    text = page.render(RunFacts.read(long_run))
    assert len(own_part(text)) < 1_000_000
    figures = figures_of(text)
    for figure in figures.values():
        for trace in figure["data"]:
            assert len(trace.get("y", [])) <= 2000, figure["name"]
    assert 9.5 in figures["loss"]["data"][0]["y"]
    assert len(figures["expert-load"]["data"][0]["x"]) == 400
    assert len(data_of(text)["loads"]["hundredths"][0][0]) == 400


def test_summary_is_json_and_tells_the_head_of_the_page(tmp_path: Path) -> None:
    directory = fabricate(
        tmp_path / "run", steps=80, killed_at=60, resumed_at=40, dead={1: 3}, hot={2: 6}
    )
    facts = json.loads(json.dumps(summary(RunFacts.read(directory)), allow_nan=False))
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


def test_summary_of_a_dense_run_has_no_experts(tmp_path: Path) -> None:
    facts = summary(RunFacts.read(fabricate(tmp_path / "run", steps=5, experts=0)))
    assert facts["experts"] is None


def test_predictions_stand_beside_what_was_measured(tmp_path: Path) -> None:
    directory = fabricate(tmp_path / "run", steps=20, killed_at=14)
    assert "Predicted and measured" not in page.render(RunFacts.read(directory))
    run = predict(directory, {**PREDICTED, "tokens_per_s": 1.0})
    text = page.render(run)
    found = run.prediction
    assert found is not None
    assert found.measured.steps == 11
    assert found.measured.step_s == pytest.approx(float(np.median(run.steps.step_s[3:])))
    assert found.measured.tokens_per_s == pytest.approx(TOKENS / found.measured.step_s)
    assert found.measured.peak_bytes == max(float(rank.peak_bytes.max()) for rank in run.ranks)
    assert "Predicted for cluster &#x27;&lt;here&gt;&#x27;." in text
    assert "most memory of a rank, resident</td><td>1.00 MiB" in text
    bars = figures_of(text)["predicted-phases"]["data"]
    assert [bar["name"] for bar in bars] == ["predicted", "measured"]
    assert dict(zip(bars[0]["x"], bars[0]["y"], strict=True))["backward"] == 60
    facts = json.loads(json.dumps(summary(run), allow_nan=False))["prediction"]
    assert facts["step_ratio"] == pytest.approx(found.ratio)
    assert facts["predicted"]["cluster"] == "<here>"


def test_what_a_prediction_rests_on_is_said(tmp_path: Path) -> None:
    directory = fabricate(tmp_path / "run", steps=20)
    learnt = {"runs": 2, "devices": ["x"], "products": 1.1, "passes": 1.0, "messages": 1.2}
    text = page.render(predict(directory, {**PREDICTED, "calibration": learnt, "loads": "before"}))
    assert (
        "&gt;&#x27;, calibrated by 2 runs, with the loads of &#x27;before&#x27;. Measured" in text
    )


def test_the_predicted_step_stands_on_a_clock(tmp_path: Path) -> None:
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
    assert (forward["y"], forward["base"][:4]) == ([0, 0, 0, 1, 2], [0, 10, 44, 0])
    assert forward["x"][:4] == [10, 4, 30, 20]
    assert forward["x"][4] == pytest.approx(measured.phases_s["forward"] * 1e3, rel=1e-4)
    assert (
        forward["text"][1] == "&lt;embed&gt;, forward: messages<br><b>4.00 ms</b> from 10.0 ms on"
    )
    assert forward["text"][2].startswith("all blocks of 3 micro-batches, forward: computing<br>")
    assert forward["text"][4].startswith("forward: median, waiting included<br>")
    waiting, messages = bars["reduce"]["width"][:2]
    assert waiting < messages < max(forward["width"])
    # What is in no phase is drawn too, so that the lane is as long as the step.
    assert bars["other"]["y"] == [2]
    end = bars["other"]["base"][0] + bars["other"]["x"][0]
    assert end == pytest.approx(measured.step_s * 1e3, rel=1e-3)
    assert "timeline" not in summary(run)["prediction"]["predicted"]


def test_what_a_run_says_of_its_prediction_goes_before(tmp_path: Path) -> None:
    directory = fabricate(tmp_path / "run", steps=20, finished=False)
    measured = {
        "steps": 9, "step_s": 0.2, "phases_s": {"forward": 0.2}, "tokens_per_s": 10240.0,
        "peak_bytes": 3 << 20, "memory": "allocated",
    }  # fmt: skip
    event = {"event": "prediction", "step": 20, "predicted": PREDICTED, "measured": measured}
    with (directory / "events" / "rank-0.jsonl").open("a") as log:
        log.write(json.dumps({"time": 2e9, **event}) + "\n")
    run = predict(directory)
    assert run.prediction is not None
    assert run.prediction.measured.step_s == 0.2
    assert "rank, allocated</td><td>1.00 MiB</td><td>3.00 MiB</td><td>3.00" in page.render(run)


@pytest.mark.parametrize("predicted", [None, 3, {"cluster": "x"}, {**PREDICTED, "step_s": "no"}])
def test_predictions_that_no_one_can_read_are_left_out(predicted: Any, tmp_path: Path) -> None:
    run = predict(fabricate(tmp_path / "run", steps=5), predicted)
    assert run.prediction is None
    assert "Predicted and measured" not in page.render(run)


@pytest.mark.parametrize("said", [3, "x", ["x"], {"step_s": 1}])
def test_a_prediction_event_that_no_one_can_read_is_left_out(said: Any, tmp_path: Path) -> None:
    directory = fabricate(tmp_path / "run", steps=5, finished=False)
    event = {"event": "prediction", "step": 5, "predicted": said, "measured": said}
    with (directory / "events" / "rank-0.jsonl").open("a") as log:
        log.write(json.dumps({"time": 2e9, **event}) + "\n")
    assert predict(directory).prediction is None


def test_comparison_overlays_runs(tmp_path: Path) -> None:
    runs = [
        fabricate(tmp_path / parent / "run", steps=steps)
        for parent, steps in (("a", 30), ("b", 50))
    ]
    write_report(runs, tmp_path / "both.html")
    text = (tmp_path / "both.html").read_text()
    figures = figures_of(text)
    lines = [trace for trace in figures["loss"]["data"] if trace["mode"] == "lines"]
    assert [(line["name"], len(line["x"])) for line in lines] == [("a/run", 30), ("b/run", 50)]
    assert len(figures["tokens-per-second"]["data"]) == 2
    assert len({line["line"]["color"] for line in lines}) == 2


def test_comparison_says_how_far_runs_are_apart_and_why(tmp_path: Path) -> None:
    runs = [
        fabricate(tmp_path / name, steps=20, layers=layers) for name, layers in (("a", 2), ("b", 3))
    ]
    log = runs[1] / "events" / "rank-0.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    losses = {
        event["step"]: event["loss"]
        for event in map(json.loads, (runs[0] / "events" / "rank-0.jsonl").read_text().splitlines())
        if event["event"] == "step"
    }
    for event in lines:
        if event["event"] == "step":
            event["loss"] = losses[event["step"]] + (0.25 if event["step"] == 7 else 0.0)
    log.write_text("".join(json.dumps(event) + "\n" for event in lines))
    write_report(runs, tmp_path / "both.html")
    text = (tmp_path / "both.html").read_text()
    assert "<td>b against a</td><td>20</td><td>7</td><td>0.25 at step 7</td><td>0</td>" in text
    assert "<td>model.layers</td><td>2</td><td>3</td>" in text
    write_report([runs[0], runs[0]], tmp_path / "same.html")
    text = (tmp_path / "same.html").read_text()
    assert "<td>none</td><td>0 at step 1</td>" in text
    assert "Settings that differ" not in text


def test_comparison_holds_balances_against_each_other(tmp_path: Path) -> None:
    runs = [
        fabricate(tmp_path / name, steps=20, balanced=balanced)
        for name, balanced in (("a", True), ("b", False), ("c", True))
    ]
    write_report(runs, tmp_path / "both.html")
    text = (tmp_path / "both.html").read_text()
    (told,) = re.findall("<h2>Balance</h2>(.*?)</section>", text, re.S)
    rows = [re.findall("<td>(.*?)</td>", row) for row in re.findall("<tr>(<td>.*?)</tr>", told)]
    title = summary(RunFacts.read(runs[0]))["balance"]["verdict"]["title"]
    assert rows == [[name, "6.00", "1.90", "1.10", "1.00 ms", title] for name in ("a", "c")]
    heads = re.findall("<th[^>]*>(.*?)</th>", told)
    assert heads[2:4] == [
        "busiest rank over the mean, in the least even layer at home", "the same with copies",
    ]  # fmt: skip
    write_report(runs[1:2] * 2, tmp_path / "none.html")
    assert "<h2>Balance</h2>" not in (tmp_path / "none.html").read_text()


def test_comparison_takes_a_run_without_steps(tmp_path: Path) -> None:
    started = fabricate(tmp_path / "started", steps=1)
    (started / "events" / "rank-0.jsonl").write_text("")
    write_report([fabricate(tmp_path / "done", steps=20), started], tmp_path / "both.html")
    assert len(figures_of((tmp_path / "both.html").read_text())["tokens-per-second"]["data"]) == 1
    write_report([started, started], tmp_path / "none.html")
    assert figures_of((tmp_path / "none.html").read_text()) == {}


def test_report_is_written_whole_into_new_folders(tmp_path: Path) -> None:
    out = tmp_path / "new" / "report.html"
    write_report([fabricate(tmp_path / "run", steps=5)], out)
    assert out.read_text().endswith("</html>\n")
    assert list(out.parent.iterdir()) == [out]


def test_report_that_cannot_be_written_says_where(tmp_path: Path) -> None:
    directory = fabricate(tmp_path / "run", steps=5)
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"file/report\.html' cannot be written \(.*another"):
        write_report([directory], tmp_path / "file" / "report.html")
    with pytest.raises(StoreError, match="no run directory"):
        write_report([], tmp_path / "report.html")


def test_import_needs_neither_torch_nor_plotly() -> None:
    program = (
        "import sys; sys.modules['torch'] = sys.modules['plotly'] = None; import moesaic.report"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
