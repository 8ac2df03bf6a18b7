"""The messages of the workload against those that ranks really send."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from layouts import SIGMOID
from torch import Tensor

from moesaic.dist.world import World
from moesaic.facts.job import Job
from moesaic.facts.plan import lay_out
from moesaic.facts.workload import Message, workload
from moesaic.models.initial import InitialSource
from moesaic.testing.jobs import RandomSamples, tiny_job
from moesaic.testing.ranks import Ranks
from moesaic.train.assemble import assemble

Sent = tuple[str, tuple[int, ...], int, tuple[int, ...], tuple[int, ...]]
"""Operation, ranks, bytes, bytes to each, bytes from each."""

LAYOUTS = [
    # ranks, ep, shard
    (2, 1, 1), (2, 2, 1), (2, 1, 2), (2, 2, 2), (4, 1, 1), (4, 2, 1), (4, 4, 1), (4, 1, 4),
    (4, 2, 2), (4, 4, 2), (4, 1, 2), (4, 4, 4),
]  # fmt: skip
JOBS: dict[str, dict[str, Any]] = {
    "plain": {},
    "odd": {"model": {"hidden": 30, "vocab": 53, "heads": 3, "kv_heads": 3, "tied": True}},
    "fp32, two micro-batches": {"train": {"precision": "fp32", "micro_batches": 2}},
    "bf16, recomputed": {"train": {"precision": "bf16", "recompute": True}},
    "dense": {"model": {"family": "llama", "experts": 0, "top_k": 0}},
    "dense, recomputed": {
        "model": {"family": "llama", "experts": 0, "top_k": 0, "tied": True},
        "train": {"recompute": True, "micro_batches": 2},
    },
    "layers that differ": SIGMOID,
    "layers that differ, recomputed": {
        **SIGMOID,
        "train": {"recompute": True, "micro_batches": 2},
    },
    "large": {"model": {"hidden": 256, "ffn": 512, "vocab": 2000, "experts": 16}},
}


dist_all_gather = dist.all_gather
"""Its second argument is one rank's part, where the others' is the whole."""


class Wire:
    """Wraps torch's collectives and keeps a line of each call."""

    def __init__(self) -> None:
        self.sent: list[Sent] = []

    def on(self) -> Any:
        """While this holds, calls are kept. FSDP calls the forms of one tensor."""
        return mock.patch.multiple(
            dist,
            all_reduce=self._around("all_reduce", dist.all_reduce, "tensor", 0),
            all_gather=self._around("all_gather", dist.all_gather, "tensor", 1),
            all_gather_single=self._around("all_gather", dist.all_gather_single, "output", 0),
            reduce_scatter_single=self._around(
                "reduce_scatter", dist.reduce_scatter_single, "input", 1
            ),
            all_to_all_single=self._exchange(),
        )

    def _around(self, operation: str, real: Any, name: str, at: int) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            tensor = kwargs[name] if name in kwargs else args[at]
            ranks = tuple(dist.get_process_group_ranks(kwargs["group"]))
            times = len(ranks) if real is dist_all_gather else 1
            self.sent.append((operation, ranks, times * tensor.nbytes, (), ()))
            return real(*args, **kwargs)

        return call

    def _exchange(self) -> Any:
        real = dist.all_to_all_single

        def call(
            output: Tensor, rows: Tensor, arriving: list[int], leaving: list[int], **kwargs: Any
        ) -> Any:
            ranks = tuple(dist.get_process_group_ranks(kwargs["group"]))
            row = rows.shape[1] * rows.itemsize
            to, back = ([n * row for n in counts] for counts in (leaving, arriving))
            self.sent.append(("all_to_all", ranks, rows.nbytes, tuple(to), tuple(back)))
            return real(output, rows, arriving, leaving, **kwargs)

        return call


def one_step(world: World, job: Job) -> tuple[list[Sent], list[Any]]:
    """What a rank sent in one step, and the loads of each micro-batch by layer."""
    plan = lay_out(job.layout, job.model, world.size)
    run = assemble(job, plan, world, InitialSource(job.seed, job.model.init_std))
    loads: list[Any] = []
    gradients = run._gradients

    def keep(*args: Any) -> Any:
        losses = gradients(*args)
        for one in losses:
            loads.append([one.context.layers[n].counts.tolist() for n in one.context.layers])
        return losses

    wire = Wire()
    with mock.patch.object(run, "_gradients", keep), wire.on():
        run.step(RandomSamples(job.model.vocab, job.data.sequence))
    run.close()
    return wire.sent, loads


def predicted(job: Job, size: int, rank: int, loads: list[Any]) -> list[Message]:
    plan = lay_out(job.layout, job.model, size)
    found: list[Message] = []
    for micro in loads:
        blocks = workload(job, plan, rank, micro or None)
        for block in blocks:
            found += [*block.forward.messages, *block.backward.messages]
    for block in blocks:
        found += block.update.messages
    return found


def as_sent(message: Message) -> Sent:
    m = message
    return (m.operation, m.ranks, m.num_bytes, m.send, m.receive)


@pytest.mark.parametrize(
    ("name", "size", "ep", "shard"),
    [
        (name, *layout)
        for at, name in enumerate(JOBS)
        for number, layout in enumerate(LAYOUTS)
        # The first job in every layout, every job in a third of them, each third another one.
        if not at or (number + at) % 3 == 0
    ],
)
def test_messages_are_those_that_are_sent(
    ranks: Ranks, name: str, size: int, ep: int, shard: int
) -> None:
    tables = JOBS[name]
    ep = ep if tables.get("model", {}).get("experts", 8) else 1
    job = tiny_job(**{**tables, "layout": {"ep": ep, "shard": shard}})
    results = ranks.run(size, one_step, job)
    everything: list[Message] = []
    for rank, (sent, loads) in enumerate(results):
        messages = predicted(job, size, rank, loads)
        assert Counter(map(as_sent, messages)) == Counter(sent), rank
        everything += messages
    exchanges = [m for m in everything if m.operation == "all_to_all"]
    assert bool(exchanges) == (ep > 1)
    assert sum(sum(m.send) for m in exchanges) == sum(sum(m.receive) for m in exchanges)


def test_large_gradients_travel_in_several_messages() -> None:
    job = tiny_job(model={"hidden": 2048, "heads": 16, "head_dim": 128, "ffn": 4096})
    blocks = workload(job, lay_out(job.layout, job.model, 2), 0)
    dense = [m.num_bytes for m in blocks[-1].update.messages if m.name == "dense"]
    assert len(dense) > 2
    assert all(size <= 32 << 20 for size in dense)
