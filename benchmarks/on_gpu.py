"""Experts of one layer on a GPU: by torch, by kernels of ours, in eight bits, and transformers'."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, get_args

import torch

from benchmarks import measure
from benchmarks.experts import MODES, SHAPES, TRANSFORMERS, Case, Layer
from moesaic.base.errors import ConfigError
from moesaic.dist.products import check
from moesaic.facts.job.train import Products

BARS = {False: ">= 0.75", True: ">= 0.65"}
"""Of a dense product: forward, and with backward."""
EACH = (256, 64)


def rows(rounds: int) -> Iterator[measure.Row]:
    """Every figure, as it comes."""
    for shape, each, skewed in itertools.product(SHAPES, EACH, (False, True)):
        what = f"{shape.name} experts on a GPU, bf16, {each} tokens each"
        what += ", by Zipf" if skewed else ", even"
        if not torch.cuda.is_available():
            yield from (_untried(what, back) for back in BARS)
            continue
        tokens = each * shape.experts // shape.top_k
        layer = Layer(Case(shape, torch.bfloat16, tokens, skewed, "cuda"))
        for back in BARS:
            yield from _rows(layer, back, f"{what}, {_way(back)}", rounds)


def _way(back: bool) -> str:
    return "forward and backward" if back else "forward"


def _untried(what: str, back: bool) -> measure.Row:
    return measure.row(
        f"{what}, {_way(back)}, of a dense product", None, "ratio", bar=BARS[back],
        against="untried: no GPU here", repeats=0,
    )  # fmt: skip


def _rows(layer: Layer, back: bool, what: str, rounds: int) -> Iterator[measure.Row]:
    ours: dict[Products, Callable[[], Any]] = {}
    for by in get_args(Products):
        try:
            check(by, layer.bank.arena.device)
        except ConfigError:
            continue
        ours[by] = _awaited(layer.call(partial(_by, layer, by), back))
    contenders: dict[str, Callable[[], Any]] = {
        **ours, "dense": _awaited(partial(layer.dense, back)),
        **{m: _awaited(layer.call(partial(layer.transformers, m), back)) for m in MODES},
    }  # fmt: skip
    times = measure.interleave(contenders, rounds)
    share, interval = times.ratio("dense", "torch")
    yield measure.row(
        f"{what}, of a dense product", share, "ratio", bar=BARS[back], interval=interval,
        repeats=rounds, against="limit: one product of as many flops",
    )  # fmt: skip
    best = min(MODES, key=times.median)
    ratio, interval = times.ratio(best, "torch")
    yield measure.row(
        what, ratio, "ratio", bar="", interval=interval, repeats=rounds,
        against=f"{TRANSFORMERS}, {best}, the faster of {' and '.join(MODES)}",
    )  # fmt: skip
    for by in list(ours)[1:]:
        ratio, interval = times.ratio("torch", by)
        yield measure.row(
            f'{what}, layout.products = "{by}"', ratio, "ratio", bar="", interval=interval,
            repeats=rounds, against='moesaic, layout.products = "torch"',
        )  # fmt: skip


def _by(layer: Layer, by: Products) -> torch.Tensor:
    layer.bank.by = by
    return layer.ours()


def _awaited(call: Callable[[], object]) -> Callable[[], None]:
    def done() -> None:
        call()
        torch.cuda.synchronize()

    return done
