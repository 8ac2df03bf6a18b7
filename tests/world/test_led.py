"""Results and errors of rank 0 reach every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moesaic.base.errors import StoreError, UserError
from moesaic.dist.world import World
from moesaic.testing.ranks import RankPool
from moesaic.train.run_directory import lock_run_directory


def run_on_rank_zero(world: World, error_text: str) -> list[Any]:
    def work() -> str:
        assert world.is_rank_zero, "only rank 0 runs it"
        if error_text:
            raise StoreError(error_text)
        return "done"

    try:
        return [world.run_on_rank_zero(work)]
    except UserError as error:
        return [type(error).__name__, str(error)]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_rank_gets_the_result_of_rank_0(ranks: RankPool, size: int) -> None:
    assert ranks.run(size, run_on_rank_zero, "") == [["done"]] * size
    assert ranks.run(size, run_on_rank_zero, "no room") == [["StoreError", "no room"]] * size


def lock_errors(world: World, out: Path) -> list[str]:
    """Return the errors for a locked run directory, then for one that holds a run."""
    errors = []
    with lock_run_directory(out, world, fresh=True):
        try:
            with lock_run_directory(out, world, fresh=True):
                pass
        except UserError as error:
            errors.append(str(error).partition(" by ")[0])
        (out / "job.json").write_text("{}")
        world.barrier()
    try:
        with lock_run_directory(out, world, fresh=True):
            pass
    except UserError as error:
        errors.append(str(error).partition(":")[0])
    with lock_run_directory(out.with_name("new") / "below", world, fresh=True):
        world.barrier()
    return errors


def test_every_rank_rejects_a_run_directory_in_use(ranks: RankPool, tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = [f"'{out}' is in use", f"'{out}' is not empty and holds no run (it has 'job.json')"]
    assert ranks.run(2, lock_errors, out) == [words] * 2
    assert not (tmp_path / "new").exists(), "a rejected start removes the directories that it made"
    assert [path.name for path in out.iterdir()] == ["job.json"]
