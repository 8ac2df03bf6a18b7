"""How fast one expert layer is on this machine, beside the least that its products and the bytes of
its experts can take."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, Protocol

import torch
from torch import Tensor

from moesaic.base.errors import ConfigError
from moesaic.dist import device as devices
from moesaic.dist.probe.timing import seconds
from moesaic.dist.products import engine, product
from moesaic.facts.job import ModelConfig, RoutingConfig
from moesaic.facts.job.train import GroupedMM
from moesaic.facts.plan import block_names
from moesaic.models.lm import LanguageModel
from moesaic.nn.context import NARROW, Context, Rotary, computing_in
from moesaic.nn.moe import MoE

_FEWEST_ROWS, _MOST_ROWS = 64, 4096
"""Of products, the fastest of which is the limit."""
_LARGEST_ON_CPU = 1 << 35
"""Multiplications of a product there at most: wider ones are no faster."""
_STD = 0.02
_PASSES = 13
"""Times the pass forward that a batch takes at least: one to begin with, three of them, and three
forward and backward."""
_ENOUGH = 60
"""Passes after which more of them say nothing new."""
_UNTRIED = 1.5
"""Times what it should take, of a batch that was not tried."""
_REACHED = 0.5
"""Of the limit, where nothing is measured yet."""
_SHORT_S = 0.5
"""What is spent on a batch in any case, if there is so much."""
_DEAR = 3
"""Times a later pass that a first one may take."""
_PATIENCE_S = 10.0
"""For a limit, whatever time there is."""
_SPARE = 1.3
"""Of time, for a machine that is not always as fast."""


@dataclass(frozen=True)
class Limit:
    """What a device does at best in one type of numbers."""

    dtype: str
    flops: float
    """In a second, in one product of as many rows as it likes."""
    bytes: float
    """Of fp32 weights that it reads in a second."""


@dataclass(frozen=True)
class Least:
    """What a batch of one size takes at least."""

    dtype: str
    tokens: int
    each: float
    """Tokens of an expert, on average."""
    forward_s: float
    step_s: float
    """Forward and backward."""
    binds: str
    """What forward waits for: products, or memory."""


@dataclass(frozen=True)
class Speed:
    """What such a batch does take."""

    least: Least
    forward_s: float
    step_s: float

    @property
    def share(self) -> float:
        """Of the limit, forward."""
        return self.least.forward_s / self.forward_s

    @property
    def step_share(self) -> float:
        """Of the limit, with backward."""
        return self.least.step_s / self.step_s


@dataclass(frozen=True)
class LeftOut:
    """A batch that is not measured."""

    least: Least
    why: Literal["time", "memory"]
    """What there is too little of."""
    needs: float
    """Seconds, or bytes beside the experts."""


class Batch(Protocol):
    """A batch that can go through a layer."""

    first_s: float
    """What it took to go through, forward, to begin with."""

    def measured(self, budget_s: float) -> tuple[float, float]:
        """Seconds forward, and with backward, found in so many more than it needs at least."""


class Layer(Protocol):
    """What `measured` measures."""

    @property
    def room_bytes(self) -> int:
        """Memory for a batch."""

    def batch_bytes(self, tokens: int) -> int:
        """What one of so many tokens takes of it, about."""

    def least(self, limit: Limit, tokens: int) -> Least:
        """What it takes at least."""

    def batch(self, dtype: str, tokens: int, most_s: float) -> Batch:
        """One that has gone through once, or twice if the first pass took no more than that."""

    def clock(self) -> float:
        """Seconds, all work that was asked for being done."""


def measured(
    layer: Layer,
    limit: Limit,
    sizes: Sequence[int],
    budget_s: float,
    began: Callable[[int], object] = lambda _: None,
) -> Iterator[Speed | LeftOut]:
    """The speeds of batches of these `sizes`, as they come, within about so many seconds; those for
    which that, or memory, is too little are left out.

    Args:
        layer: what they go through.
        limit: what they are held against.
        sizes: tokens of each.
        budget_s: for all of them.
        began: is told of each that is about to be tried.
    """
    if layer.batch_bytes(1) <= layer.room_bytes:
        layer.batch(limit.dtype, 1, 0.0)  # The first makes what later ones find: imports, threads.
    left_s, reached = budget_s, _REACHED
    for place, tokens in enumerate(sizes):
        began(tokens)
        least, size = layer.least(limit, tokens), layer.batch_bytes(tokens)
        if size > layer.room_bytes:
            yield LeftOut(least, "memory", size)
            continue
        if _PASSES * least.forward_s > left_s:  # Not even at best: no need to try.
            yield LeftOut(least, "time", _UNTRIED * _PASSES * least.forward_s / reached)
            continue
        start = layer.clock()
        batch = layer.batch(limit.dtype, tokens, _DEAR * left_s / _PASSES)
        needs_s = _PASSES * batch.first_s
        if needs_s > left_s:
            yield LeftOut(least, "time", needs_s)
        else:
            later = [layer.least(limit, other).forward_s / reached for other in sizes[place + 1 :]]
            share_s = _share_s(left_s, needs_s, [_PASSES * one_s for one_s in later])
            most_s = max(_ENOUGH * batch.first_s, _SHORT_S)
            more_s = min(share_s, most_s) - needs_s
            speed = Speed(least, *batch.measured(max(0.0, more_s)))
            reached = min(speed.share, 1.0)
            yield speed
        left_s -= layer.clock() - start


def _share_s(left_s: float, needs_s: float, later_s: Sequence[float]) -> float:
    """Of the time that is left, for a batch that needs so much, when others are to come: what it
    needs, and a part of what they will not need."""
    spare_s = left_s - needs_s
    for one_s in sorted(later_s):
        if one_s > spare_s:  # This one, and what takes longer, will not be measured.
            break
        spare_s -= one_s
    return needs_s + spare_s / (1 + len(later_s))


def enough_s(found: Sequence[Speed | LeftOut]) -> float:
    """In how many seconds all of these batches can be measured, with some to spare."""
    return _SPARE * sum(
        _PASSES * one.forward_s if isinstance(one, Speed) else one.needs
        for one in found
        if isinstance(one, Speed) or one.why == "time"
    )


def better(one: Sequence[Limit], two: Sequence[Limit]) -> list[Limit]:
    """Of limits that were found twice, the higher: the machine may have been busy."""
    read = max(limit.bytes for limit in (*one, *two))
    pairs = zip(one, two, strict=True)
    return [Limit(first.dtype, max(first.flops, other.flops), read) for first, other in pairs]


class ExpertLayer:
    """One expert layer of a model, with its router and shared experts; each expert gets as many
    tokens as any other."""

    def __init__(
        self, model: ModelConfig, device: torch.device, by: Literal["auto"] | GroupedMM = "auto"
    ) -> None:
        """`by` that its experts are multiplied, if it is on a GPU."""
        self._model, self._device = model, device
        self.arena_bytes = 4 * model.experts * 3 * model.ffn * model.hidden
        self._refuse_too_much()
        index = model.expert_layers[0]
        with torch.device("meta"):
            whole = LanguageModel(
                model, RoutingConfig(router="balanced"), names=[block_names(model)[1 + index]]
            )
        whole.materialise(device)
        ((_, self._moe),) = whole.expert_layers()
        self._moe.bank.by = by
        _fill(self._moe)

    def engines(self, dtypes: Sequence[str]) -> dict[str, str]:
        """What multiplies its experts in each type of numbers, for a person."""
        by = self._moe.bank.by
        return {name: engine(self._device, NARROW.get(name, torch.float32), by) for name in dtypes}

    def limits(self, dtypes: Sequence[str], budget_s: float) -> list[Limit]:
        """What the device does at best, each found in about so many seconds."""
        arena, hidden = self._moe.bank.arena.detach(), self._model.hidden
        rows, one = arena.view(-1, hidden), arena.new_ones(hidden)
        ways = arena.sum, partial(torch.mv, rows, one)  # Which reads faster depends on the device.
        read = arena.nbytes / min(self._seconds(way, budget_s / 2) for way in ways)
        return [Limit(dtype, self._flops(dtype, budget_s), read) for dtype in dtypes]

    def least(self, limit: Limit, tokens: int) -> Least:
        """Of the experts' own products and weights, each weight read once forward and once
        backward, and its gradient written."""
        model = self._model
        one = 3 * model.ffn * model.hidden
        products_s = 2 * tokens * (model.top_k + model.shared) * one / limit.flops
        busy = min(model.experts, tokens * model.top_k) + model.shared
        read_s = 4 * busy * one / limit.bytes
        written_s = 4 * (model.experts + model.shared) * one / limit.bytes
        return Least(
            limit.dtype, tokens, tokens * model.top_k / model.experts,
            max(products_s, read_s), max(3 * products_s, 2 * read_s + written_s),
            "products" if products_s > read_s else "memory",
        )  # fmt: skip

    def against(self, limits: Sequence[Limit], speeds: Sequence[Speed]) -> list[Speed]:
        """`speeds` beside these limits."""
        by_dtype = {limit.dtype: limit for limit in limits}
        return [
            replace(one, least=self.least(by_dtype[one.least.dtype], one.least.tokens))
            for one in speeds
        ]

    @property
    def room_bytes(self) -> int:
        """Memory of the device beside experts and their gradients."""
        return devices.memory_bytes(self._device) - 2 * self.arena_bytes

    def batch_bytes(self, tokens: int) -> int:
        """What a batch holds forward and backward, about: numbers of each row and of each token."""
        model, rows = self._model, tokens * self._model.top_k
        of_tokens = 5 * model.hidden + 3 * (model.experts + model.shared * model.ffn)
        return 4 * (rows * (2 * model.hidden + 3 * model.ffn) + tokens * of_tokens)

    def batch(self, dtype: str, tokens: int, most_s: float) -> Batch:
        """So many tokens that have gone through once, or twice, for much of a first pass may be
        preparation."""
        return _Batch(*self._calls(dtype, tokens), self.clock, most_s)

    def clock(self) -> float:
        """Seconds, all work of the device being done."""
        return devices.now(self._device)

    def _refuse_too_much(self) -> None:
        """Experts, their gradients, and as much again for rows and copies of a few experts."""
        needed, there = 3 * self.arena_bytes, devices.memory_bytes(self._device)
        if needed > there:
            model, fits = self._model, self._model.experts * there // needed
            remedy = f"--set model.experts={fits}, or fewer"
            if fits < model.top_k:
                remedy = (
                    f"not even the {model.top_k} of a token fit, so lower model.hidden or model.ffn"
                )
            raise ConfigError(
                f"{model.experts} experts of model.hidden = {model.hidden} and "
                f"model.ffn = {model.ffn}, with their gradients, take {needed / 1e9:.0f} GB "
                f"and the device has {there / 1e9:.0f}: {remedy}"
            )

    def _seconds(self, work: Callable[[], object], budget_s: float) -> float:
        return seconds(work, self.clock, budget_s)

    def _calls(self, dtype: str, tokens: int) -> tuple[Callable[[], object], Callable[[], object]]:
        x = torch.randn(1, tokens, self._model.hidden, device=self._device)
        context = Context(Rotary(x, x))  # Nothing here turns anything.
        context.training = True
        context.samples = torch.zeros(1, dtype=torch.int64, device=self._device)
        context.positions = torch.arange(tokens, device=self._device)
        parameters = list(self._moe.parameters())

        def forward() -> Tensor:
            context.layers.clear()
            with computing_in(dtype, self._device):
                result: Tensor = self._moe(x, context)
            return result

        def alone() -> None:
            with torch.no_grad():
                forward()

        def step() -> None:
            forward().backward(grad)
            for leaf in (x, *parameters):
                leaf.grad = None

        grad = torch.randn_like(x)
        x.requires_grad_()
        return alone, step

    def _flops(self, dtype: str, budget_s: float) -> float:
        """The best of products of ever more rows, as many as there is time for; of most rows in any
        case, unless fewer have taken so long that it would be all of the time and more."""
        hidden, inner = self._model.hidden, 3 * self._model.ffn
        if self._device.type == "cpu":
            inner = max(_FEWEST_ROWS, min(inner, _LARGEST_ON_CPU // (_MOST_ROWS * hidden)))
        kind = NARROW.get(dtype, torch.float32)
        rows = torch.randn(_MOST_ROWS, hidden, device=self._device).to(kind)
        weight = torch.randn(inner, hidden, device=self._device).to(kind)

        def flops(number: int) -> float:
            work = partial(product, rows[:number], weight, transposed=True)
            return 2 * number * hidden * inner / self._seconds(work, 0.0)

        best, number, until = 0.0, _FEWEST_ROWS, self.clock() + budget_s
        while not best or (number < _MOST_ROWS and self.clock() < until):
            best = max(best, flops(number))
            number *= 4
        longest_s = 3 * 2 * _MOST_ROWS * hidden * inner / best
        return max(best, flops(_MOST_ROWS)) if longest_s < max(budget_s, _PATIENCE_S) else best


class _Batch:
    """A batch on its way through a layer."""

    def __init__(
        self,
        forward: Callable[[], object],
        step: Callable[[], object],
        clock: Callable[[], float],
        most_s: float,
    ) -> None:
        self._forward, self._step, self._clock = forward, step, clock
        self.first_s = self._once()
        if self.first_s < most_s:
            self.first_s = min(self.first_s, self._once())

    def measured(self, budget_s: float) -> tuple[float, float]:
        """Seconds forward, and with backward, found in so many more than it needs at least."""
        return (
            seconds(self._forward, self._clock, budget_s / 3),
            seconds(self._step, self._clock, 2 * budget_s / 3),
        )

    def _once(self) -> float:
        start = self._clock()
        self._forward()
        return self._clock() - start


def _fill(moe: MoE) -> None:
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.normal_(std=_STD)
        for buffer in moe.buffers():
            buffer.zero_()
