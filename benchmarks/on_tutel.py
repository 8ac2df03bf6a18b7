"""Experts of one layer on a GPU: ours against Tutel's, dropless, which is told the same routing.

Tutel's layer has a router of its own; here that says what it is told, in bf16, so that tokens go
where they go in ours. Its softmax, its choice of the highest and its own count of rows are timed
with it, ours with sorting and counting.
"""

from __future__ import annotations

import gc
import importlib.util
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import measure
from benchmarks.experts import Case, Layer, Shape
from benchmarks.on_gpu import EACH, PATIENCE_S, SHAPES, awaited, faster, gpu, way
from moesaic.dist.products import engine

CLOSE = 0.03
"""Of the norm of a difference, by the norm: numbers of routers are in bf16, and so are sums."""
_NEVER = -1e4


def rows(rounds: int, shapes: Sequence[Shape] = SHAPES) -> Iterator[measure.Row]:
    """Every figure, as it comes."""
    why = "no GPU here" if not torch.cuda.is_available() else None
    if why is None and importlib.util.find_spec("tutel") is None:
        why = "Tutel is not installed"
    for shape, each, skewed in itertools.product(shapes, EACH, (False, True)):
        what = f"{shape.name} experts on a GPU, bf16, {each} tokens each"
        what += ", by Zipf" if skewed else ", even"
        if why is not None:
            for back in (False, True):
                yield _untried(what, back, why)
            continue
        tokens = each * shape.experts // shape.top_k
        layer = Layer(Case(shape, torch.bfloat16, tokens, skewed, "cuda"))
        try:
            yield from _rows(layer, what, rounds)
        except torch.cuda.OutOfMemoryError:
            for back in (False, True):
                yield _untried(what, back, "it has more than the GPU's memory")
        del layer
        gc.collect()
        torch.cuda.empty_cache()


def _untried(what: str, back: bool, why: str) -> measure.Row:
    name = f"{what}, {way(back)}, against Tutel"
    return measure.row(name, None, "ratio", bar="", against=f"untried: {why}", repeats=0)


def _rows(layer: Layer, what: str, rounds: int) -> Iterator[measure.Row]:
    layer.bank.by = faster(layer, what)
    theirs = Theirs(layer)
    with torch.no_grad():
        found, due = theirs(), layer.ours() / layer.weights.sum(dim=1, keepdim=True)
    off = float((found - due).norm() / due.norm())
    if not off <= CLOSE:
        for back in (False, True):
            yield _untried(what, back, f"Tutel's results are {off:.3g} times the norm of ours away")
        return
    by = engine(layer.bank.arena.device, torch.bfloat16, layer.bank.by)
    for back in (False, True):
        calls = {
            "ours": awaited(layer.call(layer.ours, back)),
            "tutel": awaited(layer.call(theirs, back)),
        }
        times = measure.interleave(calls, rounds, warmup=1, patience_s=PATIENCE_S)
        ratio, interval = times.ratio("tutel", "ours")
        row = measure.row(
            f"{what}, {way(back)}, against Tutel", ratio, "ratio", bar="", interval=interval,
            repeats=rounds, against=f"Tutel, dropless, told the routing; ours by {by}",
        )  # fmt: skip
        yield replace(row, hardware=f"{gpu()}; {row.hardware}")


class Told(nn.Module):
    """A router of Tutel's that says what it is told."""

    def __init__(self, model_dim: int, num_global_experts: int, k: int) -> None:
        super().__init__()
        del model_dim, num_global_experts
        self.top_k, self.capacity_factor, self.gate_noise = k, 0.0, 0.0
        self.scores: Tensor | None = None

    def forward(self, tokens: Tensor) -> Tensor | None:
        """Logits of all tokens."""
        del tokens
        return self.scores


class Theirs:
    """Tutel's layer with the weights of `layer`, forward."""

    def __init__(self, layer: Layer) -> None:
        from tutel import moe

        bank, choices = layer.bank, layer.choices.shape[1]
        self._of: Layer = layer
        gate: dict[str, Any] = {"type": "custom", "module": Told, "k": choices}
        experts = {
            "type": "llama_ffn", "num_experts_per_device": len(bank.arena),
            "hidden_size_per_expert": bank.ffn,
        }  # fmt: skip
        made = moe.moe_layer(gate_type=gate, experts=experts, model_dim=bank.hidden)
        self._layer: nn.Module = made.to("cuda", torch.bfloat16)
        (self._told,) = made.gates
        self._matrices = list(made.experts.parameters())
        gate_up, down = layer.arranged()
        with torch.no_grad():
            for flat, matrix in zip(
                (made.experts.W_fc1, made.experts.W_fc2, made.experts.W_fc3),
                (*gate_up.chunk(2, dim=1), down), strict=True,
            ):  # fmt: skip
                flat.view(matrix.mT.shape).copy_(matrix.mT)
        self._scores: dict[int, Tensor] = {}

    def __call__(self) -> Tensor:
        """Of the tokens that the layer has, as it routes them now."""
        self._told.scores = self._scored(self._of.choices)
        for one in self._matrices:
            one.grad = None
        result: Tensor = self._layer(self._of.tokens[None])[0]
        return result

    def _scored(self, choices: Tensor) -> Tensor:
        """Scores whose softmax are the layer's weights, each token's of the sum of its own."""
        if id(choices) not in self._scores:
            tokens, experts = len(choices), len(self._of.bank.arena)
            scores = torch.full((tokens, experts), _NEVER, device="cuda")
            scores.scatter_(1, choices, self._of.weights.detach().float().clamp(min=1e-6).log())
            self._scores[id(choices)] = scores.bfloat16()
        return self._scores[id(choices)]


OF_SHAPES = {
    f"tutel-{one.name.split(',')[0].lower()}": partial(rows, shapes=[one]) for one in SHAPES
}
"""A shape at a time."""
