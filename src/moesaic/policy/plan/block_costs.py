"""Seconds of blocks on one rank that waits for no other rank; lower bounds are sums of them.

They need the blocks of one pipeline stage of a model with few layers. Equal blocks are built once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moesaic.facts.cluster import Cluster, Device, Place, device_at, place_ranks
from moesaic.facts.job import Job, ModelConfig
from moesaic.facts.plan import Plan
from moesaic.facts.workload import EXPERTS, RESULTS, TOKENS, Block
from moesaic.facts.workload.blocks import BlockBuilder
from moesaic.facts.workload.memory import logits_bytes
from moesaic.facts.workload.rank_params import RankParams
from moesaic.facts.workload.sizes import Sizes
from moesaic.policy.cost.event import AsyncMessage, Event
from moesaic.policy.cost.network import NetworkModel
from moesaic.policy.cost.pipeline import action_work
from moesaic.policy.cost.step import JobCosts
from moesaic.policy.plan.space import SCHEDULES, Candidate, Space

_LAYOUT = ("dispatch", "combine", "concat chunks", EXPERTS)
"""Ops that depend on the dispatch method and its chunks."""

Seconds = NDArray[np.float64]


class BlockCost(NamedTuple):
    """One block of a model on a rank of each kind in a stage."""

    passes: Mapping[str, Seconds]
    """Seconds of a micro-batch by kind of pass, as in `facts.plan.Action`, [ranks]."""
    least: Mapping[str, Seconds]
    """The same seconds if chunks of the dispatch are open, at least."""
    saved_bytes: int
    """Bytes that forward keeps of a micro-batch for backward."""

    def plus(self, other: BlockCost) -> BlockCost:
        """Return the cost of two blocks in sequence, such as attention and network of a layer."""
        return BlockCost(
            {kind: seconds + other.passes[kind] for kind, seconds in self.passes.items()},
            {kind: seconds + other.least[kind] for kind, seconds in self.least.items()},
            self.saved_bytes + other.saved_bytes,
        )


class StageCost(NamedTuple):
    """Blocks on the ranks of one pipeline rank."""

    blocks: Mapping[str, BlockCost]
    """Cost by block of the reduced model."""
    stream_bytes: int
    """Bytes of the input of a layer."""
    logits_bytes: int
    """Bytes of the logits that exist at one time."""


class BlockCosts:
    """Costs of the blocks of a job under the candidates of a space."""

    def __init__(self, space: Space, *, has_loads: bool = False) -> None:
        self._space, self._job, self._cluster = space, space.job, space.cluster
        self._has_loads = has_loads
        self.places = place_ranks(self._cluster, space.ranks)
        self._host_kinds = _host_kinds(self._cluster)
        self._networks: dict[tuple[Place, ...], NetworkModel] = {}
        self._stage_places: dict[int, list[tuple[Place, ...]]] = {}
        self._parts: dict[object, list[dict[str, BlockCost]]] = {}
        self._stages: dict[object, list[StageCost]] = {}
        self._bytes: dict[object, tuple[int, int]] = {}
        self._splits = "zero-bubble" in space.values("layout.schedule", SCHEDULES)
        self.devices = [device_at(self._cluster, place) for place in self.places]
        """Device by rank."""
        self.is_measured = any(map(_is_measured, self.devices))
        """True if a device has measured times of matmuls."""

    def stages(self, candidate: Candidate) -> list[StageCost]:
        """Return the costs of each kind of block by pipeline rank."""
        own = candidate
        work = own.micro_batches, own.recompute, own.pp, own.tp
        dispatch = own.etp, own.ep, own.dispatch, own.dispatch_hosts, own.chunks, own.overlap_local
        key = work, own.embedding, dispatch
        if key not in self._stages:
            parts = [
                self._part(candidate, ("embed", "head"), (work, own.embedding)),
                self._part(candidate, ("attention", "ffn"), (work, "dense")),
                self._part(candidate, ("moe",), (work, dispatch)),
            ]
            self._stages[key] = self._join(candidate, parts)
        return self._stages[key]

    def without_experts(self, candidate: Candidate) -> list[StageCost]:
        """Return the costs without blocks of experts, as `stages`."""
        own = candidate
        work = own.micro_batches, own.recompute, own.pp, own.tp
        key = work, own.embedding, None
        if key not in self._stages:
            parts = [
                self._part(candidate, ("embed", "head"), (work, own.embedding)),
                self._part(candidate, ("attention", "ffn"), (work, "dense")),
            ]
            self._stages[key] = self._join(candidate, parts)
        return self._stages[key]

    def _join(
        self, candidate: Candidate, parts: Sequence[list[dict[str, BlockCost]]]
    ) -> list[StageCost]:
        found, places = dict[tuple[Place, ...], StageCost](), self.stage_places(candidate.pp)
        for pp_rank, own_places in enumerate(places):
            if own_places not in found:
                blocks: dict[str, BlockCost] = {}
                for part in parts:
                    for name, one in part[pp_rank].items():
                        blocks[name] = blocks[name].plus(one) if name in blocks else one
                found[own_places] = StageCost(blocks, *self._sizes(candidate, own_places))
        return [found[one] for one in places]

    def _sizes(self, candidate: Candidate, places: tuple[Place, ...]) -> tuple[int, int]:
        """Return bytes of the input of a layer and of the logits, at least."""
        own = candidate
        key = own.micro_batches, own.pp, own.tp, places
        if key not in self._bytes:
            job, plan = self.reduced(candidate)
            costs = self.costs(job, plan, places)
            ranks = rank_of_each_kind(costs)
            sizes = [Sizes(job, plan, rank, on_cpu(costs, rank)) for rank in ranks]
            stream = min(one.stream_elements * one.stored_bytes for one in sizes)
            self._bytes[key] = stream, min(map(logits_bytes, sizes))
        return self._bytes[key]

    def _part(
        self, candidate: Candidate, kinds: Sequence[str], key: object
    ) -> list[dict[str, BlockCost]]:
        """Return the costs of some kinds of blocks by block and pipeline rank."""
        if key not in self._parts:
            job, plan = self.reduced(candidate)
            found = dict[tuple[Place, ...], dict[str, BlockCost]]()
            for own_places in self.stage_places(candidate.pp):
                if own_places not in found:
                    costs = self.costs(job, plan, own_places)
                    found[own_places] = self._make(costs, candidate, kinds)
            self._parts[key] = [found[one] for one in self.stage_places(candidate.pp)]
        return self._parts[key]

    def _make(
        self, costs: JobCosts, candidate: Candidate, kinds: Sequence[str]
    ) -> dict[str, BlockCost]:
        job, ranks = costs.job, rank_of_each_kind(costs)
        if candidate.pp > 1 and job.model.tied and "embed" in kinds:
            # The last pipeline rank adds up the gradients of a tied weight.
            untied = job.model.model_copy(update={"tied": False})
            whole = self._make_blocks(costs, job, ranks, candidate, ("head",))
            job = job.model_copy(update={"model": untied})
            return self._make_blocks(costs, job, ranks, candidate, ("embed",)) | whole
        return self._make_blocks(costs, job, ranks, candidate, kinds)

    def _make_blocks(
        self, costs: JobCosts, job: Job, ranks: Sequence[int], candidate: Candidate,
        kinds: Sequence[str],
    ) -> dict[str, BlockCost]:  # fmt: skip
        builders = [
            BlockBuilder(
                RankParams(job, costs.plan, rank, with_experts=False),
                Sizes(job, costs.plan, rank, on_cpu(costs, rank)), None,
            )
            for rank in ranks
        ]  # fmt: skip
        found, equal = dict[str, BlockCost](), dict[object, BlockCost]()
        for specs in zip(*(one.params.blocks for one in builders), strict=True):
            if specs[0].kind not in kinds:
                continue
            key = specs[0].kind, specs[0].inner_width
            if key not in equal:
                row = [one.build(spec) for one, spec in zip(builders, specs, strict=True)]
                equal[key] = self._block_cost(costs, row, ranks, candidate)
            name = specs[0].model_block
            found[name] = found[name].plus(equal[key]) if name in found else equal[key]
        return found

    def _block_cost(
        self, costs: JobCosts, row: Sequence[Block], ranks: Sequence[int], candidate: Candidate
    ) -> BlockCost:
        kinds = ["forward", "backward"]
        if candidate.pp > 1 and not candidate.recompute and self._splits:
            kinds += ["input", "weight"]
        passes, least = {}, {}
        for kind in kinds:
            each = []
            # Each rank is priced alone: ranks with more samples may run more operations.
            for block, rank in zip(row, ranks, strict=True):
                works = [action_work(block, kind, is_first_stage=False)]
                events = list(costs.block_events("forward", [block], works, [[rank]]))
                each.append(self._pass_seconds(events, rank))
            passes[kind], least[kind] = (np.array(one) for one in zip(*each, strict=True))
        return BlockCost(passes, least, min(one.saved_bytes for one in row))

    def _pass_seconds(self, events: Sequence[Event], rank: int) -> tuple[float, float]:
        """Return the seconds of a pass on a rank, and those with any chunks, at least."""
        total = exchanged = experts = routed = 0.0
        for event in events:
            seconds = float(event.seconds[rank])
            total += seconds
            if event.name in (TOKENS, RESULTS):
                exchanged += seconds
            elif not event.groups:
                experts += seconds * (event.name == EXPERTS)
                routed += seconds * (event.name in _LAYOUT)
        if self._has_loads:
            return (max(0.0, total - exchanged - routed),) * 2
        if self.is_measured:  # Measured matmuls of fewer tokens may be faster.
            least = max(0.0, total - exchanged - routed)
        else:
            least = total - min(exchanged, experts)
        return seconds_alone(events, rank), least

    def reduced(self, candidate: Candidate) -> tuple[Job, Plan]:
        """Return a job with one layer of each kind, and its plan on the ranks of one stage."""
        model, layout = self._job.model, self._job.layout
        small = model.model_copy(update={"layers": num_kinds(model)})
        ranks = self._space.ranks // candidate.pp
        plan = Plan(
            ranks=ranks, ep=candidate.ep, tp=candidate.tp, etp=candidate.etp,
            dp_shard=candidate.dp_shard, dispatch=candidate.dispatch,
            dispatch_hosts=candidate.dispatch_hosts if candidate.ep > 1 else 1,
            chunks=candidate.chunks if candidate.ep > 1 else 1,
            overlap_local=candidate.overlap_local and candidate.ep > 1,
            embedding="whole" if ranks == 1 or candidate.tp > 1 else candidate.embedding,
            experts=model.experts, recompute=candidate.recompute,
        )  # fmt: skip
        train = self._job.train.model_copy(
            update={"micro_batches": candidate.micro_batches, "recompute": candidate.recompute}
        )
        layout = layout.model_copy(update={"pp": 1})
        update = {"model": small, "train": train, "layout": layout}
        return self._job.model_copy(update=update), plan

    def stage_places(self, pp: int) -> list[tuple[Place, ...]]:
        """Return the places of each pipeline rank; those of the first of like ones for all."""
        if pp not in self._stage_places:
            size, first = len(self.places) // pp, dict[object, tuple[Place, ...]]()
            found = []
            for at in range(0, len(self.places), size):
                own = tuple(self.places[at : at + size])
                found.append(first.setdefault(self._stage_key(own), own))
            self._stage_places[pp] = found
        return self._stage_places[pp]

    def costs(self, job: Job, plan: Plan, places: Sequence[Place]) -> JobCosts:
        """Return the costs of a job on some places."""
        key = tuple(places)
        if key not in self._networks:
            self._networks[key] = NetworkModel(self._cluster, places)
        return JobCosts(plan, self._cluster, places, self._networks[key], job=job)

    def _stage_key(self, places: Sequence[Place]) -> object:
        """Return a key that is equal for stages on like hosts."""
        hosts: dict[str, int] = {}
        return tuple(
            (hosts.setdefault(one.host, len(hosts)), self._host_kinds[one.host], one.device)
            for one in places
        )


def seconds_alone(events: Sequence[Event], rank: int) -> float:
    """Return the seconds of events on a rank that waits for no other rank."""
    now, busy_s, end_s = 0.0, dict[str, float](), dict[AsyncMessage, float]()
    for event in events:
        seconds, begin = float(event.seconds[rank]), now
        if event.waits_for is not None:
            begin = max(begin, end_s[event.waits_for])
        if event.groups and seconds:
            begin = max([begin, *(busy_s.get(one, 0.0) for one in event.channels)])
        end = begin + seconds
        if event.launches is None:
            now = end
            continue
        end_s[event.launches] = end
        busy_s |= {one: max(busy_s.get(one, 0.0), end) for one in event.channels}
    return now


def rank_of_each_kind(costs: JobCosts) -> list[int]:
    """Return the last rank of each kind of device, which has the most samples of them."""
    return list({kind: rank for rank, kind in enumerate(costs.device_kinds())}.values())


def on_cpu(costs: JobCosts, rank: int) -> bool:
    """Return whether a rank computes on a CPU."""
    return costs.device(rank).kind == "cpu"


def num_kinds(model: ModelConfig) -> int:
    """Return the number of layers of a small model with a layer of each kind."""
    return min(model.layers, model.dense_layers + 1)


def block_kinds(model: ModelConfig) -> list[str]:
    """Return for each block of `model` the block of the small model that costs as much."""
    last = num_kinds(model) - 1
    layers = [f"layers.{min(layer, last)}" for layer in range(model.layers)]
    return ["embed", *layers, "head"]


def _is_measured(device: Device) -> bool:
    """Return whether matmuls have measured times, so that smaller ones may be faster."""
    return any(one.times is not None or one.grouped_times is not None for one in device.matmul)


def _host_kinds(cluster: Cluster) -> dict[str, int]:
    """Return a number for each host; hosts with a number in common have equal devices and links."""
    own = {host.name: host.model_copy(update={"name": "host"}) for host in cluster.hosts}
    uniform = (
        all(len(set(link.ends)) == 1 or link.ends == ["*", "*"] for link in cluster.links)
        and sum(link.ends == ["*", "*"] for link in cluster.links) <= 1
    )
    kinds: list[object] = []
    numbers = {}
    for name, host in own.items():
        inside = [
            link.model_dump(exclude={"ends"})
            for link in cluster.links_of_host[name]
            if link.ends == [name, name]
        ]
        key = (host, inside) if uniform else name
        if key not in kinds:
            kinds.append(key)
        numbers[name] = kinds.index(key)
    return numbers
