"""A classifier of texts in any layout: the same numbers, resumed bit for bit and in any other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from layouts import worst_element

from moesaic.dist.world import World
from moesaic.testing.ranks import RankPool
from moesaic.testing.runs import train_text
from moesaic.testing.states import read_checkpoint

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}), "dp": (2, {}), "ep": (2, {"ep": 2, "dp_shard": 2}),
}  # fmt: skip


def run_job(
    world: World, out: str, layout: dict[str, Any], resume: str | None
) -> tuple[list[float], list[str]]:
    """One rank of a run over the texts beside `out`; losses, and what was said."""
    place = Path(out).parent
    progress = train_text(
        world, place / "pairs.jsonl", Path(out), resume, layout=layout, credibility={"weight": 2.0},
        model={"vocab": 260, "labels": 2},
        data={
            "path": str(place / "pairs.jsonl"), "format": "labelled", "sequence": 24,
            "cache": str(place / "cache"), "validation_share": 0.2,
        },
    )  # fmt: skip
    return progress.losses, progress.messages


def test_every_layout_gives_the_same_numbers_and_resumes(ranks: RankPool, tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    with (tmp_path / "pairs.jsonl").open("w") as file:
        for index in range(90):
            text = "".join(draw.choice(list("abc d."), draw.integers(1, 24)))
            row = {"text": text, "label": None if index % 5 == 4 else index % 2}
            file.write(json.dumps(row) + "\n")
    said = dict[str, str]()
    for name, (size, layout) in LAYOUTS.items():
        losses, messages = ranks.run(size, run_job, str(tmp_path / name), layout, None)[0]
        if name == "one":
            expected = losses
        assert losses == pytest.approx(expected, rel=1e-9)
        (said[name],) = (line for line in messages if "auc" in line)
    assert len({*said.values()}) == 1, said
    final = read_checkpoint(tmp_path / "one/checkpoints/step-00000004")
    assert any(key.endswith("head.score.weight") for key in final)
    for name in LAYOUTS:
        state = read_checkpoint(tmp_path / name / "checkpoints/step-00000004")
        assert worst_element(state, final) <= 1e-9, name
    for before, after in (("ep", "ep"), ("ep", "one")):
        size, layout = LAYOUTS[after]
        start, out = str(tmp_path / before / "checkpoints/step-00000002"), tmp_path / f"to-{after}"
        ranks.run(size, run_job, str(out), layout, start)
        state = read_checkpoint(out / "checkpoints/step-00000004")
        same = read_checkpoint(tmp_path / before / "checkpoints/step-00000004")
        assert worst_element(state, same) <= (0.0 if before == after else 1e-9)
