"""Experts of one layer on a GPU with next to no tokens each, as text is written, without a record
for backward: what any run of `generate` gets there by itself, against reading the matrices,
transformers, and torch's product."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks import measure
from benchmarks.experts import NUMBERS, Case, Layer, Shape, near, of_transformers, read_over
from benchmarks.on_gpu import PATIENCE_S, SHAPES, awaited, gpu, ours_by
from moesaic.dist.products import choose
from moesaic.facts.job.train import GroupedMM

BAR = ">= 0.8"
EACH = (1, 8, 64)
"""Tokens of an expert, where there are more than one in all."""
ASKED: GroupedMM = "torch"


def rows(rounds: int, shapes: Sequence[Shape] = SHAPES) -> Iterator[measure.Row]:
    """Every figure, as it comes."""
    for shape in shapes:
        for tokens in (1, *(each * shape.experts // shape.top_k for each in EACH)):
            what = f"{shape.name} experts on a GPU, bf16, decoding {tokens} at a time"
            if not torch.cuda.is_available():
                yield from _untried(what, "no GPU here")
                continue
            # Other experts call after call, lest those of few tokens lie in a cache.
            layer = Layer(Case(shape, torch.bfloat16, tokens, device="cuda", steps=NUMBERS))
            for row in _rows(layer, what, rounds):
                yield replace(row, hardware=f"{gpu()}; {row.hardware}")
            del layer
            gc.collect()
            torch.cuda.empty_cache()


def _untried(what: str, why: str) -> Iterator[measure.Row]:
    for name in (_of_reading(what), what, _asked(what)):
        bar = BAR if name == _of_reading(what) else ""
        yield measure.row(name, None, "ratio", bar=bar, against=f"untried: {why}", repeats=0)


def _of_reading(what: str) -> str:
    return f"{what}, of reading their matrices"


def _asked(what: str) -> str:
    return f'{what}, grouped_mm = "{ASKED}"'


def _rows(layer: Layer, what: str, rounds: int) -> Iterator[measure.Row]:
    taken = choose("auto", layer.bank.arena.device, layer.tokens.dtype)
    contenders: dict[str, Callable[[], Any]] = {
        "auto": layer.call(partial(ours_by, layer, "auto"), back=False),
        ASKED: layer.call(partial(ours_by, layer, ASKED), back=False),
        "read": reading(layer), **layer.modes(back=False),
    }  # fmt: skip
    contenders = {
        name: awaited(torch.inference_mode()(call), NUMBERS) for name, call in contenders.items()
    }
    times = near(contenders, rounds, warmup=1, patience_s=PATIENCE_S)
    share, interval = times.ratio("read", "auto")
    yield measure.row(
        _of_reading(what), share, "ratio", bar=BAR, interval=interval, repeats=rounds,
        against="limit: a sum over the same memory",
    )  # fmt: skip
    yield of_transformers(what, times, "auto", "")
    ratio, interval = times.ratio("auto", ASKED)
    yield measure.row(
        _asked(what), ratio, "ratio", bar="", interval=interval, repeats=rounds,
        against=f'moesaic as it is by itself ("{taken}")',
    )  # fmt: skip


def reading(layer: Layer) -> Callable[[], None]:
    """Read what a call has to, of one call after another."""
    arena = layer.bank.arena.detach()
    wanted = min(len(arena), layer.choices.numel())
    firsts = itertools.cycle(range(0, len(arena), wanted))

    def next_ones() -> None:
        first = next(firsts)
        read_over(arena[first : first + wanted])

    return next_ones
