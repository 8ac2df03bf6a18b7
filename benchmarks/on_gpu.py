"""Experts of one layer on a GPU, against a dense product and transformers.

Layers are as large as published ones, whole or a rank's part. A timed call is several passes, one
after another, as in a run, where the host waits for none of them.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from benchmarks import measure
from benchmarks.experts import Case, Shape, Work, rows_of

BAR = ">= 0.65"
SHAPES = (
    Shape("OLMoE", 2048, 1024, 64, 8),
    Shape("Qwen3-MoE", 2048, 768, 128, 8),
    Shape("Mixtral", 4096, 14336, 8, 2),
    Shape("DeepSeek-V3, a rank's 64", 7168, 2048, 64, 8),
)
EACH = (256, 1024, 4096)
PASSES = 5
"""Passes of a layer in a timed call."""
ROUNDS = 7
PATIENCE_S = 5.0
"""Patience for quiet cores of the host: a GPU's times hardly depend on them."""


def rows(rounds: int) -> Iterator[measure.Row]:
    """Measure all shapes; the claim is the worst case."""
    every, details = list[measure.Row](), list[measure.Row]()
    for shape in SHAPES:
        found = {each: [_pair(shape, each, skewed, rounds) for skewed in (False, True)]
                 for each in EACH}  # fmt: skip
        limits = {each: [limit for limit, _ in pairs] for each, pairs in found.items()}
        every += itertools.chain(*limits.values())
        what = f"{shape.name} experts on a GPU, bf16"
        details += [
            measure.worst(f"{what}, of a dense product, worst of 256 tokens each", limits[256]),
            measure.worst(
                f"{what}, of a dense product, worst of 1,024 and 4,096 tokens each",
                [*limits[1024], *limits[4096]],
            ),
            measure.worst(
                f"{what}, against transformers, worst of 6 cases",
                [peer for pairs in found.values() for _, peer in pairs],
            ),
        ]
    yield measure.worst(
        f"experts on a GPU, bf16, forward and backward, of a dense product, worst of {len(every)} "
        "cases", every, BAR,
    )  # fmt: skip
    yield from details


def _pair(shape: Shape, each: int, skewed: bool, rounds: int) -> tuple[measure.Row, measure.Row]:
    what = f"{shape.name} experts on a GPU, bf16, {each} tokens each, "
    what += "by Zipf" if skewed else "even"
    if not torch.cuda.is_available():
        why = "no GPU here"
        return tuple(  # type: ignore[return-value]
            measure.untried(f"{what}, forward and backward, {peer}", "", why)
            for peer in ("of a dense product", "against transformers")
        )
    tokens = each * shape.experts // shape.top_k
    work = Work(Case(shape, "bf16", tokens, skewed, "cuda"))
    limit, peer = rows_of(work, what, min(rounds, ROUNDS), awaited, PATIENCE_S)
    del work
    gc.collect()
    torch.cuda.empty_cache()
    where = f"{gpu()}; {limit.hardware}"
    return replace(limit, hardware=where), replace(peer, hardware=where)


def gpu() -> str:
    """Return the GPU's name, memory and CUDA version."""
    facts = torch.cuda.get_device_properties(0)
    return f"{facts.name}, {facts.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"


def awaited(call: Callable[[], object]) -> Callable[[], None]:
    """Return `PASSES` calls one after another, and the wait for the last."""

    def done() -> None:
        for _ in range(PASSES):
            call()
        torch.cuda.synchronize()

    return done
