"""Prompts of attributes on several ranks: the same losses in any layout, resumed too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moesaic.dist.world import World
from moesaic.testing.ranks import RankPool
from moesaic.testing.runs import train_text


def run_job(
    world: World, place: str, out: str, layout: dict[str, Any], steps: int, resume: str | None
) -> list[float]:
    """One rank of a run: the loss of each step, and of validation."""
    progress = train_text(
        world, Path(place, "texts.jsonl"), Path(place, out), resume, model={"vocab": 400},
        data={"sequence": 120, "validation_share": 0.2}, layout=layout,
        control={"genres": ["a", "b"], "genre": "kind", "keywords": "tf-idf", "length": "tokens"},
        train={"steps": steps, "batch": 4}, schedule={"kind": "constant"},
    )  # fmt: skip
    return [figures["loss"] for figures in progress.figures]


def test_a_run_is_the_same_on_any_ranks_and_when_it_goes_on(
    ranks: RankPool, tmp_path: Path
) -> None:
    records = [{"text": f"{'word ' * (i % 3)} {i}", "kind": "ab"[i % 2]} for i in range(24)]
    (tmp_path / "texts.jsonl").write_text("\n".join(map(json.dumps, records)))
    place = str(tmp_path)
    whole = run_job(World.solo(), place, "whole", {}, 4, None)
    first = ranks.run(2, run_job, place, "parts", {"ep": 2}, 2, None)[0]
    second = ranks.run(2, run_job, place, "parts", {}, 4, "auto")[1]
    assert [*first, *second] == pytest.approx(whole, abs=1e-9)
    assert len(set(whole)) == 4
