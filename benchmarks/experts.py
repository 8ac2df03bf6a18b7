"""Experts of one layer on one rank: ours, transformers', and a dense product of as many flops."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import measure
from benchmarks.measure import figure
from benchmarks.training import TRANSFORMERS
from moesaic.dist import device as devices
from moesaic.dist.products import product
from moesaic.nn.bank import Bank
from moesaic.nn.dispatch import Dispatcher
from moesaic.nn.grouped import arena_views
from moesaic.nn.travel import Ranks

MODES = ("grouped_mm", "eager")
ROUNDS = 7
FAR = 2.0
"""By how much a way of transformers is slower than the other to be left out."""
ZIPF = 1.0
DRAWS = 64
"""Steps before routing comes again, half of them for forward and half for both ways: as in a run,
hardly a step that is timed has had the numbers of rows of one before."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
BARS = {256: ">= 0.85", 64: ">= 0.75"}
"""By tokens of an expert."""
FEW = 8
"""The same on a GPU, which does not get ready for numbers of rows."""
CLOSE = 0.01
"""Of narrow numbers, how far one layer's results may be from another's."""
NUMBERS = 8
"""Tokens that a decoding layer takes one after another, of other experts each."""


@dataclass(frozen=True)
class Shape:
    """A layer of experts, of the proportions of a published model."""

    name: str
    hidden: int
    ffn: int
    experts: int
    top_k: int


SHAPES = (
    Shape("OLMoE", 1024, 512, 64, 8),
    Shape("Qwen3-MoE", 1536, 576, 128, 8),
    Shape("Mixtral", 1024, 3584, 8, 2),
    Shape("DeepSeek-V3", 1792, 512, 64, 8),
)


@dataclass(frozen=True)
class Case:
    """A layer, and what comes to it."""

    shape: Shape
    dtype: torch.dtype
    tokens: int
    skewed: bool = False
    device: str = "cpu"
    steps: int = 1
    """With experts in turn: so many, each of the ones after those of the step before."""

    def choices(self) -> list[Tensor]:
        """Experts of each token: in turn, or by Zipf's law, step after step drawn anew."""
        shape = self.shape
        if not self.skewed:
            places = torch.arange(self.steps * self.tokens * shape.top_k) % shape.experts
            return list(places.view(self.steps, self.tokens, shape.top_k))
        draws = DRAWS if self.device == "cpu" else FEW
        ranks = torch.arange(1, shape.experts + 1, dtype=torch.float64, device=self.device)
        odds = (ranks**-ZIPF).expand(self.tokens, -1)
        draw = torch.Generator(self.device).manual_seed(1)
        return [torch.multinomial(odds, shape.top_k, generator=draw) for _ in range(draws)]


class Layer:
    """Everybody's experts over the same tokens."""

    def __init__(self, case: Case) -> None:
        shape, draw = case.shape, torch.Generator(case.device).manual_seed(0)

        def random(*sizes: int) -> Tensor:
            numbers = torch.randn(*sizes, generator=draw, device=case.device)
            return numbers.mul_(0.02).to(case.dtype)

        self.tokens = random(case.tokens, shape.hidden).requires_grad_()
        self._steps = [one.to(case.device) for one in case.choices()]
        self.choices = self._steps[0]
        self.weights = random(case.tokens, shape.top_k).abs_().requires_grad_()
        self.grad = random(case.tokens, shape.hidden)
        self.bank = Bank(range(shape.experts), shape.hidden, shape.ffn).to(case.device, case.dtype)
        with torch.no_grad():
            self.bank.arena.copy_(random(*self.bank.arena.shape))
        self._dispatcher = Dispatcher(shape.experts, Ranks())
        self._theirs = _theirs(shape, self.bank)
        rows, inner = case.tokens * shape.top_k, 3 * shape.ffn
        self._rows, self._matrix = random(rows, shape.hidden), random(inner, shape.hidden)
        self._wide = random(rows, inner)
        self._gradients = torch.empty_like(self.bank.arena)
        with torch.no_grad():
            ours, theirs = self.ours(), self.transformers(MODES[0])
        if case.device == "cpu":
            torch.testing.assert_close(ours, theirs)
        assert (ours - theirs).norm() <= CLOSE * theirs.norm()

    def ours(self) -> Tensor:
        """Forward."""
        by = self.bank.grouped_mm(self.tokens.dtype)
        counted = self._dispatcher.count(self.choices, training=True, whole=True, by=by)
        placed = self._dispatcher.place(counted)
        sent = self._dispatcher.start(self.tokens, self.weights, placed)
        with self.bank.at_work() as compute:
            return sent.through(compute)

    def transformers(self, mode: str) -> Tensor:
        """Forward."""
        self._theirs.config._experts_implementation = mode
        result: Tensor = self._theirs(self.tokens, self.choices, self.weights)
        return result

    def arranged(self) -> tuple[Tensor, Tensor]:
        """Gates and ups of all experts, and what comes after."""
        return arena_views(self.bank.arena, self.bank.ffn, self.bank.hidden)

    def dense(self, back: bool) -> None:
        """One product of as many flops, and the two of its backward, by the library that ours
        takes for such."""
        product(self._rows, self._matrix, transposed=True)
        if back:
            product(self._wide, self._matrix, transposed=False)
            product(self._wide.T, self._rows, transposed=False)

    def passes(self, back: bool) -> None:
        """What memory has to do with matrices besides: each is read, with backward twice, and its
        gradient written."""
        arena = self.bank.arena.detach()
        for _ in range(1 + back):
            for matrices in arena:
                read_over(matrices)
        if back:
            self._gradients.zero_()

    def call(self, forward: Callable[[], Tensor], back: bool) -> Callable[[], None]:
        """Forward, or forward and backward with gradients written anew, of a step after another."""
        steps = itertools.cycle(self._steps)
        if back:
            steps = itertools.islice(steps, len(self._steps) // 2, None)
        leaves = [self.tokens, self.weights, self.bank.arena, *self._theirs.parameters()]

        def one() -> Tensor:
            self.choices = next(steps)
            return forward()

        def both() -> None:
            one().backward(self.grad)
            for leaf in leaves:
                leaf.grad = None

        return both if back else torch.no_grad()(one)

    def modes(self, back: bool) -> dict[str, Callable[[], None]]:
        """Calls of transformers, by what its way of multiplying is called."""
        return {mode: self.call(partial(self.transformers, mode), back) for mode in MODES}


def read_over(matrices: Tensor) -> None:
    """As fast as memory gives them: sums of bf16 wait for the processor."""
    matrices.view(torch.float32).sum()


def _theirs(shape: Shape, bank: Bank) -> nn.Module:
    """Experts as transformers has them, of any family with such: they are one class."""
    from transformers import OlmoeConfig
    from transformers.models.olmoe.modeling_olmoe import OlmoeExperts

    config = OlmoeConfig(
        hidden_size=shape.hidden, intermediate_size=shape.ffn, num_experts=shape.experts,
        num_experts_per_tok=shape.top_k, hidden_act="silu",
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = OlmoeExperts(config).to(bank.arena.device, bank.arena.dtype)
    with torch.no_grad():
        for expert, part, view in bank.matrices(bank.arena):
            gate_up = theirs.gate_up_proj[expert]
            places = {"gate": gate_up[: shape.ffn], "up": gate_up[shape.ffn :]}
            places["down"] = theirs.down_proj[expert]
            places[part].copy_(view)
    return theirs


def rows(rounds: int, shapes: Sequence[Shape] = SHAPES) -> Iterator[measure.Row]:
    """Every figure, as it comes."""
    devices.activate(torch.device("cpu"))  # Freed memory stays, as in a run; peers have it, too.
    for shape in shapes:
        for name, dtype in DTYPES.items():
            yield _decoding(shape, name, dtype, rounds)
            for (each, bar), skewed in itertools.product(BARS.items(), (False, True)):
                tokens = each * shape.experts // shape.top_k
                what = f"{shape.name} experts, {name}, {each} tokens each"
                what += ", by Zipf" if skewed else ", even"
                layer = Layer(Case(shape, dtype, tokens, skewed))
                for back in (False, True):
                    yield from _rows(layer, back, what, bar, min(rounds, ROUNDS))


def _rows(layer: Layer, back: bool, what: str, bar: str, rounds: int) -> Iterator[measure.Row]:
    what += ", forward and backward" if back else ", forward"

    contenders: dict[str, Callable[[], Any]] = {
        "ours": layer.call(layer.ours, back), "dense": partial(layer.dense, back),
        "passes": partial(layer.passes, back), **layer.modes(back),
    }  # fmt: skip
    times = near(contenders, rounds)
    share, interval = times.ratio("dense", "ours")
    ceiling = times.median("dense") / (times.median("dense") + times.median("passes"))
    yield measure.row(
        f"{what}, of a dense product", share, "ratio", bar=bar, interval=interval, repeats=rounds,
        against="limit: one product of as many flops, by the same library (ceiling "
        f"{figure(ceiling)}, where reading matrices and writing gradients adds to it)",
    )  # fmt: skip
    yield of_transformers(what, times, "ours", ">= 1.3")


def near(
    contenders: dict[str, Callable[[], Any]],
    rounds: int,
    *,
    warmup: int = 2,
    patience_s: float = 1200.0,
) -> measure.Times:
    """Times of all in turn, less a way of transformers that is far slower than the other.

    Args:
        contenders: what to time, the ways of transformers among it.
        rounds: see `measure.interleave`.
        warmup: the same, of the one round that says which way is far slower.
        patience_s: see `measure.interleave`.
    """
    once = measure.interleave(contenders, 1, warmup=warmup, patience_s=patience_s)
    most = FAR * min(map(once.median, MODES))
    left_out = [mode for mode in MODES if once.median(mode) > most]
    kept = {name: call for name, call in contenders.items() if name not in left_out}
    return measure.interleave(kept, rounds, patience_s=patience_s)


def of_transformers(what: str, times: measure.Times, ours: str, bar: str) -> measure.Row:
    """The figure of ours against the faster way of transformers."""
    best = min((mode for mode in MODES if mode in times.seconds), key=times.median)
    ratio, interval = times.ratio(best, ours)
    return measure.row(
        what, ratio, "ratio", bar=bar, interval=interval, repeats=times.rounds,
        against=f"{TRANSFORMERS}, {best}, the faster of {' and '.join(MODES)}",
    )  # fmt: skip


def _decoding(shape: Shape, name: str, dtype: torch.dtype, rounds: int) -> measure.Row:
    """Tokens one at a time, against reading the matrices of their experts."""
    layer = Layer(Case(shape, dtype, 1))
    chosen = [
        (torch.arange(shape.top_k) + number * shape.top_k)[None] % shape.experts
        for number in range(NUMBERS)
    ]

    @torch.no_grad()
    def ours() -> None:
        for choice in chosen:
            layer.choices = choice
            layer.ours()

    @torch.no_grad()
    def read() -> None:
        for choice in chosen:
            for expert in choice[0].tolist():
                read_over(layer.bank.arena[expert])

    times = measure.interleave({"ours": ours, "read": read}, rounds)
    share, interval = times.ratio("read", "ours")
    return measure.row(
        f"{shape.name} experts, {name}, one token at a time, of reading their matrices", share,
        "ratio", bar=">= 0.8", interval=interval, repeats=rounds,
        against="limit: a sum over the same memory, by as many threads (reading in several places "
        "at once may be faster)",
    )  # fmt: skip
