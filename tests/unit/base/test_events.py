"""Event logs of runs that were killed and resumed."""

from __future__ import annotations

from pathlib import Path

from moesaic.base.events import EventLog, read_events


def test_a_resumed_log_keeps_its_first_event(tmp_path: Path) -> None:
    """The writer ends the line that a killed run left half-written."""
    path = tmp_path / "rank-0.jsonl"
    path.write_text('{"time": 1.0, "event": "run_start"}\n{"time": 2.0, "ev')
    for event in ("run_start", "run_end"):
        log = EventLog(path)
        log.emit(event)
        log.close()
    assert [one["event"] for one in read_events(path)] == ["run_start", "run_start", "run_end"]
    assert path.read_text().count("\n") == 4
