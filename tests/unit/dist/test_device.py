"""Devices: what a process does to have the memory of one at hand."""

from __future__ import annotations

import subprocess
import sys

import pytest

from moesaic.dist import device

ALLOCATE = """
import resource

import torch

from moesaic.dist import device as devices


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


devices.activate(torch.device("cpu"))
for _ in range(40):  # Until the C library has found a place that it can use again.
    torch.zeros(16 << 20)
before = faults()
for _ in range(4):
    torch.zeros(16 << 20)
print((faults() - before) * resource.getpagesize())
"""


def test_memory_that_was_freed_is_taken_again() -> None:
    # In a process of its own: where one was ever refused memory, the C library serves it from a
    # place that keeps nothing as large.
    done = subprocess.run(
        [sys.executable, "-c", ALLOCATE], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < (64 << 20) // 16


@pytest.mark.parametrize(("flags", "tiles"), [("avx512_bf16 amx_bf16 amx_int8", True), ("", False)])
def test_tiles_are_known_by_the_processors_flags(
    flags: str, tiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "_cpu", lambda: f"model name\t: one\nflags\t\t: fpu {flags}\n")
    monkeypatch.setattr(device, "multiplies_bf16", lambda: True)
    assert device.multiplies_in_tiles.__wrapped__() == tiles
