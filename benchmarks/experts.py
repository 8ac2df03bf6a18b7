"""Experts of one layer on one rank, against their limit and against transformers.

moesaic's passes, the dense product and the reading of weights are those of `moesaic bench layer`.
"""

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
from benchmarks.training import TRANSFORMERS
from moesaic.facts.job import ModelConfig
from moesaic.facts.job.model import PRESETS
from moesaic.kernels import device as devices
from moesaic.models.expert_benchmark import ExpertLayerBenchmark
from moesaic.nn.experts.bank import ExpertBank
from moesaic.nn.inputs import Inputs
from moesaic.nn.router import Routing

MODES = ("grouped_mm", "eager")
ROUNDS = 5
FAR = 2.0
"""A mode of transformers that takes so many times the other's time is not timed further."""
ZIPF = 1.0
DRAWS = 64
"""Steps with other numbers of rows each, as in a run: libraries prepare for numbers they know."""
FEW = 8
"""Such steps on a GPU, which does not prepare."""
DTYPES = ("fp32", "bf16")
TOKENS = (64, 256)
"""Tokens an expert gets on average."""
LIMIT_BAR, PEER_BAR, READ_BAR = ">= 0.75", ">= 1.3", ">= 0.8"
CLOSE = 0.01
"""Norm of a difference in narrow numbers, over the norm."""
DECODED = 8
"""Tokens that a decoding layer takes one after another, with other experts each."""


@dataclass(frozen=True)
class Shape:
    """A layer of experts, in the proportions of a published model."""

    name: str
    hidden: int
    ffn: int
    experts: int
    top_k: int


SHAPES = (
    Shape("OLMoE", 1024, 512, 64, 8),
    Shape("Mixtral", 1024, 3584, 8, 2),
    Shape("DeepSeek-V3", 1792, 512, 64, 8),
)


@dataclass(frozen=True)
class Case:
    """A layer and its tokens."""

    shape: Shape
    dtype: str
    tokens: int
    skewed: bool = False
    device: str = "cpu"
    steps: int = 1
    """Steps with experts in turn, each with the experts after those of the step before."""

    def choices(self) -> list[Tensor]:
        """Return the experts of each token: in turn, or by Zipf's law, drawn for each step."""
        shape = self.shape
        if not self.skewed:
            places = torch.arange(self.steps * self.tokens * shape.top_k) % shape.experts
            return list(places.view(self.steps, self.tokens, shape.top_k).to(self.device))
        draws = DRAWS if self.device == "cpu" else FEW
        ranks = torch.arange(1, shape.experts + 1, dtype=torch.float64, device=self.device)
        odds = (ranks**-ZIPF).expand(self.tokens, -1)
        draw = torch.Generator(self.device).manual_seed(1)
        return [torch.multinomial(odds, shape.top_k, generator=draw) for _ in range(draws)]


class FixedRouter(nn.Module):
    """A router that returns given choices, those of the next step in each pass."""

    layer, kind = 0, "top-k"

    def __init__(
        self, choices: Sequence[Tensor], weights: Tensor, experts: int, *, whole: bool = True
    ) -> None:
        """See `Routing` for `whole`.

        Args:
            choices: experts by token, [tokens, choices], of each step.
            weights: weights of the choices, the same in all steps; a parameter gets a gradient.
            experts: number of experts.
            whole: whether counts of tokens may stay on the device.
        """
        super().__init__()
        self.weights, self._choices, self._whole = weights, itertools.cycle(choices), whole
        self._scores = weights.new_zeros(len(weights), experts)

    def forward(self, tokens: Tensor, inputs: Inputs) -> Routing:
        """Return the choices of the next step."""
        del tokens, inputs
        experts = next(self._choices)
        return Routing(experts, experts, self.weights, self._scores, self._scores, 0, self._whole)


class Work:
    """The same experts, tokens and choices for moesaic and for transformers, and the limit."""

    def __init__(self, case: Case) -> None:
        shape, device = case.shape, torch.device(case.device)
        sizes = {name: getattr(shape, name) for name in ("hidden", "ffn", "experts", "top_k")}
        model = ModelConfig(**{**PRESETS["tiny-olmoe"], **sizes})
        torch.manual_seed(0)
        self.layer = ExpertLayerBenchmark(model, device, weights=case.dtype)
        choices = case.choices()
        bank = self.layer.moe.bank
        self._dtype, self._choices = bank.arena.dtype, itertools.cycle(choices)
        weights = torch.rand(case.tokens, shape.top_k, device=device).to(self._dtype)
        router = FixedRouter(choices, nn.Parameter(weights), shape.experts)
        self.layer.moe.router = router  # type: ignore[assignment]
        self.weights = weights.clone().requires_grad_()
        self.passes = self.layer.passes(case.dtype, case.tokens)
        self.dense = self.layer.dense(case.dtype, case.tokens * shape.top_k)
        self._theirs = _theirs(shape, bank)
        with torch.no_grad():
            ours, theirs = self.passes.run()[0], self.theirs(MODES[0])
        if case.device == "cpu" and case.dtype == "fp32":
            torch.testing.assert_close(ours, theirs)
        assert (ours - theirs).norm() <= CLOSE * theirs.norm()

    def theirs(self, mode: str) -> Tensor:
        """Go forward through transformers' experts."""
        self._theirs.config._experts_implementation = mode
        result: Tensor = self._theirs(self.passes.x[0], next(self._choices), self.weights)
        return result

    def step(self, mode: str) -> None:
        """Go forward and backward through transformers' experts, with new gradients."""
        self.theirs(mode).backward(self.passes.grad[0])
        for leaf in (self.passes.x, self.weights, *self._theirs.parameters()):
            leaf.grad = None

    def contenders(self) -> dict[str, Callable[[], Any]]:
        """Return all steps that are timed, by name."""
        theirs = {mode: partial(self.step, mode) for mode in MODES}
        return {"ours": self.passes.step, "dense": self.dense.step, **theirs}


def _theirs(shape: Shape, bank: ExpertBank) -> nn.Module:
    """Return experts of transformers, one class for all families, with the bank's weights."""
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


def rows(rounds: int) -> Iterator[measure.Row]:
    """Measure all shapes; claims are the worst cases."""
    devices.activate(torch.device("cpu"))  # Freed memory is kept, as in a run; for peers too.
    limits: dict[str, list[measure.Row]] = {dtype: [] for dtype in DTYPES}
    peers, reads, details = list[measure.Row](), list[measure.Row](), list[measure.Row]()
    for shape, dtype in itertools.product(SHAPES, DTYPES):
        pairs = [
            _rows(Case(shape, dtype, each * shape.experts // shape.top_k, skewed), each, rounds)
            for each, skewed in itertools.product(TOKENS, (False, True))
        ]
        reads.append(_decoding(shape, dtype, rounds))
        limits[dtype] += [limit for limit, _ in pairs]
        peers += [peer for _, peer in pairs]
        title = f"{shape.name} experts, {dtype}, of a dense product, worst of 4 cases"
        details.append(measure.worst(title, [limit for limit, _ in pairs]))
    for dtype, found in limits.items():
        yield measure.worst(
            f"experts on one rank, {dtype}, forward and backward, of a dense product, worst of "
            f"{len(found)} cases", found, LIMIT_BAR,
        )  # fmt: skip
    yield measure.worst(
        f"experts on one rank against transformers, forward and backward, worst of {len(peers)} "
        "cases", peers, PEER_BAR,
    )  # fmt: skip
    yield measure.worst(
        f"experts on one rank, one token at a time, of reading their weights, worst of "
        f"{len(reads)} cases", reads, READ_BAR,
    )  # fmt: skip
    yield from details


def _rows(case: Case, each: int, rounds: int) -> tuple[measure.Row, measure.Row]:
    what = f"{case.shape.name} experts, {case.dtype}, {each} tokens each, "
    what += "by Zipf" if case.skewed else "even"
    return rows_of(Work(case), what, min(rounds, ROUNDS))


def rows_of(
    work: Work,
    what: str,
    rounds: int,
    wrap: Callable[[Callable[[], Any]], Callable[[], Any]] = lambda call: call,
    patience_s: float = 1200.0,
) -> tuple[measure.Row, measure.Row]:
    """Return a case's figures against the dense product and against transformers.

    Args:
        work: the contenders.
        what: name of the case.
        rounds: rounds to keep.
        wrap: how a call is timed.
        patience_s: see `measure.interleave`.
    """
    contenders = {name: wrap(call) for name, call in work.contenders().items()}
    once = measure.interleave(contenders, 1, warmup=1, patience_s=patience_s)
    most = FAR * min(map(once.median, MODES))
    modes = [mode for mode in MODES if once.median(mode) <= most]
    kept = {name: contenders[name] for name in ("ours", "dense", *modes)}
    times = measure.interleave(kept, rounds, warmup=1, patience_s=patience_s)
    limit = measure.compare(
        f"{what}, forward and backward, of a dense product", times, "dense", "ours",
        against="limit: one product of as many flops, by the same library",
    )  # fmt: skip
    best = min(modes, key=times.median)
    peer = measure.compare(
        f"{what}, forward and backward, against transformers", times, best, "ours",
        against=f"{TRANSFORMERS}, {best}, the faster of {' and '.join(MODES)}",
    )  # fmt: skip
    return limit, peer


def _decoding(shape: Shape, dtype: str, rounds: int) -> measure.Row:
    """Measure tokens one at a time, against reading the weights of their experts."""
    layer = Work(Case(shape, dtype, 1, steps=DECODED)).layer
    passes = layer.passes(dtype, 1, training=False)
    firsts = [number * shape.top_k % shape.experts for number in range(DECODED)]

    def ours() -> None:
        for _ in firsts:
            passes.forward()

    def read() -> None:
        for first in firsts:
            layer.read(slice(first, first + shape.top_k))

    times = measure.interleave({"ours": ours, "read": read}, rounds)
    return measure.compare(
        f"{shape.name} experts, {dtype}, one token at a time, of reading their weights", times,
        "read", "ours", against="limit: a sum over the same memory, by as many threads",
    )  # fmt: skip
