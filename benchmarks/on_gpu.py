"""Experts of one layer on a GPU: ours, by each of the products there are, against a dense product,
transformers', and torch's grouped products as a person would call them.

Layers are as large as published ones, whole or a rank's part. A layer's passes follow each other as
in a run, where nobody waits between one layer and the next: a timed call is several of them.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import measure
from benchmarks.experts import Case, Layer, Shape, near, of_transformers
from moesaic.base.errors import ConfigError
from moesaic.dist.products import check
from moesaic.facts.job.train import GroupedMM

BARS = {False: ">= 0.75", True: ">= 0.65"}
"""Of a dense product: forward, and with backward."""
SHAPES = (
    Shape("OLMoE", 2048, 1024, 64, 8),
    Shape("Qwen3-MoE", 2048, 768, 128, 8),
    Shape("Mixtral", 4096, 14336, 8, 2),
    Shape("DeepSeek-V3, a rank's 64", 7168, 2048, 64, 8),
)
EACH = (256, 1024, 4096)
PASSES = 5
"""Of a layer in a call that is timed."""
PATIENCE_S = 5.0
"""For quiet cores of the host: a GPU's times hardly wait for them."""
OTHERS: tuple[GroupedMM, ...] = ("torch", "fp8")
"""Kernels that are compared with those of `auto`."""


def rows(rounds: int, shapes: Sequence[Shape] = SHAPES) -> Iterator[measure.Row]:
    """Every figure, as it comes."""
    for shape, each, skewed in itertools.product(shapes, EACH, (False, True)):
        what = f"{shape.name} experts on a GPU, bf16, {each} tokens each"
        what += ", by Zipf" if skewed else ", even"
        if not torch.cuda.is_available():
            for back in BARS:
                yield from _untried(f"{what}, {way(back)}", back, "no GPU here")
            continue
        tokens = each * shape.experts // shape.top_k
        layer = Layer(Case(shape, torch.bfloat16, tokens, skewed, "cuda"))
        for back in BARS:
            for row in _rows(layer, back, f"{what}, {way(back)}", rounds):
                yield replace(row, hardware=f"{gpu()}; {row.hardware}")
        del layer
        gc.collect()
        torch.cuda.empty_cache()


def gpu() -> str:
    facts = torch.cuda.get_device_properties(0)
    return f"{facts.name}, {facts.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"


def way(back: bool) -> str:
    return "forward and backward" if back else "forward"


def _untried(what: str, back: bool, why: str) -> Iterator[measure.Row]:
    others = (_asked(what, by) for by in OTHERS)
    for name in (f"{what}, of a dense product", what, f"{what}, against grouped products", *others):
        bar = BARS[back] if name.endswith("product") else ""
        yield _nothing(name, bar, why)


def _nothing(name: str, bar: str, why: str) -> measure.Row:
    return measure.row(name, None, "ratio", bar=bar, against=f"untried: {why}", repeats=0)


def _asked(what: str, by: GroupedMM) -> str:
    return f'{what}, kernels.grouped_mm = "{by}"'


def _rows(layer: Layer, back: bool, what: str, rounds: int) -> Iterator[measure.Row]:
    hindered: dict[GroupedMM, str] = {}
    ours: dict[str, Callable[[], Any]] = {"auto": layer.call(partial(ours_by, layer, "auto"), back)}
    for by in OTHERS:
        try:
            check(by, layer.bank.arena.device)
        except ConfigError as error:
            hindered[by] = str(error)
        else:
            ours[by] = layer.call(partial(ours_by, layer, by), back)
    contenders = {
        **ours, "dense": partial(layer.dense, back),
        "plain": layer.call(partial(plain, layer), back), **layer.modes(back),
    }  # fmt: skip
    contenders = {name: awaited(call) for name, call in contenders.items()}
    times = near(contenders, rounds, warmup=1, patience_s=PATIENCE_S)
    share, interval = times.ratio("dense", "auto")
    yield measure.row(
        f"{what}, of a dense product", share, "ratio", bar=BARS[back], interval=interval,
        repeats=rounds, against="limit: one product of as many flops",
    )  # fmt: skip
    yield of_transformers(what, times, "auto", "")
    ratio, interval = times.ratio("plain", "auto")
    yield measure.row(
        f"{what}, against grouped products", ratio, "ratio", bar="", interval=interval,
        repeats=rounds, against="torch's grouped_mm, sorted, gathered and added up by torch",
    )  # fmt: skip
    for by in OTHERS:
        if by in hindered:
            yield _nothing(_asked(what, by), "", hindered[by])
            continue
        ratio, interval = times.ratio("auto", by)
        yield measure.row(
            _asked(what, by), ratio, "ratio", bar="", interval=interval, repeats=rounds,
            against="moesaic as it is by itself",
        )  # fmt: skip


def ours_by(layer: Layer, by: Literal["auto"] | GroupedMM) -> Tensor:
    """Run the layer forward with the kernels `by`."""
    layer.bank.by = by
    return layer.ours()


def plain(layer: Layer) -> Tensor:
    """Forward, as a person would write it with torch's grouped product."""
    tokens, (gate_up, down) = layer.tokens, layer.arranged()
    order = layer.choices.reshape(-1).argsort(stable=True)
    ends = torch.bincount(layer.choices.reshape(-1), minlength=len(gate_up)).cumsum(0).int()
    sources = order // layer.choices.shape[1]
    gate, up = F.grouped_mm(tokens[sources], gate_up.transpose(1, 2), offs=ends).chunk(2, dim=1)
    made = F.grouped_mm(F.silu(gate) * up, down.transpose(1, 2), offs=ends)
    made = made * layer.weights.reshape(-1)[order, None]
    return torch.zeros_like(tokens).index_add(0, sources, made)


def awaited(call: Callable[[], object], passes: int = PASSES) -> Callable[[], None]:
    """So many of them, one after another, and the wait for the last."""

    def done() -> None:
        for _ in range(passes):
            call()
        torch.cuda.synchronize()

    return done
