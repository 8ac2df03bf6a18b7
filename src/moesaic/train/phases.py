"""A step as named phases: where its time goes, and where a test may strike.

`with phases("forward"):` adds the time spent to that phase. A hook, if there is one, is called with
the name of each phase as it begins: the place for fault injection and for tracing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from moesaic.dist import device as devices


class Phases:
    """The phases of one step on this rank."""

    def __init__(self, device: torch.device, hook: Callable[[str], None] | None = None) -> None:
        self._device, self._hook = device, hook
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Spend time in phase `name`."""
        if self._hook is not None:
            self._hook(name)
        began = devices.now(self._device)
        try:
            yield
        finally:
            spent = devices.now(self._device) - began
            self.seconds[name] = self.seconds.get(name, 0.0) + spent
