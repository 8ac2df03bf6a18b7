"""Predicted collectives against those that ranks call."""

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

from moesaic.dist.all_to_all import PairwiseAllToAll
from moesaic.dist.shm_all_to_all import SharedMemoryAllToAll
from moesaic.dist.world import World
from moesaic.facts.job import Job
from moesaic.facts.plan import Plan, plan_from_layout
from moesaic.facts.workload import CollectiveCall, parameters, workload
from moesaic.facts.workload.collectives import BUCKET_BYTES
from moesaic.facts.workload.gradient_reduction import OVERLAPPED_REDUCTIONS
from moesaic.models.init import InitialSource
from moesaic.testing.blocks import expert_load
from moesaic.testing.jobs import RandomSamples, tiny_job
from moesaic.testing.ranks import RankPool
from moesaic.testing.runs import start_run
from moesaic.train.assemble import assemble

Sent = tuple[str, tuple[int, ...], int, tuple[int, ...], tuple[int, ...]]
"""Operation, ranks, bytes, bytes to each rank, bytes from each rank."""

LAYOUTS = [
    # ranks, ep, dp_shard
    (2, 1, 1), (2, 2, 1), (2, 1, 2), (2, 2, 2), (4, 4, 1), (4, 2, 2), (4, 1, 2), (4, 4, 4),
]  # fmt: skip
DEDUP = {"dispatch": "dedup"}
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
    "dense and sparse layers": SIGMOID,
    "dense and sparse layers, recomputed": {
        **SIGMOID,
        "train": {"recompute": True, "micro_batches": 2},
    },
    "large": {"model": {"hidden": 256, "ffn": 512, "vocab": 2000, "experts": 16}},
    "dedup": {"layout": DEDUP},
    "dedup in bf16, recomputed": {
        "layout": DEDUP, "train": {"precision": "bf16", "recompute": True},
    },
    "hosts": {"layout": {**DEDUP, "dispatch_hosts": 2}, "routing": {"capacity_factor": 1.0}},
    "hosts, shared experts, recomputed": {
        **SIGMOID, "layout": {**DEDUP, "dispatch_hosts": 2}, "train": {"recompute": True},
    },
    "adapters": {"finetune": {"method": "lora", "rank": 4}},
    "adapters of experts, routers, recomputed": {
        "finetune": {"method": "lora", "rank": 3, "targets": ["experts"], "router": "train"},
        "train": {"recompute": True, "micro_batches": 2},
    },
    "adapters of the shared experts": {
        **SIGMOID, "finetune": {"method": "lora", "rank": 2, "targets": ["shared"]},
    },
    "dedup, adapters of experts, routers": {
        "layout": DEDUP,
        "finetune": {"method": "lora", "rank": 2, "targets": ["experts"], "router": "train"},
    },
    "hosts, adapters of the shared experts, routers": {
        **SIGMOID, "layout": {**DEDUP, "dispatch_hosts": 2},
        "finetune": {"method": "lora", "rank": 2, "targets": ["shared"], "router": "train"},
    },
    "frozen routers": {"finetune": {"method": "full"}},
}  # fmt: skip
SHARDED_LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, {"tp": 2}),
    (2, {"tp": 2, "ep": 2}),
    (4, {"tp": 2, "ep": 2}),
    (4, {"tp": 2, "ep": 4}),
    (4, {"tp": 2, "dp_shard": 2}),
    (4, {"tp": 2, "dp_shard": 2, "ep": 2}),
    (4, {"tp": 4}),
    (2, {"tp": 2, "etp": 2}),
    (4, {"tp": 2, "ep": 2, "etp": 2}),
    (4, {"tp": 4, "etp": 2}),
    (4, {"tp": 2, "etp": 2, "dp_shard": 2}),
    (2, {"pp": 2, "schedule": "gpipe"}),
    (2, {"pp": 2, "schedule": "zero-bubble"}),
    (4, {"pp": 2, "schedule": "interleaved", "ep": 2}),
    (4, {"pp": 2, "dp_shard": 2}),
    (4, {"pp": 2, "tp": 2}),
    (4, {"pp": 2, "tp": 2, "schedule": "zero-bubble"}),
    (4, {"pp": 2, "ep": 2, "schedule": "zero-bubble"}),
    (4, {"pp": 4, "schedule": "1f1b"}),
    (8, {"pp": 2, "tp": 2, "dp_shard": 2, "ep": 2, "schedule": "interleaved"}),
    (4, {"tp": 2, "ep": 2, **DEDUP}),
    (4, {"tp": 2, "ep": 2, "etp": 2, **DEDUP}),
    (4, {"tp": 2, "ep": 4, "dispatch_hosts": 2, **DEDUP}),
    (8, {"pp": 2, "ep": 4, "dispatch_hosts": 2, "schedule": "zero-bubble", **DEDUP}),
]  # fmt: skip
SHARDED_TABLES = {"model": {"vocab": 60, "kv_heads": 4, "layers": 4}, "train": {"micro_batches": 4}}
LATENT = SIGMOID["model"]["latent"]
SHARDED_JOBS: dict[str, dict[str, Any]] = {
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
    "deepseek_v3, no query rank": {
        "model": {**SIGMOID["model"], "latent": {**LATENT, "q_lora_rank": None}}
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
"""Its second argument is one rank's shard, unlike that of other collectives."""


class CollectiveRecorder:
    """Wrapper of torch collectives that records every call."""

    def __init__(self) -> None:
        self.sent: list[Sent] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record calls inside this context; FSDP uses the single-tensor variants."""
        by_pairs = mock.patch.object(PairwiseAllToAll, "start", self._exchange(PairwiseAllToAll))
        by_memory = mock.patch.object(
            SharedMemoryAllToAll, "start", self._exchange(SharedMemoryAllToAll)
        )
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

    def _exchange(self, kind: type[PairwiseAllToAll] | type[SharedMemoryAllToAll]) -> Any:
        real: Any = kind.start

        def call(
            transport: Any, rows: Tensor, send: list[int], receive: list[int], *into: Tensor | None
        ) -> Any:
            ranks = tuple(dist.get_process_group_ranks(transport.group))
            row = math.prod(rows.shape[1:]) * rows.itemsize
            to, back = ([n * row for n in counts] for counts in (send, receive))
            self.sent.append(("all_to_all", ranks, rows.nbytes, tuple(to), tuple(back)))
            return real(transport, rows, send, receive, *into)

        return call


Loads = list[dict[int, list[list[int]]]]
"""Expert loads of each micro-batch, by layer."""


Placements = dict[str, list[list[int]]]
"""Expert placements by layer."""


def plan_of(job: Job, size: int, placements: Placements | None) -> Plan:
    plan = plan_from_layout(job.layout, job.model, size)
    return plan.model_copy(update={"expert_placement_by_layer": placements or {}})


def one_step(
    world: World, job: Job, placements: Placements | None = None
) -> tuple[list[Sent], Loads]:
    """Return the collectives of one step on this rank, and the loads of its layers."""
    plan = plan_of(job, world.size, placements)
    run = assemble(job, plan, world, InitialSource(job.seed, job.model.init_std))
    loads: Loads = []
    gradients = run.walk.forward_backward

    def keep(*args: Any) -> Any:
        losses = gradients(*args)
        for one in losses:
            loads.append(
                {n: expert_load(report, plan, world.rank) for n, report in one.moe_reports.items()}
            )
        return losses

    recorder = CollectiveRecorder()
    with mock.patch.object(run.walk, "forward_backward", keep), recorder.recording():
        run.step(RandomSamples(job.model.vocab, job.data.sequence))
    run.close()
    return recorder.sent, loads


def predicted(
    job: Job, size: int, rank: int, loads: Loads, placements: Placements | None = None
) -> list[CollectiveCall]:
    plan = plan_of(job, size, placements)
    even = [1] * job.model.experts
    found: list[CollectiveCall] = []
    for micro in loads:
        all_loads = [micro.get(layer, even) for layer in job.model.expert_layers]
        blocks = workload(job, plan, rank, all_loads)
        for block in blocks:
            found += [*block.forward.collectives, *block.backward.collectives]
    for block in blocks:
        found += block.update.collectives
    return found


def check_collectives(
    job: Job, messages: list[CollectiveCall], sent: list[Sent], *, exact: bool = True
) -> None:
    """Compare predicted collectives with those that a rank called.

    Without `exact`, exchanges are compared by ranks: their number and total bytes. With dedup,
    bytes follow expected numbers of tokens, so only the number of exchanges is compared. In
    fine-tuning, the prediction may have more collectives, for gradients that the first layers do
    not need.
    """
    found = [(m.operation, m.ranks, m.num_bytes, m.send_bytes, m.receive_bytes) for m in messages]
    if exact and job.layout.dispatch != "dedup":
        predicted_calls, calls = Counter(found), Counter(sent)
    else:
        is_dedup = job.layout.dispatch == "dedup"
        predicted_calls, calls = (_without_sizes(some, is_dedup) for some in (found, sent))
    missing, unused = calls - predicted_calls, predicted_calls - calls
    assert not missing
    assert not unused or job.finetune is not None


def _without_sizes(messages: list[Sent], is_dedup: bool) -> Counter[Any]:
    """Return the collectives, with exchanges by ranks: their number, and total bytes unless
    deduplicated."""
    found: Counter[Any] = Counter()
    for operation, ranks, num_bytes, to, back in messages:
        if operation != "all_to_all":
            found[operation, ranks, num_bytes] += 1
            continue
        found[operation, ranks] += 1
        if not is_dedup:
            for number, size in enumerate((*to, *back)):
                found[operation, ranks, number, "bytes"] += size
    return found


@pytest.mark.parametrize(
    ("name", "size", "ep", "dp_shard"),
    [
        (name, *layout)
        for at, name in enumerate(JOBS)
        for number, layout in enumerate(LAYOUTS)
        # The first job in every layout, the others in one layout each.
        if (not at or (number + at) % 8 == 0) and "hosts" not in name
    ]
    + [(name, 4, 4, 2) for name in JOBS if "hosts" in name],
)
def test_collectives_match_the_prediction(
    ranks: RankPool, name: str, size: int, ep: int, dp_shard: int
) -> None:
    tables = JOBS[name]
    ep = ep if tables.get("model", {}).get("experts", 8) else 1
    layout = {**tables.get("layout", {}), "ep": ep, "dp_shard": dp_shard}
    job = tiny_job(**{**tables, "layout": layout})
    results = ranks.run(size, one_step, job)
    everything: list[CollectiveCall] = []
    for rank, (sent, loads) in enumerate(results):
        messages = predicted(job, size, rank, loads)
        check_collectives(job, messages, sent)
        everything += messages
    exchanges = [m for m in everything if m.operation == "all_to_all"]
    assert bool(exchanges) == (ep > 1)
    assert sum(sum(m.send_bytes) for m in exchanges) == sum(sum(m.receive_bytes) for m in exchanges)


@pytest.mark.parametrize(
    ("size", "layout"),
    [
        (2, {"ep": 2}), (4, {"ep": 4, "dispatch_hosts": 2, "dispatch": "all_to_all"}),
        (4, {"ep": 4, "dispatch": "dedup"}),
        (4, {"ep": 2, "tp": 2, "etp": 2, "overlap_local": True}),
    ],
)  # fmt: skip
def test_collectives_follow_the_placement_of_each_layer(
    ranks: RankPool, size: int, layout: dict[str, Any]
) -> None:
    job = tiny_job(model={"vocab": 64, "layers": 3, "ffn": 24}, layout=layout)
    placement = {2: [[5, 2, 7, 0], [1, 6, 4, 3]], 4: [[5, 2], [7, 0], [1, 6], [4, 3]]}[layout["ep"]]
    placements = {"1": placement, "2": placement[::-1]}
    for rank, (sent, loads) in enumerate(ranks.run(size, one_step, job, placements)):
        check_collectives(job, predicted(job, size, rank, loads, placements), sent)
        swapped = predicted(job, size, rank, loads, {"1": placement[::-1], "2": placement})
        if job.layout.dispatch != "dedup":
            with pytest.raises(AssertionError):
                check_collectives(job, swapped, sent)


DISPATCH_LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, {"ep": 2}), (4, {"ep": 2, "dp_shard": 2, **DEDUP}), (4, {"ep": 4, "dispatch_hosts": 2}),
    (4, {"ep": 4, "dispatch_hosts": 2, **DEDUP}),
    (2, {"ep": 2, "overlap_local": True, "chunks": 1}),
    (4, {"ep": 4, "dispatch_hosts": 2, "overlap_local": True}),
    (4, {"ep": 4, "dispatch_hosts": 2, "overlap_local": True, **DEDUP}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("size", "layout", "recompute", "tables"),
    sparing(
        [
            [*layout, recompute, tables]
            for tables in ({}, SIGMOID)
            for recompute in (False, True)
            for layout in DISPATCH_LAYOUTS
        ],
        3,
    ),
    ids=str,
)
def test_total_collectives_of_chunks_match_the_prediction(
    ranks: RankPool, size: int, layout: dict[str, Any], recompute: bool, tables: dict[str, Any]
) -> None:
    """Counts and total bytes match; the prediction does not split bytes among chunks."""
    layout = {"dispatch": "all_to_all", "chunks": 3, **layout}
    job = tiny_job(**{**tables, "layout": layout, "train": {"recompute": recompute}})
    for rank, (sent, loads) in enumerate(ranks.run(size, one_step, job)):
        check_collectives(job, predicted(job, size, rank, loads), sent, exact=False)


def sharded_job(name: str, layout: dict[str, Any]) -> Job:
    """Return a job that supports TP and PP."""
    given = SHARDED_JOBS[name]
    tables = {
        table: {**SHARDED_TABLES.get(table, {}), **given.get(table, {})}
        for table in {**SHARDED_TABLES, **given}
    }
    if SHARDED_JOBS[name].get("model", {}).get("experts") == 0:
        layout = {**layout, "ep": 1, "etp": 1, "dispatch_hosts": None}
    return tiny_job(**tables, layout=layout)


def possible(name: str, layout: dict[str, Any]) -> bool:
    """Return whether the job supports the layout."""
    recompute = SHARDED_JOBS[name].get("train", {}).get("recompute", False)
    return not (recompute and layout.get("schedule") == "zero-bubble")


@pytest.mark.parametrize(
    ("name", "size", "layout"),
    sparing(
        [
            [name, *layout]
            for name in SHARDED_JOBS
            for layout in SHARDED_LAYOUTS
            if possible(name, layout[1])
        ],
        23,
    ),
    ids=str,
)
def test_tp_and_pp_collectives_match_the_prediction(
    ranks: RankPool, name: str, size: int, layout: dict[str, Any]
) -> None:
    job = sharded_job(name, layout)
    results = ranks.run(size, one_step, job)
    for rank, (sent, loads) in enumerate(results):
        check_collectives(job, predicted(job, size, rank, loads), sent)


def overlapped_reductions(job: Job, size: int) -> list[tuple[str, str, int]]:
    blocks = workload(job, plan_from_layout(job.layout, job.model, size), 0)
    return [
        (block.name, m.name, m.num_bytes)
        for block in reversed(blocks)
        for m in block.update.collectives
        if m.name in OVERLAPPED_REDUCTIONS
    ]


COLUMNS = {"embedding": "columns"}
COLUMN_LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, COLUMNS),
    (4, {"ep": 4, **DEDUP, **COLUMNS}),
    (4, {"dp_shard": 2, **COLUMNS}),
    (4, {"pp": 2, "schedule": "zero-bubble", **COLUMNS}),
    (4, {"pp": 2, "schedule": "interleaved", "dp_shard": 2, **COLUMNS}),
    (8, {"pp": 2, "schedule": "1f1b", "dp_shard": 2, "ep": 2, **COLUMNS}),
]


@pytest.mark.parametrize(
    ("name", "size", "layout"),
    sparing(
        [
            [name, *layout]
            for at, name in enumerate(SHARDED_JOBS)
            for number, layout in enumerate(COLUMN_LAYOUTS)
            if not (number + at) % 3 and possible(name, layout[1])
        ],
        2,
    ),
    ids=str,
)
def test_sharded_embedding_collectives_match_the_prediction(
    ranks: RankPool, name: str, size: int, layout: dict[str, Any]
) -> None:
    """Lookups use all-to-alls; only a tied head adds a reduce-scatter of gradients."""
    job = sharded_job(name, layout)
    for rank, (sent, loads) in enumerate(ranks.run(size, one_step, job)):
        messages = predicted(job, size, rank, loads)
        check_collectives(job, messages, sent)
        is_trained = job.finetune is None
        exchanged = [m for m in messages if m.name == "embedding columns"]
        is_first_stage = rank < size // job.layout.pp
        assert len(exchanged) == is_first_stage * (1 + is_trained) * job.train.micro_batches
        assert "reduce-scatter tied embedding" not in {m.name for m in messages} or job.model.tied


def test_a_large_tied_embedding_is_gathered_in_several_collectives() -> None:
    job = tiny_job(model={"hidden": 4096, "vocab": 5000, "tied": True}, layout=COLUMNS)
    *_, head, _ = workload(job, plan_from_layout(job.layout, job.model, 2), 0)
    sizes = [m.num_bytes for m in head.forward.collectives if m.name == "gather tied embedding"]
    assert len(sizes) > 2
    assert sum(sizes) == 4096 * 5000 * 8
    assert all(size <= 32 << 20 for size in sizes)
    back = [
        m.num_bytes for m in head.backward.collectives if m.name == "reduce-scatter tied embedding"
    ]
    assert back == sizes


LARGE: dict[str, Any] = {
    "model": {"hidden": 768, "heads": 6, "head_dim": 128, "kv_heads": 6, "layers": 6, "vocab": 301},
    "train": {"precision": "fp32", "micro_batches": 2},
}  # fmt: skip
"""Two buckets of dense gradients, with padding between tensors."""


def phases_of(world: World, job: Job) -> list[tuple[str, Sent]]:
    """Return the collectives of one step on this rank, and their phases."""
    run = start_run(job, world)
    recorder, phases = CollectiveRecorder(), list[tuple[str, int]]()
    run.phase_hook = lambda phase: phases.append((phase, len(recorder.sent)))
    with recorder.recording():
        run.step(RandomSamples(job.model.vocab, job.data.sequence))
    run.close()
    found = []
    for (phase, first), (_, seen) in pairwise([*phases, ("", len(recorder.sent))]):
        found += [(phase, sent) for sent in recorder.sent[first:seen]]
    return found


@pytest.mark.parametrize(
    "more",
    [{"model": {**LARGE["model"], "tied": True}}, {"finetune": {"method": "full"}}],
    ids=["tied", "frozen routers"],
)
def test_reductions_start_in_backward_in_the_predicted_order(
    ranks: RankPool, more: dict[str, Any]
) -> None:
    job = tiny_job(**{**LARGE, **more})
    expected = [num_bytes for *_, num_bytes in overlapped_reductions(job, 2)]
    assert len(expected) == 3
    for sent in ranks.run(2, phases_of, job):
        reductions = [(phase, one) for phase, one in sent if phase in ("backward", "reduce")]
        assert [one[2] for _, one in reductions] == expected
        assert {phase for phase, _ in reductions} == {"backward"}


def test_one_reduction_per_bucket(ranks: RankPool) -> None:
    """Without expert parallelism, all other reductions are of a few numbers."""
    job = tiny_job(**LARGE)
    expected = [num_bytes for *_, num_bytes in overlapped_reductions(job, 2)]
    dense = [p.size * 4 for p in parameters(job.model) if p.is_dense]
    for sent in ranks.run(2, phases_of, job):
        reductions = [one for _, one in sent if one[0] == "all_reduce" and one[2] > 1024]
        assert [one[2] for one in reductions] == expected
        assert len(reductions) == -(-sum(dense) // BUCKET_BYTES) + 1 == 3
        assert len(dense) > 50
