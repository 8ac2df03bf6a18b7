"""Room in memories: the rank that holds most, and the one that its device has least room for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from numpy.typing import ArrayLike

from moesaic.facts.cluster import Cluster, Device, Place, device_at
from moesaic.facts.job import Job
from moesaic.facts.plan import Plan
from moesaic.facts.workload import Memory, memory
from moesaic.facts.workload.loads import Counts as Assigned
from moesaic.facts.workload.loads import expert_counts, slots_by_rank
from moesaic.facts.workload.parameters import rank_size
from moesaic.facts.workload.share import Share


class Held(NamedTuple):
    """What one rank holds, and the device that it holds it on."""

    rank: int
    needs: Memory
    device: Device

    @property
    def share(self) -> float:
        """Of the device's memory; above 1 it does not fit."""
        return self.needs.peak_bytes / self.device.memory_bytes


def tightest(
    job: Job,
    plan: Plan,
    cluster: Cluster,
    places: Sequence[Place],
    loads: Sequence[ArrayLike] | None = None,
) -> Held:
    """The rank that needs the largest share of its own device's memory; `loads` as `workload`'s."""
    alike: dict[tuple[str, float, bool], list[int]] = {}
    devices = [device_at(cluster, one) for one in places]
    for rank, device in enumerate(devices):
        at = (device.model, device.memory_bytes, device.kind == "cpu")
        alike.setdefault(at, []).append(rank)
    found = []
    for ranks in alike.values():
        device = devices[ranks[0]]
        most = fullest(job, plan, ranks, loads, on_cpu=device.kind == "cpu")
        found.append(Held(*most, device))
    return max(found, key=lambda held: held.share)


def fullest(
    job: Job,
    plan: Plan,
    ranks: Iterable[int] | None = None,
    loads: Sequence[ArrayLike] | None = None,
    *,
    on_cpu: bool = True,
) -> tuple[int, Memory]:
    """Of `ranks`, absent: of all, the one that holds most at one time, and what it holds."""
    size = job.train.batch // job.train.micro_batches
    counts, layers = list[Assigned](), range(0)
    if job.model.experts:
        layers = job.model.expert_layers
        if loads is None and not plan.homes_of_layers:
            layers = layers[:1]  # All are alike.
        by_layer: Sequence[ArrayLike | None] = [None] * len(layers) if loads is None else loads
        counts = [expert_counts(job, plan, load) for load in by_layer]
    slots = [slots_by_rank(rows, plan, layer) for rows, layer in zip(counts, layers, strict=True)]
    owned = _owned(job, plan)
    kinds: dict[tuple[object, ...], int] = {}
    for rank in ranks if ranks is not None else range(plan.ranks):
        arriving = [layer[rank] for layer in slots]
        rows = [sum(rows) for rows in arriving] if loads is None else map(tuple, arriving)
        # A checkpoint is shared out piece by piece, so that no two ranks stage alike.
        staging = rank if on_cpu and job.checkpoint.asynchronous else -1
        part, shard = plan.part(rank), plan.replica(rank) % plan.shard
        kind = (part, len(plan.rows(rank, size)), tuple(rows), owned[part][shard], staging)
        kinds.setdefault(kind, rank)
    given = counts if loads is not None else None
    found = [(rank, memory(job, plan, rank, given, on_cpu=on_cpu)) for rank in kinds.values()]
    return max(found, key=lambda one: one[1].peak_bytes)


def _owned(job: Job, plan: Plan) -> list[list[int]]:
    """Elements of dense parameters that lie on a rank, by part of the pipeline and by shard; slices
    of one have as many, and where nothing is shared out so have all ranks of a part."""
    if plan.shard == 1:
        return [[0]] * plan.pp
    found = []
    for part in range(plan.pp):
        dense = Share.of(job, plan, part * plan.span).dense
        times, one_of = Counter(p.shape for p in dense), {p.shape: p for p in dense}
        found.append(
            [
                sum(times[at] * rank_size(p, plan.shard, shard) for at, p in one_of.items())
                for shard in range(plan.shard)
            ]
        )
    return found
