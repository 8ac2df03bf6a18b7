"""Kernels of our own, tried on a layer's experts where they are: whether what comes of them is what
torch makes, and how long a pass takes by either.

Experts are a layer's own, with as many rows as they will have, from sorting to sums of each token's
results, and back, on this rank alone: nothing travels. They are held against torch with rows that
are as uneven as by chance, some experts without any, and timed with equally many.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from statistics import median

import torch
from torch import Tensor

from moesaic.dist import device as devices
from moesaic.facts.job.train import Products
from moesaic.nn.bank import Bank
from moesaic.nn.dispatch import Dispatcher
from moesaic.nn.moe import MoE
from moesaic.nn.travel import Ranks

_BOTH: tuple[Products, ...] = ("torch", "triton")
_APART = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""What a row of results may differ by, as a share of itself, or of what its matrix's rows are in
the mean: some times what rounding comes to."""
_WEIGHTS, _OF_WEIGHTS = 2, 4
"""Times that, of gradients of weights, which come third: each is one sum of numbers that cancel."""
_DRAWN = 8
"""Numbers that stand for a row, sums of it with signs and sizes by chance: the differences of two
rows' are as large as those rows differ, to a third or so, and take a hundredth of the room."""
_EXPONENT = 0.7
"""Of the odds of experts by their place."""
_ROUNDS = 5
_SAMPLE_S, _MOST_PASSES = 0.02, 32
"""Passes that follow each other are timed together, as layers do in a run."""


@dataclass(frozen=True)
class Load:
    """What goes through the experts of a layer at a time."""

    tokens: int
    choices: int
    """Experts of each token, here."""
    dtype: torch.dtype
    """Of products."""
    waited_for: bool = True
    """Whether the host waits for numbers of rows in any case."""

    @staticmethod
    def of(moe: MoE, tokens: int, dtype: torch.dtype) -> Load:
        """Of a rank that has so many tokens, in a layer as it is laid out: what comes from others
        is rows, each of which is a token by itself."""
        alone = not moe.dispatcher.ranks.carriers
        rows = tokens * moe.router.top_k * moe.bank.slices.count // moe.dispatcher.computations
        choices = moe.router.top_k if alone else 1
        free = moe.dispatcher.waits_for_none and moe.router.keeps_all
        return Load(max(1, rows // choices), choices, dtype, waited_for=not free)


class Trial:
    """Experts of a bank under a load."""

    def __init__(self, bank: Bank, load: Load) -> None:
        self._bank, self._load = bank, load
        self._draws = torch.Generator(bank.arena.device)

    def fault(self) -> str | None:
        """What speaks against kernels of our own here: other results than torch's, or whatever they
        raise; or that torch's own are no numbers, which nothing can be held against."""
        self._draws.manual_seed(0)
        going = _Going(self._bank, self._load, self._uneven(), self._draws)
        with _adapters_drawn(self._bank, self._draws):
            with _by(self._bank, "torch"):
                due = list(map(self._standing_for, going()))
            if not all(bool(one.isfinite().all()) for one in due):
                return "what torch makes of numbers by chance is not finite"
            try:
                with _by(self._bank, "triton"):
                    found = list(map(self._standing_for, going()))
            except Exception as error:  # noqa: BLE001 - torch can have the run, whatever it is
                return f"{type(error).__name__}: {error}".strip().removesuffix(":")
        off = [self._off(one, other) for one, other in zip(found, due, strict=True)]
        off[_WEIGHTS] /= _OF_WEIGHTS
        if max(off) <= 1:
            return None
        return f"results are {max(off):.3g} times as far from torch's as they may be"

    def seconds(
        self, clock: Callable[[torch.device], float] = devices.now
    ) -> dict[Products, float]:
        """Of a pass, by torch and by kernels, in turn: the middle one of several times each."""
        self._draws.manual_seed(0)
        going, now = self._even(), partial(clock, self._bank.arena.device)
        times: dict[Products, list[float]] = {name: [] for name in _BOTH}
        passes_each = 1
        for turn in range(1 + _ROUNDS):
            for name, some in times.items():
                with _by(self._bank, name):
                    began = now()
                    for _ in range(passes_each):
                        going()
                    some.append((now() - began) / passes_each)
            if turn == 0:  # Which says how many of them go into a sample, and is none.
                longest_s = max(some.pop() for some in times.values())
                wanted = math.ceil(_SAMPLE_S / max(longest_s, 1e-9))
                passes_each = max(1, min(_MOST_PASSES, wanted))
        return {name: median(some) for name, some in times.items()}

    def _even(self) -> _Going:
        shape, device = (self._load.tokens, self._load.choices), self._bank.arena.device
        slots = torch.arange(math.prod(shape), device=device).view(shape) % len(self._bank.arena)
        return _Going(self._bank, self._load, slots, self._draws)

    def _uneven(self) -> Tensor:
        """Slots of each token by chance, the later ones rarer; none goes to the first, if there are
        others enough."""
        slots, device = len(self._bank.arena), self._bank.arena.device
        places = torch.arange(1, 1 + slots, device=device)
        odds = places**-_EXPONENT
        odds[0] *= slots <= self._load.choices
        draws = odds.expand(self._load.tokens, -1)
        return draws.multinomial(self._load.choices, generator=self._draws)

    def _standing_for(self, results: Tensor) -> Tensor:
        """Numbers that stand for each row."""
        width = results.shape[1]
        if width <= _DRAWN:
            return results.float()
        of_it = torch.Generator(results.device).manual_seed(width)
        drawn = torch.randn((width, _DRAWN), generator=of_it, device=results.device)
        stands: Tensor = results.float() @ drawn / math.sqrt(_DRAWN)
        return stands

    def _off(self, found: Tensor, due: Tensor) -> float:
        """By how many times what it may a row differs, at most."""
        sizes = due.norm(dim=1)
        least = sizes.mean().clamp(min=torch.finfo(sizes.dtype).tiny)
        off = float(((found - due).norm(dim=1) / sizes.maximum(least)).max())
        return math.inf if math.isnan(off) else off / _APART[self._load.dtype]


class _Going:
    """A pass of experts there and back."""

    def __init__(self, bank: Bank, load: Load, slots: Tensor, draws: torch.Generator) -> None:
        self._bank, self._load, self._slots = bank, load, slots
        self._dispatcher = Dispatcher(len(bank.arena), Ranks())
        shape, device = (load.tokens, bank.hidden), bank.arena.device
        self._tokens, self._grad = (
            torch.randn(shape, generator=draws, device=device).to(load.dtype) for _ in range(2)
        )
        self._weights = torch.rand(slots.shape, generator=draws, device=device)
        self._inputs = [self._tokens.requires_grad_(), self._weights.requires_grad_()]
        self._learns = bank if bank.adapters is None else bank.adapters
        self._inputs += [self._learns.arena] * self._learns.arena.requires_grad

    def __call__(self) -> Iterator[Tensor]:
        """Sums of each token's results, and gradients, by matrices; nothing is held meanwhile."""
        with torch.enable_grad():
            result = self._forward()
            found = torch.autograd.grad(result, self._inputs, self._grad)
        of_tokens, of_weights, *of_matrices = found
        one_by_one = (view for grad in of_matrices for _, _, view in self._learns.matrices(grad))
        return chain((result.detach(), of_tokens, of_weights), one_by_one)

    def _forward(self) -> Tensor:
        counted = self._dispatcher.count(
            self._slots, training=True, whole=not self._load.waited_for,
            by=self._bank.multiplied_by,
        )  # fmt: skip
        placed = self._dispatcher.place(counted)
        sent = self._dispatcher.start(self._tokens, self._weights, placed)
        with self._bank.at_work() as compute:
            return sent.through(compute)


@contextmanager
def _by(bank: Bank, products: Products) -> Iterator[None]:
    """A stretch in which that multiplies."""
    before, bank.by = bank.by, products
    try:
        yield
    finally:
        bank.by = before


@contextmanager
def _adapters_drawn(bank: Bank, draws: torch.Generator) -> Iterator[None]:
    """A stretch in which adapters have numbers by chance: half of a new one's are zero, and so are
    half of its gradients."""
    if bank.adapters is None:
        yield
        return
    arena = bank.adapters.arena.detach()
    kept = arena.clone()
    arena.normal_(std=1 / math.sqrt(bank.hidden), generator=draws)
    try:
        yield
    finally:
        arena.copy_(kept)
