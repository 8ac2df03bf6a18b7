"""Theme `families`: training speed of every family of experts against transformers.

Each is a small model of its family's shape: same weights, same batches, the same step. The peer
computes experts in the way that is quicker for it. families.md says what bounds the figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks import measure
from benchmarks.training import TRANSFORMERS, Ours, Theirs, dense_limit, olmoe
from moesaic.dist.world import World
from moesaic.facts.job import Job

BATCH, SEQUENCE = 8, 256
FIRST_STEPS = 3
TOLERANCE = 1e-4
MODES = ("eager", "grouped_mm")
"""Ways in which transformers computes experts on a CPU."""
SHAPES: dict[str, dict[str, Any]] = {
    "mixtral": {"experts": 8, "top_k": 2, "ffn": 1024, "renormalise": True},
    "olmoe": {"experts": 64, "top_k": 8, "ffn": 256},
    "qwen3_moe": {"experts": 64, "top_k": 8, "ffn": 192, "renormalise": True, "kv_heads": 2},
    "deepseek_v3": {
        "experts": 64, "top_k": 8, "ffn": 256, "renormalise": True, "kv_heads": 8, "shared": 1,
        "dense_layers": 1, "dense_ffn": 1536, "groups": 8, "top_groups": 4, "scale": 2.5,
        "head_dim": 96, "latent": {"width": 128, "queries": 192, "rotary": 32, "value": 64},
    },
}  # fmt: skip


def rows(rounds: int) -> Iterator[measure.Row]:
    """Every figure of the theme, as it comes."""
    for family in SHAPES:
        yield from training(family, rounds)


def job_of(family: str) -> Job:
    """Training of a small model of the family's shape; no router's bias moves, as in the peer."""
    model = olmoe(BATCH, SEQUENCE).model.model_dump(
        include={"vocab", "hidden", "layers", "heads", "kv_heads", "head_dim"}
    )
    routing = {"balance_loss": 0.0}
    if family == "deepseek_v3":
        routing["bias_step"] = 0.0
    return olmoe(
        BATCH, SEQUENCE, model={**model, "family": family, **SHAPES[family]}, routing=routing
    )


def training(family: str, rounds: int) -> Iterator[measure.Row]:
    """Tokens/s of one process against transformers at its best, and against the dense limit."""
    job, shape = job_of(family), f"{family}-shaped, {BATCH} x {SEQUENCE} tokens"
    ours = Ours(job, World.solo())
    peers = {mode: Theirs(ours, mode) for mode in MODES}
    apart = 0.0
    for _ in range(FIRST_STEPS):
        loss = ours.step()
        apart = max(apart, *(abs(loss - peer.step()) for peer in peers.values()))
    yield measure.row(
        f"difference of losses, first {FIRST_STEPS} steps, {shape}", apart, "nat",
        bar=f"<= {TOLERANCE}", against=f"{TRANSFORMERS}, both modes", repeats=FIRST_STEPS,
    )  # fmt: skip
    contenders: dict[str, Callable[[], object]] = {
        "ours": ours.step, "dense": dense_limit(job),
        **{mode: peer.step for mode, peer in peers.items()},
    }  # fmt: skip
    times = measure.interleave(contenders, rounds)
    best = min(MODES, key=times.median)
    ratio, interval = times.ratio(best, "ours")
    threads = f"{torch.get_num_threads()} threads"
    yield measure.row(
        f"training tokens/s, {shape}", ratio, "ratio", bar=">= 1.2", interval=interval,
        against=f"{TRANSFORMERS}, {best} experts, the better of {' and '.join(MODES)}, {threads}",
        repeats=rounds,
    )  # fmt: skip
    share, interval = times.ratio("dense", "ours")
    yield measure.row(
        f"share of the dense limit, training, {shape}", share, "ratio", bar="", interval=interval,
        against="limit: the step's matrix flops in torch.mm of 1024 x 1024 (ceiling 1.0)",
        repeats=rounds,
    )  # fmt: skip
    ours.run.close()
