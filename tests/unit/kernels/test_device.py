"""Devices: memory reuse and CPU features."""

from __future__ import annotations

import subprocess
import sys

import pytest

from moesaic.kernels import device

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


@pytest.mark.parametrize(("flags", "amx"), [("avx512_bf16 amx_bf16 amx_int8", True), ("", False)])
def test_amx_is_detected_by_cpu_flags(
    flags: str, amx: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "_cpuinfo", lambda: f"model name\t: one\nflags\t\t: fpu {flags}\n")
    monkeypatch.setattr(device, "supports_bf16_matmul", lambda: True)
    assert device.has_amx.__wrapped__() == amx
