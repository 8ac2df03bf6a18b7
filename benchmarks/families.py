"""Theme `families`: training by family against transformers, and conversion against a copy.

families.md says what bounds the figures.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from benchmarks import conversion, measure
from benchmarks.race import TOLERANCE, Apart, race
from benchmarks.training import VOCAB, Ours, olmoe
from moesaic.dist.world import World
from moesaic.facts.job import Job

BATCH, SEQUENCE = 8, 256
BAR = ">= 1.2"
BALANCE = 0.01

LEFT_OUT = {
    "batched_mm": "copies the weights of its experts for every token, more than there is memory",
    "deepgemm": "needs a GPU",
    "sonicmoe": "needs a GPU",
}
"""Modes of transformers that cannot run here, and why."""

# Published models made narrow: experts, top-k and the shapes of heads and networks are theirs.
SHAPES: dict[str, dict[str, Any]] = {
    "mixtral": {
        "heads": 4, "kv_heads": 1, "head_dim": 64, "ffn": 896, "experts": 8, "top_k": 2,
        "renormalise": True,
    },
    "olmoe": {
        "heads": 4, "kv_heads": 4, "head_dim": 64, "ffn": 128, "experts": 64, "top_k": 8,
    },
    "qwen3_moe": {
        "heads": 8, "kv_heads": 1, "head_dim": 64, "ffn": 96, "experts": 128, "top_k": 8,
        "renormalise": True,
    },
    "deepseek_v3": {
        "heads": 4, "kv_heads": 4, "head_dim": 96, "ffn": 96, "experts": 64, "top_k": 8,
        "renormalise": True, "dense_layers": 1, "dense_ffn": 640, "shared_experts": 1,
        "expert_groups": 8,
        "top_expert_groups": 4, "routed_scaling_factor": 2.5,
        "latent": {
            "kv_lora_rank": 64, "q_lora_rank": 128, "qk_rope_head_dim": 32, "v_head_dim": 64,
        },
    },
}  # fmt: skip


def job_of(family: str, batch: int = BATCH, sequence: int = SEQUENCE, **sizes: Any) -> Job:
    """Return a small job of a family's shape, with the balance loss that transformers has."""
    model = {
        "family": family, "vocab": VOCAB, "hidden": 256, "layers": 4, **SHAPES[family], **sizes,
    }  # fmt: skip
    # transformers does not update biases by load.
    routing = {"balance_loss": BALANCE}
    if family == "deepseek_v3":
        routing = {"balance_loss": 0.0, "bias_update_rate": 0.0}
    return olmoe(batch, sequence, model=model, routing=routing)


def modes() -> list[str]:
    """Return the modes of transformers that can run here."""
    return ["eager", *sorted(set(ALL_EXPERTS_FUNCTIONS.keys()) - LEFT_OUT.keys())]


def training(rounds: int) -> Iterator[measure.Row]:
    """Race every family against every mode of transformers; the bar is for the quickest mode."""
    losses = list[measure.Row]()
    for family in SHAPES:
        with ExitStack() as stack:
            ours = Ours(job_of(family), World.solo())
            stack.enter_context(closing(ours.run))
            theirs = {mode: stack.enter_context(closing(Apart(ours, mode))) for mode in modes()}
            # From the second step on, transformers' balance loss differs: families.md.
            loss, speed = race(ours, theirs, rounds, same=1)
        losses.append(loss)
        yield measure.worst(speed.name, [speed], BAR)
    title = f"difference of the losses, first step, worst of {len(SHAPES)} families"
    yield measure.worst(title, losses, f"<= {TOLERANCE}")


PARTS = {"training": training, "conversion": conversion.rows}
