"""Waits for a processor, as Linux counts them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moesaic.dist.probe import reference
from moesaic.dist.probe.reference import RunReference, cpu_wait_s


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("500 2000000000 7\n", 2.0), ("500 0 7\n", 0.0), ("0 0 0\n", None), ("", None), ("x", None)],
)
def test_the_counts_of_a_thread(
    text: str, seconds: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "_SCHEDULING", tmp_path / "schedstat")
    assert cpu_wait_s() is None
    (tmp_path / "schedstat").write_text(text)
    assert cpu_wait_s() == seconds


def test_waits_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = tmp_path / "schedstat"
    monkeypatch.setattr(reference, "_SCHEDULING", counts)
    for device, expected in (("cpu", {"cpu_wait_s": 0.5}), ("meta", {})):
        machine = RunReference(torch.device(device), None)
        counts.write_text("1 1000000000 1")
        machine.begin_step()
        counts.write_text("1 1500000000 1")
        assert machine.after_step(1) == expected
