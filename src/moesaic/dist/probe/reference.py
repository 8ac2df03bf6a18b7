"""Reference work: fixed computing that the probe times, and that a run times again.

The two times say how much faster or slower a machine has become, whatever the job. It needs no
random numbers and no other rank, so it changes nothing in a run but its duration. Waits for a
processor that other programs use are counted apart: they rarely hit so short a work.
"""

from __future__ import annotations

import math
from contextlib import suppress
from pathlib import Path

import torch

from moesaic.facts.plan import Predictions
from moesaic.kernels import device as devices

_WEIGHTS, _ELEMENTS = 4, 1 << 20
"""Matmuls, and elements of the tensor that is read and written."""
_SHARE = 0.003
"""Largest share of a run's time, by prediction."""
_SCHEDULING = Path("/proc/thread-self/schedstat")
"""Nanoseconds that a thread has run and has waited to run, as Linux counts them."""


def cpu_wait_s() -> float | None:
    """Return the seconds that this thread, ready to run, has waited for a processor so far; None if
    the system does not say."""
    with suppress(OSError, ValueError):
        ran_ns, waited_ns, _ = map(int, _SCHEDULING.read_text(encoding="ascii").split())
        return waited_ns / 1e9 if ran_ns else None  # A kernel without counts writes zeros.
    return None


class Reference:
    """Reference work of a device."""

    def __init__(self, device: torch.device) -> None:
        side = devices.max_matmul_size(device) // 4
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        self._device = device
        self._left = torch.ones(side, side, dtype=dtype, device=device)
        self._product = torch.empty_like(self._left)
        self._weights = torch.ones(_WEIGHTS, side, side, dtype=dtype, device=device)
        self._elements = torch.ones(_ELEMENTS, device=device)
        self.time_s()  # Warm up threads and caches.

    @torch.no_grad()
    def time_s(self) -> float:
        """Do the work and return its seconds, without waits for a processor."""
        began, waited_s = devices.synchronized_time_s(self._device), self._wait_s()
        for weight in self._weights:
            torch.mm(self._left, weight, out=self._product)
        self._elements.mul_(1.0)
        waits_s = self._wait_s() - waited_s
        return devices.synchronized_time_s(self._device) - began - waits_s

    def _wait_s(self) -> float:
        """Return the waits of the thread that computes; a GPU does not depend on them."""
        if self._device.type != "cpu":
            return 0.0
        return cpu_wait_s() or 0.0


class RunReference:
    """Speed of the machine during a run: reference work between steps, on all ranks after the same
    ones, and on a CPU the waits for a processor in each step."""

    def __init__(self, device: torch.device, predicted: Predictions | None) -> None:
        self._reference, self.every = None, 0
        self._is_cpu = device.type == "cpu"
        self._waited_s: float | None = None
        if predicted is not None and predicted.reference_s is not None:
            self._reference = Reference(device)
            self.every = math.ceil(predicted.reference_s / (_SHARE * predicted.step_s))

    def begin_step(self) -> None:
        """Begin to count the waits of a step."""
        self._waited_s = cpu_wait_s() if self._is_cpu else None

    def after_step(self, step: int) -> dict[str, float]:
        """Return what is known: `cpu_wait_s`, waits of this step for a processor, and
        `reference_s`, seconds of the reference work if it is due after `step`."""
        found = dict[str, float]()
        waits_s = None if self._waited_s is None else cpu_wait_s()
        if self._waited_s is not None and waits_s is not None:
            found["cpu_wait_s"] = waits_s - self._waited_s
        if self._reference is not None and step % self.every == 0:
            found["reference_s"] = self._reference.time_s()
        return found
