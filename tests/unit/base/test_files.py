"""Files that appear whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from moesaic.base.files import atomic_create, atomic_replace


def test_atomic_replace(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("before")
    with atomic_replace(path) as partial:
        partial.write_text("after")
        assert path.read_text() == "before"
    assert path.read_text() == "after"
    assert list(tmp_path.iterdir()) == [path]


def test_atomic_create_does_not_replace(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    with atomic_create(path) as partial:
        partial.write_text("first")
        assert not path.exists()
    with pytest.raises(FileExistsError), atomic_create(path) as partial:
        partial.write_text("second")
    assert path.read_text() == "first"
    assert list(tmp_path.iterdir()) == [path]


def test_failure_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("before")
    with pytest.raises(UnicodeEncodeError), atomic_replace(path) as partial:
        partial.write_text("half \udc80", encoding="utf-8")
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_permissions_are_kept(tmp_path: Path) -> None:
    place = tmp_path / "mine"
    place.write_text("before")
    place.chmod(0o600)
    with atomic_replace(place) as partial:
        partial.write_text("after")
    assert (place.read_text(), place.stat().st_mode & 0o777) == ("after", 0o600)
