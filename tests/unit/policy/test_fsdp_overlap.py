"""FSDP overlap on GPUs: simple cases by hand, and a comparison with sequential execution."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from slow_timeline import simulate_events, unfold

from moesaic.facts.cluster import Cluster
from moesaic.facts.plan import plan_from_layout
from moesaic.policy.cost import fsdp_overlap
from moesaic.policy.cost.event import Event
from moesaic.policy.cost.step import JobCosts
from moesaic.testing.clusters import make_cluster
from moesaic.testing.jobs import tiny_job


class Sequential(JobCosts):
    """All events in sequence, as on a CPU."""

    has_async_devices = False


def cluster(kind: str = "gpu", bandwidth: float = 1e9, count: int = 8) -> Cluster:
    bus = {"latency_s": 1e-6, "bandwidth": bandwidth}
    return make_cluster({"kind": kind, "count": count}, bus=bus)


def layer(number: int, compute_s: float, collective_s: float, *, back: bool = False) -> list[Event]:
    """Return the events of one layer in one pass; its parameter all-gather comes first."""
    group = [[0, 1]]

    def event(name: str, seconds: float, *, is_collective: bool = False) -> Event:
        phase, block = "backward" if back else "forward", f"layers.{number}"
        return Event(name, phase, block, np.full(2, seconds), group if is_collective else ())

    found = [event("unshard", 0.0), event("work", compute_s)]
    if back:
        found += [event("reshard", 0.0)]
    found += [event("parameters", collective_s, is_collective=True)]
    return [*found, event("gradients", collective_s, is_collective=True)] if back else found


@pytest.mark.parametrize("layers", [1, 2, 3, 7])
@pytest.mark.parametrize(("compute_s", "collective_s"), [(1.0, 0.25), (0.25, 1.0), (1.0, 1.0)])
def test_forward_takes_the_longer_of_computing_and_collectives(
    layers: int, compute_s: float, collective_s: float
) -> None:
    """In forward, all but the first all-gather overlap, or all but the last layer's computing."""
    events = [event for n in range(layers) for event in layer(n, compute_s, collective_s)]
    forward = simulate_events(fsdp_overlap.overlap_forward(events), 2).step_s
    assert forward == collective_s + compute_s + (layers - 1) * max(compute_s, collective_s)


def test_backward_overlaps_both_collectives_of_a_layer() -> None:
    """The first all-gather and the last reduce-scatter are exposed."""
    events = [event for n in range(6) for event in layer(n, 1.0, 0.25, back=True)]
    assert simulate_events(fsdp_overlap.overlap_backward(events), 2).step_s == 0.25 + 6 * 1.0 + 0.25
    slow = [event for n in range(6) for event in layer(n, 0.25, 1.0, back=True)]
    # Collectives run in sequence, and all computing overlaps with one of another layer.
    assert simulate_events(fsdp_overlap.overlap_backward(slow), 2).step_s == 12 * 1.0


def test_all_gathers_are_prefetched_in_fsdp_order() -> None:
    job = tiny_job(layout={"ep": 2, "dp_shard": 2}, model={"layers": 3})
    plan = plan_from_layout(job.layout, job.model, 2)
    events = unfold(JobCosts.from_job(job, plan, cluster()).step())
    names = {"unshard", "parameters", "dispatch", "reshard", "gradients"}
    order = [
        f"{event.name} {event.block.removesuffix('.attention').removesuffix('.moe')}"
        for event in events
        if event.name in names and not (event.name == "dispatch" and event.phase == "backward")
    ]
    assert [one for at, one in enumerate(order) if one != order[at - 1]] == [
        "parameters embed", "parameters layers.0", "unshard embed", "unshard layers.0",
        "parameters layers.1", "dispatch layers.0", "unshard layers.1",
        "parameters layers.2", "dispatch layers.1", "unshard layers.2", "dispatch layers.2",
        "parameters layers.2", "unshard layers.2", "parameters layers.1",
        "reshard layers.2", "gradients layers.2",
        "unshard layers.1", "parameters layers.0", "reshard layers.1", "gradients layers.1",
        "unshard layers.0", "reshard layers.0", "gradients layers.0",
        "reshard embed", "gradients embed", "gradients step",
    ]  # fmt: skip


@given(
    st.sampled_from(
        [{"dp_shard": 4}, {"dp_shard": 2}, {"ep": 2, "dp_shard": 2}, {"ep": 4, "dp_shard": 4}]),
    st.integers(1, 3), st.booleans(), st.floats(1e5, 1e12),
)  # fmt: skip
def test_overlap_changes_only_the_time(
    layout: dict[str, int], micro_batches: int, recompute: bool, bandwidth: float
) -> None:
    train = {"micro_batches": micro_batches, "batch": 24, "recompute": recompute}
    job = tiny_job(layout=layout, train=train)
    plan, where = plan_from_layout(job.layout, job.model, 4), cluster(bandwidth=bandwidth)
    overlapped, sequential = (
        unfold(kind.from_job(job, plan, where).step()) for kind in (JobCosts, Sequential)
    )
    assert any(event.launches for event in overlapped)
    assert not any(event.launches or event.waits_for for event in sequential)

    def work(events: list[Event]) -> Counter[tuple[str, str, str, bytes]]:
        return Counter(
            (event.name, event.phase, event.block, event.seconds.tobytes())
            for event in events
            if event.seconds.any()
        )

    assert work(overlapped) == work(sequential)
    computing = sum(event.seconds.max() for event in sequential if not event.groups)
    communicating = sum(event.seconds.max() for event in sequential if event.groups)
    found = simulate_events(overlapped, 4).step_s
    assert max(computing, communicating) <= found * (1 + 1e-9)
    assert found <= simulate_events(sequential, 4).step_s * (1 + 1e-9)


def test_cpu_ranks_do_not_overlap() -> None:
    job = tiny_job(layout={"dp_shard": 2})
    plan = plan_from_layout(job.layout, job.model, 2)
    for kind, overlapped in (("cpu", False), ("gpu", True)):
        events = unfold(JobCosts.from_job(job, plan, cluster(kind, count=2)).step())
        assert any(event.launches or event.waits_for for event in events) == overlapped
        needs = [at for at, event in enumerate(events) if event.name == "unshard"]
        sequential = [
            (events[at - 1].name, events[at - 1].block == events[at].block) for at in needs
        ]
        assert (set(sequential) == {("parameters", True)}) == (not overlapped)
