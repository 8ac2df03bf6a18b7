"""Memory of ranks: the rank with the highest peak, and the rank closest to its device's limit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from numpy.typing import ArrayLike

from moesaic.facts.cluster import Cluster, Device, Place, device_at
from moesaic.facts.job import Job
from moesaic.facts.plan import Plan
from moesaic.facts.workload import Memory, memory
from moesaic.facts.workload.loads import CountArray as Assigned
from moesaic.facts.workload.loads import expert_counts, received_tokens, slot_tokens
from moesaic.facts.workload.parameters import unpadded_local_size
from moesaic.facts.workload.rank_params import RankParams


class RankMemory(NamedTuple):
    """Memory of one rank and its device."""

    rank: int
    memory: Memory
    device: Device

    @property
    def used_fraction(self) -> float:
        """Peak as a fraction of the device's memory; above 1 the rank does not fit."""
        return self.memory.peak_bytes / self.device.memory_bytes


def tightest_rank(
    job: Job,
    plan: Plan,
    cluster: Cluster,
    places: Sequence[Place],
    loads: Sequence[ArrayLike] | None = None,
) -> RankMemory:
    """Return the rank with the largest fraction of its device's memory in use.

    `loads` is as in `workload`.
    """
    alike: dict[tuple[str, float, bool], list[int]] = {}
    devices = [device_at(cluster, one) for one in places]
    for rank, device in enumerate(devices):
        at = (device.model, device.memory_bytes, device.kind == "cpu")
        alike.setdefault(at, []).append(rank)
    candidates = []
    for ranks in alike.values():
        device = devices[ranks[0]]
        fullest = fullest_rank(job, plan, ranks, loads, on_cpu=device.kind == "cpu")
        candidates.append(RankMemory(*fullest, device))
    return max(candidates, key=lambda one: one.used_fraction)


def fullest_rank(
    job: Job,
    plan: Plan,
    ranks: Iterable[int] | None = None,
    loads: Sequence[ArrayLike] | None = None,
    *,
    on_cpu: bool = True,
) -> tuple[int, Memory]:
    """Return the rank with the highest peak and its memory, among `ranks` (None: all)."""
    size = job.train.batch // job.train.micro_batches
    counts, layers = list[Assigned](), range(0)
    if job.model.experts:
        layers = job.model.expert_layers
        if loads is None and not plan.expert_placement_by_layer:
            layers = layers[:1]  # All layers are equal.
        by_layer: Sequence[ArrayLike | None] = [None] * len(layers) if loads is None else loads
        counts = [expert_counts(job, plan, load) for load in by_layer]
    received: list[dict[int, Assigned]] = [{} for _ in counts]
    for group in plan.ep_groups():
        for by_rank, of_layer in zip(received, counts, strict=True):
            by_rank.update(dict.fromkeys(group, received_tokens(of_layer, plan, group)))
    owned = _dense_elements_by_shard(job, plan)
    kinds: dict[tuple[object, ...], int] = {}
    for rank in ranks if ranks is not None else range(plan.ranks):
        arriving = [
            slot_tokens(by_rank[rank], plan, layer, rank)
            for by_rank, layer in zip(received, layers, strict=True)
        ]
        rows = [sum(rows) for rows in arriving] if loads is None else map(tuple, arriving)
        # Checkpoint shards are assigned one by one, so no two ranks stage equally many bytes.
        staging = rank if on_cpu and job.checkpoint.asynchronous else -1
        pp_rank, shard = plan.pp_rank(rank), plan.dp_rank(rank) % plan.dp_shard
        kind = (
            pp_rank,
            len(plan.sample_range(rank, size)),
            tuple(rows),
            owned[pp_rank][shard],
            staging,
        )
        kinds.setdefault(kind, rank)
    known_counts = counts if loads is not None else None
    found = [
        (rank, memory(job, plan, rank, known_counts, on_cpu=on_cpu)) for rank in kinds.values()
    ]
    return max(found, key=lambda one: one[1].peak_bytes)


def _dense_elements_by_shard(job: Job, plan: Plan) -> list[list[int]]:
    """Return elements of dense parameters by pipeline rank and shard, [pp][dp_shard].

    All TP ranks of a shard have equally many. Without sharding, zeros stand for equal ranks.
    """
    if plan.dp_shard == 1:
        return [[0]] * plan.pp
    found = []
    for pp_rank in range(plan.pp):
        dense = RankParams.of_rank(job, plan, pp_rank * plan.ranks_per_stage).dense
        number, one_of = Counter(p.shape for p in dense), {p.shape: p for p in dense}
        found.append(
            [
                sum(
                    number[at] * unpadded_local_size(p, plan.dp_shard, shard)
                    for at, p in one_of.items()
                )
                for shard in range(plan.dp_shard)
            ]
        )
    return found
