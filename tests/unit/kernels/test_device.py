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

SHARE = """
from concurrent.futures import ThreadPoolExecutor

import torch

from moesaic.kernels import device as devices

cpu = torch.device("cpu")
devices.activate(cpu)
before = devices.used_bytes(cpu)
pools = [ThreadPoolExecutor(1) for _ in range(8)]
for index, pool in enumerate(pools):
    # A hole is slightly too small for another tensor of the same size.
    pool.submit(lambda: torch.ones(32 - index << 18).sum().item()).result()
kept = devices.used_bytes(cpu) - before
devices.release_freed_memory()
print(kept, devices.used_bytes(cpu) - before)
"""

RETURN = """
import torch

from moesaic.kernels import device as devices

cpu = torch.device("cpu")
devices.activate(cpu)
devices.return_large_tensors()
before = devices.used_bytes(cpu)
tensors = [torch.ones(1 << 20) for _ in range(16)]
held = devices.used_bytes(cpu) - before
del tensors[::2]
print(held, devices.used_bytes(cpu) - before)
"""


def run(script: str) -> list[int]:
    """Return the numbers that a script prints.

    It is a new process, because after a failed allocation the C library uses a heap that frees.
    """
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return [int(number) for number in done.stdout.split()]


def test_freed_memory_is_reused() -> None:
    (faulted_bytes,) = run(ALLOCATE)
    assert faulted_bytes < (64 << 20) // 16


def test_threads_share_freed_memory_until_it_is_released() -> None:
    kept, after_release = run(SHARE)
    assert 32 << 20 <= kept < 96 << 20  # Imported libraries may have a second heap.
    assert after_release < 16 << 20


def test_large_tensors_return_their_memory_at_once() -> None:
    held, after = run(RETURN)
    assert held >= 64 << 20
    assert after < held - (28 << 20)
