"""Conversations on several ranks: the same samples and losses, resumed too, and errors of all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moesaic.base.errors import DataError
from moesaic.dist.world import World
from moesaic.testing.chat_templates import CHATML, write_tokenizer
from moesaic.testing.ranks import RankPool
from moesaic.testing.runs import train_text


def run_job(
    world: World, place: str, out: str, layout: dict[str, Any], steps: int, resume: str | None
) -> Any:
    """One rank of a run: loss and tokens of each step, or the error."""
    chat = {"format": "chat", "tokenizer": f"{place}/tok", "sequence": 48, "validation_share": 0.2}
    try:
        progress = train_text(
            world, Path(place, "talks.jsonl"), Path(place, out), resume, data=chat,
            train={"steps": steps, "batch": 4}, schedule={"kind": "constant"}, layout=layout,
        )  # fmt: skip
    except DataError as error:
        return str(error)
    return [(figures["loss"], figures["step"]) for figures in progress.figures]


def test_a_run_is_the_same_on_any_ranks_and_when_it_goes_on(
    ranks: RankPool, tmp_path: Path
) -> None:
    write_tokenizer(tmp_path / "tok", CHATML)
    lines = [
        json.dumps({"prompt": f"What is {i}?", "completion": f"It is {i}" * (i % 4 + 1)})
        for i in range(40)
    ]
    (tmp_path / "talks.jsonl").write_text("\n".join(lines))
    place = str(tmp_path)
    whole = run_job(World.solo(), place, "whole", {}, 4, None)
    assert len(whole) == 4
    first = ranks.run(2, run_job, place, "first", {"ep": 2}, 2, None)[0]
    second = ranks.run(2, run_job, place, "first", {}, 4, "auto")[1]
    for (loss, step), (expected, same) in zip([*first, *second], whole, strict=True):
        assert step == same
        assert loss == pytest.approx(expected, abs=1e-9)
    (tmp_path / "talks.jsonl").write_text("\n".join([*lines, '{"prompt": "a"}']))
    results = ranks.run(2, run_job, place, "bad", {}, 2, None)
    assert results == [results[0]] * 2
    assert "line 41 of" in results[0]
