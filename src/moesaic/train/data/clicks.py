"""Click data of a job: opened once per run on every rank, then indexed by sample."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from moesaic.dist.world import World
from moesaic.facts.job.clicks import ClicksConfig
from moesaic.train.data.clicks_batch import ClickBatch
from moesaic.train.data.clicks_samples import ClickSamples
from moesaic.train.data.clicks_stream import Stream, StreamDay

__all__ = ["ClickBatch", "ClickData", "ClickSamples"]


@dataclass(frozen=True)
class ClickData:
    """Click samples of a run."""

    train: ClickSamples
    validation: ClickSamples | None
    digest: str
    """Hash of everything that determines a sample by its index."""

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
        assert config.stream is not None
        stream = Stream(config.stream, seed)
        days = [StreamDay(stream, day) for day in range(config.stream.days + 1)]
        return cls(
            train=ClickSamples(days[:-1], seed, shuffle=config.shuffle),
            validation=ClickSamples(days[-1:], seed, first_day=config.stream.days),
            digest=_digest(seed, config.shuffle, config.stream.model_dump_json()),
        )

    def files(self) -> dict[str, bytes]:
        """Return no files: the run's directory holds none of the data."""
        return {}


def _digest(*facts: object) -> str:
    return hashlib.sha256("\n".join(map(str, facts)).encode()).hexdigest()
