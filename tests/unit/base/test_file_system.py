"""File systems of directories, and reasons against some."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from moesaic.base.file_system import file_system, unsuitable_file_system

MOUNTS = """
22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
23 22 0:21 / /scratch rw - overlay overlay rw
24 22 0:22 / /mnt/two\\040words rw shared:1 - nfs4 host:/home rw
25 22 0:23 / /scratch rw - tmpfs none rw
26 22 0:24 / /sc rw - fuse.sshfs host: rw
""".strip()


@pytest.mark.parametrize(
    ("directory", "name"),
    [
        ("/home/x", "ext4"), ("/mnt/two words/below", "nfs4"), ("/scratch/a", "tmpfs"),
        ("/sc", "fuse.sshfs"),
    ],
)  # fmt: skip
def test_the_last_and_longest_mount_gives_the_file_system(directory: str, name: str) -> None:
    assert file_system(Path(directory), MOUNTS) == name
    assert file_system(Path(directory), "") == ""


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("tmpfs", "which is memory itself"), ("nfs4", "which reaches its drive over a network"),
        ("overlay", "which copies files"), ("fuse.sshfs", "whose reads and writes"),
    ],
)  # fmt: skip
def test_a_reason_against_a_file_system(tmp_path: Path, name: str, reason: str) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"1 0 0:1 / / rw - {name} none rw\n")
    with mock.patch("moesaic.base.file_system._MOUNTS", mounts):
        found = unsuitable_file_system(tmp_path / "missing")
        assert found is not None
        assert found.startswith(f"{name}, {reason}")
        mounts.write_text("1 0 0:1 / / rw - xfs none rw\n")
        assert unsuitable_file_system(tmp_path) is None
