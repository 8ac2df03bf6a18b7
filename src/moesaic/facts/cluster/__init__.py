"""The cluster: hosts, devices, disks and links to run on, in one TOML file."""

from moesaic.facts.cluster.calibration import Calibration
from moesaic.facts.cluster.cluster import (
    Cluster,
    Collective,
    Device,
    Disk,
    ElementwiseKernel,
    Host,
    Link,
    LinkProperties,
    Matmul,
)
from moesaic.facts.cluster.curves import AttentionTimes, Curve, Grid
from moesaic.facts.cluster.file import load_cluster, parse_cluster, replace_calibration
from moesaic.facts.cluster.places import (
    Hop,
    Place,
    device_at,
    device_models,
    intra_host_link,
    links_between,
    place_ranks,
    price_per_hour,
    route,
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
    "Hop",
    "Host",
    "Link",
    "LinkProperties",
    "Matmul",
    "Place",
    "device_at",
    "device_models",
    "intra_host_link",
    "links_between",
    "load_cluster",
    "parse_cluster",
    "place_ranks",
    "price_per_hour",
    "replace_calibration",
    "route",
    "unit_warnings",
]
