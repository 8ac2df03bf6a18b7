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
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import torch
from torch import Tensor

from moesaic.dist import device as devices
from moesaic.facts.job.train import Products
from moesaic.nn.bank import Bank, Compute
from moesaic.nn.dispatch import Dispatcher
from moesaic.nn.grouped import activate
from moesaic.nn.moe import MoE
from moesaic.nn.routes import Routes
from moesaic.nn.travel import Ranks

_BOTH: tuple[Products, ...] = ("torch", "triton")
_APART = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""What a row or a column of results may differ by, as a share of itself, or of what its matrix's
are in the mean: more than rounding comes to."""
_OF_WEIGHTS = 4
"""Times that, of gradients of weights, each of which is one sum of numbers that cancel."""
_DRAWN = 8
"""Numbers that stand for a row or a column, sums of it with signs and sizes by chance: the
differences of two are as large as those two differ, to a third or so, and take little room."""
_EXPONENT = 0.7
"""Of the odds of experts by their place."""
_EIGHTHS = 7, 9
"""Of the load that are tried where a rank's rows change from pass to pass: tiles may be others."""
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
    times: int = 1
    """Computations of a pass, each of so many tokens, whose gradients of matrices are added up."""
    alone: bool = False
    """Whether all tokens are this rank's own, and as many in every pass."""
    weighted: bool = True
    """Whether experts add up the results of a token."""
    waited_for: bool = True
    """Whether the host waits for numbers of rows in any case."""

    @staticmethod
    def of(moe: MoE, tokens: int, dtype: torch.dtype) -> Load:
        """Of a rank that has so many tokens, in a layer as it is laid out: what comes from others
        is rows, each of which is a token by itself, unless it comes once for several experts."""
        dispatcher = moe.dispatcher
        alone, times = not dispatcher.ranks.carriers, min(dispatcher.computations, 2)
        rows = tokens * moe.router.top_k * moe.bank.slices.count // dispatcher.computations
        weighted = alone or dispatcher.by_visits
        choices = min(moe.router.top_k, len(moe.bank.arena)) if weighted else 1
        free = dispatcher.waits_for_none and moe.router.keeps_all
        return Load(max(1, rows // choices), choices, dtype, times, alone, weighted, not free)


class Trial:
    """Experts of a bank under a load."""

    def __init__(self, bank: Bank, load: Load) -> None:
        self._bank, self._load = bank, load
        self._draws = torch.Generator(bank.arena.device)

    def fault(self) -> str | None:
        """What speaks against kernels of our own here: other results than torch's, or whatever they
        raise; or that torch's own are no numbers, which nothing can be held against."""
        self._draws.manual_seed(0)
        load = self._load
        eighths = [8] if load.alone else _EIGHTHS
        loads = [replace(load, tokens=max(1, load.tokens * one // 8)) for one in eighths]
        with _adapters_drawn(self._bank, self._draws):
            return next(filter(None, map(self._fault, loads)), None)

    def _fault(self, load: Load) -> str | None:
        going = self._uneven(load, empty=0)
        with _by(self._bank, "torch"):
            due = [_standing_for(one) for one in going()]
            finite = [one.isfinite().all() for pair in due for one in pair]
            if not bool(torch.stack(finite).all()):
                return f"what torch makes of numbers by chance is not finite in {load.dtype}"
            # What kernels leave as it was must not be what torch has left there.
            for _ in self._uneven(load, empty=-1)():
                pass
        try:
            with _by(self._bank, "triton"):
                found = [_standing_for(one) for one in going()]
        except Exception as error:  # noqa: BLE001 - torch can have the run, whatever it is
            return said(error)
        off = [max(map(_off, *pairs)) for pairs in zip(found, due, strict=True)]
        off[going.of_weights] /= _OF_WEIGHTS
        times = max(off) / _APART[load.dtype]
        if times <= 1:
            return None
        return f"results are {times:.3g} times as far from torch's as they may be"

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
                        going.there_and_back()
                    some.append((now() - began) / passes_each)
            if turn == 0:  # Which says how many of them go into a sample, and is none.
                longest_s = max(some.pop() for some in times.values())
                wanted = math.ceil(_SAMPLE_S / max(longest_s, 1e-9))
                passes_each = max(1, min(_MOST_PASSES, wanted))
        return {name: median(some) for name, some in times.items()}

    def _even(self) -> _Going:
        load = self._load
        shape, device = (load.tokens * load.times, load.choices), self._bank.arena.device
        slots = torch.arange(math.prod(shape), device=device).view(shape) % len(self._bank.arena)
        return _Going(self._bank, load, slots, self._draws)

    def _uneven(self, load: Load, empty: int) -> _Going:
        """Slots of each token by chance, the later ones rarer; none goes to one of them, if there
        are others enough."""
        slots, device = len(self._bank.arena), self._bank.arena.device
        odds = torch.arange(1, 1 + slots, device=device) ** -_EXPONENT
        odds[empty] *= slots <= load.choices
        each = odds.expand(load.tokens * load.times, -1)
        chosen = each.multinomial(load.choices, generator=self._draws)
        return _Going(self._bank, load, chosen, self._draws)


def said(error: Exception) -> str:
    """What it is, for a person."""
    return f"{type(error).__name__}: {error}".strip().removesuffix(":")


class _Going:
    """A pass of experts there and back."""

    of_weights = 2
    """Of results the gradients of weights."""

    def __init__(self, bank: Bank, load: Load, slots_NK: Tensor, draws: torch.Generator) -> None:
        self._bank, self._load, self._slots = bank, load, slots_NK
        self._dispatcher = Dispatcher(len(bank.arena), Ranks())
        shape, device = (len(slots_NK), bank.hidden), bank.arena.device
        self._tokens, self._grad = (
            torch.randn(shape, generator=draws, device=device).to(load.dtype) for _ in range(2)
        )
        self._weights = torch.rand(slots_NK.shape, generator=draws, device=device)
        inner = torch.randn((len(slots_NK), 2 * bank.ffn), generator=draws, device=device)
        self._inner = inner.to(load.dtype)
        self._learns = bank if bank.adapters is None else bank.adapters
        self._inputs = [self._tokens.requires_grad_()]
        self._inputs += [self._weights.requires_grad_()] * load.weighted
        self._inputs += [self._learns.arena] * self._learns.arena.requires_grad

    def there_and_back(self) -> tuple[Tensor, ...]:
        """Sums of each token's results, and gradients of tokens, of weights if there are some, and
        of what learns."""
        with torch.enable_grad():
            result = self._forward()
            return result.detach(), *torch.autograd.grad(result, self._inputs, self._grad)

    def __call__(self) -> Iterator[Tensor]:
        """The same as matrices, one after another, and what comes where no backward follows, or
        where it comes in halves."""
        result, of_tokens, *others = self.there_and_back()
        of_weights = others.pop(0) if self._load.weighted else of_tokens
        yield from (result, of_tokens, of_weights)
        for grad in others:
            for _, _, view in self._learns.matrices(grad):
                yield view
        with torch.no_grad():
            yield self._forward()
            yield activate(self._inner, self._bank.multiplied_by)

    def _forward(self) -> Tensor:
        times, columns = self._load.times, (self._tokens, self._slots, self._weights)
        parts = zip(*(one.chunk(times) for one in columns), strict=True)
        with self._bank.at_work(times) as compute:
            return torch.cat([self._computed(compute, *part) for part in parts])

    def _computed(
        self, compute: Compute, tokens_NH: Tensor, slots_NK: Tensor, weights_NK: Tensor
    ) -> Tensor:
        if not self._load.weighted:  # As rows that come from others.
            counts = slots_NK.reshape(-1).bincount(minlength=len(self._bank.arena)).cpu()
            order = slots_NK.reshape(-1).argsort(stable=True)
            return compute(tokens_NH, Routes(counts, order), None)
        by, free = self._bank.multiplied_by, not self._load.waited_for
        counted = self._dispatcher.count(slots_NK, training=True, whole=free, by=by)
        placed = self._dispatcher.place(counted)
        return self._dispatcher.start(tokens_NH, weights_NK, placed).through(compute)


def _standing_for(results: Tensor) -> tuple[Tensor, ...]:
    """Numbers that stand for each row, and for each column, where those are longer."""
    if min(results.shape) <= _DRAWN:
        return (results.float(),)
    wide = results.float()
    height, width = (_drawn(size, results.device) for size in results.shape)
    return wide @ width, wide.T @ height


def _drawn(size: int, device: torch.device) -> Tensor:
    """The same for all that is as long."""
    draws = torch.Generator(device).manual_seed(size)
    return torch.randn((size, _DRAWN), generator=draws, device=device) / math.sqrt(_DRAWN)


def _off(found: Tensor, due: Tensor) -> float:
    """The most by which a row differs, as a share of itself, or of what they are in the mean."""
    sizes = due.norm(dim=1)
    least = sizes.mean().clamp(min=torch.finfo(sizes.dtype).tiny)
    off = float(((found - due).norm(dim=1) / sizes.maximum(least)).max())
    return math.inf if math.isnan(off) else off


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
