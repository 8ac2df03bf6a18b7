"""What FSDP sends beside computing on GPUs: against plain cases, and against taking turns."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.facts.cluster import Cluster
from moesaic.facts.cluster.file import resolve
from moesaic.facts.plan import lay_out
from moesaic.policy.cost import ahead
from moesaic.policy.cost.event import Event
from moesaic.policy.cost.step import Costs
from moesaic.sim.timeline import run
from moesaic.testing.jobs import tiny_job


class InTurn(Costs):
    """One thing after another, as on a CPU."""

    hand_ahead = False


def cluster(kind: str = "gpu", bandwidth: float = 1e9, count: int = 8) -> Cluster:
    device = {
        "kind": kind, "model": "one", "count": count, "memory_bytes": 1e10,
        "memory_bandwidth": 1e11,
        "call_s": 1e-6, "matmul": [{"dtype": d, "flops": 1e12} for d in ("fp32", "fp64")],
    }  # fmt: skip
    link = {"kind": "bus", "latency_s": 1e-6, "bandwidth": bandwidth}
    host = {"name": "a", "memory_bytes": 1e12, "devices": [device], "link": link}
    return resolve({"name": "test", "hosts": [host]}, "test")


def layer(number: int, computes: float, speaks: float, *, back: bool = False) -> list[Event]:
    """What a layer does one way, the parameters of each coming together first."""
    group = [[0, 1]]

    def event(name: str, seconds: float, *, said: bool = False) -> Event:
        phase, block = "backward" if back else "forward", f"layers.{number}"
        return Event(name, phase, block, np.full(2, seconds), group if said else ())

    found = [event("unshard", 0.0), event("work", computes)]
    if back:
        found += [event("reshard", 0.0)]
    found += [event("parameters", speaks, said=True)]
    return [*found, event("gradients", speaks, said=True)] if back else found


@pytest.mark.parametrize("layers", [1, 2, 3, 7])
@pytest.mark.parametrize(("computes", "speaks"), [(1.0, 0.25), (0.25, 1.0), (1.0, 1.0)])
def test_the_longer_of_the_two_decides(layers: int, computes: float, speaks: float) -> None:
    """Forward all but the first message are hidden, or all but the last layer's work."""
    events = [event for n in range(layers) for event in layer(n, computes, speaks)]
    forward = run(ahead.forward(events), 2).step_s
    assert forward == speaks + computes + (layers - 1) * max(computes, speaks)


def test_backward_hides_two_messages_of_a_layer() -> None:
    """The first layer's parameters are waited for, and gradients of the last one."""
    events = [event for n in range(6) for event in layer(n, 1.0, 0.25, back=True)]
    assert run(ahead.backward(events), 2).step_s == 0.25 + 6 * 1.0 + 0.25
    slow = [event for n in range(6) for event in layer(n, 0.25, 1.0, back=True)]
    # Messages take turns, and all work is done beside one of another layer.
    assert run(ahead.backward(slow), 2).step_s == 12 * 1.0


def test_parameters_are_asked_for_in_time() -> None:
    job = tiny_job(layout={"ep": 2, "shard": 2}, model={"layers": 3})
    plan = lay_out(job.layout, job.model, 2)
    events = Costs.of(job, plan, cluster()).events()
    told = {"unshard", "parameters", "dispatch", "reshard", "gradients"}
    order = [
        f"{event.name} {event.block.removesuffix('.attention').removesuffix('.moe')}"
        for event in events
        if event.name in told and not (event.name == "dispatch" and event.phase == "backward")
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
    st.sampled_from([{"shard": 4}, {"shard": 2}, {"ep": 2, "shard": 2}, {"ep": 4, "shard": 4}]),
    st.integers(1, 3), st.booleans(), st.floats(1e5, 1e12),
)  # fmt: skip
def test_nothing_is_lost_and_nothing_is_gained_but_time(
    layout: dict[str, int], micro_batches: int, recompute: bool, bandwidth: float
) -> None:
    train = {"micro_batches": micro_batches, "batch": 24, "recompute": recompute}
    job = tiny_job(layout=layout, train=train)
    plan, where = lay_out(job.layout, job.model, 4), cluster(bandwidth=bandwidth)
    beside, turns = (kind.of(job, plan, where).events() for kind in (Costs, InTurn))
    assert any(event.beside for event in beside)
    assert not any(event.beside or event.awaits for event in turns)

    def work(events: list[Event]) -> Counter[tuple[str, str, str, bytes]]:
        return Counter(
            (event.name, event.phase, event.block, event.seconds.tobytes())
            for event in events
            if event.seconds.any()
        )

    assert work(beside) == work(turns)
    computing = sum(event.seconds.max() for event in turns if not event.groups)
    speaking = sum(event.seconds.max() for event in turns if event.groups)
    found = run(beside, 4).step_s
    assert max(computing, speaking) <= found * (1 + 1e-9)
    assert found <= run(turns, 4).step_s * (1 + 1e-9)


def test_ranks_on_a_cpu_take_turns() -> None:
    job = tiny_job(layout={"shard": 2})
    plan = lay_out(job.layout, job.model, 2)
    for kind, beside in (("cpu", False), ("gpu", True)):
        events = Costs.of(job, plan, cluster(kind, count=2)).events()
        assert any(event.beside or event.awaits for event in events) == beside
        needs = [at for at, event in enumerate(events) if event.name == "unshard"]
        turns = [(events[at - 1].name, events[at - 1].block == events[at].block) for at in needs]
        assert (set(turns) == {("parameters", True)}) == (not beside)


@pytest.mark.parametrize(
    ("finetune", "in_vain"),
    [
        ({"method": "full"}, []),
        ({"method": "lora"}, []),
        ({"method": "lora", "targets": ["experts"]}, ["layers.0.ffn"]),
    ],
)
def test_where_backward_ends_early_one_layer_more_is_asked_for(
    finetune: dict[str, Any], in_vain: list[str]
) -> None:
    """The first of three layers is dense; parameters of what has no backward nobody waits for."""
    job = tiny_job(
        layout={"shard": 2}, finetune=finetune, routing={"bias_step": 0.0},
        model={
            "family": "deepseek_v3", "kv_heads": 4, "layers": 3, "dense_layers": 1, "dense_ffn": 40,
            "latent": {"width": 10, "rotary": 4, "value": 6},
        },
    )  # fmt: skip
    plan = lay_out(job.layout, job.model, 2)
    events = Costs.of(job, plan, cluster(count=2)).events()
    awaited = {event.awaits for event in events}
    asked = [event for event in events if event.name == "parameters" and event.phase == "backward"]
    assert [event.block for event in asked if event.beside not in awaited] == in_vain
    assert len(asked) == 3
    assert run(events, 2).step_s > 0
