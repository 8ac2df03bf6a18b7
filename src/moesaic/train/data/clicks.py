"""Click data of a job: opened once per run on every rank, then indexed by sample."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from moesaic.base.errors import DataError
from moesaic.dist.world import World
from moesaic.facts.job.clicks import ClicksConfig, StreamConfig
from moesaic.train.data.clicks_batch import ClickBatch
from moesaic.train.data.clicks_block import Columns
from moesaic.train.data.clicks_cache import (
    DEFAULT_CACHE,
    BadLines,
    FileDay,
    MapDay,
    ProgressCallback,
    encode_file,
    map_day,
    open_day,
)
from moesaic.train.data.clicks_files import find_files
from moesaic.train.data.clicks_samples import ClickSamples
from moesaic.train.data.clicks_stream import Stream, StreamDay
from moesaic.train.data.rank_zero_first import make_progress_log, run_rank_zero_first

__all__ = ["ClickBatch", "ClickData", "ClickSamples"]

_MAX_MAPPED = 16
"""Days of files that are mapped at once; each takes about six file descriptors."""


@dataclass(frozen=True)
class ClickData:
    """Click samples of a run."""

    train: ClickSamples
    validation: ClickSamples | None
    digest: str
    """Hashes of everything that determines a sample by its index; those of files come last."""

    @classmethod
    def open(
        cls,
        config: ClicksConfig,
        seed: int,
        world: World,
        log: Callable[[str], None] | None = None,
    ) -> ClickData:
        """Open the samples of `config`; read their files into the cache first if it lacks them.

        Args:
            config: the job's data section.
            seed: seed of the order of samples, and of the built-in stream.
            world: the ranks; all of them call this.
            log: receives messages about reading, on rank 0.
        """
        if config.stream is not None:
            return _open_stream(config.stream, seed, shuffle=config.shuffle)
        show = log if log is not None and world.is_rank_zero else lambda _: None
        return run_rank_zero_first(
            world,
            f"data.path = '{config.path}'",
            lambda beat: _open_files(config, seed, beat, show),
            lambda data: data.digest,
        )

    def files(self) -> dict[str, bytes]:
        """Return no files: the run's directory holds none of the data."""
        return {}


def _open_stream(config: StreamConfig, seed: int, *, shuffle: bool) -> ClickData:
    stream = Stream(config, seed)
    days = [StreamDay(stream, day) for day in range(config.days + 1)]
    return ClickData(
        train=ClickSamples(days[:-1], seed, shuffle=shuffle),
        validation=ClickSamples(days[-1:], seed, first_day=config.days),
        digest=_digest(seed, shuffle, config.model_dump_json()),
    )


def _open_files(
    config: ClicksConfig, seed: int, heartbeat: Callable[[], None], log: Callable[[str], None]
) -> ClickData:
    assert config.path is not None
    bad = BadLines(config.max_bad_lines, is_text=not config.is_parquet)
    report = make_progress_log(heartbeat, log)

    def on_progress(file: Path, num_samples: int) -> None:
        report(f"reading '{file}' into the cache: {num_samples:,} samples")

    cached_map = lru_cache(_MAX_MAPPED)(map_day)
    days = _open_days("data.path", config.path, config, cached_map, bad, on_progress)
    held_out = list[FileDay]()
    if config.validation_path is not None:
        key = "data.validation_path"
        held_out = _open_days(key, config.validation_path, config, cached_map, bad, on_progress)
    if bad.count:
        log(f"data.path = '{config.path}': left out {bad.count:,} malformed lines or rows")
        for text in bad.shown:
            log(f"left out {text}")
    validation = ClickSamples(held_out, seed, first_day=len(days)) if held_out else None
    return ClickData(
        train=ClickSamples(days, seed, shuffle=config.shuffle),
        validation=validation,
        digest=" ".join(
            (
                _digest(seed, config.shuffle, config.num_dense, config.num_slots),
                *(day.digest for day in days),
            )
        ),
    )


def read_start(config: ClicksConfig) -> Iterator[str]:
    """Read the first block of the first file of each setting, and yield a clause about each; raise
    as opening would."""
    bad = BadLines(config.max_bad_lines, is_text=not config.is_parquet)
    for key in ("path", "validation_path"):
        path = getattr(config, key)
        if path is None:
            continue
        file = find_files(f"data.{key}", path, is_parquet=config.is_parquet)[0]
        try:
            block = next(encode_file(file, Columns.of(config)), None)
            if block is None:
                raise DataError(f"'{file}' holds no samples: remove it, or give others")
            bad.add(file, block.num_bad, block.examples)
        except DataError as error:
            raise DataError(f"data.{key} = '{path}': {error}") from None
        yield f"the first {len(block.arrays['labels']):,} samples of '{file}' (data.{key})"


def _open_days(
    key: str,
    path: str,
    config: ClicksConfig,
    map_day: MapDay,
    bad: BadLines,
    on_progress: ProgressCallback,
) -> list[FileDay]:
    """Return the days of `path`, the value of the setting `key`."""
    cache = Path(config.cache or DEFAULT_CACHE).expanduser()
    columns = Columns.of(config)
    files = find_files(key, path, is_parquet=config.is_parquet)
    try:
        return [open_day(file, columns, cache, map_day, bad, on_progress) for file in files]
    except DataError as error:
        raise DataError(f"{key} = '{path}': {error}") from None


def _digest(*facts: object) -> str:
    return hashlib.sha256("\n".join(map(str, facts)).encode()).hexdigest()
