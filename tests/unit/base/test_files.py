"""Files that appear whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from moesaic.base.files import adding, replacing


def test_a_file_takes_the_place_of_another(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("before")
    with replacing(path) as partial:
        partial.write_text("after")
        assert path.read_text() == "before"
    assert path.read_text() == "after"
    assert list(tmp_path.iterdir()) == [path]


def test_a_new_file_takes_no_place(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    with adding(path) as partial:
        partial.write_text("first")
        assert not path.exists()
    with pytest.raises(FileExistsError), adding(path) as partial:
        partial.write_text("second")
    assert path.read_text() == "first"
    assert list(tmp_path.iterdir()) == [path]


def test_what_fails_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("before")
    with pytest.raises(UnicodeEncodeError), replacing(path) as partial:
        partial.write_text("half \udc80", encoding="utf-8")
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_who_may_read_a_file_stays_as_it_was(tmp_path: Path) -> None:
    place = tmp_path / "mine"
    place.write_text("before")
    place.chmod(0o600)
    with replacing(place) as partial:
        partial.write_text("after")
    assert (place.read_text(), place.stat().st_mode & 0o777) == ("after", 0o600)


def test_a_directory_is_not_replaced(tmp_path: Path) -> None:
    place = tmp_path / "there"
    place.mkdir()
    with pytest.raises(IsADirectoryError), replacing(place) as partial:
        partial.write_text("all of it")
    assert list(tmp_path.iterdir()) == [place]


def test_a_file_has_no_files_in_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError), replacing(tmp_path / "file" / "a.txt") as partial:
        partial.write_text("all of it")
