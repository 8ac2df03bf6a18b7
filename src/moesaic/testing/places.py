"""Expert state of one bank on a drive, for tests: a cache over a temporary block file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random

import torch

from moesaic.facts.expert_blocks import BlockKind
from moesaic.nn.experts.places import Places
from moesaic.store.cache import BlockCache
from moesaic.store.file import BlockFile


class RandomResidency:
    """Residency policy that evicts random blocks, the same ones in each test."""

    def __init__(self) -> None:
        self._random = Random(0)

    def access(self, block: int) -> None:
        """Ignore the access."""

    def evict(self, candidates: Sequence[int], coming: Mapping[int, int]) -> int:
        """Return a random candidate."""
        del coming
        return self._random.choice(candidates)

    def removed(self, block: int) -> None:
        """Ignore the removal."""


def content_path(file: BlockFile) -> Path:
    """Return a path to a file without a name, under which a test can damage it."""
    return Path(f"/proc/self/fd/{file._file.fileno()}")


@contextmanager
def make_places(
    path: Path, num_experts: int, width: int, num_places: int, dtype: torch.dtype = torch.float32
) -> Iterator[Places]:
    """Yield the state of `num_experts` experts of `width` numbers, all zero, in `num_places` places
    and in a new file."""
    file = BlockFile(path, len(BlockKind) * num_experts, width * dtype.itemsize)
    with BlockCache(file, num_places, RandomResidency()) as cache:
        yield Places(cache, 0, num_experts, width, dtype)
