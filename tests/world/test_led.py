"""What one rank decides for all: its word, or its refusal, reaches every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moesaic.base.errors import StoreError, UserError
from moesaic.dist.world import World
from moesaic.testing.ranks import Ranks
from moesaic.train.directory import alone


def hear(world: World, refusal: str) -> list[Any]:
    def work() -> str:
        assert world.leads, "only rank 0 works"
        if refusal:
            raise StoreError(refusal)
        return "here"

    try:
        return [world.led(work)]
    except UserError as error:
        return [type(error).__name__, str(error)]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_everyone_hears_rank_0(ranks: Ranks, size: int) -> None:
    assert ranks.run(size, hear, "") == [["here"]] * size
    assert ranks.run(size, hear, "no room") == [["StoreError", "no room"]] * size


def hold(world: World, out: Path) -> list[str]:
    """What this rank hears when it asks for a directory that is held, then for one that is free."""
    heard = []
    with alone(out, world, fresh=True):
        try:
            with alone(out, world, fresh=True):
                pass
        except UserError as error:
            heard.append(str(error).partition(" by ")[0])
        (out / "job.json").write_text("{}")
        world.barrier()
    try:
        with alone(out, world, fresh=True):
            pass
    except UserError as error:
        heard.append(str(error).partition(":")[0])
    with alone(out.with_name("new") / "below", world, fresh=True):
        world.barrier()
    return heard


def test_a_directory_that_is_not_free_is_refused_on_every_rank(
    ranks: Ranks, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    words = [f"--out '{out}' is in use", f"--out '{out}' already holds a run"]
    assert ranks.run(2, hold, out) == [words] * 2
    assert not (tmp_path / "new").exists(), "what was made for nothing goes again"
    assert [path.name for path in out.iterdir()] == ["job.json"]
