"""Devices: memory reuse."""

from __future__ import annotations

import subprocess
import sys

ALLOCATE = """
import resource

import torch

from moesaic.kernels import device as devices


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


devices.activate(torch.device("cpu"))
for _ in range(40):  # Until the C library reuses an arena.
    torch.zeros(16 << 20)
before = faults()
for _ in range(4):
    torch.zeros(16 << 20)
print((faults() - before) * resource.getpagesize())
"""


def test_freed_memory_is_reused() -> None:
    # In a new process, because after a failed allocation the C library uses an arena that frees.
    done = subprocess.run(
        [sys.executable, "-c", ALLOCATE], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < (64 << 20) // 16
