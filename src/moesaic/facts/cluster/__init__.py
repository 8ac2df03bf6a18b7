"""The cluster: everything there is to run on, in one TOML file."""

from moesaic.facts.cluster.cluster import (
    Cluster,
    Collective,
    Device,
    Disk,
    Host,
    Link,
    Matmul,
)
from moesaic.facts.cluster.curves import Curve, Grid

__all__ = [
    "Cluster",
    "Collective",
    "Curve",
    "Device",
    "Disk",
    "Grid",
    "Host",
    "Link",
    "Matmul",
]
