"""Shared by every test: one pool of four ranks for a whole session."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis
import pytest
import torch

from moesaic.testing.ranks import Ranks

hypothesis.settings.register_profile("brief", max_examples=40, deadline=None)
hypothesis.settings.load_profile("brief")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    pool = Ranks(4)
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
