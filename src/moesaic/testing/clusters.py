"""Clusters of equal or unlike hosts for tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moesaic.facts.cluster import Cluster
from moesaic.facts.cluster.file import resolve_cluster

Facts = Mapping[str, Any]

BUS: Facts = {"kind": "bus", "latency_s": 1e-5, "bandwidth": 1e10}
NETWORK: Facts = {"kind": "ethernet", "latency_s": 5e-5, "bandwidth": 1e9}


def make_device(**changes: Any) -> dict[str, Any]:
    """Return the figures of devices of 1 TFlop/s in fp32 and 100 GB/s, with some changed."""
    speeds = [{"dtype": "fp32", "flops": 1e12}, {"dtype": "fp64", "flops": 5e11}]
    return {
        "kind": "gpu", "model": "one", "count": 1, "memory_bytes": 1e10,
        "memory_bandwidth": 1e11, "launch_s": 1e-6, "matmul": speeds, **changes,
    }  # fmt: skip


def make_cluster(*devices: Facts, bus: Facts = BUS, network: Facts = NETWORK) -> Cluster:
    """Return a cluster of hosts h0, h1, ..., one for each of `devices`.

    Args:
        devices: changed figures of the devices of each host.
        bus: changed figures of the links inside hosts.
        network: changed figures of the links between hosts.
    """
    hosts = [
        {
            "name": f"h{index}", "memory_bytes": 1e12, "link": {**BUS, **bus},
            "devices": [make_device(**changes)],
        }
        for index, changes in enumerate(devices)
    ]  # fmt: skip
    links = [{"ends": ["*", "*"], **NETWORK, **network}] * (len(devices) > 1)
    return resolve_cluster({"name": "test", "hosts": hosts, "links": links}, "test")
