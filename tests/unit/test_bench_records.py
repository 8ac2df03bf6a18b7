"""Figures: how they are made, that every record is well-formed, and that pages follow records."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, fields, replace
from pathlib import Path
from types import ModuleType

import pytest
from benchmarks import generate, measure
from benchmarks.__main__ import THEMES, chosen, run
from benchmarks.measure import Row

RECORDS = sorted(measure.RECORDS.glob("*.json"))
HASH = "0123456789abcdef0123456789abcdef01234567"
ROW = Row(
    "speed", 1.2, "ratio", ">= 1.0", True, "peer 1.0", (1.1, 1.3), 5, False, "make bench", HASH,
    "a machine",
)  # fmt: skip


def test_every_theme_has_a_record() -> None:
    assert {path.stem for path in RECORDS} == set(THEMES)


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_record_is_well_formed(path: Path) -> None:
    rows = measure.read(path)
    assert rows
    assert len({row.name for row in rows}) == len(rows)
    assert 0 < sum(bool(row.bar) for row in rows) <= 12
    assert len(rows) <= 60
    for row in rows:
        assert row.holds == measure.holds(row.bar, row.value), row.name
        assert all((row.name, row.unit, row.against, row.command, row.hardware)), row.name
        if row.interval is not None:
            assert row.interval[0] <= row.value <= row.interval[1], row.name
        assert row.repeats > 0 or row.value is None


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_pages_follow_records(path: Path) -> None:
    rows = measure.read(path)
    assert generate.refusal(rows) == ""
    page = generate.RESULTS / f"{path.stem}.md"
    assert page.read_text() == generate.page(path.stem, rows), "run `python -m benchmarks.generate`"


def test_the_readme_follows_records() -> None:
    table = generate.table({path.stem: measure.read(path) for path in RECORDS})
    text = generate.README.read_text()
    assert text == generate.with_table(text, table), "run `python -m benchmarks.generate`"


def test_bootstrap_on_known_data() -> None:
    assert measure.bootstrap([2.0] * 9) == (2.0, 2.0)
    # The exact bootstrap distribution of the median of three: 7/27, 13/27, 7/27.
    assert measure.bootstrap([1.0, 2.0, 3.0]) == (1.0, 3.0)
    assert measure.bootstrap([1.0, 2.0, 3.0], confidence=0.4) == (2.0, 2.0)


@pytest.mark.parametrize(
    ("bar", "value", "expected"),
    [
        (">= 1.0", 1.0, True), (">= 1.0", 0.9, False), ("<= 0.25", 0.25, True),
        ("<= 0.25", 0.26, False), ("== 300", 300, True), ("== 300", 299, False),
        (">= 1.0", None, None), ("", 1.2, None),
    ],
)  # fmt: skip
def test_a_row_holds_by_its_median(bar: str, value: float | None, expected: bool | None) -> None:
    row = measure.row("speed", value, "ratio", bar=bar, against="x", repeats=3, interval=(0.0, 9.0))
    assert row.holds is expected


@pytest.mark.parametrize(("bar", "value"), [(">= 1.0", 0.9), ("<= 1.0", 1.3), ("", 0.9)])
def test_a_claim_is_the_worst_of_its_cases(bar: str, value: float) -> None:
    rows = [replace(ROW, name=f"case {v}", value=v, repeats=int(10 * v)) for v in (1.3, 0.9, 1.1)]
    untried = replace(ROW, name="other", value=None, interval=None, holds=None)
    found = measure.worst("claim", [*rows, untried], bar)
    assert (found.name, found.value, found.bar) == ("claim", value, bar)
    assert found.holds == (False if bar else None)
    assert found.repeats == int(10 * value)
    assert found.against == f"peer 1.0; worst of 3, 1 more untried: case {value}"
    alone = measure.worst("claim", [untried], bar)
    assert (alone.name, alone.value, alone.bar, alone.holds) == ("claim", None, bar, None)


def test_parts_that_are_set_apart_run_only_by_name() -> None:
    module = ModuleType("theme")
    module.PARTS = {"cpu": iter, "gpu": list}  # type: ignore[attr-defined]
    module.APART = ("gpu",)  # type: ignore[attr-defined]
    assert chosen(module, "theme", ()) == [iter]
    assert chosen(module, "theme", ["gpu"]) == [list]
    with pytest.raises(SystemExit, match="no part 'tpu': take one of cpu, gpu"):
        chosen(module, "theme", ["tpu"])


def test_a_bar_that_nobody_can_read_is_refused() -> None:
    with pytest.raises(ValueError, match="bar = 'about 1'"):
        measure.holds("about 1", 1.0)


def test_contenders_take_turns_in_turning_order() -> None:
    calls: list[str] = []
    contenders = {name: lambda name=name: calls.append(name) for name in "ab"}
    times = measure.interleave(contenders, 3, warmup=1, patience_s=0.0)
    assert calls == list("ab" + "ab" + "ba" + "ab")
    assert times.rounds == 3
    assert {name: len(s) for name, s in times.seconds.items()} == {"a": 3, "b": 3}


def test_ratios_are_paired() -> None:
    times = measure.Times({"slow": [2.0, 20.0, 6.0], "fast": [1.0, 10.0, 2.0]})
    assert times.ratios("slow", "fast").tolist() == [2.0, 2.0, 3.0]
    assert times.ratio("slow", "fast") == (2.0, (2.0, 3.0))


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="needs Linux's /proc")
def test_own_work_is_not_foreign_and_that_of_others_is() -> None:
    """Busy programs lengthen the work, so count its seconds instead of its share."""
    burn = "import time\nwhile time.process_time() < 1.0: pass"
    own, theirs = measure.Watch(), measure.Watch(root=1 << 22)
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", burn], check=True)
    difference = theirs.foreign_share() - own.foreign_share()
    machine_s = (time.perf_counter() - began) * (os.cpu_count() or 1)
    assert difference * machine_s > 0.5


def test_a_record_survives_the_way_to_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "RECORDS", tmp_path)
    rows = [ROW, replace(ROW, value=None, interval=None, holds=None)]
    path = measure.write("theme", rows)
    assert measure.read(path) == rows
    assert [set(raw) for raw in json.loads(path.read_text())] == [{f.name for f in fields(Row)}] * 2


def test_a_key_too_many_or_too_few_is_an_error(tmp_path: Path) -> None:
    raw = asdict(ROW)
    del raw["bar"]
    (tmp_path / "theme.json").write_text(json.dumps([raw]))
    with pytest.raises(ValueError, match=r"theme.json, row 0.*bar"):
        measure.read(tmp_path / "theme.json")


@pytest.mark.parametrize("commit", [f"{HASH}-dirty", "unknown", "main"])
def test_no_page_of_a_dirty_or_unknown_commit(
    commit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert generate.refusal([ROW]) == ""
    assert generate.refusal([ROW, replace(ROW, commit=commit)])
    monkeypatch.setattr(measure, "RECORDS", tmp_path)
    monkeypatch.setattr(generate, "RECORDS", tmp_path)
    monkeypatch.setattr(generate, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(generate, "README", tmp_path / "README.md")
    measure.write("theme", [replace(ROW, commit=commit)])
    (complaint,) = generate.generate()
    assert "theme.json" in complaint
    assert not (tmp_path / "results").exists()


def test_a_commit_that_the_repository_does_not_have_is_refused() -> None:
    if measure.commit() == measure.UNKNOWN:
        pytest.skip("this is no git checkout")
    assert "does not have" in generate.unknown([ROW])
    assert generate.unknown([replace(ROW, commit=measure.commit()[:40])]) == ""


def test_measured_and_simulated_figures_never_share_a_table() -> None:
    page = generate.page("theme", [ROW, replace(ROW, name="dream", simulated=True)])
    measured, simulated = page.split("## Simulated")
    assert ("speed" in measured, "dream" in measured) == (True, False)
    assert "dream" in simulated
    table = generate.table({"theme": [ROW, replace(ROW, name="dream", simulated=True)]})
    assert table.endswith("| - | 1 | 0 | 0 |")


def test_a_missed_bar_is_shown_as_missed() -> None:
    row = replace(ROW, value=0.9, interval=(0.8, 1.0), holds=False)
    assert "**missed**" in generate.page("theme", [row])
    untried = replace(ROW, value=None, interval=None, holds=None)
    table = generate.table({"theme": [ROW, row, row, untried, replace(ROW, bar="")]})
    assert table.endswith("| [theme](benchmarks/results/theme.md) | - | 1 | 2 | 1 |")


def test_what_a_machine_cannot_say_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A figure of a GPU outlives a machine without one; what is measured anew does not."""
    monkeypatch.setattr(measure, "RECORDS", tmp_path)

    def figure(name: str, value: float | None) -> measure.Row:
        return measure.row(name, value, "ratio", bar="", against="somebody", repeats=3)

    measure.write("one", [figure("a", 1.0), figure("b", 2.0), figure("c", None)])
    run([figure("a", None), figure("b", 3.0), figure("c", None), figure("d", 4.0)], "one")
    found = {row.name: row.value for row in measure.read(tmp_path / "one.json")}
    assert found == {"a": 1.0, "b": 3.0, "c": None, "d": 4.0}
