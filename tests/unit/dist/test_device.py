"""Devices: what a process does to have the memory of one at hand."""

from __future__ import annotations

import resource

import torch

from moesaic.dist import device as devices


def faults() -> int:
    """Pages that this process was given so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def test_memory_that_was_freed_is_taken_again() -> None:
    devices.activate(torch.device("cpu"))
    for _ in range(40):  # Until the C library has found a place that it can use again.
        torch.zeros(16 << 20)
    before = faults()
    for _ in range(4):
        torch.zeros(16 << 20)
    assert faults() - before < (64 << 20) // resource.getpagesize() // 16
