"""Named phases of a step: seconds of each, and a hook for tracing and fault injection.

`with phases("forward"):` adds the elapsed time to that phase. The hook, if any, is called with the
name of each phase as it begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from moesaic.kernels import device as devices


class PhaseTimer:
    """Phases of one step on this rank."""

    def __init__(self, device: torch.device, hook: Callable[[str], None] | None = None) -> None:
        self._device, self._hook = device, hook
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time the block as part of phase `name`."""
        if self._hook is not None:
            self._hook(name)
        began = devices.synchronized_time_s(self._device)
        try:
            yield
        finally:
            spent = devices.synchronized_time_s(self._device) - began
            self.seconds[name] = self.seconds.get(name, 0.0) + spent
