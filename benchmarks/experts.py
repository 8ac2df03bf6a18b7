"""Experts of one layer on one rank, against their limit and against transformers.

The limits are a dense product of as many operations, and reading the experts' weights.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import measure
from benchmarks.training import TRANSFORMERS
from moesaic.facts.job import ModelConfig, RoutingConfig
from moesaic.facts.job.model import PRESETS
from moesaic.facts.plan import Plan
from moesaic.facts.workload import block_specs
from moesaic.kernels import device as devices
from moesaic.kernels.grouped_mm import matmul
from moesaic.models.lm import LanguageModel
from moesaic.nn.experts.bank import ExpertBank
from moesaic.nn.inputs import LOW_PRECISION, Inputs, Rotary
from moesaic.nn.moe import MoE
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


class ExpertLayer:
    """One expert layer of a model with weights of one dtype, and its limits."""

    def __init__(self, model: ModelConfig, device: torch.device, dtype: str) -> None:
        self._model, self._device = model, device
        self._dtype = LOW_PRECISION.get(dtype, torch.float32)
        plan = Plan(ranks=1, ep=1, dp_shard=1, experts=model.experts)
        first = model.expert_layers[0]
        specs = [spec for spec in block_specs(model, plan) if spec.layer == first]
        with torch.device("meta"):
            whole = LanguageModel(model, specs, RoutingConfig(router="balanced"))
        whole.materialise(device)
        ((_, self.moe),) = whole.expert_layers()
        self.moe.to(self._dtype)
        with torch.no_grad():
            for parameter in self.moe.parameters():
                parameter.normal_(std=0.02)
            for buffer in self.moe.buffers():
                buffer.zero_()

    def read(self, slots: slice) -> None:
        """Read the weights of some experts as fast as memory gives them."""
        # Sums of bf16 wait for the processor, not for memory.
        self.moe.bank.arena.detach()[slots].view(torch.float32).sum()

    def dense(self, rows: int) -> Dense:
        """Return the product of all three matrices of an expert and so many rows."""
        sizes = (rows, 3 * self._model.ffn)
        left, right = (
            torch.randn(size, self._model.hidden, device=self._device).to(self._dtype)
            for size in sizes
        )
        return Dense(left, right)

    def passes(self, tokens: int, *, training: bool = True) -> Passes:
        """Return passes of one batch."""
        x = torch.randn(1, tokens, self._model.hidden, device=self._device).to(self._dtype)
        return Passes(self.moe, x, training)


class Dense:
    """One dense product, and the two of its backward."""

    def __init__(self, rows: Tensor, weight: Tensor) -> None:
        self._rows, self._weight = rows, weight

    def step(self) -> None:
        """Multiply forward and backward."""
        matmul(self._rows, self._weight, transposed=True)
        matmul(self._grad, self._weight, transposed=False)
        matmul(self._grad.T, self._rows, transposed=False)

    @cached_property
    def _grad(self) -> Tensor:
        return self._rows.new_ones(len(self._rows), len(self._weight))


class Passes:
    """Passes of one batch through an expert layer."""

    def __init__(self, moe: MoE, x: Tensor, training: bool) -> None:
        self.x, self.grad = x.requires_grad_(), torch.randn_like(x)
        self._moe = moe
        self._inputs = Inputs(
            Rotary(x, x),  # The layer applies no rotary embedding.
            training=training,
            samples=torch.zeros(1, dtype=torch.int64, device=x.device),
            positions=torch.arange(x.shape[1], device=x.device),
        )
        self._leaves = [x, *moe.parameters()]

    def run(self) -> Tensor:
        """Go forward and return the sums by token, with their graph."""
        result: Tensor = self._moe(self.x, self._inputs)[0]
        return result

    def forward(self) -> None:
        """Go forward, without a graph."""
        with torch.no_grad():
            self.run()

    def step(self) -> None:
        """Go forward and backward, with new gradients."""
        self.run().backward(self.grad)
        for leaf in self._leaves:
            leaf.grad = None


class Work:
    """The same experts, tokens and choices for moesaic and for transformers, and the limit."""

    def __init__(self, case: Case) -> None:
        shape, device = case.shape, torch.device(case.device)
        sizes = {name: getattr(shape, name) for name in ("hidden", "ffn", "experts", "top_k")}
        model = ModelConfig(**{**PRESETS["tiny-olmoe"], **sizes})
        torch.manual_seed(0)
        self.layer = ExpertLayer(model, device, case.dtype)
        choices = case.choices()
        bank = self.layer.moe.bank
        self._dtype, self._choices = bank.arena.dtype, itertools.cycle(choices)
        weights = torch.rand(case.tokens, shape.top_k, device=device).to(self._dtype)
        router = FixedRouter(choices, nn.Parameter(weights), shape.experts)
        self.layer.moe.router = router  # type: ignore[assignment]
        self.weights = weights.clone().requires_grad_()
        self.passes = self.layer.passes(case.tokens)
        self.dense = self.layer.dense(case.tokens * shape.top_k)
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
    passes = layer.passes(1, training=False)
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
