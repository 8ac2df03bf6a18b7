"""The messages of the workload against those that ranks really send."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from layouts import SIGMOID, sparing
from torch import Tensor

from moesaic.dist.exchange import ByPairs
from moesaic.dist.shared import ByMemory
from moesaic.dist.world import World
from moesaic.facts.job import Job
from moesaic.facts.plan import Plan, lay_out
from moesaic.facts.workload import Message, parameters, workload
from moesaic.facts.workload.messages import BUCKET_BYTES
from moesaic.facts.workload.sums import GRADIENTS
from moesaic.models.initial import InitialSource
from moesaic.testing.blocks import load_of
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
VISITS = {"dispatch": "visits"}
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
    "visits": {"layout": VISITS},
    "visits in bf16, recomputed": {
        "layout": VISITS, "train": {"precision": "bf16", "recompute": True},
    },
    "hosts": {"layout": {**VISITS, "hosts": 2}, "routing": {"capacity": 1.0}},
    "hosts, shared experts, recomputed": {
        **SIGMOID, "layout": {**VISITS, "hosts": 2}, "train": {"recompute": True},
    },
    "adapters": {"finetune": {"method": "lora", "rank": 4}},
    "adapters of experts, routers, recomputed": {
        "finetune": {"method": "lora", "rank": 3, "targets": ["experts"], "router": "train"},
        "train": {"recompute": True, "micro_batches": 2},
    },
    "adapters of the shared experts": {
        **SIGMOID, "finetune": {"method": "lora", "rank": 2, "targets": ["shared"]},
    },
    "visits, adapters of experts, routers": {
        "layout": VISITS,
        "finetune": {"method": "lora", "rank": 2, "targets": ["experts"], "router": "train"},
    },
    "hosts, adapters of the shared experts, routers": {
        **SIGMOID, "layout": {**VISITS, "hosts": 2},
        "finetune": {"method": "lora", "rank": 2, "targets": ["shared"], "router": "train"},
    },
    "routers that do not learn": {"finetune": {"method": "full"}},
}  # fmt: skip
CUT_LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, {"tp": 2}),
    (2, {"tp": 2, "ep": 2}),
    (4, {"tp": 2, "ep": 2}),
    (4, {"tp": 2, "ep": 4}),
    (4, {"tp": 2, "shard": 2}),
    (4, {"tp": 2, "shard": 2, "ep": 2}),
    (4, {"tp": 4}),
    (2, {"tp": 2, "etp": 2}),
    (4, {"tp": 2, "ep": 2, "etp": 2}),
    (4, {"tp": 4, "etp": 2}),
    (4, {"tp": 2, "etp": 2, "shard": 2}),
    (2, {"pp": 2, "schedule": "gpipe"}),
    (2, {"pp": 2, "schedule": "zero-bubble"}),
    (4, {"pp": 2, "schedule": "interleaved", "ep": 2}),
    (4, {"pp": 2, "shard": 2}),
    (4, {"pp": 2, "tp": 2}),
    (4, {"pp": 2, "tp": 2, "schedule": "zero-bubble"}),
    (4, {"pp": 2, "ep": 2, "schedule": "zero-bubble"}),
    (4, {"pp": 4, "schedule": "1f1b"}),
    (8, {"pp": 2, "tp": 2, "shard": 2, "ep": 2, "schedule": "interleaved"}),
    (4, {"tp": 2, "ep": 2, **VISITS}),
    (4, {"tp": 2, "ep": 2, "etp": 2, **VISITS}),
    (4, {"tp": 2, "ep": 4, "hosts": 2, **VISITS}),
    (8, {"pp": 2, "ep": 4, "hosts": 2, "schedule": "zero-bubble", **VISITS}),
]  # fmt: skip
CUT = {"model": {"vocab": 60, "kv_heads": 4, "layers": 4}, "train": {"micro_batches": 4}}
LATENT = SIGMOID["model"]["latent"]
CUT_JOBS: dict[str, dict[str, Any]] = {
    "olmoe": {},
    "bf16, recomputed": {"train": {"precision": "bf16", "recompute": True}},
    "qwen3_moe, tied": {"model": {"family": "qwen3_moe", "renormalise": True, "tied": True}},
    "dense, tied": {"model": {"family": "llama", "experts": 0, "top_k": 0, "tied": True}},
    "dense, recomputed": {
        "model": {"family": "llama", "experts": 0, "top_k": 0},
        "train": {"recompute": True},
    },
    "deepseek_v3": SIGMOID,
    "deepseek_v3, bf16, recomputed": {
        **SIGMOID, "train": {"precision": "bf16", "recompute": True},
    },
    "deepseek_v3, queries from the stream": {
        "model": {**SIGMOID["model"], "latent": {**LATENT, "queries": None}}
    },
    "replicas without a sample": {"train": {"batch": 4}},
    "several chunks of logits": {"data": {"sequence": 600}, "model": {"hidden": 16}},
    "adapters": {"finetune": {"method": "lora", "rank": 4, "targets": ["attention"]}},
    "adapters, recomputed": {
        **SIGMOID, "train": {"recompute": True},
        "finetune": {"method": "lora", "rank": 4, "targets": ["attention", "ffn", "shared"]},
    },
}  # fmt: skip


dist_all_gather = dist.all_gather
"""Its second argument is one rank's part, where the others' is the whole."""


class Wire:
    """Wraps torch's collectives and keeps a line of each call."""

    def __init__(self) -> None:
        self.sent: list[Sent] = []

    @contextmanager
    def on(self) -> Iterator[None]:
        """While this holds, calls are kept. FSDP calls the forms of one tensor."""
        by_pairs = mock.patch.object(ByPairs, "start", self._exchange(ByPairs))
        by_memory = mock.patch.object(ByMemory, "start", self._exchange(ByMemory))
        collectives = mock.patch.multiple(
            dist,
            all_reduce=self._around("all_reduce", dist.all_reduce, "tensor", 0),
            all_gather=self._around("all_gather", dist.all_gather, "tensor", 1),
            all_gather_single=self._around("all_gather", dist.all_gather_single, "output", 0),
            reduce_scatter_single=self._around(
                "reduce_scatter", dist.reduce_scatter_single, "input", 1
            ),
        )
        with by_pairs, by_memory, collectives:
            yield

    def _around(self, operation: str, real: Any, name: str, at: int) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            tensor = kwargs[name] if name in kwargs else args[at]
            ranks = tuple(dist.get_process_group_ranks(kwargs["group"]))
            times = len(ranks) if real is dist_all_gather else 1
            self.sent.append((operation, ranks, times * tensor.nbytes, (), ()))
            return real(*args, **kwargs)

        return call

    def _exchange(self, kind: type[ByPairs] | type[ByMemory]) -> Any:
        real: Any = kind.start

        def call(
            carrier: Any, rows: Tensor, send: list[int], receive: list[int], *into: Tensor | None
        ) -> Any:
            ranks = tuple(dist.get_process_group_ranks(carrier.group))
            row = math.prod(rows.shape[1:]) * rows.itemsize
            to, back = ([n * row for n in counts] for counts in (send, receive))
            self.sent.append(("all_to_all", ranks, rows.nbytes, tuple(to), tuple(back)))
            return real(carrier, rows, send, receive, *into)

        return call


Loads = list[dict[int, list[list[int]]]]
"""Of each micro-batch, by layer."""


Homes = dict[str, list[list[int]]]
"""Of layers that have their own."""


def plan_of(job: Job, size: int, homes: Homes | None) -> Plan:
    plan = lay_out(job.layout, job.model, size)
    return plan.model_copy(update={"homes_of_layers": homes or {}})


def one_step(world: World, job: Job, homes: Homes | None = None) -> tuple[list[Sent], Loads]:
    """What a rank sent in one step, and the loads of its layers."""
    plan = plan_of(job, world.size, homes)
    run = assemble(job, plan, world, InitialSource(job.seed, job.model.init_std))
    loads: Loads = []
    gradients = run._gradients

    def keep(*args: Any) -> Any:
        losses = gradients(*args)
        for one in losses:
            loads.append({n: load_of(facts) for n, facts in one.context.layers.items()})
        return losses

    wire = Wire()
    with mock.patch.object(run, "_gradients", keep), wire.on():
        run.step(RandomSamples(job.model.vocab, job.data.sequence))
    run.close()
    return wire.sent, loads


def predicted(
    job: Job, size: int, rank: int, loads: Loads, homes: Homes | None = None
) -> list[Message]:
    plan = plan_of(job, size, homes)
    elsewhere = [1] * job.model.experts
    found: list[Message] = []
    for micro in loads:
        all_loads = [micro.get(layer, elsewhere) for layer in job.model.expert_layers]
        blocks = workload(job, plan, rank, all_loads)
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
        # The first job in every layout, every job in a sixth of them, each in others.
        if (not at or (number + at) % 6 == 0) and "hosts" not in name
    ]
    + [
        (name, *layout) for name in JOBS for layout in LAYOUTS if "hosts" in name and layout[1] == 4
    ],
)
def test_messages_are_those_that_are_sent(
    ranks: Ranks, name: str, size: int, ep: int, shard: int
) -> None:
    tables = JOBS[name]
    ep = ep if tables.get("model", {}).get("experts", 8) else 1
    layout = {**tables.get("layout", {}), "ep": ep, "shard": shard}
    job = tiny_job(**{**tables, "layout": layout})
    results = ranks.run(size, one_step, job)
    everything: list[Message] = []
    for rank, (sent, loads) in enumerate(results):
        messages = predicted(job, size, rank, loads)
        assert Counter(map(as_sent, messages)) == Counter(sent), rank
        everything += messages
    exchanges = [m for m in everything if m.operation == "all_to_all"]
    assert bool(exchanges) == (ep > 1)
    assert sum(sum(m.send) for m in exchanges) == sum(sum(m.receive) for m in exchanges)


@pytest.mark.parametrize(
    ("size", "layout"),
    [
        (2, {"ep": 2}), (4, {"ep": 4, "hosts": 2, "dispatch": "rows"}),
        (4, {"ep": 4, "dispatch": "visits"}),
        (4, {"ep": 2, "tp": 2, "etp": 2, "local": "first"}),
    ],
)  # fmt: skip
def test_messages_follow_the_homes_of_each_layer(
    ranks: Ranks, size: int, layout: dict[str, Any]
) -> None:
    job = tiny_job(model={"vocab": 64, "layers": 3, "ffn": 24}, layout=layout)
    shares = {2: [[5, 2, 7, 0], [1, 6, 4, 3]], 4: [[5, 2], [7, 0], [1, 6], [4, 3]]}[layout["ep"]]
    homes = {"1": shares, "2": shares[::-1]}
    for rank, (sent, loads) in enumerate(ranks.run(size, one_step, job, homes)):
        messages = predicted(job, size, rank, loads, homes)
        assert Counter(map(as_sent, messages)) == Counter(sent), rank
        elsewhere = predicted(job, size, rank, loads, {"1": shares[::-1], "2": shares})
        told = "dispatch" in layout and "hosts" not in layout  # Loads say who visits whom.
        assert (Counter(map(as_sent, elsewhere)) == Counter(sent)) == told, rank


TRAVELS: list[tuple[int, dict[str, Any]]] = [
    (2, {"ep": 2}), (4, {"ep": 2, "shard": 2, **VISITS}), (4, {"ep": 4, "hosts": 2}),
    (4, {"ep": 4, "hosts": 2, **VISITS}), (2, {"ep": 2, "local": "first", "chunks": 1}),
    (4, {"ep": 4, "hosts": 2, "local": "first"}),
    (4, {"ep": 4, "hosts": 2, "local": "first", **VISITS}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("size", "layout", "recompute", "tables"),
    sparing(
        [
            [*travel, again, tables]
            for tables in ({}, SIGMOID)
            for again in (False, True)
            for travel in TRAVELS
        ],
        3,
    ),
    ids=str,
)
def test_chunks_send_what_is_predicted_between_them(
    ranks: Ranks, size: int, layout: dict[str, Any], recompute: bool, tables: dict[str, Any]
) -> None:
    """As many messages, and of all those of an exchange as many bytes: which chunk has how many
    tokens of an expert is not said."""
    layout = {"dispatch": "rows", "chunks": 3, **layout}
    job = tiny_job(**{**tables, "layout": layout, "train": {"recompute": recompute}})
    for rank, (sent, loads) in enumerate(ranks.run(size, one_step, job)):
        found = [as_sent(message) for message in predicted(job, size, rank, loads)]
        assert _by_exchange(found) == _by_exchange(sent), rank


def _by_exchange(
    messages: list[Sent],
) -> tuple[Counter[Sent], dict[tuple[int, ...], tuple[int, list[int]]]]:
    """What is no exchange; and by the ranks of one how many there are, and bytes to and from each
    of them."""
    others: Counter[Sent] = Counter()
    sums: dict[tuple[int, ...], tuple[int, list[int]]] = {}
    for message in messages:
        operation, ranks, _, to, back = message
        if operation != "all_to_all":
            others[message] += 1
            continue
        count, numbers = sums.get(ranks, (0, [0] * (2 * len(ranks))))
        sums[ranks] = count + 1, [a + b for a, b in zip(numbers, (*to, *back), strict=True)]
    return others, sums


def cut_job(name: str, layout: dict[str, Any]) -> Job:
    """A job that can be cut into slices and stages."""
    given = CUT_JOBS[name]
    tables = {table: {**CUT.get(table, {}), **given.get(table, {})} for table in {**CUT, **given}}
    if CUT_JOBS[name].get("model", {}).get("experts") == 0:
        layout = {**layout, "ep": 1, "etp": 1, "hosts": None}
    return tiny_job(**tables, layout=layout)


def possible(name: str, layout: dict[str, Any]) -> bool:
    """Whether there is such a layout of the job."""
    again = CUT_JOBS[name].get("train", {}).get("recompute", False)
    return not (again and layout.get("schedule") == "zero-bubble")


@pytest.mark.parametrize(
    ("name", "size", "layout"),
    sparing(
        [
            [name, *layout]
            for name in CUT_JOBS
            for layout in CUT_LAYOUTS
            if possible(name, layout[1])
        ],
        23,
    ),
    ids=str,
)
def test_slices_and_parts_send_what_is_predicted(
    ranks: Ranks, name: str, size: int, layout: dict[str, Any]
) -> None:
    job = cut_job(name, layout)
    results = ranks.run(size, one_step, job)
    for rank, (sent, loads) in enumerate(results):
        messages = Counter(map(as_sent, predicted(job, size, rank, loads)))
        assert messages == Counter(sent), rank


def messages_of_sums(job: Job, size: int) -> list[tuple[str, str, int]]:
    blocks = workload(job, lay_out(job.layout, job.model, size), 0)
    return [
        (block.name, m.name, m.num_bytes)
        for block in reversed(blocks)
        for m in block.update.messages
        if m.name in GRADIENTS
    ]


COLUMNS = {"embedding": "columns"}
COLUMN_LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, COLUMNS),
    (4, {"ep": 4, **VISITS, **COLUMNS}),
    (4, {"shard": 2, **COLUMNS}),
    (4, {"pp": 2, "schedule": "zero-bubble", **COLUMNS}),
    (4, {"pp": 2, "schedule": "interleaved", "shard": 2, **COLUMNS}),
    (8, {"pp": 2, "schedule": "1f1b", "shard": 2, "ep": 2, **COLUMNS}),
]


@pytest.mark.parametrize(
    ("name", "size", "layout"),
    sparing(
        [
            [name, *layout]
            for at, name in enumerate(CUT_JOBS)
            for number, layout in enumerate(COLUMN_LAYOUTS)
            # Tied heads and ranks without a token in all of them, others in a third.
            if (not (number + at) % 3 or "tied" in name or "without" in name)
            and possible(name, layout[1])
        ],
        3,
    ),
    ids=str,
)
def test_columns_of_the_embedding_send_what_is_predicted(
    ranks: Ranks, name: str, size: int, layout: dict[str, Any]
) -> None:
    """Of lookups what goes to whom; of the table's gradient nothing but a tied head's share."""
    job = cut_job(name, layout)
    for rank, (sent, loads) in enumerate(ranks.run(size, one_step, job)):
        messages = predicted(job, size, rank, loads)
        assert Counter(map(as_sent, messages)) == Counter(sent), rank
        learns = job.finetune is None
        exchanged = [m for m in messages if m.name == "columns"]
        here = rank < size // job.layout.pp
        assert len(exchanged) == here * (1 + learns) * job.train.micro_batches
        assert "sum columns" not in {m.name for m in messages} or job.model.tied


def test_a_wide_table_comes_together_in_several_messages() -> None:
    job = tiny_job(model={"hidden": 4096, "vocab": 5000, "tied": True}, layout=COLUMNS)
    *_, head, _ = workload(job, lay_out(job.layout, job.model, 2), 0)
    sizes = [m.num_bytes for m in head.forward.messages if m.name == "join columns"]
    assert len(sizes) > 2
    assert sum(sizes) == 4096 * 5000 * 8
    assert all(size <= 32 << 20 for size in sizes)
    back = [m.num_bytes for m in head.backward.messages if m.name == "sum columns"]
    assert back == sizes


def test_large_gradients_travel_in_several_messages() -> None:
    job = tiny_job(model={"hidden": 2048, "heads": 16, "head_dim": 128, "ffn": 4096})
    dense = [num_bytes for _, name, num_bytes in messages_of_sums(job, 2) if name == "dense"]
    assert len(dense) > 2
    assert all(size <= 32 << 20 for size in dense)


LARGE: dict[str, Any] = {
    "model": {"hidden": 768, "heads": 6, "head_dim": 128, "kv_heads": 6, "layers": 6, "vocab": 301},
    "train": {"precision": "fp32", "micro_batches": 2},
}  # fmt: skip
"""Two buckets of dense gradients; tensors that do not end where others may begin."""


def phases_of(world: World, job: Job) -> list[tuple[str, Sent]]:
    """What a rank sent in one step, and in which phase."""
    plan = lay_out(job.layout, job.model, world.size)
    run = assemble(job, plan, world, InitialSource(job.seed, job.model.init_std))
    wire, phases = Wire(), list[tuple[str, int]]()
    run.hook = lambda phase: phases.append((phase, len(wire.sent)))
    with wire.on():
        run.step(RandomSamples(job.model.vocab, job.data.sequence))
    run.close()
    found = []
    for (phase, first), (_, seen) in pairwise([*phases, ("", len(wire.sent))]):
        found += [(phase, sent) for sent in wire.sent[first:seen]]
    return found


@pytest.mark.parametrize(
    "more",
    [{}, {"model": {**LARGE["model"], "tied": True}}, {"finetune": {"method": "full"}}],
    ids=["plain", "tied", "routers that do not learn"],
)
def test_sums_leave_under_backward_in_the_order_that_is_predicted(
    ranks: Ranks, more: dict[str, Any]
) -> None:
    job = tiny_job(**{**LARGE, **more})
    expected = [num_bytes for *_, num_bytes in messages_of_sums(job, 2)]
    assert len(expected) == 3
    for sent in ranks.run(2, phases_of, job):
        sums = [(phase, one) for phase, one in sent if phase in ("backward", "reduce")]
        assert [one[2] for _, one in sums] == expected
        assert {phase for phase, _ in sums} == {"backward"}


def test_the_number_of_sums_is_that_of_buckets(ranks: Ranks) -> None:
    """Not that of parameters: where nothing travels to experts, all else is four numbers."""
    job = tiny_job(**LARGE)
    dense = [p.size * 4 for p in parameters(job.model) if p.is_dense]
    for sent in ranks.run(2, phases_of, job):
        sums = [one for _, one in sent if one[0] == "all_reduce" and one[2] > 64]
        assert len(sums) == -(-sum(dense) // BUCKET_BYTES) + 1 == 3
        assert len(dense) > 50
