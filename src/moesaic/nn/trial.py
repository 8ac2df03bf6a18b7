"""Kernels of our own, tried on a layer's experts where they are: whether what comes of them is what
torch makes, and how long a pass takes by either.

Experts are a layer's own, with as many rows as they will have, from sorting to sums of each token's
results, and back, on this rank alone: nothing travels. They are held against torch with numbers by
chance, which nothing of theirs can hide in, and with rows that are as uneven as by chance, of some
experts none; and timed with equally many.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
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
from moesaic.nn.router import NOBODY
from moesaic.nn.routes import Routes
from moesaic.nn.travel import Ranks

_BOTH: tuple[Products, ...] = ("torch", "triton")
_APART = {torch.float32: 1e-3, torch.float16: 5e-3, torch.bfloat16: 5e-2}
"""What a row or a column of results may differ by, as a share of itself, or of what its matrix's
are in the mean: more than rounding comes to."""
_OF_WEIGHTS = 2
"""Times that, of gradients of weights, each of which is one sum of numbers that cancel."""
_FEW = 16
"""Of fewer of them none is judged: all may be sums that come to nearly nothing."""
_ASKEW = 0.4
"""What of that all results together may be larger or smaller by: rounding goes either way."""
_ENOUGH = 1024
"""Numbers whose rounding is none in the mean."""
_GIVEN_UP = 0.2
"""Of choices, where those may be dropped, or be for other ranks."""
_DRAWN = 8
"""Numbers that stand for a row or a column, sums of it with signs and sizes by chance: the
differences of two are as large as those two differ, to a third or so, and take little room."""
_EXPONENT = 0.7
"""Of the odds of experts by their place."""
_ROWS = 0, 1, 17, 33, 65, 513
"""Of a slot in the mean, for most of which tiles are of other sizes: a pass has now more rows, now
fewer; with none it is one token."""
_AT_MOST = 4
"""Times its load that a rank is tried with."""
_LARGE = 30.0
"""Tokens, for once: gates are then where exponentials end, as in trained models some are."""
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
    weighted: bool = True
    """Whether experts add up the results of a token."""
    waited_for: bool = True
    """Whether the host waits for numbers of rows in any case."""
    learns: bool = True
    """Whether steps have it, and not validation alone."""
    again: bool = False
    """Whether backward computes results anew."""
    large: float = 1.0
    """What tokens are multiplied by, and their gradients divided."""

    @staticmethod
    def all_of(moe: MoE, tokens: int, dtype: torch.dtype, *, again: bool = False) -> list[Load]:
        """Those of a rank that has so many tokens, in a layer as it is laid out: what comes from
        others is rows, each of which is a token by itself, unless it comes once for several
        experts; what stays, where it does not go along, is tokens."""
        dispatcher, router = moe.dispatcher, moe.router
        alone, times = not dispatcher.ranks.carriers, min(dispatcher.computations, 2)
        rows = tokens * router.top_k * moe.bank.slices.count / dispatcher.computations
        choices = min(router.top_k, len(moe.bank.arena))

        def load(weighted: bool) -> Load:
            each = choices if weighted else 1
            some = max(1, math.ceil(rows / each))
            return Load(some, each, dtype, times, weighted, again=again)

        if alone or dispatcher.by_visits:
            free = [
                router.keeps_all and dispatcher.waits_for_none(training=training)
                for training in (True, False)
            ]
            steps = replace(load(True), waited_for=not free[0])
            # Validation does without a capacity.
            validation = replace(load(True), waited_for=not free[1], learns=False)
            return [steps, *[validation] * (free[0] != free[1])]
        return [load(False), *[load(True)] * (dispatcher.computations > dispatcher.chunks)]

    def with_rows(self, each: float, slots: int) -> Load:
        """With so many rows a slot, in the mean."""
        return replace(self, tokens=max(1, math.ceil(each * slots / self.choices)))


class Trial:
    """Experts of a bank under loads. Their matrices get numbers by chance, and keep them."""

    def __init__(self, bank: Bank, loads: Sequence[Load]) -> None:
        self._bank, self._loads, self._slots = bank, loads, len(bank.arena)
        self._draws = torch.Generator(bank.arena.device)
        self._drawn = dict[int, Tensor]()

    def fault(self) -> str | None:
        """What speaks against kernels of our own here: other results than torch's, or whatever they
        raise; or that torch's own are no numbers, which nothing can be held against."""
        self._draws.manual_seed(0)
        adapters, std = self._bank.adapters, 1 / math.sqrt(self._bank.hidden)
        for arena in (self._bank.arena, *([] if adapters is None else [adapters.arena])):
            arena.detach().normal_(std=std, generator=self._draws)
        return next(filter(None, map(self._fault_of, self._loads)), None)

    def _fault_of(self, load: Load) -> str | None:
        tries = self._tries(load)
        return next(filter(None, (self._fault(*one) for one in tries)), None)

    def _tries(self, load: Load) -> Iterator[tuple[_Going, _Going]]:
        """Passes, and with each one of as many tokens whose rows lie otherwise."""
        for some, empty in self._by_chance(load):
            yield self._uneven(some, empty), self._uneven(some, {slot + 1 for slot in empty})
        full = self._just_full(load)
        if full is not None:
            for moved in (False, True):
                yield self._even(full, moved=moved), self._uneven(full, set())

    def _by_chance(self, load: Load) -> Iterator[tuple[Load, set[int]]]:
        """With the first slot empty, the last one, two of every four, none, and all but as few as
        can be; with more and fewer rows; and with larger tokens."""
        slots, last = range(self._slots), self._slots - 1
        each = self._each(load)
        yield replace(load, tokens=load.tokens * 7 // 8 | 1), {0}
        yield replace(load, tokens=load.tokens * 9 // 8 | 1), {last}
        yield replace(load, tokens=load.tokens | 1), {slot for slot in slots if slot % 4 in (1, 2)}
        yield load, set()
        if load.choices < self._slots:
            yield load, set(slots[load.choices :])
        for rows in _ROWS:
            if rows <= _AT_MOST * each:
                yield load.with_rows(rows, self._slots), set()
        yield replace(load, large=_LARGE), set()

    def _each(self, load: Load) -> float:
        """Rows of a slot, in the mean."""
        return load.tokens * load.choices / self._slots

    def _just_full(self, load: Load) -> Load | None:
        """About as many, that just fill tiles of every slot; none, where tiles are far higher."""
        from moesaic.dist import tiles

        each = self._each(load)
        high = tiles.blocks(load.dtype, each).rows
        if high > _AT_MOST * each:
            return None
        rows = max(1, round(each / high)) * high * self._slots
        return replace(load, tokens=math.ceil(rows / load.choices))

    def _fault(self, going: _Going, others: _Going) -> str | None:
        load = going.load
        with _by(self._bank, "torch"):
            due = [self._standing_for(one) for one in going()]
            if not _finite(due):
                if load.large > 1 and load.dtype == torch.float16:  # Which has no room for them.
                    return None
                return f"what torch makes of numbers by chance is not finite in {load.dtype}"
            # What kernels leave as it was must not be what torch has left there.
            deque(others(), maxlen=0)
        try:
            with _by(self._bank, "triton"):
                found = [self._standing_for(one) for one in going()]
                # Nor may they go by what they know of as many rows that lay otherwise.
                deque(others(), maxlen=0)
                again = [self._standing_for(one) for one in going()]
        except Exception as error:  # noqa: BLE001 - torch can have the run, whatever it is
            return said(error)
        if not (_finite(found) and _finite(again)):
            return "results are no numbers where torch's are"
        times = max(_times(one, due, load.dtype, going.of_weights) for one in (found, again))
        if math.isinf(times):
            return "results are other than zero where torch's are zero"
        if times > 1:
            return f"results are {times:.3g} times as far from torch's as they may be"
        return None

    def _standing_for(self, results: Tensor) -> tuple[Tensor, ...]:
        """Numbers that stand for each row, and for each column, where those are longer."""
        if min(results.shape) <= _DRAWN:
            return results.float(), results.float().T
        for size in results.shape:
            if size not in self._drawn:
                self._drawn[size] = _drawn(size, results.device)
        height, width = (self._drawn[size] for size in results.shape)
        wide = results.float()
        return wide @ width, wide.T @ height

    def seconds(
        self, clock: Callable[[torch.device], float] = devices.now
    ) -> dict[Products, float]:
        """Of a pass, by torch and by kernels, in turn: the middle one of several times each."""
        self._draws.manual_seed(0)
        going = [self._even(load) for load in self._loads if load.learns]
        now = partial(clock, self._bank.arena.device)
        times: dict[Products, list[float]] = {name: [] for name in _BOTH}
        passes_each = 1
        for turn in range(1 + _ROUNDS):
            for name, some in times.items():
                with _by(self._bank, name):
                    began = now()
                    for _ in range(passes_each):
                        for one in going:
                            one.there_and_back()
                    some.append((now() - began) / passes_each)
            if turn == 0:  # Which says how many of them go into a sample, and is none.
                longest_s = max(some.pop() for some in times.values())
                wanted = math.ceil(_SAMPLE_S / max(longest_s, 1e-9))
                passes_each = max(1, min(_MOST_PASSES, wanted))
        return {name: median(some) for name, some in times.items()}

    def _even(self, load: Load, *, moved: bool = False) -> _Going:
        """Slots in turn, in each computation alike; of every two the first gets a row of the other,
        if some are to be `moved`, or the only one gets one more."""
        tokens = load.tokens + (moved and self._slots == 1)
        shape = tokens, load.choices
        slots = torch.arange(math.prod(shape), device=self._bank.arena.device) % self._slots
        if moved:
            last = slots[-self._slots :]
            last -= last % 2
        return _Going(self._bank, load, slots.view(shape).repeat(load.times, 1), self._draws)

    def _uneven(self, load: Load, empty: set[int]) -> _Going:
        """Slots of each token by chance, the later ones rarer; none goes to those that are to be
        empty, others in each computation, if there are enough or choices may be given up."""
        slots, device = self._slots, self._bank.arena.device
        parts, spares = list[Tensor](), load.weighted and load.waited_for and bool(empty)
        for turn in range(load.times):
            odds = torch.arange(1, 1 + slots, device=device) ** -_EXPONENT
            left_out = torch.zeros(slots + 1, dtype=torch.bool, device=device)
            moved = turn * (1 if len(empty) == 1 else 2)  # Of two in four, the other two.
            left_out[[(slot + moved) % slots for slot in empty]] = True
            if len(empty) + load.choices <= slots:
                odds[left_out[:slots]] = 0
            each = odds.expand(load.tokens, -1)
            chosen = each.multinomial(load.choices, generator=self._draws)
            if spares:
                draws = torch.rand(chosen.shape, generator=self._draws, device=device)
                draws[:1] = 1.0
                given_up = draws < _GIVEN_UP
                if slots > len(empty):
                    given_up |= left_out[chosen]
                chosen = chosen.masked_fill(given_up, NOBODY)
            parts.append(chosen)
        return _Going(self._bank, load, torch.cat(parts), self._draws)


def _times(
    found: Sequence[tuple[Tensor, ...]], due: Sequence[tuple[Tensor, ...]], dtype: torch.dtype,
    of_weights: int,
) -> float:  # fmt: skip
    """How many times as far some results are from those that are due as rounding may have it."""
    least, off, askew = torch.finfo(dtype).smallest_normal, list[Tensor](), list[Tensor]()
    for one, right in zip(found, due, strict=True):
        pairs = list(zip(one, right, strict=True))
        off.append(torch.stack([_off(*pair, least) for pair in pairs]).max())
        askew.append(torch.stack([_askew(*pair) for pair in pairs]).max() / _ASKEW)
    each: list[float] = torch.stack(off + askew).nan_to_num(nan=math.inf, posinf=math.inf).tolist()
    few = due[of_weights][0].numel() < _FEW
    each[of_weights] = 0.0 if few else each[of_weights] / _OF_WEIGHTS
    return max(each) / _APART[dtype]


def _finite(results: Sequence[tuple[Tensor, ...]]) -> bool:
    return bool(torch.stack([one.isfinite().all() for pair in results for one in pair]).all())


def said(error: Exception) -> str:
    """What it is, for a person, in a line."""
    return " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")


class _Going:
    """A pass of experts there and back."""

    of_weights = 2
    """Of results the gradients of weights."""

    def __init__(self, bank: Bank, load: Load, slots_NK: Tensor, draws: torch.Generator) -> None:
        self._bank, self.load, self._slots = bank, load, slots_NK
        self._dispatcher = Dispatcher(len(bank.arena), Ranks())
        shape, device = (len(slots_NK), bank.hidden), bank.arena.device
        self._tokens, self._grad = (
            (torch.randn(shape, generator=draws, device=device) * size).to(load.dtype)
            for size in (load.large, 1 / load.large)
        )
        self._weights = torch.rand(slots_NK.shape, generator=draws, device=device)
        inner = torch.randn((len(slots_NK), 2 * bank.ffn), generator=draws, device=device)
        self._inner = (inner * load.large).to(load.dtype)
        self._learns = bank if bank.adapters is None else bank.adapters
        self._inputs = [self._tokens.requires_grad_()]
        self._inputs += [self._weights.requires_grad_()] * load.weighted
        self._inputs += [self._learns.arena] * self._learns.arena.requires_grad

    def there_and_back(self) -> tuple[Tensor, ...]:
        """Sums of each token's results, and gradients of tokens, of weights if there are some, and
        of what learns."""
        with torch.enable_grad():
            if self.load.again:
                self._forward()
            result = self._forward()
            return result.detach(), *torch.autograd.grad(result, self._inputs, self._grad)

    def __call__(self) -> Iterator[Tensor]:
        """The same as matrices, one after another, and what comes where no backward follows, or
        where it comes in halves."""
        result, of_tokens, *others = self.there_and_back()
        of_weights = others.pop(0) if self.load.weighted else of_tokens
        yield from (result, of_tokens, of_weights)
        for grad in others:
            for _, _, view in self._learns.matrices(grad):
                yield view
        with torch.no_grad():
            yield self._forward()
            yield activate(self._inner, self._bank.multiplied_by)

    def _forward(self) -> Tensor:
        times, columns = self.load.times, (self._tokens, self._slots, self._weights)
        parts = zip(*(one.chunk(times) for one in columns), strict=True)
        with self._bank.at_work(times) as compute:
            return torch.cat([self._computed(compute, *part) for part in parts])

    def _computed(
        self, compute: Compute, tokens_NH: Tensor, slots_NK: Tensor, weights_NK: Tensor
    ) -> Tensor:
        if not self.load.weighted:  # As rows that come from others.
            counts = slots_NK.reshape(-1).bincount(minlength=len(self._bank.arena)).cpu()
            order = slots_NK.reshape(-1).argsort(stable=True)
            return compute(tokens_NH, Routes(counts, order), None)
        by, free = self._bank.multiplied_by, not self.load.waited_for
        counted = self._dispatcher.count(slots_NK, training=True, whole=free, by=by)
        placed = self._dispatcher.place(counted)
        return self._dispatcher.start(tokens_NH, weights_NK, placed).through(compute)


def _drawn(size: int, device: torch.device) -> Tensor:
    """The same for all that is as long."""
    draws = torch.Generator(device).manual_seed(size)
    return torch.randn((size, _DRAWN), generator=draws, device=device) / math.sqrt(_DRAWN)


def _off(found: Tensor, due: Tensor, least: float) -> Tensor:
    """The most by which a row differs, as a share of itself, or of what they are in the mean, as
    numbers that are no less than the `least` that a type has in full."""
    sizes = due.norm(dim=1)
    floor = sizes.mean().clamp(min=least * math.sqrt(_DRAWN))
    shares: Tensor = (found - due).norm(dim=1) / sizes.maximum(floor)
    return shares.max()


def _askew(found: Tensor, due: Tensor) -> Tensor:
    """By what share all of it is too large or too small, where it is enough to say so."""
    square = (due * due).sum()
    if due.numel() < _ENOUGH:
        return torch.zeros_like(square)
    askew = ((found * due).sum() / square - 1).abs()
    return torch.where(square > 0, askew, torch.zeros_like(square))


@contextmanager
def _by(bank: Bank, products: Products) -> Iterator[None]:
    """A stretch in which that multiplies."""
    before, bank.by = bank.by, products
    try:
        yield
    finally:
        bank.by = before
