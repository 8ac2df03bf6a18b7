"""The cluster: hosts, devices, disks and links to run on, in one TOML file."""

from moesaic.facts.cluster.cluster import (
    Calibration,
    Cluster,
    Collective,
    Device,
    Disk,
    ElementwiseKernel,
    Host,
    Link,
    LinkProperties,
    Matmul,
    describe_step,
)
from moesaic.facts.cluster.curves import AttentionTimes, Curve, Grid
from moesaic.facts.cluster.file import load_cluster
from moesaic.facts.cluster.places import (
    Place,
    device_at,
    device_models,
    inter_host_link,
    intra_host_link,
    place_ranks,
    price_per_hour,
    unit_warnings,
)

__all__ = [
    "AttentionTimes",
    "Calibration",
    "Cluster",
    "Collective",
    "Curve",
    "Device",
    "Disk",
    "ElementwiseKernel",
    "Grid",
    "Host",
    "Link",
    "LinkProperties",
    "Matmul",
    "Place",
    "describe_step",
    "device_at",
    "device_models",
    "inter_host_link",
    "intra_host_link",
    "load_cluster",
    "place_ranks",
    "price_per_hour",
    "unit_warnings",
]
