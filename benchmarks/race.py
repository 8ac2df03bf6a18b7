"""Race training steps against those of transformers, after both gave the same losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from benchmarks import measure
from benchmarks.on_ranks import Unlike
from benchmarks.training import TRANSFORMERS, Ours, dense_limit

STEPS = 3
TOLERANCE = 1e-4


class Peer(Protocol):
    """A contender that is compared with ours."""

    weight: float
    """Weight of the balance loss that it trains with."""

    def step(self) -> float:
        """Take one step; return its cross-entropy."""

    def balance(self) -> float:
        """Return the balance loss of the next batch, computed as ours."""


def race(
    ours: Ours, theirs: Mapping[str, Peer], rounds: int, *, same: int
) -> dict[str, measure.Row]:
    """Compare losses, then time steps in turn; return figures by name.

    `loss` is the largest difference of losses, `peer` the speed against the quickest mode, `dense`
    the share of the dense limit, `absolute` tokens/s.

    Args:
        ours: moesaic's run.
        theirs: modes of transformers, from the same weights.
        rounds: rounds to keep.
        same: steps whose losses must be the same.
    """
    job = ours.run.job
    batch, sequence = job.train.batch, job.data.sequence
    what = f"{job.model.family}, {batch} x {sequence} tokens"
    apart = max(differences(ours, theirs)[:same])
    first = "first step" if same == 1 else f"first {same} steps"
    contenders: dict[str, Callable[[], object]] = {
        "ours": ours.step, "dense": dense_limit(job),
        **{mode: one.step for mode, one in theirs.items()},
    }  # fmt: skip
    times = measure.interleave(contenders, rounds)
    threads, best = f"{torch.get_num_threads()} threads", min(theirs, key=times.median)
    ratio, interval = times.ratio(best, "ours")
    share, of_limit = times.ratio("dense", "ours")
    low, high = measure.bootstrap(times.seconds["ours"])
    tokens = batch * sequence
    return {
        "loss": measure.row(
            f"difference of the losses, {first}, {what}", apart, "nat", bar="",
            against=f"{TRANSFORMERS}, {' and '.join(theirs)}", repeats=same,
        ),
        "peer": measure.row(
            f"training tokens/s, {what}", ratio, "ratio", bar="", interval=interval,
            repeats=rounds, against=f"{TRANSFORMERS}, experts_implementation {best}, the quickest "
            f"of {len(theirs)} modes, same weights and batches, a process of its own, {threads}",
        ),
        "dense": measure.row(
            f"share of the dense limit, training, {what}", share, "ratio", bar="",
            interval=of_limit, repeats=rounds,
            against="limit: the step's matrix flops in torch.mm of 1024 x 1024",
        ),
        "absolute": measure.row(
            f"training tokens/s, {what}, absolute", tokens / times.median("ours"), "tokens/s",
            bar="", against=f"nothing; {threads}", interval=(tokens / high, tokens / low),
            repeats=rounds,
        ),
    }  # fmt: skip


def differences(ours: Ours, theirs: Mapping[str, Peer]) -> list[float]:
    """Return by step how far losses of contenders with the same weights are apart at most.

    Raise where those of the first step differ, the balance loss included.
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
                f"{ours.run.job.model.family}: losses of the first step differ from ours, "
                f"{facts.loss} and {facts.balance_loss}, by {found}"
            )
    return apart
