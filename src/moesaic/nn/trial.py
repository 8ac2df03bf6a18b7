"""What may multiply experts, tried where they are: how long a layer's experts take by each of
them, and whether what comes of it is what torch makes.

Experts are a layer's own, with as many rows as they will have, all of them equally many; from
sorting to sums of each token's results, and back, on this rank alone: nothing travels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median

import torch
from torch import Tensor

from moesaic.dist import device as devices
from moesaic.dist import passes
from moesaic.dist.products import candidates
from moesaic.facts.job.train import Products
from moesaic.nn.bank import Bank
from moesaic.nn.dispatch import Dispatcher
from moesaic.nn.moe import MoE
from moesaic.nn.travel import Ranks

_APART = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""What a row of results may differ by, as a share of itself, or of what rows are in the mean: some
times what rounding comes to."""
_ROUNDS = 5
_SAMPLE_S, _MOST_PASSES = 0.02, 32
"""Passes that follow each other are timed together, as layers do in a run."""


@dataclass
class Tried:
    """What came of it."""

    seconds: dict[Products, float] = field(default_factory=dict)
    """Of a pass, by each that may be taken."""
    faults: dict[Products, str] = field(default_factory=dict)
    """Why others may not."""


@dataclass(frozen=True)
class Load:
    """What goes through the experts of a layer at a time."""

    tokens: int
    choices: int
    """Experts of each token, here."""
    dtype: torch.dtype
    """Of products."""
    back: bool = True
    """And back."""
    waited_for: bool = True
    """Whether the host waits for numbers of rows in any case."""

    @staticmethod
    def of(moe: MoE, tokens: int, dtype: torch.dtype, *, back: bool = True) -> Load:
        """Of a rank that has so many tokens, in a layer as it is laid out: what comes from others
        is rows, each of which is a token by itself."""
        alone = not moe.dispatcher.ranks.carriers
        rows = tokens * moe.router.top_k * moe.bank.slices.count // moe.dispatcher.computations
        choices = moe.router.top_k if alone else 1
        free = moe.dispatcher.waits_for_none and moe.router.keeps_all
        return Load(max(1, rows // choices), choices, dtype, back, waited_for=not free)


def tried(bank: Bank, load: Load, clock: Callable[[torch.device], float] = devices.now) -> Tried:
    """What experts of `bank` take by each of what may multiply them; nothing, if there is no
    choice, or if what torch makes of them is no measure, not being finite."""
    names, by, found = candidates(bank.arena.device, load.dtype), bank.by, Tried()
    if len(names) == 1:
        return found
    try:
        going = _Going(bank, load)
        bank.by = "torch"
        due = going()
        if not all(bool(one.isfinite().all()) for one in due):
            return found
        for name in names:
            bank.by = name
            try:
                fault = None if name == "torch" else _apart(going(), due, _APART[load.dtype])
            except passes.faults() as error:
                fault = str(error) or type(error).__name__
            if fault is not None:
                found.faults[name] = fault
        del due
        right = [name for name in names if name not in found.faults]
        found.seconds = _seconds(bank, going, right, partial(clock, bank.arena.device))
    finally:
        bank.by = by
    return found


class _Going:
    """A pass of experts."""

    def __init__(self, bank: Bank, load: Load) -> None:
        device, shape = bank.arena.device, (load.tokens, load.choices)
        self._bank, self._load, slots = bank, load, len(bank.arena)
        self._dispatcher = Dispatcher(slots, Ranks())
        self._slots = torch.arange(math.prod(shape), device=device).view(shape) % slots
        of_its_own = torch.Generator(device).manual_seed(0)
        shape_TH = (load.tokens, bank.hidden)
        self._tokens, self._grad = (
            torch.randn(shape_TH, generator=of_its_own, device=device).to(load.dtype)
            for _ in range(2)
        )
        self._weights = torch.full(shape, 1 / load.choices, device=device)
        self._inputs = [self._tokens.requires_grad_(), self._weights.requires_grad_()]
        learns = bank.arena if bank.adapters is None else bank.adapters.arena
        self._inputs += [learns] * learns.requires_grad

    def __call__(self) -> list[Tensor]:
        """Sums of each token's results, and gradients, in rows."""
        with torch.set_grad_enabled(self._load.back):
            result = self._forward()
            if not self._load.back:
                return [result]
            of_tokens, of_weights, *of_matrices = torch.autograd.grad(
                result, self._inputs, self._grad
            )
        width = self._bank.hidden if self._bank.adapters is None else -1
        rows = [one.view(-1, width) if width > 0 else one for one in of_matrices]
        return [result.detach(), of_tokens, of_weights.view(1, -1), *rows]

    def _forward(self) -> Tensor:
        counted = self._dispatcher.count(
            self._slots, training=True, whole=not self._load.waited_for,
            by=self._bank.multiplied_by,
        )  # fmt: skip
        placed = self._dispatcher.place(counted)
        sent = self._dispatcher.start(self._tokens, self._weights, placed)
        with self._bank.at_work() as compute:
            return sent.through(compute)


def _apart(found: Sequence[Tensor], due: Sequence[Tensor], most: float) -> str | None:
    """How far results are from what they should be, if they are farther than that."""
    each = [
        _off(part.float(), same.float())
        for one, other in zip(found, due, strict=True)
        for part, same in zip(_parts(one), _parts(other), strict=True)
    ]
    off = float(torch.stack(each).max())  # Which is no number if any of them is none.
    return None if off <= most else f"results are {off:.2g} of themselves from torch's"


def _off(found: Tensor, due: Tensor) -> Tensor:
    """The most of all rows, each as a share of itself, or of what they are in the mean."""
    sizes = due.norm(dim=1)
    least = sizes.mean().clamp(min=torch.finfo(sizes.dtype).tiny)
    most: Tensor = ((found - due).norm(dim=1) / sizes.maximum(least)).max()
    return most


def _parts(results: Tensor) -> Iterator[Tensor]:
    """A part at a time, which is little beside all of them."""
    yield from results.split(max(1, len(results) // 16))


def _seconds(
    bank: Bank, going: _Going, names: Sequence[Products], clock: Callable[[], float]
) -> dict[Products, float]:
    """In turn, the middle one of several times each."""
    times: dict[Products, list[float]] = {name: [] for name in names}
    passes_each = 1
    for turn in range(1 + _ROUNDS):
        for name in names:
            bank.by, began = name, clock()
            for _ in range(passes_each):
                going()
            times[name].append((clock() - began) / passes_each)
        if turn == 0:  # Which says how many of them go into a sample, and is none.
            longest = max(one.pop() for one in times.values())
            passes_each = max(1, min(_MOST_PASSES, math.ceil(_SAMPLE_S / max(longest, 1e-9))))
    return {name: median(some) for name, some in times.items()}
