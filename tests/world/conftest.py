"""Shared by tests of ranks together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of unlike lengths to train on."""
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    lines = [json.dumps({"text": f"document {i}: " + "the quick brown fox " * (i % 7)})
             for i in range(60)]  # fmt: skip
    path.write_text("\n".join(lines))
    return path
