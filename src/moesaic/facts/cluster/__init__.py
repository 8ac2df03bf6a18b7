"""The cluster: everything there is to run on, in one TOML file."""

from moesaic.facts.cluster.calibration import Calibration
from moesaic.facts.cluster.cluster import (
    Cluster,
    Collective,
    Device,
    Disk,
    Host,
    Link,
    Matmul,
    Passes,
    Wire,
)
from moesaic.facts.cluster.curves import Curve, Grid, Heads
from moesaic.facts.cluster.file import cluster_of, load_cluster, with_calibration
from moesaic.facts.cluster.places import (
    Hop,
    Place,
    device_at,
    device_models,
    doubtful,
    inside,
    path,
    place,
    price_per_hour,
    route,
)

__all__ = [
    "Calibration",
    "Cluster",
    "Collective",
    "Curve",
    "Device",
    "Disk",
    "Grid",
    "Heads",
    "Hop",
    "Host",
    "Link",
    "Matmul",
    "Passes",
    "Place",
    "Wire",
    "cluster_of",
    "device_at",
    "device_models",
    "doubtful",
    "inside",
    "load_cluster",
    "path",
    "place",
    "price_per_hour",
    "route",
    "with_calibration",
]
