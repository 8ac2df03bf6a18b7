"""Text on several ranks: tokenised once, the same for all, and an error of one is everybody's."""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from moesaic.base.errors import DataError, MoesaicError, UserError
from moesaic.dist.world import World
from moesaic.facts.job import DataConfig
from moesaic.testing.ranks import RankPool
from moesaic.train.data.rank_zero_first import run_rank_zero_first
from moesaic.train.data.text_data import TextData


def configure(path: Path, cache: Path) -> DataConfig:
    return DataConfig(path=str(path), sequence=16, cache=str(cache), validation_share=0.3)


def write(path: Path, num: int = 60) -> Path:
    path.write_text("".join(json.dumps({"text": f"text {n} " * 9}) + "\n" for n in range(num)))
    return path


def outcome(error: MoesaicError) -> list[str]:
    return [type(error).__name__, str(error)]


def open_text(world: World, configs: list[DataConfig]) -> Any:
    """This rank's view of the text of its configuration, or the error that it meets."""
    told: list[str] = []
    try:
        data = TextData.open(configs[world.rank], 3, world, told.append)
    except UserError as error:
        return outcome(error)
    assert data.validation is not None
    batch = data.train.batch(range(5, 9))
    return data.digest, len(data.train), len(data.validation), batch.inputs.tolist()


def test_ranks_see_the_same_text_tokenised_once(ranks: RankPool, tmp_path: Path) -> None:
    config = configure(write(tmp_path / "a.jsonl"), tmp_path / "cache")
    results = ranks.run(3, open_text, [config] * 3)
    assert results == [results[0]] * 3
    alone = open_text(World.solo(), [config])
    assert alone == results[0]
    assert len([path for path in (tmp_path / "cache").iterdir() if path.is_dir()]) == 1


def test_ranks_without_a_shared_disk_make_their_own(ranks: RankPool, tmp_path: Path) -> None:
    configs = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        configs.append(configure(write(tmp_path / name / "a.jsonl"), tmp_path / name / "cache"))
    results = ranks.run(2, open_text, configs)
    assert results[0] == results[1]
    assert len(list(tmp_path.glob("*/cache/*/tokens.bin"))) == 2


def test_other_text_on_another_machine_is_noticed(ranks: RankPool, tmp_path: Path) -> None:
    configs = [
        configure(write(tmp_path / f"{num}.jsonl", num), tmp_path / "cache") for num in (60, 61)
    ]
    results = ranks.run(2, open_text, configs)
    assert results[0] == results[1]
    kind, message = results[0]
    assert kind == "DataError"
    assert "rank 1 found other data than rank 0: give all machines the same files" in message


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_an_error_of_one_rank_is_the_error_of_all(
    ranks: RankPool, tmp_path: Path, bad: int
) -> None:
    good = configure(write(tmp_path / "a.jsonl"), tmp_path / "cache")
    broken = tmp_path / "b.jsonl"
    broken.write_text('{"text": "a"}\n{"body": 1}\n')
    configs = [configure(broken, tmp_path / "cache") if rank == bad else good for rank in range(3)]
    results = ranks.run(3, open_text, configs)
    assert results == [results[0]] * 3
    assert results[0][0] == "DataError"
    assert "line 2 of" in results[0][1]


def open_twice(world: World, bad: DataConfig, good: DataConfig) -> list[Any]:
    return [open_text(world, [config] * world.size) for config in (bad, good)]


def test_a_failure_does_not_reach_the_next_attempt(ranks: RankPool, tmp_path: Path) -> None:
    good = configure(write(tmp_path / "a.jsonl"), tmp_path / "cache")
    bad = configure(tmp_path / "none", tmp_path / "cache")
    for first, second in ranks.run(2, open_twice, bad, good):
        assert first[0] == "DataError"
        assert second[1] > 0


def fail_oddly(world: World) -> list[str]:
    def work(beat: object) -> int:
        raise ZeroDivisionError("odd")

    try:
        run_rank_zero_first(world, "work", work, str)
    except (MoesaicError, ZeroDivisionError) as error:
        return [type(error).__name__, str(error)]
    raise AssertionError("no error")


def test_an_error_that_is_ours_is_told_too(ranks: RankPool) -> None:
    first, second = ranks.run(2, fail_oddly)
    assert first == ["ZeroDivisionError", "odd"]
    assert second == ["MoesaicError", "work failed with ZeroDivisionError: odd"]


def work_long(world: World, beats: bool) -> Any:
    """Rank 0 works for longer than a deadline, with or without a sign of life."""
    world.timeout = timedelta(seconds=0.6)

    def work(beat: Any) -> int:
        for _ in range(30 if world.rank == 0 else 0):
            time.sleep(0.05)
            if beats:
                beat()
        return 7

    try:
        return run_rank_zero_first(world, "work", work, str)
    except MoesaicError as error:
        return str(error)


def test_patience_counts_from_the_last_sign_of_life(ranks: RankPool) -> None:
    assert ranks.run(2, work_long, True) == [7, 7]
    second = ranks.run(2, work_long, False)[1]
    assert second == "work: no sign of life from rank 0 for 0:00:00.600000"


def die_while_others_wait(world: World) -> str:
    world.timeout = timedelta(seconds=0.5)

    def work(beat: Any) -> int:
        if world.rank == 0:
            os._exit(1)
        return 7

    try:
        run_rank_zero_first(world, "work", work, str)
    except MoesaicError as error:
        raise DataError(f"survived: {error}") from None
    return "no error"


def test_a_dead_rank_0_does_not_hang_the_others(ranks: RankPool) -> None:
    with pytest.raises(AssertionError, match="survived: work: no sign of life from rank 0"):
        ranks.run(2, die_while_others_wait)
