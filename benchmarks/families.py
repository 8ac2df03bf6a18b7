"""Theme `families`: training by family against transformers, pipelines by schedule, conversion.

`rows` takes every figure of the theme; families.md says what bounds them. Pipelines are measured in
`bubble`, conversion in `conversion`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from typing import Any, Protocol

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from benchmarks import bubble, conversion, measure
from benchmarks.apart import Apart
from benchmarks.training import TRANSFORMERS, VOCAB, Ours, olmoe
from moesaic.dist.world import World
from moesaic.facts.job import Job

BATCH, SEQUENCE = 8, 256
STEPS = 3
TOLERANCE = 1e-4
BAR = ">= 1.2"
"""For the quickest mode of transformers."""
BALANCE = 0.01
CONVERSIONS = 5

LEFT_OUT = {
    "batched_mm": "copies the matrices of its experts for every token, more than there is memory",
    "deepgemm": "needs a GPU",
    "sonicmoe": "needs a GPU",
}
"""Ways of transformers to multiply experts that cannot run here, and why."""

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
        "renormalise": True, "dense_layers": 1, "dense_ffn": 640, "shared": 1, "groups": 8,
        "top_groups": 4, "scale": 2.5,
        "latent": {"width": 64, "queries": 128, "rotary": 32, "value": 64},
    },
}  # fmt: skip


class Peer(Protocol):
    """What is compared with ours."""

    weight: float
    """Of the balance loss that it trains with."""

    def step(self) -> float:
        """One step; its cross-entropy."""

    def balance(self) -> float:
        """The balance loss of the next batch, as ours has it."""


class Unlike(Exception):
    """Two contenders do not compute the same, so that no time of theirs says anything."""


def rows(rounds: int) -> Iterator[measure.Row]:
    """Every figure of the theme, as it comes."""
    yield from all_training(rounds)
    yield from bubble.rows(rounds)
    yield from conversions(rounds)


def conversions(rounds: int) -> Iterator[measure.Row]:
    """Every conversion, a few times."""
    yield from conversion.rows(min(rounds, CONVERSIONS))


def all_training(rounds: int) -> Iterator[measure.Row]:
    """Training of every family."""
    for family in SHAPES:
        yield from training(family, rounds)


PARTS = {"training": all_training, "bubbles": bubble.rows, "conversion": conversions}


def job_of(family: str, batch: int = BATCH, sequence: int = SEQUENCE, **sizes: Any) -> Job:
    """A small job of a family's shape, with the balance loss that transformers has for it."""
    model = {
        "family": family, "vocab": VOCAB, "hidden": 256, "layers": 4, **SHAPES[family], **sizes,
    }  # fmt: skip
    # Biases that follow loads would part from transformers, who let them be.
    routing = {"balance_loss": BALANCE}
    if family == "deepseek_v3":
        routing = {"balance_loss": 0.0, "bias_step": 0.0}
    return olmoe(batch, sequence, model=model, routing=routing)


def modes() -> list[str]:
    """The ways of transformers to multiply experts that can run here."""
    return ["eager", *sorted(set(ALL_EXPERTS_FUNCTIONS.keys()) - LEFT_OUT.keys())]


def training(family: str, rounds: int, bar: str = BAR) -> Iterator[measure.Row]:
    """Tokens/s against every mode of transformers; the bar is for the quickest of them."""
    with ExitStack() as stack:
        ours = Ours(job_of(family), World.solo())
        stack.enter_context(closing(ours.run))
        theirs = {mode: stack.enter_context(closing(Apart(ours, mode))) for mode in modes()}
        yield from race(ours, theirs, rounds, bar)


def race(
    ours: Ours, theirs: Mapping[str, Peer], rounds: int, bar: str = BAR
) -> Iterator[measure.Row]:
    """Ours and theirs, which begin with the same weights, in turn."""
    family = ours.run.job.model.family
    first, *later = differences(ours, theirs)
    what = f"{family}, {BATCH} x {SEQUENCE} tokens"
    peer = f"{TRANSFORMERS}, {' and '.join(theirs)}"
    yield measure.row(
        f"difference of the losses, first step, {what}", first, "nat", bar=f"<= {TOLERANCE}",
        against=f"{peer}, balance loss included", repeats=1,
    )  # fmt: skip
    yield measure.row(
        f"difference of the losses, next {len(later)} steps, {what}", max(later), "nat", bar="",
        against=f"{peer}, whose balance loss takes the tokens of all layers together",
        repeats=len(later),
    )  # fmt: skip
    contenders: dict[str, Callable[[], object]] = {
        "ours": ours.step, **{mode: one.step for mode, one in theirs.items()}
    }  # fmt: skip
    times = measure.interleave(contenders, rounds)
    threads = f"{torch.get_num_threads()} threads"
    for place, mode in enumerate(sorted(theirs, key=times.median)):
        ratio, interval = times.ratio(mode, "ours")
        which = "another of its modes" if place else f"the quickest of {len(theirs)} modes"
        yield measure.row(
            f"training tokens/s, {what}" + f", {mode}" * bool(place), ratio, "ratio",
            bar="" if place else bar, interval=interval, repeats=rounds,
            against=f"{TRANSFORMERS}, experts_implementation {mode}, {which}, same weights and "
            f"batches, a process of its own, {threads}",
        )  # fmt: skip
    tokens = BATCH * SEQUENCE
    low, high = measure.bootstrap(times.seconds["ours"])
    yield measure.row(
        f"training tokens/s, {what}, absolute", tokens / times.median("ours"), "tokens/s", bar="",
        against=f"nothing; {threads}", interval=(tokens / high, tokens / low), repeats=rounds,
    )  # fmt: skip


def differences(ours: Ours, theirs: Mapping[str, Peer]) -> list[float]:
    """By step, how far losses of contenders with the same weights are apart at most.

    An error where those of the first step are not the same, the balance loss among them.
    """
    balances = {mode: one.balance() for mode, one in theirs.items() if one.weight}
    apart = []
    for step in range(STEPS):
        facts = ours.run.step(ours.samples)
        found = {mode: abs(one.step() - facts.loss) for mode, one in theirs.items()}
        if step == 0:
            for mode, balance in balances.items():
                found[mode] = max(found[mode], abs(balance - facts.balance_loss))
        apart.append(max(found.values()))
        if apart[0] > TOLERANCE:
            raise Unlike(
                f"{ours.run.job.model.family}: losses of the first step are as far as these from "
                f"those of ours, {facts.loss} and {facts.balance_loss}: {found}"
            )
    return apart
