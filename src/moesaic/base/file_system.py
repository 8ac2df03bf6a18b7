"""File systems of directories on this machine, and reasons against some as a local drive."""

from __future__ import annotations

import re
from pathlib import Path

_MOUNTS = Path("/proc/self/mountinfo")
_SLOW = {
    **dict.fromkeys(("tmpfs", "ramfs"), "which is memory itself"),
    **dict.fromkeys(("overlay", "aufs"), "which copies files between the layers of a container"),
    **dict.fromkeys(
        ("9p", "afs", "ceph", "cifs", "gpfs", "lustre", "nfs", "nfs4", "smb3", "virtiofs"),
        "which reaches its drive over a network or another system",
    ),
    "fuse": "whose reads and writes take a detour through another process",
}  # fmt: skip


def unsuitable_file_system(directory: Path) -> str | None:
    """Return the file system of a directory with the reason against it as a local drive, or None.
    The directory need not exist."""
    name = file_system(directory, _MOUNTS.read_text() if _MOUNTS.exists() else "")
    reason = _SLOW.get(name.partition(".")[0])
    return None if reason is None else f"{name}, {reason}"


def file_system(directory: Path, mounts: str) -> str:
    """Return the type of the file system of a directory by the text of /proc/self/mountinfo, or an
    empty string."""
    found, path = ("", ""), directory.resolve()
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        point = re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), before.split(" ")[4])
        if path.is_relative_to(point) and len(point) >= len(found[0]):
            found = point, after.split(" ")[0]  # A later mount hides an earlier one.
    return found[1]
