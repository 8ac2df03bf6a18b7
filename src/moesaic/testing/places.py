"""Expert state of one bank on a drive, for tests: a cache over a temporary block file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from moesaic.facts.expert_blocks import BlockKind
from moesaic.nn.experts.places import StatePlaces
from moesaic.store.cache import BlockCache
from moesaic.store.file import BlockFile
from moesaic.testing.residency import RandomResidency


def content_path(file: BlockFile) -> Path:
    """Return a path to a file without a name, under which a test can damage it."""
    return Path(f"/proc/self/fd/{file._file.fileno()}")


@contextmanager
def make_places(
    path: Path, num_experts: int, width: int, num_places: int, dtype: torch.dtype = torch.float32
) -> Iterator[StatePlaces]:
    """Yield the state of `num_experts` experts of `width` numbers, all zero, in `num_places` places
    and in a new file."""
    file = BlockFile(path, len(BlockKind) * num_experts, width * dtype.itemsize)
    with BlockCache(file, num_places, RandomResidency()) as cache:
        yield StatePlaces(cache, 0, num_experts, width, dtype)
